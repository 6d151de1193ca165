"""Rows of a step on the device, without a look at them: taken, merged and zeroed by counts that lie there too (STEP-4).

Grids follow from padded sizes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from statescan.fast.checks import as_index, check_runnable
from statescan.fast.kernels.rows import merge_kernel, positions_kernel, take_kernel, zero_kernel
from statescan.fast.launch import ceil_div, device_of, power_of_2
from statescan.spec.contract import ShapeError

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_COLUMNS = 1024


def words(t: Tensor) -> Tensor:
    """The same memory as integers: rows are moved, not computed with."""
    return t.detach().view(WORDS[t.element_size()])


def tile(rows: int, columns: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and block sizes over `[rows, columns]`: some 2,048 elements a program."""
    across = min(power_of_2(columns), MOST_COLUMNS)
    together = max(1, min(power_of_2(rows), 2 * MOST_COLUMNS // across))
    return (ceil_div(rows, together), ceil_div(columns, across)), {"BR": together, "BC": across}


def rows_behind(zxBCdt: Tensor, counts: Tensor | None) -> Tensor:
    """The rows behind the real decode tokens, with zeros behind them: `[T, 1, D]` -> `[T, 1, D]`.

    counts `[2]` are the real tokens of decode and of prefill. Raises ShapeError where a step of both has no counts.
    """
    check_counts(counts)
    check_runnable(zxBCdt, "zxBCdt")
    out = torch.empty(zxBCdt.shape, dtype=zxBCdt.dtype, device=zxBCdt.device)
    rows, _, columns = zxBCdt.shape
    if out.numel():
        grid, sizes = tile(rows, columns)
        with device_of(zxBCdt):
            take_kernel[grid](words(zxBCdt), zxBCdt.stride(0), zxBCdt.stride(2), counts, words(out), rows, columns,
                              **sizes)  # fmt: skip
    return out


def check_counts(counts: Tensor | None) -> None:
    """A step with both partitions says on the device how many decode tokens are real (META-8)."""
    if counts is None or counts.shape != (2,):
        said = "None" if counts is None else f"of shape {list(counts.shape)}"
        raise ShapeError(f"device_decode_prefill is {said}: a step of decode and prefill needs [2] (META-8)")


def merge(
    y_decode: Tensor | None, slots: Tensor | None, y_prefill: Tensor | None, cu_seqlens: Tensor | None,
    counts: Tensor | None, rows: int,
) -> Tensor:  # fmt: skip
    """Rows `[rows, 1, D]` in packed order: decode rows, prefill rows behind the real ones, zeros for padding (PAD-2).

    y_decode `[n, J, D]` with slots `[n]`, y_prefill `[t, 1, D]` with cu_seqlens `[N+1]`; one of the two may be None,
    and counts `[2]` is read where neither is.
    """
    both = y_decode is not None and y_prefill is not None
    one = y_decode if y_decode is not None else y_prefill
    assert one is not None
    check_runnable(one, "y")
    y = torch.empty((rows, 1, one.shape[-1]), dtype=one.dtype, device=one.device)
    if y.numel() == 0:
        return y
    grid, sizes = tile(rows, one.shape[-1])
    decode: tuple[object, ...] = (None, 0, 0, None, 1, 0)
    prefill: tuple[object, ...] = (None, 0, 0, None, 0, 0)
    if y_decode is not None:
        flat = y_decode.reshape(-1, one.shape[-1])
        decode = (words(flat), *flat.stride(), as_index(slots), max(1, y_decode.shape[1]), flat.shape[0])
    if y_prefill is not None and cu_seqlens is not None:
        flat = y_prefill.reshape(-1, one.shape[-1]).to(one.dtype)
        prefill = (words(flat), *flat.stride(), as_index(cu_seqlens), cu_seqlens.shape[0] - 1, flat.shape[0])
    with device_of(one):
        merge_kernel[grid](*decode, *prefill, counts if both else None, words(y), rows, one.shape[-1], **sizes)
    return y


def zero_padding(y: Tensor, slots: Tensor, pool_size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Set rows of padding to 0 in a contiguous y, and return it (PAD-1, PACK-8).

    y `[n, J, D]` with slots `[n]`, or `[1, T, D]` with slots `[N]` and cu_seqlens `[N+1]`.
    """
    columns, rows = y.shape[-1], y.shape[0] * y.shape[1]
    if y.numel():
        grid, sizes = tile(rows, columns)
        with device_of(y):
            zero_kernel[grid](words(y), as_index(slots), pool_size, y.shape[1], as_index(cu_seqlens), slots.shape[0],
                              slots.shape[0].bit_length(), rows, columns, **sizes)  # fmt: skip
    return y


def real_positions(positions: Tensor, count: Tensor) -> Tensor:
    """Snapshot positions `[X]` with -1 behind the first `count [1]`: what stands there is padding (META-9)."""
    out = torch.empty_like(positions, memory_format=torch.contiguous_format)
    if len(positions):
        with device_of(positions):
            positions_kernel[(ceil_div(len(positions), 256),)](as_index(positions), count, out, len(positions), 256)
    return out
