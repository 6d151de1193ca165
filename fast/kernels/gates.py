"""Gates: one number in, one log-decay or write strength out, in float32 from whatever types the parameters have."""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.common import sigmoid, softplus, widen


@triton.jit
def decay(f, rate, lower_bound, BOUNDED: tl.constexpr):
    """Log-decay of biased inputs f: -rate softplus(f), or with a lower bound b: b sigmoid(rate f) (GATE-1, GATE-4)."""
    if BOUNDED:
        g = lower_bound * sigmoid(rate * f)
    else:
        g = -(rate * softplus(f))
    return g


@triton.jit(do_not_specialize=["rows", "lower_bound"])
def decay_kernel(
    f_ptr, sr, sh, sk, A_ptr, sa, bias_ptr, bh, bk, g_ptr, rows, HV, K, lower_bound,
    BOUNDED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """g `[rows, HV * K]` contiguous from f `[rows, HV, K]`; A_log `[HV]` and dt_bias `[HV, K]` may be absent."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    column = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    h = (column // K).to(tl.int64)
    k = (column % K).to(tl.int64)
    inside = column < HV * K
    mask = (row < rows) & inside
    f = widen(tl.load(f_ptr + row * sr + h * sh + k * sk, mask=mask, other=0.0))
    if bias_ptr is not None:
        f += widen(tl.load(bias_ptr + h * bh + k * bk, mask=inside, other=0.0))
    rate = f * 0.0 + 1.0
    if A_ptr is not None:
        rate = tl.exp(widen(tl.load(A_ptr + h * sa, mask=inside, other=0.0)))
    tl.store(g_ptr + row * HV * K + column, decay(f, rate, lower_bound, BOUNDED), mask=mask)


@triton.jit(do_not_specialize=["rows", "factor"])
def beta_kernel(b_ptr, sr, sh, beta_ptr, rows, HV, factor, BR: tl.constexpr, BC: tl.constexpr):
    """beta `[rows, HV]` contiguous = factor sigmoid(b) (GATE-5)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    h = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :].to(tl.int64)
    mask = (row < rows) & (h < HV)
    b = widen(tl.load(b_ptr + row * sr + h * sh, mask=mask, other=0.0))
    tl.store(beta_ptr + row * HV + h, factor * sigmoid(b), mask=mask)
