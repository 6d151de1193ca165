"""Prefill of Mamba2 on a slot pool: a row's chunks one after another, its state in registers throughout.

One program holds `[R, BP]` of one head of one row in float32. A chunk of 64 tokens, G the sum of dt A from its first
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

from statescan.fast.kernels.chunks import any_between, last_offset, load_tile, narrow, operand, store_zeros
from statescan.fast.kernels.common import dot, load_row, load_slots, rn, silu, softplus, widen


@triton.jit
def growth(late, early):
    """e^(late - early) in float32."""
    return tl.exp((late - early).to(tl.float32))


@triton.jit(do_not_specialize=["slots", "N", "T", "count"])
def ssd_prefill_kernel(
    x, x_t, x_h, x_p, dt, dt_t, dt_h, A, A_h, B, B_t, B_g, B_r, C, C_t, C_g, C_r,
    D, D_h, D_p, z, z_t, z_h, z_p, dt_bias, bias_h, y, least, largest,
    cu_seqlens, read_slots, write_slots, slots, N, T, pool, pool_n, positions, count, snapshots, snapshots_n,
    POOL_H: tl.constexpr, POOL_P: tl.constexpr, POOL_R: tl.constexpr,
    SNAP_H: tl.constexpr, SNAP_P: tl.constexpr, SNAP_R: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, R: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    BR: tl.constexpr, SOFTPLUS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: channel tiles, then heads, then rows; the last row's number is N: what lies past the last offset.

    GROUP heads share B and C. D_p is 0 for one D a head. D, z, dt_bias, positions may be None. `y [T, H, P]` is
    contiguous.
    """
    TILES: tl.constexpr = (P + BP - 1) // BP
    EXACT: tl.constexpr = PRECISION == "tf32x3"
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
    inside = (rr < R)[:, None] & (pp < P)[None, :]
    cell = h * POOL_H + (rr.to(tl.int64)[:, None] * POOL_R + pp.to(tl.int64)[None, :] * POOL_P)
    S = widen(tl.load(pool + read * pool_n + cell, mask=inside & (read >= 0), other=0.0))
    x += h * x_h
    dt += h * dt_h
    B += h // GROUP * B_g
    C += h // GROUP * C_g
    rate = widen(tl.load(A + h * A_h))
    causal = t[None, :] <= t[:, None]
    for j in tl.range(0, (end - start + L - 1) // L, num_stages=STAGES):
        first = start + j * L
        real = first + t < end
        x_tile = load_tile(x + first * x_t, x_t, x_p, t, pp, real, P)
        B_tile = operand(load_tile(B + first * B_t, B_t, B_r, t, rr, real, R), OPERAND)
        C_tile = operand(load_tile(C + first * C_t, C_t, C_r, t, rr, real, R), OPERAND)
        # DISCRETISE
        step = widen(tl.load(dt + (first + t) * dt_t, mask=real, other=0.0))
        if dt_bias is not None:
            step += widen(tl.load(dt_bias + h * bias_h))
        if SOFTPLUS:
            step = softplus(step)
        step = tl.where(real, tl.minimum(tl.maximum(step, least), largest), 0.0)
        # DECAY
        G = step * rate
        if EXACT:
            G = G.to(tl.float64)
        G = tl.cumsum(G, 0)
        total = tl.sum(tl.where(t == L - 1, G, 0.0))
        # READ
        pairs = tl.where(causal, growth(G[:, None], tl.where(causal, G[None, :], G[:, None])) * step[None, :], 0.0)
        scores = dot(C_tile, tl.trans(B_tile), PRECISION) * pairs
        out = dot(C_tile, narrow(S, OPERAND), PRECISION) * tl.exp(G.to(tl.float32))[:, None]
        out += dot(narrow(scores, OPERAND), operand(x_tile, OPERAND), PRECISION)
        x_wide = widen(x_tile)
        if D is not None:
            out += x_wide * widen(tl.load(D + h * D_h + pp * D_p, mask=pp < P, other=0.0))[None, :]
        if z is not None:
            gate = load_tile(z + first * z_t + h * z_h, z_t, z_p, t, pp, real, P)
            out *= silu(widen(gate))
        spot = (first + t).to(tl.int64)[:, None] * (H * P) + pp[None, :]
        tl.store(y + spot, rn(out, y.dtype.element_ty), mask=real[:, None] & (pp < P)[None, :])
        if positions is not None:
            stop = tl.minimum(first + L, end)
            if any_between(positions, count, first, stop, 64):
                for i in range(count):
                    position = tl.load(positions + i).to(tl.int64)
                    if (position > first) & (position <= stop):
                        own = t < position - first
                        now = tl.sum(tl.where(t == position - first - 1, G, 0.0))
                        weight = tl.where(own, growth(now, tl.where(own, G, now)) * step, 0.0)
                        kept = S * tl.exp(now.to(tl.float32))
                        kept += dot(tl.trans(B_tile), narrow(x_wide * weight[:, None], OPERAND), PRECISION)
                        place = h * SNAP_H + (
                            rr.to(tl.int64)[:, None] * SNAP_R + pp.to(tl.int64)[None, :] * SNAP_P
                        )
                        into = snapshots + tl.cast(i, tl.int64) * snapshots_n + place
                        tl.store(into, rn(kept, snapshots.dtype.element_ty), mask=inside)
        # WRITE
        written = narrow(x_wide * (growth(total, G) * step)[:, None], OPERAND)
        S = S * tl.exp(total.to(tl.float32)) + dot(tl.trans(B_tile), written, PRECISION)
    tl.store(pool + write * pool_n + cell, rn(S, pool.dtype.element_ty), mask=inside & (write >= 0))
