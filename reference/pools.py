"""Rows on a slot pool: what a row starts from, where it ends, which values on the way are kept (SLOT, SNAP, SPEC).

One text for the convolution window and for every matrix state. A mixer hands over `scan(n, tokens, entering)`, which
runs row n's `tokens` from `entering` and returns the outputs and the list of values after each token, entering value
first. Everything is read before anything is written (CONV-7), and a value is rounded once, when it is stored (NUM-2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from statescan.reference.arrays import Array, Float64, dtype_name, round_to, widen

Scan = Callable[[int, slice, Float64], tuple[Float64, Sequence[Float64]]]
Store = tuple[Array, tuple[int, ...], Float64]


def scan_prefill(
    scan: Scan, y: Float64, cu_seqlens: Array, pool: Array, read_slots: Array, write_slots: Array | None,
    positions: Array | None, snapshots: Array | None,
) -> None:  # fmt: skip
    """Run every row of a pack from and to its slot; `y [1, T, ...]` and the pools are filled in place.

    A padding row (both slots negative) gives zeros and touches nothing. Position p of a snapshot is the value just
    after token p - 1 of the pack and belongs to that token's row (SNAP-3).
    """
    writes = read_slots if write_slots is None else write_slots
    stores: list[Store] = []
    for n, (read, write) in enumerate(zip(read_slots.tolist(), writes.tolist(), strict=True)):
        if read < 0 and write < 0:
            continue
        start, end = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
        outputs, values = scan(n, slice(start, end), enter(pool, read))
        y[0, start:end] = outputs
        if write >= 0:
            stores.append((pool, (write,), values[-1]))
        if positions is not None and snapshots is not None:
            stores += [
                (snapshots, (i,), values[p - start]) for i, p in enumerate(positions.tolist()) if start < p <= end
            ]
    commit_stores(stores)


def scan_update(
    scan: Scan, y: Float64, pool: Array, read_slots: Array, write_slots: Array | None, intermediates: Array | None,
    num_accepted: Array | None, num_tokens: Array | None,
) -> None:  # fmt: skip
    """Run J tokens a row from and to its slot; `y [N, J, ...]` and the pools are filled in place.

    A row with `num_accepted[n] = a >= 0` starts from entry a of its read slot's intermediates (SPEC-3), a row of fewer
    than J tokens is padded behind them (SPEC-6); entry j of the write slot becomes the value after token j (SPEC-2).
    """
    writes = read_slots if write_slots is None else write_slots
    stores: list[Store] = []
    for n, (read, write) in enumerate(zip(read_slots.tolist(), writes.tolist(), strict=True)):
        if read < 0 and write < 0:
            continue
        accepted = -1 if num_accepted is None else int(num_accepted[n])
        tokens = y.shape[1] if num_tokens is None else int(num_tokens[n])
        resumed = intermediates is not None and accepted >= 0 and read >= 0
        entering = widen(intermediates[read, accepted]) if resumed else enter(pool, read)  # type: ignore[index]
        outputs, values = scan(n, slice(0, tokens), entering)
        y[n, :tokens] = outputs
        if write >= 0:
            stores.append((pool, (write,), values[-1]))
            if intermediates is not None:
                stores += [(intermediates, (write, j), values[j + 1]) for j in range(tokens)]
    commit_stores(stores)


def live_rows(read_slots: Array, write_slots: Array | None) -> list[int]:
    """The rows that are not padding: at least one of their slots is not negative (SLOT-2, PAD-1)."""
    writes = read_slots if write_slots is None else write_slots
    return [n for n, slots in enumerate(zip(read_slots.tolist(), writes.tolist(), strict=True)) if max(slots) >= 0]


def state_type(initial_state: Array | None, values: Array) -> str:
    """Element type of a final state: that of the entering one, else f32, or f64 beside f64 values (NUM-2)."""
    if initial_state is not None:
        return dtype_name(initial_state)
    return "f64" if dtype_name(values) == "f64" else "f32"


def enter(pool: Array, slot: int) -> Float64:
    """What a row starts from: its slot, or zeros whatever the pool holds (SLOT-7: selected, never multiplied)."""
    return widen(pool[slot]) if slot >= 0 else np.zeros(pool.shape[1:])


def commit_stores(stores: Sequence[Store]) -> None:
    """Write values into their places, each rounded once to the pool's element type."""
    for pool, place, value in stores:
        pool[place] = round_to(value, dtype_name(pool))
