"""Prefill of Mamba2 on a slot pool: a row's chunks one after another, its state in registers throughout.

One program holds `[BP, R]` of one head of one row in float32. A chunk of L tokens, G the sum of dt A from its first
token on:

    y = (C B^T, each pair decayed by e^(G_t - G_s) dt_s, s <= t) x + e^G C S
    S <- e^G_end S + B^T (e^(G_end - G) dt x)

The state at any token inside a chunk follows in the same way: that is a snapshot. Derivation: spec, chapter 60.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.chunks import (
    NEVER,
    any_between,
    decay_between,
    last_offset,
    load_tile,
    narrow,
    operand,
    place_of,
    row_at,
    store_zeros,
    sum_decays,
)
from statescan.fast.kernels.common import dot, exp2, load_row, load_slots, rn, silu, softplus, widen


@triton.jit(do_not_specialize=["N", "T", "bits"])
def ssd_steps_kernel(
    dt, dt_t, dt_h, A, A_h, dt_bias, bias_h, least, largest, cu_seqlens, N, T, bits, steps, sums,
    H: tl.constexpr, BH: tl.constexpr, L: tl.constexpr, SOFTPLUS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Steps and sums of log-decays, `[places, H, L]`, of one place and BH heads; 0 and the last sum past the row's end.

    What a row that is not served gets is not read by anyone.
    """
    place = tl.program_id(0).to(tl.int64)
    t, h = tl.arange(0, L), tl.program_id(1) * BH + tl.arange(0, BH)
    n = row_at(place, cu_seqlens, N, bits, L)
    start, end = load_row(cu_seqlens, n, T)
    first = start + (place - place_of(start, n, L)) * L
    if (first < start) | (first >= end):
        return
    real = (first + t < end)[:, None] & (h < H)[None, :]
    # DISCRETISE
    step = widen(tl.load(dt + (first + t)[:, None] * dt_t + h.to(tl.int64)[None, :] * dt_h, mask=real, other=0.0))
    if dt_bias is not None:
        step += widen(tl.load(dt_bias + h * bias_h, mask=h < H, other=0.0))[None, :]
    if SOFTPLUS:
        step = softplus(step)
    step = tl.where(real, tl.minimum(tl.maximum(step, least), largest), 0.0)
    # DECAY
    G = sum_decays(step * widen(tl.load(A + h * A_h, mask=h < H, other=0.0))[None, :], WIDE)
    at = (place * H + h)[None, :] * L + t[:, None]
    tl.store(steps + at, step, mask=(h < H)[None, :])
    tl.store(sums + at, G, mask=(h < H)[None, :])


@triton.jit(do_not_specialize=["slots", "N", "T", "count"])
def ssd_prefill_kernel(
    x, x_t, x_h, x_p, B, B_t, B_g, B_r, C, C_t, C_g, C_r, D, D_h, D_p, z, z_t, z_h, z_p, y, steps, sums,
    cu_seqlens, read_slots, write_slots, slots, N, T, pool, pool_n, positions, count, snapshots, snapshots_n,
    POOL_H: tl.constexpr, POOL_P: tl.constexpr, POOL_R: tl.constexpr,
    SNAP_H: tl.constexpr, SNAP_P: tl.constexpr, SNAP_R: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, R: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    BR: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: channel tiles, then heads, then rows; the last row's number is N: what lies past the last offset.

    GROUP heads share B and C. D_p is 0 for one D a head. D, z, positions may be None. `y [T, H, P]` is
    contiguous.
    """
    TILES: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    h = (pid // TILES % H).to(tl.int64)
    n = (pid // (TILES * H)).to(tl.int64)
    t, rr = tl.arange(0, L), tl.arange(0, BR)
    pp = pid % TILES * BP + tl.arange(0, BP)
    y += h * P
    if n == N:
        store_zeros(y, H * P, last_offset(cu_seqlens, N, T), T, pp, P, 64)
        return
    start, end = load_row(cu_seqlens, n, T)
    read, write = load_slots(read_slots, write_slots, n, n < N, slots)
    if end < start:
        return
    if (read < 0) & (write < 0):
        store_zeros(y, H * P, start, end, pp, P, 64)
        return
    inside = (pp < P)[:, None] & (rr < R)[None, :]
    cell = h * POOL_H + (pp.to(tl.int64)[:, None] * POOL_P + rr.to(tl.int64)[None, :] * POOL_R)
    S = widen(tl.load(pool + read * pool_n + cell, mask=inside & (read >= 0), other=0.0))
    x += h * x_h
    B += h // GROUP * B_g
    C += h // GROUP * C_g
    at = (place_of(start, n, L) * H + h) * L
    causal = t[None, :] <= t[:, None]
    if D is not None:
        skip = widen(tl.load(D + h * D_h + pp * D_p, mask=pp < P, other=0.0))
    for j in tl.range(0, (end - start + L - 1) // L, num_stages=STAGES):
        first = start + j * L
        real = first + t < end
        x_tile = load_tile(x + first * x_t, x_t, x_p, t, pp, real, pp < P)
        B_tile = operand(load_tile(B + first * B_t, B_t, B_r, t, rr, real, rr < R), OPERAND)
        C_tile = operand(load_tile(C + first * C_t, C_t, C_r, t, rr, real, rr < R), OPERAND)
        if z is not None:
            gate = load_tile(z + first * z_t + h * z_h, z_t, z_p, t, pp, real, pp < P)
        step = tl.load(steps + at + t)
        G = tl.load(sums + at + t)
        total = tl.load(sums + at + (L - 1))
        at += H * L
        # READ
        decay = exp2(tl.where(causal, (G[:, None] - G[None, :]).to(tl.float32), NEVER))
        scores = narrow(dot(C_tile, tl.trans(B_tile), PRECISION) * (decay * step[None, :]), OPERAND)
        out = dot(narrow(S, OPERAND), tl.trans(C_tile), PRECISION) * exp2(G.to(tl.float32))[None, :]
        out += dot(tl.trans(operand(x_tile, OPERAND)), tl.trans(scores), PRECISION)
        out = tl.trans(out)
        x_wide = widen(x_tile)
        if D is not None:
            out += x_wide * skip[None, :]
        if z is not None:
            out *= silu(widen(gate))
        spot = t[:, None] * (H * P) + pp[None, :]
        tl.store(y + first * (H * P) + spot, rn(out, y.dtype.element_ty), mask=real[:, None] & (pp < P)[None, :])
        if positions is not None:
            stop = tl.minimum(first + L, end)
            if any_between(positions, count, first, stop, 64):
                for i in range(count):
                    position = tl.load(positions + i).to(tl.int64)
                    if (position > first) & (position <= stop):
                        now = tl.sum(tl.where(t == position - first - 1, G, 0.0))
                        weight = exp2(tl.where(t < position - first, (now - G).to(tl.float32), NEVER)) * step
                        kept = S * exp2(now.to(tl.float32))
                        kept += dot(tl.trans(narrow(x_wide * weight[:, None], OPERAND)), B_tile, PRECISION)
                        place = h * SNAP_H + (
                            pp.to(tl.int64)[:, None] * SNAP_P + rr.to(tl.int64)[None, :] * SNAP_R
                        )
                        into = snapshots + tl.cast(i, tl.int64) * snapshots_n + place
                        tl.store(into, rn(kept, snapshots.dtype.element_ty), mask=inside)
        # WRITE
        written = narrow(x_wide * (decay_between(total, G) * step)[:, None], OPERAND)
        S = S * exp2(total.to(tl.float32)) + dot(tl.trans(written), B_tile, PRECISION)
    tl.store(pool + write * pool_n + cell, rn(S, pool.dtype.element_ty), mask=inside & (write >= 0))
