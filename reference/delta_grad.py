"""Gradients of the delta family as plain reverse-mode recurrences (GRAD).

Forward, a token is DECAY, then CORRECT and WRITE a copy, then READ; backward it is the same list from its end, with
d standing for the cotangent of what follows it and c = beta r for the correction that was written:

    dq <- S do, dS <- dS + q do^T                                              # READ
    dk <- dS c, dc <- dS^T k, dbeta <- r . dc, dr <- beta dc                   # WRITE
    dv <- dr, dk <- dk - S dr, dS <- dS - k dr^T                               # CORRECT
    dg <- exp(g) S . dS, dS <- exp(g) dS                                       # DECAY

Entering and final states take part (GRAD-5); segments never meet, and rows outside them are not looked at (GRAD-2,
GRAD-4). All in float64, unrounded. Settings are those of the operation; output_final_state changes nothing here, the
cotangents say which results count.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from statescan.reference.arrays import Array, Float64, add_along, widen
from statescan.reference.delta import (
    Inputs,
    Tokens,
    by_name,
    check_packed,
    head_map,
    scale_of,
    scan_delta,
    unpack_tokens,
)
from statescan.reference.functions import exp
from statescan.reference.norms import L2NORM_EPS, pull_normalise
from statescan.reference.sites import Site, keep

Grads = dict[str, Float64]
Copy = tuple[Float64, Float64, Float64, Float64, Float64]
"""What one copy used: k and S of CORRECT, r, the correction beta r, k of WRITE."""


def replay_delta(state: Float64, token: Tokens, at: Site = keep) -> tuple[Float64, Float64, list[Copy], Float64]:
    """The forward step again, with all that its derivative needs.

    Returns the decay `[HV, K or 1]`, the decayed state, what every copy used, and the state after the token.
    """
    _, k, v, g, beta = token
    decay = at("decay", exp(at("g", g)))
    state = decayed = decay[:, :, None] * state
    used = []
    for m in range(k.shape[0]):
        k_correct, state_correct = at("k_correct", k[m]), at("state_correct", state)
        rest = at("v", v[m]) - add_along(k_correct[:, :, None] * state_correct, 1)
        correction, k_write = at("correction", beta[m][:, None] * rest), at("k_write", k[m])
        used.append((k_correct, state_correct, rest, correction, k_write))
        state = at("state", state + k_write[:, :, None] * correction[:, None, :])
    return decay, decayed, used, state


def pull_delta(
    state: Float64, token: Tokens, grad_o: Float64, grad_state: Float64, at: Site = keep
) -> tuple[Tokens, Float64]:
    """Cotangents of one token's inputs and of the state before it, from those of o `[HV, V]` and of the state after.

    `state` `[HV, K, V]` is the one before the token; shapes as in `step_delta`.
    """
    q, k, v, g, beta = token
    decay, decayed, used, after = replay_delta(state, token, at)
    # READ
    grad_q = add_along(at("state_read", after) * grad_o[:, None, :], 2)  # [HV, K]
    grad_state = grad_state + at("q", q)[:, :, None] * grad_o[:, None, :]
    grad_k, grad_v, grad_beta = np.zeros(k.shape), np.zeros(v.shape), np.zeros(beta.shape)
    for m in reversed(range(k.shape[0])):
        k_correct, state_correct, rest, correction, k_write = used[m]
        # WRITE
        grad_correction = add_along(grad_state * k_write[:, :, None], 1)  # [HV, V]
        grad_k[m] = add_along(grad_state * correction[:, None, :], 2)
        grad_beta[m] = add_along(rest * grad_correction, 1)
        # CORRECT
        grad_v[m] = beta[m][:, None] * grad_correction
        grad_k[m] = grad_k[m] - add_along(state_correct * grad_v[m][:, None, :], 2)
        grad_state = grad_state - k_correct[:, :, None] * grad_v[m][:, None, :]
    # DECAY
    grad_g = add_along(grad_state * decayed, 2)  # [HV, K]
    grad_g = grad_g if g.shape[1] == k.shape[2] else add_along(grad_g, 1)[:, None]
    return (grad_q, grad_k, grad_v, grad_g, grad_beta), decay[:, :, None] * grad_state


def pull_segment(
    tokens: Tokens, entering: Float64, grad_o: Float64, grad_last: Float64
) -> tuple[Tokens, Float64]:
    """Cotangents of a whole segment's inputs and of its entering state, last token first."""
    _, states = scan_delta(tokens, entering)
    q, k, v, g, beta = (np.zeros(part.shape) for part in tokens)
    grad_state = grad_last
    for t in reversed(range(len(q))):
        token = (tokens[0][t], tokens[1][t], tokens[2][t], tokens[3][t], tokens[4][t])
        (q[t], k[t], v[t], g[t], beta[t]), grad_state = pull_delta(states[t], token, grad_o[t], grad_state)
    return (q, k, v, g, beta), grad_state


def fold_tokens(grads: Tokens, inputs: Inputs, row: int, tokens: slice, copies: int, scale: float | None,
                use_qk_l2norm: bool) -> Tokens:  # fmt: skip
    """The reverse of `unpack_tokens`: copies back among the rows, value heads added up to the head they share."""
    q, k, v, g, beta = grads
    rows, heads = q.shape[0] * copies, inputs[0].shape[2]
    q = fold_heads(q, heads) * scale_of(scale, q.shape[2])
    k = fold_heads(k.reshape(rows, *k.shape[2:]), heads)
    if use_qk_l2norm:
        wide = slice(tokens.start * copies, tokens.stop * copies)
        q = pull_normalise(q, widen(inputs[0][row, tokens]), L2NORM_EPS)
        k = pull_normalise(k, widen(inputs[1][row, wide]), L2NORM_EPS)
    g = g if inputs[3].ndim == 4 else g[:, :, 0]
    return q, k, v.reshape(rows, *v.shape[2:]), g, beta.reshape(rows, *beta.shape[2:])


def fold_heads(terms: Float64, heads: int) -> Float64:
    """Cotangents per value head `[n, HV, K]` added up to the heads they came from, `[n, H, K]` (GDN-5)."""
    folded = np.zeros((terms.shape[0], heads, terms.shape[2]))
    for value_head, head in enumerate(head_map(terms.shape[1], heads)):
        folded[:, head] = folded[:, head] + terms[:, value_head]
    return folded


def run_grad(
    name: str, cotangents: Mapping[str, Array], inputs: Inputs, cu_seqlens: Array | None, initial_state: Array | None,
    copies: int, scale: float | None, use_qk_l2norm: bool,
) -> Grads:  # fmt: skip
    """Gradients of the packed operation `name` for every float input given; absent cotangents count as 0."""
    segments = check_packed(name, inputs, cu_seqlens, initial_state, copies)
    grads = {key: np.zeros(tensor.shape) for key, tensor in by_name(inputs).items()}
    shape = (len(segments), inputs[2].shape[2], inputs[1].shape[3], inputs[2].shape[3])
    entering = np.zeros(shape) if initial_state is None else widen(initial_state)
    grad_entering = widen(cotangents["final_state"]) if "final_state" in cotangents else np.zeros(shape)
    for n, (row, tokens) in enumerate(segments):
        length = tokens.stop - tokens.start
        grad_o = widen(cotangents["o"][row, tokens]) if "o" in cotangents else np.zeros((length, shape[1], shape[3]))
        unpacked = unpack_tokens(inputs, row, tokens, copies, scale, use_qk_l2norm)
        pulled, grad_entering[n] = pull_segment(unpacked, entering[n], grad_o, grad_entering[n])
        wide = slice(tokens.start * copies, tokens.stop * copies)
        parts = fold_tokens(pulled, inputs, row, tokens, copies, scale, use_qk_l2norm)
        for key, part in zip(grads, parts, strict=True):
            grads[key][row, tokens if key in ("q", "g") else wide] = part
    return grads if initial_state is None else {**grads, "initial_state": grad_entering}


def gated_delta_rule_grad(
    cotangents: Mapping[str, Array], q: Array, k: Array, v: Array, g: Array, beta: Array,
    cu_seqlens: Array | None = None, initial_state: Array | None = None, *, scale: float | None = None,
    use_qk_l2norm: bool = False, output_final_state: bool = False,
) -> Grads:  # fmt: skip
    """Gradients of `gated_delta_rule` for every float input given, from cotangents of `o` and `final_state` (GRAD-1).

    >>> one = np.ones((1, 1, 1, 1))
    >>> grads = gated_delta_rule_grad(
    ...     {"o": one}, one, one, 6 * one, 0 * one[0], one[0] / 2, None, 8 * one, scale=1.0)
    >>> {name: grad.item() for name, grad in grads.items()}
    {'q': 7.0, 'k': -5.0, 'v': 0.5, 'g': 4.0, 'beta': -2.0, 'initial_state': 0.5}
    """
    inputs = (q, k, v, g, beta)
    return run_grad("gated_delta_rule", cotangents, inputs, cu_seqlens, initial_state, 1, scale, use_qk_l2norm)


def gated_delta_product_grad(
    cotangents: Mapping[str, Array], q: Array, k: Array, v: Array, g: Array, beta: Array,
    cu_seqlens: Array | None = None, initial_state: Array | None = None, *, num_householder: int = 1,
    scale: float | None = None, use_qk_l2norm: bool = False, output_final_state: bool = False,
) -> Grads:  # fmt: skip
    """Gradients of `gated_delta_product` for every float input given, k, v, beta on their T*M rows (GRAD-1).

    >>> one, two = np.ones((1, 1, 1, 1)), np.ones((1, 2, 1, 1))
    >>> gated_delta_product_grad({"o": one}, one, two, 6 * two, 0 * one[0], np.ones((1, 2, 1)) / 2,
    ...     num_householder=2, scale=1.0)["v"].ravel().tolist()
    [0.25, 0.5]
    """
    inputs = (q, k, v, g, beta)
    return run_grad("gated_delta_product", cotangents, inputs, cu_seqlens, initial_state, num_householder, scale,
                    use_qk_l2norm)  # fmt: skip


def kimi_delta_attention_grad(
    cotangents: Mapping[str, Array], q: Array, k: Array, v: Array, g: Array, beta: Array,
    cu_seqlens: Array | None = None, initial_state: Array | None = None, *, scale: float | None = None,
    use_qk_l2norm: bool = False, output_final_state: bool = False,
) -> Grads:  # fmt: skip
    """Gradients of `kimi_delta_attention` for every float input given, g per key channel (GRAD-1).

    >>> q, zero = np.array([[[[1.0, 1]]]]), np.zeros((1, 1, 1, 2))
    >>> kimi_delta_attention_grad({"o": np.ones((1, 1, 1, 1))}, q, zero, np.zeros((1, 1, 1, 1)), zero,
    ...     np.zeros((1, 1, 1)), None, np.array([[[[3.0], [5]]]]), scale=1.0)["g"].ravel().tolist()
    [3.0, 5.0]
    """
    inputs = (q, k, v, g, beta)
    return run_grad("kimi_delta_attention", cotangents, inputs, cu_seqlens, initial_state, 1, scale, use_qk_l2norm)
