"""The least part of a wrong call that is still wrong: with the implementation at hand, or of the record alone.

    small = shrink(judged, run)            # `run(call)` gives the implementation's reply

Heads first, since the rest costs a part of what it did with one; then rows, tokens, slots, channels, and arguments that
may be absent. What the search keeps is judged by noise gains in the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from statescan.conformance.calls import Array, Call, Reply
from statescan.conformance.compare import Verdict
from statescan.conformance.cut import HEADS, Piece, cut, cut_heads, letters, live_slots, sizes
from statescan.conformance.expect import truth
from statescan.conformance.explain import index_in
from statescan.conformance.recorded import Recorded, save
from statescan.conformance.replay_call import SECONDS, Judged, around, call_of, compare, has_rows, one_head
from statescan.conformance.scripts import Side, expected_in, write_script
from statescan.spec.contract import OPERATIONS

Run = Callable[[Call], Reply]


@dataclass(frozen=True)
class Shrunk:
    """The least call found that is still wrong, how, and what had to come out."""

    piece: Piece
    verdict: Verdict
    right: Reply
    reply: Reply
    tried: int
    seconds: float

    @property
    def size(self) -> dict[str, int]:
        """Sizes of the call: its axis letters."""
        return sizes(self.piece)


class _Search:
    """Pieces tried so far; `best` is the smallest that fails."""

    def __init__(self, judged: Judged, run: Run, seconds: float) -> None:
        self.judged, self.run, self.deadline, self.tried = judged, run, time.monotonic() + seconds, 0
        self.best, self.found = judged.piece, None if judged.verdict.passed else judged.verdict
        self.right: Reply = Reply("ok")
        self.reply: Reply = judged.reply

    def attempt(self, piece: Piece, exact: bool = False) -> bool:
        """Whether a piece fails; if so it is the best."""
        if time.monotonic() > self.deadline:
            return False
        self.tried += 1
        try:
            call = call_of(piece, self.judged.types)
        except (KeyError, ValueError, IndexError):
            return False
        right = truth(call)
        accepted = self.judged.verdict.status == "fail.accepted"
        if right.status != ("rejected" if accepted else "ok"):
            return False
        reply = self.run(call)
        verdict = compare(piece, reply, right, self.judged.precision, self.judged.types, exact)
        same = verdict.status.startswith("fail.") or verdict.status == self.judged.verdict.status
        if verdict.passed or not same:
            return False
        self.best, self.found, self.right, self.reply = piece, verdict, right, reply
        return True

    def reduce(self, count: int, make: Callable[[list[int]], Piece], first: int | None = None) -> None:
        """Delta debugging over one axis: one index, then halves, then smaller and smaller parts left out
        (https://doi.org/10.1109/32.988498)."""
        kept = list(range(count))
        for i in [first] if first is not None and 0 <= first < count else []:
            if count > 1 and self.attempt(make([i])):
                return
        parts = 2
        while len(kept) > 1 and time.monotonic() < self.deadline:
            step = -(-len(kept) // parts)
            blocks = [kept[i : i + step] for i in range(0, len(kept), step)]
            tries = [*blocks, *([i for i in kept if i not in set(block)] for block in blocks if len(blocks) > 2)]
            smaller = next((keep for keep in tries if keep and self.attempt(make(keep))), None)
            if smaller is not None:
                kept, parts = smaller, 2
            elif step == 1:
                return
            else:
                parts = min(len(kept), parts * 2)


def shrink(judged: Judged, run: Run, seconds: float = SECONDS) -> Shrunk | None:
    """The least call on which `run` is still wrong; None where it is right on the call as recorded."""
    started = time.monotonic()
    search = _Search(judged, run, seconds)
    whole = Piece(judged.piece.op, judged.piece.args, judged.piece.tensors, {})
    if not _start(search, judged, whole):
        return None
    for _ in range(3):
        before = search.best
        for step in (_shrink_heads, _shrink_rows, _shrink_tokens, _shrink_slots, _shrink_channels, _shrink_extras):
            step(search)
        if search.best is before or time.monotonic() > search.deadline:
            break
    assert search.found is not None
    search.deadline = max(search.deadline, time.monotonic() + 10)
    if search.found.status == "fail.value" and not search.attempt(search.best, exact=True):
        return None
    return Shrunk(search.best, search.found, search.right, search.reply, search.tried, time.monotonic() - started)


def _start(search: _Search, judged: Judged, whole: Piece) -> bool:
    """A first failing piece, small ones first: the row and head of the bad place, its head alone, the whole call."""
    verdict = judged.verdict
    index = index_in(verdict.message)
    guesses = [] if index is None else [around(whole, verdict.tensor, index), _head_alone(whole, verdict.tensor, index)]
    return any(search.attempt(guess) for guess in [*guesses, whole])


def _head_alone(piece: Piece, name: str, index: tuple[int, ...]) -> Piece:
    array = piece.tensors.get(name)
    shape = tuple(i + 1 for i in index) if array is None else array.shape
    return one_head(piece, dict(zip(letters(piece, name, np.empty(shape)), index, strict=False)))


def _shrink_heads(search: _Search) -> None:
    piece = search.best
    heads = HEADS.get(OPERATIONS[piece.op].family)
    if heads is None:
        if "HV" in sizes(piece):
            search.reduce(sizes(piece)["HV"], lambda keep: cut(piece, "HV", keep), _at(search, "value_head"))
        return
    few, many = (sizes(piece)[letter] for letter in heads)
    group = many // few
    bad = _at(search, "value_head") if heads[1] == "HV" else _at(search, "head")
    if bad is not None and (few > 1 or group > 1):
        search.attempt(cut_heads(piece, [bad // group], [bad % group]))
    start = search.best
    few = sizes(start)[heads[0]]
    group = sizes(start)[heads[1]] // few
    search.reduce(few, lambda keep: cut_heads(start, keep, range(group)))
    inner = search.best
    few = sizes(inner)[heads[0]]
    search.reduce(group, lambda keep: cut_heads(inner, range(few), keep))


def _shrink_rows(search: _Search) -> None:
    piece = search.best
    axes = sizes(piece)
    if has_rows(piece) and axes.get("N", 0) > 1:
        search.reduce(axes["N"], lambda keep: cut(piece, "N", keep), _at(search, "segment", "row"))
    rest = search.best
    if sizes(rest).get("batch", 1) > 1:
        search.reduce(sizes(rest)["batch"], lambda keep: cut(rest, "batch", keep), _at(search, "batch_row"))


def _shrink_tokens(search: _Search) -> None:
    for letter in ("T", "J", "lead0", "lead1", "lead2", "X", "I"):
        piece = search.best
        count = sizes(piece).get(letter, 0)
        bad = _at(search, "token")
        if letter in ("T", "J") and bad is not None and bad + 1 < count:
            for low in (max(0, bad - 3), 0):  # what comes behind it cannot matter, if the fault is causal
                if search.attempt(cut(piece, letter, range(low, bad + 1))):
                    break
        inner = search.best
        count = sizes(inner).get(letter, 0)
        if count > 1 and letter != "I":
            search.reduce(count, lambda keep, p=inner, x=letter: cut(p, x, keep))  # type: ignore[misc]
        elif count > 1:
            search.attempt(cut(inner, "I", range(max(1, sizes(inner).get("J", 1)))))


def _shrink_slots(search: _Search) -> None:
    piece = search.best
    live = live_slots(piece)
    if "slots" in sizes(piece) and live and len(live) < sizes(piece)["slots"]:
        search.attempt(cut(piece, "slots", live))


def _shrink_channels(search: _Search) -> None:
    for letter in ("V", "P", "C", "K", "R", "D"):
        piece = search.best
        count = sizes(piece).get(letter, 0)
        if count < 2 or (letter == "D" and piece.args.get("group_size")):
            continue
        names = {"V": "value", "P": "channel", "C": "channel", "K": "key", "R": "state_column", "D": "channel"}
        search.reduce(count, lambda keep, p=piece, x=letter: cut(p, x, keep), _at(search, names[letter]))  # type: ignore[misc]


def _shrink_extras(search: _Search) -> None:
    """Optional arguments left out."""
    optional = {argument.name for argument in OPERATIONS[search.best.op].tensors if argument.optional}
    for name in sorted(optional & set(search.best.tensors)):
        piece = search.best
        search.attempt(replace(piece, tensors={key: a for key, a in piece.tensors.items() if key != name}))
    for name in sorted(search.best.args):
        piece = search.best
        search.attempt(replace(piece, args={key: value for key, value in piece.args.items() if key != name}))


def _at(search: _Search, *names: str) -> int | None:
    assert search.found is not None
    found = [search.found.place[name] for name in names if name in search.found.place]
    return int(found[0]) if found else None


def shrink_record(judged: Judged, seconds: float = SECONDS) -> Shrunk | None:
    """The least part of the record itself that is wrong: what came back is cut with the call.

    A row, a head, value columns and no token behind the bad one: cuts after which the kept outputs have to be what they
    were. None where nothing but the whole call shows it.
    """
    started = time.monotonic()
    index = index_in(judged.verdict.message)
    piece = judged.piece
    right = truth(call_of(piece, judged.types))
    whole = Shrunk(piece, judged.verdict, right, judged.reply, 1, time.monotonic() - started)
    if index is None or judged.verdict.status not in ("fail.value", "fail.nonfinite"):
        return whole
    name = judged.verdict.tensor
    best = around(piece, name, index)
    for letter in ("V", "P"):
        count = sizes(best).get(letter, 0)
        place = dict(zip(letters(piece, name, _shaped(piece, name)), index, strict=True))
        if count > 1 and letter in place:
            best = cut(best, letter, [place[letter]])
    if "slots" in sizes(best) and live_slots(best):
        best = cut(best, "slots", live_slots(best))
    right = truth(call_of(best, judged.types))
    if right.status != "ok":
        return whole
    reply = Reply("ok", best.outputs)
    verdict = compare(best, reply, right, judged.precision, judged.types, exact=True, only=name)
    if verdict.passed:
        return whole
    return Shrunk(best, verdict, right, reply, 2, time.monotonic() - started)


def _shaped(piece: Piece, name: str) -> Array:
    return piece.outputs[name] if name in piece.outputs else piece.tensors[name]


def write(
    small: Shrunk, judged: Judged, impl: str, path: Path, *, arrays: str = "numpy", device: str = "cpu"
) -> Path:
    """The least wrong call as a script on the implementation."""
    call = call_of(small.piece, judged.types)
    side = Side("call", call, small.verdict.tensor or next((plan.name for plan in call.results), ""), {})
    said = f"{small.verdict.status} {call.op}\n    {small.verdict.message}"
    index, wanted = index_in(small.verdict.message), expected_in(small.verdict.message)
    return write_script(path, impl, [side], said, index, wanted, arrays=arrays, device=device)


def keep(small: Shrunk, judged: Judged, path: Path) -> Path:
    """The least wrong part of a record, as a record of its own."""
    call = call_of(small.piece, judged.types)
    reply = Reply("ok", small.piece.outputs)
    return save(Recorded(call, reply, implementation="cut from a record"), path.parent, path.stem)
