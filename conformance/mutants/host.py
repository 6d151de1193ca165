"""The bookkeeping of an engine with at most one fault: arrays of a step, the chunking of a stack, slots (META, STACK).

A step is a list of pieces, each a list of positions; every array is read off that list. Each fault is one comparison
with its id, at the place where its mechanism sits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from statescan.conformance.mutants.packed import refusals
from statescan.reference.arrays import Array
from statescan.reference.host.metadata import as_index, check_live_slots, check_pieces, check_room, check_snapshots
from statescan.spec.contract import (
    CapacityError,
    HeterogeneousStackError,
    ShapeError,
    SlotError,
    SSMChunking,
    UnsupportedError,
)

FAULTS: tuple[str, ...] = (
    "offsets-count-decode-tokens", "padding-requests-on-slot-zero", "padding-tokens-have-id-zero",
    "chunk-grid-over-the-pack", "padding-chunks-of-the-last-request", "empty-request-shares-a-chunk",
    "conv-starts-at-the-pack", "padded-decode-tokens-counted", "positions-within-the-piece",
    "empty-row-without-a-table-entry", "training-chunk-in-prefill", "no-layer-means-default-chunks",
    "first-layer-speaks-for-all", "longer-list-cut", "no-copies-read-as-one", "slab-counts-every-layer",
    "slots-handed-out-in-part", "double-free-accepted", "copies-chunked-by-tokens", "chunk-behind-a-full-one",
    "one-class-for-all", "message-without-label",
)  # fmt: skip
PLACES = {"M": "mixer", "G": "self_attention"}


def build(fault: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """The operations of this module, right or with one fault."""
    model = HostModel(fault)
    return {
        "decode_metadata": model.decode_metadata, "prefill_metadata": model.prefill_metadata,
        "ssm_chunking": model.ssm_chunking, "layer_map": model.layer_map, "run_slots": model.run_slots,
    }  # fmt: skip


class HostModel:
    """The bookkeeping with at most one fault."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault

    def decode_metadata(self, slots: Any, padded_requests: int, *, check: bool | None = None) -> Array:
        """Slots of the decode partition, padded with -1 (META-2)."""
        with refusals(self.fault):
            real = as_index("slots", slots)
            check_live_slots(real.tolist())
            check_room("decode requests", len(real), "padded_requests", padded_requests)
            return np.array([*real.tolist(), *[self.no_slot] * (padded_requests - len(real))], np.int64)

    @property
    def no_slot(self) -> int:
        return 0 if self.fault == "padding-requests-on-slot-zero" else -1

    def prefill_metadata(
        self, lengths: Any, slots: Any, snapshot_rows: Any, snapshot_offsets: Any, padded_requests: int,
        padded_tokens: int, chunk_size: int, decode_tokens: int | None = None, snapshot_capacity: int | None = None,
        d_conv: int | None = None, num_householder: int | None = None, *, check: bool | None = None,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Every array of the prefill partition (META)."""
        with refusals(self.fault):
            sizes, owners = as_index("lengths", lengths), as_index("slots", slots)
            rows, offsets = as_index("snapshot_rows", snapshot_rows), as_index("snapshot_offsets", snapshot_offsets)
            capacity, copies = len(rows) if snapshot_capacity is None else snapshot_capacity, num_householder or 1
            check_pieces(sizes, owners, padded_requests, padded_tokens, chunk_size, copies)
            check_snapshots(rows, offsets, sizes, capacity)
            padded = [*sizes.tolist(), *[0] * (padded_requests - len(sizes))]
            snapshots = list(zip(rows.tolist(), offsets.tolist(), strict=True))
            return self.arrays(padded, owners.tolist(), snapshots, padded_tokens, chunk_size, decode_tokens or 0,
                               capacity, 4 if d_conv is None else d_conv, copies)  # fmt: skip

    def arrays(
        self, sizes: list[int], slots: list[int], snapshots: list[tuple[int, int]], tokens: int, chunk: int,
        decoded: int, capacity: int, d_conv: int, copies: int,
    ) -> tuple[Array, ...]:  # fmt: skip
        """The arrays in their order, from the pieces of the padded requests."""
        fault, n = self.fault, len(sizes)
        starts = [sum(sizes[:i]) for i in range(n)]
        total = sum(sizes)
        base = decoded if fault == "offsets-count-decode-tokens" else 0
        owner = [row for row, size in enumerate(sizes) for _ in range(size)]
        grid = self.chunks(sizes, starts, chunk)
        ends = [end for _, _, end in grid]
        most, wide = tokens // chunk + n, tokens * copies // chunk + n
        bound = ends[-1] if ends else 0
        last = [max((c for c, (row, _, _) in enumerate(grid) if row == i), default=0) for i in range(n)]
        if fault == "empty-request-shares-a-chunk":
            last = [last[i - 1] if i and not size else last[i] for i, size in enumerate(sizes)]
        places = [(0 if fault == "positions-within-the-piece" else starts[row]) + at for row, at in snapshots]
        counted = decoded + 1 if fault == "padded-decode-tokens-counted" and decoded else decoded
        table = [(row, part) for row, part, _ in grid]
        ids = 0 if fault == "padding-tokens-have-id-zero" else -1
        idle = n - 1 if fault == "padding-chunks-of-the-last-request" else 0
        copied = [(row, part) for row, part, _ in self.chunks([size * copies for size in sizes],
                                                              [start * copies for start in starts], chunk)]  # fmt: skip
        if fault == "copies-chunked-by-tokens":
            parts = [len([1 for other, _ in table if other == row]) for row in range(n)]
            copied = [(row, part) for row in range(n) for part in range(copies * parts[row])]
        ours = self.delta_table(table, sizes)
        return (
            narrow([base + start for start in [*starts, total]]), narrow([*slots, *[self.no_slot] * (n - len(slots))]),
            narrow([[*owner, *[ids] * (tokens - total)]]), narrow(filled([0, *ends], most + 1, bound)),
            narrow(last), narrow(filled([row for row, _ in table], most, idle)), narrow(filled(owner, tokens, 0)),
            narrow(filled([0 if fault == "conv-starts-at-the-pack" else starts[row] for row in owner], tokens, 0)),
            narrow([counted, total]),
            np.array(filled([self.ending(grid, starts, row, at) for row, at in snapshots], capacity, 0), np.int64),
            narrow(filled(places, capacity, d_conv)), narrow([len(snapshots)]), pairs(ours, most),
            pairs(self.delta_table(copied, sizes), wide),
            narrow([len([1 for row, _ in ours if row < i]) for i in range(n + 1)]),
        )  # fmt: skip

    def chunks(self, sizes: Sequence[int], starts: Sequence[int], chunk: int) -> list[tuple[int, int, int]]:
        """(row, chunk in row, end in the pack) of every chunk."""
        found = []
        for row, (size, start) in enumerate(zip(sizes, starts, strict=True)):
            stop = size + (self.fault == "chunk-behind-a-full-one")
            edge = chunk - start % chunk if self.fault == "chunk-grid-over-the-pack" else chunk
            ends = [start + end for end in range(edge, stop, chunk)] + [start + size]
            found += [(row, part, end) for part, end in enumerate(ends)]
        return found

    def ending(self, grid: Sequence[tuple[int, int, int]], starts: Sequence[int], row: int, at: int) -> int:
        """The chunk that ends at a snapshot, -1 where none does."""
        return next((c for c, (r, _, end) in enumerate(grid) if r == row and end == starts[row] + at), -1)

    def delta_table(self, table: list[tuple[int, int]], sizes: Sequence[int]) -> list[tuple[int, int]]:
        """The chunks of the delta kernels; empty rows have one too (META-10)."""
        if self.fault == "empty-row-without-a-table-entry":
            return [(row, part) for row, part in table if sizes[row]]
        return table

    def ssm_chunking(
        self, layer_type_list: Sequence[str], layers: Sequence[Any], *, check: bool | None = None
    ) -> SSMChunking | None:
        """What the recurrent layers share (STACK)."""
        with refusals(self.fault):
            if len(layer_type_list) != len(layers) and self.fault != "longer-list-cut":
                raise ShapeError(f"layer_type_list has {len(layer_type_list)} symbols and layers {len(layers)}: "
                                 "one for each (STACK-4)")  # fmt: skip
            found = [(index, symbol, self.chunking(mixer, index))
                     for index, (symbol, layer) in enumerate(zip(layer_type_list, layers, strict=False))
                     if (mixer := getattr(layer, PLACES.get(symbol, ""), None)) is not None]  # fmt: skip
            for index, symbol, own in found:
                first = found[0]
                if (symbol, own) != first[1:] and self.fault != "first-layer-speaks-for-all":
                    raise HeterogeneousStackError(
                        f"every SSM layer must share one chunking; layer {first[0]} has {first[1]} {tuple(first[2])} "
                        f"but layer {index} has {symbol} {tuple(own)} (STACK-3)")  # fmt: skip
            if found:
                return found[0][2]
            return SSMChunking(128, 128, 0) if self.fault == "no-layer-means-default-chunks" else None

    def chunking(self, mixer: Any, index: int) -> SSMChunking:
        """One mixer's own, with the fall-backs."""
        own = getattr(mixer, "chunk_size", None)
        if own is None:
            raise UnsupportedError(f"layers[{index}] has a recurrent mixer without chunk_size (STACK-5)")
        inference = getattr(mixer, "ssm_inference_chunk_size", None)
        if inference is None or self.fault == "training-chunk-in-prefill":
            inference = own
        copies = getattr(mixer, "num_householder", None)
        return SSMChunking(own, inference, copies or (1 if self.fault == "no-copies-read-as-one" else 0))

    def layer_map(self, layer_type_list: Sequence[str], *, check: bool | None = None) -> list[int | None]:
        """The slab of each layer (LAYER-2)."""
        found: list[int | None] = []
        for index, symbol in enumerate(layer_type_list):
            before = [s for s in layer_type_list[:index] if s in PLACES]
            every = self.fault == "slab-counts-every-layer"
            found.append((index if every else len(before)) if symbol in PLACES else None)
        return found

    def run_slots(self, slots: int, events: Sequence[Sequence[Any]], *, check: bool | None = None) -> list[Any]:
        """Take and give back slots (LIFE-1, LIFE-6)."""
        with refusals(self.fault):
            free, log = list(range(slots)), []
            for word, value in events:
                if word == "allocate":
                    if value > len(free) and self.fault != "slots-handed-out-in-part":
                        raise CapacityError(f"count={value} slots asked of {slots}, {len(free)} free (LIFE-1)")
                    cut = max(len(free) - value, 0)
                    log.append(free[cut:])
                    free = free[:cut]
                else:
                    if not 0 <= value < slots:
                        raise SlotError(f"slot={value} is outside 0..{slots - 1} (SLOT-5)")
                    if value in free and self.fault != "double-free-accepted":
                        raise SlotError(f"slot={value} is free already: freed once (LIFE-6)")
                    free.append(value)
            return [*log, free]


def filled(values: Sequence[int], length: int, fill: int) -> list[int]:
    """Values, then the filling up to a length."""
    return [*values, *[fill] * (length - len(values))][:length]


def narrow(values: Any) -> Array:
    """Integers of 32 bits."""
    return np.array(values, np.int32)


def pairs(values: Sequence[tuple[int, int]], length: int) -> Array:
    """A table padded with (-1, 0)."""
    return narrow([*values, *[(-1, 0)] * (length - len(values))][:length]).reshape(length, 2)
