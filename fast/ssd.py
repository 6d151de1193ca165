"""The Mamba2 recurrence on CUDA tensors (SSD).

Names, arguments and meaning are those of `statescan.reference.ssd`. Decode reads and writes pools in place through slot
indices, honours any strides, never waits for the device, and compiles nothing for what a batch contains: a call can be
captured in a CUDA graph and replayed with other slots, counts and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from statescan.fast.checks import as_index, check_call
from statescan.fast.delta import check_steps
from statescan.fast.kernels.ssd_update import ssd_update_kernel
from statescan.fast.launch import ceil_div, device_of, is_traced, power_of_2, register, strides
from statescan.fast.prefill import launch_ssd
from statescan.fast.relaunch import Key, key_of, remember, remembered
from statescan.fast.tiling import Tile, reaches_far, slot_strides, state_tile
from statescan.spec.contract import UnsupportedError

ANY_STEP = (0.0, float("inf"))

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]
"""x, dt, A, B, C, D, z, dt_bias."""
NAMES_OF_TENSORS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_pool", "read_slots", "write_slots",
                    "intermediate_states", "num_accepted", "num_tokens")  # fmt: skip


NAMES_IN_A_PACK = (*NAMES_OF_TENSORS[:8], "cu_seqlens", *NAMES_OF_TENSORS[8:11], "snapshot_positions",
                   "snapshot_states")  # fmt: skip


def ssd_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    cu_seqlens: Tensor, state_pool: Tensor, read_slots: Tensor, write_slots: Tensor | None = None,
    snapshot_positions: Tensor | None = None, snapshot_states: Tensor | None = None, *, dt_softplus: bool = True,
    dt_limit: tuple[float, float] = ANY_STEP, check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The Mamba2 recurrence on a pack whose rows resume from, and store to, slots (SLOT-2, SLOT-3, SLOT-8).

    x, z `[1, T, H, P]`, dt `[1, T, H]`, A, dt_bias `[H]`, B, C `[1, T, G, R]`, D `[H]` or `[H, P]`, cu_seqlens
    `[N+1]`, state_pool `[slots, H, P, R]`, read_slots and write_slots `[N]`; snapshot_states `[X, H, P, R]` receive the
    states at snapshot_positions `[X]` (SNAP-3). Matrix products have operands of the type that x, B and C share, else
    float32. Returns y `[1, T, H, P]`. Raises PackingError, ShapeError, DtypeError, SlotError, UnsupportedError.
    """
    run = _prefill_op if is_traced(x) else _prefill
    return run(x, dt, A, B, C, D, z, dt_bias, cu_seqlens, state_pool, read_slots, write_slots, snapshot_positions,
               snapshot_states, dt_softplus, check_limit(dt_limit), check)  # fmt: skip


def _prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    cu_seqlens: Tensor, pool: Tensor, read_slots: Tensor, write_slots: Tensor | None, positions: Tensor | None,
    snapshots: Tensor | None, dt_softplus: bool, dt_limit: Sequence[float], check: bool | None,
) -> Tensor:  # fmt: skip
    inputs = (x, dt, A, B, C, D, z, dt_bias)
    tensors = (*inputs, cu_seqlens, pool, read_slots, write_slots, positions, snapshots)
    check_call("ssd_prefill", dict(zip(NAMES_IN_A_PACK, tensors, strict=True)), {}, check)
    y = new_output(x)
    launch_ssd(inputs, y, cu_seqlens, pool, read_slots, write_slots, positions, snapshots, dt_softplus, dt_limit)
    return y


def ssd_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    state_pool: Tensor, read_slots: Tensor, write_slots: Tensor | None = None,
    intermediate_states: Tensor | None = None, num_accepted: Tensor | None = None, num_tokens: Tensor | None = None,
    *, dt_softplus: bool = True, dt_limit: tuple[float, float] = ANY_STEP, check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The Mamba2 recurrence on J tokens a row, state from and to its slot (SLOT-2, SLOT-3, SPEC-1).

    x, z `[N, J, H, P]`, dt `[N, J, H]`, A, dt_bias `[H]`, B, C `[N, J, G, R]`, D `[H]` or `[H, P]`, state_pool
    `[slots, H, P, R]`; entry j of intermediate_states `[slots, I, H, P, R]`, I >= J, becomes the state after token j
    (SPEC-2); num_accepted, num_tokens `[N]` (SPEC-3, SPEC-6). Returns y `[N, J, H, P]`. Raises ShapeError, DtypeError,
    SlotError, UnsupportedError.
    """
    run = _update_op if is_traced(x) else _update
    return run(x, dt, A, B, C, D, z, dt_bias, state_pool, read_slots, write_slots, intermediate_states, num_accepted,
               num_tokens, dt_softplus, check_limit(dt_limit), check)  # fmt: skip


def _update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    pool: Tensor, read_slots: Tensor, write_slots: Tensor | None, entries: Tensor | None, num_accepted: Tensor | None,
    num_tokens: Tensor | None, dt_softplus: bool, dt_limit: Sequence[float], check: bool | None,
) -> Tensor:  # fmt: skip
    inputs = (x, dt, A, B, C, D, z, dt_bias)
    tensors = (*inputs, pool, read_slots, write_slots, entries, num_accepted, num_tokens)
    key: Key | None = None
    if x.is_cuda and not check:
        key, pointers = key_of(tensors, "ssd_update", dt_softplus, *dt_limit)
        launch = remembered.get(key)
        if launch is not None:
            y = new_output(x)
            with device_of(x):
                launch.again([*pointers, y.data_ptr()])
            return y
    check_call("ssd_update", dict(zip(NAMES_OF_TENSORS, tensors, strict=True)), {}, check)
    check_steps(x.shape[1])
    y = new_output(x)
    launch_update(inputs, y, pool, read_slots, write_slots, entries, num_accepted, num_tokens, dt_softplus, dt_limit,
                  key=key)  # fmt: skip
    return y


def new_output(x: Tensor, *_: object) -> Tensor:
    """An unwritten y `[N, J, H, P]`."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch_update(
    inputs: Inputs, y: Tensor, pool: Tensor, read_slots: Tensor, write_slots: Tensor | None, entries: Tensor | None,
    num_accepted: Tensor | None, num_tokens: Tensor | None, dt_softplus: bool = True,
    dt_limit: Sequence[float] = ANY_STEP, tile: Tile | None = None, key: Key | None = None,
) -> None:  # fmt: skip
    """Fill contiguous y, the pool and the entries of a checked call; with a key, remember the launch under it."""
    x, dt, A, B, C, D, z, dt_bias = inputs
    (rows, steps, heads, channels), (groups, columns) = x.shape, B.shape[2:]
    pool_n, *inside = slot_strides(pool, columns_first=False)
    entry_j, *inside_entry = (0, 0, 0, 0) if entries is None else slot_strides(entries, columns_first=False)
    tile = tile or state_tile(rows * heads, channels, columns, pool.element_size(), inside[2], inside[1])
    programs = rows * heads * ceil_div(channels, tile.rows)
    if programs == 0:
        return
    skip = (0, 0) if D is None else (*D.stride(), 0)[:2]
    far = reaches_far([
        (columns, inside[1]), (channels, inside[2]), (columns, inside_entry[1]), (channels, inside_entry[2]),
        (channels, x.stride(3)), (channels, skip[1]), (channels, strides(z, 4)[3]), (columns, B.stride(3)),
        (columns, C.stride(3)),
    ])  # fmt: skip
    arguments = (
        x, *x.stride(), dt, *dt.stride(), A, A.stride(0), B, *B.stride(), C, *C.stride(), D, *skip,
        z, *strides(z, 4), dt_bias, *strides(dt_bias, 1), y, float(dt_limit[0]), float(dt_limit[1]),
        pool, pool_n, entries, 0 if entries is None else entries.stride(0),
        as_index(read_slots), as_index(read_slots if write_slots is None else write_slots),
        as_index(num_accepted), as_index(num_tokens), pool.shape[0], 0 if entries is None else entries.shape[1],
        inside[0], inside[2], inside[1], entry_j, inside_entry[0], inside_entry[2], inside_entry[1],
        steps, heads, heads // groups, channels, columns,
        tile.rows, tile.chunks, tile.inner, power_of_2(steps), dt_softplus, far,
    )  # fmt: skip
    grid = (programs, 1, 1)
    with device_of(x):
        compiled = ssd_update_kernel[grid](*arguments, num_warps=tile.warps)
        if key is not None:
            tensors = (*inputs, pool, read_slots, write_slots, entries, num_accepted, num_tokens, y)
            remember(key, compiled, grid, arguments, tensors)


def check_limit(dt_limit: Any) -> tuple[float, float]:
    """A limit is a pair (least, largest) of step sizes (SSD-6)."""
    try:
        least, largest = (float(bound) for bound in dt_limit)
    except (TypeError, ValueError):
        least, largest = 1.0, 0.0
    if not least <= largest:
        raise UnsupportedError(f"dt_limit={dt_limit!r}: a pair (least, largest) is needed (SSD-6)")
    return least, largest


_update_op = register("ssd_update", _update, new_output)
_prefill_op = register("ssd_prefill", _prefill, new_output)
