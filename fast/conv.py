"""The short causal convolution of every mixer on CUDA tensors: packed and differentiable, and on a slot pool (CONV).

Names, arguments and meaning are those of `statescan.reference.conv`. Pools are read and written in place through slot
indices, any strides are honoured, and no call waits for the device, except `causal_conv1d` with `seq_idx` alone: the
number of rows of its final windows is the largest id + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from statescan.fast.checks import as_index, check_call
from statescan.fast.kernels.conv import conv_prefill_kernel, conv_update_kernel
from statescan.fast.launch import device_of, is_traced, register, strides


class Tile(NamedTuple):
    """Block sizes of a launch: tokens or rows, channels, warps."""

    tokens: int
    channels: int
    warps: int


def word_type(t: Tensor | None) -> Any:
    """An integer type as long as the last axis of `t [..., C, W]` if channels lie one behind the other, else None."""
    if t is None or t.stride(-1) != 1 or t.stride(-2) != t.shape[-1]:
        return None
    size = t.shape[-1] * t.element_size()
    outer = [t.data_ptr(), *(stride * t.element_size() for stride in t.stride()[:-2])]
    return _WORDS.get(size) if all(place % size == 0 for place in outer) else None


_WORDS = {4: tl.uint32, 8: tl.uint64}


def prefill_tile(tokens: int, channels: int, itemsize: int) -> Tile:
    """16 bytes a thread along the channels; enough programs for every multiprocessor, and long tiles beyond that."""
    block = min(triton.next_power_of_2(channels), 128 * (16 // itemsize))
    warps = max(1, block * itemsize // 512)
    programs = tokens * triton.cdiv(channels, block)
    return Tile(next((t for t in (64, 32) if programs >= 2048 * t), 16), block, warps)


def update_tile(rows: int, channels: int, itemsize: int) -> Tile:
    """Small blocks while there are few rows, so that one row fills the device; several rows share their taps later."""
    vector = 16 // itemsize
    block = min(triton.next_power_of_2(channels), (16 if rows < 8 else 32) * vector)
    together = 1 if rows < 32 else 4
    return Tile(together, block, max(1, together * block * itemsize // 512))


def causal_conv1d_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None, snapshot_windows: Tensor | None = None,
    *, activation: str | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Convolve a pack whose rows resume from, and store to, slots of `conv_pool [slots, C, W]` (SLOT-2, SLOT-3).

    x `[1, T, C]`, cu_seqlens `[N+1]`, read_slots and write_slots `[N]`; snapshot_windows `[X, C, W]` receive the
    windows at snapshot_positions `[X]` (SNAP-3). Returns y `[1, T, C]`. Raises PackingError, ShapeError, DtypeError,
    UnsupportedError, SlotError.
    """
    run = _prefill_op if is_traced(x) else _prefill
    return run(x, weight, bias, cu_seqlens, conv_pool, read_slots, write_slots, snapshot_positions, snapshot_windows,
               activation, check)  # fmt: skip


def _prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, snapshot_positions: Tensor | None, snapshot_windows: Tensor | None,
    activation: str | None, check: bool | None,
) -> Tensor:  # fmt: skip
    tensors = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens, "conv_pool": conv_pool,
               "read_slots": read_slots, "write_slots": write_slots, "snapshot_positions": snapshot_positions,
               "snapshot_windows": snapshot_windows}  # fmt: skip
    check_call("causal_conv1d_prefill", tensors, {"activation": activation}, check)
    write = read_slots if write_slots is None else write_slots
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_prefill(x, y, weight, bias, cu_seqlens, conv_pool, conv_pool, read_slots, write, snapshot_positions,
                   snapshot_windows, read_slots.shape[0], activation)  # fmt: skip
    return y


def launch_prefill(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, source: Tensor | None,
    target: Tensor, read_slots: Tensor | None, write_slots: Tensor | None, positions: Tensor | None,
    snapshots: Tensor | None, rows: int, activation: str | None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Fill y and the windows of a checked call; `source` None means fresh rows, no slots that row n's slot is n."""
    batch, tokens, channels = x.shape
    tile = tile or prefill_tile(batch * tokens, channels, x.element_size())
    tiles, blocks = triton.cdiv(tokens, tile.tokens), triton.cdiv(channels, tile.channels)
    marks = 0 if positions is None else positions.shape[0]
    programs = (rows + marks + batch * tiles) * blocks
    if programs == 0:
        return
    with device_of(x):
        conv_prefill_kernel[(programs,)](
            x, *x.stride(), y, weight, *weight.stride(), bias, *strides(bias, 1), as_index(cu_seqlens),
            source, *strides(source, 3), target, *target.stride(), as_index(read_slots), as_index(write_slots),
            target.shape[0], as_index(positions), snapshots, *strides(snapshots, 3), rows, marks, tokens, channels,
            tiles, blocks, W=weight.shape[1], SILU=activation is not None, BC=tile.channels, BT=tile.tokens,
            WORD=word_type(weight), num_warps=tile.warps,
        )  # fmt: skip


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, intermediate_windows: Tensor | None = None, num_accepted: Tensor | None = None,
    num_tokens: Tensor | None = None, *, activation: str | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Convolve J tokens a row, window from and to its slot: equal to prefill token by token (CONV-6).

    x `[N, J, C]`; entry j of `intermediate_windows [slots, I, C, W]`, I >= J, becomes the window after token j
    (CONV-8); num_accepted `[N]` and num_tokens `[N]` as SPEC-3 and SPEC-6 say. Returns y `[N, J, C]`. Raises
    ShapeError, DtypeError, UnsupportedError, SlotError.
    """
    run = _update_op if is_traced(x) else _update
    return run(x, weight, bias, conv_pool, read_slots, write_slots, intermediate_windows, num_accepted, num_tokens,
               activation, check)  # fmt: skip


def _update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor | None,
    intermediate_windows: Tensor | None, num_accepted: Tensor | None, num_tokens: Tensor | None,
    activation: str | None, check: bool | None,
) -> Tensor:  # fmt: skip
    tensors = {"x": x, "weight": weight, "bias": bias, "conv_pool": conv_pool, "read_slots": read_slots,
               "write_slots": write_slots, "intermediate_windows": intermediate_windows, "num_accepted": num_accepted,
               "num_tokens": num_tokens}  # fmt: skip
    check_call("causal_conv1d_update", tensors, {"activation": activation}, check)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_update(x, y, weight, bias, conv_pool, read_slots, write_slots, intermediate_windows, num_accepted,
                  num_tokens, activation)  # fmt: skip
    return y


def launch_update(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, entries: Tensor | None, num_accepted: Tensor | None, num_tokens: Tensor | None,
    activation: str | None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Fill y, the pool and the entries of a checked call."""
    rows, steps, channels = x.shape
    tile = tile or update_tile(rows, channels, x.element_size())
    blocks = triton.cdiv(channels, tile.channels)
    programs = triton.cdiv(rows, tile.tokens) * blocks
    if programs == 0:
        return
    pool_word = word_type(conv_pool)
    if entries is not None and word_type(entries) is not pool_word:
        pool_word = None
    with device_of(x):
        conv_update_kernel[(programs,)](
            x, *x.stride(), y, weight, *weight.stride(), bias, *strides(bias, 1), conv_pool, *conv_pool.stride(),
            as_index(read_slots), as_index(read_slots if write_slots is None else write_slots),
            entries, *strides(entries, 4), as_index(num_accepted), as_index(num_tokens), rows, steps, channels,
            conv_pool.shape[0], 0 if entries is None else entries.shape[1], blocks, W=weight.shape[1],
            SILU=activation is not None, BN=tile.tokens, BC=tile.channels, U=4 if steps > 2 else max(steps, 1),
            WORD=word_type(weight), POOL_WORD=pool_word, num_warps=tile.warps,
        )  # fmt: skip


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_prefill_op = register("causal_conv1d_prefill", _prefill, _like)
_update_op = register("causal_conv1d_update", _update, _like)
