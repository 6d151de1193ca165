"""From a vector and a claim to calls: what is applicable, in which element types, and what each call must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from statescan.conformance.calls import Array, Call, Gradient, Reply, in_place, plan_results, strided
from statescan.conformance.compare import (
    Expected,
    Precision,
    Verdict,
    differs,
    judge,
    judge_reject,
    judge_reply,
    mismatch,
)
from statescan.conformance.lifts import Story, fit_limits, stretches
from statescan.conformance.schedules import judge as judge_schedule
from statescan.goldens.generator import values
from statescan.goldens.store import FormatError
from statescan.goldens.tensors import NAMES, decode, load_blob, narrow
from statescan.spec.contract import FLOAT_TYPES, OPERAND_BITS, OPERATIONS

Vector = Mapping[str, Any]
Capability = Mapping[str, Any]
Run = Callable[[Call, str], Reply]


@dataclass(frozen=True)
class Case:
    """A vector made ready for one implementation: the story in its element types, its claims, and what was lifted.

    `variants` are the same case with its tokens at other places of the implementation's chunks. `short_windows` says
    that another operation of a relation keeps no oldest window column.
    """

    vector: Vector
    story: Story
    capability: Capability
    declared: Mapping[str, str] = field(default_factory=dict)
    lift: str = ""
    variants: tuple[Case, ...] = ()
    short_windows: bool = False

    @property
    def precision(self) -> Precision:
        pools = [NAMES[self.story.tensors[name].dtype] for name in in_place(self.story.op, self.story.tensors)]
        return Precision(self.capability.get("operand", "f32"), pools[0] if pools else "f32")


@dataclass(frozen=True)
class Missing:
    """Why a vector does not apply: the first word that no claim covers."""

    word: str


ANYTHING: Capability = {"features": None, "dtypes": [], "operand": "f64", "limits": {}}
"""Claims of a model of our own: whatever a vector needs."""


def tell(vector: Vector, corpus: Mapping[str, Vector]) -> Story:
    """Decode a vector: its call, its tensors and what must come out; a relation takes those of its base."""
    source = corpus[vector["base"]] if "base" in vector else vector
    seed = int(vector.get("seed", source.get("seed", 0)))
    specs = {**source.get("inputs", {}), **(vector.get("inputs", {}) if source is not vector else {})}
    tensors = {name: decode(spec, seed) for name, spec in specs.items()}
    expect = {} if vector["class"] in ("relation", "reject") else {
        name: _expected(spec, seed, NAMES[tensors[name].dtype] if name in tensors else None)
        for name, spec in vector.get("expect", {}).items()
    }  # fmt: skip
    grad = _gradient(vector.get("grad"), seed)
    args = {**source.get("args", {}), **vector.get("args", {})}
    return Story(vector["op"], args, tensors, expect, grad, vector.get("installed", {}))


def tell_outside(vector: Vector, corpus: Mapping[str, Vector]) -> Story:
    """The story of a vector that someone else wrote; FormatError where its numbers make none."""
    try:
        return tell(vector, corpus)
    except (ValueError, ArithmeticError, LookupError, TypeError, OSError) as error:
        raise FormatError(f"{vector['id']}: {type(error).__name__}: {str(error)[:300]}") from error


def prepare(vector: Vector, corpus: Mapping[str, Vector], claims: Sequence[Capability]) -> Case | Missing:
    """The vector under the first claim that covers it, lifted and retyped to fit; else the first missing word."""
    needs = vector.get("needs", {"op": vector["op"], "features": []})
    own = [claim for claim in claims if claim["op"] == needs["op"]]
    if not own:
        return Missing(needs["op"])
    missing = Missing("")
    story, short = tell(vector, corpus), False
    for op, words in needs.get("also", {}).items():
        others = [claim for claim in claims if claim["op"] == op]
        lacking = [missing_feature({"features": words}, claim) for claim in others]
        if not lacking or all(lacking):
            return Missing(lacking[0] if lacking else op)
        serving = [claim for claim, word in zip(others, lacking, strict=True) if not word]
        short |= "window.W" in words and all("window.W" not in claim["features"] for claim in serving)
    # the nearest claim first, so that the word that is reported is the one that would help
    for claim in sorted(own, key=lambda claim: len(set(needs["features"]) - set(claim["features"]))):
        word = missing_feature(needs, claim)
        if word:
            missing = missing if missing.word else Missing(word)
            continue
        limits = {**claim.get("limits", {}), "state_layout": claim.get("state_layout", ["KV"])}
        fitted = fit_limits(story, vector, limits)
        if isinstance(fitted, str):
            missing = missing if missing.word else Missing(fitted)
            continue
        lifted, lift = fitted
        typed = retype(lifted, vector, claim)
        if typed is None:
            missing = missing if missing.word else Missing("dtypes")
            continue
        lifted, declared = typed
        case = Case(vector, _short_windows(lifted, needs, claim), claim, declared, lift, short_windows=short)
        more = tuple(replace(case, story=s, lift=", ".join(filter(None, (lift, words))))
                     for s, words in stretches(case.story, vector, limits))  # fmt: skip
        return replace(case, variants=more)
    return missing


def outside(vector: Vector, corpus: Mapping[str, Vector], claims: Sequence[Capability]) -> Case | None:
    """The vector as it stands, for an implementation that does not claim what it needs; None without the operation."""
    own = [claim for claim in claims if claim["op"] == vector["op"]]
    if not own:
        return None
    return Case(vector, _short_windows(tell(vector, corpus), vector["needs"], own[0]), own[0])


def missing_feature(needs: Mapping[str, Any], claim: Capability) -> str:
    """The first feature a claim lacks; an implementation that keeps W-1 window columns is served without the first."""
    offered = set(claim["features"])
    if "window.W-1" in offered:
        offered.add("window.W")
    if "householder:M" in offered:
        offered |= {word for word in needs["features"] if word.startswith("householder:")}
    lacking = [word for word in needs["features"] if word not in offered]
    return lacking[0] if lacking else ""


def retype(story: Story, vector: Vector, claim: Capability) -> tuple[Story, Mapping[str, str]] | None:
    """The story in the first claimed combination of element types that holds every number it needs, its own first."""
    entries: Sequence[Mapping[str, str]] = claim.get("dtypes") or [{}]
    for entry in sorted(entries, key=lambda e: _changes(story, e)):
        if not _holds(story, vector, entry, claim.get("operand", "f32")):
            continue
        try:
            tensors = {name: _cast(array, _type_of(story.op, name, array, entry))
                       for name, array in story.tensors.items()}  # fmt: skip
            return replace(story, tensors=tensors), entry
        except ValueError:
            continue
    return None


def execute(case: Case, run: Run) -> Verdict:
    """Make the calls of a case and of its variants through `run` and judge them; the first failure counts."""
    for one in (case, *case.variants):
        verdict = _execute_one(one, run)
        if not verdict.passed:
            where = f" (lifted: {one.lift})" if one is not case else ""
            return replace(verdict, message=verdict.message + where)
    return verdict


def _execute_one(case: Case, run: Run) -> Verdict:
    kind = case.vector["class"]
    if kind == "relation":
        return _execute_relation(case, run)
    call = build(case, case.story)
    reply = run(call, "a")
    if kind == "reject":
        reject = case.vector["expect"]["reject"]
        return judge_reject(call, reply, reject["error"], reject["mentions"])
    expected = {name: _as_planned(want, name, call) for name, want in case.story.expect.items()}
    told = None
    if expected.get("value", Expected(None, "equal")).how == "judged" and reply.status == "ok":
        told = judge_schedule(**call.args, log=reply.value)  # slots and blocks are the engine's own choice
        reply = replace(reply, value=told.status)
    verdict = judge(call, reply, expected, case.precision)
    return verdict if verdict.passed or told is None or told.passed else told


def build(case: Case, story: Story, results: Sequence[str] | None = None) -> Call:
    """The call of a story; it must return what the story expects (or `results`)."""
    wanted = list(story.expect) if results is None else list(results)
    if case.vector["class"] == "reject":
        return Call(story.op, story.args, story.tensors, (), None, story.installed, story.far)
    planned = plan_results(story.op, story.tensors, story.args, case.declared, story.grad)
    kept = tuple(plan for plan in planned if plan.name in wanted)
    return Call(story.op, story.args, story.tensors, kept, story.grad, story.installed, story.far)


def _as_planned(want: Expected, name: str, call: Call) -> Expected:
    """Exact expectations in the element type that comes back, so that `bits` and `equal` compare like with like."""
    if want.array is None or want.how in ("within", "differs"):
        return want
    types = {plan.name: plan.dtype for plan in call.results}
    to = types.get(name) or (NAMES[call.tensors[name].dtype] if name in call.tensors else NAMES[want.array.dtype])
    cast = tuple(_cast(array, to) for array in want.either)
    return replace(want, array=_cast(want.array, to), either=cast)


def _cast(array: Array, to: str) -> Array:
    if NAMES[array.dtype] == to or array.dtype.kind in "iu":
        return array
    return narrow(array.astype(np.float64), to)


def _changes(story: Story, entry: Mapping[str, str]) -> int:
    return sum(_type_of(story.op, name, array, entry) != NAMES[array.dtype] for name, array in story.tensors.items())


def _type_of(op: str, name: str, array: Array, entry: Mapping[str, str]) -> str:
    if array.dtype.kind in "iu":
        return NAMES[array.dtype]
    group = next((a.group for a in OPERATIONS[op].tensors if a.name == name), name)
    return entry.get(name) or entry.get(group) or NAMES[array.dtype]


def _holds(story: Story, vector: Vector, entry: Mapping[str, str], operand: str) -> bool:
    """Whether each place holds the significand bits that an exact vector says it needs, and the operand class is one
    that a numeric vector is valid for."""
    operands = vector.get("operands")
    if operands is not None and operand not in operands and operand != "f64":
        return False
    needed = vector.get("bits", {})
    types = {name: _type_of(story.op, name, array, entry) for name, array in story.tensors.items()}
    for name, pinned in vector.get("needs", {}).get("dtypes", {}).items():
        if types.get(name, _result_type(story, name, types, entry)) != pinned:
            return False
    returned = [r.name for r in OPERATIONS[story.op].results if r.name in story.expect]
    results = [_result_type(story, name, types, entry) for name in returned]
    if any(name in FLOAT_TYPES and FLOAT_TYPES[name].bits < needed.get("out", 0) for name in results):
        return False
    pools = [types[name] for name in in_place(story.op, story.tensors)]
    return OPERAND_BITS[operand] >= needed.get("operand", 0) and all(
        FLOAT_TYPES[pool].bits >= needed.get("pool", 0) for pool in pools
    )


def _result_type(story: Story, name: str, types: Mapping[str, str], entry: Mapping[str, str]) -> str:
    """The element type in which a result comes back when the inputs have `types`."""
    results = {r.name: r for r in OPERATIONS[story.op].results}
    if name not in results:
        return ""
    first = next(iter(results))
    out = entry.get("out") if name == first else None
    return entry.get(name) or out or types.get(results[name].like) or ("f64" if "f64" in types.values() else "f32")


def _short_windows(story: Story, needs: Mapping[str, Any], claim: Capability) -> Story:
    """Leave the oldest window column out of the comparison for an implementation that does not keep it."""
    if "window.W" in claim["features"] or "window.W-1" not in claim["features"]:
        return story
    windows = ("final_windows", "conv_pool", "snapshot_windows", "intermediate_windows")
    expect = {name: replace(want, ignore_columns=1) if name in windows else want
              for name, want in story.expect.items()}  # fmt: skip
    return replace(story, expect=expect)


def _expected(spec: Mapping[str, Any], seed: int, dtype: str | None) -> Expected:
    if "value" in spec:
        return Expected(None, spec["how"], value=spec["value"])
    if "dtype" not in spec and "blob" not in spec:
        return Expected(None, spec["how"])
    array = load_blob(spec["blob"]) if "blob" in spec else decode(spec, seed)
    outside = spec.get("bits_outside")
    gain = {part: load_blob(reference) for part, reference in spec.get("gain", {}).items()}
    either = tuple(decode({**spec, "data": data}, seed) for data in spec.get("either", []))
    return Expected(array, spec["how"], None if outside is None else tuple(outside), either, gain)


def _gradient(spec: Mapping[str, Any] | None, seed: int) -> Gradient | None:
    if spec is None:
        return None
    return Gradient(tuple(spec["of"]), {name: decode(tensor, seed) for name, tensor in spec["cotangents"].items()})


# ---------------------------------------------------------------------------------------------------------------------
# Relations: several calls of one implementation, and what must hold between them
# ---------------------------------------------------------------------------------------------------------------------


def _execute_relation(case: Case, run: Run) -> Verdict:
    calls: dict[str, Call] = {}
    replies: dict[str, Reply] = {}
    related = related_tensors(case.vector)
    for name, spec in case.vector["calls"].items():
        story = vary(case, spec, calls, replies)
        calls[name] = build(case, story, sorted(related | _taken_later(case.vector, name)))
        replies[name] = run(calls[name], name)
        verdict = judge_reply(replies[name]) or judge(calls[name], replies[name], _free(calls[name]), case.precision)
        if not verdict.passed:
            return replace(verdict, message=f"call {name}: {verdict.message}")
    for entry in case.vector["relate"]:
        verdict = _relate(entry, calls, replies, case)
        if not verdict.passed:
            return verdict
    return Verdict("pass")


def related_tensors(vector: Vector) -> set[str]:
    """The tensors that a relation compares."""
    sides = [side for entry in vector["relate"] for side in (entry, *entry.values()) if isinstance(side, Mapping)]
    return {side["of"] for side in sides if "of" in side}


def _taken_later(vector: Vector, call: str) -> set[str]:
    """Results of a call that another call is given."""
    taken = set()
    for spec in vector["calls"].values():
        for given in (spec.get("inputs") or {}).values():
            for part in (given or {}).get("concat", [given or {}]):
                if part.get("from") == call:
                    taken.add(part["tensor"])
    return taken


def _free(call: Call) -> dict[str, Expected]:
    """Pools of a relation's call may change; its results may be anything."""
    return {name: Expected(None, "differs") for name in in_place(call.op, call.tensors)}


def vary(case: Case, spec: Mapping[str, Any], calls: Mapping[str, Call], replies: Mapping[str, Reply]) -> Story:
    """The story of one call of a relation: the base with other inputs, changed rows, gaps or far places."""
    story, seed = case.story, int(case.vector.get("seed", 0))
    op, args = spec.get("op", story.op), {**story.args, **spec.get("args", {})}
    tensors = dict(story.tensors)
    for name, given in (spec.get("inputs") or {}).items():
        if given is None:
            tensors.pop(name, None)
        else:
            tensors[name] = _given(given, story, calls, replies, seed, name, case)
    for change in spec.get("change", []):
        tensors[change["tensor"]] = _changed(tensors[change["tensor"]], change, op, seed)
    tensors = {name: strided(array) if name in spec.get("strided", []) else array.copy()
               for name, array in tensors.items()}  # fmt: skip
    grad = _gradient(spec["grad"], seed) if "grad" in spec else story.grad
    return replace(story, op=op, args=args, tensors=tensors, grad=grad, far=tuple(spec.get("far", ())))


def _given(
    given: Mapping[str, Any], story: Story, calls: Mapping[str, Call], replies: Mapping[str, Reply], seed: int,
    name: str, case: Case,
) -> Array:  # fmt: skip
    if "concat" in given:
        parts = [_given(part, story, calls, replies, seed, name, case) for part in given["concat"]]
        return np.concatenate([_cast(part, NAMES[parts[0].dtype]) for part in parts], axis=given.get("axis", 0))
    if "from" not in given:
        array = decode(given, seed)
        own = story.tensors.get(name)
        return array if own is None else _cast(array, NAMES[own.dtype])
    tensor = given["tensor"]
    if given["from"] == "base":
        array = story.tensors[tensor]
    else:
        outputs = replies[given["from"]].outputs
        array = outputs[f"after.{tensor}" if tensor in calls[given["from"]].tensors else tensor]
    return _side(array, given)


def _side(array: Array, part: Mapping[str, Any]) -> Array:
    """A part of a tensor: `rows` [start, end) or `pick`ed indices along `axis` (0 unless told)."""
    axis = int(part.get("axis", 0))
    if "rows" in part:
        start, end = part["rows"]
        array = np.moveaxis(np.moveaxis(array, axis, 0)[start:end], 0, axis)
    if "pick" in part:
        array = np.take(array, part["pick"], axis=axis)
    return array


def _changed(array: Array, change: Mapping[str, Any], op: str, seed: int) -> Array:
    array = array.copy()
    axis = int(change.get("axis", 1 if array.ndim > 1 and OPERATIONS[op].token_axis == "T" else 0))
    start, end = change.get("rows", (0, array.shape[axis]))
    view = np.moveaxis(array, axis, 0)[start:end]
    if "gen" in change:
        view[...] = narrow(values(change["gen"], view.shape, seed), NAMES[array.dtype])
    else:
        spec = {"dtype": NAMES[array.dtype], "shape": list(view.shape), "data": change["data"]}
        view[...] = decode(spec, seed)
    return array


def _relate(entry: Mapping[str, Any], calls: Mapping[str, Call], replies: Mapping[str, Reply], case: Case) -> Verdict:
    names = [name for name in entry if name in calls]
    of, how = entry["of"], entry["how"]
    sides = []
    for name in names:
        tensor = entry[name].get("of", of)
        sides.append(_side(replies[name].outputs[f"after.{tensor}" if tensor in calls[name].tensors else tensor],
                           entry[name]))  # fmt: skip
    first, last = sides[0], sides[-1]
    if first.shape != last.shape:
        return Verdict("fail.relation", f"{of}: {first.shape} in {names[0]} and {last.shape} in {names[-1]}", of)
    if how == "differs":
        same = not differs(first, last, "bits").any()
        return Verdict("fail.relation", f"{of} is the same in {names[0]} and {names[-1]}", of) if same else _PASS
    features = case.capability.get("features") or ("window.W",)
    short = of.endswith(("windows", "conv_pool")) and (case.short_windows or "window.W" not in features)
    bad = mismatch(first, Expected(last, how, ignore_columns=int(short)))
    if not bad.any():
        return _PASS
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    status = "fail.unstable" if entry.get("clause") == "DET-1" else "fail.relation"
    values_ = f"{float(first[index])!r} in {names[0]}, {float(last[index])!r} in {names[-1]}"
    spot = f"{of}[{', '.join(map(str, index))}] of the compared part"
    return Verdict(status, f"{spot}: {values_}; {int(bad.sum())} of {bad.size} elements", of)


_PASS = Verdict("pass")
