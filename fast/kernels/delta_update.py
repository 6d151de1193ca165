"""Decode of the delta family on a slot pool: J tokens a row, M copies a token, the state read once and stored once.

One program holds BV values by all K keys of one row and head in float32 registers, as `kernels.tiles` lays it out:
values are its rows, keys its columns.

A token with decay a and one copy, per value with its keys' state s (KDA: a is a vector):

    s <- a s;   u = k.s;   w = q.s;   c = beta (v - u);   o = scale (w + (q.k) c);   s <- s + c k

The output is read from the state before the write, so that both sums over keys are one trip and not two. l2norm only
changes numbers per token: 1/|k| goes into u and c, 1/|q| into the scale.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.common import load_update_rows, rn
from statescan.fast.kernels.tiles import (
    beside_columns,
    beside_rows,
    column_numbers,
    inner,
    load_columns,
    load_rows,
    load_state,
    sum_products,
)


@triton.jit
def run_token(
    state, q, k, v, g, beta, scale, k_ptr, k_j, k_k, v_ptr, v_j, v_v, beta_ptr, beta_j, kk, vv,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr, PER_CHANNEL: tl.constexpr,
    L2NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One token: the state after it and its output `[BV]`.

    k, v, beta are those of the token's first copy; the pointers lead to them, for the copies behind it.
    """
    q = q.to(tl.float32)
    if L2NORM:
        scale = scale * tl.rsqrt(inner(q, q) + EPS)
    # DECAY
    decay = tl.exp(g.to(tl.float32))
    if PER_CHANNEL:
        decay = beside_rows(decay)
    state = state * decay
    out = tl.zeros(vv.shape, tl.float32)
    for m in tl.static_range(M):
        if m > 0:
            k = load_columns(k_ptr + m * k_j, k_k, kk, K, WHOLE)
            v = load_rows(v_ptr + m * v_j, v_v, vv, V)
            beta = tl.load(beta_ptr + m * beta_j)
        k, v, beta = k.to(tl.float32), v.to(tl.float32), beta.to(tl.float32)
        keys = beside_rows(k)
        # CORRECT
        known = sum_products(state, k)
        correction = beta * (v - known)
        if L2NORM:
            inverse = tl.rsqrt(inner(k, k) + EPS)
            correction = beta * (v - known * inverse) * inverse
        # READ, of what this last write will leave
        if m == M - 1:
            out = (sum_products(state, q) + inner(q, k) * correction) * scale
        # WRITE
        state = tl.fma(keys, beside_columns(correction), state)
    return state, out


@triton.jit(do_not_specialize=["slots", "num_entries"])
def delta_update_kernel(
    q, q_n, q_j, q_h, q_k, k, k_n, k_j, k_h, k_k, v, v_n, v_j, v_h, v_v, g, g_n, g_j, g_h, g_k,
    beta, beta_n, beta_j, beta_h, o, scale,
    pool, pool_n, entries, entries_n, read_slots, write_slots, num_accepted, num_tokens, slots, num_entries,
    POOL_H: tl.constexpr, POOL_K: tl.constexpr, POOL_V: tl.constexpr,
    ENTRIES_J: tl.constexpr, ENTRIES_H: tl.constexpr, ENTRIES_K: tl.constexpr, ENTRIES_V: tl.constexpr,
    J: tl.constexpr, M: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr, JP: tl.constexpr,
    PER_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles of a head, then heads, then rows, so that neighbours read neighbouring memory.

    GROUP value heads share a query/key head. JP is J or the next power of two. WIDE: offsets inside a tile need 64
    bits too. `o [N, J, HV, V]` is contiguous. Strides inside a slot are constants of the launch: offsets of a thread's
    vectors become part of its instructions.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    WHOLE: tl.constexpr = K == KC * KI
    pid = tl.program_id(0)
    hv = (pid // TILES % HV).to(tl.int64)
    n = (pid // (TILES * HV)).to(tl.int64)
    kk = column_numbers(KC, KI)
    vv = pid % TILES * BV + tl.arange(0, BV)
    if WIDE:
        kk, vv = kk.to(tl.int64), vv.to(tl.int64)
    q += n * q_n + hv // GROUP * q_h
    k += n * k_n + hv // GROUP * k_h
    v += n * v_n + hv * v_h
    g += n * g_n + hv * g_h
    beta += n * beta_n + hv * beta_h
    o += (n * J * HV + hv) * V

    # The first token's numbers do not depend on the slot: they are on their way while its index is.
    read, write, accepted, count = load_update_rows(
        read_slots, write_slots, num_accepted, num_tokens, n, n >= 0, slots, num_entries, J
    )  # fmt: skip
    q_next = load_columns(q, q_k, kk, K, WHOLE)
    k_next = load_columns(k, k_k, kk, K, WHOLE)
    v_next = load_rows(v, v_v, vv, V)
    beta_next = tl.load(beta)
    if PER_CHANNEL:
        g_next = load_columns(g, g_k, kk, K, WHOLE)
    else:
        g_next = tl.load(g)

    columns, lines = beside_rows(kk), beside_columns(vv)
    inside = (columns < K) & (lines < V)
    slab = hv * POOL_H + (columns * POOL_K + lines * POOL_V)
    entry = slab
    if entries is not None:
        entry = hv * ENTRIES_H + (columns * ENTRIES_K + lines * ENTRIES_V)
    state = load_state(
        pool, entries, num_accepted, read, accepted, slab, entry, inside, pool_n, entries_n, ENTRIES_J
    )  # fmt: skip
    stored = inside & (write >= 0)

    if num_tokens is None and J == 1:
        # No loop: a padding row computes on zeros and on whatever its token holds, and stores nothing of it.
        state, out = run_token(
            state, q_next, k_next, v_next, g_next, beta_next, scale, k, k_j, k_k, v, v_j, v_v, beta, beta_j, kk, vv,
            M, K, V, WHOLE, PER_CHANNEL, L2NORM, EPS,
        )  # fmt: skip
        tl.store(o + vv, rn(tl.where(count > 0, out, 0.0), o.dtype.element_ty), mask=vv < V)
        if entries is not None:
            tl.store(entries + write * entries_n + entry, rn(state, entries.dtype.element_ty), mask=stored)
    else:
        for j in range(count):
            q_now, k_now, v_now, g_now, beta_now = q_next, k_next, v_next, g_next, beta_next
            # The next token is on its way while this one is computed; after the last one, the first once more: its
            # memory is there.
            ahead = (j + 1) % J
            q_next = load_columns(q + ahead * q_j, q_k, kk, K, WHOLE)
            k_next = load_columns(k + ahead * M * k_j, k_k, kk, K, WHOLE)
            v_next = load_rows(v + ahead * M * v_j, v_v, vv, V)
            beta_next = tl.load(beta + ahead * M * beta_j)
            if PER_CHANNEL:
                g_next = load_columns(g + ahead * g_j, g_k, kk, K, WHOLE)
            else:
                g_next = tl.load(g + ahead * g_j)
            first = j * M
            state, out = run_token(
                state, q_now, k_now, v_now, g_now, beta_now, scale, k + first * k_j, k_j, k_k, v + first * v_j, v_j,
                v_v, beta + first * beta_j, beta_j, kk, vv, M, K, V, WHOLE, PER_CHANNEL, L2NORM, EPS,
            )  # fmt: skip
            tl.store(o + j * (HV * V) + vv, rn(out, o.dtype.element_ty), mask=vv < V)
            if entries is not None:
                into = entries + write * entries_n + j * ENTRIES_J + entry
                tl.store(into, rn(state, entries.dtype.element_ty), mask=stored)
        jj = tl.arange(0, JP)[:, None]
        rest = (jj >= count) & (jj < J) & (vv[None, :] < V)
        tl.store(o + jj * (HV * V) + vv[None, :], tl.zeros([JP, BV], o.dtype.element_ty), mask=rest)
    tl.store(pool + write * pool_n + slab, rn(state, pool.dtype.element_ty), mask=stored)
