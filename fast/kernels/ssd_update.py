"""Decode of Mamba2 on a slot pool: J tokens a row, the state read once and stored once.

One program holds BP channels by all of d_state of one row and head in float32 registers, as `kernels.tiles` lays it
out: channels are its rows, d_state its columns. A token:

    dt <- clamp(softplus(dt + dt_bias));   s <- exp(dt A) s + (dt x) B;   y = (s.C + D x) silu(z)
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.common import load_update_rows, rn, silu, softplus
from statescan.fast.kernels.tiles import (
    beside_columns,
    beside_rows,
    column_numbers,
    load_columns,
    load_rows,
    load_state,
    sum_products,
)


@triton.jit
def run_token(state, x, dt, B, C, z, A, D, dt_bias, least, largest, SOFTPLUS: tl.constexpr):
    """One token: the state after it and its output `[BP]`. D, z and dt_bias may be None."""
    x = x.to(tl.float32)
    # DISCRETISE
    dt = dt.to(tl.float32)
    if dt_bias is not None:
        dt += dt_bias
    if SOFTPLUS:
        dt = softplus(dt)
    dt = tl.minimum(tl.maximum(dt, least), largest)
    # DECAY, WRITE
    written = beside_columns(x * dt) * beside_rows(B.to(tl.float32))
    state = tl.fma(state, tl.exp(dt * A), written)
    # READ
    y = sum_products(state, C.to(tl.float32))
    if D is not None:
        y += D * x
    if z is not None:
        y *= silu(z.to(tl.float32))
    return state, y


@triton.jit(do_not_specialize=["slots", "num_entries"])
def ssd_update_kernel(
    x, x_n, x_j, x_h, x_p, dt, dt_n, dt_j, dt_h, A, A_h, B, B_n, B_j, B_g, B_r, C, C_n, C_j, C_g, C_r,
    D, D_h, D_p, z, z_n, z_j, z_h, z_p, dt_bias, bias_h, y, least, largest,
    pool, pool_n, entries, entries_n, read_slots, write_slots, num_accepted, num_tokens, slots, num_entries,
    POOL_H: tl.constexpr, POOL_P: tl.constexpr, POOL_R: tl.constexpr,
    ENTRIES_J: tl.constexpr, ENTRIES_H: tl.constexpr, ENTRIES_P: tl.constexpr, ENTRIES_R: tl.constexpr,
    J: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    BP: tl.constexpr, RC: tl.constexpr, RI: tl.constexpr, JP: tl.constexpr, SOFTPLUS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs: channel tiles of a head, then heads, then rows, so that neighbours read neighbouring memory.

    GROUP heads share B and C. D_p is 0 for one D a head. JP is J or the next power of two. WIDE: offsets inside a tile
    need 64 bits too. `y [N, J, H, P]` is contiguous.
    """
    TILES: tl.constexpr = (P + BP - 1) // BP
    WHOLE: tl.constexpr = R == RC * RI
    pid = tl.program_id(0)
    h = (pid // TILES % H).to(tl.int64)
    n = (pid // (TILES * H)).to(tl.int64)
    rr = column_numbers(RC, RI)
    pp = pid % TILES * BP + tl.arange(0, BP)
    if WIDE:
        rr, pp = rr.to(tl.int64), pp.to(tl.int64)
    x += n * x_n + h * x_h
    dt += n * dt_n + h * dt_h
    B += n * B_n + h // GROUP * B_g
    C += n * C_n + h // GROUP * C_g
    y += (n * J * H + h) * P

    # The first token's numbers do not depend on the slot: they are on their way while its index is.
    read, write, accepted, count = load_update_rows(
        read_slots, write_slots, num_accepted, num_tokens, n, n >= 0, slots, num_entries, J
    )  # fmt: skip
    x_next = load_rows(x, x_p, pp, P)
    dt_next = tl.load(dt)
    B_next = load_columns(B, B_r, rr, R, WHOLE)
    C_next = load_columns(C, C_r, rr, R, WHOLE)
    rate = tl.load(A + h * A_h).to(tl.float32)
    skip = None
    if D is not None:
        skip = load_rows(D + h * D_h, D_p, pp, P).to(tl.float32)
    bias = None
    if dt_bias is not None:
        bias = tl.load(dt_bias + h * bias_h).to(tl.float32)
    z_next = None
    if z is not None:
        z += n * z_n + h * z_h
        z_next = load_rows(z, z_p, pp, P)

    columns, lines = beside_rows(rr), beside_columns(pp)
    inside = (columns < R) & (lines < P)
    slab = h * POOL_H + (columns * POOL_R + lines * POOL_P)
    entry = slab
    if entries is not None:
        entry = h * ENTRIES_H + (columns * ENTRIES_R + lines * ENTRIES_P)
    state = load_state(
        pool, entries, num_accepted, read, accepted, slab, entry, inside, pool_n, entries_n, ENTRIES_J
    )  # fmt: skip
    stored = inside & (write >= 0)

    if num_tokens is None and J == 1:
        # No loop: a padding row computes on zeros and on whatever its token holds, and stores nothing of it.
        state, out = run_token(
            state, x_next, dt_next, B_next, C_next, z_next, rate, skip, bias, least, largest, SOFTPLUS
        )  # fmt: skip
        tl.store(y + pp, rn(tl.where(count > 0, out, 0.0), y.dtype.element_ty), mask=pp < P)
        if entries is not None:
            tl.store(entries + write * entries_n + entry, rn(state, entries.dtype.element_ty), mask=stored)
    else:
        for j in range(count):
            x_now, dt_now, B_now, C_now = x_next, dt_next, B_next, C_next
            z_now = z_next  # apart from the others: it may be None, which the compiler takes in no tuple
            # The next token is on its way while this one is computed; after the last one, the first once more: its
            # memory is there.
            ahead = (j + 1) % J
            x_next = load_rows(x + ahead * x_j, x_p, pp, P)
            dt_next = tl.load(dt + ahead * dt_j)
            B_next = load_columns(B + ahead * B_j, B_r, rr, R, WHOLE)
            C_next = load_columns(C + ahead * C_j, C_r, rr, R, WHOLE)
            if z is not None:
                z_next = load_rows(z + ahead * z_j, z_p, pp, P)
            state, out = run_token(
                state, x_now, dt_now, B_now, C_now, z_now, rate, skip, bias, least, largest, SOFTPLUS
            )  # fmt: skip
            tl.store(y + j * (H * P) + pp, rn(out, y.dtype.element_ty), mask=pp < P)
            if entries is not None:
                into = entries + write * entries_n + j * ENTRIES_J + entry
                tl.store(into, rn(state, entries.dtype.element_ty), mask=stored)
        jj = tl.arange(0, JP)[:, None]
        rest = (jj >= count) & (jj < J) & (pp[None, :] < P)
        tl.store(y + jj * (H * P) + pp[None, :], tl.zeros([JP, BP], y.dtype.element_ty), mask=rest)
    tl.store(pool + write * pool_n + slab, rn(state, pool.dtype.element_ty), mask=stored)
