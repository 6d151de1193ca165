"""The Mamba2 recurrence, token by token (SSD).

    dt <- softplus(dt + dt_bias), clamped to dt_limit      # DISCRETISE
    S  <- exp(dt A) S                                      # DECAY
    S  <- S + (dt x) B^T                                   # WRITE
    y  <- S C + D x, then times silu(z) where z is given   # READ

A state `[H, P, R]` has one row per channel of a head. B and C come per group; neighbouring heads share one.
Source: https://arxiv.org/abs/2405.21060
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from statescan.reference.arrays import Array, Float64, add_along, check_arguments, dtype_name, round_to, widen
from statescan.reference.functions import exp, silu, softplus
from statescan.reference.packed import unpack_segments
from statescan.reference.pools import scan_prefill, scan_update, state_type
from statescan.reference.sites import Site, keep
from statescan.spec.contract import UnsupportedError

Limit = tuple[float, float]
Inputs = tuple[Array, Array, Array, Array, Array, "Array | None", "Array | None", "Array | None"]
"""x, dt, A, B, C, D, z, dt_bias, in the shapes of the operation table."""
Fixed = tuple[Float64, "Float64 | None", "Float64 | None", bool, Limit]
"""What every token shares: A `[H]`, D `[H, 1 or P]`, dt_bias `[H]`, dt_softplus, dt_limit."""
Tokens = tuple[Float64, Float64, Float64, Float64, "Float64 | None"]
"""One row's x `[n, H, P]`, dt `[n, H]`, B and C per head `[n, H, R]`, z `[n, H, P]`."""
RowScan = Callable[[int, slice, Float64], tuple[Float64, list[Float64]]]
ANY_STEP: Limit = (0.0, float("inf"))

# ---------------------------------------------------------------------------------------------------------------------
# One token, one segment
# ---------------------------------------------------------------------------------------------------------------------


def step_ssd(
    state: Float64, x: Float64, dt: Float64, B: Float64, C: Float64, z: Float64 | None, fixed: Fixed, at: Site = keep
) -> tuple[Float64, Float64]:
    """One token of every head into state `[H, P, R]`; returns (y `[H, P]`, state after it) (SSD-1 to SSD-4).

    x, z `[H, P]`, dt `[H]`, B and C `[H, R]`.

    >>> one = np.ones((1, 1))
    >>> fixed = (0 * one[0], one, None, False, ANY_STEP)
    >>> y, state = step_ssd(8 * one[None], 3 * one, 2 * one[0], one, one, None, fixed)
    >>> y.tolist(), state.tolist()
    ([[17.0]], [[[14.0]]])
    """
    A, D, dt_bias, dt_softplus, dt_limit = fixed
    # DISCRETISE
    dt = discretise(dt, dt_bias, dt_softplus, dt_limit, at)  # [H]
    # DECAY
    state = at("decay", exp(at("g", dt * A)))[:, None, None] * state  # [H, P, R]
    # WRITE
    state = at("state", state + at("x_dt", dt[:, None] * x)[:, :, None] * at("B", B)[:, None, :])
    # READ
    y = add_along(at("state_read", state) * at("C", C)[:, None, :], 2)  # [H, P]
    y = y if D is None else y + D * x
    return (y if z is None else y * at("gate", silu(z))), state


def discretise(
    dt: Float64, dt_bias: Float64 | None, dt_softplus: bool, dt_limit: Limit, at: Site = keep
) -> Float64:
    """The step size of a token: bias, softplus, then the clamp, in prefill and decode alike (SSD-1, SSD-6).

    >>> discretise(np.array([-1.0, 0.5, 30.0]), None, False, (0.0, 10.0)).tolist()
    [0.0, 0.5, 10.0]
    """
    dt = dt if dt_bias is None else dt + dt_bias
    dt = at("softplus", softplus(dt)) if dt_softplus else dt
    return np.minimum(np.maximum(dt, dt_limit[0]), dt_limit[1])


def scan_ssd(
    tokens: Tokens, fixed: Fixed, state: Float64, at: Site = keep, history: bool = True
) -> tuple[Float64, list[Float64]]:
    """All tokens of one segment; returns y `[n, H, P]` and the n + 1 states, entering one first.

    Without `history` only the last state is kept, which is what a long segment can afford.
    """
    x, dt, B, C, z = tokens
    state = at("entering", state)
    y, states = np.zeros(x.shape), [state]
    for t in range(x.shape[0]):
        y[t], state = step_ssd(state, x[t], dt[t], B[t], C[t], None if z is None else z[t], fixed, at)
        states = [*states, state] if history else [state]
    return y, states


def unpack_tokens(inputs: Inputs, row: int, tokens: slice) -> Tokens:
    """One row's tokens in float64, groups repeated to heads (SSD-5)."""
    x, dt, _, B, C, _, z, _ = inputs
    groups = group_map(x.shape[2], B.shape[2])
    gate = None if z is None else widen(z[row, tokens])
    return (widen(x[row, tokens]), widen(dt[row, tokens]), widen(B[row, tokens])[:, groups],
            widen(C[row, tokens])[:, groups], gate)  # fmt: skip


def group_map(heads: int, groups: int) -> list[int]:
    """The group of each head: neighbours share one (SSD-5).

    >>> group_map(4, 2)
    [0, 0, 1, 1]
    """
    return [head // (heads // groups) for head in range(heads)]


def unpack_fixed(inputs: Inputs, dt_softplus: bool, dt_limit: Limit) -> Fixed:
    """What every token shares, in float64; D per head and per channel look alike (SSD-3)."""
    _, _, A, _, _, D, _, dt_bias = inputs
    skip = None if D is None else widen(D) if D.ndim == 2 else widen(D)[:, None]
    return widen(A), skip, None if dt_bias is None else widen(dt_bias), dt_softplus, dt_limit


def row_scan(inputs: Inputs, fixed: Fixed, at: Site = keep, history: bool = True) -> RowScan:
    """The scan of one batch row's tokens from an entering state, as `reference.pools` wants it."""

    def scan(row: int, tokens: slice, entering: Float64) -> tuple[Float64, list[Float64]]:
        return scan_ssd(unpack_tokens(inputs, row, tokens), fixed, entering, at, history)

    return scan


# ---------------------------------------------------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------------------------------------------------


def ssd(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, seq_idx: Array | None = None, cu_seqlens: Array | None = None,
    initial_state: Array | None = None, *, dt_softplus: bool = True, dt_limit: Limit = ANY_STEP,
    output_final_state: bool = False, check: bool | None = None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The Mamba2 recurrence on a pack: returns (y, final_state or None) (SSD-1 to SSD-7).

    x, z `[1, T, H, P]`, dt `[1, T, H]`, A, dt_bias `[H]`, B, C `[1, T, G, R]`, D `[H]` or `[H, P]`, one of
    seq_idx `[1, T]`, cu_seqlens `[N+1]` (neither: one segment), initial_state `[N, H, P, R]`. y has x's type,
    final_state initial_state's, else float32 (float64 for float64 x). Rows past the last offset, or with id -1, give 0
    (PACK-8). Raises PackingError, ShapeError, DtypeError, UnsupportedError. Source: https://arxiv.org/abs/2405.21060

    >>> x, dt, one = np.array([[[[1.0]], [[2.0]]]]), np.ones((1, 2, 1)), np.ones((1, 2, 1, 1))
    >>> y, final = ssd(x, dt, np.zeros(1), one, one, np.array([0.5]), dt_softplus=False, output_final_state=True)
    >>> y.ravel().tolist(), final.ravel().tolist()
    ([1.5, 4.0], [3.0])
    """
    inputs = (x, dt, A, B, C, D, z, dt_bias)
    segments = check_packed(inputs, seq_idx, cu_seqlens, initial_state, dt_limit)
    y = np.zeros(x.shape)
    final = np.zeros((len(segments), *x.shape[2:], B.shape[3]))
    scan = row_scan(inputs, unpack_fixed(inputs, dt_softplus, dt_limit), history=False)
    for n, (row, tokens) in enumerate(segments):
        entering = np.zeros(final.shape[1:]) if initial_state is None else widen(initial_state[n])
        y[row, tokens], states = scan(row, tokens, entering)
        final[n] = states[-1]
    last = round_to(final, state_type(initial_state, x)) if output_final_state else None
    return round_to(y, dtype_name(x)), last


def check_packed(
    inputs: Inputs, seq_idx: Array | None, cu_seqlens: Array | None, initial_state: Array | None, dt_limit: Limit
) -> list[tuple[int, slice]]:
    """Check a packed call; its segments."""
    packing = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens, "initial_state": initial_state}
    check_arguments("ssd", {**by_name(inputs), **packing}, {})
    check_limit(dt_limit)
    return unpack_segments(inputs[0].shape, seq_idx, cu_seqlens, initial_state)


def ssd_prefill(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None, z: Array | None, dt_bias: Array | None,
    cu_seqlens: Array, state_pool: Array, read_slots: Array, write_slots: Array | None = None,
    snapshot_positions: Array | None = None, snapshot_states: Array | None = None, *, dt_softplus: bool = True,
    dt_limit: Limit = ANY_STEP, check: bool | None = None,
) -> Array:  # fmt: skip
    """The Mamba2 recurrence on a pack whose rows resume from, and store to, slots (SLOT-2, SLOT-3, SLOT-8).

    Token tensors as `ssd`; state_pool `[slots, H, P, R]`, read_slots and write_slots `[N]`, snapshot_states
    `[X, H, P, R]` receive the states at snapshot_positions `[X]` (SNAP-3). Returns y `[1, T, H, P]`. Raises as `ssd`,
    and SlotError.

    >>> one, pool = np.ones((1, 1, 1, 1)), np.array([[[[8.0]]]])
    >>> ssd_prefill(one, one[0], np.zeros(1), one, one, None, None, None, np.array([0, 1]), pool, np.array([0]),
    ...     dt_softplus=False).item(), pool.item()
    (9.0, 9.0)
    """
    inputs = (x, dt, A, B, C, D, z, dt_bias)
    tensors = {**by_name(inputs), "cu_seqlens": cu_seqlens, "state_pool": state_pool, "read_slots": read_slots,
               "write_slots": write_slots, "snapshot_positions": snapshot_positions,
               "snapshot_states": snapshot_states}  # fmt: skip
    check_arguments("ssd_prefill", tensors, {})
    check_limit(dt_limit)
    y, scan = np.zeros(x.shape), row_scan(inputs, unpack_fixed(inputs, dt_softplus, dt_limit))
    scan_prefill(
        lambda n, tokens, entering: scan(0, tokens, entering), y, cu_seqlens, state_pool, read_slots, write_slots,
        snapshot_positions, snapshot_states,
    )  # fmt: skip
    return round_to(y, dtype_name(x))


def ssd_update(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None, z: Array | None, dt_bias: Array | None,
    state_pool: Array, read_slots: Array, write_slots: Array | None = None, intermediate_states: Array | None = None,
    num_accepted: Array | None = None, num_tokens: Array | None = None, *, dt_softplus: bool = True,
    dt_limit: Limit = ANY_STEP, check: bool | None = None,
) -> Array:  # fmt: skip
    """The Mamba2 recurrence on J tokens a row, state from and to its slot (SLOT-2, SLOT-3, SPEC-1).

    x, z `[N, J, H, P]`, dt `[N, J, H]`, B, C `[N, J, G, R]`; entry j of intermediate_states `[slots, I, H, P, R]`,
    I >= J, becomes the state after token j (SPEC-2); num_accepted, num_tokens `[N]` (SPEC-3, SPEC-6). Returns y
    `[N, J, H, P]`. Raises ShapeError, DtypeError, SlotError, UnsupportedError.

    >>> one, pool = np.ones((1, 1, 1, 1)), np.array([[[[8.0]]]])
    >>> ssd_update(one, one[0], np.zeros(1), one, one, None, None, None, pool, np.array([0]), dt_softplus=False).item()
    9.0
    """
    inputs = (x, dt, A, B, C, D, z, dt_bias)
    tensors = {**by_name(inputs), "state_pool": state_pool, "read_slots": read_slots, "write_slots": write_slots,
               "intermediate_states": intermediate_states, "num_accepted": num_accepted,
               "num_tokens": num_tokens}  # fmt: skip
    check_arguments("ssd_update", tensors, {})
    check_limit(dt_limit)
    y, scan = np.zeros(x.shape), row_scan(inputs, unpack_fixed(inputs, dt_softplus, dt_limit))
    scan_update(
        scan, y, state_pool, read_slots, write_slots, intermediate_states, num_accepted, num_tokens
    )  # fmt: skip
    return round_to(y, dtype_name(x))


def by_name(inputs: Inputs) -> dict[str, Array | None]:
    """The token tensors and parameters under their names."""
    return dict(zip(("x", "dt", "A", "B", "C", "D", "z", "dt_bias"), inputs, strict=True))


def check_limit(dt_limit: Any) -> None:
    """A limit is a pair (least, largest) of step sizes (SSD-6)."""
    try:
        least, largest = (float(bound) for bound in dt_limit)
    except (TypeError, ValueError):
        least, largest = 1.0, 0.0
    if not least <= largest:
        raise UnsupportedError(f"dt_limit={dt_limit!r}: a pair (least, largest) is needed (SSD-6)")
