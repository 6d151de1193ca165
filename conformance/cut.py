"""A call cut to some of its rows, tokens, heads or channels: still a call of the same operation.

    cut(piece, "T", [3, 4, 5])       three tokens of a pack; offsets, ids and snapshot positions follow

Cutting takes numbers away and changes none, so that what an implementation returned for the kept places can be cut the
same way. Axis letters are those of the operation table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statescan.conformance.calls import Array, axis_names, bind_axes
from statescan.spec.contract import OPERATIONS, Argument, Result

FREE = ("V", "P", "C", "K", "R", "D")
"""Axes of which every index may go."""
HEADS = {"delta": ("H", "HV"), "ssd": ("G", "H")}
"""The heads that are shared, and those that share them."""


@dataclass(frozen=True)
class Piece:
    """A call by its tensors, and what came back: results by name, and `after.<name>`."""

    op: str
    args: Mapping[str, Any]
    tensors: Mapping[str, Array]
    outputs: Mapping[str, Array]


def sizes(piece: Piece) -> dict[str, int]:
    """Sizes of the axis letters; `batch` too, and those of leading axes."""
    axes = bind_axes(piece.op, piece.tensors, piece.args)
    for name, array in piece.tensors.items():
        for letter, n in zip(letters(piece, name, array), array.shape, strict=False):
            if letter not in ("1", "N+1") and "*" not in letter:
                axes.setdefault(letter, n)
    return axes


def letters(piece: Piece, name: str, array: Array) -> tuple[str, ...]:
    """The axis letters of an input, a result or `after.<input>`; the first axis of a batch is `batch`."""
    bare = name.removeprefix("after.")
    op = OPERATIONS[piece.op]
    entries: tuple[Argument | Result, ...] = (*op.tensors, *op.results)
    what = next((entry for entry in entries if entry.name == bare), None)
    if what is None:
        return ()
    named = axis_names(what, array.ndim, piece.args)
    if named[:1] == ("1",) and array.shape[0] != 1:
        named = ("batch", *named[1:])
    if piece.op == "rmsnorm_gated" and bare == "weight":
        named = ("D",) if array.shape[0] == piece.tensors["x"].shape[-1] else ("group",)
    return named


def cut(piece: Piece, letter: str, keep: Sequence[int]) -> Piece:
    """The piece with the indices `keep` of an axis, ascending. Rows of a pack take their tokens with them."""
    packed = "cu_seqlens" in piece.tensors or "seq_idx" in piece.tensors
    if letter == "N" and packed:
        piece = cut(piece, "T", _tokens_of(piece, keep))
    if letter == "T":
        piece = _follow_tokens(piece, keep)
    if letter == "J" and "num_tokens" in piece.tensors:
        piece = _with(piece, "num_tokens", _ranks(keep, piece.tensors["num_tokens"]))
    if letter == "slots":
        piece = _renumber(piece, keep)
    if letter == "N" and packed:
        piece = _follow_rows(piece, keep)
    copies = int(piece.args.get("num_householder", 1))
    many = [i * copies + m for i in keep for m in range(copies)]

    def taken(name: str, array: Array) -> Array:
        for axis, own in enumerate(letters(piece, name, array)):
            if own == letter:
                array = np.take(array, list(keep), axis)
            elif own == f"{letter}*M":
                array = np.take(array, many, axis)
        return array

    return replace(
        piece, tensors={name: taken(name, array) for name, array in piece.tensors.items()},
        outputs={name: taken(name, array) for name, array in piece.outputs.items()},
    )  # fmt: skip


def cut_heads(piece: Piece, few: Sequence[int], within: Sequence[int]) -> Piece:
    """The piece with some of the shared heads, and of the heads that share each the places `within`."""
    shared, sharing = HEADS[OPERATIONS[piece.op].family]
    axes = sizes(piece)
    group = axes[sharing] // axes[shared]
    piece = cut(piece, sharing, [h * group + i for h in few for i in within])
    return cut(piece, shared, few)


def live_slots(piece: Piece) -> list[int]:
    """Slots of the pool that the call names."""
    named = [piece.tensors[name].ravel() for name in ("read_slots", "write_slots") if name in piece.tensors]
    count = sizes(piece).get("slots", 0)
    return sorted({int(s) for array in named for s in array if 0 <= s < count})


def written_slots(piece: Piece) -> list[int]:
    """Slots that the call may store to."""
    indices = piece.tensors.get("write_slots", piece.tensors.get("read_slots"))
    return [] if indices is None else sorted({int(s) for s in indices.ravel() if s >= 0})


def offsets(piece: Piece) -> list[int]:
    """Where the rows of a pack begin, and the end of the last; for ids, of each ordinal."""
    cu, ids = piece.tensors.get("cu_seqlens"), piece.tensors.get("seq_idx")
    if cu is not None:
        return [int(i) for i in cu]
    if ids is None:
        return [0, sizes(piece).get("T", 0)]
    row = ids[0]
    return [int((row[row >= 0] < n).sum()) for n in range(sizes(piece)["N"] + 1)]


def _tokens_of(piece: Piece, rows: Sequence[int]) -> list[int]:
    ends = offsets(piece)
    return [t for n in rows for t in range(ends[n], ends[n + 1])]


def _ranks(keep: Sequence[int], values: Array) -> Array:
    """How many of the kept indices lie below each value."""
    return np.searchsorted(np.asarray(keep, np.int64), values).astype(values.dtype)


def _follow_tokens(piece: Piece, keep: Sequence[int]) -> Piece:
    for name in ("cu_seqlens",):
        if name in piece.tensors:
            piece = _with(piece, name, _ranks(keep, piece.tensors[name]))
    positions = piece.tensors.get("snapshot_positions")
    if positions is not None:
        kept = np.isin(positions - 1, keep)
        moved = np.where(kept, _ranks(keep, positions), -1).astype(positions.dtype)
        piece = _with(piece, "snapshot_positions", moved)
    return piece


def _follow_rows(piece: Piece, keep: Sequence[int]) -> Piece:
    """Offsets and ids without the rows that went; their tokens are gone already."""
    if "cu_seqlens" in piece.tensors:
        cu = piece.tensors["cu_seqlens"]
        piece = _with(piece, "cu_seqlens", cu[[0, *(n + 1 for n in keep)]] if len(keep) else cu[:1] * 0)
    if "seq_idx" in piece.tensors:
        new = {n: i for i, n in enumerate(keep)}
        ids = piece.tensors["seq_idx"]
        moved = np.array([[new.get(int(n), -1) for n in row] for row in ids], ids.dtype).reshape(ids.shape)
        piece = _with(piece, "seq_idx", moved)
    return piece


def _renumber(piece: Piece, keep: Sequence[int]) -> Piece:
    new, count = {slot: i for i, slot in enumerate(keep)}, sizes(piece)["slots"]
    for name in ("read_slots", "write_slots"):
        if name in piece.tensors:
            old = piece.tensors[name]
            outside = [int(s) if s < 0 else int(s) - count + len(keep) for s in old]
            moved = [new.get(int(s), o) for s, o in zip(old, outside, strict=True)]
            piece = _with(piece, name, np.array(moved, old.dtype))
    return piece


def _with(piece: Piece, name: str, array: Array) -> Piece:
    outputs = dict(piece.outputs)
    if f"after.{name}" in outputs:
        outputs[f"after.{name}"] = array
    return replace(piece, tensors={**piece.tensors, name: array}, outputs=outputs)
