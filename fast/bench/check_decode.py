"""What check_gpu asks of decode beyond the suite: real sizes, far and pitched pools, graphs, repeatability, safety.

Expectations are computed here in float64 by PyTorch, token by token, for all rows and heads at once. One description
serves both families: Mamba2's heads are value heads, its groups heads, d_state keys and headdim values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from statescan.fast import delta, relaunch, ssd
from statescan.fast.bench.check_conv import BF16, DEVICE, F16, F32, Check, close, count_compiled, normal, same
from statescan.fast.kernels.delta_update import delta_update_kernel
from statescan.fast.kernels.ssd_update import ssd_update_kernel
from statescan.spec.contract import ContractError, SlotError, UnsupportedError

LOOSE = {F32: 2.0**-16, BF16: 2.0**-7, F16: 2.0**-9}
"""Sums over up to 256 keys and up to 8 tokens, decays of a few units, rounded once."""
SIBLINGS = (("gated_delta_rule", 1), ("gated_delta_product", 2), ("gated_delta_product", 3),
            ("kimi_delta_attention", 1), ("ssd", 1))  # fmt: skip
FEW = (SIBLINGS[0], SIBLINGS[1], *SIBLINGS[3:])
DEVICE_WORK = 1 << 21
"""State elements of a call that fill any device, so that the taller tiles are chosen."""


@dataclass(frozen=True)
class Call:
    """One call: operation, token tensors and parameters, pool, row tensors, settings."""

    name: str
    tokens: dict[str, Any]
    pool: Tensor
    rows: dict[str, Any]
    settings: dict[str, Any]

    def run(self, **more: Any) -> Tensor:
        module = ssd if self.name == "ssd" else delta
        function: Any = getattr(module, f"{self.name}_update")
        out: Tensor = function(**self.tokens, state_pool=self.pool, **self.rows, **self.settings, **more)
        return out

    def twin(self) -> Call:
        """The same call on a pool and entries of its own."""
        entries = self.rows["intermediate_states"]
        rows = {**self.rows, "intermediate_states": None if entries is None else entries.clone()}
        return replace(self, pool=self.pool.clone(), rows=rows)


def make(
    name: str, copies: int = 1, *, rows: int = 10, steps: int = 3, heads: int = 2, value_heads: int = 4,
    keys: int = 128, values: int = 128, tokens: torch.dtype = BF16, state: torch.dtype = F32, layout: str = "VK",
    entries: bool = True, counts: bool = True, index: torch.dtype = torch.int32, seed: int = 0,
) -> Call:  # fmt: skip
    """Rows of every kind in turn: in place, fresh, score only, padding, split; NaN in every slot that no row reads."""
    slots = 2 * rows + 3
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(rows + seed))
    read, write, kind = order[:rows].clone(), order[:rows].clone(), torch.arange(rows) % 5
    read[kind == 1] = -1
    write[kind == 2] = -7
    read[kind == 3] = write[kind == 3] = -2
    write[kind == 4] = order[rows : 2 * rows][kind == 4]
    square = (keys, values) if layout == "KV" and name != "ssd" else (values, keys)
    pool = torch.full((slots, value_heads, *square), torch.nan, device=DEVICE, dtype=state)
    live = read[read >= 0]
    pool[live] = normal(len(live), value_heads, *square, dtype=state, seed=seed)
    row_tensors: dict[str, Any] = {"read_slots": read.to(DEVICE, index), "write_slots": write.to(DEVICE, index)}
    row_tensors |= dict.fromkeys(("intermediate_states", "num_accepted", "num_tokens"))
    if entries:
        kept = normal(slots, steps + 1, value_heads, *square, dtype=state, seed=seed + 1)
        accepted = torch.arange(rows, device=DEVICE) % (steps + 2) - 1
        row_tensors |= {"intermediate_states": kept, "num_accepted": accepted.to(index)}
    if counts:
        row_tensors["num_tokens"] = (steps - torch.arange(rows, device=DEVICE) % (steps + 1)).to(index)
    if name == "ssd":
        made = _ssd_tokens(rows, steps, heads, value_heads, keys, values, tokens, seed)
        return Call(name, made, pool, row_tensors, {})
    made = _delta_tokens(name, copies, rows, steps, heads, value_heads, keys, values, tokens, seed)
    settings = {"state_layout": layout, "use_qk_l2norm": True}
    return Call(name, made, pool, row_tensors, settings | ({"num_householder": copies} if "product" in name else {}))


def _delta_tokens(
    name: str, copies: int, rows: int, steps: int, heads: int, value_heads: int, keys: int, values: int,
    dtype: torch.dtype, seed: int,
) -> dict[str, Any]:  # fmt: skip
    wide, gate = steps * copies, (value_heads, *([keys] if name.startswith("kimi") else []))
    return {
        "q": normal(rows, steps, heads, keys, dtype=dtype, seed=seed),
        "k": normal(rows, wide, heads, keys, dtype=dtype, seed=seed + 2),
        "v": normal(rows, wide, value_heads, values, dtype=dtype, seed=seed + 3),
        "g": -normal(rows, steps, *gate, seed=seed + 4).abs(),
        "beta": 2 * normal(rows, wide, value_heads, seed=seed + 5).sigmoid(),
    }  # fmt: skip


def _ssd_tokens(
    rows: int, steps: int, groups: int, heads: int, columns: int, channels: int, dtype: torch.dtype, seed: int
) -> dict[str, Any]:
    x, z = (normal(rows, steps, heads, channels, dtype=dtype, seed=seed + i) for i in (0, 6))
    B, C = (normal(rows, steps, groups, columns, dtype=dtype, seed=seed + i) for i in (3, 4))
    return {
        "x": x, "dt": normal(rows, steps, heads, seed=seed + 1), "A": -normal(heads, seed=seed + 2).exp(),
        "B": B, "C": C / columns**0.5, "D": normal(heads, channels, seed=seed + 5), "z": z,
        "dt_bias": normal(heads, seed=seed + 7),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The same in float64
# ---------------------------------------------------------------------------------------------------------------------


def expected(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, pool and entries after the call, in float64."""
    swapped = call.settings.get("state_layout") == "VK"
    pool, entries = call.pool.double(), call.rows["intermediate_states"]
    entries = None if entries is None else entries.double()
    read, write = call.rows["read_slots"].tolist(), call.rows["write_slots"].tolist()
    steps = call.tokens["x" if call.name == "ssd" else "q"].shape[1]
    counts = [steps] * len(read) if call.rows["num_tokens"] is None else call.rows["num_tokens"].tolist()
    accepted = [-1] * len(read) if call.rows["num_accepted"] is None else call.rows["num_accepted"].tolist()
    state = torch.zeros(len(read), *pool.shape[1:], device=DEVICE, dtype=torch.float64)
    for n, (slot, a) in enumerate(zip(read, accepted, strict=True)):
        if slot >= 0:
            state[n] = pool[slot] if entries is None or a < 0 else entries[slot, a]
    step = ssd_step(call) if call.name == "ssd" else delta_step(call)
    outputs = []
    state = state.mT if swapped else state
    for j in range(steps):
        real = torch.tensor([max(r, w) >= 0 and j < c for r, w, c in zip(read, write, counts, strict=True)],
                            device=DEVICE)  # fmt: skip
        after, out = step(state, j)
        state = torch.where(real[:, None, None, None], after, state)
        outputs.append(torch.where(real[:, None, None], out, 0.0))
        for n, slot in enumerate(write):
            if entries is not None and slot >= 0 and bool(real[n]):
                entries[slot, j] = state[n].mT if swapped else state[n]
    for n, slot in enumerate(write):
        if slot >= 0:
            pool[slot] = state[n].mT if swapped else state[n]
    return torch.stack(outputs, 1), pool, entries


def delta_step(call: Call) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """One token of all rows, states `[N, HV, K, V]`."""
    q, k, v, g, beta = (call.tokens[key].double() for key in ("q", "k", "v", "g", "beta"))
    group, copies = v.shape[2] // q.shape[2], call.settings.get("num_householder", 1)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (q * q.shape[-1] ** -0.5).repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    g = g if g.ndim == 4 else g[..., None]

    def step(state: Tensor, j: int) -> tuple[Tensor, Tensor]:
        state = g[:, j].exp()[..., None] * state
        for m in range(j * copies, (j + 1) * copies):
            known = torch.einsum("nhk,nhkv->nhv", k[:, m], state)
            state = state + k[:, m, :, :, None] * (beta[:, m, :, None] * (v[:, m] - known))[:, :, None]
        return state, torch.einsum("nhk,nhkv->nhv", q[:, j], state)

    return step


def ssd_step(call: Call) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """One token of all rows, states `[N, H, P, R]`."""
    x, dt, A, B, C, D, z, bias = (call.tokens[key].double() for key in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"))
    group = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(group, 2), C.repeat_interleave(group, 2)
    dt = torch.nn.functional.softplus(dt + bias)

    def step(state: Tensor, j: int) -> tuple[Tensor, Tensor]:
        written = (dt[:, j, :, None] * x[:, j])[..., None] * B[:, j, :, None]
        state = (dt[:, j] * A).exp()[..., None, None] * state + written
        y = torch.einsum("nhpr,nhr->nhp", state, C[:, j]) + D * x[:, j]
        return state, y * torch.nn.functional.silu(z[:, j])

    return step


def check_call(call: Call) -> None:
    """Output, written slots and entries within rounding; every other slot and entry bit for bit."""
    out, pool, entries = expected(call)
    before, got = call.twin(), call.run()
    close(got, out, "o", LOOSE[got.dtype])
    pairs = [("pool", call.pool, before.pool, pool)]
    if entries is not None:
        kept = call.rows["intermediate_states"]
        pairs.append(("entries", kept.flatten(0, 1), before.rows["intermediate_states"].flatten(0, 1),
                      entries.flatten(0, 1)))  # fmt: skip
    for what, now, then, want in pairs:
        changed = check_untouched(what, now, then, want)
        close(now[changed], want[changed], what, LOOSE[now.dtype])


def check_untouched(what: str, now: Tensor, then: Tensor, want: Tensor) -> Tensor:
    """What ought to be as it was is so, bit for bit; a mask of the slots or entries that ought to be others."""
    changed = torch.tensor([not torch.equal(a.double().nan_to_num(7), b.nan_to_num(7))
                            for a, b in zip(then, want, strict=True)], device=DEVICE)  # fmt: skip
    same(now[~changed], then[~changed], f"untouched {what}")
    return changed


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def small() -> None:
    """Every sibling, all features, 24 by 20; both layouts and three types of pools among them."""
    for name, copies in SIBLINGS:
        for layout, state, tokens in (("VK", F32, BF16), ("KV", BF16, F32), ("VK", F16, F16)):
            check_call(make(name, copies, keys=24, values=20, layout=layout, state=state, tokens=tokens))


def one_token() -> None:
    """The form without a loop, one row and many, with and without entries."""
    for name, copies in SIBLINGS:
        for rows, entries in ((1, True), (6, False), (70, False)):
            check_call(make(name, copies, rows=rows, steps=1, keys=64, values=64, counts=False, entries=entries))


def real_sizes() -> None:
    """128 by 128 in every layout and type of pool, at sizes that select both kinds of tiles."""
    for name, copies in SIBLINGS:
        for layout, state in (("VK", F32), ("VK", BF16), *([] if name == "ssd" else [("KV", F32)])):
            for rows in (4, 40):
                check_call(make(name, copies, rows=rows, heads=4, value_heads=8, layout=layout, state=state, steps=2))


def odd_sizes() -> None:
    """From 1 to 256, powers of two or not."""
    for keys, values in ((16, 16), (1, 3), (17, 33), (200, 130), (256, 256), (16, 256)):
        for name, layout in (("gated_delta_rule", "VK"), ("kimi_delta_attention", "KV"), ("ssd", "VK")):
            check_call(make(name, keys=keys, values=values, layout=layout, heads=1, value_heads=3, steps=2))


def many_rows() -> None:
    check_call(make("gated_delta_rule", rows=700, steps=1, heads=1, value_heads=2, keys=32, values=32,
                    index=torch.int64))  # fmt: skip


def views() -> None:
    """Paged and pitched memory, and tokens that are slices of wider rows; what lies in the gaps keeps its bits.

    Within rounding, not the bits of contiguous memory: how wide a line can be read decides which lanes hold what, and
    so the order of a sum.
    """
    for name, copies in FEW:
        for pitch in (4, 3):
            call = make(name, copies, keys=64, values=48, steps=2)
            wide = (*call.pool.shape[:2], call.pool.shape[2] + 1, call.pool.shape[3] + pitch)
            page = torch.full(wide, 7.0, device=DEVICE, dtype=call.pool.dtype)
            pool = page[:, :, : call.pool.shape[2], : call.pool.shape[3]]
            pool.copy_(call.pool)
            check_call(replace(call, pool=pool, tokens={key: sliced(t, pitch) for key, t in call.tokens.items()}))
            pool.fill_(7.0)
            assert bool((page == 7.0).all()), f"{name}: something was written between the rows of the pool"


def sliced(t: Tensor, pitch: int) -> Tensor:
    """The same numbers as a slice of wider rows."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 2 * pitch, device=DEVICE, dtype=t.dtype)
    view = wide[..., pitch : pitch + t.shape[-1]]
    return view.copy_(t)


def far_pool() -> None:
    """Slots on both sides of byte and element offsets 2^31 and 2^32; their neighbours keep their bits."""
    for name in ("gated_delta_rule", "ssd"):
        square, heads = (128, 128), 32
        slots = 10_000  # of 2^19 elements: 2^31 elements at slot 4096, 2^32 at 8192
        pool = torch.empty(slots, heads, *square, device=DEVICE, dtype=BF16)
        named = [0, 2047, 2048, 4095, 4096, 8191, 8192, 9999]
        near = sorted({s + d for s in named for d in (-1, 1)} & set(range(slots)) - set(named))
        for s in [*named, *near]:
            pool[s] = normal(heads, *square, dtype=BF16, seed=s)
        call = make(name, rows=len(named), steps=1, value_heads=heads, state=BF16, entries=False, counts=False)
        index = torch.tensor(named, device=DEVICE)
        guards, close_by = pool[near].clone(), pool[named].clone()
        far = replace(call, pool=pool, rows={**call.rows, "read_slots": index, "write_slots": None})
        twin = replace(call, pool=close_by,
                       rows={**call.rows, "read_slots": torch.arange(len(named), device=DEVICE), "write_slots": None},
                       )  # fmt: skip
        same(far.run(), twin.run(), "o")
        same(pool[named], close_by, "slots")
        same(pool[near], guards, "neighbouring slots")


def graph_replay() -> None:
    """One graph of a step of each sibling, replayed with other tokens, slots, rows and counts: eager's bits."""
    for name, copies in SIBLINGS:
        call = make(name, copies, rows=6, steps=3, keys=64, values=64)
        poisoned = [call.pool, call.rows["intermediate_states"]]
        call.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call.run()
        for seed in range(1, 6):
            other = make(name, copies, rows=6, steps=3, keys=64, values=64, seed=100 * seed)
            for mine, theirs in ((call.tokens, other.tokens), (call.rows, other.rows)):
                for key, t in mine.items():
                    t.copy_(theirs[key])
            if seed == 5:  # nobody is there
                call.rows["read_slots"].fill_(-1)
                call.rows["write_slots"].fill_(-1)
            call.pool.copy_(other.pool)
            out.fill_(torch.nan)
            twin = call.twin()
            graph.replay()
            same(out, twin.run(), f"{name} o")
            for got, want in zip(poisoned, (twin.pool, twin.rows["intermediate_states"]), strict=True):
                same(got, want, f"{name} pool or entries")


def repeated() -> None:
    for name, copies in FEW:
        check_repeated(make(name, copies, rows=20, value_heads=8), "intermediate_states")


def check_repeated(call: Any, kept: str) -> None:
    """A hundred runs of a call, of decode or of prefill: one result, bit for bit."""
    first: list[Tensor] = []
    for _ in range(100):
        now = call.twin()
        results = [now.run(), now.pool, now.rows[kept]]
        first = first or results
        for got, want in zip(results, first, strict=True):
            same(got, want, call.name)


def batch_mates() -> None:
    """A row has the bits it has alone, whatever tile the size of the batch selects."""
    for name, copies in FEW:
        for layout in ("VK", "KV"):
            rows = DEVICE_WORK // (4 * 128 * 128)
            call = make(name, copies, rows=rows, steps=2, layout=layout, entries=False, counts=False)
            alone = call.twin()
            out = call.run()
            tokens = {key: t[4:5] if t.shape[:1] == (rows,) else t for key, t in alone.tokens.items()}
            own = {key: None if t is None else t[4:5] for key, t in alone.rows.items()}
            same(replace(alone, tokens=tokens, rows=own).run(), out[4:5], f"{name} {layout} o")
            slot = int(call.rows["write_slots"][4])
            same(alone.pool[slot], call.pool[slot], f"{name} {layout} slot")


def cuts() -> None:
    """Four tokens in one call or in four, float32 pool: the same bits."""
    for name, copies in FEW:
        call = make(name, copies, steps=4, entries=False, counts=False)
        slots = torch.arange(10, device=DEVICE)
        rows = {**call.rows, "read_slots": slots, "write_slots": None}
        call = replace(call, pool=normal(*call.pool.shape), rows=rows)
        cut, parts = call.twin(), []
        out = call.run()
        for j in range(4):
            tokens = {key: _token(t, j, 4) for key, t in cut.tokens.items()}
            parts.append(replace(cut, tokens=tokens).run())
        same(torch.cat(parts, 1), out, f"{name} o")
        same(cut.pool, call.pool, f"{name} pool")


def _token(t: Tensor, j: int, steps: int) -> Tensor:
    """Token j of a token tensor, a parameter as it is."""
    if t.shape[0] != 10 or t.ndim < 3:
        return t
    wide = t.shape[1] // steps
    return t[:, j * wide : (j + 1) * wide]


def launched_again() -> None:
    """The second call of a kind is a remembered launch: other pointers, slots and numbers, fresh results."""
    for name, copies in FEW:
        make(name, copies, keys=48, values=32).run()
        known = len(relaunch.remembered)
        for seed in (1, 2):
            check_call(make(name, copies, keys=48, values=32, seed=seed))
        assert len(relaunch.remembered) == known, "the same call was remembered twice"


def safety() -> None:
    """Index values out of range without checks: padding rows, and every slot that is not named keeps its bits."""
    for name, copies in SIBLINGS:
        call = make(name, copies, rows=5, keys=24, values=20)
        good = torch.arange(5, device=DEVICE, dtype=torch.int32)
        wild = torch.tensor([0, 1 << 30, 2, 13, 4], device=DEVICE, dtype=torch.int32)
        call = replace(call, pool=normal(*call.pool.shape), rows={**call.rows, "write_slots": None})
        plain = {"read_slots": good, "write_slots": good, "num_accepted": good - 1, "num_tokens": good % 4}
        for key, values in plain.items():
            now = call.twin()
            rows = {**now.rows, "read_slots": good, "num_accepted": good * 0 - 1, "num_tokens": good * 0 + 3}
            rows[key] = torch.where(good == 1, -wild if key == "num_tokens" else wild, values)
            out = replace(now, rows=rows).run()
            assert not bool(out[1].any()), f"{name}: a row with a bad {key} is padding"
            same(now.pool[5:], call.pool[5:], f"{name} slots that no row names")
            same(now.pool[1], call.pool[1], f"{name} slot of the padding row")
        twice = call.twin()
        replace(twice, rows={**twice.rows, "read_slots": torch.zeros_like(good)}).run()
        same(twice.pool[1:], call.pool[1:], f"{name} slots that no row names")
    pools, entries, slots, accepted = _committed(True)
    before = [p.clone() for p in pools]
    delta.commit_accepted(pools, entries, slots, accepted)
    for pool, old in zip(pools, before, strict=True):
        same(pool, old, "commit with indices out of range")


def _committed(wild: bool) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Arguments of a commit; wild: no row of it is in range."""
    pools = [normal(9, 40, 4, dtype=BF16), normal(9, 2, 16, 20), normal(9, 2, 16, 20, dtype=F16).mT]
    entries = [normal(9, 3, 40, 4, dtype=BF16), normal(9, 3, 2, 16, 20), normal(9, 3, 2, 16, 20, dtype=F16).mT]
    slots, accepted = ([9, 1 << 30, 2, -1], [0, 1, 3, 0]) if wild else ([4, -1, 2, 0], [2, 0, -1, 0])
    return pools, entries, torch.tensor(slots, device=DEVICE), torch.tensor(accepted, device=DEVICE, dtype=torch.int32)


def commit() -> None:
    """One entry of each named slot, every other bit as it was; windows, states and transposed states."""
    pools, entries, slots, accepted = _committed(False)
    before = [p.clone() for p in pools]
    delta.commit_accepted(pools, entries, slots, accepted, check=True)
    for pool, old, kept in zip(pools, before, entries, strict=True):
        old[4], old[0] = kept[4, 2], kept[0, 0]
        same(pool, old, "pool")


def refusals() -> None:
    """With check=True values are refused as on a CPU; shapes and devices always are, also where a call is known."""
    call = make("gated_delta_rule", rows=5, keys=24, values=20, entries=False, counts=False)
    slots = torch.arange(5, device=DEVICE)
    call = replace(call, pool=normal(*call.pool.shape), rows={**call.rows, "read_slots": slots, "write_slots": None})
    call.run(check=True)
    call.run()

    def refused(error: type[ContractError], other: Call, **more: Any) -> None:
        before = call.pool.clone()
        try:
            other.run(**more)
        except error:
            same(call.pool, before, "pool after a refusal")
        else:
            raise AssertionError(f"taken, and {error.__name__} expected")

    refused(SlotError, replace(call, rows={**call.rows, "read_slots": slots + 9}), check=True)
    refused(SlotError, replace(call, rows={**call.rows, "read_slots": slots * 0}), check=True)
    refused(SlotError, replace(call, rows={**call.rows, "write_slots": slots.flip(0)}), check=True)
    refused(UnsupportedError, replace(call, tokens={**call.tokens, "g": call.tokens["g"] + 9}), check=True)
    refused(UnsupportedError, replace(call, rows={**call.rows, "read_slots": slots.cpu()}))
    refused(UnsupportedError, replace(call, settings={"state_layout": "vk"}))


def never_waits() -> None:
    """No call without checks waits for the device."""
    calls = [make(name, copies, keys=24, values=20) for name, copies in SIBLINGS]
    committed = _committed(False)
    for call in calls:
        call.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call.run()
            call.run(check=False)
        delta.commit_accepted(*committed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_once() -> None:
    """Other contents and numbers of rows compile nothing, while they select one kind of tile."""

    kernels = (delta_update_kernel, ssd_update_kernel)
    for name, copies in FEW:
        make(name, copies, rows=16, keys=32, values=32).run()
        before = count_compiled(*kernels)
        for rows in (1, 7, 16, 33, 100):
            make(name, copies, rows=rows, keys=32, values=32, seed=rows).run()
        more = count_compiled(*kernels) - before
        assert more == 0, f"{name}: {more} more kernels for other batches"


def traced() -> None:
    """torch.compile sees one operation, and its results are those of the eager call."""
    for name, copies in FEW:
        check_traced(make(name, copies, keys=24, values=20, entries=False, counts=False))


def check_traced(call: Any) -> None:
    """A call of decode or of prefill between two operations of PyTorch, compiled and not: the same bits."""
    first = "x" if call.name == "ssd" else "v"

    def step(x: Tensor, pool: Tensor) -> Tensor:
        out: Tensor = replace(call, pool=pool, tokens={**call.tokens, first: x * 2}).run()
        return out + 1

    pool, twin = call.pool.clone(), call.pool.clone()
    run: Any = torch.compile(step, backend="aot_eager", fullgraph=True)
    same(run(call.tokens[first], pool), step(call.tokens[first], twin), f"{call.name} o")
    same(pool, twin, f"{call.name} pool")


SMALL = (small, one_token, safety, commit)
LARGE = (real_sizes, odd_sizes, many_rows, views, far_pool, graph_replay, repeated, batch_mates, cuts, launched_again,
         refusals, never_waits, compiled_once, traced)  # fmt: skip


def checks(tiny: bool) -> Iterator[Check]:
    """Every check; the small ones alone where each memory access is watched."""
    for function in SMALL if tiny else (*SMALL, *LARGE):
        yield f"decode {function.__name__.replace('_', ' ')}", function
