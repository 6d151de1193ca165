"""Gradients of the Mamba2 recurrence as a plain reverse-mode recurrence (GRAD).

The forward list of `step_ssd` from its end, with d standing for the cotangent of what follows:

    dz <- dy (S C + D x) silu'(z), dy <- dy silu(z)                            # READ
    dD <- dy x, dx <- D dy, dC <- S^T dy, dS <- dS + dy C^T
    dB <- dS^T (dt x), dw <- dS B, dx <- dx + dt dw, ddt <- x . dw             # WRITE
    de <- exp(dt A) S . dS, dA <- dt de, ddt <- ddt + A de, dS <- exp(dt A) dS # DECAY
    ddt <- ddt through clamp and softplus                                      # DISCRETISE

Entering and final states take part (GRAD-5); segments never meet, and rows outside them are not looked at (GRAD-2,
GRAD-4). All in float64, unrounded. Settings are those of the operation; output_final_state changes nothing here, the
cotangents say which results count.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from statescan.reference.arrays import Array, Float64, add_along, widen
from statescan.reference.conv import slope
from statescan.reference.functions import exp, silu, softplus
from statescan.reference.gates import slope_softplus
from statescan.reference.sites import Site, keep
from statescan.reference.ssd import (
    ANY_STEP,
    Fixed,
    Limit,
    Tokens,
    by_name,
    check_packed,
    discretise,
    group_map,
    scan_ssd,
    unpack_fixed,
    unpack_tokens,
)

Grads = dict[str, Float64]


def pull_ssd(
    state: Float64, after: Float64, token: Tokens, fixed: Fixed, grad_y: Float64, grad_state: Float64, at: Site = keep
) -> tuple[Grads, Float64]:
    """Cotangents of one token's inputs, of what tokens share, and of the state before it.

    `state` and `after` `[H, P, R]` lie before and after the token; shapes as in `step_ssd`.
    """
    x, raw, B, C, z = token
    A, D, dt_bias, dt_softplus, dt_limit = fixed
    dt, skip, grads = discretise(raw, dt_bias, dt_softplus, dt_limit, at), np.zeros((1, 1)) if D is None else D, {}
    B, C, after = at("B", B), at("C", C), at("state_read", after)
    # READ
    if z is not None:
        total = add_along(after * C[:, None, :], 2) + skip * x  # [H, P], before the gate
        grads["z"], grad_y = grad_y * total * slope(z, "silu"), grad_y * at("gate", silu(z))
    grads["D"], grads["C"] = grad_y * x, add_along(after * grad_y[:, :, None], 1)
    grad_state = grad_state + grad_y[:, :, None] * C[:, None, :]
    # WRITE
    grads["B"] = add_along(grad_state * at("x_dt", dt[:, None] * x)[:, :, None], 1)
    grad_write = add_along(grad_state * B[:, None, :], 2)  # [H, P]
    grads["x"] = skip * grad_y + dt[:, None] * grad_write
    # DECAY
    grad_state = at("decay", exp(at("g", dt * A)))[:, None, None] * grad_state
    grad_exponent = add_along(add_along(grad_state * state, 2), 1)  # [H]
    grads["A"] = dt * grad_exponent
    # DISCRETISE
    grad_dt = add_along(x * grad_write, 1) + A * grad_exponent
    grads["dt"] = grad_dt * slope_step(raw, dt_bias, dt_softplus, dt_limit)
    return grads, grad_state


def slope_step(dt: Float64, dt_bias: Float64 | None, dt_softplus: bool, dt_limit: Limit) -> Float64:
    """Derivative of the step size: that of softplus, and 0 where the clamp holds it (SSD-6).

    >>> slope_step(np.array([-1.0, 0.5, 30.0]), None, False, (0.0, 10.0)).tolist()
    [0.0, 1.0, 0.0]
    """
    biased = dt if dt_bias is None else dt + dt_bias
    step = softplus(biased) if dt_softplus else biased
    inside = (step >= dt_limit[0]) & (step <= dt_limit[1])
    return np.where(inside, slope_softplus(biased) if dt_softplus else 1.0, 0.0)


def pull_segment(
    tokens: Tokens, fixed: Fixed, entering: Float64, grad_y: Float64, grad_last: Float64
) -> tuple[list[Grads], Float64]:
    """Cotangents of every token of a segment, in order, and of its entering state."""
    x, dt, B, C, z = tokens
    _, states = scan_ssd(tokens, fixed, entering)
    grad_state, grads = grad_last, []
    for t in reversed(range(x.shape[0])):
        token = (x[t], dt[t], B[t], C[t], None if z is None else z[t])
        one, grad_state = pull_ssd(states[t], states[t + 1], token, fixed, grad_y[t], grad_state)
        grads.append(one)
    return grads[::-1], grad_state


def ssd_grad(
    cotangents: Mapping[str, Array], x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None,
    z: Array | None = None, dt_bias: Array | None = None, seq_idx: Array | None = None,
    cu_seqlens: Array | None = None, initial_state: Array | None = None, *, dt_softplus: bool = True,
    dt_limit: Limit = ANY_STEP, output_final_state: bool = False,
) -> Grads:  # fmt: skip
    """Gradients of `ssd` for every float input given, from cotangents of `y` and `final_state` (GRAD-1).

    >>> one = np.ones((1, 1, 1, 1))
    >>> grads = ssd_grad({"y": one}, 3 * one, 2 * one[0], np.zeros(1), one, one, np.ones(1), None, None, None, None,
    ...     8 * one, dt_softplus=False)
    >>> {name: grad.item() for name, grad in grads.items()}
    {'x': 3.0, 'dt': 3.0, 'A': 16.0, 'B': 6.0, 'C': 14.0, 'D': 3.0, 'initial_state': 1.0}
    """
    inputs = (x, dt, A, B, C, D, z, dt_bias)
    segments = check_packed(inputs, seq_idx, cu_seqlens, initial_state, dt_limit)
    fixed = unpack_fixed(inputs, dt_softplus, dt_limit)
    grads = {key: np.zeros(tensor.shape) for key, tensor in by_name(inputs).items() if tensor is not None}
    shape = (len(segments), *x.shape[2:], B.shape[3])
    entering = np.zeros(shape) if initial_state is None else widen(initial_state)
    grad_entering = widen(cotangents["final_state"]) if "final_state" in cotangents else np.zeros(shape)
    for n, (row, tokens) in enumerate(segments):
        length = tokens.stop - tokens.start
        grad_y = widen(cotangents["y"][row, tokens]) if "y" in cotangents else np.zeros((length, *x.shape[2:]))
        unpacked = unpack_tokens(inputs, row, tokens)
        pulled, grad_entering[n] = pull_segment(unpacked, fixed, entering[n], grad_y, grad_entering[n])
        for t, one in enumerate(pulled):
            store_token(grads, one, row, tokens.start + t)
    return grads if initial_state is None else {**grads, "initial_state": grad_entering}


def store_token(grads: Grads, one: Grads, row: int, t: int) -> None:
    """Put one token's cotangents in place: heads added up to their groups, parameters added up over tokens."""
    grads["x"][row, t], grads["dt"][row, t] = one["x"], one["dt"]
    if "z" in grads:
        grads["z"][row, t] = one["z"]
    for name in ("B", "C"):
        for head, group in enumerate(group_map(one["B"].shape[0], grads["B"].shape[2])):
            grads[name][row, t, group] = grads[name][row, t, group] + one[name][head]
    grads["A"] = grads["A"] + one["A"]
    if "dt_bias" in grads:
        grads["dt_bias"] = grads["dt_bias"] + one["dt"]
    if "D" in grads:
        grads["D"] = grads["D"] + (one["D"] if grads["D"].ndim == 2 else add_along(one["D"], 1))
