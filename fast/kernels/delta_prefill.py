"""Prefill of the delta family on a slot pool: a row's chunks one after another, its state in registers throughout.

One program holds `[BV, K]` of one value head of one row in float32. A chunk, with what `delta_chunk` prepared:

    u = A (v - e^G K S);   o = scale e^G Q S + P u;   S <- e^G_end S + (e^(G_end - G) K)^T u

It starts from its slot or from zeros and is stored once, at the row's end. The state at any other token follows from
the chunk it lies in, because u of a token depends on no later one: that is a snapshot.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.chunks import (
    any_between,
    decay_between,
    last_offset,
    load_tile,
    narrow,
    operand,
    place_of,
    store_zeros,
)
from statescan.fast.kernels.common import dot, exp2, load_row, load_slots, rn, widen


@triton.jit
def state_after(
    S, u, count, k, k_t, k_k, factors, sums, kk,
    K: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, PER_CHANNEL: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after `count` tokens of a chunk, from the state it begins with and u of its rows."""
    BL: tl.constexpr = u.shape[1]
    r = tl.arange(0, BL)
    real = r < count * M
    keys = widen(load_tile(k, k_t, k_k, r, kk, real, kk < K))
    if PER_CHANNEL:
        G = tl.load(sums + r[:, None] * BK + kk[None, :])
        rk = tl.load(factors + BK + r)
        now = tl.sum(tl.where((r == count - 1)[:, None], G, 0.0), 0)
        keys = tl.where(real[:, None], keys * (decay_between(now[None, :], G) * rk[:, None]), 0.0)
        S = S * exp2(now.to(tl.float32))[None, :]
    else:
        G = tl.load(sums + r)
        now = tl.sum(tl.where(r == count * M - 1, G, 0.0))
        u = u * (decay_between(now, G) * tl.load(factors + 3 * BL + r))[None, :]
        S = S * exp2(now.to(tl.float32))
    u = tl.where(real[None, :], u, 0.0)
    return S + dot(narrow(u, OPERAND), narrow(keys, OPERAND), PRECISION)


@triton.jit(do_not_specialize=["slots", "N", "T", "count"])
def delta_prefill_kernel(
    q, q_t, q_h, q_k, k, k_t, k_h, k_k, v, v_t, v_h, v_v, o, A, P, factors, sums, keys_up, keys_down, queries_up,
    cu_seqlens, read_slots, write_slots, slots, N, T, pool, pool_n, positions, count, snapshots, snapshots_n,
    POOL_H: tl.constexpr, POOL_K: tl.constexpr, POOL_V: tl.constexpr,
    SNAP_H: tl.constexpr, SNAP_K: tl.constexpr, SNAP_V: tl.constexpr,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, CT: tl.constexpr,
    BL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PER_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles, then heads, then rows; the last row's number is N: what lies past the last offset.

    `o [T, HV, V]` is contiguous. `positions` may be None.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    hv = (pid // TILES % HV).to(tl.int64)
    n = (pid // (TILES * HV)).to(tl.int64)
    h = hv // GROUP
    r, t, kk = tl.arange(0, BL), tl.arange(0, BQ), tl.arange(0, BK)
    vv = pid % TILES * BV + tl.arange(0, BV)
    o += hv * V
    if n == N:
        store_zeros(o, HV * V, last_offset(cu_seqlens, N, T), T, vv, V, 64)
        return
    start, end = load_row(cu_seqlens, n, T)
    read, write = load_slots(read_slots, write_slots, n, n < N, slots)
    if end < start:
        return
    if (read < 0) & (write < 0):
        store_zeros(o, HV * V, start, end, vv, V, 64)
        return
    inside = (vv < V)[:, None] & (kk < K)[None, :]
    cell = hv * POOL_H + (vv.to(tl.int64)[:, None] * POOL_V + kk.to(tl.int64)[None, :] * POOL_K)
    S = widen(tl.load(pool + read * pool_n + cell, mask=inside & (read >= 0), other=0.0))
    k += h * k_h
    q += h * q_h
    v += hv * v_h
    first_place = place_of(start, n, CT)
    for j in tl.range(0, (end - start + CT - 1) // CT, num_stages=STAGES):
        first = start + j * CT
        at = (first_place + j) * HV + hv
        real = (first + r // M < end) & (r < CT * M)
        asked = (first + t < end) & (t < CT)
        v_tile = load_tile(v + first * M * v_t, v_t, v_v, r, vv, real, vv < V)
        a = tl.load(A + at * (BL * BL) + r[:, None] * BL + r[None, :])
        p = tl.load(P + at * (BQ * BL) + t[:, None] * BL + r[None, :])
        state = narrow(S, OPERAND)
        if PER_CHANNEL:
            decays = factors + at * (2 * BL + BK)
            tile = at * (BL * BK) + r[:, None] * BK + kk[None, :]
            known = dot(state, tl.trans(tl.load(keys_up + tile)), PRECISION)
            out = dot(state, tl.trans(tl.load(queries_up + tile)), PRECISION)
            keys = tl.load(keys_down + tile)
        else:
            decays = factors + at * (4 * BL)
            keys = operand(load_tile(k + first * M * k_t, k_t, k_k, r, kk, real, kk < K), OPERAND)
            queries = operand(load_tile(q + first * q_t, q_t, q_k, t, kk, asked, kk < K), OPERAND)
            known = dot(state, tl.trans(keys), PRECISION) * tl.load(decays + r)[None, :]
            out = dot(state, tl.trans(queries), PRECISION) * tl.load(decays + 2 * BL + t)[None, :]
        u = dot(tl.trans(operand(v_tile, OPERAND)), tl.trans(a), PRECISION)
        u += dot(narrow(-known, OPERAND), tl.trans(a), PRECISION)
        out += dot(narrow(u, OPERAND), tl.trans(p), PRECISION)
        spot = t[None, :] * (HV * V) + vv[:, None]
        tl.store(o + first * (HV * V) + spot, rn(out, o.dtype.element_ty), mask=(vv < V)[:, None] & asked[None, :])
        if positions is not None:
            stop = tl.minimum(first + CT, end)
            if any_between(positions, count, first, stop, 64):
                for x in range(count):
                    position = tl.load(positions + x).to(tl.int64)
                    if (position > first) & (position <= stop):
                        G = sums + at * (BL * (BK if PER_CHANNEL else 1))
                        kept = state_after(S, u, position - first, k + first * M * k_t, k_t, k_k, decays, G, kk,
                                           K, M, BK, PER_CHANNEL, OPERAND, PRECISION)  # fmt: skip
                        place = hv * SNAP_H + (
                            vv.to(tl.int64)[:, None] * SNAP_V + kk.to(tl.int64)[None, :] * SNAP_K
                        )
                        into = snapshots + tl.cast(x, tl.int64) * snapshots_n + place
                        tl.store(into, rn(kept, snapshots.dtype.element_ty), mask=inside)
        if PER_CHANNEL:
            S = S * tl.load(decays + kk)[None, :] + dot(narrow(u, OPERAND), keys, PRECISION)
        else:
            whole = exp2(tl.load(sums + at * BL + BL - 1).to(tl.float32))
            S = S * whole + dot(narrow(u * tl.load(decays + BL + r)[None, :], OPERAND), keys, PRECISION)
    tl.store(pool + write * pool_n + cell, rn(S, pool.dtype.element_ty), mask=inside & (write >= 0))
