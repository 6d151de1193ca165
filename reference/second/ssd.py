"""The Mamba2 recurrence in chunks, any chunk length: chunk states first, then passed on, then read (SSD, CHUNK).

    E_ij = exp(a_(j+1) + ... + a_i), a = dt A       decay from row j to row i of a chunk, j <= i
    Z    = total over j of (dt_j x_j) (E_Lj B_j)^T  what a chunk adds
    S    <- exp(a_1 + ... + a_L) S + Z              passed from chunk to chunk, from the entering state on
    y_i  = exp(a_1 + ... + a_i) S C_i + total over j <= i of (C_i . B_j) E_ij dt_j x_j + D x_i

Source: https://arxiv.org/abs/2405.21060 (section 6, block decomposition)
"""

from __future__ import annotations

import numpy as np

from statescan.reference.arrays import Array, Float64, dtype_name, round_to, widen
from statescan.reference.second import gates, packed, pools

Limit = tuple[float, float]
Inputs = tuple[Array, Array, Array, Array, Array, "Array | None", "Array | None", "Array | None"]
Chunk = tuple[Float64, Float64, Float64, Float64]
"""dt x `[L, H, P]`, a = dt A `[L, H]`, B and C `[L, H, R]`."""
ANY_STEP: Limit = (0.0, float("inf"))


def decays(a: Float64) -> tuple[Float64, Float64]:
    """Decay from row j to row i `[L, L, H]`, 0 above the diagonal, and from the chunk's start to row i `[L, H]`.

    >>> between, entry = decays(np.array([[-1024.0], [0.0]]))
    >>> between[:, :, 0].tolist(), entry.ravel().tolist()
    ([[1.0, 0.0], [1.0, 1.0]], [0.0, 0.0])
    """
    between, total = np.full((len(a), *a.shape), -np.inf), np.zeros(a.shape[1:])
    entry = np.zeros(a.shape)
    for i in range(len(a)):
        between[i, :i] = between[i - 1, :i] + a[i]
        between[i, i] = 0.0
        total = total + a[i]
        entry[i] = total
    return np.exp(between), np.exp(entry)


def add_chunk(chunk: Chunk) -> tuple[Float64, Float64]:
    """What a chunk adds to the state `[H, P, R]`, and what it leaves of the state before it `[H]`."""
    write, a, B, _ = chunk
    between, entry = decays(a)
    return np.einsum("jhp,jh,jhr->hpr", write, between[-1], B), entry[-1]


def read_chunk(chunk: Chunk, state: Float64) -> Float64:
    """Outputs of a chunk `[L, H, P]` that the state enters."""
    write, a, B, C = chunk
    between, entry = decays(a)
    inside = np.einsum("ijh,jhp->ihp", np.einsum("ihr,jhr->ijh", C, B) * between, write)
    return np.asarray(inside + entry[:, :, None] * np.einsum("ihr,hpr->ihp", C, state))


def run_chunks(stream: Chunk, entering: Float64, chunk: int) -> tuple[Float64, Float64]:
    """Outputs and final state of a segment."""
    parts = []
    for start in range(0, len(stream[0]), chunk):
        write, a, B, C = (part[start : start + chunk] for part in stream)
        parts.append((write, a, B, C))
    states = [entering]
    for part in parts:
        added, left = add_chunk(part)
        states.append(left[:, None, None] * states[-1] + added)
    outputs = [read_chunk(part, state) for part, state in zip(parts, states, strict=False)]
    return np.concatenate([stream[0][:0], *outputs]), states[-1]


def runner(inputs: Inputs, dt_softplus: bool, dt_limit: Limit, chunk: int) -> pools.Run:
    """Outputs and final state of a list of tokens of one batch row; D and z after the scan."""
    x, dt, A, B, C = (widen(tensor) for tensor in inputs[:5])
    D, z, dt_bias = (None if tensor is None else widen(tensor) for tensor in inputs[5:])
    per_group = x.shape[2] // B.shape[2]

    def run(row: int, tokens: list[int], entering: Float64) -> tuple[Float64, Float64]:
        raw = dt[row, tokens] + (0.0 if dt_bias is None else dt_bias)
        step = np.clip(gates.each(gates.softplus, raw) if dt_softplus else raw, *dt_limit)
        stream = (x[row, tokens] * step[:, :, None], step * A, np.repeat(B[row, tokens], per_group, axis=1),
                  np.repeat(C[row, tokens], per_group, axis=1))  # fmt: skip
        y, state = run_chunks(stream, entering, chunk)
        if D is not None:
            y = y + x[row, tokens] * D.reshape(len(A), -1)
        return (y if z is None else y * gates.each(gates.silu, z[row, tokens])), state

    return run


def ssd(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, seq_idx: Array | None = None, cu_seqlens: Array | None = None,
    initial_state: Array | None = None, *, dt_softplus: bool = True, dt_limit: Limit = ANY_STEP,
    output_final_state: bool = False, chunk: int = 16,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The packed operation."""
    segments = packed.segments(x.shape, seq_idx, cu_seqlens, initial_state)
    run = runner((x, dt, A, B, C, D, z, dt_bias), dt_softplus, dt_limit, chunk)
    y, final = np.zeros(x.shape), np.zeros((len(segments), *x.shape[2:], B.shape[3]))
    for n, (row, tokens) in enumerate(segments):
        entering = np.zeros(final.shape[1:]) if initial_state is None else widen(initial_state)[n]
        y[row, tokens], final[n] = run(row, tokens, entering)
    if not output_final_state:
        return round_to(y, dtype_name(x)), None
    kind = "f64" if dtype_name(x) == "f64" else "f32"
    return round_to(y, dtype_name(x)), round_to(final, kind if initial_state is None else dtype_name(initial_state))


def ssd_prefill(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None, z: Array | None, dt_bias: Array | None,
    cu_seqlens: Array, state_pool: Array, read_slots: Array, write_slots: Array | None = None,
    snapshot_positions: Array | None = None, snapshot_states: Array | None = None, *, dt_softplus: bool = True,
    dt_limit: Limit = ANY_STEP, chunk: int = 16,
) -> Array:  # fmt: skip
    """The packed operation on a slot pool."""
    run, y = runner((x, dt, A, B, C, D, z, dt_bias), dt_softplus, dt_limit, chunk), np.zeros(x.shape)
    pools.fill_prefill(
        run, y, cu_seqlens, state_pool, read_slots, write_slots, snapshot_positions, snapshot_states
    )  # fmt: skip
    return round_to(y, dtype_name(x))


def ssd_update(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None, z: Array | None, dt_bias: Array | None,
    state_pool: Array, read_slots: Array, write_slots: Array | None = None, intermediate_states: Array | None = None,
    num_accepted: Array | None = None, num_tokens: Array | None = None, *, dt_softplus: bool = True,
    dt_limit: Limit = ANY_STEP, chunk: int = 16,
) -> Array:  # fmt: skip
    """J tokens a row on a slot pool."""
    run, y = runner((x, dt, A, B, C, D, z, dt_bias), dt_softplus, dt_limit, chunk), np.zeros(x.shape)
    pools.fill_update(
        run, y, state_pool, read_slots, write_slots, intermediate_states, num_accepted, num_tokens
    )  # fmt: skip
    return round_to(y, dtype_name(x))
