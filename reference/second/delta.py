"""The delta family in chunks (WY form), any chunk length: no token-by-token recurrence anywhere (CHUNK).

Row i of a chunk writes k_i u_i^T, and what it writes depends on the rows before it through a triangular system:

    D_ij = exp(g_(j+1) + ... + g_i)                 decay from row j to row i, never an exponential above 1
    A_ij = beta_i k_i . (D_ij k_j), j < i           T = (1 + A)^-1 by forward substitution
    U    = T beta V - (T beta K E) S                E_i = exp(g_1 + ... + g_i); S enters the chunk once
    o_i  = (E_i q_i)^T S + total over j <= i of (q_i . D_ij k_j) u_j
    S    = E_L S + total over j of (D_Lj k_j) u_j^T

A product of M copies is a stream of M rows a token: the gate on the first, the query on the last. Sums of g run from
each row j on, not as differences of two long sums, so that -1024 costs later decays nothing.
Source: https://arxiv.org/abs/2406.06484
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from statescan.reference.arrays import Array, Float64, dtype_name, round_to, widen
from statescan.reference.second import packed, pools
from statescan.reference.second.norms import unit_rows

Stream = tuple[Float64, Float64, Float64, Float64, Float64]
"""q, k `[rows, HV, K]`, v `[rows, HV, V]`, g `[rows, HV, K]`, beta `[rows, HV]`, M rows a token."""


def solve_chunk(stream: Stream, state: Float64) -> tuple[Float64, Float64]:
    """Outputs of every row of one chunk, and the state after it."""
    q, k, v, g, beta = stream
    between, entry = decays(g)
    written = beta[:, :, None] * k
    system = np.einsum("ihk,ijhk,jhk->hij", written, between, k)
    reads = np.einsum("ihk,ijhk,jhk->hij", q, between, k)
    inverse = invert(np.tril(system, -1))
    u = np.einsum("hij,jhv->ihv", inverse, beta[:, :, None] * v)
    w = np.einsum("hij,jhk->ihk", inverse, written * entry)
    u = u - np.einsum("ihk,hkv->ihv", w, state)
    o = np.einsum("ihk,hkv->ihv", q * entry, state) + np.einsum("hij,jhv->ihv", reads, u)
    return o, entry[-1][:, :, None] * state + np.einsum("jhk,jhv->hkv", between[-1] * k, u)


def decays(g: Float64) -> tuple[Float64, Float64]:
    """Decay from row j to row i `[L, L, HV, K]`, 0 above the diagonal, and from the chunk's start to row i.

    >>> between, entry = decays(np.array([[[0.0]], [[-1024.0]]]))
    >>> between[:, :, 0, 0].tolist(), entry.ravel().tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])
    """
    length = len(g)
    between, entry = np.full((length, *g.shape), -np.inf), np.zeros(g.shape)
    for i in range(length):
        between[i, :i] = between[i - 1, :i] + g[i]
        between[i, i] = 0.0
        entry[i] = entry[i - 1] + g[i]  # row 0 adds to the zeros of the last row
    return np.exp(between), np.exp(entry)


def invert(lower: Float64) -> Float64:
    """The inverse of 1 + a strictly lower triangular matrix `[HV, L, L]`, row by row.

    >>> invert(np.array([[[0.0, 0], [3, 0]]])).tolist()
    [[[1.0, 0.0], [-3.0, 1.0]]]
    """
    inverse = np.zeros(lower.shape)
    for i in range(lower.shape[1]):
        inverse[:, i, i] = 1.0
        inverse[:, i, :i] = -np.einsum("hj,hjk->hk", lower[:, i, :i], inverse[:, :i, :i])
    return inverse


def runner(inputs: tuple[Array, ...], copies: int, scale: float | None, use_qk_l2norm: bool, chunk: int) -> pools.Run:
    """Outputs and final state of a list of tokens of one batch row."""

    def run(row: int, tokens: list[int], entering: Float64) -> tuple[Float64, Float64]:
        stream = expand([widen(tensor)[row] for tensor in inputs], tokens, copies, scale, use_qk_l2norm)
        o, state = np.zeros(stream[2].shape), entering
        for start in range(0, len(o), chunk):
            q, k, v, g, beta = (part[start : start + chunk] for part in stream)
            o[start : start + chunk], state = solve_chunk((q, k, v, g, beta), state)
        return o[copies - 1 :: copies], state

    return run


def expand(
    inputs: list[Float64], tokens: list[int], copies: int, scale: float | None, use_qk_l2norm: bool
) -> Stream:
    """The chosen tokens as a stream of M rows a token, heads repeated to value heads."""
    q, k, v, g, beta = inputs
    rows = [t * copies + m for t in tokens for m in range(copies)]
    repeat, factor = v.shape[1] // q.shape[1], q.shape[2] ** -0.5 if scale is None else scale
    queries, keys = (unit_rows(q[tokens], 1e-6), unit_rows(k[rows], 1e-6)) if use_qk_l2norm else (q[tokens], k[rows])
    keys = np.repeat(keys, repeat, axis=1)
    stream_q, stream_g = np.zeros(keys.shape), np.zeros(keys.shape)
    stream_q[copies - 1 :: copies] = np.repeat(queries * factor, repeat, axis=1)
    stream_g[::copies] = g[tokens] if g.ndim == 3 else g[tokens][:, :, None]
    return stream_q, keys, v[rows], stream_g, beta[rows]


def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array | None = None,
    initial_state: Array | None = None, *, num_householder: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, output_final_state: bool = False, chunk: int = 16,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The packed operation; one text for the three siblings."""
    segments = packed.segments(q.shape, None, cu_seqlens, initial_state)
    run = runner((q, k, v, g, beta), num_householder, scale, use_qk_l2norm, chunk)
    o, final = np.zeros((*q.shape[:2], *v.shape[2:])), np.zeros((len(segments), v.shape[2], k.shape[3], v.shape[3]))
    for n, (row, tokens) in enumerate(segments):
        entering = np.zeros(final.shape[1:]) if initial_state is None else widen(initial_state)[n]
        o[row, tokens], final[n] = run(row, tokens, entering)
    if not output_final_state:
        return round_to(o, dtype_name(v)), None
    kind = "f64" if dtype_name(v) == "f64" else "f32"
    return round_to(o, dtype_name(v)), round_to(final, kind if initial_state is None else dtype_name(initial_state))


def gated_delta_rule_prefill(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array, state_pool: Array, read_slots: Array,
    write_slots: Array | None = None, snapshot_positions: Array | None = None, snapshot_states: Array | None = None,
    *, num_householder: int = 1, scale: float | None = None, use_qk_l2norm: bool = False, state_layout: str = "KV",
    chunk: int = 16,
) -> Array:  # fmt: skip
    """The packed operation on a slot pool; one text for the three siblings."""
    run = runner((q, k, v, g, beta), num_householder, scale, use_qk_l2norm, chunk)
    o = np.zeros((*q.shape[:2], *v.shape[2:]))
    pools.fill_prefill(
        run, o, cu_seqlens, turned(state_pool, state_layout), read_slots, write_slots, snapshot_positions,
        None if snapshot_states is None else turned(snapshot_states, state_layout),
    )  # fmt: skip
    return round_to(o, dtype_name(v))


def gated_delta_rule_update(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state_pool: Array, read_slots: Array,
    write_slots: Array | None = None, intermediate_states: Array | None = None, num_accepted: Array | None = None,
    num_tokens: Array | None = None, *, num_householder: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, state_layout: str = "KV", chunk: int = 16,
) -> Array:  # fmt: skip
    """J tokens a row on a slot pool; one text for the three siblings."""
    run = runner((q, k, v, g, beta), num_householder, scale, use_qk_l2norm, chunk)
    o = np.zeros((*q.shape[:2], *v.shape[2:]))
    entries = None if intermediate_states is None else turned(intermediate_states, state_layout)
    pools.fill_update(
        run, o, turned(state_pool, state_layout), read_slots, write_slots, entries, num_accepted, num_tokens
    )  # fmt: skip
    return round_to(o, dtype_name(v))


def turned(states: Array, state_layout: str) -> Array:
    """A view with keys before values."""
    return np.moveaxis(states, -1, -2) if state_layout == "VK" else states


gated_delta_product = kimi_delta_attention = gated_delta_rule
gated_delta_product_prefill = kimi_delta_attention_prefill = gated_delta_rule_prefill
gated_delta_product_update = kimi_delta_attention_update = gated_delta_rule_update


def commit_accepted(
    pools: Sequence[Array], intermediates: Sequence[Array], slots: Array, num_accepted: Array
) -> None:
    """Rollback, slot by slot: what the row that names it accepted, else what it held."""
    wanted = {slot: entry for slot, entry in zip(slots.tolist(), num_accepted.tolist(), strict=True) if entry >= 0}
    for pool, entries in zip(pools, intermediates, strict=True):
        for slot in range(len(pool)):
            pool[slot] = entries[slot, wanted[slot]] if slot in wanted else pool[slot]
