"""The gated delta rule, its product form and Kimi delta attention on CUDA tensors (GDN, GDP, KDA).

Names, arguments and meaning are those of `statescan.reference.delta`. Decode reads and writes pools in place through
slot indices, honours any strides, never waits for the device, and compiles nothing for what a batch contains: a call
can be captured in a CUDA graph and replayed with other slots, counts and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from statescan.fast.checks import (
    NAMES,
    as_index,
    check_call,
    check_decay,
    check_runnable,
    live_pack,
    live_tokens,
)
from statescan.fast.kernels.commit import commit_kernel
from statescan.fast.kernels.delta_update import delta_update_kernel
from statescan.fast.launch import ceil_div, device_of, is_traced, power_of_2, register
from statescan.fast.norms import L2NORM_EPS
from statescan.fast.prefill import launch_delta
from statescan.fast.relaunch import Key, key_of, remember, remembered
from statescan.fast.tiling import Tile, reaches_far, slot_strides, state_tile
from statescan.spec.contract import INDEX_TYPES, DtypeError, ShapeError, SlotError, UnsupportedError

MOST_AXES = 4
"""Axes of a slot that a commit can walk over, once those that lie in a row are joined."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, g, beta."""
NAMES_OF_TENSORS = ("q", "k", "v", "g", "beta", "state_pool", "read_slots", "write_slots", "intermediate_states",
                    "num_accepted", "num_tokens")  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Decode, once for all siblings
# ---------------------------------------------------------------------------------------------------------------------


def run_update(
    name: str, inputs: Inputs, pool: Tensor, read_slots: Tensor, write_slots: Tensor | None, entries: Tensor | None,
    num_accepted: Tensor | None, num_tokens: Tensor | None, copies: int, scale: float | None, use_qk_l2norm: bool,
    state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    """Check the call `name` and run it: o `[N, J, HV, V]`."""
    q, _, v, g, _ = inputs
    tensors = (*inputs, pool, read_slots, write_slots, entries, num_accepted, num_tokens)
    key: Key | None = None
    if v.is_cuda and not check:
        key, pointers = key_of(tensors, name, copies, scale, use_qk_l2norm, state_layout)
        launch = remembered.get(key)
        if launch is not None:
            o = new_output(*inputs)
            with device_of(v):
                launch.again([*pointers, o.data_ptr()])
            return o
    settings = {"num_householder": copies, "state_layout": state_layout}
    values = check_call(name, dict(zip(NAMES_OF_TENSORS, tensors, strict=True)), settings, check)
    check_steps(q.shape[1])
    if values is not None:
        check_decay(g, live_tokens(values, *q.shape[:2]))
    o = new_output(*inputs)
    launch_update(
        inputs, o, pool, read_slots, write_slots, entries, num_accepted, num_tokens, copies, scale, use_qk_l2norm,
        state_layout, key=key,
    )  # fmt: skip
    return o


def new_output(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """An unwritten o `[N, J, HV, V]`."""
    return torch.empty((*q.shape[:2], *v.shape[2:]), dtype=v.dtype, device=v.device)


def launch_update(
    inputs: Inputs, o: Tensor, pool: Tensor, read_slots: Tensor, write_slots: Tensor | None, entries: Tensor | None,
    num_accepted: Tensor | None, num_tokens: Tensor | None, copies: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, state_layout: str = "KV", tile: Tile | None = None, key: Key | None = None,
) -> None:  # fmt: skip
    """Fill contiguous o, the pool and the entries of a checked call; with a key, remember the launch under it."""
    q, k, v, g, beta = inputs
    (rows, steps, heads, keys), (value_heads, values) = q.shape, v.shape[2:]
    pool_n, *inside = slot_strides(pool, state_layout == "KV")
    entry_j, *inside_entry = (0, 0, 0, 0) if entries is None else slot_strides(entries, state_layout == "KV")
    tile = tile or state_tile(rows * value_heads, values, keys, pool.element_size(), inside[2], inside[1])
    programs = rows * value_heads * ceil_div(values, tile.rows)
    if programs == 0:
        return
    per_channel = g.ndim == 4
    far = reaches_far([
        (keys, inside[1]), (values, inside[2]), (keys, inside_entry[1]), (values, inside_entry[2]),
        (keys, q.stride(3)), (keys, k.stride(3)), (values, v.stride(3)), (keys, g.stride(-1)),
    ])  # fmt: skip
    arguments = (
        q, *q.stride(), k, *k.stride(), v, *v.stride(), g, *g.stride()[:3], g.stride(3) if per_channel else 0,
        beta, *beta.stride(), o, keys**-0.5 if scale is None else float(scale),
        pool, pool_n, entries, 0 if entries is None else entries.stride(0),
        as_index(read_slots), as_index(read_slots if write_slots is None else write_slots),
        as_index(num_accepted), as_index(num_tokens), pool.shape[0], 0 if entries is None else entries.shape[1],
        *inside, entry_j, *inside_entry, steps, copies, value_heads, value_heads // heads, keys, values,
        tile.rows, tile.chunks, tile.inner, power_of_2(steps), per_channel, use_qk_l2norm, L2NORM_EPS, far,
    )  # fmt: skip
    grid = (programs, 1, 1)
    with device_of(q):
        compiled = delta_update_kernel[grid](*arguments, num_warps=tile.warps)
        if key is not None:
            tensors = (*inputs, pool, read_slots, write_slots, entries, num_accepted, num_tokens, o)
            remember(key, compiled, grid, arguments, tensors)


def check_steps(steps: int) -> None:
    """A row has a base token at least; fewer tokens in some rows are a matter of num_tokens (SPEC-1, SPEC-6)."""
    if steps == 0:
        raise UnsupportedError("0 tokens a row: 1 or more are served, rows with fewer by num_tokens (SPEC-1)")


# ---------------------------------------------------------------------------------------------------------------------
# Prefill, once for all siblings
# ---------------------------------------------------------------------------------------------------------------------

NAMES_IN_A_PACK = ("q", "k", "v", "g", "beta", "cu_seqlens", "state_pool", "read_slots", "write_slots",
                   "snapshot_positions", "snapshot_states")  # fmt: skip


def run_prefill(
    name: str, inputs: Inputs, cu_seqlens: Tensor, pool: Tensor, read_slots: Tensor, write_slots: Tensor | None,
    positions: Tensor | None, snapshots: Tensor | None, copies: int, scale: float | None, use_qk_l2norm: bool,
    state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    """Check the call `name` and run it: o `[1, T, HV, V]`."""
    tensors = (*inputs, cu_seqlens, pool, read_slots, write_slots, positions, snapshots)
    settings = {"num_householder": copies, "state_layout": state_layout}
    values = check_call(name, dict(zip(NAMES_IN_A_PACK, tensors, strict=True)), settings, check)
    if values is not None:
        check_decay(inputs[3], live_pack(values))
    o = new_output(*inputs)
    launch_delta(inputs, o, cu_seqlens, pool, read_slots, write_slots, positions, snapshots, copies, scale,
                 use_qk_l2norm, state_layout)  # fmt: skip
    return o


# ---------------------------------------------------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------------------------------------------------


def gated_delta_rule_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, state_pool: Tensor,
    read_slots: Tensor, write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
    snapshot_states: Tensor | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    state_layout: str = "KV", check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The gated delta rule on a pack whose rows resume from, and store to, slots (SLOT-2, SLOT-3, SLOT-8).

    q, k `[1, T, H, K]`, v `[1, T, HV, V]`, g, beta `[1, T, HV]`, cu_seqlens `[N+1]`, state_pool `[slots, HV, K, V]`
    ("VK": `[slots, HV, V, K]`, and so for the snapshots), read_slots and write_slots `[N]`; snapshot_states
    `[X, HV, K, V]` receive the states at snapshot_positions `[X]` (SNAP-3). Matrix products have operands of the type
    of q and k. Returns o `[1, T, HV, V]`. Raises PackingError, ShapeError, DtypeError, SlotError, UnsupportedError.
    """
    run = _gdn_prefill_op if is_traced(q) else _gdn_prefill
    return run(q, k, v, g, beta, cu_seqlens, state_pool, read_slots, write_slots, snapshot_positions, snapshot_states,
               scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def gated_delta_product_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, state_pool: Tensor,
    read_slots: Tensor, write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
    snapshot_states: Tensor | None = None, *, num_householder: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, state_layout: str = "KV", check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The gated delta product on a pack and a slot pool; a snapshot is the state after a token's last copy (SNAP-3).

    As `gated_delta_rule_prefill` with k, v, beta on T*M rows, row t*M + m being copy m of token t (GDP-5).
    """
    run = _gdp_prefill_op if is_traced(q) else _gdp_prefill
    return run(q, k, v, g, beta, cu_seqlens, state_pool, read_slots, write_slots, snapshot_positions, snapshot_states,
               num_householder, scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def kimi_delta_attention_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, state_pool: Tensor,
    read_slots: Tensor, write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
    snapshot_states: Tensor | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    state_layout: str = "KV", check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The delta rule with a decay per key channel on a pack and a slot pool (KDA-1, SLOT-2).

    As `gated_delta_rule_prefill` with g `[1, T, HV, K]`.
    """
    run = _kda_prefill_op if is_traced(q) else _kda_prefill
    return run(q, k, v, g, beta, cu_seqlens, state_pool, read_slots, write_slots, snapshot_positions, snapshot_states,
               scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def gated_delta_rule_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, intermediate_states: Tensor | None = None, num_accepted: Tensor | None = None,
    num_tokens: Tensor | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    state_layout: str = "KV", check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The gated delta rule on J tokens a row, state from and to its slot (SLOT-2, SLOT-3, SPEC-1).

    q, k `[N, J, H, K]`, v `[N, J, HV, V]`, g, beta `[N, J, HV]`, state_pool `[slots, HV, K, V]` ("VK", the faster one:
    `[slots, HV, V, K]`, and so for the entries); entry j of intermediate_states `[slots, I, HV, K, V]`, I >= J, becomes
    the state after token j (SPEC-2); num_accepted, num_tokens `[N]` (SPEC-3, SPEC-6). Returns o `[N, J, HV, V]`. Raises
    ShapeError, DtypeError, SlotError, UnsupportedError.
    """
    run = _gdn_op if is_traced(q) else _gdn
    return run(q, k, v, g, beta, state_pool, read_slots, write_slots, intermediate_states, num_accepted, num_tokens,
               scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def gated_delta_product_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, intermediate_states: Tensor | None = None, num_accepted: Tensor | None = None,
    num_tokens: Tensor | None = None, *, num_householder: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, state_layout: str = "KV", check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The gated delta product on J tokens a row; an intermediate entry is the state after a token's last copy (SPEC-2).

    As `gated_delta_rule_update` with k, v, beta on J*M rows, row j*M + m being copy m of token j (GDP-5).
    """
    run = _gdp_op if is_traced(q) else _gdp
    return run(q, k, v, g, beta, state_pool, read_slots, write_slots, intermediate_states, num_accepted, num_tokens,
               num_householder, scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def kimi_delta_attention_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, intermediate_states: Tensor | None = None, num_accepted: Tensor | None = None,
    num_tokens: Tensor | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    state_layout: str = "KV", check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The delta rule with a decay per key channel on J tokens a row, state from and to its slot (KDA-1, SPEC-1).

    As `gated_delta_rule_update` with g `[N, J, HV, K]`.
    """
    run = _kda_op if is_traced(q) else _kda
    return run(q, k, v, g, beta, state_pool, read_slots, write_slots, intermediate_states, num_accepted, num_tokens,
               scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def _gdn(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, entries: Tensor | None, num_accepted: Tensor | None, num_tokens: Tensor | None,
    scale: float | None, use_qk_l2norm: bool, state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    return run_update("gated_delta_rule_update", (q, k, v, g, beta), pool, read_slots, write_slots, entries,
                      num_accepted, num_tokens, 1, scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def _gdp(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, entries: Tensor | None, num_accepted: Tensor | None, num_tokens: Tensor | None,
    num_householder: int, scale: float | None, use_qk_l2norm: bool, state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    return run_update("gated_delta_product_update", (q, k, v, g, beta), pool, read_slots, write_slots, entries,
                      num_accepted, num_tokens, num_householder, scale, use_qk_l2norm, state_layout,
                      check)  # fmt: skip


def _kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, entries: Tensor | None, num_accepted: Tensor | None, num_tokens: Tensor | None,
    scale: float | None, use_qk_l2norm: bool, state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    return run_update("kimi_delta_attention_update", (q, k, v, g, beta), pool, read_slots, write_slots, entries,
                      num_accepted, num_tokens, 1, scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def _gdn_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, positions: Tensor | None, snapshots: Tensor | None, scale: float | None,
    use_qk_l2norm: bool, state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    return run_prefill("gated_delta_rule_prefill", (q, k, v, g, beta), cu_seqlens, pool, read_slots, write_slots,
                       positions, snapshots, 1, scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def _gdp_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, positions: Tensor | None, snapshots: Tensor | None, num_householder: int,
    scale: float | None, use_qk_l2norm: bool, state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    return run_prefill("gated_delta_product_prefill", (q, k, v, g, beta), cu_seqlens, pool, read_slots, write_slots,
                       positions, snapshots, num_householder, scale, use_qk_l2norm, state_layout, check)  # fmt: skip


def _kda_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, positions: Tensor | None, snapshots: Tensor | None, scale: float | None,
    use_qk_l2norm: bool, state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    return run_prefill("kimi_delta_attention_prefill", (q, k, v, g, beta), cu_seqlens, pool, read_slots, write_slots,
                       positions, snapshots, 1, scale, use_qk_l2norm, state_layout, check)  # fmt: skip


_gdn_prefill_op = register("gated_delta_rule_prefill", _gdn_prefill, new_output)
_gdp_prefill_op = register("gated_delta_product_prefill", _gdp_prefill, new_output)
_kda_prefill_op = register("kimi_delta_attention_prefill", _kda_prefill, new_output)
_gdn_op = register("gated_delta_rule_update", _gdn, new_output)
_gdp_op = register("gated_delta_product_update", _gdp, new_output)
_kda_op = register("kimi_delta_attention_update", _kda, new_output)

# ---------------------------------------------------------------------------------------------------------------------
# Rollback
# ---------------------------------------------------------------------------------------------------------------------


def commit_accepted(
    pools: Sequence[Tensor], intermediates: Sequence[Tensor], slots: Tensor, num_accepted: Tensor, *,
    check: bool | None = None,
) -> None:  # fmt: skip
    """Copy entry num_accepted[n] of each slot's intermediates into its pool, window and state together (SPEC-3).

    pools `[slots, ...]` and intermediates `[slots, I, ...]` in the same order, slots and num_accepted `[N]`; a row
    with a negative slot or a negative count changes nothing. Raises SlotError, ShapeError, DtypeError,
    UnsupportedError, before any copy.
    """
    check_commit(pools, intermediates, slots, num_accepted, check)
    for pool, entries in zip(pools, intermediates, strict=True):
        (_commit_op if is_traced(pool) else _commit)(pool, entries, slots, num_accepted)


def check_commit(
    pools: Sequence[Tensor], intermediates: Sequence[Tensor], slots: Tensor, num_accepted: Tensor, check: bool | None
) -> None:
    """The rules of `commit_accepted`: pairs that fit, and where the values may be looked at slots and entries."""
    if len(pools) != len(intermediates):
        raise ShapeError(f"{len(pools)} pools and {len(intermediates)} intermediates: one for each (ERR-1)")
    if slots.ndim != 1 or slots.shape != num_accepted.shape:
        raise ShapeError(f"slots {list(slots.shape)} and num_accepted {list(num_accepted.shape)}: [N] twice (ERR-1)")
    for name, index in (("slots", slots), ("num_accepted", num_accepted)):
        if NAMES.get(index.dtype) not in INDEX_TYPES:
            raise SlotError(f"{name} has type {index.dtype}: integers (i32 or i64) are needed (SLOT-5)")
    for i, (pool, entries) in enumerate(zip(pools, intermediates, strict=True)):
        check_pair(i, pool, entries, slots)
    if (check or not slots.is_cuda) and not torch.compiler.is_compiling():
        for pool, entries in zip(pools, intermediates, strict=True):
            check_entries(slots.tolist(), num_accepted.tolist(), pool.shape[0], entries.shape[1])


def check_pair(i: int, pool: Tensor, entries: Tensor, slots: Tensor) -> None:
    """One pool and its intermediates: shapes, types, devices, and axes that a kernel can walk over."""
    if entries.ndim < 2 or (entries.shape[0], *entries.shape[2:]) != tuple(pool.shape):
        shapes = f"{list(entries.shape)} for pools[{i}] {list(pool.shape)}"
        raise ShapeError(f"intermediates[{i}] has shape {shapes}: [slots, I, ...] is needed (ERR-1)")
    if entries.dtype != pool.dtype:
        raise DtypeError(f"intermediates[{i}] is {entries.dtype}, pools[{i}] {pool.dtype} (ERR-1)")
    if not pool.device == entries.device == slots.device:
        devices = f"{pool.device}, {entries.device}, {slots.device}"
        raise UnsupportedError(f"pools[{i}], intermediates[{i}] and slots are on {devices}: one device (ERR-5)")
    if len(join_axes(pool, entries)[0]) > MOST_AXES:
        raise UnsupportedError(f"pools[{i}] {list(pool.shape)} has more than {MOST_AXES} separate axes (ERR-5)")
    check_runnable(pool, f"pools[{i}]")


def check_entries(slots: list[int], num_accepted: list[int], pool_size: int, entries: int) -> None:
    """Slots are distinct and in the pool, entries exist; negative ones mean nothing there (SLOT-2, SLOT-4, SLOT-5)."""
    seen: dict[int, int] = {}
    for n, (slot, accepted) in enumerate(zip(slots, num_accepted, strict=True)):
        if slot >= pool_size:
            raise SlotError(f"slots[{n}]={slot} is outside 0..{pool_size - 1} (SLOT-5)")
        if slot >= 0 and seen.setdefault(slot, n) != n:
            raise SlotError(f"slots[{n}]={slot} is also slots[{seen[slot]}]: each once (SLOT-4)")
        if accepted >= entries:
            raise SlotError(f"num_accepted[{n}]={accepted} is outside 0..{entries - 1} (SPEC-3)")


def join_axes(pool: Tensor, entries: Tensor) -> tuple[list[int], list[int], list[int]]:
    """Sizes and strides (pool, entry) of a slot's axes in memory order, those that lie in a row in both joined.

    >>> join_axes(torch.empty(3, 4, 5, 6).transpose(2, 3), torch.empty(3, 2, 4, 5, 6).transpose(3, 4))
    ([120], [1], [1])
    """
    axes = sorted(zip(pool.shape[1:], pool.stride()[1:], entries.stride()[2:], strict=True), key=lambda a: -a[1])
    joined: list[tuple[int, int, int]] = []
    for size, p, e in axes:
        if size == 1:
            continue
        if joined and joined[-1][1:] == (p * size, e * size):
            size *= joined.pop()[0]
        joined.append((size, p, e))
    sizes, pool_strides, entry_strides = zip(*joined, strict=True) if joined else ((1,), (1,), (1,))
    return list(sizes), list(pool_strides), list(entry_strides)


def _commit(pool: Tensor, entries: Tensor, slots: Tensor, num_accepted: Tensor) -> None:
    sizes, pool_strides, entry_strides = (
        [fill] * (MOST_AXES - len(axes)) + axes
        for fill, axes in zip((1, 0, 0), join_axes(pool, entries), strict=True)
    )
    size = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    block = min(2048, power_of_2(max(1, size)))
    programs = slots.shape[0] * ceil_div(size, block)
    if programs == 0:
        return
    with device_of(pool):
        commit_kernel[(programs,)](
            pool, pool.stride(0), entries, *entries.stride()[:2], as_index(slots), as_index(num_accepted),
            pool.shape[0], entries.shape[1], *sizes[1:], size, *pool_strides, *entry_strides, block, num_warps=4,
        )  # fmt: skip


_commit_op = torch.library.custom_op(
    "statescan::commit_accepted", _commit, mutates_args=("pool",),
    schema="(Tensor(a!) pool, Tensor entries, Tensor slots, Tensor num_accepted) -> ()",
)  # fmt: skip
