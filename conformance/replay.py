"""Replay a trace on someone's two hooks: edits are made here, every number is compared, the first bad place told.

An implementation is an object with `ssm_decode` and `ssm_prefill` (torch tensors or NumPy arrays); with
`ssm_dynamic_inference` and identity projections the same trace also runs through its mixin, or through a stack of its
layers. Nothing of the reference is needed. Order of judgement, first failure wins: the decode hook's outputs, its
buffers, the prefill hook's outputs, its buffers, inputs and unaddressed slots, pools after the hooks, pools after the
edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from statescan.conformance.compare import differs
from statescan.conformance.invoke import from_torch, to_torch
from statescan.goldens.tensors import Array, bits, narrow, number

Event = Mapping[str, Any]
Pair = tuple[Array, Array]
"""Window and state."""
Shapes = tuple[tuple[int, ...], tuple[int, ...]]

_WORDS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@dataclass(frozen=True)
class Told:
    """What became of a replay: `pass`, or a status with the step, the field and the first bad place."""

    status: str
    message: str = ""
    step: int | None = None
    field: str = ""
    place: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        return self.status == "pass"


@dataclass(eq=False)
class Memory:
    """All tensors that persist from step to step: pools, intermediates, snapshot buffers, kept blocks, off-loads."""

    pools: Pair
    entries: Pair
    snapshots: Pair
    dtypes: tuple[str, str]
    kept: dict[Any, Pair] = field(default_factory=dict)
    saved: dict[str, Pair] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Mapping[str, Any], shapes: Shapes | None = None) -> Memory:
        """Memory as a trace finds it: pools of `pool_fill`, buffers of `scratch_fill`."""
        sizes, shapes = trace["sizes"], shapes or slot_shapes(trace)
        slots, drafts, snapshots = sizes["slots"], 1 + sizes.get("max_drafts", 0), sizes.get("max_snapshots", 0)
        pool, scratch = sizes.get("pool_dtype", "f32"), sizes.get("scratch_dtype", "f32")

        def pair(lead: tuple[int, ...], name: str, fill: Any) -> Pair:
            first, second = (filled((*lead, *shape), fill, name) for shape in shapes)
            return first, second

        return cls(
            pair((slots,), pool, sizes.get("pool_fill", "nan")),
            pair((slots, drafts), scratch, sizes.get("scratch_fill", "nan")),
            pair((snapshots,), scratch, sizes.get("scratch_fill", "nan")), (pool, pool),
        )  # fmt: skip


def slot_shapes(trace: Mapping[str, Any]) -> Shapes:
    """Shapes of a window and of a state: those of what each request leaves."""
    alone = next(iter(trace["alone"].values()))
    return np.shape(alone["conv_state"]), np.shape(alone["ssm_state"])


def filled(shape: tuple[int, ...], fill: Any, dtype: str) -> Array:
    """A tensor of one number; NaN in the bit pattern of the formats."""
    return narrow(np.full(shape, _WORDS.get(fill, fill), np.float64), dtype)


def nested(array: Array) -> Any:
    """An array as nested lists of JSON numbers."""
    return [nested(row) for row in array] if array.ndim else number(array)


def read(values: Any, dtype: str) -> Array:
    """Nested lists of JSON numbers as an array of this element type; one that it cannot hold is refused."""
    def plain(value: Any) -> Any:
        return [plain(v) for v in value] if isinstance(value, list) else _WORDS.get(value, value)

    return narrow(np.array(plain(values), np.float64), dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Engine edits
# ---------------------------------------------------------------------------------------------------------------------


def edit(memory: Memory, event: Event) -> None:
    """One engine edit, on window and state together (the event words of the format)."""
    word, slot = event["op"], event.get("slot")
    for which, pool in enumerate(memory.pools):
        if word == "zero":
            pool[slot] = 0
        elif word == "restore":
            pool[slot] = memory.kept[event["block"]][which] if event["block"] in memory.kept else 0
        elif word == "rollback":
            pool[slot] = memory.entries[which][slot, event["entry"]]
        elif word == "load":
            pool[slot] = memory.saved[event["name"]][which]
        elif word == "poison":
            pool[slot] = filled(pool.shape[1:], "nan", memory.dtypes[which])
    if word == "commit" and event.get("kept", True):
        first, second = (buffer[event["from"]].copy() for buffer in memory.snapshots)
        memory.kept[event["block"]] = (first, second)
    elif word == "save":
        first, second = (pool[slot].copy() for pool in memory.pools)
        memory.saved[event["name"]] = (first, second)
    elif word == "drop":
        memory.kept.pop(event["block"], None)
    elif word not in ("zero", "restore", "rollback", "load", "poison", "commit", "free", "move"):
        raise ValueError(f"{word!r} is no event word")


# ---------------------------------------------------------------------------------------------------------------------
# Replaying
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Arrays:
    """The implementation's kind of tensor, and where it lies."""

    kind: str = "torch"
    device: str = "cpu"

    def give(self, array: Array) -> Any:
        """An array as the implementation wants it; over the same memory on a CPU."""
        return to_torch(array, self.device) if self.kind == "torch" else array

    def take(self, tensor: Any) -> Array:
        """What the implementation returned, or holds, as an array."""
        return from_torch(tensor, "cpu") if self.kind == "torch" else np.asarray(tensor)


def replay(
    trace: Mapping[str, Any], hooks: Any, *, arrays: Arrays | None = None, derived: bool = True,
    through: str = "hooks", edits: Callable[[Any, Event], None] = edit, row_dtype: str = "f32",
) -> Told:  # fmt: skip
    """Replay every step; the first failure, or `pass`.

    `derived` False leaves out the arrays that follow from others. `through` is "hooks", "mixin" (rows of one step in
    packed order through `ssm_dynamic_inference`) or "stack" (two recurrent layers with an attention layer between).
    `edits` replaces the engine's edits, which is how a faulty engine is tried.
    """
    one = Replay(trace, hooks, arrays or Arrays(), derived, edits, row_dtype)
    for step in trace["steps"]:
        for told in (one.through_hooks(step) if through == "hooks" else one.through_mixin(step, through == "stack")):
            if not told.passed:
                return told
    return Told("pass")


@dataclass
class Replay:
    """One replay under way."""

    trace: Mapping[str, Any]
    hooks: Any
    arrays: Arrays
    derived: bool
    edits: Callable[[Any, Event], None]
    row_dtype: str

    def __post_init__(self) -> None:
        self.layers = [Memory.of(self.trace), Memory.of(self.trace)]
        self.truth = Memory.of(self.trace)  # what every tensor must hold, by the trace

    @property
    def memory(self) -> Memory:
        return self.layers[0]

    # One step through the two hooks -------------------------------------------------------------------------------

    def through_hooks(self, step: Mapping[str, Any]) -> Iterator[Told]:
        """Edits, decode, prefill, edits."""
        self.edit(step["before"], [self.memory])
        before = [pool.copy() for pool in self.memory.pools]
        if "decode" in step:
            given = step["decode"]
            rows, entries = read(given["zxBCdt"], self.row_dtype), self.entries(given)
            slots = np.array(given["batch_indices"], np.int64)
            yield from self.call(step, "decode", rows, entries, lambda x, pools, buffers: self.hooks.ssm_decode(
                x, *pools, self.arrays.give(slots), *buffers))  # fmt: skip
        if "prefill" in step:
            given = step["prefill"]
            rows = read(given["zxBCdt"], self.row_dtype)
            yield from self.call(
                step, "prefill", rows, list(self.memory.snapshots),
                lambda x, pools, buffers: self.hooks.ssm_prefill(x, *pools, self.context(step, [pools], buffers)),
            )  # fmt: skip
        yield from self.compare_pools(step, before, self.memory)

    def call(
        self, step: Mapping[str, Any], hook: str, rows: Array, buffers: Sequence[Array], run: Callable[..., Any]
    ) -> Iterator[Told]:
        """One hook: called, and its outputs, buffers and inputs compared."""
        kept, want = rows.copy(), step[hook]["expect"]
        given = self.arrays.give(rows)
        pools = [self.arrays.give(pool) for pool in self.memory.pools]
        handed = [self.arrays.give(buffer) for buffer in buffers]
        try:
            y = run(given, pools, handed)
        except Exception as error:  # whatever an implementation raises is a result
            yield Told("error", f"{type(error).__name__}: {error}", step["step"], f"{hook}")
            return
        self.collect(zip([*self.memory.pools, *buffers], [*pools, *handed], strict=True))
        yield self.compare(step, f"{hook}.y", self.arrays.take(y), read(want["y"], self.row_dtype))
        names = _BUFFERS[hook]
        for name, buffer, truth in zip(names, buffers, self.true_buffers(hook), strict=False):
            view = truth[:, : buffer.shape[1]] if hook == "decode" else truth
            if name in want:
                view[...] = read(want[name], "f32").astype(view.dtype)
            yield self.compare(step, f"{hook}.{name}", buffer, view)
        if differs(self.arrays.take(given), kept, "bits").any():
            yield Told("fail.touched", f"step {step['step']}: {hook} wrote its input zxBCdt", step["step"],
                       f"{hook}.zxBCdt")  # fmt: skip

    def entries(self, given: Mapping[str, Any]) -> list[Array]:
        """The intermediate buffers of a decode call with drafts, as many entries as tokens."""
        if not given["intermediates"]:
            return []
        count = len(given["zxBCdt"][0]) if given["zxBCdt"] else 1
        return [array[:, :count] for array in self.memory.entries]

    def true_buffers(self, hook: str) -> Pair:
        return self.truth.entries if hook == "decode" else self.truth.snapshots

    def collect(self, pairs: Any) -> None:
        """Bring back what lies on a device."""
        for array, tensor in pairs:
            if self.arrays.kind == "torch" and self.arrays.device != "cpu":
                array[...] = self.arrays.take(tensor)

    def context(
        self, step: Mapping[str, Any], layers: Sequence[Sequence[Any]], snapshots: Sequence[Any],
        entries: Sequence[Sequence[Any]] = (), rows: int = 0,
    ) -> Any:  # fmt: skip
        """A context with the attributes that hooks and mixins read, and no others; no class of ours."""
        decode, prefill = step.get("decode"), step.get("prefill")
        metadata: dict[str, Any] = {}
        for source in ([prefill["context"]] if prefill else []) + ([prefill["derived"]] if prefill and self.derived
                                                                    else []):  # fmt: skip
            for name, value in source.items():
                wide = name == "intermediate_chunk_indices"
                metadata[name] = self.arrays.give(np.array(value, np.int64 if wide else np.int32))
        if decode:
            metadata["batch_indices_decode"] = self.arrays.give(np.array(decode["batch_indices"], np.int64))
        real_decode, real = self.real_tokens(step)
        counts = np.array([real_decode, real - real_decode], np.int32)
        metadata["device_decode_prefill"] = self.arrays.give(counts)
        drafts = len(decode["zxBCdt"][0]) - 1 if decode and decode["intermediates"] else 0

        def states(number: int, intermediate: bool = False) -> Any:
            slab = (None, 0, None, 1)[number]
            assert slab is not None
            return (entries if intermediate else layers)[slab]

        return SimpleNamespace(
            mamba_metadata=SimpleNamespace(**metadata), num_speculative_tokens=drafts,
            mamba_slot_allocator=SimpleNamespace(intermediate_conv_out=snapshots[0], intermediate_ssm_out=snapshots[1]),
            padded_batch_dimensions=SimpleNamespace(
                token_count=rows, decode_req_count=len(decode["batch_indices"]) if decode else 0,
                prefill_req_count=len(prefill["context"]["batch_indices_prefill"]) if prefill else 0,
            ),
            padding_slice=slice(real, rows), mamba_states_cache=states, layer_map=(0, None, 1),
        )  # fmt: skip

    # One step through the mixin -----------------------------------------------------------------------------------

    def through_mixin(self, step: Mapping[str, Any], stacked: bool) -> Iterator[Told]:
        """All rows of a step in packed order: real decode rows, real prefill rows, padding of NaN, one row more."""
        layers = self.layers if stacked else self.layers[:1]
        self.edit(step["before"], layers)
        before = [[pool.copy() for pool in memory.pools] for memory in layers]
        if "decode" in step or "prefill" in step:
            yield from self.layer_steps(step, layers)
        for memory, pools in zip(layers[::-1], before[::-1], strict=True):
            yield from self.compare_pools(step, pools, memory)

    def layer_steps(self, step: Mapping[str, Any], layers: Sequence[Memory]) -> Iterator[Told]:
        """The step in every recurrent layer, one after the other."""
        hidden, wanted = self.packed_rows(step)
        for layer, memory in zip((1, 3), layers, strict=False):
            yield from self.layer_step(step, layer, memory, layers, hidden, wanted)

    def layer_step(
        self, step: Mapping[str, Any], layer: int, memory: Memory, layers: Sequence[Memory], hidden: Array,
        wanted: Array,
    ) -> Iterator[Told]:  # fmt: skip
        """One recurrent layer's step; the layers are copies of one mixer, so each must give the same."""
        self.hooks.layer_number = layer
        decode = step.get("decode")
        count = len(decode["zxBCdt"][0]) if decode and decode["intermediates"] else 0
        # a step without drafts hands no entries to its hook; a mixin that takes them all the same is seen to write them
        arrays = [[*m.pools, *(e[:, : count or None] for e in m.entries), *m.snapshots] for m in layers]
        given = [[self.arrays.give(array) for array in own] for own in arrays]
        own = given[layers.index(memory)]
        context = self.context(step, [g[:2] for g in given], own[4:], [g[2:4] for g in given], len(hidden))
        rows = hidden.copy()
        try:
            out, _ = self.hooks.ssm_dynamic_inference(self.arrays.give(rows), context)
        except Exception as error:  # whatever an implementation raises is a result
            yield Told("error", f"{type(error).__name__}: {error}", step["step"], "mixin")
            return
        for mine, theirs in zip(arrays, given, strict=True):
            self.collect(zip(mine, theirs, strict=True))
        yield self.compare(step, f"mixin.out, layer {layer}", self.arrays.take(out), wanted)
        if differs(rows, hidden, "bits").any():
            yield Told("fail.touched", f"step {step['step']}: hidden_states was written", step["step"], "mixin.in")
        for hook, buffers in (("decode", memory.entries), ("prefill", memory.snapshots)):
            for name, buffer, truth in zip(_BUFFERS[hook], buffers, self.true_buffers(hook), strict=True):
                want = step.get(hook, {}).get("expect", {}).get(name)
                if want is not None:
                    view = truth[:, :count] if hook == "decode" else truth
                    view[...] = read(want, "f32").astype(truth.dtype)
                yield self.compare(step, f"{hook}.{name}, layer {layer}", buffer, truth)

    def packed_rows(self, step: Mapping[str, Any]) -> tuple[Array, Array]:
        """Hidden rows `[T, 1, D]` of a whole step and what must come out, T as padding asks and one row more."""
        real_decode, real = self.real_tokens(step)
        parts: list[tuple[Array, Array]] = []
        least = 0
        for hook, count in (("decode", real_decode), ("prefill", real - real_decode)):
            if hook in step:
                rows, y = (read(v, self.row_dtype) for v in (step[hook]["zxBCdt"], step[hook]["expect"]["y"]))
                flat = rows.reshape(-1, 1, rows.shape[-1]), y.reshape(-1, 1, y.shape[-1])
                least = max(least, len(flat[0]) + (real_decode if hook == "prefill" else 0))
                parts.append((flat[0][:count], flat[1][:count]))
        total = least + 1
        hidden = filled((total, 1, parts[0][0].shape[-1]), "nan", self.row_dtype)
        wanted = filled((total, 1, parts[0][1].shape[-1]), 0, self.row_dtype)
        hidden[:real] = np.concatenate([rows for rows, _ in parts])
        wanted[:real] = np.concatenate([y for _, y in parts])
        return hidden, wanted

    @staticmethod
    def real_tokens(step: Mapping[str, Any]) -> tuple[int, int]:
        """Real decode tokens, and all real tokens."""
        decode, prefill = step.get("decode"), step.get("prefill")
        per_row = len(decode["zxBCdt"][0]) if decode and decode["zxBCdt"] else 0
        decoded = per_row * sum(slot >= 0 for slot in decode["batch_indices"]) if decode else 0
        return decoded, decoded + (prefill["context"]["cu_seqlens"][-1] if prefill else 0)

    # Comparing ----------------------------------------------------------------------------------------------------

    def edit(self, events: Sequence[Event], layers: Sequence[Memory]) -> None:
        for event in events:
            for memory in layers:
                self.edits(memory, event)

    def compare_pools(self, step: Mapping[str, Any], before: Sequence[Array], memory: Memory) -> Iterator[Told]:
        """Pools after the hooks, the bits of every slot that no row names, and pools after the edits."""
        named = set(step.get("decode", {}).get("batch_indices", []))
        named |= set(step.get("prefill", {}).get("context", {}).get("batch_indices_prefill", []))
        others = [slot for slot in range(len(before[0])) if slot not in named]
        for name, pool, old in zip(_POOLS, memory.pools, before, strict=True):
            if (bits(pool[others]) != bits(old[others])).any():
                slot = next(s for s in others if (bits(pool[s]) != bits(old[s])).any())
                yield Told("fail.touched", f"step {step['step']}: {name}[{slot}] was written and no row names it",
                           step["step"], f"pools_after_hooks.{name}", (slot,))  # fmt: skip
            want = read(step["pools_after_hooks"][name], memory.dtypes[0])
            yield self.compare(step, f"pools_after_hooks.{name}", pool, want)
        self.edit(step["after"], [memory])
        for name, pool in zip(_POOLS, memory.pools, strict=True):
            want = read(step["pools_after_step"][name], memory.dtypes[0])
            yield self.compare(step, f"pools_after_step.{name}", pool, want)

    def compare(self, step: Mapping[str, Any], name: str, got: Array, want: Array) -> Told:
        """Equal as numbers, NaN where NaN is expected; the first bad place in words."""
        if got.shape != want.shape:
            said = f"step {step['step']}: {name} has shape {list(got.shape)}, {list(want.shape)} expected"
            return Told("fail.shape", said, step["step"], name)
        bad = differs(got, want, "equal")
        if not bad.any():
            return Told("pass")
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        values = f"got {number(got[place])}, expected {number(want[place])}"
        more = f"; {int(bad.sum())} of {bad.size} elements" if bad.sum() > 1 else ""
        said = f"step {step['step']}: {name}[{', '.join(map(str, place))}]: {values}{more}"
        return Told("fail.value", said, step["step"], name, place)


_POOLS = ("conv_state", "ssm_state")
_BUFFERS = {
    "decode": ("intermediate_conv_state", "intermediate_ssm_state"),
    "prefill": ("intermediate_conv_out", "intermediate_ssm_out"),
}  # fmt: skip

__all__ = ["Arrays", "Memory", "Told", "edit", "filled", "nested", "read", "replay"]
