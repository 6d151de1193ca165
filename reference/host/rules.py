"""Every check of the contract, once: shapes, types and words from the operation table, and the value rules.

Works on facts (shape, element type name, and the integers themselves where they may be looked at), so that NumPy and
torch, a CPU and a GPU share one text. A violated rule raises its own class before anything is written (ERR-1, ERR-3);
the message names label, argument, place and value (ERR-2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from statescan.spec.contract import (
    FLOAT_TYPES,
    INDEX_TYPES,
    OPERATIONS,
    Argument,
    ContractError,
    DtypeError,
    Operation,
    PackingError,
    ShapeError,
    SlotError,
    UnsupportedError,
)  # fmt: skip

CONV_WIDTHS = (2, 3, 4)
LEAST_GATE = -1024.0
"""Its exponential is exactly 0 in float64 and in everything narrower (NUM-3)."""


class Facts(NamedTuple):
    """What a rule may know of a tensor: shape, element type ("f32", "i64", ...), and its integers or None."""

    shape: tuple[int, ...]
    dtype: str
    values: list[int] | None = None


Axes = dict[str, int]


def check_call(name: str, tensors: Mapping[str, Facts | None], settings: Mapping[str, Any]) -> Axes:
    """Check one call against the operation table and every value rule; returns the sizes of the axis letters.

    `tensors` maps each tensor argument to its facts, None where absent. Facts of index tensors whose `values` are None
    (a device tensor that must not be read) skip the value rules.
    """
    op = OPERATIONS[name]
    _check_words(op, settings)
    _check_types(op, tensors)
    axes = _bind_axes(op, tensors, settings)
    if "W" in axes and axes["W"] not in CONV_WIDTHS:
        raise UnsupportedError(f"weight has width {axes['W']}: widths 2, 3 and 4 are served (CONV-9)")
    _check_packing(tensors, axes)
    _check_rows(tensors, axes)
    return axes


# ---------------------------------------------------------------------------------------------------------------------
# Shape rules
# ---------------------------------------------------------------------------------------------------------------------


def _check_words(op: Operation, settings: Mapping[str, Any]) -> None:
    for argument in op.settings:
        value = settings.get(argument.name, argument.default)
        if argument.kind == "word" and value not in argument.words:
            label = "CONV-2" if argument.name == "activation" else "ERR-5"
            served = ", ".join(repr(w) for w in argument.words)
            raise UnsupportedError(f"{argument.name}={value!r}: one of {served} is served ({label})")
    copies = settings.get("num_householder", 1)
    if not isinstance(copies, int) or copies < 1:
        raise UnsupportedError(f"num_householder={copies!r}: a whole number of at least 1 (GDP-2)")


_INDEX_CLASS: dict[str, tuple[type[ContractError], str]] = {
    "cu_seqlens": (PackingError, "PACK-4"), "seq_idx": (PackingError, "PACK-14"),
    "snapshot_positions": (PackingError, "SNAP-3"), "num_tokens": (UnsupportedError, "SPEC-6"),
}  # fmt: skip


def _check_types(op: Operation, tensors: Mapping[str, Facts | None]) -> None:
    for argument in op.tensors:
        facts = tensors.get(argument.name)
        if facts is None:
            if not argument.optional:
                raise ShapeError(f"{argument.name} is None: {op.name} needs it (ERR-1)")
        elif argument.kind == "index" and facts.dtype not in INDEX_TYPES:
            error, label = _INDEX_CLASS.get(argument.name, (SlotError, "SLOT-5"))
            raise error(f"{argument.name} has type {facts.dtype}: integers (i32 or i64) are needed ({label})")
        elif argument.kind == "float" and facts.dtype not in FLOAT_TYPES:
            raise DtypeError(f"{argument.name} has type {facts.dtype}: one of {', '.join(FLOAT_TYPES)} (ERR-1)")


def _bind_axes(op: Operation, tensors: Mapping[str, Facts | None], settings: Mapping[str, Any]) -> Axes:
    axes: Axes = {"M": settings.get("num_householder", 1)}
    swapped = settings.get("state_layout", "KV") == "VK"
    for argument in op.tensors:
        facts = tensors.get(argument.name)
        if facts is None:
            continue
        for shape in argument.alternatives:
            wanted = (*shape[:-2], shape[-1], shape[-2]) if swapped and shape[-2:] == ("K", "V") else shape
            bound = _match(wanted, facts.shape, axes)
            if bound is not None:
                axes = bound
                break
        else:
            raise ShapeError(_shape_message(argument, facts.shape, axes))
    for many, few in (("HV", "H"), ("H", "G")):
        if many in axes and few in axes and (axes[few] == 0 or axes[many] % axes[few]):
            label = "GDN-5" if many == "HV" else "SSD-5"
            raise ShapeError(f"{many}={axes[many]} is no multiple of {few}={axes[few]} ({label})")
    return axes


def _shape_message(argument: Argument, shape: tuple[int, ...], axes: Axes) -> str:
    wanted = " or ".join("[" + ", ".join(s) + "]" for s in argument.alternatives)
    letters = dict.fromkeys(x for s in argument.alternatives for size in s for x in re.findall(r"[A-Za-z]+", size))
    known = ", ".join(f"{x}={axes[x]}" for x in letters if x in axes)
    return f"{argument.name} has shape {list(shape)}: {wanted}{f' with {known}' if known else ''} is needed (ERR-1)"


def _match(wanted: Sequence[str], shape: tuple[int, ...], axes: Axes) -> Axes | None:
    """Sizes of the letters if `shape` fits `wanted` and what is known, else None."""
    if wanted and wanted[0] == "...":
        if len(shape) < len(wanted) - 1:
            return None
        wanted, shape = wanted[1:], shape[len(shape) - len(wanted) + 1 :]
    if len(wanted) != len(shape):
        return None
    found = dict(axes)
    for size, n in zip(wanted, shape, strict=True):
        letter, _, rest = size.partition("*") if "*" in size else size.partition("+")
        if letter.isdigit():
            value, known = n, int(letter)
        elif "*" in size:
            value, known = n, found.setdefault(letter, n // found[rest]) * found[rest]
        else:
            value, known = n - int(rest or 0), found.setdefault(letter, n - int(rest or 0))
        if value != known or value < 0:
            return None
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------------------------------


def _check_packing(tensors: Mapping[str, Facts | None], axes: Axes) -> None:
    offsets, ids = tensors.get("cu_seqlens"), tensors.get("seq_idx")
    batch = axes.get("batch", 1)
    if batch != 1 and (offsets is not None or ids is not None):
        given = "cu_seqlens" if offsets is not None else "seq_idx"
        raise PackingError(f"x has {batch} batch rows and {given} is given: a pack has one row (PACK-13)")
    total = axes.get("T", 0)
    if offsets is not None and offsets.values is not None:
        check_offsets(offsets.values, total)
    if ids is not None and ids.values is not None:
        entering = tensors.get("initial_windows") or tensors.get("initial_state")
        check_ids(ids.values, axes["N"] if entering is not None and offsets is None else None)
        if offsets is not None and offsets.values is not None:
            check_same_boundaries(offsets.values, ids.values)
    if offsets is None and ids is None and axes.get("N", batch) != batch and "T" in axes:
        raise ShapeError(f"entering windows or states have {axes['N']} rows and x has {batch} (ERR-1)")


def check_offsets(offsets: Sequence[int], total: int | None = None, name: str = "cu_seqlens") -> None:
    """Offsets start at 0, do not decrease and do not pass `total` (PACK-4).

    >>> check_offsets([0, 5, 4])
    Traceback (most recent call last):
    statescan.spec.contract.PackingError: cu_seqlens[2]=4 < cu_seqlens[1]=5: offsets must not decrease (PACK-4)
    """
    if not offsets:
        raise PackingError(f"{name} is empty: at least the 0 at its start is needed (PACK-4)")
    if offsets[0] != 0:
        raise PackingError(f"{name}[0]={offsets[0]}: offsets must start at 0 (PACK-4)")
    for i in range(1, len(offsets)):
        if offsets[i] < offsets[i - 1]:
            raise PackingError(
                f"{name}[{i}]={offsets[i]} < {name}[{i - 1}]={offsets[i - 1]}: offsets must not decrease (PACK-4)"
            )
    if total is not None and offsets[-1] > total:
        i = next(i for i, offset in enumerate(offsets) if offset > total)
        raise PackingError(f"{name}[{i}]={offsets[i]} > {total} tokens: offsets must not pass the pack (PACK-4)")


def check_ids(ids: Sequence[int], segments: int | None = None) -> None:
    """Ids do not decrease, -1 stands only at the end, and none passes the entering rows (PACK-14)."""
    for t, i in enumerate(ids):
        if i < -1:
            raise PackingError(f"seq_idx[0, {t}]={i}: an id is -1 or an ordinal (PACK-14)")
        if t and i != -1 and ids[t - 1] == -1:
            raise PackingError(f"seq_idx[0, {t}]={i} after -1: -1 stands only at the end (PACK-14)")
        if t and i != -1 and i < ids[t - 1]:
            before = f"seq_idx[0, {t - 1}]={ids[t - 1]}"
            raise PackingError(f"seq_idx[0, {t}]={i} < {before}: ids must not decrease (PACK-14)")
        if segments is not None and i >= segments:
            raise PackingError(f"seq_idx[0, {t}]={i}: only {segments} entering rows are given (PACK-14)")


def check_same_boundaries(offsets: Sequence[int], ids: Sequence[int]) -> None:
    """Ids and offsets of one call agree; past the last offset ids are all -1 or all the next ordinal (PACK-7)."""
    segments = len(offsets) - 1
    for n in range(segments):
        for t in range(offsets[n], offsets[n + 1]):
            if ids[t] != n:
                raise PackingError(f"seq_idx[0, {t}]={ids[t]} and cu_seqlens says segment {n} (PACK-7)")
    for t in range(offsets[-1], len(ids)):
        if ids[t] not in (-1, segments) or ids[t] != ids[offsets[-1]]:
            raise PackingError(f"seq_idx[0, {t}]={ids[t]} past the last offset {offsets[-1]}: "
                               f"-1 or {segments} throughout (PACK-7)")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Rows and slots
# ---------------------------------------------------------------------------------------------------------------------


def _check_rows(tensors: Mapping[str, Facts | None], axes: Axes) -> None:
    def values(name: str) -> list[int] | None:
        facts = tensors.get(name)
        return None if facts is None else facts.values

    read, write = values("read_slots"), values("write_slots")
    if read is not None:
        check_slots(read, read if tensors.get("write_slots") is None else write, axes["slots"])
    _check_snapshots(tensors, values("snapshot_positions"), values("cu_seqlens"))
    _check_drafts(tensors, values("num_accepted"), values("num_tokens"), axes)


def check_slots(read: Sequence[int], write: Sequence[int] | None, slots: int) -> None:
    """Slots lie in the pool (SLOT-5); write slots are distinct and no other row's read slot (SLOT-4).

    Every negative index means the same: nothing there (SLOT-2). `write` None leaves its rules out.
    """
    for name, indices in (("read_slots", read), ("write_slots", write or ())):
        for n, slot in enumerate(indices):
            if slot >= slots:
                raise SlotError(f"{name}[{n}]={slot} is outside 0..{slots - 1} (SLOT-5)")
    if write is None:
        return
    stored = "read_slots" if write is read else "write_slots"
    reader = {slot: n for n, slot in enumerate(read) if slot >= 0}
    shared = {slot for n, slot in enumerate(read) if slot >= 0 and reader[slot] != n}
    writer: dict[int, int] = {}
    for n, slot in enumerate(write):
        if slot < 0:
            continue
        if slot in writer:
            raise SlotError(f"{stored}[{n}]={slot} is also {stored}[{writer[slot]}]: each stored to once (SLOT-4)")
        writer[slot] = n
        if slot in shared or reader.get(slot, n) != n:
            other = next(m for m, r in enumerate(read) if r == slot and m != n)
            raise SlotError(f"{stored}[{n}]={slot} is also read_slots[{other}] of another row (SLOT-4)")


def _check_snapshots(
    tensors: Mapping[str, Facts | None], positions: Sequence[int] | None, offsets: Sequence[int] | None
) -> None:
    buffers = [name for name in ("snapshot_windows", "snapshot_states") if tensors.get(name) is not None]
    if (tensors.get("snapshot_positions") is None) != (not buffers):
        raise ShapeError("snapshot_positions and the snapshot buffer are given together or not at all (ERR-5)")
    for i, position in enumerate(positions or ()):
        if offsets is not None and (position == 0 or position > offsets[-1]):
            raise PackingError(f"snapshot_positions[{i}]={position} is outside 1..{offsets[-1]} (SNAP-3)")


def _check_drafts(
    tensors: Mapping[str, Facts | None], accepted: Sequence[int] | None, lengths: Sequence[int] | None, axes: Axes
) -> None:
    buffers = [name for name in ("intermediate_windows", "intermediate_states") if tensors.get(name) is not None]
    if tensors.get("num_accepted") is not None and not buffers:
        raise SlotError("num_accepted is given without intermediates to resume from (SPEC-3)")
    if buffers and axes["J"] > axes["I"]:
        raise UnsupportedError(f"{axes['J']} tokens a row and {axes['I']} intermediate entries (SPEC-1)")
    for n, count in enumerate(accepted or ()):
        if count >= axes["I"]:
            raise SlotError(f"num_accepted[{n}]={count} is outside 0..{axes['I'] - 1} (SPEC-3)")
    for n, length in enumerate(lengths or ()):
        if not 0 <= length <= axes["J"]:
            raise UnsupportedError(f"num_tokens[{n}]={length} is outside 0..{axes['J']} (SPEC-6)")


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


def check_gate(place: Sequence[int], value: float) -> None:
    """A log-decay lies in -1024..0; NaN does not (NUM-3)."""
    if not LEAST_GATE <= value <= 0:
        where = ", ".join(str(i) for i in place)
        raise UnsupportedError(f"g[{where}]={value} is outside {LEAST_GATE:g}..0: a log-decay is meant (NUM-3)")
