"""Was this recorded call right? If not: where first, and which known fault does it look like?

    judged = judge_recorded(load(Path("calls/000001.json")))

The reference computes what had to come out. A rough bound finds the places that are furthest off, and noise gains of
just these decide, by the numeric score of the suite. Imports the reference, so the runner never imports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import Array, Call, Reply, in_place, plan_results
from statescan.conformance.compare import Expected, Precision, Verdict, judge, judge_reply, scores
from statescan.conformance.cut import HEADS, Piece, cut, cut_heads, letters, live_slots, offsets, sizes
from statescan.conformance.expect import expected, quick, truth
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.mutants import PARTS, faults_of
from statescan.conformance.recorded import Recorded
from statescan.goldens.store import FormatError
from statescan.goldens.tensors import NAMES
from statescan.spec.contract import OPERATIONS

SECONDS = 60.0
PLACES = 3
"""How many rows and heads, those that are furthest off, are judged by their gains."""


@dataclass(frozen=True)
class Judged:
    """A recorded call, what became of judging it, and the number of rows and heads whose gains were computed."""

    piece: Piece
    verdict: Verdict
    reply: Reply
    precision: Precision
    types: Mapping[str, str] = field(default_factory=dict)
    places: int = 0


def judge_recorded(recorded: Recorded, operand: str = "", seconds: float = SECONDS) -> Judged:
    """The verdict on a recorded call; `operand` is the class in which the implementation forms matrix operands.

    Below 0 `seconds` the rough bound alone is asked.
    """
    call, reply = _washed(recorded.call), recorded.reply
    piece = Piece(call.op, call.args, call.tensors, reply.outputs)
    pools = [NAMES[call.tensors[name].dtype] for name in in_place(call.op, call.tensors)]
    precision = Precision(operand or _operand(call), pools[0] if pools else "f32")
    types = {plan.name: plan.dtype for plan in call.results}
    judged = Judged(piece, Verdict("pass"), reply, precision, types)
    right = truth(call)
    if right.status not in ("ok", "rejected"):
        raise FormatError(f"{call.op}: this call cannot be judged: {right.error}: {right.message[:300]}")
    verdict = compare(piece, reply, right, precision, types)
    if recorded.others and right.status == "ok":
        said = f"slots {', '.join(map(str, recorded.others[:8]))} changed, and the call names none of them"
        verdict = Verdict("fail.touched", said, "pool", {"slot": recorded.others[0]})
    if right.status == "rejected" or verdict.status not in ("pass", "fail.value") or seconds < 0:
        return replace(judged, verdict=verdict)
    worst, places = Verdict("pass", score=0.0), 0
    started = time.monotonic()
    for name, index in _suspects(piece, reply, right, precision, types, verdict):
        if places and time.monotonic() - started > seconds:
            break
        found = _confirm(piece, name, index, precision, types)
        places += 1
        if not found.passed:
            return replace(judged, verdict=_named(verdict, found), places=places)
        worst = found if (found.score or 0.0) >= (worst.score or 0.0) else worst
    return replace(judged, verdict=Verdict("pass", score=worst.score), places=places)


def _named(rough: Verdict, exact: Verdict) -> Verdict:
    """A confirmed failure, by its first place in the whole call where the rough bound sees one."""
    return replace(rough if not rough.passed else exact, score=exact.score)


def _washed(call: Call) -> Call:
    """The call with 0 for NaN in the slots that it does not read: guards are compared as bits, not as numbers."""
    tensors = dict(call.tensors)
    slots = {int(s) for s in tensors.get("read_slots", np.zeros(0, int)).ravel()}
    for name in in_place(call.op, tensors):
        array = tensors[name]
        if "read_slots" in tensors and not name.startswith("snapshot") and array.dtype.kind not in "iu":
            unread = [s for s in range(array.shape[0]) if s not in slots]
            array = array.copy()
            array[unread] = np.where(np.isnan(array[unread].astype(np.float32)), 0, array[unread])
            tensors[name] = array
    return replace(call, tensors=tensors)


def _operand(call: Call) -> str:
    """The operand class of an implementation that has not said: that of the first tensor it is given."""
    first = NAMES[call.tensors[OPERATIONS[call.op].tensors[0].name].dtype]
    return first if first in ("bf16", "f16") else "f32"


# ---------------------------------------------------------------------------------------------------------------------
# Comparing
# ---------------------------------------------------------------------------------------------------------------------


def call_of(piece: Piece, types: Mapping[str, str]) -> Call:
    """The call of a piece, with the results that were returned."""
    planned = plan_results(piece.op, piece.tensors, piece.args, types, None)
    return Call(piece.op, piece.args, piece.tensors, tuple(plan for plan in planned if plan.name in types or not types))


def compare(
    piece: Piece, reply: Reply, right: Reply, precision: Precision, types: Mapping[str, str], exact: bool = False,
    only: str = "",
) -> Verdict:  # fmt: skip
    """The verdict on a reply beside the right one; `only` judges one tensor."""
    if right.status == "rejected":
        if reply.status == "ok":
            return Verdict("fail.accepted", f"{piece.op} took what {right.error} should refuse: {right.message}")
        return Verdict("pass", f"refused, as it should be: {right.message}")
    early = judge_reply(reply)
    if early is not None:
        return early
    needed = [r.name for r in OPERATIONS[piece.op].results if r.name in right.outputs]
    for name in needed:
        if name not in reply.outputs:
            if only or name not in types:
                continue
            return Verdict("fail.shape", f"{name} is None, a tensor expected", name)
        got, want = reply.outputs[name].shape, right.outputs[name].shape
        if got != want:
            return Verdict("fail.shape", f"{name} has shape {list(got)}, {list(want)} expected", name)
    call = call_of(piece, types)
    call = replace(call, results=tuple(plan for plan in call.results if plan.name in reply.outputs))
    wanted = expected(call, right, exact=exact)
    if only:
        wanted = {name: want for name, want in wanted.items() if name == only}
        call = replace(call, results=tuple(plan for plan in call.results if plan.name == only))
    quiet = {name: Expected(None, "differs", want.bits_outside) for name, want in wanted.items()}
    if not only:
        verdict = judge(call, reply, quiet, precision)
        if not verdict.passed:
            return verdict
    call, reply, wanted = _without_nan(call, reply, wanted)
    outputs = reply.outputs if not only else {key: value for key, value in reply.outputs.items()
                                              if key.removeprefix("after.") == only}  # fmt: skip
    return judge(call, replace(reply, outputs=outputs), wanted, precision)


def _without_nan(
    call: Call, reply: Reply, wanted: Mapping[str, Expected]
) -> tuple[Call, Reply, dict[str, Expected]]:
    """0 in the place of NaN that is right: live NaN inputs, and guards that are still what they were."""
    outputs, tensors, found = dict(reply.outputs), dict(call.tensors), {}
    for name, want in wanted.items():
        key = name if any(plan.name == name for plan in call.results) else f"after.{name}"
        got = outputs.get(key)
        if got is None or want.array is None:
            continue
        array = want.array
        if got.shape == array.shape:
            both = np.isnan(array) & np.isnan(got.astype(np.float64))
            outputs[key], array = _zeroed(got, both), np.where(both, 0.0, array)
            if name in tensors and key.startswith("after."):
                tensors[name] = _zeroed(tensors[name], both)
        found[name] = replace(want, array=array)
    return replace(call, tensors=tensors), replace(reply, outputs=outputs), found


def _zeroed(array: Array, where: Any) -> Array:
    if not where.any():
        return array
    array = array.copy()
    array[where] = 0
    return array


def _suspects(
    piece: Piece, reply: Reply, right: Reply, precision: Precision, types: Mapping[str, str], rough: Verdict
) -> list[tuple[str, tuple[int, ...]]]:
    """Places to be judged by their gains: of each tensor the furthest off, in different rows and heads; where the
    rough bound has failed, its own tensor first."""
    call = call_of(piece, types)
    call = replace(call, results=tuple(plan for plan in call.results if plan.name in reply.outputs))
    call, reply, wanted = _without_nan(call, reply, expected(call, right, exact=False))
    found: list[tuple[float, str, tuple[int, ...]]] = []
    for name, want in wanted.items():
        got = reply.outputs.get(name if name in reply.outputs and name in types else f"after.{name}")
        if got is None or want.array is None or got.size == 0:
            continue
        element, _ = scores(got, want.array, want.gain, precision, ())
        kept = [axis for axis, letter in enumerate(letters(piece, name, got))
                if letter in ("H", "HV", "C", "N", "slots")]  # fmt: skip
        over = tuple(axis for axis in range(got.ndim) if axis not in kept)
        most = element.max(axis=over, keepdims=True)
        order = np.argsort(most, axis=None)[::-1][:PLACES]
        for flat in order:
            at = np.unravel_index(int(flat), most.shape)
            here = tuple(slice(None) if axis in over else int(i) for axis, i in enumerate(at))
            line = element[here]
            bad = np.argwhere(line > 1) if (line > 1).any() else np.argwhere(line == line.max())
            place = iter(bad[0].tolist())
            index = tuple(next(place) if axis in over else int(at[axis]) for axis in range(got.ndim))
            found.append((float(most[at]), name, index))
    found.sort(key=lambda item: (item[1] != rough.tensor, -item[0]))
    return [(name, index) for _, name, index in found][: PLACES + 1]


def _confirm(
    piece: Piece, name: str, index: tuple[int, ...], precision: Precision, types: Mapping[str, str]
) -> Verdict:
    """The verdict on one row and head of one tensor, by its gains."""
    part = around(piece, name, index)
    call = call_of(part, types)
    right = truth(call)
    if right.status != "ok":
        return Verdict("pass", score=0.0)
    return compare(part, Reply("ok", part.outputs), right, precision, types, exact=True, only=name)


def around(piece: Piece, name: str, index: tuple[int, ...]) -> Piece:
    """The row and head of one place, and of a result no token behind it."""
    array = piece.outputs.get(name, piece.tensors.get(name))
    if array is None:  # a result that did not come with the piece
        array = np.broadcast_to(np.int8(0), tuple(i + 1 for i in index))
    place = dict(zip(letters(piece, name, array), index, strict=False))
    part = one_head(piece, place)
    row = _row_of(piece, place)
    if "T" in place and "T" in sizes(piece):
        ends = offsets(piece)
        if row is not None and ends[row] <= place["T"] < ends[row + 1]:
            part = cut(part, "T", range(ends[row], place["T"] + 1))
            part = cut(part, "N", [row]) if has_rows(piece) else part
    elif row is not None and has_rows(piece):
        part = cut(part, "N", [row])
        if "J" in place:
            part = cut(part, "J", range(place["J"] + 1))
    if "batch" in place:
        part = cut(part, "batch", [place["batch"]])
    if "slots" in sizes(part):  # those of other rows changed rightly
        part = cut(part, "slots", live_slots(part))
    return part


def has_rows(piece: Piece) -> bool:
    packed = "cu_seqlens" in piece.tensors or "seq_idx" in piece.tensors
    return packed or OPERATIONS[piece.op].token_axis == "J"


def one_head(piece: Piece, place: Mapping[str, int]) -> Piece:
    heads = HEADS.get(OPERATIONS[piece.op].family)
    if heads and heads[1] in place:
        group = sizes(piece)[heads[1]] // sizes(piece)[heads[0]]
        return cut_heads(piece, [place[heads[1]] // group], [place[heads[1]] % group])
    for letter in ("C", "HV"):
        if letter in place and heads is None:
            return cut(piece, letter, [place[letter]])
    return piece


def _row_of(piece: Piece, place: Mapping[str, int]) -> int | None:
    """The row that a place belongs to."""
    if "N" in place:
        return place["N"]
    if "T" in place:
        ends = offsets(piece)
        return next((n for n in range(len(ends) - 1) if ends[n] <= place["T"] < ends[n + 1]), None)
    if "slots" in place:
        stores = piece.tensors.get("write_slots", piece.tensors.get("read_slots"))
        rows = [] if stores is None else np.flatnonzero(stores.ravel() == place["slots"]).tolist()
        return int(rows[0]) if rows else None
    return None


def candidates(piece: Piece, reply: Reply, judged: Judged, only: str = "", seconds: float = 20.0) -> list[str]:
    """Known faults whose models give what came back (of one tensor, where `only` names it), the nearest first."""
    deadline, found = time.monotonic() + seconds, []
    call = call_of(piece, judged.types)
    for fault in faults_of(piece.op):
        if time.monotonic() > deadline:
            break
        model = Adapter(fault)
        model.op(piece.op)(_model(fault, piece.op))
        with quick(), np.errstate(all="ignore"):
            wrong = invoke(model, isolated(call))
        if wrong.status != "ok":
            continue
        verdict = compare(piece, reply, wrong, judged.precision, judged.types, only=only)
        if verdict.passed and _differs(reply, wrong, call, only):
            found.append((verdict.score or 0.0, fault))
    return [fault for _, fault in sorted(found)[:3]]


def _model(fault: str, op: str) -> Callable[..., Any]:
    """The operation with a fault, from the first part that knows both; the others need not be built."""
    return next(built[op] for part in PARTS if fault in part.faults for built in [part.build(fault)] if op in built)


def _differs(reply: Reply, wrong: Reply, call: Call, only: str) -> bool:
    """Whether a model is nearer to what came back than to what had to."""
    right = truth(call)
    keys = [plan.name for plan in call.results] + [f"after.{name}" for name in in_place(call.op, call.tensors)]
    keys = [key for key in keys if key.removeprefix("after.") == only] if only else keys

    def apart(one: Reply, other: Reply) -> float:
        pairs = [(one.outputs[k].astype(float), other.outputs[k].astype(float)) for k in keys
                 if k in one.outputs and k in other.outputs]  # fmt: skip
        return float(sum(np.nansum(np.abs(np.nan_to_num(a) - np.nan_to_num(b))) for a, b in pairs))

    return apart(reply, wrong) < 0.1 * apart(reply, right)
