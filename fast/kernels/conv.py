"""The short causal convolution: a pack on a slot pool (or with entering windows), and J tokens a row on a slot pool.

A prefill launch holds three kinds of programs, so that nothing is read by one and written by another:

    row programs    one a row and block of channels: the first W - 1 outputs, which see the entering window, the window
                    that is stored, and snapshots that see the entering window. No other program touches a pool.
    snapshot ones   one a position: a window that lies in its row altogether comes from x alone.
    tile programs   BT tokens each, one after another, W - 1 of them kept in registers: every output that sees tokens
                    only, and zeros past the last offset and in padding rows. Neighbours enter no stored output.

The grid follows from shapes; which row a token belongs to is found on the device. Every output sums bias first, then
taps from the oldest to the newest with one fused multiply-add each, in all kernels, so that a token has the same bits
whichever program computes it.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from statescan.fast.kernels.common import (
    load_row,
    load_slots,
    load_update_rows,
    push,
    rn,
    sigmoid,
    silu,
    unpack,
    widen,
)

FAR = tl.constexpr(2**31 - 1)
"""No token lies there: the end of what comes after the last row."""


@triton.jit
def load_taps(w_ptr, swc, sww, b_ptr, sb, c, cm, W: tl.constexpr, WORD: tl.constexpr):
    """Bias and taps of channels c in float32; w1 is that of the token itself, w2 that of the one before.

    WORD is an integer type as long as a channel's taps where these lie together: one load instead of W strided ones.
    """
    kind = w_ptr.dtype.element_ty
    if WORD is not None:
        word = tl.load(w_ptr.to(tl.pointer_type(WORD), bitcast=True) + c, mask=cm, other=0)
        w1 = unpack(word, W - 1, kind)
        w2 = unpack(word, W - 2, kind)
        w3 = unpack(word, W - 3, kind) if W > 2 else w2
        w4 = unpack(word, W - 4, kind) if W > 3 else w2
    else:
        w1 = widen(tl.load(w_ptr + c * swc + (W - 1) * sww, mask=cm, other=0.0))
        w2 = widen(tl.load(w_ptr + c * swc + (W - 2) * sww, mask=cm, other=0.0))
        w3 = widen(tl.load(w_ptr + c * swc + (W - 3) * sww, mask=cm, other=0.0)) if W > 2 else w2
        w4 = widen(tl.load(w_ptr + c * swc, mask=cm, other=0.0)) if W > 3 else w2
    bias = widen(tl.load(b_ptr + c * sb, mask=cm, other=0.0)) if b_ptr is not None else w1 * 0.0
    return bias, w1, w2, w3, w4


@triton.jit
def tap_sum(bias, w1, w2, w3, w4, x, h1, h2, h3, W: tl.constexpr):
    """bias + taps times the last W inputs; h1 is the token before x, h3 the third before it."""
    total = bias
    if W > 3:
        total = tl.fma(w4, h3, total)
    if W > 2:
        total = tl.fma(w3, h2, total)
    total = tl.fma(w2, h1, total)
    return tl.fma(w1, x, total)


@triton.jit
def activate(total, SILU: tl.constexpr):
    if SILU:
        return silu(total)
    return total


@triton.jit
def find_row(cu_ptr, N, t):
    """The last row that starts at or before token t: -1 before the first offset, N from the last one on."""
    low = 0
    high = N + 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_ptr + middle).to(tl.int64) <= t:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def row_facts(row, cu_ptr, read_ptr, write_ptr, N, T, slots):
    """Start of row `row`, where the next one starts, and whether it is computed: not if it is padding, or none."""
    inside = (row >= 0) & (row < N)
    start = tl.load(cu_ptr + row, mask=inside, other=0).to(tl.int64)
    after = tl.load(cu_ptr + row + 1, mask=row < N, other=FAR).to(tl.int64)
    live = inside & (start >= 0) & (start <= after) & (after <= T)
    if read_ptr is not None:
        read, write = load_slots(read_ptr, write_ptr, row, inside, slots)
        live = live & ((read >= 0) | (write >= 0))
    return start, after, live


@triton.jit
def column(ptr, j, sw):
    """Column j of a window, or of several: its stride may be as long as a pool."""
    return ptr + tl.cast(j, tl.int64) * sw


@triton.jit
def load_window(pool_ptr, sw, mask, oldest, W: tl.constexpr):
    """Columns of the windows at `pool_ptr` in float32, from the newest; 0 where `mask` is false (SLOT-7).

    The oldest column enters no output and is read only where `oldest` says that it is stored again.
    """
    e1 = widen(tl.load(column(pool_ptr, W - 1, sw), mask=mask, other=0.0))
    e2 = e1
    e3 = e1
    if W > 2:
        e2 = widen(tl.load(column(pool_ptr, W - 2, sw), mask=mask, other=0.0))
    if W > 3:
        e3 = widen(tl.load(column(pool_ptr, W - 3, sw), mask=mask, other=0.0))
    last = widen(tl.load(pool_ptr, mask=mask & oldest, other=0.0))
    if W == 2:
        e2 = last
    if W == 3:
        e3 = last
    return e1, e2, e3, last


@triton.jit
def window_back(back, x_ptr, sxt, end, start, e1, e2, e3, e4, cm):
    """The input `back` tokens before `end` of a row that starts at `start`, from the entering window if before it."""
    token = end - back
    value = widen(tl.load(x_ptr + token * sxt, mask=cm & (token >= start), other=0.0))
    older = start - token  # 1: newest entering column
    entering = tl.where(older <= 1, e1, tl.where(older == 2, e2, tl.where(older == 3, e3, e4)))
    return tl.where(token >= start, value, entering)


@triton.jit
def store_window(out_ptr, sw, cm, x_ptr, sxt, end, start, e1, e2, e3, e4, W: tl.constexpr):
    """The window after the last token before `end`, each column rounded once to the pool's type (NUM-2)."""
    for j in tl.static_range(W):
        value = window_back(W - j, x_ptr, sxt, end, start, e1, e2, e3, e4, cm)
        tl.store(column(out_ptr, j, sw), rn(value, out_ptr.dtype.element_ty), mask=cm)


@triton.jit
def conv_row(
    n, c, cm, x_ptr, sxt, y_ptr, syt, w_ptr, swc, sww, b_ptr, sb, cu_ptr, from_ptr, fs, fc, fw, to_ptr, ts, tc, tw,
    read_ptr, write_ptr, slots, pos_ptr, snap_ptr, ns, nc, nw, X, T,
    W: tl.constexpr, SILU: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """A row program: x_ptr and y_ptr point at the first token of the batch row, channels added."""
    start = tl.cast(0, tl.int64)
    end = tl.cast(T, tl.int64)
    if cu_ptr is not None:
        start, end = load_row(cu_ptr, n, T)
    read = tl.cast(n, tl.int64)
    write = tl.cast(n, tl.int64)
    if read_ptr is not None:
        read, write = load_slots(read_ptr, write_ptr, n, True, slots)
    if (end >= start) & ((read >= 0) | (write >= 0)):
        bias, w1, w2, w3, w4 = load_taps(w_ptr, swc, sww, b_ptr, sb, c, cm, W, WORD)
        e1 = bias * 0.0
        e2 = e1
        e3 = e1
        e4 = e1
        if from_ptr is not None:
            e1, e2, e3, e4 = load_window(from_ptr + read * fs + c * fc, fw, cm & (read >= 0), start == end, W)
        tl.debug_barrier()  # all threads have read the slot before one of them writes it (CONV-7)
        h1 = e1
        h2 = e2
        h3 = e3
        for i in tl.static_range(W - 1):
            here = cm & (start + i < end)
            x = widen(tl.load(x_ptr + (start + i) * sxt, mask=here, other=0.0))
            y = activate(tap_sum(bias, w1, w2, w3, w4, x, h1, h2, h3, W), SILU)
            tl.store(y_ptr + (start + i) * syt, rn(y, y_ptr.dtype.element_ty), mask=here)
            h3 = h2
            h2 = h1
            h1 = x
        if write >= 0:
            store_window(to_ptr + write * ts + c * tc, tw, cm, x_ptr, sxt, end, start, e1, e2, e3, e4, W)
        if pos_ptr is not None:
            for first in range(0, X, 64):
                at = first + tl.arange(0, 64)
                p = tl.load(pos_ptr + at, mask=at < X, other=-1).to(tl.int64)
                if tl.max(((p > start) & (p < start + W) & (p <= end)).to(tl.int32), 0) > 0:
                    for mark in range(first, tl.minimum(first + 64, X)):
                        position = tl.load(pos_ptr + mark).to(tl.int64)
                        if (position > start) & (position < start + W) & (position <= end):
                            out_ptr = snap_ptr + tl.cast(mark, tl.int64) * ns + c * nc
                            store_window(out_ptr, nw, cm, x_ptr, sxt, position, start, e1, e2, e3, e4, W)


@triton.jit
def conv_snapshot(
    i, c, cm, x_ptr, sxt, cu_ptr, read_ptr, write_ptr, slots, pos_ptr, snap_ptr, ns, nc, nw, N, T, W: tl.constexpr
):
    """A snapshot program: position i, unless its window holds entering columns or it belongs to no row."""
    position = tl.load(pos_ptr + i).to(tl.int64)
    row = find_row(cu_ptr, N, position - 1)
    start, after, live = row_facts(row, cu_ptr, read_ptr, write_ptr, N, T, slots)
    if live & (position - W >= start) & (position <= after):
        none = tl.zeros(c.shape, tl.float32)
        out_ptr = snap_ptr + tl.cast(i, tl.int64) * ns + c * nc
        store_window(out_ptr, nw, cm, x_ptr, sxt, position, start, none, none, none, none, W)


@triton.jit
def conv_tile(
    first, c, cm, x_ptr, sxt, y_ptr, syt, w_ptr, swc, sww, b_ptr, sb, cu_ptr, read_ptr, write_ptr, slots, N, T,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """A tile program: tokens `first` to `first + BT`, four loads ahead of the sums that need them.

    Loads past the pack are masked and their content is left open: it enters outputs that are not stored.
    """
    t = tl.cast(first, tl.int64)
    h1 = widen(tl.load(x_ptr + (t - 1) * sxt, mask=cm & (t >= 1)))
    h2 = widen(tl.load(x_ptr + (t - 2) * sxt, mask=cm & (t >= 2))) if W > 2 else h1
    h3 = widen(tl.load(x_ptr + (t - 3) * sxt, mask=cm & (t >= 3))) if W > 3 else h1
    bias, w1, w2, w3, w4 = load_taps(w_ptr, swc, sww, b_ptr, sb, c, cm, W, WORD)
    row = tl.cast(0, tl.int32)
    start = tl.cast(0, tl.int64)
    after = tl.cast(FAR, tl.int64)
    live = t >= 0
    if cu_ptr is not None:
        row = tl.cast(find_row(cu_ptr, N, t), tl.int32)
        start, after, live = row_facts(row, cu_ptr, read_ptr, write_ptr, N, T, slots)
    for _ in range(0, tl.minimum(BT, T - first), 4):
        x0 = tl.load(x_ptr + t * sxt, mask=cm & (t < T))
        x1 = tl.load(x_ptr + (t + 1) * sxt, mask=cm & (t + 1 < T))
        x2 = tl.load(x_ptr + (t + 2) * sxt, mask=cm & (t + 2 < T))
        x3 = tl.load(x_ptr + (t + 3) * sxt, mask=cm & (t + 3 < T))
        inside = live & (t - start >= W - 1) & (t + 4 <= after) & (t + 4 <= T)
        for i in tl.static_range(4):
            x = widen(x0 if i == 0 else (x1 if i == 1 else (x2 if i == 2 else x3)))
            y = activate(tap_sum(bias, w1, w2, w3, w4, x, h1, h2, h3, W), SILU)
            if inside:
                tl.store(y_ptr + (t + i) * syt, rn(y, y_ptr.dtype.element_ty), mask=cm)
            else:
                row, start, after, live = store_token(
                    y, t + i, y_ptr, syt, cm, row, start, after, live, cu_ptr, read_ptr, write_ptr, slots, N, T, W
                )
            h3 = h2
            h2 = h1
            h1 = x
        t += 4


@triton.jit
def store_token(
    y, t, y_ptr, syt, cm, row, start, after, live, cu_ptr, read_ptr, write_ptr, slots, N, T, W: tl.constexpr
):
    """Store the output of token t, found by walking on from `row`: its value, 0 outside rows, nothing near a start."""
    if cu_ptr is not None:
        if t >= after:
            while t >= after:
                row += 1
                after = tl.load(cu_ptr + row + 1, mask=row < N, other=FAR).to(tl.int64)
            start, after, live = row_facts(row, cu_ptr, read_ptr, write_ptr, N, T, slots)
    far = t - start >= W - 1
    y = rn(tl.where(live, y, 0.0), y_ptr.dtype.element_ty)
    tl.store(y_ptr + t * syt, y, mask=cm & (t < T) & (far | (live == 0)))
    return row, start, after, live


@triton.jit(do_not_specialize=["N", "X", "T", "tiles", "slots"])
def conv_prefill_kernel(
    x_ptr, sxb, sxt, sxc, y_ptr, w_ptr, swc, sww, b_ptr, sb, cu_ptr, from_ptr, fs, fc, fw, to_ptr, ts, tc, tw,
    read_ptr, write_ptr, slots, pos_ptr, snap_ptr, ns, nc, nw, N, X, T, C, tiles, blocks,
    W: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """y `[batch, T, C]` contiguous from x; windows from `from_ptr` to `to_ptr`, both at the rows' slots.

    cu_ptr None: each batch row is one row. read_ptr None: row n's slot is n. from_ptr None: all rows are fresh.
    """
    program = tl.program_id(0)
    block = program % blocks
    job = program // blocks
    c32 = block * BC + tl.arange(0, BC)
    cm = c32 < C
    c = c32.to(tl.int64)
    if job < N:
        batch = tl.cast(0, tl.int64)
        if cu_ptr is None:
            batch = job.to(tl.int64)
        conv_row(
            job, c, cm, x_ptr + batch * sxb + c * sxc, sxt, y_ptr + batch * T * C + c, C, w_ptr, swc, sww, b_ptr, sb,
            cu_ptr, from_ptr, fs, fc, fw, to_ptr, ts, tc, tw, read_ptr, write_ptr, slots, pos_ptr, snap_ptr, ns, nc,
            nw, X, T, W, SILU, WORD,
        )  # fmt: skip
    elif job < N + X:
        if pos_ptr is not None:
            conv_snapshot(job - N, c, cm, x_ptr + c * sxc, sxt, cu_ptr, read_ptr, write_ptr, slots, pos_ptr, snap_ptr,
                          ns, nc, nw, N, T, W)  # fmt: skip
    else:
        tile = job - N - X
        batch = (tile // tiles).to(tl.int64)
        conv_tile(
            (tile % tiles) * BT, c, cm, x_ptr + batch * sxb + c * sxc, sxt, y_ptr + batch * T * C + c, C, w_ptr, swc,
            sww, b_ptr, sb, cu_ptr, read_ptr, write_ptr, slots, N, T, W, SILU, BT, WORD,
        )  # fmt: skip


@triton.jit
def store_columns(out_ptr, sw, mask, h1, h2, h3, h4, W: tl.constexpr):
    """The window whose inputs are h1, h2, ... from the newest."""
    kind = out_ptr.dtype.element_ty
    tl.store(column(out_ptr, W - 1, sw), rn(h1, kind), mask=mask)
    tl.store(column(out_ptr, W - 2, sw), rn(h2, kind), mask=mask)
    if W > 2:
        tl.store(column(out_ptr, W - 3, sw), rn(h3, kind), mask=mask)
    if W > 3:
        tl.store(out_ptr, rn(h4, kind), mask=mask)


@triton.jit
def slope(total, SILU: tl.constexpr):
    """Derivative of the activation at its argument."""
    if SILU:
        s = sigmoid(total)
        d = s + total * s * (1.0 - s)
    else:
        d = total * 0.0 + 1.0
    return d


@triton.jit
def last_columns(final_ptr, sw, older, mask):
    """Cotangent of the final window in the column of the input `older` places before the newest; 0 if there is none."""
    return widen(tl.load(column(final_ptr, older, sw), mask=mask, other=0.0))


@triton.jit
def backward_row(
    n, c, cm, x_ptr, sxt, dy_ptr, sdt, w_ptr, swc, sww, b_ptr, sb, cu_ptr, from_ptr, fs, fc, fw, final_ptr, gs, gc, gw,
    enter_ptr, C, T, W: tl.constexpr, SILU: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Cotangent of row n's entering window, from its first W - 1 tokens and from what of it is left at the end."""
    start = tl.cast(0, tl.int64)
    end = tl.cast(T, tl.int64)
    if cu_ptr is not None:
        start, end = load_row(cu_ptr, n, T)
    bias, w1, w2, w3, w4 = load_taps(w_ptr, swc, sww, b_ptr, sb, c, cm, W, WORD)
    row = tl.cast(n, tl.int64)
    h1, h2, h3, _oldest = load_window(from_ptr + row * fs + c * fc, fw, cm, False, W)
    d1 = bias * 0.0
    d2 = d1
    d3 = d1
    d4 = d1
    for i in tl.static_range(W - 1):
        here = cm & (start + i < end)
        x = widen(tl.load(x_ptr + (start + i) * sxt, mask=here, other=0.0))
        g = widen(tl.load(dy_ptr + (start + i) * sdt, mask=here, other=0.0))
        g = tl.where(here, g * slope(tap_sum(bias, w1, w2, w3, w4, x, h1, h2, h3, W), SILU), 0.0)
        if i == 0:
            d1 = tl.fma(g, w2, d1)
            d2 = tl.fma(g, w3, d2) if W > 2 else d2
            d3 = tl.fma(g, w4, d3) if W > 3 else d3
        if i == 1:
            d1 = tl.fma(g, w3, d1)
            d2 = tl.fma(g, w4, d2) if W > 3 else d2
        if i == 2:
            d1 = tl.fma(g, w4, d1)
        h3 = h2
        h2 = h1
        h1 = x
    if final_ptr is not None:
        # an entering column that is not pushed out stands `count` places further left at the end
        count = end - start
        last_ptr = final_ptr + row * gs + c * gc
        d1 += last_columns(last_ptr, gw, W - 1 - count, cm & (count >= 0) & (count <= W - 1))
        d2 += last_columns(last_ptr, gw, W - 2 - count, cm & (count >= 0) & (count <= W - 2))
        d3 += last_columns(last_ptr, gw, W - 3 - count, cm & (count >= 0) & (count <= W - 3)) if W > 2 else d3
        d4 += last_columns(last_ptr, gw, W - 4 - count, cm & (count >= 0) & (count <= W - 4)) if W > 3 else d4
    kind = enter_ptr.dtype.element_ty
    out_ptr = enter_ptr + (row * C + c) * W
    tl.store(out_ptr + (W - 1), rn(d1, kind), mask=cm)
    tl.store(out_ptr + (W - 2), rn(d2, kind), mask=cm)
    if W > 2:
        tl.store(out_ptr + (W - 3), rn(d3, kind), mask=cm)
    if W > 3:
        tl.store(out_ptr, rn(d4, kind), mask=cm)


@triton.jit
def backward_tile(
    first, c, cm, x_ptr, sxt, dy_ptr, sdt, dx_ptr, w_ptr, swc, sww, b_ptr, sb, cu_ptr, from_ptr, fs, fc, fw,
    final_ptr, gs, gc, gw, part_ptr, row, N, C, T,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Cotangents of the inputs of tokens `first` to `first + BT`, and this tile's part of those of taps and bias.

    Goes over the tokens once, and W - 1 further for those whose inputs lie in the tile; pk is the part of the cotangent
    of the input k tokens back that is known so far. Nothing of a token outside every row is used.
    """
    t = tl.cast(first, tl.int64)
    end = t + BT
    bias, w1, w2, w3, w4 = load_taps(w_ptr, swc, sww, b_ptr, sb, c, cm, W, WORD)
    start = tl.cast(0, tl.int64)
    after = tl.cast(T, tl.int64)
    live = t >= 0
    if cu_ptr is not None:
        row = tl.cast(find_row(cu_ptr, N, t), tl.int32)
        start, after, live = row_facts(row, cu_ptr, None, None, N, T, 0)
    e1 = bias * 0.0
    e2 = e1
    e3 = e1
    e4 = e1
    if from_ptr is not None:
        near = cm & live & (t - start < W)
        e1, e2, e3, e4 = load_window(from_ptr + tl.cast(row, tl.int64) * fs + c * fc, fw, near, False, W)
    h1 = tl.where(live, window_back(1, x_ptr, sxt, t, start, e1, e2, e3, e4, cm & live), 0.0)
    h2 = tl.where(live, window_back(2, x_ptr, sxt, t, start, e1, e2, e3, e4, cm & live), 0.0)
    h3 = tl.where(live, window_back(3, x_ptr, sxt, t, start, e1, e2, e3, e4, cm & live), 0.0)
    p1 = bias * 0.0
    p2 = p1
    p3 = p1
    db = p1
    d1 = p1
    d2 = p1
    d3 = p1
    d4 = p1
    x_next = tl.load(x_ptr + t * sxt, mask=cm & (t < T), other=0.0)
    g_next = tl.load(dy_ptr + t * sdt, mask=cm & (t < T), other=0.0)
    for _ in range(0, tl.minimum(BT + W - 1, T - first)):
        x = widen(x_next)
        g = widen(g_next)
        x_next = tl.load(x_ptr + (t + 1) * sxt, mask=cm & (t + 1 < T), other=0.0)
        g_next = tl.load(dy_ptr + (t + 1) * sdt, mask=cm & (t + 1 < T), other=0.0)
        if cu_ptr is not None:
            if t >= after:
                while t >= after:
                    row += 1
                    after = tl.load(cu_ptr + row + 1, mask=row < N, other=FAR).to(tl.int64)
                start, after, live = row_facts(row, cu_ptr, None, None, N, T, 0)
                h1 = bias * 0.0
                h2 = h1
                h3 = h1
                if from_ptr is not None:
                    entering_ptr = from_ptr + tl.cast(row, tl.int64) * fs + c * fc
                    h1, h2, h3, _oldest = load_window(entering_ptr, fw, cm & live, False, W)
                p1 = bias * 0.0
                p2 = p1
                p3 = p1
        if live:
            g = g * slope(tap_sum(bias, w1, w2, w3, w4, x, h1, h2, h3, W), SILU)
            own = tl.where(t < end, g, 0.0)
            db += own
            d1 = tl.fma(own, x, d1)
            d2 = tl.fma(own, h1, d2)
            p1 = tl.fma(w2, g, p1)
            if W > 2:
                d3 = tl.fma(own, h2, d3)
                p2 = tl.fma(w3, g, p2)
            if W > 3:
                d4 = tl.fma(own, h3, d4)
                p3 = tl.fma(w4, g, p3)
            p0 = w1 * g
            left = after - t  # tokens of the row from this one on
            if final_ptr is not None:
                if left <= W:
                    last_ptr = final_ptr + tl.cast(row, tl.int64) * gs + c * gc
                    p0 += last_columns(last_ptr, gw, W - left, cm)
            low = tl.maximum(start, first)
            whole = p1 if W == 2 else (p2 if W == 3 else p3)
            store_cotangent(dx_ptr, t - (W - 1), whole, C, cm, low, end)
            if left == 1:  # the row ends here: nothing more is added to these
                store_cotangent(dx_ptr, t, p0, C, cm, low, end)
                if W > 2:
                    store_cotangent(dx_ptr, t - 1, p1, C, cm, low, end)
                if W > 3:
                    store_cotangent(dx_ptr, t - 2, p2, C, cm, low, end)
            p3 = p2
            p2 = p1
            p1 = p0
            h3 = h2
            h2 = h1
            h1 = x
        else:
            store_cotangent(dx_ptr, t, bias * 0.0, C, cm, first, end)
        t += 1
    tl.store(part_ptr, db, mask=cm)
    tl.store(part_ptr + C, d1, mask=cm)
    tl.store(part_ptr + 2 * C, d2, mask=cm)
    if W > 2:
        tl.store(part_ptr + 3 * C, d3, mask=cm)
    if W > 3:
        tl.store(part_ptr + 4 * C, d4, mask=cm)


@triton.jit
def store_cotangent(dx_ptr, token, value, C, mask, low, end):
    """Store the cotangent of one token's input if the token is this tile's."""
    inside = (token >= low) & (token < end)
    tl.store(dx_ptr + token * C, rn(value, dx_ptr.dtype.element_ty), mask=mask & inside)


@triton.jit(do_not_specialize=["N", "T", "tiles"])
def conv_backward_kernel(
    x_ptr, sxb, sxt, sxc, dy_ptr, sdb, sdt, sdc, w_ptr, swc, sww, b_ptr, sb, cu_ptr, from_ptr, fs, fc, fw,
    final_ptr, gs, gc, gw, dx_ptr, part_ptr, enter_ptr, N, T, C, tiles, blocks,
    W: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """dx `[batch, T, C]`, parts `[batch * tiles, W + 1, C]` of bias (0) and taps (newest 1), enter `[N, C, W]`.

    cu_ptr None: each batch row is one row. from_ptr None: rows are fresh, and enter_ptr is None. final_ptr: cotangents
    of the final windows, or None.
    """
    program = tl.program_id(0)
    block = program % blocks
    job = program // blocks
    c32 = block * BC + tl.arange(0, BC)
    cm = c32 < C
    c = c32.to(tl.int64)
    rows = N
    if enter_ptr is None:
        rows = N * 0
    if job < rows:
        if enter_ptr is not None:
            batch = tl.cast(0, tl.int64)
            if cu_ptr is None:
                batch = job.to(tl.int64)
            backward_row(
                job, c, cm, x_ptr + batch * sxb + c * sxc, sxt, dy_ptr + batch * sdb + c * sdc, sdt, w_ptr, swc, sww,
                b_ptr, sb, cu_ptr, from_ptr, fs, fc, fw, final_ptr, gs, gc, gw, enter_ptr, C, T, W, SILU, WORD,
            )  # fmt: skip
    else:
        tile = job - rows
        batch = (tile // tiles).to(tl.int64)
        backward_tile(
            (tile % tiles) * BT, c, cm, x_ptr + batch * sxb + c * sxc, sxt, dy_ptr + batch * sdb + c * sdc, sdt,
            dx_ptr + batch * T * C + c, w_ptr, swc, sww, b_ptr, sb, cu_ptr, from_ptr, fs, fc, fw, final_ptr, gs, gc,
            gw, part_ptr + tile.to(tl.int64) * (W + 1) * C + c, tile // tiles, N, C, T, W, SILU, BT, WORD,
        )  # fmt: skip


@triton.jit
def load_rows(pool_ptr, ps, pc, pw, slot, c, mask, oldest, W: tl.constexpr, WORD: tl.constexpr):
    """Windows of a block of slots from the newest column, in float32; with WORD a window is one word, returned too."""
    kind = pool_ptr.dtype.element_ty
    place = pool_ptr + slot * ps + c * pc
    if WORD is not None:
        word = tl.load(place.to(tl.pointer_type(WORD), bitcast=True), mask=mask, other=0)
        h1 = unpack(word, W - 1, kind)
        h2 = unpack(word, W - 2, kind) if W > 2 else h1
        h3 = unpack(word, W - 3, kind) if W > 3 else h1
        h4 = h1
    else:
        h1, h2, h3, h4 = load_window(place, pw, mask, oldest, W)
        word = tl.zeros(h1.shape, tl.uint32)
    return h1, h2, h3, h4, word


@triton.jit
def store_rows(out_ptr, sw, mask, h1, h2, h3, h4, word, W: tl.constexpr, WORD: tl.constexpr):
    """The windows whose inputs are h1, h2, ... from the newest, each rounded once; with WORD they are made already."""
    kind = out_ptr.dtype.element_ty
    if WORD is not None:
        tl.store(out_ptr.to(tl.pointer_type(WORD), bitcast=True), word, mask=mask)
    else:
        tl.store(column(out_ptr, W - 1, sw), rn(h1, kind), mask=mask)
        tl.store(column(out_ptr, W - 2, sw), rn(h2, kind), mask=mask)
        if W > 2:
            tl.store(column(out_ptr, W - 3, sw), rn(h3, kind), mask=mask)
        if W > 3:
            tl.store(out_ptr, rn(h4, kind), mask=mask)


@triton.jit(do_not_specialize=["N", "slots", "entries"])
def conv_update_kernel(
    x_ptr, sxn, sxj, sxc, y_ptr, w_ptr, swc, sww, b_ptr, sb, pool_ptr, ps, pc, pw, read_ptr, write_ptr,
    inter_ptr, vs, vj, vc, vw, accepted_ptr, tokens_ptr, N, J, C, slots, entries, blocks,
    W: tl.constexpr, SILU: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, WORD: tl.constexpr,
    POOL_WORD: tl.constexpr,
):  # fmt: skip
    """y `[N, J, C]` contiguous from x; BN rows by BC channels a program, U tokens loaded at a time.

    A program holds its rows' windows from the first token to the last, so the pool is read once and written once.
    POOL_WORD is an integer type as long as a window where all windows lie together, channel by channel.
    """
    program = tl.program_id(0)
    n = (program // blocks) * BN + tl.arange(0, BN)
    c32 = (program % blocks) * BC + tl.arange(0, BC)
    real = (n < N)[:, None] & (c32 < C)[None, :]
    c = c32.to(tl.int64)[None, :]
    read, write, accepted, tokens = load_update_rows(
        read_ptr, write_ptr, accepted_ptr, tokens_ptr, n, n < N, slots, entries, J
    )
    count = tokens[:, None]
    from_pool = ((read >= 0) & (accepted < 0))[:, None] & real
    h1, h2, h3, h4, word = load_rows(pool_ptr, ps, pc, pw, read[:, None], c, from_pool, count == 0, W, POOL_WORD)
    if accepted_ptr is not None:
        resumed = (accepted >= 0)[:, None] & real
        entry_ptr = inter_ptr + accepted[:, None] * vj
        a1, a2, a3, a4, other = load_rows(entry_ptr, vs, vc, vw, read[:, None], c, resumed, count == 0, W, POOL_WORD)
        h1 = tl.where(resumed, a1, h1)
        h2 = tl.where(resumed, a2, h2)
        h3 = tl.where(resumed, a3, h3)
        h4 = tl.where(resumed, a4, h4)
        word = tl.where(resumed, other, word)
    # the same shape as x, so that a thread loads the taps of its own channels and none is moved between threads
    wide = c + n[:, None] * 0
    bias, w1, w2, w3, w4 = load_taps(w_ptr, swc, sww, b_ptr, sb, wide, real, W, WORD)
    tl.debug_barrier()  # all threads have read the slots before one of them writes (CONV-7)
    row = n.to(tl.int64)[:, None]
    x_ptr += row * sxn + c * sxc
    y_ptr += row * J * C + c
    stored = (write >= 0)[:, None] & real
    for j in range(0, J, U):
        x0 = tl.load(column(x_ptr, j, sxj), mask=real & (j < count), other=0.0)
        x1 = tl.load(column(x_ptr, j + 1, sxj), mask=real & (j + 1 < count), other=0.0) if U > 1 else x0
        x2 = tl.load(column(x_ptr, j + 2, sxj), mask=real & (j + 2 < count), other=0.0) if U > 2 else x0
        x3 = tl.load(column(x_ptr, j + 3, sxj), mask=real & (j + 3 < count), other=0.0) if U > 2 else x0
        for i in tl.static_range(U):
            x = widen(x0 if i == 0 else (x1 if i == 1 else (x2 if i == 2 else x3)))
            here = j + i < count
            y = activate(tap_sum(bias, w1, w2, w3, w4, x, h1, h2, h3, W), SILU)
            tl.store(y_ptr + (j + i) * C, rn(tl.where(here, y, 0.0), y_ptr.dtype.element_ty), mask=real & (j + i < J))
            h4 = tl.where(here, h3, h4)
            h3 = tl.where(here, h2, h3)
            h2 = tl.where(here, h1, h2)
            h1 = tl.where(here, x, h1)
            if POOL_WORD is not None:
                word = tl.where(here, push(word, x, pool_ptr.dtype.element_ty), word)
            if inter_ptr is not None:
                entry = column(inter_ptr, j + i, vj) + write[:, None] * vs + c * vc
                store_rows(entry, vw, stored & here, h1, h2, h3, h4, word, W, POOL_WORD)
    store_rows(pool_ptr + write[:, None] * ps + c * pc, pw, stored, h1, h2, h3, h4, word, W, POOL_WORD)
