"""Rows of a call on arguments and on slot pools: what every variation of a recurrence shares, except its order.

A recurrence hands over `scan(row, tokens, entering, marks)`: it runs some tokens of one batch row from an entering
state in float32 and returns their outputs and the state after each number of tokens in `marks`. Rows may be taken in
any order, for none of them knows of another. All states are read before one is stored, and a state is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import Any

import torch

Tensor = torch.Tensor
Given = dict[str, Any]
States = dict[int, Tensor]
Scan = Callable[[int, slice, Tensor, Collection[int]], tuple[Tensor, States]]
Segment = tuple[int, slice]

Store = tuple[Tensor, tuple[int, ...], Tensor]
"""A pool, a place in it, and what goes there."""

ORDERS = ("first to last", "last to first", "longest first")


def packed(scan: Scan, given: Given, leading: str, valued: str, inner: tuple[int, ...], order: str) -> Any:
    """The packed form: outputs, and the final states `[N, *inner]` if asked for."""
    values, entering = given[valued], given.get("initial_state")
    segments = segments_of(given, leading)
    outputs = values.new_zeros(*given[leading].shape[:2], *values.shape[2:], dtype=torch.float32)
    final: list[Any] = [None] * len(segments)
    for n in ordered(segments, order):
        row, tokens = segments[n]
        count = tokens.stop - tokens.start
        start = outputs.new_zeros(inner) if entering is None else entering[n].float()
        outputs[row, tokens], states = scan(row, tokens, start, (count,))
        final[n] = states[count]
    kind = torch.float32 if entering is None else entering.dtype
    last = (torch.stack(final) if final else outputs.new_zeros(0, *inner)).to(kind)
    return outputs.to(values.dtype), last if given.get("output_final_state") else None


def prefill(scan: Scan, given: Given, leading: str, valued: str, order: str) -> Any:
    """The packed form from and to slots, with snapshots after any token."""
    values, offsets = given[valued], given["cu_seqlens"].tolist()
    pool, snapshots = keys_first(given, "state_pool"), keys_first(given, "snapshot_states")
    positions = [] if snapshots is None else given["snapshot_positions"].tolist()
    outputs = values.new_zeros(*given[leading].shape[:2], *values.shape[2:], dtype=torch.float32)
    segments = [(0, slice(a, b)) for a, b in pairwise(offsets)]
    stores: list[Store] = []
    for n, read, write in live(given, ordered(segments, order)):
        _, tokens = segments[n]
        count = tokens.stop - tokens.start
        wanted = {i: p - tokens.start for i, p in enumerate(positions) if tokens.start < p <= tokens.stop}
        outputs[0, tokens], states = scan(0, tokens, enter(pool, read), {count, *wanted.values()})
        stores += [(snapshots, (i,), states[mark]) for i, mark in wanted.items()]
        stores += [(pool, (write,), states[count])] if write >= 0 else []
    store(stores)
    return outputs.to(values.dtype)


def update(scan: Scan, given: Given, leading: str, valued: str, order: str) -> Any:
    """J tokens a row from and to slots, with every state on the way where it is asked for."""
    values, pool, entries = given[valued], keys_first(given, "state_pool"), keys_first(given, "intermediate_states")
    rows, steps = given[leading].shape[:2]
    accepted = [-1] * rows if given.get("num_accepted") is None else given["num_accepted"].tolist()
    lengths = [steps] * rows if given.get("num_tokens") is None else given["num_tokens"].tolist()
    outputs = values.new_zeros(rows, steps, *values.shape[2:], dtype=torch.float32)
    stores: list[Store] = []
    for n, read, write in live(given, ordered([(n, slice(0, lengths[n])) for n in range(rows)], order)):
        resumed = accepted[n] >= 0 and read >= 0
        start = entries[read, accepted[n]].float() if resumed else enter(pool, read)
        outputs[n, : lengths[n]], states = scan(n, slice(0, lengths[n]), start, range(lengths[n] + 1))
        if write >= 0:
            stores.append((pool, (write,), states[lengths[n]]))
            stores += [] if entries is None else [(entries, (write, j), states[j + 1]) for j in range(lengths[n])]
    store(stores)
    return outputs.to(values.dtype)


def segments_of(given: Given, leading: str) -> list[Segment]:
    """Batch row and tokens of each segment: by offsets, else by ids, else each batch row is one."""
    batch, tokens = given[leading].shape[:2]
    offsets, ids = given.get("cu_seqlens"), given.get("seq_idx")
    if offsets is not None:
        return [(0, slice(a, b)) for a, b in pairwise(offsets.tolist())]
    if ids is None:
        return [(row, slice(0, tokens)) for row in range(batch)]
    entering = given.get("initial_state", given.get("initial_windows"))
    row = ids[0].tolist()
    count = max(row, default=-1) + 1 if entering is None else len(entering)
    starts = [sum(0 <= i < n for i in row) for n in range(count + 1)]
    return [(0, slice(a, b)) for a, b in pairwise(starts)]


def ordered(segments: list[Segment], order: str) -> list[int]:
    """The segments in the order in which they are run."""
    numbers = list(range(len(segments)))
    if order == "longest first":
        return sorted(numbers, key=lambda n: segments[n][1].start - segments[n][1].stop)
    return numbers[::-1] if order == "last to first" else numbers


def live(given: Given, numbers: Iterable[int]) -> list[tuple[int, int, int]]:
    """Row, read slot and write slot of every row that is not padding."""
    read = given["read_slots"].tolist()
    write = read if given.get("write_slots") is None else given["write_slots"].tolist()
    return [(n, read[n], write[n]) for n in numbers if max(read[n], write[n]) >= 0]


def keys_first(given: Given, name: str) -> Any:
    """A pool or buffer as `[..., K, V]`, whatever its declared order; None where it is not given."""
    states = given.get(name)
    return states.transpose(-1, -2) if states is not None and given.get("state_layout") == "VK" else states


def enter(pool: Tensor, slot: int) -> Tensor:
    """A copy of a slot in float32, zeros for a fresh row."""
    return pool[slot].to(torch.float32, copy=True) if slot >= 0 else pool.new_zeros(pool.shape[1:], dtype=torch.float32)


def store(stores: Iterable[Store]) -> None:
    """Round each value once, to the type of its place."""
    for pool, place, value in stores:
        pool[place] = value.to(pool.dtype)
