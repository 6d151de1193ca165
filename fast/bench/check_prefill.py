"""What check_gpu asks of prefill beyond the suite: real sizes, long rows, cuts, graphs, repeatability, safety.

Expectations are computed in float64 by PyTorch, token by token, for all rows and heads at once, with the steps of
`check_decode`: a pack is unfolded into rows of equal length whose tokens past their end change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from statescan.fast import delta, ssd
from statescan.fast.bench.check_conv import BF16, DEVICE, F16, F32, Check, close, count_compiled, normal, same
from statescan.fast.bench.check_decode import (
    FEW,
    SIBLINGS,
    Call,
    check_repeated,
    check_traced,
    check_untouched,
    delta_step,
    ssd_step,
)
from statescan.fast.kernels.delta_chunk import delta_chunk_kernel
from statescan.fast.kernels.delta_prefill import delta_prefill_kernel
from statescan.fast.kernels.ssd_prefill import ssd_prefill_kernel, ssd_steps_kernel

EDGES = (0, 1, 5, 31, 32, 33, 0, 63, 64, 65, 130, 2)
LOOSE = {F32: 2.0**-14, BF16: 2.0**-5, F16: 2.0**-8}
"""By the type of the tokens: the roundings of operands, summed over 64 tokens and up to 256 keys."""


@dataclass(frozen=True)
class Pack:
    """One call: operation, token tensors and parameters, pool, row tensors, snapshots, settings."""

    name: str
    tokens: dict[str, Any]
    pool: Tensor
    rows: dict[str, Any]
    settings: dict[str, Any]

    def run(self, **more: Any) -> Tensor:
        function: Any = getattr(ssd if self.name == "ssd" else delta, f"{self.name}_prefill")
        out: Tensor = function(**self.tokens, state_pool=self.pool, **self.rows, **self.settings, **more)
        return out

    def twin(self) -> Pack:
        """The same call on a pool and snapshots of its own."""
        kept = self.rows["snapshot_states"]
        rows = {**self.rows, "snapshot_states": None if kept is None else kept.clone()}
        return replace(self, pool=self.pool.clone(), rows=rows)


def make(
    name: str, copies: int = 1, *, lengths: Sequence[int] = EDGES, tail: int = 7, heads: int = 2, value_heads: int = 4,
    keys: int = 128, values: int = 128, tokens: torch.dtype = BF16, state: torch.dtype = F32, layout: str = "VK",
    marks: bool = True, index: torch.dtype = torch.int32, seed: int = 0, plain: bool = False,
) -> Pack:  # fmt: skip
    """Rows of every kind in turn: in place, fresh, score only, padding, split; NaN in what nobody may read."""
    N, T = len(lengths), sum(lengths) + tail
    slots = 2 * N + 3
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(N + seed))
    read, write, kind = order[:N].clone(), order[:N].clone(), torch.arange(N) % 5
    if not plain:
        read[kind == 1] = -1
        write[kind == 2] = -7
        read[kind == 3] = write[kind == 3] = -2
        write[kind == 4] = order[N : 2 * N][kind == 4]
    square = (keys, values) if layout == "KV" and name != "ssd" else (values, keys)
    pool = torch.full((slots, value_heads, *square), torch.nan, device=DEVICE, dtype=state)
    live = read[read >= 0]
    pool[live] = normal(len(live), value_heads, *square, dtype=state, seed=seed)
    offsets = [0, *accumulate(lengths)]
    rows: dict[str, Any] = {"cu_seqlens": torch.tensor(offsets, device=DEVICE, dtype=index),
                            "read_slots": read.to(DEVICE, index), "write_slots": write.to(DEVICE, index)}  # fmt: skip
    rows |= {"snapshot_positions": None, "snapshot_states": None}
    if marks:
        wanted = sorted({p for a, b in pairwise(offsets) for p in (a + 1, a + 32, (a + b) // 2, b) if a < p <= b})
        positions = torch.tensor([-1, *wanted], device=DEVICE, dtype=index)
        kept = torch.full((len(positions), value_heads, *square), torch.nan, device=DEVICE, dtype=state)
        rows |= {"snapshot_positions": positions, "snapshot_states": kept}
    made = _tokens(name, copies, T, heads, value_heads, keys, values, tokens, seed)
    dead = torch.ones(T, dtype=torch.bool)
    for n in range(N):
        if max(int(read[n]), int(write[n])) >= 0:
            dead[offsets[n] : offsets[n + 1]] = False
    for t in made.values():
        if t.ndim >= 3:
            t[0, dead.repeat_interleave(t.shape[1] // max(T, 1)).to(DEVICE)] = torch.nan
    settings: dict[str, Any] = {} if name == "ssd" else {"state_layout": layout, "use_qk_l2norm": True}
    if "product" in name:
        settings["num_householder"] = copies
    return Pack(name, made, pool, rows, settings)


def _tokens(
    name: str, copies: int, T: int, heads: int, value_heads: int, keys: int, values: int, dtype: torch.dtype, seed: int
) -> dict[str, Any]:
    if name == "ssd":
        return {
            "x": normal(1, T, value_heads, values, dtype=dtype, seed=seed),
            "dt": normal(1, T, value_heads, seed=seed + 1), "A": -normal(value_heads, seed=seed + 2).exp(),
            "B": normal(1, T, heads, keys, dtype=dtype, seed=seed + 3),
            "C": normal(1, T, heads, keys, dtype=dtype, seed=seed + 4) / keys**0.5,
            "D": normal(value_heads, values, seed=seed + 5),
            "z": normal(1, T, value_heads, values, dtype=dtype, seed=seed + 6),
            "dt_bias": normal(value_heads, seed=seed + 7),
        }  # fmt: skip
    wide, gate = T * copies, (value_heads, *([keys] if name.startswith("kimi") else []))
    return {
        "q": normal(1, T, heads, keys, dtype=dtype, seed=seed),
        "k": normal(1, wide, heads, keys, dtype=dtype, seed=seed + 2),
        "v": normal(1, wide, value_heads, values, dtype=dtype, seed=seed + 3),
        "g": -normal(1, T, *gate, seed=seed + 4).square() * (3 if seed % 2 else 0.1),
        "beta": 2 * normal(1, wide, value_heads, seed=seed + 5).sigmoid(),
    }  # fmt: skip


def expected(call: Pack) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, pool and snapshots after the call, in float64."""
    swapped = call.settings.get("state_layout") == "VK"
    offsets = call.rows["cu_seqlens"].tolist()
    N, most = len(offsets) - 1, max([0, *(b - a for a, b in pairwise(offsets))])
    pool, kept, positions = call.pool.double(), call.rows["snapshot_states"], call.rows["snapshot_positions"]
    kept = None if kept is None else kept.double()
    read, write = call.rows["read_slots"].tolist(), call.rows["write_slots"].tolist()
    first = "x" if call.name == "ssd" else "q"
    T = call.tokens[first].shape[1]
    flat = [min(a + j, T - 1) for a in offsets[:-1] for j in range(most)]
    place = torch.tensor(flat, device=DEVICE, dtype=torch.int64).view(N, most)
    tokens = {key: t if t.ndim < 3 else _unfold(t, place, T) for key, t in call.tokens.items()}
    step = (ssd_step if call.name == "ssd" else delta_step)(Call(call.name, tokens, pool, {}, call.settings))
    state = torch.zeros(N, *pool.shape[1:], device=DEVICE, dtype=torch.float64)
    for n, slot in enumerate(read):
        if slot >= 0:
            state[n] = pool[slot]
    state = state.mT if swapped else state
    out = torch.zeros(*call.tokens["x" if call.name == "ssd" else "v"][0, :T].shape, device=DEVICE, dtype=torch.float64)
    marked: dict[int, list[int]] = {}
    for x, p in enumerate([] if positions is None else positions.tolist()):
        marked.setdefault(p, []).append(x)
    live = [max(r, w) >= 0 for r, w in zip(read, write, strict=True)]
    for j in range(most):
        real = [n for n in range(N) if live[n] and offsets[n] + j < offsets[n + 1]]
        after, now = step(state, j)
        mask = torch.zeros(N, dtype=torch.bool, device=DEVICE)
        mask[real] = True
        state = torch.where(mask[:, None, None, None], after, state)
        if real:
            out[[offsets[n] + j for n in real]] = now[real]
        for n in real:
            for x in marked.get(offsets[n] + j + 1, []):
                kept[x] = state[n].mT if swapped else state[n]  # type: ignore[index]
    for n, slot in enumerate(write):
        if slot >= 0:
            pool[slot] = state[n].mT if swapped else state[n]
    return out[None], pool, kept


def _unfold(t: Tensor, place: Tensor, T: int) -> Tensor:
    """Tokens `[1, T * M, ...]` as rows `[N, most * M, ...]`."""
    copies = t.shape[1] // T
    by_token = t[0].reshape(T, copies, *t.shape[2:])[place]
    unfolded: Tensor = by_token.flatten(1, 2).nan_to_num(0.0)
    return unfolded


def largest(t: Tensor) -> float:
    """The largest magnitude, 1 at least."""
    return max(1.0, float(t.abs().max())) if t.numel() else 1.0


def check_pack(call: Pack) -> None:
    """Output, written slots and snapshots within rounding; every other slot and snapshot bit for bit."""
    out, pool, kept = expected(call)
    before, got = call.twin(), call.run()
    unit = LOOSE[call.tokens["x" if call.name == "ssd" else "v"].dtype]
    scale = largest(out)
    close(got.double() / scale, out / scale, "o", unit)
    tail = got[0, int(call.rows["cu_seqlens"][-1]) :]
    same(tail, torch.zeros_like(tail), "rows past the last offset")
    pairs = [("pool", call.pool, before.pool, pool)]
    if kept is not None:
        pairs.append(("snapshots", call.rows["snapshot_states"], before.rows["snapshot_states"], kept))
    for what, now, then, want in pairs:
        changed = check_untouched(what, now, then, want)
        scale = largest(want[changed])
        stored = {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}[now.dtype]
        close(now[changed].double() / scale, want[changed] / scale, what, max(unit, stored))


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def small() -> None:
    """Every sibling, 24 by 20, snapshots on and off the grid; layouts and types of pools and tokens among them."""
    for name, copies in SIBLINGS:
        for layout, state, tokens in (("VK", F32, BF16), ("KV", BF16, F32), ("VK", F16, F16)):
            check_pack(make(name, copies, keys=24, values=20, layout=layout, state=state, tokens=tokens))


def safety() -> None:
    """Slots and offsets out of range without checks: memory stays safe, slots that no row names keep their bits."""
    for name, copies in SIBLINGS:
        call = make(name, copies, lengths=(3, 70, 2), keys=24, values=20, plain=True, marks=False)
        named = call.rows["write_slots"].long()
        for key, values in (("read_slots", [0, 1 << 30, 2]), ("write_slots", [0, 99, 2]),
                            ("cu_seqlens", [0, 3, 1 << 30, 75]), ("cu_seqlens", [0, 70, 3, 75])):  # fmt: skip
            now = call.twin()
            wild = torch.tensor(values, device=DEVICE, dtype=torch.int32)
            replace(now, rows={**now.rows, key: wild}).run()
            others = torch.ones(len(now.pool), dtype=torch.bool, device=DEVICE)
            others[named] = False
            others[:3] = False
            same(now.pool[others], call.pool[others], f"{name} slots that no row names")


def real_sizes() -> None:
    for name, copies in SIBLINGS:
        values = 64 if name == "ssd" else 128
        for layout, state in (("VK", F32), ("KV", BF16)):
            check_pack(make(name, copies, values=values, heads=4, value_heads=8, layout=layout, state=state))
        check_pack(make(name, copies, values=values, marks=False, lengths=(300, 200), heads=4, value_heads=8, seed=1))


def odd_sizes() -> None:
    for keys, values in ((16, 16), (1, 3), (17, 33), (200, 130), (256, 256)):
        for name, layout in (("gated_delta_rule", "VK"), ("kimi_delta_attention", "KV"), ("ssd", "VK")):
            check_pack(make(name, keys=keys, values=values, layout=layout, heads=1, value_heads=3, lengths=(70, 0, 5)))
    check_pack(make("gated_delta_product", 40, keys=16, values=16, heads=1, value_heads=2, lengths=(3, 0, 2)))


def many_rows() -> None:
    lengths = [(17 * n) % 90 for n in range(256)]
    check_pack(make("gated_delta_rule", lengths=lengths, heads=1, value_heads=2, keys=32, values=32, marks=False,
                    index=torch.int64))  # fmt: skip


def long_rows() -> None:
    """131,072 tokens in one call or in two, cut on the grid, float32 pool: the same bits."""
    for name, copies in FEW:
        T, cut = 1 << 17, 1 << 16
        call = make(name, copies, lengths=(T,), tail=0, heads=1, value_heads=2, keys=64, values=64, marks=False,
                    plain=True)  # fmt: skip
        parts, whole = call.twin(), call.run()
        halves = []
        for a in (0, cut):
            tokens = {key: t if t.ndim < 3 else t[:, a * t.shape[1] // T : (a + cut) * t.shape[1] // T]
                      for key, t in parts.tokens.items()}  # fmt: skip
            rows = {**parts.rows, "cu_seqlens": torch.tensor([0, cut], device=DEVICE)}
            halves.append(replace(parts, tokens=tokens, rows=rows).run())
        same(torch.cat(halves, 1), whole, f"{name} o")
        same(parts.pool, call.pool, f"{name} pool")
        assert bool(whole.isfinite().all()), name


def graph_replay() -> None:
    """One graph of a prefill of each sibling, replayed with other tokens, lengths, slots and marks: eager's bits."""
    for name, copies in SIBLINGS:
        lengths = [(64, 1, 130, 5), (5, 130, 64, 1), (0, 0, 200, 0), (50, 50, 50, 50), (0, 0, 0, 0)]
        call = make(name, copies, lengths=lengths[0], tail=10, keys=64, values=64, marks=False)
        call.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call.run()
        for i, other_lengths in enumerate(lengths):
            other = make(name, copies, lengths=other_lengths, tail=210 - sum(other_lengths), keys=64, values=64,
                         marks=False, seed=100 * i)  # fmt: skip
            for mine, theirs in ((call.tokens, other.tokens), (call.rows, other.rows)):
                for key, t in mine.items():
                    if t is not None:
                        t.copy_(theirs[key])
            call.pool.copy_(other.pool)
            out.fill_(torch.nan)
            twin = call.twin()
            graph.replay()
            same(out, twin.run(), f"{name} o")
            same(call.pool, twin.pool, f"{name} pool")


def repeated() -> None:
    for name, copies in FEW:
        check_repeated(make(name, copies, heads=4, value_heads=8), "snapshot_states")


def batch_mates() -> None:
    """A row has the bits it has alone, at any place of a pack."""
    for name, copies in FEW:
        call = make(name, copies, lengths=(100, 77, 200, 130, 90, 64, 1, 300) * 4, marks=False, plain=True)
        alone, out = call.twin(), call.run()
        offsets = call.rows["cu_seqlens"].tolist()
        T = offsets[-1] + 7
        for n in (2, 7, 31):
            a, b = offsets[n], offsets[n + 1]
            tokens = {key: t if t.ndim < 3 else t[:, a * (t.shape[1] // T) : b * (t.shape[1] // T)]
                      for key, t in alone.tokens.items()}  # fmt: skip
            own = {key: None if t is None else t[n : n + 1] for key, t in alone.rows.items() if key != "cu_seqlens"}
            own["cu_seqlens"] = torch.tensor([0, b - a], device=DEVICE)
            same(replace(alone, tokens=tokens, rows=own).run(), out[:, a:b], f"{name} o of row {n}")
            slot = int(call.rows["write_slots"][n])
            same(alone.pool[slot], call.pool[slot], f"{name} slot of row {n}")


def never_waits() -> None:
    """No call without checks waits for the device, and other contents compile nothing."""
    kernels = (delta_chunk_kernel, delta_prefill_kernel, ssd_prefill_kernel, ssd_steps_kernel)
    calls = [make(name, copies, keys=64, values=64) for name, copies in SIBLINGS]
    fewer = {"lengths": EDGES[:1:-1], "tail": 31, "seed": 2}
    others = [make(name, copies, keys=64, values=64, **fewer) for name, copies in SIBLINGS]  # type: ignore[arg-type]
    for call in calls:
        call.run()
    before = count_compiled(*kernels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in (*calls, *others):
            call.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    more = count_compiled(*kernels) - before
    assert more == 0, f"{more} more kernels for other batches"


def traced() -> None:
    """torch.compile sees one operation, and its results are those of the eager call."""
    for name, copies in FEW:
        check_traced(make(name, copies, keys=24, values=20, marks=False, lengths=(5, 70)))


SMALL = (small, safety)
LARGE = (real_sizes, odd_sizes, many_rows, long_rows, graph_replay, repeated, batch_mates, never_waits, traced)


def checks(tiny: bool) -> Iterator[Check]:
    """Every check; the small ones alone where each memory access is watched."""
    for function in SMALL if tiny else (*SMALL, *LARGE):
        yield f"prefill {function.__name__.replace('_', ' ')}", function
