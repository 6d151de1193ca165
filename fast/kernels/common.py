"""What every kernel needs and the interpreter gets wrong: dots, the rounding of a store, and indices that are safe.

All helpers give the same numbers on a GPU and, with TRITON_INTERPRET=1, on a CPU: the interpreter multiplies bit
patterns of bfloat16 as integers and cuts off where a GPU rounds, so values are widened to float32 as soon as they are
loaded, and narrowed by `rn` when they are stored.

    slot = load_slot(read_slots, n, slots)         int64; -1 for every negative and for every index past the pool
    start, end = load_row(cu_seqlens, n, total)    int64; (0, -1) where the offsets describe no row of the pack
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels of this process are interpreted; read once, as triton.jit reads it when it decorates."""
INTERP = tl.constexpr(INTERPRETED)


@triton.jit
def widen(x):
    """The same numbers in float32; exact for every element type served."""
    return x.to(tl.float32)


@triton.jit
def rn(x, dtype: tl.constexpr):
    """float32 rounded once to `dtype`, nearest, ties to even (NUM-2)."""
    if INTERP and dtype == tl.bfloat16:
        u = x.to(tl.float32).to(tl.uint32, bitcast=True)
        u = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        u = tl.where(x != x, 0x7FC0, u)  # the carry of a NaN's payload would make a number of it
        return u.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, precision: tl.constexpr = "ieee"):
    """a @ b accumulated in float32; operands of one type, products exact for 16-bit ones."""
    if INTERP:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) for float32 x: 0 and 1 at the ends, never NaN for a number."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x sigmoid(x) for finite float32 x."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """ln(1 + e^x) for float32 x, and x itself above 20 (GATE-2); small results keep their relative precision."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # what 1 + e lost is made good by e / (u - 1): https://people.eecs.berkeley.edu/~wkahan/Math128/ (log1p)
    small = u == 1.0
    value = tl.where(small, e, tl.log(u) * (e / tl.where(small, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, value)


@triton.jit
def load_slot(slots_ptr, n, slots):
    """Slot index n in 64 bits; -1 for a negative one and, so that memory stays safe, for one past the pool."""
    slot = tl.load(slots_ptr + n).to(tl.int64)
    return tl.where((slot >= 0) & (slot < slots), slot, -1)


@triton.jit
def load_slots(slots_ptr, n, mask, slots):
    """`load_slot` for a block of rows; -1 where `mask` is false."""
    slot = tl.load(slots_ptr + n, mask=mask, other=-1).to(tl.int64)
    return tl.where((slot >= 0) & (slot < slots), slot, -1)


@triton.jit
def slot_fits(slots_ptr, n, slots):
    """Whether index n may be acted on: a slot past the pool makes its whole row a padding row."""
    return tl.load(slots_ptr + n).to(tl.int64) < slots


@triton.jit
def load_row(cu_seqlens_ptr, n, total):
    """First token and end of row n in 64 bits; (0, -1) if they lie in no pack of `total` tokens."""
    start = tl.load(cu_seqlens_ptr + n).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + n + 1).to(tl.int64)
    fits = (start >= 0) & (start <= end) & (end <= total)
    return tl.where(fits, start, 0), tl.where(fits, end, -1)
