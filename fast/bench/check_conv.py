"""What check_gpu asks of convolution, gates and norms beyond the suite: large sizes, graphs, repeatability, safety.

Expectations are computed here in float64 by PyTorch, all tokens at once: the inputs of every token are gathered, from
its row or from the window that its row entered with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from statescan.fast.conv import causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
from statescan.fast.gates import beta_gate, kda_gate, softplus_gate
from statescan.fast.norms import l2norm, rmsnorm_gated
from statescan.spec.contract import ContractError, PackingError, SlotError, UnsupportedError

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROUNDOFF = {F32: 2.0**-20, BF16: 2.0**-7, F16: 2.0**-10}
"""Generous: sums of a handful of products, rounded once."""
DEVICE = "cuda"
Check = tuple[str, Callable[[], None]]


@dataclass(frozen=True)
class Pack:
    """A packed call on a pool."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cu_seqlens: Tensor
    pool: Tensor
    read: Tensor
    write: Tensor
    activation: str | None = "silu"

    def run(self, **more: Any) -> Tensor:
        return causal_conv1d_prefill(
            self.x, self.weight, self.bias, self.cu_seqlens, self.pool, self.read, self.write,
            activation=self.activation, **more,
        )  # fmt: skip


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype)


def pool_of(slots: int, channels: int, width: int, dtype: torch.dtype, layout: str = "WC") -> Tensor:
    """A random pool `[slots, C, W]`, channel by channel in memory (WC) or column by column of a channel (CW)."""
    if layout == "WC":
        return normal(slots, width, channels, dtype=dtype).mT
    return normal(slots, channels, width, dtype=dtype)


def packed(
    lengths: list[int], channels: int, *, dtype: torch.dtype = BF16, pool: torch.dtype | None = None, width: int = 4,
    layout: str = "WC", tail: int = 0, index: torch.dtype = torch.int32,
) -> Pack:  # fmt: skip
    """Rows of every kind: resumed in place, fresh, score only, padding, split; NaN behind the last offset."""
    rows = len(lengths)
    slots = 2 * rows + 3
    x = normal(1, sum(lengths) + tail, channels, dtype=dtype)
    x[:, sum(lengths) :] = torch.nan
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(rows))
    read, write = order[:rows].clone(), order[:rows].clone()
    kinds = torch.arange(rows) % 5
    read[kinds == 1] = -1
    write[kinds == 2] = -2
    read[kinds == 3] = write[kinds == 3] = -3
    split = kinds == 4
    write[split] = order[rows : 2 * rows][split]
    offsets = torch.tensor([0, *accumulate(lengths)], device=DEVICE, dtype=index)
    for n in (kinds == 3).nonzero().ravel().tolist():
        x[:, sum(lengths[:n]) : sum(lengths[: n + 1])] = torch.nan
    return Pack(x, normal(channels, width, dtype=dtype), normal(channels, dtype=dtype), offsets,
                pool_of(slots, channels, width, pool or dtype, layout), read.to(DEVICE, index),
                write.to(DEVICE, index))  # fmt: skip


def expected(call: Pack) -> tuple[Tensor, Tensor]:
    """y `[1, T, C]` and the pool after the call, in float64."""
    x, tokens, width = call.x[0].double(), call.x.shape[1], call.weight.shape[1]
    at = torch.arange(tokens, device=DEVICE)
    offsets = call.cu_seqlens.long()
    rows = len(offsets) - 1
    windows = torch.where((call.read >= 0)[:, None, None], call.pool[call.read.clamp(min=0).long()].double(), 0.0)
    live = (call.read >= 0) | (call.write >= 0)
    row = torch.searchsorted(offsets, at, right=True) - 1
    known = (row < rows) & torch.cat([live, live.new_zeros(1)])[row.clamp(max=rows)]
    row = row.clamp(max=max(rows - 1, 0))
    total = torch.zeros_like(x) if call.bias is None else call.bias.double().expand_as(x).clone()
    for back in range(width):
        older = offsets[row] - (at - back)  # 1: newest entering column
        own = x[(at - back).clamp(min=0)]
        entering = windows[row, :, (width - older).clamp(0, width - 1)]
        total += call.weight[:, width - 1 - back].double() * torch.where((older <= 0)[:, None], own, entering)
    y = torch.nn.functional.silu(total) if call.activation else total
    pool = call.pool.double()
    for n in range(rows):
        if int(call.write[n]) >= 0:
            start, end = int(offsets[n]), int(offsets[n + 1])
            pool[call.write[n]] = torch.cat([windows[n], x[max(start, end - width) : end].mT], 1)[:, -width:]
    return torch.where(known[:, None], y, 0.0)[None], pool


def close(got: Tensor, want: Tensor, what: str, unit: float | None = None) -> None:
    """Within a few roundings of the result's type, element by element; NaN never is."""
    allowed = (ROUNDOFF[got.dtype] if unit is None else unit) * (1.0 + want.abs().double())
    bad = ~((got.double() - want).abs() <= allowed)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise AssertionError(f"{what}{place}: {got[tuple(place)].item()} for {want[tuple(place)].item()}; "
                             f"{int(bad.sum())} of {bad.numel()} elements")  # fmt: skip


def same(got: Tensor, want: Tensor, what: str) -> None:
    """The same bits, NaN payloads included."""
    kind = {4: torch.int32, 2: torch.int16, 8: torch.int64}[got.element_size()]
    a, b = got.contiguous().view(kind), want.contiguous().view(kind)
    if not torch.equal(a, b):
        raise AssertionError(f"{what}: other bits at {(a != b).nonzero()[0].tolist()}, {int((a != b).sum())} elements")


def count_compiled(*kernels: Any) -> int:
    """How many variants of these kernels are compiled."""
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def check_pack(call: Pack) -> None:
    y_wanted, pool_wanted = expected(call)
    touched = call.write[call.write >= 0].long()
    guards = torch.ones(len(call.pool), dtype=torch.bool, device=DEVICE)
    guards[touched] = False
    before = call.pool[guards].clone()
    y = call.run()
    close(y, y_wanted, "y")
    same(call.pool[touched], pool_wanted[touched].to(call.pool.dtype), "conv_pool")
    same(call.pool[guards], before, "untouched slots")


# ---------------------------------------------------------------------------------------------------------------------
# Prefill and update
# ---------------------------------------------------------------------------------------------------------------------


def prefill_small() -> None:
    for dtype, pool in ((F32, F32), (BF16, BF16), (F16, F32), (BF16, F32), (F32, BF16)):
        for width in (2, 3, 4):
            for layout in ("WC", "CW"):
                lengths = [5, 0, 1, 7, 3, 2, 40, 4]
                check_pack(packed(lengths, 24, dtype=dtype, pool=pool, width=width, layout=layout, tail=3))


def prefill_snapshots() -> None:
    call = packed([5, 0, 1, 7, 3, 40], 24, tail=2)
    call = replace(call, x=normal(*call.x.shape, dtype=BF16), read=torch.full_like(call.read, -1),
                   write=torch.arange(6, device=DEVICE, dtype=call.write.dtype))  # fmt: skip
    positions = torch.arange(1, 57, device=DEVICE).flip(0)
    positions[3] = -1
    windows = torch.full((56, 24, 4), torch.nan, device=DEVICE, dtype=BF16)
    call.run(snapshot_positions=positions, snapshot_windows=windows)
    starts = call.cu_seqlens.tolist()
    for i, p in enumerate(positions.tolist()):
        if p < 0:
            same(windows[i], torch.full_like(windows[i], torch.nan), "padding snapshot")
            continue
        start = max(s for s in starts if s < p)
        want = torch.cat([torch.zeros(24, 4, device=DEVICE, dtype=BF16), call.x[0, max(start, p - 4) : p].mT], 1)
        same(windows[i], want[:, -4:], f"snapshot at {p}")


def prefill_long() -> None:
    lengths = [(n * 7919) % 4096 for n in range(64)]
    check_pack(packed([*lengths, 100_003, 1], 200, tail=13))


def prefill_odd() -> None:
    for channels in (77, 1025, 8191):
        check_pack(packed([300, 0, 3, 129, 64], channels, tail=1))


def prefill_views() -> None:
    call = packed([300, 0, 3, 129, 64], 128, tail=5)
    wide = torch.full((1, call.x.shape[1], 333), torch.nan, device=DEVICE, dtype=BF16)
    for offset in (0, 7, 8, 205):
        view = wide[:, :, offset : offset + 128]
        view.copy_(call.x)
        check_pack(replace(call, x=view, pool=call.pool.clone()))
    turned = call.x.mT.contiguous().mT  # tokens together, channels apart
    gaps = torch.full((2 * len(call.pool), 2 * 128, 9), torch.nan, device=DEVICE, dtype=BF16)[::2, ::2, ::2][..., :4]
    gaps.copy_(call.pool)
    check_pack(replace(call, x=turned, pool=gaps))


def prefill_many_rows() -> None:
    check_pack(packed([(n * 31) % 9 for n in range(1500)], 40, index=torch.int64, tail=2))


def far_pool() -> None:
    """Slots on both sides of byte and element offsets 2^31 and 2^32, and a row of x behind element 2^31."""
    channels, width = 8192, 4
    pool = torch.empty(140_000, width, channels, device=DEVICE, dtype=BF16).mT
    slots = [0, 32767, 32768, 65535, 65536, 131071, 131072, 139_999]
    near = sorted({s + d for s in slots for d in (-1, 1)} & set(range(140_000)) - set(slots))
    for s in [*slots, *near]:
        pool[s] = normal(channels, width, dtype=BF16, seed=s)
    before, guards = pool[slots].clone(), pool[near].clone()
    index = torch.tensor(slots, device=DEVICE, dtype=torch.int32)
    x, w, b = normal(len(slots), 2, channels, dtype=BF16), normal(channels, width, dtype=BF16), normal(channels)
    small = before.clone()
    y = causal_conv1d_update(x, w, b, pool, index, activation="silu")
    want = causal_conv1d_update(x, w, b, small, torch.arange(len(slots), device=DEVICE), activation="silu")
    same(y, want, "y of an update")
    same(pool[slots], small, "slots of an update")
    offsets = torch.arange(len(slots) + 1, device=DEVICE) * 2
    y = causal_conv1d_prefill(x.view(1, -1, channels), w, b, offsets, pool, index, activation="silu")
    small_y = causal_conv1d_prefill(x.view(1, -1, channels), w, b, offsets, small,
                                    torch.arange(len(slots), device=DEVICE), activation="silu")  # fmt: skip
    same(y, small_y, "y of a prefill")
    same(pool[slots], small, "slots of a prefill")
    same(pool[near], guards, "neighbouring slots")


def far_tokens() -> None:
    channels, tokens = 8192, 300_000
    x = torch.zeros(1, tokens, channels, device=DEVICE, dtype=BF16)
    x[:, -600:] = normal(1, 600, channels, dtype=BF16)
    w, pool = normal(channels, 4, dtype=BF16), pool_of(2, channels, 4, BF16)
    offsets = torch.tensor([0, tokens - 500, tokens], device=DEVICE)
    slots = torch.tensor([-1, 1], device=DEVICE)
    short = causal_conv1d_prefill(x[:, -600:], w, None, torch.tensor([0, 100, 600], device=DEVICE), pool.clone(), slots)
    y = causal_conv1d_prefill(x, w, None, offsets, pool, slots)
    same(y[:, -600:], short, "last tokens")


def update_small() -> None:
    """Against prefill on the same windows; entries, split slots, num_accepted and num_tokens included."""
    for dtype, width, layout in ((F32, 4, "WC"), (BF16, 4, "CW"), (F16, 3, "WC"), (BF16, 2, "CW"), (F32, 2, "CW")):
        for rows, steps in ((1, 1), (7, 1), (40, 1), (5, 2), (33, 4), (9, 7)):
            one_update(rows, steps, dtype, width, layout)


def one_update(rows: int, steps: int, dtype: torch.dtype, width: int, layout: str, channels: int = 40) -> None:
    base = packed([steps] * rows, channels, dtype=dtype, width=width, layout=layout)
    entries = torch.zeros(len(base.pool), steps, channels, width, dtype=dtype, device=DEVICE)
    x = base.x.view(rows, steps, channels)
    pool = base.pool.clone()
    y = causal_conv1d_update(x, base.weight, base.bias, pool, base.read, base.write, entries, activation="silu")
    offsets = base.cu_seqlens
    same(y.view(1, -1, channels), replace(base, pool=(scratch := base.pool.clone())).run(), "y")
    same(pool, scratch, "pool")
    writes = base.write[base.write >= 0].long()
    same(entries[writes, steps - 1], pool[writes], "last entries")
    if steps == 1:
        return
    accepted = torch.arange(rows, device=DEVICE) % (steps + 1) - 1
    counts = torch.arange(rows, device=DEVICE) % (steps + 1)
    again = causal_conv1d_update(
        x, base.weight, base.bias, pool.clone(), base.write, base.write, entries.clone(), accepted, counts,
        activation="silu",
    )  # fmt: skip
    resumed = pool.clone()
    for n, (slot, a) in enumerate(zip(base.write.tolist(), accepted.tolist(), strict=True)):
        if slot >= 0 and a >= 0:
            resumed[slot] = entries[slot, a]
        again[n, int(counts[n]) :] = 0
    want = replace(base, pool=resumed, read=base.write, cu_seqlens=offsets).run().view(rows, steps, channels)
    for n in range(rows):
        want[n, int(counts[n]) :] = 0
    same(again, want, "y after num_accepted")


def update_odd() -> None:
    for channels in (77, 1025, 8191):
        one_update(34, 3, BF16, 4, "WC", channels)


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def leaves_of(call: Pack, windows: Tensor | None) -> list[Tensor]:
    given = [t for t in (call.x, call.weight, call.bias, windows) if t is not None]
    return [t.detach().clone().requires_grad_() for t in given]


def gradients(call: Pack, leaves: list[Tensor], cotangents: tuple[Tensor, Tensor], entered: bool) -> tuple[Tensor, ...]:
    x, weight, bias, *windows = leaves
    results = causal_conv1d(x, weight, bias, None, call.cu_seqlens, windows[0] if entered else None, activation="silu")
    return torch.autograd.grad(results, leaves, cotangents)


def expected_gradients(call: Pack, windows: Tensor, cotangents: tuple[Tensor, Tensor]) -> list[Tensor]:
    """By PyTorch's own convolution in float64, row by row."""
    width, live = call.weight.shape[1], int(call.cu_seqlens[-1])
    leaves = [t.detach().double().requires_grad_() for t in (call.x[:, :live], call.weight, call.bias, windows)
              if t is not None]  # fmt: skip
    x, weight, bias, entering = leaves
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    offsets = call.cu_seqlens.tolist()
    for n, (start, end) in enumerate(pairwise(offsets)):
        inputs = torch.cat([entering[n], x[0, start:end].mT], 1)
        loss = loss + (inputs[:, -width:] * cotangents[1][n].double()).sum()
        if end > start:
            total = torch.nn.functional.conv1d(inputs[None, :, 1:], weight[:, None], bias, groups=len(weight))[0]
            loss = loss + (torch.nn.functional.silu(total).mT * cotangents[0][0, start:end].double()).sum()
    found = list(torch.autograd.grad(loss, leaves))
    found[0] = torch.nn.functional.pad(found[0], (0, 0, 0, call.x.shape[1] - live))
    return found


def training() -> None:
    lengths = [300, 0, 3, 129, 1, 2, 700]
    for dtype, width, channels in ((F32, 4, 96), (F32, 3, 77), (F32, 2, 8), (BF16, 4, 1024), (F16, 4, 96)):
        call = packed(lengths, channels, dtype=dtype, width=width, tail=9)
        call.x[:, : sum(lengths)] = normal(1, sum(lengths), channels, dtype=dtype)
        windows = normal(len(lengths), channels, width, dtype=dtype)
        cotangents = (normal(*call.x.shape, dtype=dtype, seed=1), normal(*windows.shape, dtype=dtype, seed=2))
        cotangents[0][:, sum(lengths) :] = torch.nan
        found = gradients(call, leaves_of(call, windows), cotangents, True)
        wanted = expected_gradients(call, windows, cotangents)
        for name, got, want in zip(("x", "weight", "bias", "initial_windows"), found, wanted, strict=True):
            scale = max(1.0, float(want.abs().max()))
            close(got / scale, want / scale, f"gradient of {name}", 4 * ROUNDOFF[dtype])


# ---------------------------------------------------------------------------------------------------------------------
# Gates and norms
# ---------------------------------------------------------------------------------------------------------------------


def gates_and_norms() -> None:
    functional: Any = torch.nn.functional
    for dtype in (F32, BF16, F16):
        a = 10 * normal(3, 50, 66, dtype=dtype)[:, 3:, 1::2]
        log, bias = normal(33), normal(33, dtype=dtype)
        want = -log.double().exp() * functional.softplus(a.double() + bias.double())
        close(softplus_gate(a, log, bias), want, "softplus gate")
        f, wide = normal(2, 70, 33, 100, dtype=dtype), normal(33, 100)
        inner = f.double() + wide.double()
        rate = log.double().exp()[:, None]
        close(kda_gate(f, log, wide), -rate * functional.softplus(inner), "kda gate")
        close(kda_gate(f, log, wide, lower_bound=-5.0), -5 * (rate * inner).sigmoid(), "bounded kda gate")
        close(beta_gate(a, allow_neg_eigval=True), 2 * a.double().sigmoid(), "beta")
        for size in (16, 100, 4096, 10_000):
            x, z = normal(37, size, dtype=dtype), normal(37, size, dtype=dtype)
            root = (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
            close(l2norm(x), x.double() / root, "l2norm")
            gated = x.double() * functional.silu(z.double())
            w = normal(size)
            root = (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            close(rmsnorm_gated(x, z, w), gated / root * w.double(), "gated norm")


# ---------------------------------------------------------------------------------------------------------------------
# Graphs, repetition, safety
# ---------------------------------------------------------------------------------------------------------------------


def graph_replay() -> None:
    """One graph of a prefill and an update, replayed with other lengths, slots, rows and padding: eager's bits."""
    rows, tokens, channels, slots = 6, 96, 264, 20
    w, b = normal(channels, 4, dtype=BF16), normal(channels, dtype=BF16)
    x, drafts = torch.zeros(1, tokens, channels, device=DEVICE, dtype=BF16), normal(rows, 3, channels, dtype=BF16)
    offsets = torch.zeros(rows + 1, device=DEVICE, dtype=torch.int32)
    prefill_slots, decode_slots = (torch.full((rows,), -1, device=DEVICE, dtype=torch.int32) for _ in range(2))
    pool = pool_of(slots, channels, 4, BF16)

    def step(pool: Tensor) -> tuple[Tensor, Tensor]:
        decoded = causal_conv1d_update(drafts, w, b, pool, decode_slots, activation="silu")
        return causal_conv1d_prefill(x, w, b, offsets, pool, prefill_slots, activation="silu"), decoded

    step(pool)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(pool)
    cases = [([10, 20, 0, 30], [3, -1, 5, 7], [1, 0]), ([96], [19], [2, 4, 6, 8, 10, 12]), ([], [], []),
             ([1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5], [6, -1, 8]), ([50, 46], [0, 9], [-1])]  # fmt: skip
    for case, (lengths, own, decoding) in enumerate(cases):
        x.copy_(normal(1, tokens, channels, dtype=BF16, seed=case))
        x[:, sum(lengths) :] = torch.nan
        filled = [0, *accumulate(lengths)]
        offsets.copy_(torch.tensor(filled + filled[-1:] * (rows + 1 - len(filled)), dtype=torch.int32))
        for target, values in ((prefill_slots, own), (decode_slots, decoding)):
            target.copy_(torch.tensor(values + [-1] * (rows - len(values)), dtype=torch.int32))
        pool.fill_(torch.nan)
        live = torch.tensor([s for s in [*own, *decoding] if s >= 0], device=DEVICE, dtype=torch.int64)
        pool[live] = normal(slots, channels, 4, dtype=BF16, seed=case)[live]
        twin = pool.clone()
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        for got, want in zip((*results, pool), (*step(twin), twin), strict=True):
            same(got, want, f"case {case}")


def repeated() -> None:
    call = packed([300, 0, 3, 129, 64], 520, tail=3)
    first, pool = None, call.pool.clone()
    windows = normal(5, 520, 4, dtype=BF16)
    train = replace(call, x=normal(*call.x.shape, dtype=BF16))
    cotangents = (normal(*call.x.shape, dtype=BF16, seed=1), normal(5, 520, 4, dtype=BF16, seed=2))
    for _ in range(100):
        call.pool.copy_(pool)
        now = (call.run(), call.pool.clone(), *gradients(train, leaves_of(train, windows), cotangents, True))
        first = first or now
        for i, (got, want) in enumerate(zip(now, first, strict=True)):
            same(got, want, f"result {i}")


def safety() -> None:
    """Index values out of range without checks: padding rows, and every slot that is not named keeps its bits."""
    call = packed([30, 0, 3, 29, 64], 72)
    good = replace(call, read=torch.tensor([0, 1, 2, 3, 4], device=DEVICE, dtype=torch.int32),
                   write=torch.tensor([0, 1, 2, 3, 4], device=DEVICE, dtype=torch.int32),
                   x=normal(*call.x.shape, dtype=BF16))  # fmt: skip
    far = torch.tensor([0, 1 << 30, 2, 13, 4], device=DEVICE, dtype=torch.int32)
    dead = torch.tensor([0, -1, 2, -1, 4], device=DEVICE, dtype=torch.int32)
    for bad in (replace(good, pool=call.pool.clone(), read=far), replace(good, pool=call.pool.clone(), write=far)):
        fine = replace(good, pool=call.pool.clone(), read=dead, write=dead)
        same(bad.run(), fine.run(), "y with a slot out of range")
        same(bad.pool, fine.pool, "pool with a slot out of range")
    wrong = ([0, 30, 30, 33, 62, 1 << 30], [5, 30, 30, 33, 62, 126], [0, 30, 20, 33, 62, 126], [-7, 3, 4, 5, 6, 7])
    for offsets in wrong:
        bad = replace(good, pool=call.pool.clone(), cu_seqlens=torch.tensor(offsets, device=DEVICE, dtype=torch.int32))
        bad.run()
        same(bad.pool[5:], call.pool[5:], "slots that no row names")
    x = normal(5, 3, 72, dtype=BF16)
    entries = torch.zeros(13, 3, 72, 4, device=DEVICE, dtype=BF16)
    wild = torch.tensor([0, 99, -1, 3, 2], device=DEVICE, dtype=torch.int32)
    pool = call.pool.clone()
    y = causal_conv1d_update(x, good.weight, good.bias, pool, good.read, None, entries, wild, wild.flip(0))
    same(pool[5:], call.pool[5:], "slots that no row names")
    assert not bool(y[1].any()), "a row with a count out of range is padding"


def refusals() -> None:
    """With check=True values are refused as on a CPU; shapes and devices always are, also where a call is known."""
    call = packed([30, 0, 3, 29, 64], 72)
    fine = replace(call, read=torch.arange(5, device=DEVICE), write=torch.arange(5, device=DEVICE))
    fine.run(check=True)
    fine.run()

    def refused(error: type[ContractError], run: Callable[[], Any]) -> None:
        before = fine.pool.clone()
        try:
            run()
        except error:
            same(fine.pool, before, "pool after a refusal")
        else:
            raise AssertionError(f"taken, and {error.__name__} expected")

    refused(SlotError, lambda: replace(fine, read=torch.arange(5, device=DEVICE) + 9).run(check=True))
    refused(SlotError, lambda: replace(fine, write=torch.zeros(5, device=DEVICE, dtype=torch.int64)).run(check=True))
    refused(PackingError, lambda: replace(fine, cu_seqlens=fine.cu_seqlens.flip(0)).run(check=True))
    refused(UnsupportedError, lambda: replace(fine, read=torch.arange(5)).run())
    x, slots = normal(5, 1, 72, dtype=BF16), torch.arange(5, device=DEVICE)
    causal_conv1d_update(x, fine.weight, fine.bias, fine.pool, slots)
    refused(UnsupportedError, lambda: causal_conv1d_update(x, fine.weight, fine.bias, fine.pool, slots.cpu()))
    refused(SlotError, lambda: causal_conv1d_update(x, fine.weight, fine.bias, fine.pool, slots + 9, check=True))


def never_waits() -> None:
    """No call without checks waits for the device."""
    call = packed([30, 0, 3, 29, 64], 72)
    a, x = normal(4, 32), normal(4, 128)
    drafts, weight = normal(5, 2, 72, dtype=BF16), normal(128)
    call.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run()
        causal_conv1d_update(drafts, call.weight, call.bias, call.pool, call.read, call.write)
        causal_conv1d(call.x, call.weight, call.bias, None, call.cu_seqlens)
        softplus_gate(a, a[0])
        beta_gate(a)
        l2norm(x)
        rmsnorm_gated(x, x, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_once() -> None:
    """Other contents, lengths and numbers of rows compile nothing: what changes from batch to batch is no constant."""
    from statescan.fast.kernels.conv import conv_prefill_kernel, conv_update_kernel

    def serve(rows: int, tokens: int) -> None:
        call = packed([tokens] * rows, 64)
        call.run()
        causal_conv1d_update(call.x[0, :rows, None], call.weight, call.bias, call.pool, call.read, call.write)

    kernels = (conv_prefill_kernel, conv_update_kernel)
    serve(33, 31)
    before = count_compiled(*kernels)
    for rows, tokens in ((34, 30), (48, 16), (64, 7), (100, 33)):
        serve(rows, tokens)
    more = count_compiled(*kernels) - before
    assert more == 0, f"{more} more kernels for other batches"


def traced() -> None:
    """torch.compile sees one operation, and its results are those of the eager call."""
    call = packed([30, 0, 3, 29, 64], 72)
    drafts = normal(5, 1, 72, dtype=BF16)

    def step(x: Tensor, pool: Tensor) -> Tensor:
        return causal_conv1d_update(x + 1, call.weight, call.bias, pool, call.read, call.write, activation="silu") * 2

    pool, twin = call.pool.clone(), call.pool.clone()
    run: Any = torch.compile(step, backend="aot_eager", fullgraph=True)
    same(run(drafts, pool), step(drafts, twin), "y")
    same(pool, twin, "pool")


SMALL = (prefill_small, prefill_snapshots, update_small, training, gates_and_norms, safety)
LARGE = (prefill_long, prefill_odd, prefill_views, prefill_many_rows, far_pool, far_tokens, update_odd, graph_replay,
         repeated, refusals, never_waits, compiled_once, traced)  # fmt: skip


def checks(tiny: bool) -> Iterator[Check]:
    """Every check; the small ones alone where each memory access is watched."""
    for function in SMALL if tiny else (*SMALL, *LARGE):
        yield f"conv {function.__name__.replace('_', ' ')}", function
