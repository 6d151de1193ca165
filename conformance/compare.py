"""Judging: was every tensor that came back right, was nothing else touched, and where is the first bad place.

Order of judgement (first failure wins): error or time limit, shape, element type, finite where finite is expected,
untouched regions, sentinels left, values. `==` on floats is not a comparison here: a NaN guard is unequal to itself and
+0 equals -0, so a vector says `bits` or `equal`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from statescan.conformance.calls import Array, Call, Reply, axis_names, offsets_of, span
from statescan.conformance.transport import is_blank
from statescan.goldens.tensors import NAMES, bits
from statescan.spec.contract import FLOAT_TYPES, OPERAND_BITS, OPERATIONS, Argument, Result

ELEMENT_FACTOR, TOKEN_FACTOR = 8.0, 3.0
"""Constants of the rules version, not of a vector: what one element, and one token and head, may be off by."""

ZERO_GAIN = -128


@dataclass(frozen=True)
class Expected:
    """What one returned tensor must be.

    `how` is a word of the comparisons; `either` lists further whole tensors that are right as well; `bits_outside`
    names the rows (slots) outside which every byte must stand; `gain` holds the codes of a numeric expectation.
    `ignore_columns` are leading window columns that an implementation does not keep.
    """

    array: Array | None
    how: str
    bits_outside: tuple[int, ...] | None = None
    either: tuple[Array, ...] = ()
    gain: Mapping[str, Array] = field(default_factory=dict)
    value: Any = None
    ignore_columns: int = 0


@dataclass(frozen=True)
class Verdict:
    """A status of the contract; for a failure what is wrong, in which tensor, at which first place."""

    status: str
    message: str = ""
    tensor: str = ""
    place: Mapping[str, int | str] = field(default_factory=dict)
    score: float | None = None

    @property
    def passed(self) -> bool:
        return self.status == "pass"


@dataclass(frozen=True)
class Precision:
    """What the numeric score needs of an implementation: its operand class, and the element type of its pools."""

    operand: str = "f32"
    pool: str = "f32"


def judge(call: Call, reply: Reply, expected: Mapping[str, Expected], precision: Precision) -> Verdict:
    """The verdict on a call that must succeed; `expected` names results and pools changed in place."""
    early = judge_reply(reply)
    if early is not None:
        return early
    score = None
    for step in (_nonfinite, _touched, _unwritten, _values):
        verdict = step(call, reply, expected, precision)
        if not verdict.passed:
            return verdict
        score = verdict.score if verdict.score is not None else score
    return Verdict("pass", score=score)


def judge_reply(reply: Reply) -> Verdict | None:
    """The failure that a reply is by itself, or None if there is something to compare."""
    if reply.status == "ok":
        return None
    if reply.status in ("timeout", "protocol"):
        return Verdict(reply.status, reply.message)
    if reply.status == "unsupported":
        return Verdict("error", f"claimed, and refused as unsupported: {reply.message}")
    if reply.status in ("shape", "dtype"):
        return Verdict(f"fail.{reply.status}", reply.message)
    return Verdict("error", f"{reply.error}: {reply.message}")


def judge_reject(call: Call, reply: Reply, error: str, mentions: Sequence[str]) -> Verdict:
    """The verdict on a call that must be refused: nothing changed, the class named, the message to the point."""
    if reply.status in ("timeout", "protocol"):
        return Verdict(reply.status, reply.message)
    if reply.status in ("ok", "shape", "dtype"):
        return Verdict("fail.accepted", f"{call.op} took what {error} should refuse ({', '.join(mentions)})")
    for name, array in call.tensors.items():
        after = reply.outputs.get(f"after.{name}")
        if after is not None and differs(span(after), span(array), "bits").any():
            return Verdict("fail.partial", f"refused, and {name} was changed before", name)
    lacking = [words for words in mentions if words not in reply.message]
    if reply.error != error or lacking:
        said = f"{reply.error}: {reply.message[:200]}"
        wanted = ", ".join(lacking) or "all it should"
        return Verdict("fail.wrong_error", f"{error} naming {wanted} expected, got {said}")
    return Verdict("pass")


def _nonfinite(call: Call, reply: Reply, expected: Mapping[str, Expected], _: Precision) -> Verdict:
    for name, want in expected.items():
        got = _got(call, reply, name)
        if got is None or want.how in ("bits", "differs") or got.dtype.kind in "iu":
            continue
        finite = np.ones(got.shape, bool) if want.array is None else np.isfinite(_wide(want.array))
        bad = _kept(finite & ~np.isfinite(_wide(got)) & ~is_blank(got), want)
        if bad.any():
            return _fail("fail.nonfinite", call, name, bad, got, want.array)
    return Verdict("pass")


def _touched(call: Call, reply: Reply, expected: Mapping[str, Expected], _: Precision) -> Verdict:
    for name, array in call.tensors.items():
        after = reply.outputs.get(f"after.{name}")
        if after is None:
            continue
        want = None if any(plan.name == name for plan in call.results) else expected.get(name)
        bad = differs(after, array, "bits")
        if want is not None:
            bad[... if want.bits_outside is None else list(want.bits_outside)] = False
        if bad.any():  # an input that did not come back at all was not written either
            status = "fail.unwritten" if is_blank(after)[bad].all() else "fail.touched"
            return _fail(status, call, name, bad, after, array)
        if _gap_written(array, after):
            return Verdict("fail.touched", f"{name}: memory between its strides was written", name)
    return Verdict("pass")


def _gap_written(before: Array, after: Array) -> bool:
    """Whether the memory between the elements of a strided tensor changed."""
    old, new = span(before).copy(), span(after)
    inside = np.lib.stride_tricks.as_strided(old, before.shape, before.strides)
    inside[...] = after
    return bool(old.size == new.size and (bits(old) != bits(new)).any())


def _unwritten(call: Call, reply: Reply, expected: Mapping[str, Expected], _: Precision) -> Verdict:
    for plan in call.results:
        got = reply.outputs[plan.name]
        bad = is_blank(got)
        if bad.any():
            want = expected.get(plan.name)
            return _fail("fail.unwritten", call, plan.name, bad, got, None if want is None else want.array)
    return Verdict("pass")


def _values(call: Call, reply: Reply, expected: Mapping[str, Expected], precision: Precision) -> Verdict:
    worst: float | None = None
    for name, want in expected.items():
        got = _got(call, reply, name)
        if name == "value":
            if differs(_host(reply.value), _host(want.value), "host").any():
                return Verdict("fail.value", f"got {reply.value!r}, expected {want.value!r}", name)
            continue
        if got is None:
            return Verdict("fail.unwritten", f"{name} did not come back", name)
        if want.how == "differs":
            continue
        if want.how == "within":
            verdict, score = _within(call, name, got, want, precision)
            worst = max(score, worst or 0.0)
            if not verdict.passed:
                return verdict
            continue
        bad = mismatch(got, want)
        if bad.any():
            return _fail("fail.value", call, name, bad, got, want.array)
    return Verdict("pass", score=worst)


def mismatch(got: Array, want: Expected) -> Any:
    """Where `got` is not what `want` says, elementwise; for `either`, against the nearest alternative."""
    choices = [array for array in (want.array, *want.either) if array is not None]
    if want.how == "finite":
        return ~np.isfinite(_wide(got))
    tables = [_kept(differs(got, choice, want.how), want) for choice in choices]
    return min(tables, key=lambda table: int(table.sum()))


def differs(got: Array, want: Array, how: str) -> Any:
    """Where two arrays of one shape differ: in their `bits`, as `host` values, or as numbers (NaN equals NaN).

    Every comparison of the suite goes through here, which is how a test shows that each of them can fail.
    """
    if how == "bits":
        return bits(got) != bits(want)
    if how == "host":
        return np.asarray(got != want)
    a, b = _wide(got), _wide(want)
    return ~((a == b) | (np.isnan(a) & np.isnan(b)))


def _host(value: Any) -> Array:
    """A host value as one object."""
    box = np.empty((), object)
    box[()] = value
    return box


def _kept(table: Any, want: Expected) -> Any:
    if want.ignore_columns:
        table = table.copy()
        table[..., : want.ignore_columns] = False
    return table


def _within(call: Call, name: str, got: Array, want: Expected, precision: Precision) -> tuple[Verdict, float]:
    assert want.array is not None
    judged = got.copy()
    judged[..., : want.ignore_columns] = want.array[..., : want.ignore_columns].astype(got.dtype)
    element, token = scores(judged, want.array, want.gain, precision, _score_axes(call, name, got.ndim))
    score = float(np.maximum(element, token).max(initial=0.0))
    if score <= 1:
        return Verdict("pass", score=score), score
    bad = element > 1 if (element > 1).any() else token > 1
    failed = _fail("fail.value", call, name, bad, got, want.array)
    return Verdict(failed.status, f"{failed.message} (score {score:.3g})", name, failed.place, score), score


def scores(
    got: Array, want: Array, gain: Mapping[str, Array], precision: Precision, axes: tuple[int, ...]
) -> tuple[Any, Any]:
    """Scores s1 (each element) and s2 (rms over `axes`: one token and head), broadcast to the elements.

    E^2 = (u_op G_op)^2 + (2^-24)^2 (G_acc^2 + G_exp^2) + (u_pool G_acc)^2, the last term for pools narrower than f32.
    """
    out = FLOAT_TYPES[NAMES[got.dtype]]
    unit, least = 2.0**-out.bits, 2.0**out.eta
    pool = FLOAT_TYPES[precision.pool]
    stored = 2.0**-pool.bits if pool.bits < 24 else 0.0
    g_op, g_acc, g_exp = (gain_of(gain[part]) for part in ("op", "acc", "exp"))
    fine = 2.0 ** -min(OPERAND_BITS[precision.operand], 24)
    bound = np.sqrt((fine * g_op) ** 2 + (2.0**-24) ** 2 * (g_acc**2 + g_exp**2) + (stored * g_acc) ** 2)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.abs(_wide(got) - want)
        element = _ratio(error, ELEMENT_FACTOR * bound + unit * np.abs(want) + least)
        allowed = TOKEN_FACTOR * bound + unit * np.abs(want) + least
        token = _ratio(_rms(error, axes), _rms(allowed, axes))
    return element, np.broadcast_to(token, element.shape)


def gain_of(code: Array) -> Array:
    """The gain that an int8 code bounds: 2^(code/2), half octaves; -128 is 0."""
    return np.where(code == ZERO_GAIN, 0.0, np.exp2(code.astype(np.float64) / 2))


def _ratio(error: Any, allowed: Any) -> Any:
    ratio = np.where(error == 0, 0.0, error / allowed)
    return np.where(np.isnan(ratio), np.inf, ratio)


def _rms(values: Any, axes: tuple[int, ...]) -> Any:
    return np.sqrt(np.mean(values**2, axis=axes, keepdims=True)) if axes else values


def _score_axes(call: Call, name: str, rank: int) -> tuple[int, ...]:
    """Axes over which s2 averages: channels of one token and head; one head's matrix for a state."""
    letters = axis_names(_named(call, name), rank, call.args)
    return tuple(i for i, letter in enumerate(letters) if letter in ("C", "W", "K", "V", "P", "R", "D"))


def _got(call: Call, reply: Reply, name: str) -> Array | None:
    returned = any(plan.name == name for plan in call.results)
    return reply.outputs.get(name if returned or name not in call.tensors else f"after.{name}")


def _wide(array: Array) -> Any:
    return array.astype(np.float64)


def _named(call: Call, name: str) -> Argument | Result:
    op = OPERATIONS[call.op]
    bare = name.removeprefix("grad.")
    entries: tuple[Argument | Result, ...] = (*op.results, *op.tensors)
    for entry in entries:
        if entry.name == bare:
            return entry
    return Result(bare, (), "")


def _fail(status: str, call: Call, name: str, bad: Any, got: Array, want: Array | None) -> Verdict:
    index = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.ndim else ()
    place = locate(call, name, index)
    where = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in place.items())
    spot = f"{name}[{', '.join(map(str, index))}]"
    wanted = "" if want is None else f", expected {shown(want[index])}"
    count = int(bad.sum())
    more = f"; {count} of {bad.size} elements" if count > 1 else ""
    spot += f" ({where})" if where else ""
    return Verdict(status, f"{spot}: got {shown(got[index])}{wanted}{more}", name, place)


def shown(value: Any) -> str:
    x = float(value)
    return str(int(x)) if np.isfinite(x) and x == int(x) and abs(x) < 2**53 else repr(x)


_WORDS = {"H": "head", "HV": "value head", "G": "group", "C": "channel", "K": "key", "V": "value", "P": "channel",
          "R": "state column", "W": "column", "slots": "slot", "X": "snapshot", "I": "entry", "batch": "batch row",
          "N": "row", "J": "token", "D": "channel"}  # fmt: skip


def locate(call: Call, name: str, index: tuple[int, ...]) -> dict[str, int]:
    """An index in the terms of the contract: token, segment and offset in it, slot, head, channel."""
    place: dict[str, int] = {}
    for letter, i in zip(axis_names(_named(call, name), len(index), call.args), index, strict=False):
        if letter in ("T", "T*M"):
            token = i // int(call.args.get("num_householder", 1)) if letter == "T*M" else i
            place["token"] = token
            place |= _segment(offsets_of(call.tensors, token + 1), token)
        elif letter in _WORDS:
            place[_WORDS[letter].replace(" ", "_")] = i
    return place


def _segment(offsets: Sequence[int], token: int) -> dict[str, int]:
    for n, (start, end) in enumerate(pairwise(offsets)):
        if start <= token < end:
            return {"segment": n, "offset": token - start, "of": end - start}
    return {"past_the_last_offset": offsets[-1]}
