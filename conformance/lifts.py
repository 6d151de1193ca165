"""Lifts: rewritings that carry a hand-sized exact story to the sizes an implementation serves, and cannot change it.

Expected values are rewritten by the same rule as inputs, so they stay exact. Which lifts keep a vector true is stated
in the vector; the runner applies them where a claim's limits ask for other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from statescan.conformance.calls import Array, Gradient, axis_names, bind_axes
from statescan.conformance.compare import Expected
from statescan.spec.contract import OPERATIONS

Rewrite = Callable[[str, Array, tuple[str, ...]], Array]

MOST_SCALE = 7


@dataclass(frozen=True)
class Story:
    """A decoded vector: one call and what it must give."""

    op: str
    args: Mapping[str, Any]
    tensors: Mapping[str, Array]
    expect: Mapping[str, Expected] = field(default_factory=dict)
    grad: Gradient | None = None
    installed: Mapping[str, str | None] = field(default_factory=dict)


def fit_limits(story: Story, vector: Mapping[str, Any], limits: Mapping[str, Any]) -> tuple[Story, str] | str:
    """The story lifted into the sizes of `limits`, with the lifts applied; or the limit that no lift can meet.

    A limit is a list of sizes, or an object with `min`, `max`, `multiple`.
    """
    allowed, applied = vector.get("lifts", []), []
    for letter, limit in limits.items():
        size = bind_axes(story.op, story.tensors, story.args).get(letter)
        if size is None or _inside(size, limit):
            continue
        lift = {"C": "channels", "W": "window"}.get(letter, "")
        target = _next_size(size, limit)
        if lift not in allowed or target is None:
            return f"{letter}={size}"
        story = LIFTS[lift](story, target)
        applied.append(f"{lift} {target}")
    return story, ", ".join(applied)


def lift_channels(story: Story, channels: int) -> Story:
    """Copies of the channels up to `channels`, copy c scaled by 2^(c mod 8) where the convolution is linear."""
    have = bind_axes(story.op, story.tensors, story.args)["C"]
    copy = np.arange(channels) // have
    linear = story.args.get("activation") is None
    scale = np.exp2(copy % (MOST_SCALE + 1)) if linear and story.grad is None else np.ones(channels)

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if "C" not in letters:
            return array
        axis = letters.index("C")
        wide = np.take(array, np.arange(channels) % have, axis=axis)
        if name == "weight":
            return wide
        along = [channels if i == axis else 1 for i in range(array.ndim)]
        return (wide.astype(np.float64) * scale.reshape(along)).astype(array.dtype)

    return rewritten(story, rewrite)


def lift_window(story: Story, width: int) -> Story:
    """Zero taps in front: outputs stand; windows gain older columns, which hold earlier inputs and are not judged."""
    have = bind_axes(story.op, story.tensors, story.args)["W"]

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if "W" not in letters:
            return array
        front = [(width - have, 0) if letter == "W" else (0, 0) for letter in letters]
        return np.pad(array, front)

    lifted = rewritten(story, rewrite)
    wider = {name for name, want in story.expect.items()
             if want.array is not None and lifted.expect[name].array is not None
             and lifted.expect[name].array.shape != want.array.shape}  # type: ignore[union-attr]  # fmt: skip
    expect = {name: replace(want, ignore_columns=want.ignore_columns + width - have) if name in wider else want
              for name, want in lifted.expect.items()}  # fmt: skip
    return replace(lifted, expect=expect)


def lift_slots(story: Story, slots: int) -> Story:
    """A larger pool: slot s becomes slots-1-s, the new slots hold NaN and must stay as they are."""
    have = bind_axes(story.op, story.tensors, story.args)["slots"]
    moved = slots - 1 - np.arange(have)

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if name in ("read_slots", "write_slots", "slots"):
            return np.where(array >= 0, slots - 1 - array, array).astype(array.dtype)
        if "slots" not in letters:
            return array
        wide = np.full((slots, *array.shape[1:]), np.nan, array.dtype)
        wide[moved] = array
        return wide

    lifted = rewritten(story, rewrite)
    expect = {name: replace(want, bits_outside=tuple(slots - 1 - s for s in want.bits_outside))
              if want.bits_outside is not None and name in story.tensors and name.endswith(("pool", "intermediates"))
              else want for name, want in lifted.expect.items()}  # fmt: skip
    return replace(lifted, expect=expect)


def lift_pad_rows(story: Story, rows: int) -> Story:
    """Padding: `rows` NaN tokens after the last offset and one padding request; they give zeros and touch nothing."""
    lead = {"read_slots": -1, "write_slots": -1}

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if name in lead:
            return np.append(array, np.array([lead[name]], array.dtype))
        if name == "cu_seqlens":
            return np.append(array, array[-1:])
        if "T" not in letters:
            return array
        result = name not in story.tensors
        more = np.full((array.shape[0], rows, *array.shape[2:]), 0 if result else np.nan, array.dtype)
        return np.concatenate([array, more], axis=1)

    return rewritten(story, rewrite)


LIFTS: dict[str, Callable[[Story, int], Story]] = {
    "channels": lift_channels, "window": lift_window, "slots": lift_slots, "pad_rows": lift_pad_rows,
}  # fmt: skip


def rewritten(story: Story, rewrite: Rewrite) -> Story:
    """Apply one rewriting to every tensor of a story: inputs, cotangents and expectations."""
    op = OPERATIONS[story.op]
    entries: tuple[Any, ...] = (*op.results, *op.tensors)
    known = {entry.name: entry for entry in entries}

    def each(name: str, array: Array) -> Array:
        entry = known.get(name.removeprefix("grad."))
        letters = () if entry is None else axis_names(entry, array.ndim, story.args)
        return rewrite(name, array, letters)

    tensors = {name: each(name, array) for name, array in story.tensors.items()}
    expect = {name: want if want.array is None else replace(
        want, array=each(name, want.array), either=tuple(each(name, other) for other in want.either),
    ) for name, want in story.expect.items()}  # fmt: skip
    grad = story.grad
    if grad is not None:
        grad = Gradient(grad.of, {name: each(name, array) for name, array in grad.cotangents.items()})
    return replace(story, tensors=tensors, expect=expect, grad=grad)


def _inside(size: int, limit: Any) -> bool:
    if isinstance(limit, Mapping):
        high = limit.get("max", size)
        return bool(limit.get("min", size) <= size <= high and size % limit.get("multiple", 1) == 0)
    return size in limit


def _next_size(size: int, limit: Any) -> int | None:
    if isinstance(limit, Mapping):
        step = limit.get("multiple", 1)
        least = max(size, limit.get("min", size))
        found = -(-least // step) * step
        return found if found <= limit.get("max", found) else None
    return min((n for n in limit if n >= size), default=None)
