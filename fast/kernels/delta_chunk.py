"""What a chunk of the delta rule needs that no state enters: the solved system, the scores and the decays.

A chunk has CT tokens and CT * M rows (M copies a token), 64 at most. With G the sum of log-decays from the chunk's
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

from statescan.fast.kernels.chunks import decay_between, load_sum, load_tile, narrow, operand, place_of, row_at
from statescan.fast.kernels.common import dot, load_row, load_slots, product, widen

BL = tl.constexpr(64)
"""Rows of a chunk, padded."""
SUB = tl.constexpr(16)
"""Rows of a block that is solved row by row."""


@triton.jit
def join_blocks(T, N, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of diagonal blocks of SIZE, from those of their halves: the coupling C of two halves adds T C T."""
    r = tl.arange(0, BL)
    HALF: tl.constexpr = SIZE // 2
    pair = (r[:, None] // SIZE == r[None, :] // SIZE) & (r[:, None] // HALF != r[None, :] // HALF)
    return T + dot(T, dot(tl.where(pair, N, 0.0), T, PRECISION), PRECISION)


@triton.jit
def solve(N, PRECISION: tl.constexpr):
    """(1 - N)^-1 of a strictly lower `[64, 64]`: blocks of 16 row by row, then twice two blocks into one."""
    b, i = tl.arange(0, BL // SUB), tl.arange(0, SUB)
    same = b[:, None, None, None] == b[None, None, :, None]
    D = tl.sum(tl.where(same, tl.reshape(N, (BL // SUB, SUB, BL // SUB, SUB)), 0.0), 2)
    T = tl.where((i[:, None] == i[None, :])[None, :, :], tl.zeros_like(D) + 1.0, 0.0)
    for row in range(1, SUB):
        here = (i == row)[None, :, None]
        factors = tl.sum(tl.where(here, D, 0.0), 1)
        solved = tl.sum(product(tl.broadcast_to(factors[:, :, None], T.shape), T), 1)
        T = tl.where(here, T + solved[:, None, :], T)
    T = tl.reshape(tl.where(same, T[:, :, None, :], 0.0), (BL, BL))
    T = join_blocks(T, N, 2 * SUB, PRECISION)
    T = join_blocks(T, N, 4 * SUB, PRECISION)
    return T


@triton.jit
def inverse_norms(x, EPS: tl.constexpr):
    """1 / sqrt(sum x^2 + eps) of each row."""
    x = widen(x)
    return tl.rsqrt(tl.sum(product(x, x), 1) + EPS)


@triton.jit
def add_parted(kk, qk, k, q, G, SIZE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of the pairs that halving blocks of SIZE parts: both rows decayed from or to the left half's last row."""
    r = tl.arange(0, BL)
    HALF: tl.constexpr = SIZE // 2
    G3 = tl.reshape(G, (BL // SIZE, SIZE, G.shape[1]))
    between = tl.sum(tl.where((tl.arange(0, SIZE) == HALF - 1)[None, :, None], G3, 0.0), 1)
    decay = tl.reshape(tl.exp(-tl.abs((G3 - between[:, None, :]).to(tl.float32))), (BL, G.shape[1]))
    keys = narrow(k * decay, OPERAND)
    parted = (r[:, None] // SIZE == r[None, :] // SIZE) & (r[:, None] % SIZE >= HALF) & (r[None, :] % SIZE < HALF)
    kk += tl.where(parted, dot(keys, tl.trans(keys), PRECISION), 0.0)
    qk += tl.where(parted, dot(narrow(q * decay, OPERAND), tl.trans(keys), PRECISION), 0.0)
    return kk, qk


@triton.jit
def channel_scores(k, q, G, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """k_r . k_s and q_r . k_s, each channel decayed by e^(G_r - G_s), `[64, 64]` twice; right where s <= r only.

    k and q are float32. A pair is scored where halving the chunk parts it: no exponent is positive, whatever the gates
    are, and one tile of decays serves both sides. Which products a pair gets depends on its place alone: no later token
    changes an earlier output (DET-2).
    """
    r = tl.arange(0, BL)
    kk = tl.zeros((BL, BL), tl.float32)
    qk = tl.where(r[:, None] == r[None, :], tl.sum(product(q, k), 1)[:, None], 0.0)
    for level in tl.static_range(6):
        kk, qk = add_parted(kk, qk, k, q, G, BL >> level, OPERAND, PRECISION)
    return kk, qk


@triton.jit(do_not_specialize=["slots", "N", "T", "bits"])
def delta_chunk_kernel(
    q, q_t, q_h, q_k, k, k_t, k_h, k_k, g, g_t, g_h, g_k, beta, beta_t, beta_h,
    cu_seqlens, read_slots, write_slots, slots, N, T, bits, scale,
    A, P, factors, sums, keys_up, keys_down, queries_up,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, PER_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
    SNAPSHOTS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program does one place and one value head.

    A `[places, HV, 64, 64]`, P `[places, HV, BQ, 64]`. factors `[places, HV, 4, 64]`: e^G / |k| of rows, e^(G_end - G)
    / |k| of rows, scale e^G / |q| of tokens, 1 / |k|; per channel the third is e^G_end instead, `[places, HV, BK]` at
    its start. sums: G, for snapshots. keys_up, keys_down `[places, HV, 64, BK]`, queries_up: per channel only.
    """
    EXACT: tl.constexpr = PRECISION == "tf32x3"
    place = tl.program_id(0).to(tl.int64)
    hv = tl.program_id(1).to(tl.int64)
    n = row_at(place, cu_seqlens, N, bits, CT)
    start, end = load_row(cu_seqlens, n, T)
    read, write = load_slots(read_slots, write_slots, n, n < N, slots)
    first = start + (place - place_of(start, n, CT)) * CT
    if (first < start) | (first >= end) | ((read < 0) & (write < 0)):
        return
    h = hv // GROUP
    r, t, kk = tl.arange(0, BL), tl.arange(0, BQ), tl.arange(0, BK)
    token = first + r // M
    real = (token < end) & (r < CT * M)
    asked = (first + t < end) & (t < CT)
    k += first * M * k_t + h * k_h
    q += first * q_t + h * q_h
    k_tile = operand(load_tile(k, k_t, k_k, r, kk, real, K), OPERAND)
    q_tile = operand(load_tile(q, q_t, q_k, t, kk, asked, K), OPERAND)
    beta_r = widen(tl.load(beta + (first * M + r) * beta_t + hv * beta_h, mask=real, other=0.0))
    rk, rq = tl.full((BL,), 1.0, tl.float32), tl.full((BQ,), 1.0, tl.float32)
    if L2NORM:
        rk, rq = inverse_norms(k_tile, EPS), inverse_norms(q_tile, EPS)
    rq *= scale
    g += first * g_t + hv * g_h
    before = r[None, :] < r[:, None]
    seen = r[None, :] // M <= t[:, None]
    at = place * HV + hv
    factors += at * (4 * BL if not PER_CHANNEL else 2 * BL + BK)
    if PER_CHANNEL:
        k_wide, q_wide = widen(k_tile) * rk[:, None], widen(q_tile) * rq[:, None]
        G = widen(load_tile(g, g_t, g_k, r, kk, real, K))
        if EXACT:
            G = G.to(tl.float64)
        G = tl.cumsum(G, 0)
        total = tl.sum(tl.where((r == BL - 1)[:, None], G, 0.0), 0)
        system, scores = channel_scores(k_wide, q_wide, G, OPERAND, PRECISION)
        system *= beta_r[:, None]
        up = tl.exp(G.to(tl.float32))
        tile = at * (BL * BK) + r[:, None] * BK + kk[None, :]
        tl.store(keys_up + tile, narrow(k_wide * up, OPERAND))
        tl.store(keys_down + tile, narrow(k_wide * decay_between(total[None, :], G), OPERAND))
        tl.store(queries_up + tile, narrow(q_wide * up, OPERAND))
        tl.store(factors + kk, tl.exp(total.to(tl.float32)))
        if SNAPSHOTS:
            tl.store(factors + BK + r, rk)
            tl.store(sums + tile, G)
    else:
        G = load_sum(g, g_t, r // M, real & (r % M == 0), EXACT)
        G_t = G
        if M > 1:
            G_t = load_sum(g, g_t, t, asked, EXACT)
        keys = tl.trans(k_tile)
        system = dot(k_tile, keys, PRECISION) * (decay_between(G[:, None], G[None, :]) * rk[None, :])
        system *= (beta_r * rk)[:, None]
        scores = dot(q_tile, keys, PRECISION) * (decay_between(G_t[:, None], G[None, :]) * rq[:, None] * rk[None, :])
        total = tl.sum(tl.where(r == BL - 1, G, 0.0))
        tl.store(factors + r, tl.exp(G.to(tl.float32)) * rk)
        tl.store(factors + BL + r, decay_between(total, G) * rk)
        tl.store(factors + 2 * BL + t, tl.exp(G_t.to(tl.float32)) * rq)
        tl.store(factors + 3 * BL + r, rk)
        tl.store(sums + at * BL + r, G)
    solved = solve(tl.where(before, -system, 0.0), PRECISION if EXACT else "tf32") * beta_r[None, :]
    tl.store(A + at * (BL * BL) + r[:, None] * BL + r[None, :], narrow(solved, OPERAND))
    tl.store(P + at * (BQ * BL) + t[:, None] * BL + r[None, :], narrow(tl.where(seen, scores, 0.0), OPERAND))
