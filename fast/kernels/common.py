"""What every kernel needs and the interpreter gets wrong: dots, the rounding of a store, and indices that are safe.

All helpers give the same numbers on a GPU and, with TRITON_INTERPRET=1, on a CPU: the interpreter multiplies bit
patterns of bfloat16 as integers and cuts off where a GPU rounds, so values are widened to float32 as soon as they are
loaded, and narrowed by `rn` when they are stored.

    read, write = load_slots(read_slots, write_slots, n, mask, slots)   int64, -1 for every negative
    read, write, accepted, tokens = load_update_rows(...)               the same with an update's counts
    start, end = load_row(cu_seqlens, n, total)                         (0, -1): no row of the pack
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
        y = u.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def dot(a, b, precision: tl.constexpr = "ieee"):
    """a @ b accumulated in float32; operands of one type, products exact for 16-bit ones."""
    if INTERP:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def product(x, y):
    """x y for float32, rounded by itself: fused into no sum.

    Where each lane brings one product to a sum across lanes, the compiler would fuse a lane's own product with the sum
    it gets from its neighbour: the two would add the same numbers and end with different bits, and what they go on to
    compute with as one number would be two (racecheck saw their stores of it).
    """
    if INTERP:
        z = x * y
    else:
        z = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True,
                                      pack=1)  # fmt: skip
    return z


@triton.jit
def exp2(x):
    """2^x for float32 x; what is below 2^-126 is 0: the plain form spends three instructions more on it."""
    if INTERP:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def exp_of_minus(x):
    """e^-x for float32 x; what is below 2^-126 may be 0, so add it to something."""
    if INTERP:
        y = tl.exp(-x)
    else:
        y = exp2(x * -1.4426950408889634)
    return y


@triton.jit
def reciprocal(x):
    """1 / x for float32 x >= 1, within an ulp; 0 for infinity."""
    if INTERP:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) for float32 x: 0 and 1 at the ends, never NaN for a number."""
    return reciprocal(1.0 + exp_of_minus(x))


@triton.jit
def silu(x):
    """x sigmoid(x) for finite float32 x: five instructions, two of them on the special function units."""
    return x * sigmoid(x)


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
def load_slots(read_ptr, write_ptr, n, mask, slots):
    """Read and write slots of rows n (a number or a block) in 64 bits, -1 for every negative index.

    A slot past the pool makes its row a padding row, so that memory stays safe without a check: both slots are -1.
    """
    read = tl.load(read_ptr + n, mask=mask, other=-1).to(tl.int64)
    write = tl.load(write_ptr + n, mask=mask, other=-1).to(tl.int64)
    fits = (read < slots) & (write < slots)
    return tl.where(fits & (read >= 0), read, -1), tl.where(fits & (write >= 0), write, -1)


@triton.jit
def load_update_rows(read_ptr, write_ptr, accepted_ptr, tokens_ptr, n, mask, slots, entries, J):
    """Slots as `load_slots`, the entry to resume from (-1: the live pool) and the number of tokens of rows n.

    `accepted_ptr` and `tokens_ptr` may be None. A count outside its range makes its row a padding row, of no tokens.
    """
    read, write = load_slots(read_ptr, write_ptr, n, mask, slots)
    accepted = tl.full(read.shape, -1, tl.int64) if accepted_ptr is None else tl.load(
        accepted_ptr + n, mask=mask, other=-1).to(tl.int64)
    tokens = tl.full(read.shape, J, tl.int64) if tokens_ptr is None else tl.load(
        tokens_ptr + n, mask=mask, other=0).to(tl.int64)
    fits = (accepted < entries) & (tokens >= 0) & (tokens <= J)
    read, write = tl.where(fits, read, -1), tl.where(fits, write, -1)
    live = (read >= 0) | (write >= 0)
    return read, write, tl.where((read >= 0) & (accepted >= 0), accepted, -1), tl.where(live, tokens, 0)


@triton.jit
def load_row(cu_seqlens_ptr, n, total):
    """First token and end of row n in 64 bits; (0, -1) where the offsets describe no row of `total` tokens."""
    start = tl.load(cu_seqlens_ptr + n).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + n + 1).to(tl.int64)
    fits = (start >= 0) & (start <= end) & (end <= total)
    return tl.where(fits, start, 0), tl.where(fits, end, -1)


@triton.jit
def unpack(word, j, kind: tl.constexpr):
    """Element j of type `kind` in words that hold several, the first in the lowest bits; in float32."""
    if kind.primitive_bitwidth == 16:
        value = widen((word >> (16 * j)).to(tl.uint16).to(kind, bitcast=True))
    else:
        value = (word >> (32 * j)).to(tl.uint32).to(kind, bitcast=True)
    return value


@triton.jit
def push(word, x, kind: tl.constexpr):
    """The words without their first element and with x, rounded to `kind`, as their last."""
    total: tl.constexpr = word.dtype.primitive_bitwidth
    bits: tl.constexpr = kind.primitive_bitwidth
    if bits == 16:
        last = rn(x, kind).to(tl.uint16, bitcast=True).to(word.dtype)
    else:
        last = x.to(tl.uint32, bitcast=True).to(word.dtype)
    return (word >> bits) | (last << (total - bits))
