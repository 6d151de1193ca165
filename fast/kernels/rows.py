"""Rows of a step on the device: taken from behind the decode tokens, merged, zeroed where they are padding.

How many decode tokens are real, which requests are padding and where the last piece ends is read from device memory, so
that a captured launch serves any step of its padded size. Rows are moved as integers: a NaN keeps its payload.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.chunks import last_offset


@triton.jit
def block(T, D, BR: tl.constexpr, BC: tl.constexpr):
    """Rows `[BR, 1]`, columns `[1, BC]` and what of them is there, of this program."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    column = (tl.program_id(1) * BC + tl.arange(0, BC)[None, :]).to(tl.int64)
    return row, column, (row < T) & (column < D)


@triton.jit
def load_first(counts_ptr, T):
    """The number of real decode tokens, inside the step."""
    first = tl.load(counts_ptr).to(tl.int64)
    return tl.minimum(tl.maximum(first, 0), T)


@triton.jit(do_not_specialize=["T"])
def take_kernel(x_ptr, sr, sc, counts_ptr, out_ptr, T, D, BR: tl.constexpr, BC: tl.constexpr):
    """out `[T, D]` contiguous: row t is row first + t of x, 0 where x has none."""
    row, column, inside = block(T, D, BR, BC)
    source = row + load_first(counts_ptr, T)
    x = tl.load(x_ptr + source * sr + column * sc, mask=inside & (source < T), other=0)
    tl.store(out_ptr + row * D + column, x, mask=inside)


@triton.jit(do_not_specialize=["T", "J", "N", "decoded", "taken"])
def merge_kernel(
    decode_ptr, dr, dc, slots_ptr, J, decoded, prefill_ptr, pr, pc, cu_ptr, N, taken, counts_ptr, out_ptr, T, D,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out `[T, D]` contiguous: decode rows of requests with a slot, prefill rows up to the last offset, zeros.

    decode has `decoded` rows, J a request, prefill `taken` rows and N requests; either may be None, and counts is
    needed where both are there.
    """
    row, column, inside = block(T, D, BR, BC)
    first = row * 0
    if counts_ptr is not None:
        first += load_first(counts_ptr, T)
    elif decode_ptr is not None:
        first += decoded
    x = tl.zeros((BR, BC), out_ptr.dtype.element_ty)
    if decode_ptr is not None:
        mine = (row < first) & (row < decoded)
        mine &= tl.load(slots_ptr + row // J, mask=mine, other=-1) >= 0
        x = tl.load(decode_ptr + row * dr + column * dc, mask=inside & mine, other=0)
    if prefill_ptr is not None:
        source = row - first
        mine = (source >= 0) & (source < last_offset(cu_ptr, N, taken))
        x |= tl.load(prefill_ptr + source * pr + column * pc, mask=inside & mine, other=0)
    tl.store(out_ptr + row * D + column, x, mask=inside)


@triton.jit(do_not_specialize=["T", "J", "N", "slots", "bits"])
def zero_kernel(
    y_ptr, slots_ptr, slots, J, cu_ptr, N, bits, T, D, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y `[T, D]` contiguous becomes 0 in rows of padding: of requests without a slot, or past the last offset.

    Without offsets a request has J rows; with them N < 2^bits requests have those between two.
    """
    row, column, inside = block(T, D, BR, BC)
    request = row // J
    past = row < 0
    if cu_ptr is not None:
        request = row * 0
        for i in range(bits):
            ahead = request + (1 << (bits - 1 - i))
            start = tl.load(cu_ptr + ahead, mask=ahead < N, other=0).to(tl.int64)
            request = tl.where((ahead < N) & (start <= row), ahead, request)
        past = row >= last_offset(cu_ptr, N, T)
    slot = tl.load(slots_ptr + request, mask=(row < T) & (request < N), other=-1).to(tl.int64)
    dead = past | (slot < 0) | (slot >= slots)
    tl.store(y_ptr + row * D + column, tl.zeros((BR, BC), y_ptr.dtype.element_ty), mask=inside & dead)


@triton.jit(do_not_specialize=["X"])
def positions_kernel(at_ptr, count_ptr, out_ptr, X, BLOCK: tl.constexpr):
    """out `[X]`: the first `count` positions as they are, -1 behind them."""
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(at_ptr + x, mask=x < X, other=-1)
    tl.store(out_ptr + x, tl.where(x < tl.load(count_ptr), at, -1), mask=x < X)
