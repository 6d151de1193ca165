"""Norms over groups of channels: the sum of squares in float32, and one division for each element.

A group is read once where it fits in a block, else once for the sum and once for the result.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.common import product, rn, sigmoid, silu, widen


@triton.jit
def gate(z, SILU: tl.constexpr):
    if SILU:
        y = silu(z)
    else:
        y = sigmoid(z)
    return y


@triton.jit
def load_gated(x_ptr, z_ptr, at, zat, mask, BEFORE: tl.constexpr, SILU: tl.constexpr):
    """Inputs in float32, times the gate where it comes before the norm."""
    x = widen(tl.load(x_ptr + at, mask=mask, other=0.0))
    if z_ptr is not None and BEFORE:
        x *= gate(widen(tl.load(z_ptr + zat, mask=mask, other=0.0)), SILU)
    return x


@triton.jit(do_not_specialize=["rows", "eps"])
def norm_kernel(
    x_ptr, sr, sd, z_ptr, zr, zd, weight_ptr, sw, y_ptr, rows, D, size, weights, divisor, eps,
    BEFORE: tl.constexpr, SILU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """y `[rows, D]` contiguous: x over the root of its group's sum of squares / divisor + eps, weighted and gated.

    A program does BR rows of one group of `size` channels, BC at a time; WHOLE says that one block holds a group.
    Weight c % weights belongs to channel c. weight_ptr and z_ptr may be None.
    """
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    first = tl.program_id(1) * size
    place = tl.arange(0, BC)[None, :]
    live = row < rows
    total = tl.zeros((BR, 1), tl.float32)
    x = tl.zeros((BR, BC), tl.float32)
    end = BC if WHOLE else size  # known to the compiler where one block is enough
    for start in range(0, end, BC):
        c = (first + start + place).to(tl.int64)
        mask = live & (start + place < size)
        x = load_gated(x_ptr, z_ptr, row * sr + c * sd, row * zr + c * zd, mask, BEFORE, SILU)
        total += tl.sum(product(x, x), 1)[:, None]
    root = tl.sqrt_rn(total / divisor + eps)
    for start in range(0, end, BC):
        c = (first + start + place).to(tl.int64)
        mask = live & (start + place < size)
        if not WHOLE:
            x = load_gated(x_ptr, z_ptr, row * sr + c * sd, row * zr + c * zd, mask, BEFORE, SILU)
        y = tl.div_rn(x, tl.broadcast_to(root, x.shape))
        if weight_ptr is not None:
            y *= widen(tl.load(weight_ptr + (c % weights) * sw, mask=start + place < size, other=0.0))
        if z_ptr is not None and not BEFORE:
            y *= gate(widen(tl.load(z_ptr + row * zr + c * zd, mask=mask, other=0.0)), SILU)
        tl.store(y_ptr + row * D + c, rn(y, y_ptr.dtype.element_ty), mask=mask)
