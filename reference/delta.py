"""The gated delta rule, its product form and Kimi delta attention, token by token (GDN, GDP, KDA).

    S <- exp(g) S                      # DECAY    one factor per value head; KDA: row k of S by exp(g_k)
    for m in 0 .. M-1:                 #          GDN and KDA have one copy
        r <- v_m - S^T k_m             # CORRECT
        S <- S + k_m (beta_m r)^T      # WRITE
    o <- S^T (scale q)                 # READ     once, after the last copy

A state `[HV, K, V]` is a memory from keys to values. One step serves all three: GDN is GDP with one copy, KDA has a
gate per key channel. Sources: https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2502.10297,
https://arxiv.org/abs/2510.26692
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from statescan.reference.arrays import Array, Float64, add_along, check_arguments, dtype_name, round_to, widen
from statescan.reference.functions import exp
from statescan.reference.host.rules import LEAST_GATE, check_gate
from statescan.reference.norms import L2NORM_EPS, normalise
from statescan.reference.packed import unpack_segments
from statescan.reference.pools import live_rows, scan_prefill, scan_update, state_type
from statescan.reference.sites import Site, keep
from statescan.spec.contract import INDEX_TYPES, DtypeError, ShapeError, SlotError

Inputs = tuple[Array, Array, Array, Array, Array]
"""q, k, v, g, beta, in the shapes of the operation table."""
Tokens = tuple[Float64, Float64, Float64, Float64, Float64]
"""The same for one row, per value head and copy: `[n, HV, K]`, `[n, M, HV, K]`, `[n, M, HV, V]`, `[n, HV, K or 1]`,
`[n, M, HV]`; q is scaled, q and k normalised if asked."""
RowScan = Callable[[int, slice, Float64], tuple[Float64, list[Float64]]]

# ---------------------------------------------------------------------------------------------------------------------
# One token, one segment
# ---------------------------------------------------------------------------------------------------------------------


def step_delta(
    state: Float64, q: Float64, k: Float64, v: Float64, g: Float64, beta: Float64, at: Site = keep
) -> tuple[Float64, Float64]:
    """One token of every value head into state `[HV, K, V]`; returns (o `[HV, V]`, state after it) (GDN, GDP, KDA).

    q `[HV, K]` (scaled), k `[M, HV, K]`, v `[M, HV, V]`, beta `[M, HV]`; g `[HV, 1]`, per channel `[HV, K]` (KDA-1).

    >>> one = np.ones((1, 1, 1))
    >>> o, state = step_delta(8 * one, one[0], one, 6 * one, 0 * one[0], one[0] / 2)
    >>> o.tolist(), state.tolist()
    ([[7.0]], [[[7.0]]])
    """
    # DECAY
    state = at("decay", exp(at("g", g)))[:, :, None] * state  # [HV, K, V]
    for m in range(k.shape[0]):
        # CORRECT
        known = add_along(at("k_correct", k[m])[:, :, None] * at("state_correct", state), 1)  # [HV, V]
        correction = at("correction", beta[m][:, None] * (at("v", v[m]) - known))
        # WRITE
        state = at("state", state + at("k_write", k[m])[:, :, None] * correction[:, None, :])
    # READ
    return add_along(at("q", q)[:, :, None] * at("state_read", state), 1), state


def scan_delta(
    tokens: Tokens, state: Float64, at: Site = keep, history: bool = True
) -> tuple[Float64, list[Float64]]:
    """All tokens of one segment; returns o `[n, HV, V]` and the n + 1 states, entering one first (GDN-6).

    Without `history` only the last state is kept, which is what a long segment can afford.
    """
    q, k, v, g, beta = tokens
    state = at("entering", state)
    o, states = np.zeros((q.shape[0], *v.shape[2:])), [state]
    for t in range(q.shape[0]):
        o[t], state = step_delta(state, q[t], k[t], v[t], g[t], beta[t], at)
        states = [*states, state] if history else [state]
    return o, states


def unpack_tokens(
    inputs: Inputs, row: int, tokens: slice, copies: int, scale: float | None, use_qk_l2norm: bool, at: Site = keep
) -> Tokens:
    """One row's tokens in float64, heads repeated to value heads (GDN-5), copies split off token-major (GDP-5)."""
    q, k, v, g, beta = inputs
    count, heads = tokens.stop - tokens.start, head_map(v.shape[2], q.shape[2])
    wide = slice(tokens.start * copies, tokens.stop * copies)
    queries, keys = widen(q[row, tokens]), widen(k[row, wide])
    if use_qk_l2norm:
        queries, keys = normalise(queries, L2NORM_EPS, at), normalise(keys, L2NORM_EPS, at)
    gates = widen(g[row, tokens])
    return (
        (queries * scale_of(scale, q.shape[3]))[:, heads],
        keys[:, heads].reshape(count, copies, len(heads), k.shape[3]),
        widen(v[row, wide]).reshape(count, copies, *v.shape[2:]),
        gates if g.ndim == 4 else gates[:, :, None],
        widen(beta[row, wide]).reshape(count, copies, len(heads)),
    )


def head_map(value_heads: int, heads: int) -> list[int]:
    """The query/key head of each value head: neighbours share one (GDN-5).

    >>> head_map(4, 2)
    [0, 0, 1, 1]
    """
    return [head // (value_heads // heads) for head in range(value_heads)]


def scale_of(scale: float | None, keys: int) -> float:
    """The factor on q: what is given, else K^-1/2 (GDN-4)."""
    return float(1.0 / np.sqrt(np.float64(keys))) if scale is None else float(scale)


def row_scan(
    inputs: Inputs, copies: int, scale: float | None, use_qk_l2norm: bool, at: Site = keep, history: bool = True
) -> RowScan:
    """The scan of one batch row's tokens from an entering state, as `reference.pools` wants it."""

    def scan(row: int, tokens: slice, entering: Float64) -> tuple[Float64, list[Float64]]:
        return scan_delta(unpack_tokens(inputs, row, tokens, copies, scale, use_qk_l2norm, at), entering, at, history)

    return scan


# ---------------------------------------------------------------------------------------------------------------------
# The three ways to call, once for all siblings
# ---------------------------------------------------------------------------------------------------------------------


def run_delta(
    name: str, inputs: Inputs, cu_seqlens: Array | None, initial_state: Array | None, copies: int,
    scale: float | None, use_qk_l2norm: bool, output_final_state: bool,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The packed operation `name`: (o, final_state or None)."""
    segments = check_packed(name, inputs, cu_seqlens, initial_state, copies)
    q, k, v, _, _ = inputs
    o = np.zeros((*q.shape[:2], *v.shape[2:]))
    final = np.zeros((len(segments), v.shape[2], k.shape[3], v.shape[3]))
    scan = row_scan(inputs, copies, scale, use_qk_l2norm, history=False)
    for n, (row, tokens) in enumerate(segments):
        entering = np.zeros(final.shape[1:]) if initial_state is None else widen(initial_state[n])
        o[row, tokens], states = scan(row, tokens, entering)
        final[n] = states[-1]
    last = round_to(final, state_type(initial_state, v)) if output_final_state else None
    return round_to(o, dtype_name(v)), last


def check_packed(
    name: str, inputs: Inputs, cu_seqlens: Array | None, initial_state: Array | None, copies: int
) -> list[tuple[int, slice]]:
    """Check a packed call; its segments."""
    tensors = {**by_name(inputs), "cu_seqlens": cu_seqlens, "initial_state": initial_state}
    check_arguments(name, tensors, {"num_householder": copies})
    segments = unpack_segments(inputs[0].shape, None, cu_seqlens, initial_state)
    check_decay(inputs[3], segments)
    return segments


def run_prefill(
    name: str, inputs: Inputs, cu_seqlens: Array, pool: Array, read_slots: Array, write_slots: Array | None,
    positions: Array | None, snapshots: Array | None, copies: int, scale: float | None, use_qk_l2norm: bool,
    state_layout: str,
) -> Array:  # fmt: skip
    """The packed operation `name` on a slot pool: o."""
    tensors = {**by_name(inputs), "cu_seqlens": cu_seqlens, "state_pool": pool, "read_slots": read_slots,
               "write_slots": write_slots, "snapshot_positions": positions, "snapshot_states": snapshots}  # fmt: skip
    check_arguments(name, tensors, {"num_householder": copies, "state_layout": state_layout})
    rows = live_rows(read_slots, write_slots)
    check_decay(inputs[3], [(0, slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))) for n in rows])
    o = np.zeros((*inputs[0].shape[:2], *inputs[2].shape[2:]))
    scan = row_scan(inputs, copies, scale, use_qk_l2norm)
    scan_prefill(
        lambda n, tokens, entering: scan(0, tokens, entering), o, cu_seqlens, keys_first(pool, state_layout),
        read_slots, write_slots, positions, None if snapshots is None else keys_first(snapshots, state_layout),
    )  # fmt: skip
    return round_to(o, dtype_name(inputs[2]))


def run_update(
    name: str, inputs: Inputs, pool: Array, read_slots: Array, write_slots: Array | None, intermediates: Array | None,
    num_accepted: Array | None, num_tokens: Array | None, copies: int, scale: float | None, use_qk_l2norm: bool,
    state_layout: str,
) -> Array:  # fmt: skip
    """J tokens a row on a slot pool: o."""
    tensors = {**by_name(inputs), "state_pool": pool, "read_slots": read_slots, "write_slots": write_slots,
               "intermediate_states": intermediates, "num_accepted": num_accepted,
               "num_tokens": num_tokens}  # fmt: skip
    check_arguments(name, tensors, {"num_householder": copies, "state_layout": state_layout})
    counts = [inputs[0].shape[1]] * inputs[0].shape[0] if num_tokens is None else num_tokens.tolist()
    check_decay(inputs[3], [(n, slice(0, counts[n])) for n in live_rows(read_slots, write_slots)])
    o = np.zeros((*inputs[0].shape[:2], *inputs[2].shape[2:]))
    entries = None if intermediates is None else keys_first(intermediates, state_layout)
    scan = row_scan(inputs, copies, scale, use_qk_l2norm)
    scan_update(
        scan, o, keys_first(pool, state_layout), read_slots, write_slots, entries, num_accepted, num_tokens
    )  # fmt: skip
    return round_to(o, dtype_name(inputs[2]))


def by_name(inputs: Inputs) -> dict[str, Array]:
    """The five token tensors under their names."""
    return dict(zip(("q", "k", "v", "g", "beta"), inputs, strict=True))


def keys_first(states: Array, state_layout: str) -> Array:
    """A view whose last two axes are [K, V], whatever the declared order: writing to it writes in place (SLOT-6)."""
    return states if state_layout == "KV" else np.swapaxes(states, -1, -2)


def check_decay(g: Array, live: Sequence[tuple[int, slice]]) -> None:
    """Every log-decay that reaches something lies in -1024..0; padding rows may hold anything (NUM-3, PACK-8)."""
    for row, tokens in live:
        values = widen(g[row, tokens])
        outside = np.argwhere(~((values >= LEAST_GATE) & (values <= 0)))
        for place in outside.tolist():
            check_gate((row, tokens.start + place[0], *place[1:]), float(values[tuple(place)]))


# ---------------------------------------------------------------------------------------------------------------------
# Gated delta rule
# ---------------------------------------------------------------------------------------------------------------------


def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array | None = None,
    initial_state: Array | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    output_final_state: bool = False, check: bool | None = None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The gated delta rule on a pack: returns (o, final_state or None) (GDN-1 to GDN-6).

    q, k `[1, T, H, K]`, v `[1, T, HV, V]`, g (log-decay, -1024..0) and beta `[1, T, HV]`, offsets cu_seqlens `[N+1]`
    (None: one segment), initial_state `[N, HV, K, V]`. o has v's type, final_state initial_state's, else float32
    (float64 for float64 v). Rows past the last offset give 0 (PACK-8). Raises PackingError, ShapeError, DtypeError,
    UnsupportedError (NUM-3). Source: https://arxiv.org/abs/2412.06464

    >>> q = k = np.array([[[[1.0, 0]], [[1, 0]]]])
    >>> v, g, beta = np.array([[[[4.0]], [[6]]]]), np.zeros((1, 2, 1)), np.array([[[1.0], [0.5]]])
    >>> o, final = gated_delta_rule(q, k, v, g, beta, scale=1.0, output_final_state=True)
    >>> o.ravel().tolist(), final.ravel().tolist()
    ([4.0, 5.0], [5.0, 0.0])
    """
    inputs = (q, k, v, g, beta)
    return run_delta("gated_delta_rule", inputs, cu_seqlens, initial_state, 1, scale, use_qk_l2norm, output_final_state)


def gated_delta_rule_prefill(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array, state_pool: Array, read_slots: Array,
    write_slots: Array | None = None, snapshot_positions: Array | None = None, snapshot_states: Array | None = None,
    *, scale: float | None = None, use_qk_l2norm: bool = False, state_layout: str = "KV", check: bool | None = None,
) -> Array:  # fmt: skip
    """The gated delta rule on a pack whose rows resume from, and store to, slots (SLOT-2, SLOT-3, SLOT-8).

    Token tensors as `gated_delta_rule`; state_pool `[slots, HV, K, V]` ("VK": `[slots, HV, V, K]`, and so for the
    snapshots), read_slots and write_slots `[N]`, snapshot_states `[X, HV, K, V]` receive the states at
    snapshot_positions `[X]` (SNAP-3). Returns o `[1, T, HV, V]`. Raises as `gated_delta_rule`, and SlotError.

    >>> one, pool = np.ones((1, 1, 1, 1)), np.array([[[[8.0]]]])
    >>> o = gated_delta_rule_prefill(
    ...     one, one, 6 * one, 0 * one[0], one[0] / 2, np.array([0, 1]), pool, np.array([0]), scale=1.0)
    >>> o.ravel().tolist(), pool.ravel().tolist()
    ([7.0], [7.0])
    """
    return run_prefill(
        "gated_delta_rule_prefill", (q, k, v, g, beta), cu_seqlens, state_pool, read_slots, write_slots,
        snapshot_positions, snapshot_states, 1, scale, use_qk_l2norm, state_layout,
    )  # fmt: skip


def gated_delta_rule_update(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state_pool: Array, read_slots: Array,
    write_slots: Array | None = None, intermediate_states: Array | None = None, num_accepted: Array | None = None,
    num_tokens: Array | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    state_layout: str = "KV", check: bool | None = None,
) -> Array:  # fmt: skip
    """The gated delta rule on J tokens a row, state from and to its slot (SLOT-2, SLOT-3, SPEC-1).

    q, k `[N, J, H, K]`, v `[N, J, HV, V]`, g, beta `[N, J, HV]`; entry j of intermediate_states
    `[slots, I, HV, K, V]`, I >= J, becomes the state after token j (SPEC-2); num_accepted, num_tokens `[N]` (SPEC-3,
    SPEC-6). Returns o `[N, J, HV, V]`. Raises ShapeError, DtypeError, SlotError, UnsupportedError.

    >>> one, pool = np.ones((1, 1, 1, 1)), np.array([[[[8.0]]]])
    >>> gated_delta_rule_update(one, one, 6 * one, 0 * one[0], one[0] / 2, pool, np.array([0]), scale=1.0).item()
    7.0
    """
    return run_update(
        "gated_delta_rule_update", (q, k, v, g, beta), state_pool, read_slots, write_slots, intermediate_states,
        num_accepted, num_tokens, 1, scale, use_qk_l2norm, state_layout,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Gated delta product
# ---------------------------------------------------------------------------------------------------------------------


def gated_delta_product(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array | None = None,
    initial_state: Array | None = None, *, num_householder: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, output_final_state: bool = False, check: bool | None = None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The gated delta product on a pack: M writes a token, one decay before and one read after them (GDP-1 to GDP-5).

    As `gated_delta_rule` with k, v, beta on T*M rows, row t*M + m being copy m of token t; M = num_householder.
    Source: https://arxiv.org/abs/2502.10297

    >>> q, k = np.array([[[[0.0, 1]]]]), np.array([[[[1.0, 0]], [[1, 1]]]])
    >>> v, g, beta = np.array([[[[4.0]], [[6]]]]), np.zeros((1, 1, 1)), np.ones((1, 2, 1))
    >>> gated_delta_product(q, k, v, g, beta, num_householder=2, scale=1.0)[0].item()
    2.0
    """
    return run_delta(
        "gated_delta_product", (q, k, v, g, beta), cu_seqlens, initial_state, num_householder, scale, use_qk_l2norm,
        output_final_state,
    )  # fmt: skip


def gated_delta_product_prefill(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array, state_pool: Array, read_slots: Array,
    write_slots: Array | None = None, snapshot_positions: Array | None = None, snapshot_states: Array | None = None,
    *, num_householder: int = 1, scale: float | None = None, use_qk_l2norm: bool = False, state_layout: str = "KV",
    check: bool | None = None,
) -> Array:  # fmt: skip
    """The gated delta product on a pack whose rows resume from, and store to, slots; positions count tokens (GDP-5).

    As `gated_delta_rule_prefill` with k, v, beta on T*M rows.

    >>> one, pool = np.ones((1, 1, 1, 1)), np.array([[[[8.0]]]])
    >>> two = np.ones((1, 2, 1, 1))
    >>> o = gated_delta_product_prefill(
    ...     one, two, 6 * two, 0 * one[0], two[0][None, :, :, 0] / 2, np.array([0, 1]), pool, np.array([0]),
    ...     num_householder=2, scale=1.0)
    >>> o.ravel().tolist(), pool.ravel().tolist()
    ([6.5], [6.5])
    """
    return run_prefill(
        "gated_delta_product_prefill", (q, k, v, g, beta), cu_seqlens, state_pool, read_slots, write_slots,
        snapshot_positions, snapshot_states, num_householder, scale, use_qk_l2norm, state_layout,
    )  # fmt: skip


def gated_delta_product_update(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state_pool: Array, read_slots: Array,
    write_slots: Array | None = None, intermediate_states: Array | None = None, num_accepted: Array | None = None,
    num_tokens: Array | None = None, *, num_householder: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, state_layout: str = "KV", check: bool | None = None,
) -> Array:  # fmt: skip
    """The gated delta product on J tokens a row; an intermediate entry is the state after a token's last copy (SPEC-2).

    As `gated_delta_rule_update` with k, v, beta on J*M rows.

    >>> one, pool = np.ones((1, 1, 1, 1)), np.array([[[[8.0]]]])
    >>> gated_delta_product_update(one, one, 6 * one, 0 * one[0], one[0] / 2, pool, np.array([0]), scale=1.0).item()
    7.0
    """
    return run_update(
        "gated_delta_product_update", (q, k, v, g, beta), state_pool, read_slots, write_slots, intermediate_states,
        num_accepted, num_tokens, num_householder, scale, use_qk_l2norm, state_layout,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Kimi delta attention
# ---------------------------------------------------------------------------------------------------------------------


def kimi_delta_attention(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array | None = None,
    initial_state: Array | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    output_final_state: bool = False, check: bool | None = None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The delta rule with a decay per key channel: row k of the state decays by exp(g_k) (KDA-1, KDA-2).

    As `gated_delta_rule` with g `[1, T, HV, K]`. Source: https://arxiv.org/abs/2510.26692

    >>> q, k = np.array([[[[1.0, 1]]]]), np.zeros((1, 1, 1, 2))
    >>> v, g, beta = np.zeros((1, 1, 1, 1)), np.array([[[[0.0, -1024]]]]), np.ones((1, 1, 1))
    >>> o, _ = kimi_delta_attention(q, k, v, g, beta, None, np.array([[[[3.0], [5]]]]), scale=1.0)
    >>> o.item()
    3.0
    """
    return run_delta(
        "kimi_delta_attention", (q, k, v, g, beta), cu_seqlens, initial_state, 1, scale, use_qk_l2norm,
        output_final_state,
    )  # fmt: skip


def kimi_delta_attention_prefill(
    q: Array, k: Array, v: Array, g: Array, beta: Array, cu_seqlens: Array, state_pool: Array, read_slots: Array,
    write_slots: Array | None = None, snapshot_positions: Array | None = None, snapshot_states: Array | None = None,
    *, scale: float | None = None, use_qk_l2norm: bool = False, state_layout: str = "KV", check: bool | None = None,
) -> Array:  # fmt: skip
    """The delta rule with a decay per key channel on a pack whose rows resume from, and store to, slots (KDA-1).

    As `gated_delta_rule_prefill` with g `[1, T, HV, K]`.

    >>> one, pool = np.ones((1, 1, 1, 1)), np.array([[[[8.0]]]])
    >>> o = kimi_delta_attention_prefill(
    ...     one, one, 6 * one, 0 * one, one[0] / 2, np.array([0, 1]), pool, np.array([0]), scale=1.0)
    >>> o.ravel().tolist(), pool.ravel().tolist()
    ([7.0], [7.0])
    """
    return run_prefill(
        "kimi_delta_attention_prefill", (q, k, v, g, beta), cu_seqlens, state_pool, read_slots, write_slots,
        snapshot_positions, snapshot_states, 1, scale, use_qk_l2norm, state_layout,
    )  # fmt: skip


def kimi_delta_attention_update(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state_pool: Array, read_slots: Array,
    write_slots: Array | None = None, intermediate_states: Array | None = None, num_accepted: Array | None = None,
    num_tokens: Array | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    state_layout: str = "KV", check: bool | None = None,
) -> Array:  # fmt: skip
    """The delta rule with a decay per key channel on J tokens a row, state from and to its slot (KDA-1, SPEC-1).

    As `gated_delta_rule_update` with g `[N, J, HV, K]`.

    >>> one, pool = np.ones((1, 1, 1, 1)), np.array([[[[8.0]]]])
    >>> kimi_delta_attention_update(one, one, 6 * one, 0 * one, one[0] / 2, pool, np.array([0]), scale=1.0).item()
    7.0
    """
    return run_update(
        "kimi_delta_attention_update", (q, k, v, g, beta), state_pool, read_slots, write_slots, intermediate_states,
        num_accepted, num_tokens, 1, scale, use_qk_l2norm, state_layout,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Rollback
# ---------------------------------------------------------------------------------------------------------------------


def commit_accepted(
    pools: Sequence[Array], intermediates: Sequence[Array], slots: Array, num_accepted: Array, *,
    check: bool | None = None,
) -> None:  # fmt: skip
    """Copy entry num_accepted[n] of each slot's intermediates into its pool, window and state together (SPEC-3).

    pools `[slots, ...]` and intermediates `[slots, I, ...]` in the same order, slots and num_accepted `[N]`; a row
    with a negative slot or a negative count changes nothing. Raises SlotError, ShapeError, DtypeError, before any copy.

    >>> pool, entries = np.array([[1.0], [2]]), np.array([[[3.0], [4]], [[5], [6]]])
    >>> commit_accepted([pool], [entries], np.array([1, -1]), np.array([1, 0]))
    >>> pool.tolist()
    [[1.0], [6.0]]
    """
    check_commit(pools, intermediates, slots, num_accepted)
    for slot, accepted in zip(slots.tolist(), num_accepted.tolist(), strict=True):
        if slot >= 0 and accepted >= 0:
            for pool, entries in zip(pools, intermediates, strict=True):
                pool[slot] = entries[slot, accepted]


def check_commit(
    pools: Sequence[Array], intermediates: Sequence[Array], slots: Array, num_accepted: Array
) -> None:
    """The rules of `commit_accepted`: pairs that fit, then slots and entries."""
    if len(pools) != len(intermediates):
        raise ShapeError(f"{len(pools)} pools and {len(intermediates)} intermediates: one for each (ERR-1)")
    if slots.ndim != 1 or slots.shape != num_accepted.shape:
        raise ShapeError(f"slots {list(slots.shape)} and num_accepted {list(num_accepted.shape)}: [N] twice (ERR-1)")
    for name, index in (("slots", slots), ("num_accepted", num_accepted)):
        if dtype_name(index) not in INDEX_TYPES:
            raise SlotError(f"{name} has type {dtype_name(index)}: integers (i32 or i64) are needed (SLOT-5)")
    for i, (pool, entries) in enumerate(zip(pools, intermediates, strict=True)):
        if entries.ndim < 2 or (entries.shape[0], *entries.shape[2:]) != pool.shape:
            shapes = f"{list(entries.shape)} for pools[{i}] {list(pool.shape)}"
            raise ShapeError(f"intermediates[{i}] has shape {shapes}: [slots, I, ...] is needed (ERR-1)")
        if entries.dtype != pool.dtype:
            raise DtypeError(f"intermediates[{i}] is {dtype_name(entries)}, pools[{i}] {dtype_name(pool)} (ERR-1)")
        check_entries(slots.tolist(), num_accepted.tolist(), pool.shape[0], entries.shape[1])


def check_entries(slots: list[int], num_accepted: list[int], pool_size: int, entries: int) -> None:
    """Slots are distinct and in the pool, entries exist; negative ones mean nothing there (SLOT-2, SLOT-4, SLOT-5)."""
    for n, (slot, accepted) in enumerate(zip(slots, num_accepted, strict=True)):
        if slot >= pool_size:
            raise SlotError(f"slots[{n}]={slot} is outside 0..{pool_size - 1} (SLOT-5)")
        if slot >= 0 and slot in slots[:n]:
            raise SlotError(f"slots[{n}]={slot} is also slots[{slots.index(slot)}]: each once (SLOT-4)")
        if accepted >= entries:
            raise SlotError(f"num_accepted[{n}]={accepted} is outside 0..{entries - 1} (SPEC-3)")
