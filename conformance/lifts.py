"""Lifts: rewritings that carry a hand-sized exact story to the sizes an implementation serves, and cannot change it.

Expected values are rewritten by the same rule as inputs, so they stay exact. Which lifts keep a vector true is stated
in the vector; the runner applies them where a claim's limits ask for other sizes. In the delta family keys live on axis
K under H heads and values on axis V under HV; in SSD they are the columns R under G groups and the channels P under H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from statescan.conformance.calls import Array, Axes, Gradient, axis_names, bind_axes, offsets_of
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
    far: tuple[str, ...] = ()


class Roles(NamedTuple):
    """The axis letters of a family: keys and their heads, values and theirs."""

    key: str
    key_head: str
    value: str
    value_head: str


ROLES: dict[str, Roles] = {"delta": Roles("K", "H", "V", "HV"), "ssd": Roles("R", "G", "P", "H")}
SCALED = {"v", "x", "o", "y", "initial_state", "final_state", "state_pool", "snapshot_states", "intermediate_states"}
"""What the lift of the heads scales: values, states and outputs."""


# ---------------------------------------------------------------------------------------------------------------------
# Which lifts an implementation asks for
# ---------------------------------------------------------------------------------------------------------------------


def fit_limits(story: Story, vector: Mapping[str, Any], limits: Mapping[str, Any]) -> tuple[Story, str] | str:
    """The story lifted into the sizes of `limits`, with the lifts applied; or the limit that no lift can meet.

    A limit is a list of sizes, or an object with `min`, `max`, `multiple`; `state_layout` is a list of words. A chunk
    length asks for no size: `stretches` serves it.
    """
    applied: list[str] = []
    for fit in (_fit_layout, _fit_sizes, _fit_heads):
        fitted = fit(story, vector.get("lifts", []), limits)
        if isinstance(fitted, str):
            return fitted
        story, lift = fitted
        applied += [lift] if lift else []
    return story, ", ".join(applied)


def stretches(story: Story, vector: Mapping[str, Any], limits: Mapping[str, Any]) -> list[tuple[Story, str]]:
    """The same story with its tokens first in their chunks, last in them, and several to a chunk at odd places."""
    chunk = int(limits.get("chunk", 0))
    if chunk < 2 or "stretch" not in vector.get("lifts", []):
        return []
    gaps = [(chunk - 1, 0), (chunk - 1, chunk - 1), (chunk // 3, 3)]
    return [(lift_stretch(story, n, lead), f"stretch {n}, {lead}") for n, lead in gaps]


def _fit_layout(story: Story, allowed: Sequence[str], limits: Mapping[str, Any]) -> tuple[Story, str] | str:
    served = limits.get("state_layout")
    words = [a.words for a in OPERATIONS[story.op].settings if a.name == "state_layout"]
    own = story.args.get("state_layout", "KV")
    if served is None or not words or own in served or own not in words[0]:
        return story, ""
    if "layout" not in allowed or own != "KV" or "VK" not in served:
        return f"state_layout.{own}"
    return lift_layout(story), "layout VK"


def _fit_sizes(story: Story, allowed: Sequence[str], limits: Mapping[str, Any]) -> tuple[Story, str] | str:
    lift_of = {"C": "channels", "W": "window", "K": "pad_k", "R": "pad_k", "V": "pad_v", "P": "pad_v"}
    heads, applied = _head_letters(story), []
    for letter, limit in limits.items():
        size = _axes(story).get(letter)
        if size is None or letter in heads or _inside(size, limit):
            continue
        lift, target = lift_of.get(letter, ""), _next_size(size, limit)
        if lift not in allowed or target is None:
            return f"{letter}={size}"
        story = LIFTS[lift](story, target)
        applied.append(f"{lift} {target}")
    return story, ", ".join(applied)


def _fit_heads(story: Story, allowed: Sequence[str], limits: Mapping[str, Any]) -> tuple[Story, str] | str:
    letters, axes = _head_letters(story), _axes(story)
    if not letters or all(_inside(axes[letter], limits[letter]) for letter in letters if letter in limits):
        return story, ""
    few, many = (axes[letter] for letter in letters)
    missing = next(f"{x}={axes[x]}" for x in letters if x in limits and not _inside(axes[x], limits[x]))
    few_to = _next_size(few, limits.get(letters[0], [few]), few)
    many_to = None if few_to is None else _next_size(many, limits.get(letters[1], {}), few_to * (many // few))
    if "heads" not in allowed or few_to is None or many_to is None:
        return missing
    story, padded = _room_to_rotate(story, few_to // few, allowed, limits)
    if padded is None:
        return missing
    return lift_heads(story, few_to, many_to), f"{padded}heads {few_to}, {many_to}"


def _room_to_rotate(
    story: Story, copies: int, allowed: Sequence[str], limits: Mapping[str, Any]
) -> tuple[Story, str | None]:
    """As many keys as there are copies of a head, so that each can be rotated by another number of rows."""
    letter = ROLES[OPERATIONS[story.op].family].key
    size = _axes(story)[letter]
    if size >= copies:
        return story, ""
    target = _next_size(copies, limits.get(letter, {}))
    if target is None or "pad_k" not in allowed:
        return story, None
    return lift_pad_k(story, target), f"pad_k {target}, "


def _axes(story: Story) -> Axes:
    return bind_axes(story.op, story.tensors, story.args)


def _head_letters(story: Story) -> tuple[str, ...]:
    """Letters of the key heads and of the value heads, where the operation has both."""
    roles, axes = ROLES.get(OPERATIONS[story.op].family), _axes(story)
    if roles is None or not {roles.key_head, roles.value_head} <= set(axes):
        return ()
    return roles.key_head, roles.value_head


# ---------------------------------------------------------------------------------------------------------------------
# The convolution
# ---------------------------------------------------------------------------------------------------------------------


def lift_channels(story: Story, channels: int) -> Story:
    """Copies of the channels up to `channels`, copy c scaled by 2^(c mod 8) where the convolution is linear."""
    have = _axes(story)["C"]
    copy = np.arange(channels) // have
    linear = story.args.get("activation") is None
    scale = np.exp2(copy % (MOST_SCALE + 1)) if linear and story.grad is None else np.ones(channels)

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if "C" not in letters:
            return array
        axis = letters.index("C")
        wide = np.take(array, np.arange(channels) % have, axis=axis)
        return wide if name == "weight" else _scaled(wide, scale, axis)

    return rewritten(story, rewrite)


def lift_window(story: Story, width: int) -> Story:
    """Zero taps in front: outputs stand; windows gain older columns, which hold earlier inputs and are not judged."""
    have = _axes(story)["W"]

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


# ---------------------------------------------------------------------------------------------------------------------
# Keys, values and heads
# ---------------------------------------------------------------------------------------------------------------------


def lift_pad_k(story: Story, keys: int) -> Story:
    """More keys: tokens, per-channel gates and states get zeros there, and so must every state that comes out."""
    return _padded(story, ROLES[OPERATIONS[story.op].family].key, keys)


def lift_pad_v(story: Story, values: int) -> Story:
    """More value channels: zeros go in, zeros come out."""
    return _padded(story, ROLES[OPERATIONS[story.op].family].value, values)


def _padded(story: Story, letter: str, size: int) -> Story:
    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if letter not in letters:
            return array
        axis = letters.index(letter)
        # what is all NaN (a guard, a padding row) stays so: a guard of zeros would not show that it was cleared
        guard = np.isnan(array).all(axis=axis, keepdims=True)
        more = np.where(guard, np.nan, 0.0).astype(array.dtype)
        return np.concatenate([array, np.repeat(more, size - array.shape[axis], axis=axis)], axis=axis)

    return rewritten(story, rewrite)


def lift_heads(story: Story, key_heads: int, value_heads: int) -> Story:
    """Copies of the heads, no two alike: copy i of a key head with its keys rotated by i rows, and the value heads
    that share one with values, states and outputs times 1, 2, 4 ... 2^7, 1 ..."""
    roles, axes = ROLES[OPERATIONS[story.op].family], _axes(story)
    have, own = axes[roles.key_head], axes[roles.value_head] // axes[roles.key_head]
    share = value_heads // key_heads  # value heads of one key head; `own` of them are the story's
    key_head, place = np.divmod(np.arange(value_heads), share)
    source = key_head % have * own + place % own
    scale = np.exp2(place // own % (MOST_SCALE + 1))
    turns = {roles.key_head: np.arange(key_heads) // have, roles.value_head: key_head // have}
    takes = {roles.key_head: np.arange(key_heads) % have, roles.value_head: source}

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        for letter in (x for x in (roles.key_head, roles.value_head) if x in letters):
            axis = letters.index(letter)
            array = np.take(array, takes[letter], axis=axis)
            if roles.key in letters:
                array = _rotated(array, turns[letter], axis, letters.index(roles.key))
            if letter == roles.value_head and name in SCALED:
                array = _scaled(array, scale, axis)
        return array

    return rewritten(story, rewrite)


def _rotated(array: Array, turns: Array, head: int, key: int) -> Array:
    """Head i with its keys moved on by `turns[i]`, the last ones to the front."""
    keys = array.shape[key]
    index = (np.arange(keys)[None, :] - turns[:, None]) % keys  # [heads, keys]
    moved = np.moveaxis(array, (head, key), (0, 1))
    return np.moveaxis(moved[np.arange(len(turns))[:, None], index], (0, 1), (head, key))


def _scaled(array: Array, scale: Array, axis: int) -> Array:
    along = [scale.size if i == axis else 1 for i in range(array.ndim)]
    return (array.astype(np.float64) * scale.reshape(along)).astype(array.dtype)


def lift_layout(story: Story) -> Story:
    """The pools of a "KV" story as an implementation of "VK" wants them."""
    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        pools = name in ("state_pool", "snapshot_states", "intermediate_states")
        return np.swapaxes(array, -1, -2).copy() if pools else array

    return replace(rewritten(story, rewrite), args={**story.args, "state_layout": "VK"})


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


def lift_stretch(story: Story, n: int, lead: int) -> Story:
    """`lead` tokens that change nothing before each segment's first token and `n` after each token: they give 0.

    Keys, queries, beta and log-decay are 0 there (SSD: the step is), so that every state stands.
    """
    if story.grad is not None:
        raise ValueError("a gradient story cannot be stretched: a token that changes nothing has a gradient")
    tokens = _axes(story)["T"]
    offsets = offsets_of(story.tensors, tokens)
    place, bounds = _places(offsets, tokens, n, lead)
    copies = int(story.args.get("num_householder", 1))

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if name in ("cu_seqlens", "seq_idx"):
            return _new_bounds(name, array, bounds, place[tokens])
        if name == "snapshot_positions":
            return np.array([place[p - 1] + 1 if p > 0 else p for p in array.tolist()], array.dtype)
        for letter, each in (("T", 1), ("T*M", copies)):
            if letter in letters:
                axis = letters.index(letter)
                rows = [place[t] * each + m for t in range(tokens) for m in range(each)]
                wide = np.zeros((*array.shape[:axis], place[tokens] * each, *array.shape[axis + 1 :]), array.dtype)
                wide[...] = _idle_step(story) if name == "dt" else 0
                np.moveaxis(wide, axis, 0)[rows] = np.moveaxis(array, axis, 0)
                return wide
        return array

    return rewritten(story, rewrite)


def _places(offsets: Sequence[int], tokens: int, n: int, lead: int) -> tuple[list[int], list[int]]:
    """Where each token goes (and, last, how many there are then), and the new offsets; a tail is not stretched."""
    place, bounds, at = [], [0], 0
    for start, end in pairwise(offsets):
        at += lead if end > start else 0
        place += [at + i * (1 + n) for i in range(end - start)]
        at += (end - start) * (1 + n)
        bounds.append(at)
    return [*place, *range(at, at + tokens - offsets[-1] + 1)], bounds


def _new_bounds(name: str, array: Array, bounds: Sequence[int], total: int) -> Array:
    if name == "cu_seqlens":
        return np.array(bounds, array.dtype)
    ids = np.full((1, total), -1, array.dtype)
    for segment, (start, end) in enumerate(pairwise(bounds)):
        ids[0, start:end] = segment
    return ids


def _idle_step(story: Story) -> Array:
    """The dt of each head that makes the step 0: softplus(-1024) is 0, and without softplus the bias is undone."""
    if story.args.get("dt_softplus", True):
        return np.array(-1024.0)
    bias = story.tensors.get("dt_bias")
    return np.array(0.0) if bias is None else -bias.astype(np.float64)


def lift_pad_rows(story: Story, rows: int) -> Story:
    """Padding: `rows` NaN tokens after the last offset and one padding request; they give zeros and touch nothing."""
    copies, pooled = int(story.args.get("num_householder", 1)), "read_slots" in story.tensors
    update = OPERATIONS[story.op].token_axis == "J"

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if name in ("read_slots", "write_slots", "num_accepted"):
            return np.append(array, np.array([-1], array.dtype))
        if name == "num_tokens":
            return np.append(array, np.array([_axes(story)["J"]], array.dtype))
        if name == "cu_seqlens":
            return np.append(array, array[-1:]) if pooled else array
        if name == "seq_idx":
            return np.append(array, np.full((1, rows), -1, array.dtype), axis=1)
        more = {"T": rows, "T*M": rows * copies, "N": int(update)}
        for letter in (x for x in letters if more.get(x)):
            axis, fill = letters.index(letter), np.nan if name in story.tensors else 0.0
            shape = (*array.shape[:axis], more[letter], *array.shape[axis + 1 :])
            array = np.concatenate([array, np.full(shape, fill).astype(array.dtype)], axis=axis)
        return array

    return rewritten(story, rewrite)


def lift_repeat(story: Story, times: int) -> Story:
    """The story `times` over in one call, each time with slots, entering states and snapshots of its own."""
    axes = _axes(story)
    copies, tokens = int(story.args.get("num_householder", 1)), axes.get("T", 0)
    end = offsets_of(story.tensors, tokens)[-1]

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if name in ("read_slots", "write_slots"):
            return _numbered(array, array >= 0, axes["slots"], times)
        if name == "snapshot_positions":
            return _numbered(array, array > 0, end, times)
        if name == "cu_seqlens":
            return np.append(_numbered(array[:-1], array[:-1] >= 0, end, times), array[-1:] * times)
        if name == "seq_idx":
            repeated = _numbered(array[0, :end], array[0, :end] >= 0, axes["N"], times)
            return np.append(repeated, array[0, end:])[None]
        for letter, each in (("T", 1), ("T*M", copies)):
            if letter in letters:
                axis = letters.index(letter)
                head, tail = np.split(array, [end * each], axis=axis)
                return np.concatenate([head] * times + [tail], axis=axis)
        own = [axis for axis, letter in enumerate(letters) if letter in ("N", "slots", "X")]
        return np.concatenate([array] * times, axis=own[0]) if own else array

    sizes = {"snapshot_states": axes.get("X", 0), "snapshot_windows": axes.get("X", 0)}
    return _renumbered(rewritten(story, rewrite), lambda name, s: [
        s + i * sizes.get(name, axes.get("slots", 0)) for i in range(times)])  # fmt: skip


def _numbered(array: Array, meant: Array, step: int, times: int) -> Array:
    """`times` copies one after another, what is meant raised by `step` from copy to copy."""
    return np.concatenate([np.where(meant, array + i * step, array).astype(array.dtype) for i in range(times)])


# ---------------------------------------------------------------------------------------------------------------------
# Slots
# ---------------------------------------------------------------------------------------------------------------------


def lift_slots(story: Story, slots: int) -> Story:
    """A larger pool: slot s becomes slots-1-s, the new slots hold NaN and must stay as they are."""
    have = _axes(story)["slots"]
    moved = slots - 1 - np.arange(have)

    def rewrite(name: str, array: Array, letters: tuple[str, ...]) -> Array:
        if name in ("read_slots", "write_slots", "slots"):
            return np.where(array >= 0, slots - 1 - array, array).astype(array.dtype)
        if "slots" not in letters:
            return array
        wide = np.full((slots, *array.shape[1:]), np.nan, array.dtype)
        wide[moved] = array
        return wide

    def renumber(name: str, slot: int) -> list[int]:
        return [slot] if name.startswith("snapshot_") else [slots - 1 - slot]

    return _renumbered(rewritten(story, rewrite), renumber)


def _renumbered(story: Story, renumber: Callable[[str, int], list[int]]) -> Story:
    """Other names for the rows of pools and buffers that a call may write."""
    expect = {name: want if want.bits_outside is None else replace(
        want, bits_outside=tuple(sorted(new for old in want.bits_outside for new in renumber(name, old))),
    ) for name, want in story.expect.items()}  # fmt: skip
    return replace(story, expect=expect)


LIFTS: dict[str, Callable[[Story, int], Story]] = {
    "channels": lift_channels, "window": lift_window, "pad_k": lift_pad_k, "pad_v": lift_pad_v, "slots": lift_slots,
    "pad_rows": lift_pad_rows, "repeat": lift_repeat,
}  # fmt: skip
"""Lifts to one size; `lift_heads` and `lift_stretch` take two numbers, `lift_layout` none."""

NAMES: tuple[str, ...] = (*LIFTS, "heads", "stretch", "layout")
"""Every word that a vector's `lifts` may hold."""


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


def _next_size(size: int, limit: Any, step: int = 1) -> int | None:
    """The least size of at least `size` that the limit allows and `step` divides."""
    if isinstance(limit, Mapping):
        both = int(np.lcm(int(limit.get("multiple", 1)), step))
        found = -(-max(size, limit.get("min", size)) // both) * both
        return found if found <= limit.get("max", found) else None
    return min((n for n in limit if n >= size and n % step == 0), default=None)
