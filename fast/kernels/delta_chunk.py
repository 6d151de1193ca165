"""What a chunk of the delta rule needs that no state enters: the solved system, the scores and the decays.

A chunk has CT tokens and CT * M rows (M copies a token), BL at most. With G the sum of log-decays from the chunk's
first token on, N[r, s] = -beta_r (k_r . k_s) e^(G_r - G_s) below the diagonal, and T = (1 - N)^-1:

    A[r, s] = T[r, s] beta_s                             what each row finally writes: A (v - e^G K S)
    P[t, s] = scale (q_t . k_s) e^(G_t - G_s), s <= t    what it adds to the outputs

Both are kept in the type of the matrix products. Where a decay is one number a row, its factors are kept beside them;
where it is one a channel (KDA), the scaled keys and queries are. Derivation: spec, chapter 60.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.chunks import NEVER, decay_between, load_tile, narrow, operand, place_of, row_at, sum_decays
from statescan.fast.kernels.common import dot, exp2, load_row, load_slots, product, widen


@triton.jit
def solve(N, LEVELS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """(1 - N)^-1 for what of a square N lies below the diagonal, with zeros above it.

    Of diagonal blocks of two it is 1 + N. From the inverses T of blocks, those of blocks twice as large: the coupling C
    of two halves adds T C T. C is where rows and columns differ in one bit and perhaps in lower ones.
    """
    r = tl.arange(0, N.shape[0])
    T = tl.where(r[:, None] // 2 == r[None, :] // 2, tl.where(r[:, None] == r[None, :], 1.0, N), 0.0)
    for level in tl.static_range(1, LEVELS):
        C = tl.where(((r >> level)[:, None] ^ (r >> level)[None, :]) == 1, N, 0.0)
        right = narrow(T, OPERAND)
        T += dot(right, narrow(dot(narrow(C, OPERAND), right, PRECISION), OPERAND), PRECISION)
    return T


@triton.jit
def diagonal(x):
    """The diagonal of a square."""
    r = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(r[:, None] == r[None, :], x, 0.0), 1)


@triton.jit
def inverse_norms(x, EPS: tl.constexpr):
    """1 / sqrt(sum x^2 + eps) of each row."""
    x = widen(x)
    return tl.rsqrt(tl.sum(product(x, x), 1) + EPS)


@triton.jit
def add_scores(keys, queries, k, q, G, sums, kk, BK: tl.constexpr, LEVELS: tl.constexpr, OPERAND: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """k_r . k_s and q_r . k_s over some channels, each decayed by 2^(G_r - G_s); right where s <= r only.

    `sums` is G in memory. A pair is scored where halving blocks of rows parts it, both decayed from or to the left
    half's last row: no exponent is positive, whatever the gates are, and one tile of decays serves both sides. Which
    products a pair gets depends on its place alone: no later token changes an earlier output (DET-2).
    """
    r = tl.arange(0, G.shape[0])
    queries += tl.where(r[:, None] == r[None, :], tl.sum(product(widen(q), widen(k)), 1)[:, None], 0.0)
    for level in tl.range(0, LEVELS, num_stages=1):
        half = 1 << level
        between = tl.load(sums + ((r | 2 * half - 1) - half)[:, None] * BK + kk[None, :])
        decay = exp2(-tl.abs((G - between).to(tl.float32)))
        scaled = narrow(widen(k) * decay, OPERAND)
        parted = ((r >> level)[:, None] ^ (r >> level)[None, :]) == 1
        keys += tl.where(parted, dot(scaled, tl.trans(scaled), PRECISION), 0.0)
        queries += tl.where(parted, dot(narrow(widen(q) * decay, OPERAND), tl.trans(scaled), PRECISION), 0.0)
    return keys, queries


@triton.jit(do_not_specialize=["slots", "N", "T", "bits"])
def delta_chunk_kernel(
    q, q_t, q_h, q_k, k, k_t, k_h, k_k, g, g_t, g_h, g_k, beta, beta_t, beta_h,
    cu_seqlens, read_slots, write_slots, slots, N, T, bits, scale,
    A, P, factors, sums, keys_up, keys_down, queries_up,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, BL: tl.constexpr,
    LEVELS: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PER_CHANNEL: tl.constexpr,
    L2NORM: tl.constexpr, EPS: tl.constexpr,
    SNAPSHOTS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program does one place and one value head.

    A `[places, HV, BL, BL]`, P `[places, HV, BQ, BL]`, sums: G. factors `[places, HV, 4, BL]`: e^G / |k| of rows,
    e^(G_end - G) / |k| of rows, scale e^G / |q| of tokens, 1 / |k|; per channel `[places, HV, BK + 2 BL]`: e^G_end,
    1 / |k|. keys_up, keys_down, queries_up `[places, HV, BL, BK]`: per channel only, where BQ is BL.
    """
    EXACT: tl.constexpr = PRECISION == "tf32x3"
    # entries of the system and of its inverse are below 2 where keys are normalised and beta is at most 1: float16 has
    # as many bits as TF32, and an accumulator is its operand as it lies in registers
    SOLVE: tl.constexpr = tl.float16 if L2NORM and not EXACT else tl.float32
    SOLVE_PRECISION: tl.constexpr = "ieee" if L2NORM and not EXACT else "tf32x3" if EXACT else "tf32"
    place = tl.program_id(0).to(tl.int64)
    hv = tl.program_id(1).to(tl.int64)
    h = hv // GROUP
    n = row_at(place, cu_seqlens, N, bits, CT)
    start, end = load_row(cu_seqlens, n, T)
    read, write = load_slots(read_slots, write_slots, n, n < N, slots)
    first = start + (place - place_of(start, n, CT)) * CT
    if (first < start) | (first >= end) | ((read < 0) & (write < 0)):
        return
    r, t, kk = tl.arange(0, BL), tl.arange(0, BQ), tl.arange(0, BK)
    token = first + r // M
    real = (token < end) & (r < CT * M)
    asked = (first + t < end) & (t < CT)
    k += first * M * k_t + h * k_h
    q += first * q_t + h * q_h
    beta_r = widen(tl.load(beta + (first * M + r) * beta_t + hv * beta_h, mask=real, other=0.0))
    k_tile = operand(load_tile(k, k_t, k_k, r, kk, real, kk < K), OPERAND)
    q_tile = operand(load_tile(q, q_t, q_k, t, kk, asked, kk < K), OPERAND)
    rk, rq = tl.full((BL,), 1.0, tl.float32), tl.full((BQ,), 1.0, tl.float32)
    if not PER_CHANNEL:
        keys = tl.trans(k_tile)
        raw = dot(k_tile, keys, PRECISION)
    if L2NORM:
        rk = inverse_norms(k_tile, EPS) if PER_CHANNEL else tl.rsqrt(diagonal(raw) + EPS)
        rq = inverse_norms(q_tile, EPS)
    rq *= scale
    g += first * g_t + hv * g_h
    seen = r[None, :] // M <= t[:, None]
    at = place * HV + hv
    factors += at * (4 * BL if not PER_CHANNEL else 2 * BL + BK)
    if PER_CHANNEL:
        system, scores = tl.zeros((BL, BL), tl.float32), tl.zeros((BL, BL), tl.float32)
        sums += at * (BL * BK)
        for channel in tl.range(0, BK, BC, num_stages=1):
            cc = channel + tl.arange(0, BC)
            G = sum_decays(widen(load_tile(g, g_t, g_k, r, cc, real, cc < K)), EXACT)
            tile = r[:, None] * BK + cc[None, :]
            tl.store(sums + tile, G)
            tl.debug_barrier()
            total = tl.load(sums + (BL - 1) * BK + cc)
            tl.store(factors + cc, exp2(total.to(tl.float32)))
            tile += at * (BL * BK)
            k_part = operand(load_tile(k, k_t, k_k, r, cc, real, cc < K), OPERAND)
            q_part = operand(load_tile(q, q_t, q_k, r, cc, real, cc < K), OPERAND)
            up, unit = exp2(G.to(tl.float32)), widen(k_part) * rk[:, None]
            tl.store(keys_up + tile, narrow(unit * up, OPERAND))
            tl.store(keys_down + tile, narrow(unit * decay_between(total[None, :], G), OPERAND))
            tl.store(queries_up + tile, narrow(widen(q_part) * rq[:, None] * up, OPERAND))
            system, scores = add_scores(system, scores, k_part, q_part, G, sums, cc, BK, LEVELS, OPERAND, PRECISION)
        if SNAPSHOTS:
            tl.store(factors + BK + r, rk)
        system = tl.where(seen, system, 0.0)
        scores = tl.where(seen, scores, 0.0)
    else:
        G = sum_decays(widen(tl.load(g + r // M * g_t, mask=real & (r % M == 0), other=0.0)), EXACT)
        G_t = G
        if M > 1:
            G_t = sum_decays(widen(tl.load(g + t * g_t, mask=asked, other=0.0)), EXACT)
        before = r[None, :] <= r[:, None]
        system = raw * exp2(tl.where(before, (G[:, None] - G[None, :]).to(tl.float32), NEVER))
        scores = dot(q_tile, keys, PRECISION)
        scores *= exp2(tl.where(seen, (G_t[:, None] - G[None, :]).to(tl.float32), NEVER))
        total = tl.sum(tl.where(r == BL - 1, G, 0.0))
        tl.store(factors + r, exp2(G.to(tl.float32)) * rk)
        tl.store(factors + BL + r, decay_between(total, G) * rk)
        tl.store(factors + 2 * BL + t, exp2(G_t.to(tl.float32)) * rq)
        tl.store(factors + 3 * BL + r, rk)
        tl.store(sums + at * BL + r, G)
    scores *= rq[:, None] * rk[None, :]
    system *= -(beta_r * rk)[:, None] * rk[None, :]
    tl.store(P + at * (BQ * BL) + t[:, None] * BL + r[None, :], narrow(scores, OPERAND))
    solved = solve(system, LEVELS, SOLVE, SOLVE_PRECISION) * beta_r[None, :]
    tl.store(A + at * (BL * BL) + r[:, None] * BL + r[None, :], narrow(solved, OPERAND))
