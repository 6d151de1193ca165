"""Launches of the convolution's kernels: block sizes, and the one list of arguments that each kernel takes.

A call is checked before it comes here. Nothing waits for the device: grids follow from shapes alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from statescan.fast.checks import as_index
from statescan.fast.kernels.conv import conv_backward_kernel, conv_prefill_kernel, conv_update_kernel
from statescan.fast.launch import ceil_div, device_of, power_of_2, strides
from statescan.fast.relaunch import Key, remember


class Tile(NamedTuple):
    """Block sizes of a launch: tokens or rows, channels, warps."""

    tokens: int
    channels: int
    warps: int


def word_type(t: Tensor) -> Any:
    """An integer type as long as the last axis of `t [..., C, W]` if channels lie one behind the other, else None."""
    width, size = t.shape[-1], t.element_size()
    *outer, channel, column = t.stride()
    word = _WORDS.get(width * size)
    if word is None or column != 1 or channel != width or t.data_ptr() % (width * size):
        return None
    return None if any(stride % width for stride in outer) else word


_WORDS = {4: tl.uint32, 8: tl.uint64}


@lru_cache(4096)
def prefill_tile(tokens: int, channels: int, itemsize: int) -> Tile:
    """16 bytes a thread along the channels; enough programs for every multiprocessor, and long tiles beyond that."""
    block = min(power_of_2(channels), 128 * (16 // itemsize))
    programs = tokens * ceil_div(channels, block)
    return Tile(next((t for t in (64, 32) if programs >= 2048 * t), 16), block, max(1, block * itemsize // 512))


@lru_cache(4096)
def backward_tile(tokens: int, channels: int, itemsize: int) -> Tile:
    """8 bytes a thread, because a thread keeps 16 numbers a channel; tiles long enough that the parts stay few."""
    block = min(power_of_2(channels), 128 * (8 // itemsize))
    return Tile(64 if tokens * ceil_div(channels, block) < 1 << 18 else 256, block, max(1, block * itemsize // 256))


@lru_cache(4096)
def update_tile(rows: int, channels: int, itemsize: int) -> Tile:
    """Small blocks while there are few rows, so that one row fills the device; several rows share their taps later."""
    block = min(power_of_2(channels), (16 if rows < 8 else 32) * (16 // itemsize))
    together = 1 if rows < 32 else 4
    return Tile(together, block, max(1, together * block * itemsize // 512))


def launch_prefill(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, source: Tensor | None,
    target: Tensor, read_slots: Tensor | None, write_slots: Tensor | None, positions: Tensor | None,
    snapshots: Tensor | None, rows: int, activation: str | None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Fill y and the windows of a checked call; `source` None means fresh rows, no slots that row n's slot is n."""
    batch, tokens, channels = x.shape
    tile = tile or prefill_tile(batch * tokens, channels, x.element_size())
    tiles, blocks = ceil_div(tokens, tile.tokens), ceil_div(channels, tile.channels)
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


def launch_update(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, entries: Tensor | None, num_accepted: Tensor | None, num_tokens: Tensor | None,
    activation: str | None, tile: Tile | None = None, key: Key | None = None,
) -> None:  # fmt: skip
    """Fill contiguous y, the pool and the entries of a checked call; with a key, remember the launch under it."""
    rows, steps, channels = x.shape
    tile = tile or update_tile(rows, channels, x.element_size())
    blocks = ceil_div(channels, tile.channels)
    programs = ceil_div(rows, tile.tokens) * blocks
    if programs == 0:
        return
    pool_word = word_type(conv_pool)
    if entries is not None and word_type(entries) is not pool_word:
        pool_word = None
    arguments = (
        x, *x.stride(), y, weight, *weight.stride(), bias, *strides(bias, 1), conv_pool, *conv_pool.stride(),
        as_index(read_slots), as_index(read_slots if write_slots is None else write_slots),
        entries, *strides(entries, 4), as_index(num_accepted), as_index(num_tokens), rows, steps, channels,
        conv_pool.shape[0], 0 if entries is None else entries.shape[1], blocks, weight.shape[1],
        activation is not None, tile.tokens, tile.channels, 4 if steps > 2 else max(steps, 1), word_type(weight),
        pool_word,
    )  # fmt: skip
    grid = (programs, 1, 1)
    with device_of(x):
        compiled = conv_update_kernel[grid](*arguments, num_warps=tile.warps)
    if key is not None:
        tensors = (x, weight, bias, conv_pool, read_slots, write_slots, entries, num_accepted, num_tokens, y)
        remember(key, compiled, grid, arguments, tensors)


def pull_back(
    grad_y: Tensor | None, grad_final: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    cu_seqlens: Tensor | None, rows: int, initial_windows: Tensor | None, activation: str | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Cotangents of x, weight, bias and initial_windows (None for what is absent) from those of the results (CONV-10).

    Parts of the taps' cotangent are added in one order, so the same call gives the same bits (DET-1).
    """
    batch, tokens, channels = x.shape
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    tile = backward_tile(batch * tokens, channels, x.element_size())
    tiles, blocks = ceil_div(tokens, tile.tokens), ceil_div(channels, tile.channels)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(batch * tiles, weight.shape[1] + 1, channels, dtype=torch.float32, device=x.device)
    enter = None if initial_windows is None else torch.empty(
        initial_windows.shape, dtype=initial_windows.dtype, device=x.device)  # fmt: skip
    programs = ((0 if enter is None else rows) + batch * tiles) * blocks
    if programs:
        with device_of(x):
            conv_backward_kernel[(programs,)](
                x, *x.stride(), grad_y, *grad_y.stride(), weight, *weight.stride(), bias, *strides(bias, 1),
                as_index(cu_seqlens), initial_windows, *strides(initial_windows, 3), grad_final,
                *strides(grad_final, 3), dx, parts, enter, rows, tokens, channels, tiles, blocks, W=weight.shape[1],
                SILU=activation is not None, BC=tile.channels, BT=tile.tokens, WORD=word_type(weight),
                num_warps=tile.warps,
            )  # fmt: skip
    whole = parts.sum(0)  # [W + 1, C]
    db = None if bias is None else whole[0].to(bias.dtype)
    return dx, whole[1:].flip(0).T.to(weight.dtype).contiguous(), db, enter
