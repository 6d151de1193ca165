"""A trace from what its author writes: the program becomes steps, and every number comes from the request run alone.

The meaning of a trace is that packing, pieces, drafts, padding and slots change nothing. So the expectations are made
without any of these: the window, the state and the output after p tokens of a request are those of the second
definition on the first p tokens, from zeros. The reference's hooks must then give the same (`tests/test_traces.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from statescan.conformance.compare import Verdict
from statescan.conformance.mutants import step as models
from statescan.conformance.replay import Arrays, Memory, edit, on_object, replay
from statescan.conformance.replay_toy import replay_toy
from statescan.goldens.store import load_faults
from statescan.goldens.tensors import Array, narrow, nested
from statescan.reference.host.metadata import PREFILL_NAMES, decode_metadata, prefill_metadata
from statescan.reference.host.mixer_config import MixerConfig, read_config
from statescan.reference.host.slots import SlotPool
from statescan.reference.second.conv import causal_conv1d

Trace = dict[str, Any]
Event = dict[str, Any]
Point = tuple[Array, Array, Array]
"""Window, state, and the output of the last token, at one position."""

HOOKS_READ = ("cu_seqlens", "batch_indices_prefill", "intermediate_abs_positions", "intermediate_real_count")
"""The four arrays that a prefill hook needs; the others follow from them and the chunk length."""


@dataclass
class Request:
    """A request under way: its tokens, how many are done, its slot, whether it waits."""

    tokens: Sequence[int]
    done: int = 0
    slot: int | None = None
    paused: bool = False


@dataclass
class Row:
    """One request's tokens in a step: position before them, the tokens, the number of drafts accepted or None."""

    name: str
    slot: int
    before: list[int]
    tokens: list[int]
    accept: int | None = None


class Alone:
    """A request by itself: what stands after any of its tokens, by the second definition from zeros."""

    def __init__(self, trace: Mapping[str, Any]) -> None:
        self.described = trace["mixer"]
        self.config: MixerConfig = read_config(self.described)
        self.table = token_rows(trace)
        self.after = lru_cache(maxsize=None)(self._after)

    def _after(self, tokens: tuple[int, ...]) -> Point:
        c = self.config
        if not tokens:
            return np.zeros(c.conv_shape), np.zeros(c.state_shape), np.zeros(c.d_inner)
        rows = np.array([self.table[token] for token in tokens])[None]
        parts, cu = c.split(rows), np.array([0, len(tokens)])
        weight, bias = np.array(self.described["conv_weight"], np.float64), self.parameter("conv_bias")
        mixed, window = causal_conv1d(parts["conv"], weight, bias, None, cu, activation=None)
        convolved, start = {}, 0
        for name, width in (part for part in c.parts if part[0] in c.conv_parts):
            convolved[name], start = mixed[..., start : start + width], start + width
        o, state = self._recur({**parts, **convolved}, cu)
        return window[0], state[0], o[0, -1].ravel()

    def _recur(self, parts: Mapping[str, Array], cu: Array) -> tuple[Array, Array]:
        c, n = self.config, int(cu[-1])
        module = import_module(f"statescan.reference.second.{'ssd' if c.kind == 'mamba2' else 'delta'}")
        operation = getattr(module, c.operation)

        def heads(name: str, count: int, copies: int = 1) -> Array:
            return parts[name].reshape(1, n * copies, count, -1)

        if c.kind == "mamba2":
            found = operation(
                heads("x", c.heads), parts["dt"], self.parameter("A"), heads("B", c.groups), heads("C", c.groups),
                self.parameter("D"), None, self.parameter("dt_bias"), None, cu, dt_softplus=c.dt_softplus,
                dt_limit=c.dt_limit, output_final_state=True,
            )  # fmt: skip
        elif c.kind == "gdp":
            m = c.num_householder
            found = operation(
                heads("Q", c.heads), heads("K", c.heads, m), heads("V", c.hv, m), parts["a"],
                parts["b"].reshape(1, n * m, c.hv), cu, num_householder=m, scale=c.scale, output_final_state=True,
            )  # fmt: skip
        else:
            gate = parts["f"].reshape(1, n, c.hv, c.key_dim) if c.kind == "kda" else parts["alpha"]
            beta = parts["b" if c.kind == "kda" else "beta"]
            found = operation(heads("q", c.heads), heads("k", c.heads), heads("v", c.hv), gate, beta, cu,
                              scale=c.scale, output_final_state=True)  # fmt: skip
        o, state = found
        return o, state

    def parameter(self, name: str) -> Array | None:
        """A parameter of the description, None where it has none."""
        value = self.described.get(name)
        return None if value is None else np.array(value, np.float64)


def token_rows(trace: Mapping[str, Any]) -> dict[int, Array]:
    """The projected row of every token: from `rows`, one a token, or from the requests' template for digits."""
    if "rows" in trace:
        return {n: np.array(row, np.float64) for n, row in enumerate(trace["rows"])}
    (template,) = {request["row"] for request in trace["requests"].values()}
    words = template.strip("[] ").split(",")
    used = {0} | {t for request in trace["requests"].values() for t in request["tokens"]}
    used |= {t for step in trace["program"] for row in step.get("decode", []) for t in row.get("drafts", [])}
    return {t: np.array([t if word.strip() == "token" else float(word) for word in words]) for t in used}


@dataclass
class Engine:
    """Runs a program: which request has which slot, what is done before and after the hooks of each step."""

    trace: Trace
    requests: dict[str, Request] = field(default_factory=dict)
    blocks: dict[Any, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alone = Alone(self.trace)
        sizes = self.trace["sizes"]
        self.pool = SlotPool(sizes["slots"])
        config = self.alone.config
        self.memory = Memory.of(self.trace, (config.conv_shape, config.state_shape))
        self.requests = {name: Request(spec["tokens"]) for name, spec in self.trace["requests"].items()}
        self.saved: dict[str, list[int]] = {}

    def run(self) -> list[Trace]:
        """The steps of the program, with all that each hook is given and must produce."""
        return [self.step(step) for step in self.trace["program"]]

    def step(self, step: Mapping[str, Any]) -> Trace:
        """One step: edits before, rows of both partitions, what they leave, edits after."""
        before = self.edits_before(step)
        for event in before:
            edit(self.memory, event)
        decode, prefill = self.decode_rows(step), self.prefill_rows(step)
        made: Trace = {"step": step["step"], "before": before}
        if decode or "decode_pad_to" in step:
            made["decode"] = self.describe_decode(step, decode)
        if prefill or "prefill_pad_to" in step:
            made["prefill"] = self.describe_prefill(step, prefill)
        made["pools_after_hooks"] = self.pools()
        made["after"] = self.edits_after(step, decode, prefill)
        for event in made["after"]:
            edit(self.memory, event)
        made["pools_after_step"] = self.pools()
        return made

    def edits_before(self, step: Mapping[str, Any]) -> list[Event]:
        """Admissions: a fresh slot is zeroed, one with a prefix restored; what was saved comes back."""
        events: list[Event] = [{"op": "poison", "slot": slot} for slot in step.get("poison", [])]
        for given in step.get("admit", []):
            request = self.requests[given["request"]]
            request.slot = self.pool.take(given["slot"])
            if "load" in given:
                request.done = len(self.saved[given["load"]])
                events.append({"op": "load", "slot": request.slot, "name": given["load"]})
                continue
            request.done = 0
            kept = self.blocks.get(given.get("restore_block"))
            if kept is not None and kept == list(request.tokens[: given["position"]]):
                request.done = given["position"]
                events.append({"op": "restore", "slot": request.slot, "block": given["restore_block"]})
            else:
                events.append({"op": "zero", "slot": request.slot})
        for name in step.get("resume", []):
            self.requests[name].paused = False
        return events

    def decode_rows(self, step: Mapping[str, Any]) -> list[Row]:
        """Decode rows in batch order; where one has drafts all have the same number of tokens, with placeholders."""
        rows = []
        most = max((len(given.get("drafts", [])) for given in step.get("decode", [])), default=0)
        for given in step.get("decode", []):
            request, (start, end) = self.live(given["request"]), given["tokens"]
            self.check_position(given["request"], start)
            fed = [*request.tokens[start : start + 1], *given.get("drafts", [])]
            fed += [0] * (1 + most - len(fed))
            accept = given.get("accept", 0) if most else None
            taken = 1 + (accept or 0)
            if end != start + 1 or list(request.tokens[start : start + taken]) != fed[:taken]:
                raise ValueError(f"step {step['step']}: {given} does not accept the request's own tokens")
            rows.append(Row(given["request"], self.slot(given["request"]), list(request.tokens[:start]), fed, accept))
        return rows

    def prefill_rows(self, step: Mapping[str, Any]) -> list[Row]:
        """Prefill rows in batch order."""
        rows = []
        for given in step.get("prefill", []):
            request, (start, end) = self.live(given["request"]), given["tokens"]
            self.check_position(given["request"], start)
            rows.append(Row(given["request"], self.slot(given["request"]), list(request.tokens[:start]),
                            list(request.tokens[start:end])))  # fmt: skip
        return rows

    def live(self, name: str) -> Request:
        """A request that holds a slot and does not wait."""
        request = self.requests[name]
        if request.slot is None or request.paused:
            raise ValueError(f"{name} is not running")
        return request

    def slot(self, name: str) -> int:
        """The slot of a running request."""
        slot = self.requests[name].slot
        assert slot is not None
        return slot

    def check_position(self, name: str, start: int) -> None:
        """Tokens are run once each, in order: nothing is skipped without the state at that position (SNAP-2)."""
        if self.requests[name].done != start:
            raise ValueError(f"{name} is at {self.requests[name].done}, the program says {start}")

    def describe_decode(self, step: Mapping[str, Any], rows: Sequence[Row]) -> Trace:
        """What `ssm_decode` is given and must produce; the pools and buffers as it leaves them."""
        count = max((len(row.tokens) for row in rows), default=1)
        padded = step.get("decode_pad_to", len(rows))
        given = np.full((padded, count, self.alone.config.d_proj), np.nan)
        y = np.zeros((padded, count, self.alone.config.d_inner))
        drafts = any(row.accept is not None for row in rows)
        for n, row in enumerate(rows):
            for j, token in enumerate(row.tokens):
                given[n, j] = self.alone.table[token]
                window, state, y[n, j] = self.alone.after((*row.before, *row.tokens[: j + 1]))
                if drafts:
                    self.put(self.memory.entries, (row.slot, j), window, state)
            self.put(self.memory.pools, (row.slot,), window, state)
        made: Trace = {
            "zxBCdt": nested(given), "batch_indices": decode_metadata([row.slot for row in rows], padded).tolist(),
            "intermediates": drafts, "expect": {"y": nested(y)},
        }  # fmt: skip
        if drafts:
            names = ("intermediate_conv_state", "intermediate_ssm_state")
            made["expect"] |= dict(zip(names, (nested(a[:, :count]) for a in self.memory.entries), strict=True))
        return made

    def describe_prefill(self, step: Mapping[str, Any], rows: Sequence[Row]) -> Trace:
        """What `ssm_prefill` is given and must produce; the pools and snapshot buffers as it leaves them."""
        padded, total = step.get("prefill_pad_to", len(rows)), sum(len(row.tokens) for row in rows)
        tokens = step.get("token_pad_to", total)
        given = np.full((tokens, 1, self.alone.config.d_proj), np.nan)
        y, at = np.zeros((tokens, 1, self.alone.config.d_inner)), 0
        for row in rows:
            for j, token in enumerate(row.tokens):
                given[at, 0], at = self.alone.table[token], at + 1
                y[at - 1, 0] = self.alone.after((*row.before, *row.tokens[: j + 1]))[2]
            self.put(self.memory.pools, (row.slot,), *self.alone.after((*row.before, *row.tokens))[:2])
        wanted = self.snapshots(step, rows)
        for i, (n, offset) in enumerate(wanted):
            point = self.alone.after((*rows[n].before, *rows[n].tokens[:offset]))
            self.put(self.memory.snapshots, (i,), *point[:2])
        arrays = self.arrays(step, rows, wanted, padded, tokens)
        made: Trace = {
            "zxBCdt": nested(given), "context": {name: arrays[name] for name in HOOKS_READ},
            "derived": {name: value for name, value in arrays.items() if name not in HOOKS_READ},
            "expect": {"y": nested(y)},
        }  # fmt: skip
        if wanted:
            names = ("intermediate_conv_out", "intermediate_ssm_out")
            made["expect"] |= dict(zip(names, (nested(a) for a in self.memory.snapshots), strict=True))
        return made

    def snapshots(self, step: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[int, int]]:
        """(row, offset in its piece) of every snapshot of a step, ascending."""
        names = [row.name for row in rows]
        found = [(names.index(given["request"]), given["position"] - len(rows[names.index(given["request"])].before))
                 for given in step.get("snapshot", [])]  # fmt: skip
        return sorted(found)

    def arrays(
        self, step: Mapping[str, Any], rows: Sequence[Row], wanted: Sequence[tuple[int, int]], padded: int, tokens: int
    ) -> Trace:
        """Every array of the prefill partition, as lists."""
        c = self.alone.config
        decoded = sum(len(row.tokens) for row in self.decode_rows(step))
        arrays = prefill_metadata(
            [len(row.tokens) for row in rows], [row.slot for row in rows], [n for n, _ in wanted],
            [offset for _, offset in wanted], padded, tokens, c.ssm_inference_chunk_size, decoded,
            self.trace["sizes"].get("max_snapshots", 0), c.d_conv, c.num_householder,
        )  # fmt: skip
        return dict(zip(PREFILL_NAMES, (array.tolist() for array in arrays), strict=True))

    def edits_after(self, step: Mapping[str, Any], decode: Sequence[Row], prefill: Sequence[Row]) -> list[Event]:
        """Commits, rollbacks, moves, off-loads, then who leaves; the book of requests moves on with them."""
        events: list[Event] = []
        wanted, names = self.snapshots(step, prefill), [row.name for row in prefill]
        for given in step.get("commit", []):
            row = prefill[names.index(given["request"])]
            source = wanted.index((names.index(given["request"]), given["position"] - len(row.before)))
            room = self.trace["sizes"].get("blocks")
            kept = room is None or given["block"] in self.blocks or len(self.blocks) < room
            events.append({"op": "commit", "from": source, "block": given["block"], **({} if kept else {"kept": kept})})
            if kept:
                self.blocks[given["block"]] = [*row.before, *row.tokens][: given["position"]]
        for row in decode:
            if row.accept is not None:
                events.append({"op": "rollback", "slot": row.slot, "entry": row.accept})
            self.requests[row.name].done += 1 + (row.accept or 0)
        for row in prefill:
            self.requests[row.name].done += len(row.tokens)
        events += [{"op": "move", **given} for given in step.get("move", [])]
        for given in step.get("save", []):
            request = self.requests[given["request"]]
            self.saved[given["name"]] = list(request.tokens[: request.done])
            events += [{"op": "save", "slot": request.slot, "name": given["name"]}, self.leave(given["request"])]
        for block in step.get("drop", []):
            del self.blocks[block]
            events.append({"op": "drop", "block": block})
        for name in step.get("pause", []):
            self.requests[name].paused = True
        for name in step.get("evict", []):
            events.append(self.leave(name))
            self.requests[name].done, self.requests[name].paused = 0, False
        return events + [self.leave(name) for name in step.get("finish", [])]

    def leave(self, name: str) -> Event:
        """Give a request's slot back; what it holds stays there."""
        slot = self.slot(name)
        self.pool.release(slot)
        self.requests[name].slot = None
        return {"op": "free", "slot": slot}

    def put(self, arrays: Sequence[Array], place: tuple[int, ...], *values: Array) -> None:
        """Store window and state; a number that the pool's type cannot hold is no exact story."""
        for array, value, name in zip(arrays, values, self.memory.dtypes, strict=True):
            array[place] = narrow(value, name)

    def pools(self) -> Trace:
        """Both pools, whole."""
        return dict(zip(("conv_state", "ssm_state"), (nested(a) for a in self.memory.pools), strict=True))


def derive_trace(trace: Mapping[str, Any]) -> Trace:
    """The trace with its steps and with each request alone; what the author wrote is kept as it is."""
    made: Trace = {"format": "statescan.trace/1", "rules": 1, **trace, "class": "exact"}
    engine = Engine(made)
    made["steps"] = engine.run()
    made["alone"] = {name: describe_alone(engine, name) for name in made["requests"]}
    made["provenance"] = {"second": "closed form", "generator": 1}
    return made


def describe_alone(engine: Engine, name: str) -> Trace:
    """A request by itself: its outputs, and what it leaves in its slot."""
    request = engine.requests[name]
    reached = max(request.done, len(request.tokens))
    tokens = tuple(request.tokens[:reached])
    window, state, _ = engine.alone.after(tokens)
    outputs = np.array([engine.alone.after(tokens[: p + 1])[2] for p in range(reached)])
    y = outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs
    return {"y": nested(y), "conv_state": nested(window), "ssm_state": nested(state)}


def trace_kills(trace: Mapping[str, Any]) -> list[str]:
    """The faults of hooks, mixin and engine that a trace catches, while the model without one passes it."""
    right = replay_model(trace, None)
    if right is not None:
        raise RuntimeError(f"{trace['id']}: the model fails it: {right.message}")
    found = []
    for fault in models.FAULTS:
        told = replay_model(trace, fault)
        raises = bool(load_faults().get(fault, {}).get("raises"))  # an exception is a kill only where it is the fault
        if told is not None and (told.status.startswith("fail.") or (raises and told.status == "error")):
            found.append(fault)
    return found


def replay_model(trace: Mapping[str, Any], fault: str | None) -> Verdict | None:
    """The first failure of the model with a fault, by its hooks and then through a stack; None where it passes."""
    numpy = Arrays("numpy")
    if trace["mixer"]["kind"] == "toy":
        mixer = models.ModelMixer(trace["mixer"], models.build(fault))
        told = replay_toy(trace, on_object(mixer, numpy))
        return None if told.passed else told
    for through in ("hooks", "stack"):
        operations = models.build(fault)
        mixer = models.ModelMixer(trace["mixer"], operations)
        told = replay(trace, mixer, arrays=numpy, through=through, edits=operations["engine.edit"])
        if not told.passed:
            return told
    return None


__all__ = [
    "Alone", "Engine", "derive_trace", "describe_alone", "replay_model", "token_rows", "trace_kills",
]  # fmt: skip
