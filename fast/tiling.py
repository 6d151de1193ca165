"""Which tile of a state one program of a decode kernel holds, chosen from sizes and strides alone.

Bytes first: a state is read once and written once, so a tile only has to keep enough loads in flight (about 16 KB a
multiprocessor) with 16-byte vectors on whole 128-byte lines, at a register count that leaves room for them.

- Columns contiguous (keys of a "VK" pool, d_state): eight lanes share a line, four rows side by side in a warp, one
  warp a program. A sum along columns never leaves the warp.
- Rows contiguous (values of a "KV" pool): eight lanes share a line of rows, the rest of the program lies along columns,
  and sums go through shared memory once.

The split of the columns over threads, which fixes the order of every sum, depends on the layout and not on the batch:
a row has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from statescan.fast.launch import power_of_2

LINE = 128
"""Bytes of a cache line."""
DEVICE_THREADS = 132 * 4 * 32
"""A warp for every scheduler of a large device: below four times that many tiles of work the device is not full."""


class Tile(NamedTuple):
    """Rows a program holds, chunks and size of a chunk of its columns, warps."""

    rows: int
    chunks: int
    inner: int
    warps: int


SHARE: dict[tuple[int, bool], int] = {(4, False): 32, (4, True): 64, (2, False): 32, (2, True): 64}
"""State elements a thread holds where columns are contiguous, by (bytes an element, device full). Not measured yet:
32 need 72 registers and fill the device at one row of 32 heads of 128 x 128, 64 need 128 and spread what is done once
a token over twice the bytes."""


@lru_cache(4096)
def state_tile(matrices: int, rows: int, columns: int, itemsize: int, row_stride: int, column_stride: int) -> Tile:
    """The tile for `matrices` states of `rows` by `columns` whose elements have `itemsize` bytes.

    >>> state_tile(32, 128, 128, 4, 128, 1), state_tile(8192, 128, 128, 4, 128, 1)
    (Tile(rows=8, chunks=4, inner=32, warps=1), Tile(rows=16, chunks=4, inner=32, warps=1))
    """
    wide, high = power_of_2(columns), power_of_2(rows)
    if row_stride == 1 and column_stride != 1:
        height = min(high, LINE // 4)
        return Tile(height, 1, wide, min(4, max(1, height * wide // 1024)))
    inner = min(wide, LINE // itemsize)
    full = matrices * rows * columns > 64 * DEVICE_THREADS
    return Tile(min(high, max(4, SHARE[itemsize, full] * 32 // wide)), wide // inner, inner, 1)


def reaches_far(extents: Sequence[tuple[int, int]]) -> bool:
    """Whether some offset inside a tile, the sum over (size, stride) of (size - 1) stride, needs more than 31 bits."""
    return any((size - 1) * stride >= 2**31 for size, stride in extents)


def slot_strides(pool: Tensor, columns_first: bool) -> tuple[int, int, int, int]:
    """Strides of a pool or of the entries of one slot: slot or entry, head, column, row.

    `columns_first` says that the last two axes are columns by rows ("KV"), else rows by columns ("VK", Mamba2).
    """
    first, head, third, last = pool.stride()[-4:]
    return (first, head, third, last) if columns_first else (first, head, last, third)
