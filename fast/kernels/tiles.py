"""Tiles of a state in registers: rows by columns, the columns split in two axes so that a sum along them stays cheap.

A state matrix is summed along its columns at every token (keys of the delta family, d_state of Mamba2), so a tile of
`BR` rows is held as `[BR, CC, CI]` with CC * CI columns. Lanes lie along CI, as few as fill one 128-byte line, the
others along the rows, and a thread goes over CC by itself: a sum then takes log2(lanes along CI) shuffles instead of
five, and nothing goes through shared memory. With 2 x 16-byte vectors and lanes side by side every line is still read
whole.

Triton gives lanes to the contiguous axis first and then to the others: in ascending order up to 3.6, in descending
order from 3.7. Rows must come second, so they are the first axis for the one and the second for the other: a tile is
`[BR, CC, CI]` or `[CC, BR, CI]`, and only this file knows.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.common import product

ROWS = tl.constexpr(1 if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7) else 0)


@triton.jit
def column_numbers(CC: tl.constexpr, CI: tl.constexpr):
    """Which column each place of `[CC, CI]` is."""
    return tl.arange(0, CC)[:, None] * CI + tl.arange(0, CI)[None, :]


@triton.jit
def beside_rows(x):
    """`[CC, CI]`, one number a column, as an operand beside a tile."""
    return tl.expand_dims(x, ROWS)


@triton.jit
def beside_columns(x):
    """`[BR]`, one number a row, as an operand beside a tile: `sum_products` undone axis by axis."""
    return tl.expand_dims(tl.expand_dims(x, 1), 1 - ROWS)


@triton.jit
def sum_products(x, y):
    """Products of a tile and one number a column, summed along the columns, `[BR]`: in a thread, then across lanes."""
    SINGLE: tl.constexpr = x.shape[1 - ROWS] == 1 and x.shape[2] <= 32
    if SINGLE:  # so few columns that a lane may hold just one of them
        terms = product(x, tl.broadcast_to(beside_rows(y), x.shape))
    else:
        terms = x * beside_rows(y)
    return tl.sum(tl.sum(terms, 1 - ROWS), 1)


@triton.jit
def inner(x, y):
    """Dot product of two `[CC, CI]` blocks."""
    return tl.sum(tl.sum(product(x, y), 1), 0)


@triton.jit
def load_columns(ptr, stride, cc, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """One number a column, `[CC, CI]`, in its own type; 0 past SIZE. WHOLE: there is nothing past SIZE."""
    if WHOLE:
        return tl.load(ptr + cc * stride)
    return tl.load(ptr + cc * stride, mask=cc < SIZE, other=0.0)


@triton.jit
def load_rows(ptr, stride, rr, SIZE: tl.constexpr):
    """One number a row, `[BR]`, in its own type; 0 past SIZE."""
    return tl.load(ptr + rr * stride, mask=rr < SIZE, other=0.0)


@triton.jit
def load_state(pool, entries, num_accepted, read, accepted, slab, entry, inside, pool_n, entries_n, entries_j):
    """The tile a row starts from, float32: its slot, the entry it resumes from, or zeros (SLOT-7, SPEC-3).

    `slab` and `entry` are the tile's offsets in a slot of the pool and in one entry. Zeros are selected by the mask of
    the load: what a fresh row's slot holds is not read.
    """
    stored = tl.load(pool + read * pool_n + slab, mask=inside & (read >= 0) & (accepted < 0), other=0.0)
    if num_accepted is not None:
        at = entries + read * entries_n + accepted * entries_j + entry
        stored = tl.load(at, mask=inside & (accepted >= 0), other=stored)
    return stored.to(tl.float32)
