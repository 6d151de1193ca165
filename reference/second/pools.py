"""Slots from the other side: every place that is written asks which row writes it, and for that row's state there.

A state is a point value at one position: the state after p tokens of a row is the final state of the row cut at p.
`run(row, tokens, entering)` gives outputs and final state of a list of tokens; nothing in between is looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from statescan.reference.arrays import Array, Float64, dtype_name, round_to, widen

Run = Callable[[int, list[int], Float64], tuple[Float64, Float64]]


def fill_prefill(
    run: Run, y: Float64, cu_seqlens: Array, pool: Array, read_slots: Array, write_slots: Array | None,
    positions: Array | None, snapshots: Array | None,
) -> None:  # fmt: skip
    """A pack on a slot pool: outputs by row, slots by their writer, snapshots by the row they fall into."""
    before, reads = widen(pool), read_slots.tolist()
    writes = reads if write_slots is None else write_slots.tolist()
    live = [n for n in range(len(reads)) if not (reads[n] < 0 and writes[n] < 0)]

    def after(n: int, end: int) -> tuple[Float64, Float64]:
        return run(0, list(range(int(cu_seqlens[n]), end)), entered(before, reads[n]))

    for n in live:
        y[0, int(cu_seqlens[n]) : int(cu_seqlens[n + 1])] = after(n, int(cu_seqlens[n + 1]))[0]
    for slot in range(pool.shape[0]):
        for n in [n for n in live if writes[n] == slot]:
            put(pool, (slot,), after(n, int(cu_seqlens[n + 1]))[1])
    for i, position in enumerate([] if positions is None else positions.tolist()):
        for n in [n for n in live if cu_seqlens[n] < position <= cu_seqlens[n + 1]]:
            assert snapshots is not None
            put(snapshots, (i,), after(n, position)[1])


def fill_update(
    run: Run, y: Float64, pool: Array, read_slots: Array, write_slots: Array | None, intermediates: Array | None,
    num_accepted: Array | None, num_tokens: Array | None,
) -> None:  # fmt: skip
    """J tokens a row: outputs by row, slots and their entries by their writer."""
    before, reads = widen(pool), read_slots.tolist()
    writes = reads if write_slots is None else write_slots.tolist()
    counts = [y.shape[1]] * len(reads) if num_tokens is None else num_tokens.tolist()
    entries = None if intermediates is None else widen(intermediates)
    live = [n for n in range(len(reads)) if not (reads[n] < 0 and writes[n] < 0)]

    def after(n: int, count: int) -> tuple[Float64, Float64]:
        entering = entered(before, reads[n])
        if entries is not None and num_accepted is not None and reads[n] >= 0 and num_accepted[n] >= 0:
            entering = entries[reads[n], int(num_accepted[n])]
        return run(n, list(range(count)), entering)

    for n in live:
        y[n, : counts[n]] = after(n, counts[n])[0]
    for slot in range(pool.shape[0]):
        for n in [n for n in live if writes[n] == slot]:
            put(pool, (slot,), after(n, counts[n])[1])
            for j in range(0 if intermediates is None else counts[n]):
                assert intermediates is not None
                put(intermediates, (slot, j), after(n, j + 1)[1])


def entered(before: Float64, slot: int) -> Float64:
    """The state a row finds: its slot's, or zeros."""
    return np.zeros(before.shape[1:]) if slot < 0 else before[slot]


def put(target: Array, place: tuple[int, ...], value: Float64) -> None:
    """Store one value, rounded to the target's type."""
    target[place] = round_to(value, dtype_name(target))
