"""Chunks of a pack: where each lies in a workspace without a table, and the numbers of its tokens.

Chunks of CT tokens restart at each row. Chunk j of row n has place `cu[n] // CT + n + j`: places of a row lie one after
another, no two rows share one, and there are at most `T // CT + N` of them. So a grid needs neither lengths nor a
table, and a kernel over places finds its row by bisection.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.common import exp2, rn, widen

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(float("-inf"))
"""The exponent of a decay between two tokens that do not meet."""


@triton.jit
def place_of(start, n, CT: tl.constexpr):
    """Place of the first chunk of row n, which begins at token `start`."""
    return start // CT + n


@triton.jit
def row_at(place, cu_ptr, N, bits, CT: tl.constexpr):
    """The last row whose first chunk lies at `place` or before; N has at most `bits` bits."""
    row = place * 0
    for i in range(bits):
        ahead = row + (1 << (bits - 1 - i))
        start = tl.load(cu_ptr + ahead, mask=ahead < N, other=0).to(tl.int64)
        row = tl.where((ahead < N) & (place_of(start, ahead, CT) <= place), ahead, row)
    return row


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 as an operand of a matrix product, rounded to `dtype`."""
    y = x
    if dtype != tl.float32:
        y = rn(x, dtype)
    return y


@triton.jit
def operand(x, dtype: tl.constexpr):
    """A loaded tile as an operand of a matrix product of type `dtype`."""
    y = x
    if x.dtype != dtype:
        y = narrow(widen(x), dtype)
    return y


@triton.jit
def load_tile(ptr, row_stride, column_stride, rows, columns, real_rows, real_columns):
    """`[rows, columns]` in its own type, 0 where the row or the column is not real; offsets in it have 31 bits."""
    at = rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(ptr + at, mask=real_rows[:, None] & real_columns[None, :], other=0.0)


@triton.jit
def decay_between(late, early):
    """2^(late - early) in float32, of sums of log-decays in units of ln 2."""
    return exp2((late - early).to(tl.float32))


@triton.jit
def store_zeros(ptr, row_stride, first, end, columns, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Rows first..end of an output whose columns are contiguous become 0."""
    rows = tl.arange(0, ROWS)
    for at in range(first, end, ROWS):
        token = at + rows
        inside = (token < end)[:, None] & (columns < SIZE)[None, :]
        zeros = tl.zeros((ROWS, columns.shape[0]), ptr.dtype.element_ty)
        tl.store(ptr + token.to(tl.int64)[:, None] * row_stride + columns[None, :], zeros, mask=inside)


@triton.jit
def last_offset(cu_ptr, N, T):
    """Where the last row ends, inside the pack."""
    end = tl.load(cu_ptr + N).to(tl.int64)
    return tl.minimum(tl.maximum(end, 0), T)


@triton.jit
def any_between(positions_ptr, count, first, end, BLOCK: tl.constexpr):
    """Whether some snapshot position lies in first+1..end."""
    found = first * 0
    for at in range(0, count, BLOCK):
        x = at + tl.arange(0, BLOCK)
        position = tl.load(positions_ptr + x, mask=x < count, other=-1).to(tl.int64)
        found += tl.sum(((position > first) & (position <= end)).to(tl.int64))
    return found > 0


@triton.jit
def sum_decays(x, WIDE: tl.constexpr):
    """Log-decays in float32, in units of ln 2, summed along the first axis; in float64 if WIDE."""
    if WIDE:
        x = x.to(tl.float64)
    return tl.cumsum(x * LOG2E, 0)
