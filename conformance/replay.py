"""Replay a trace on someone's two hooks: edits are made here, every number is compared, the first bad place told.

Every hook is a call like that of an operation, made through `run`: in this process on an object with `ssm_decode` and
`ssm_prefill` (`replay`), or in the child of an adapter (`statescan.conformance.traces`). With `ssm_dynamic_inference`
and identity projections the same trace also runs through a mixin, or through a stack of its layers. Nothing of the
reference is needed. Order of judgement, first failure wins: the decode hook's outputs, its buffers, the prefill hook's
outputs, its buffers, inputs and unaddressed slots, pools after the hooks, pools after the edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import Call, Plan, Reply
from statescan.conformance.compare import Verdict, differs, judge_reply, shown
from statescan.conformance.hooks import ENTRIES, MIXIN, POOLS, SNAPSHOTS
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.transport import is_blank
from statescan.goldens.tensors import Array, bits, filled, from_nested

Trace = Mapping[str, Any]
Step = Mapping[str, Any]
Event = Mapping[str, Any]
Edit = Callable[[Any, Event], None]
Run = Callable[[Call, str], Reply]
Pair = tuple[Array, Array]
"""Window and state."""
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
Place = dict[str, "int | str"]

PASS = Verdict("pass")
BUFFERS: dict[str, tuple[str, ...]] = {"decode": ENTRIES, "prefill": SNAPSHOTS}
WIDE = ("batch_indices_decode", "intermediate_chunk_indices")
"""Arrays of a context that have 64 bits upstream."""


class Types(NamedTuple):
    """Element types of a replay: projected rows, outputs, the window and the state pool (their buffers follow)."""

    rows: str = "f32"
    out: str = "f32"
    conv: str = "f32"
    state: str = "f32"


F32 = Types()


def types_of(trace: Trace) -> Types:
    """The element types a trace is written in."""
    pool = trace["sizes"].get("pool_dtype", "f32")
    return Types(conv=pool, state=pool)


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
    def of(cls, trace: Trace, shapes: Shapes | None = None, types: Types | None = None) -> Memory:
        """Memory as a trace finds it: pools of `pool_fill`, buffers of `scratch_fill`."""
        sizes, shapes, types = trace["sizes"], shapes or slot_shapes(trace), types or types_of(trace)
        slots, drafts, snapshots = sizes["slots"], 1 + sizes.get("max_drafts", 0), sizes.get("max_snapshots", 0)
        names = (types.conv, types.state)
        fills = sizes.get("pool_fill", "nan"), sizes.get("scratch_fill", "nan")

        def pair(lead: tuple[int, ...], fill: Any) -> Pair:
            first, second = (filled((*lead, *shape), fill, name) for shape, name in zip(shapes, names, strict=True))
            return first, second

        return cls(pair((slots,), fills[0]), pair((slots, drafts), fills[1]), pair((snapshots,), fills[1]), names)


def slot_shapes(trace: Trace) -> Shapes:
    """Shapes of a window and of a state: those of what each request leaves."""
    alone = next(iter(trace["alone"].values()))
    return np.shape(alone["conv_state"]), np.shape(alone["ssm_state"])


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
# Who is where
# ---------------------------------------------------------------------------------------------------------------------


class Roster:
    """Which request a row, a slot or a snapshot belongs to, by the program of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.program = {step["step"]: step for step in trace.get("program", [])}
        self.owner: dict[int, str] = {}
        self.now: Step = {}

    def turn(self, step: Step) -> None:
        """Take note of who is admitted in a step; an owner is known until the next one comes."""
        self.now = self.program.get(step["step"], {})
        self.owner |= {given["slot"]: given["request"] for given in self.now.get("admit", [])}

    def row(self, hook: str, n: int) -> Place:
        """A row of one partition and its request; padding has none."""
        rows = self.now.get(hook, [])
        return {"request": rows[n]["request"], "row": n} if n < len(rows) else {"padding_row": n}

    def slot(self, slot: int) -> Place:
        """A slot and the request that holds it, or held it last."""
        return {"request": self.owner[slot], "slot": slot} if slot in self.owner else {"slot": slot}

    def snapshot(self, i: int) -> Place:
        """The request of a snapshot row."""
        order = [row["request"] for row in self.now.get("prefill", [])]
        wanted = sorted((order.index(given["request"]), given["position"]) for given in self.now.get("snapshot", []))
        return {"request": order[wanted[i][0]], "position": wanted[i][1]} if i < len(wanted) else {}


# ---------------------------------------------------------------------------------------------------------------------
# Replaying
# ---------------------------------------------------------------------------------------------------------------------


class Arrays(NamedTuple):
    """The implementation's kind of tensor ("torch", "numpy"), and where it lies."""

    kind: str = "torch"
    device: str = "cpu"


def replay(
    trace: Trace, mixer: Any, *, arrays: Arrays | None = None, derived: bool = True, through: str = "hooks",
    edits: Edit = edit, types: Types | None = None,
) -> Verdict:  # fmt: skip
    """Replay every step on a mixer in this process; the first failure, or `pass`."""
    return replay_calls(trace, on_object(mixer, arrays or Arrays()), derived=derived, through=through, edits=edits,
                        types=types)  # fmt: skip


def on_object(mixer: Any, arrays: Arrays) -> Run:
    """Calls of the hooks of an object."""
    adapter = Adapter("object", arrays=arrays.kind, device=arrays.device)
    adapter.built = mixer
    return lambda call, name: invoke(adapter, isolated(call))


def replay_calls(
    trace: Trace, run: Run, *, derived: bool = True, through: str = "hooks", edits: Edit = edit,
    types: Types | None = None,
) -> Verdict:  # fmt: skip
    """Replay every step, each hook a call through `run`; the first failure, or `pass`.

    `derived` False leaves out the arrays that follow from others. `through` is "hooks", "mixin" (rows of one step in
    packed order through `ssm_dynamic_inference`) or "stack" (two recurrent layers with an attention layer between).
    `edits` replaces the engine's edits, which is how a faulty engine is tried.
    """
    one = Replay(trace, run, derived, edits, types or types_of(trace))
    for step in trace["steps"]:
        one.roster.turn(step)
        for verdict in (one.through_hooks(step) if through == "hooks" else one.through_mixin(step, through == "stack")):
            if not verdict.passed:
                return verdict
    return PASS


@dataclass
class Replay:
    """One replay under way."""

    trace: Trace
    run: Run
    derived: bool = True
    edits: Edit = edit
    types: Types = F32

    def __post_init__(self) -> None:
        self.layers = [Memory.of(self.trace, types=self.types) for _ in range(2)]
        self.truth = Memory.of(self.trace, types=self.types)  # what every buffer must hold, by the trace
        self.roster = Roster(self.trace)
        state = ("head", "channel", "state_column") if self.trace["mixer"]["kind"] == "mamba2" else (
            "value_head", "key", "value")  # fmt: skip
        # a partition without a single row tells no width: that of the others is its own
        steps = [step[hook] for step in self.trace["steps"] for hook in BUFFERS if hook in step]
        pairs = {"zxBCdt": [given["zxBCdt"] for given in steps], "y": [given["expect"]["y"] for given in steps]}
        self.widths = {name: max((len(rows[0][0]) for rows in some if rows), default=0) for name, some in pairs.items()}
        self.axes = dict(zip((*POOLS, *ENTRIES, *SNAPSHOTS), (("channel", "column"), state) * 3, strict=True))

    # One step through the two hooks -------------------------------------------------------------------------------

    def through_hooks(self, step: Step) -> Iterator[Verdict]:
        """Edits, decode, prefill, edits."""
        memory = self.layers[0]
        self.edit(step["before"], [memory])
        before = [pool.copy() for pool in memory.pools]
        for hook, buffers in (("decode", self.entries(step, memory)), ("prefill", memory.snapshots)):
            if hook in step:
                yield from self.call_hook(step, hook, memory, buffers)
        yield from self.compare_pools(step, before, memory)

    def call_hook(self, step: Step, hook: str, memory: Memory, buffers: Sequence[Array]) -> Iterator[Verdict]:
        """One hook: called, and its outputs, buffers and inputs compared."""
        changed = dict(zip((*POOLS, *BUFFERS[hook]), (*memory.pools, *buffers), strict=False))
        rows, y = self.rows(step, hook)
        tensors = {"zxBCdt": rows, **changed}
        args: dict[str, Any] = {}
        if hook == "decode":
            tensors["batch_indices"] = np.array(step[hook]["batch_indices"], np.int64)
        else:
            tensors |= self.metadata(step)
            args = self.sizes(step, len(rows), 1)
        call = Call(f"ssm_{hook}", args, tensors, (Plan("y", self.types.out, y.shape),))
        reply, kept = self.send(step, hook, call, changed)
        yield self.early(step, hook, reply)
        yield self.compare(step, f"{hook}.y", reply.outputs["y"], y)
        yield from self.compare_buffers(step, hook, buffers)
        yield from self.compare_inputs(step, hook, reply, kept)

    def rows(self, step: Step, hook: str) -> tuple[Array, Array]:
        """What a hook is given and must return: `[N, J, D]` in decode, `[T, 1, D]` in prefill."""
        rows = from_nested(step[hook]["zxBCdt"], self.types.rows)
        y = from_nested(step[hook]["expect"]["y"], self.types.out)
        if rows.size:
            return rows, y
        return rows.reshape(0, 1, self.widths["zxBCdt"]), y.reshape(0, 1, self.widths["y"])

    def send(self, step: Step, what: str, call: Call, changed: Mapping[str, Array]) -> tuple[Reply, dict[str, Array]]:
        """Make a call, bring what it changed into memory; the reply, and what its inputs were."""
        kept = {name: array.copy() for name, array in call.tensors.items() if name not in changed}
        reply = self.run(call, f"step {step['step']}, {what}")
        for name, array in changed.items():
            after = reply.outputs.get(f"after.{name}")
            if after is not None and after is not array:
                array[...] = after
        return reply, kept

    def early(self, step: Step, what: str, reply: Reply) -> Verdict:
        """The failure that a reply is by itself, else a pass."""
        found = judge_reply(reply)
        if found is None:
            return PASS
        return Verdict(found.status, f"step {step['step']}: {what}: {found.message}", what, {"step": step["step"]})

    def entries(self, step: Step, memory: Memory) -> tuple[Array, ...]:
        """The intermediate buffers of a decode call with drafts, as many entries as tokens."""
        count = self.drafts(step)
        return tuple(array[:, : count + 1] for array in memory.entries) if count is not None else ()

    @staticmethod
    def drafts(step: Step) -> int | None:
        """Drafts a row of a step whose decode hook is given intermediates; None where it is given none."""
        decode = step.get("decode")
        if not decode or not decode["intermediates"]:
            return None
        return len(decode["zxBCdt"][0]) - 1 if decode["zxBCdt"] else 0

    # What the hooks read of a context -----------------------------------------------------------------------------

    def metadata(self, step: Step) -> dict[str, Array]:
        """The arrays of a context, those that follow from others too unless they are left out."""
        decode, prefill = step.get("decode"), step.get("prefill")
        found: dict[str, Any] = {}
        if prefill:
            found |= {**prefill["context"], **(prefill["derived"] if self.derived else {})}
        if decode:
            found["batch_indices_decode"] = decode["batch_indices"]
        real_decode, real = self.real_tokens(step)
        found["device_decode_prefill"] = [real_decode, real - real_decode]
        return {name: np.array(value, np.int64 if name in WIDE else np.int32) for name, value in found.items()}

    def sizes(self, step: Step, rows: int, layers: int) -> dict[str, Any]:
        """The padded sizes of a step, and where its layers are: two recurrent ones with another between."""
        decode, prefill = step.get("decode"), step.get("prefill")
        return {
            "token_count": rows, "decode_req_count": len(decode["batch_indices"]) if decode else 0,
            "prefill_req_count": len(prefill["context"]["batch_indices_prefill"]) if prefill else 0,
            "num_speculative_tokens": self.drafts(step) or 0, "padding": [self.real_tokens(step)[1], rows],
            "layers": layers, "layer_map": [0, None, 1],
        }  # fmt: skip

    # One step through the mixin -----------------------------------------------------------------------------------

    def through_mixin(self, step: Step, stacked: bool) -> Iterator[Verdict]:
        """All rows of a step in packed order: real decode rows, real prefill rows, padding of NaN, one row more."""
        layers = self.layers if stacked else self.layers[:1]
        self.edit(step["before"], layers)
        before = [[pool.copy() for pool in memory.pools] for memory in layers]
        if "decode" in step or "prefill" in step:
            hidden, wanted = self.packed_rows(step)
            for layer in range(len(layers)):
                yield from self.call_layer(step, layer, layers, hidden, wanted)
        for memory, pools in zip(layers[::-1], before[::-1], strict=True):
            yield from self.compare_pools(step, pools, memory)

    def call_layer(
        self, step: Step, layer: int, layers: Sequence[Memory], hidden: Array, wanted: Array
    ) -> Iterator[Verdict]:
        """One recurrent layer's step; the layers are copies of one mixer, so each must give the same."""
        number, own = 1 + 2 * layer, layers[layer]
        changed = dict(zip(SNAPSHOTS, own.snapshots, strict=True))
        for i, memory in enumerate(layers):
            # a step without drafts hands no entries to its hook: a mixin that takes them all the same is seen
            given = (*memory.pools, *(self.entries(step, memory) or memory.entries))
            changed |= {f"{name}.{i}": array for name, array in zip((*POOLS, *ENTRIES), given, strict=True)}
        tensors = {"hidden_states": hidden.copy(), **changed, **self.metadata(step)}
        args = {**self.sizes(step, len(hidden), len(layers)), "layer_number": number}
        call = Call(MIXIN, args, tensors, (Plan("out", self.types.out, wanted.shape),))
        reply, kept = self.send(step, "mixin", call, changed)
        yield self.early(step, "mixin", reply)
        yield self.compare(step, f"mixin.out, layer {number}", reply.outputs["out"], wanted)
        yield from self.compare_inputs(step, "mixin", reply, kept)
        for hook, buffers in (("decode", own.entries), ("prefill", own.snapshots)):
            yield from self.compare_buffers(step, hook, buffers, f", layer {number}")

    def packed_rows(self, step: Step) -> tuple[Array, Array]:
        """Hidden rows `[T, 1, D]` of a whole step and what must come out, T as padding asks and one row more."""
        real_decode, real = self.real_tokens(step)
        parts: list[tuple[Array, Array]] = []
        least = 0
        for hook, count in (("decode", real_decode), ("prefill", real - real_decode)):
            if hook in step:
                rows, y = self.rows(step, hook)
                flat = rows.reshape(-1, 1, rows.shape[-1]), y.reshape(-1, 1, y.shape[-1])
                least = max(least, len(flat[0]) + (real_decode if hook == "prefill" else 0))
                parts.append((flat[0][:count], flat[1][:count]))
        total = least + 1
        hidden = filled((total, 1, parts[0][0].shape[-1]), "nan", self.types.rows)
        wanted = filled((total, 1, parts[0][1].shape[-1]), 0, self.types.out)
        hidden[:real] = np.concatenate([rows for rows, _ in parts])
        wanted[:real] = np.concatenate([y for _, y in parts])
        return hidden, wanted

    @staticmethod
    def real_tokens(step: Step) -> tuple[int, int]:
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

    def compare_buffers(self, step: Step, hook: str, buffers: Sequence[Array], more: str = "") -> Iterator[Verdict]:
        """Entries or snapshots whole: what the step wrote, and what it must have left alone."""
        truths = self.truth.entries if hook == "decode" else self.truth.snapshots
        for name, buffer, truth in zip(BUFFERS[hook], buffers, truths, strict=False):
            want = step.get(hook, {}).get("expect", {}).get(name)
            if want is not None:
                whole = from_nested(want, self.types.conv if name == BUFFERS[hook][0] else self.types.state)
                (truth[:, : whole.shape[1]] if hook == "decode" else truth)[...] = whole
            yield self.compare(step, f"{hook}.{name}{more}", buffer, truth[:, : buffer.shape[1]])

    def compare_inputs(self, step: Step, what: str, reply: Reply, kept: Mapping[str, Array]) -> Iterator[Verdict]:
        """What a call was only to read is as it was."""
        for name, array in kept.items():
            after = reply.outputs.get(f"after.{name}")
            if after is not None and differs(after, array, "bits").any():
                said = f"step {step['step']}: {what} wrote its input {name}"
                yield Verdict("fail.touched", said, f"{what}.{name}", {"step": step["step"]})

    def compare_pools(self, step: Step, before: Sequence[Array], memory: Memory) -> Iterator[Verdict]:
        """Pools after the hooks, the bits of every slot that no row names, and pools after the edits."""
        named = set(step.get("decode", {}).get("batch_indices", []))
        named |= set(step.get("prefill", {}).get("context", {}).get("batch_indices_prefill", []))
        others = [slot for slot in range(len(before[0])) if slot not in named]
        for which, (name, pool, old) in enumerate(zip(POOLS, memory.pools, before, strict=True)):
            if (bits(pool[others]) != bits(old[others])).any():
                slot = next(s for s in others if (bits(pool[s]) != bits(old[s])).any())
                said = f"step {step['step']}: {name}[{slot}] was written and no row names it"
                place = {"step": step["step"], **self.roster.slot(slot)}
                yield Verdict("fail.touched", said, f"pools_after_hooks.{name}", place)
            want = from_nested(step["pools_after_hooks"][name], memory.dtypes[which])
            yield self.compare(step, f"pools_after_hooks.{name}", pool, want)
        self.edit(step["after"], [memory])
        for which, (name, pool) in enumerate(zip(POOLS, memory.pools, strict=True)):
            want = from_nested(step["pools_after_step"][name], memory.dtypes[which])
            yield self.compare(step, f"pools_after_step.{name}", pool, want)

    def compare(self, step: Step, name: str, got: Array, want: Array) -> Verdict:
        """Equal as numbers, NaN where NaN is expected; the first bad place in words."""
        bad = differs(got, want, "equal")
        if not bad.any():
            return PASS
        wild = np.isfinite(want.astype(np.float64)) & ~np.isfinite(got.astype(np.float64))
        blank = is_blank(got)
        worst = {"fail.nonfinite": wild & ~blank, "fail.unwritten": bad & blank, "fail.value": bad}
        status, spots = next((status, spots) for status, spots in worst.items() if spots.any())
        index = tuple(int(i) for i in np.argwhere(spots)[0])
        place = {"step": step["step"], **self.locate(step, name, index)}
        where = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in place.items() if key != "step")
        more = f"; {int(bad.sum())} of {bad.size} elements" if bad.sum() > 1 else ""
        spot = f"{name}[{', '.join(map(str, index))}]" + (f" ({where})" if where else "")
        said = f"step {step['step']}: {spot}: got {shown(got[index])}, expected {shown(want[index])}{more}"
        return Verdict(status, said, name, place)

    def locate(self, step: Step, field: str, index: tuple[int, ...]) -> Place:
        """An index in words: the request, its row, token, slot, head, channel."""
        hook, _, name = field.partition(",")[0].partition(".")
        if name == "out":
            return self.locate_packed(step, index)
        if name == "y" and hook == "decode":
            return {**self.roster.row("decode", index[0]), "token": index[1], "channel": index[2]}
        if name == "y":
            return {**self.locate_piece(step, index[0]), "channel": index[2]}
        lead: Place
        if name in SNAPSHOTS:
            lead = {**self.roster.snapshot(index[0]), "snapshot": index[0]}
        else:
            lead = {**self.roster.slot(index[0]), **({"entry": index[1]} if name in ENTRIES else {})}
        axes = self.axes[name]
        return {**lead, **dict(zip(axes, index[len(index) - len(axes) :], strict=True))}

    def locate_piece(self, step: Step, token: int) -> Place:
        """A row of the prefill partition."""
        offsets = step["prefill"]["context"]["cu_seqlens"]
        for n, (start, end) in enumerate(pairwise(offsets)):
            if start <= token < end:
                return {**self.roster.row("prefill", n), "token": token, "offset": token - start}
        return {"token": token, "past_the_last_offset": offsets[-1]}

    def locate_packed(self, step: Step, index: tuple[int, ...]) -> Place:
        """A row of a whole step, in packed order."""
        decoded, real = self.real_tokens(step)
        row: Place = {"padding_row": index[0]}
        if index[0] < decoded:
            count = len(step["decode"]["zxBCdt"][0])
            row = {**self.roster.row("decode", index[0] // count), "token": index[0] % count}
        elif index[0] < real:
            row = self.locate_piece(step, index[0] - decoded)
        return {**row, "channel": index[2]}


__all__ = [
    "Arrays", "Memory", "Replay", "Types", "edit", "on_object", "replay", "replay_calls", "types_of",
]  # fmt: skip
