"""The arrays that hooks read from the context, made on the host once a step (META).

Names, element types and padding are upstream's, because hooks written for it read them
(https://github.com/NVIDIA/Megatron-LM, core/inference/contexts); the tables of the delta kernels are ours. Everything
is padded to sizes that a captured graph fixes: padding requests have slot -1 and no tokens, padding tokens id -1,
padding chunks no tokens, padding table entries (-1, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from statescan.spec.contract import CapacityError, PackingError, ShapeError, SlotError

Index = npt.NDArray[Any]
PrefillArrays = tuple[Index, ...]


def decode_metadata(slots: Any, padded_requests: int, *, check: bool | None = None) -> Index:
    """The slots of the decode partition, int64 `[padded_requests]`, -1 behind the real requests (META-2).

    Raises CapacityError for more requests than there is room, SlotError for a slot that is negative or named twice.

    >>> decode_metadata([7, 2], 4).tolist()
    [7, 2, -1, -1]
    """
    real = as_index("slots", slots)
    check_live_slots(real.tolist())
    check_room("decode requests", len(real), "padded_requests", padded_requests)
    return pad(real, padded_requests, -1, np.int64)


def prefill_metadata(
    lengths: Any, slots: Any, snapshot_rows: Any, snapshot_offsets: Any, padded_requests: int, padded_tokens: int,
    chunk_size: int, decode_tokens: int | None = None, snapshot_capacity: int | None = None,
    d_conv: int | None = None, num_householder: int | None = None, *, check: bool | None = None,
) -> PrefillArrays:  # fmt: skip
    """Every array of the prefill partition, in the order of the operation table (META-1 to META-10).

    lengths and slots `[N]` of the real requests, in batch order; snapshot_rows and snapshot_offsets `[X]`: request and
    number of its tokens of this step before each snapshot, ascending. Padded sizes: requests, tokens, and
    snapshot_capacity (X where None). decode_tokens counts the real decode tokens of the step. Chunks have chunk_size
    tokens; num_householder copies a token make the expanded stream of GDP. d_conv is what pads snapshot positions.
    Raises PackingError, SlotError, ShapeError, and CapacityError for more than there is room.

    >>> named = dict(zip(PREFILL_NAMES, prefill_metadata([3], [2], None, None, 2, 4, 2)))
    >>> named["cu_seqlens"].tolist(), named["cu_chunk_seqlens"].tolist(), named["seq_idx"].tolist()
    ([0, 3, 3], [0, 2, 3, 3, 3], [[0, 0, 0, -1]])
    """
    sizes, owners = as_index("lengths", lengths), as_index("slots", slots)
    rows, offsets = as_index("snapshot_rows", snapshot_rows), as_index("snapshot_offsets", snapshot_offsets)
    capacity = len(rows) if snapshot_capacity is None else snapshot_capacity
    copies = 1 if num_householder is None else num_householder
    check_pieces(sizes, owners, padded_requests, padded_tokens, chunk_size, copies)
    check_snapshots(rows, offsets, sizes, capacity)
    counts = [*sizes.tolist(), *[0] * (padded_requests - len(sizes))]
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ids = np.repeat(np.arange(padded_requests), counts)
    chunks = split_chunks(counts, chunk_size)
    most = padded_tokens // chunk_size + padded_requests
    bounds = [0, *(int(cu[row]) + min((part + 1) * chunk_size, counts[row]) for row, part in chunks)]
    ends = chunk_offsets(counts, chunk_size)
    wide = split_chunks([n * copies for n in counts], chunk_size)
    positions = cu[rows] + offsets
    at = {int(end): c for c, end in enumerate(bounds[1:]) if bounds[c] < end}
    return (
        cu, pad(owners, padded_requests, -1), pad(ids, padded_tokens, -1)[None],
        pad(np.array(bounds), most + 1, bounds[-1]), (ends[1:] - 1).astype(np.int32),
        pad(np.array([row for row, _ in chunks]), most, 0), pad(ids, padded_tokens, 0),
        pad(cu[ids], padded_tokens, 0), np.array([decode_tokens or 0, int(cu[-1])], np.int32),
        pad(np.array([at.get(int(p), -1) for p in positions]), capacity, 0, np.int64),
        pad(positions, capacity, 4 if d_conv is None else d_conv), np.array([len(rows)], np.int32),
        pad_pairs(chunks, most), pad_pairs(wide, padded_tokens * copies // chunk_size + padded_requests), ends,
    )  # fmt: skip


PREFILL_NAMES: tuple[str, ...] = (
    "cu_seqlens", "batch_indices_prefill", "seq_idx", "cu_chunk_seqlens", "last_chunk_indices", "seq_idx_for_varlen",
    "conv_seq_idx", "conv_seq_start", "device_decode_prefill", "intermediate_chunk_indices",
    "intermediate_abs_positions", "intermediate_real_count", "chunk_indices", "chunk_indices_dp", "chunk_offsets",
)  # fmt: skip


def split_chunks(lengths: Sequence[int], chunk_size: int) -> list[tuple[int, int]]:
    """(row, chunk in row) of every chunk: the grid restarts at each row, an empty row has one empty chunk (META-4).

    >>> split_chunks([5, 0, 2], 4)
    [(0, 0), (0, 1), (1, 0), (2, 0)]
    """
    return [(row, part) for row, n in enumerate(lengths) for part in range(max(1, -(-n // chunk_size)))]


def chunk_offsets(lengths: Sequence[int], chunk_size: int) -> Index:
    """Chunks before each row, int32 `[N+1]` (META-10).

    >>> chunk_offsets([70, 0, 33, 0], 64).tolist()
    [0, 2, 3, 4, 5]
    """
    return np.cumsum([0, *(max(1, -(-n // chunk_size)) for n in lengths)]).astype(np.int32)


def pad(values: Index, length: int, fill: int, dtype: Any = np.int32) -> Index:
    """Integers padded behind to `length` with `fill`."""
    found = np.full(length, fill, dtype)
    found[: len(values)] = values
    return found


def pad_pairs(pairs: Sequence[tuple[int, int]], length: int) -> Index:
    """A table `[length, 2]` whose padding entries are (-1, 0): no kernel acts on them."""
    found = np.tile(np.array([-1, 0], np.int32), (length, 1))
    found[: len(pairs)] = np.array(pairs, np.int32).reshape(-1, 2)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------


def as_index(name: str, values: Any) -> Index:
    """A vector of integers; an absent one is empty."""
    found = np.asarray([] if values is None else values)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ShapeError(f"{name} has shape {list(found.shape)} and type {found.dtype}: integers [N] (ERR-1)")
    return found


def check_live_slots(slots: Sequence[int]) -> None:
    """Real requests have a slot each, and no two the same (META-2, SLOT-4)."""
    for n, slot in enumerate(slots):
        if slot < 0:
            raise SlotError(f"slots[{n}]={slot}: a real request has a slot (META-2)")
        if slot in slots[:n]:
            raise SlotError(f"slots[{n}]={slot} is also slots[{slots.index(slot)}]: each once (SLOT-4)")


def check_room(what: str, count: int, name: str, room: int) -> None:
    """What is real fits into its padded size."""
    if count > room:
        raise CapacityError(f"{count} {what} and {name}={room}: no room (PAD-3)")


def check_pieces(
    lengths: Index, slots: Index, padded_requests: int, padded_tokens: int, chunk_size: int, copies: int
) -> None:
    """One slot and a length of at least 0 for each request, and room for all (META-1, META-2)."""
    if len(lengths) != len(slots):
        raise ShapeError(f"lengths has {len(lengths)} requests and slots {len(slots)} (META-2)")
    for n, length in enumerate(lengths.tolist()):
        if length < 0:
            raise PackingError(f"lengths[{n}]={length}: a piece has at least 0 tokens (META-1)")
    check_live_slots(slots.tolist())
    check_room("prefill requests", len(lengths), "padded_requests", padded_requests)
    check_room("prefill tokens", int(lengths.sum()), "padded_tokens", padded_tokens)
    if chunk_size < 1 or copies < 1:
        raise ShapeError(f"chunk_size={chunk_size}, num_householder={copies}: at least 1 each (META-4)")


def check_snapshots(rows: Index, offsets: Index, lengths: Index, capacity: int) -> None:
    """Every snapshot lies in a piece of this step, behind at least one token of it, and in the buffers (META-9)."""
    if len(rows) != len(offsets):
        raise ShapeError(f"snapshot_rows has {len(rows)} entries and snapshot_offsets {len(offsets)} (META-9)")
    for i, (row, offset) in enumerate(zip(rows.tolist(), offsets.tolist(), strict=True)):
        if not 0 <= row < len(lengths):
            raise ShapeError(f"snapshot_rows[{i}]={row} is outside 0..{len(lengths) - 1} (META-9)")
        if not 1 <= offset <= lengths[row]:
            raise PackingError(f"snapshot_offsets[{i}]={offset} is outside 1..{lengths[row]} (META-9)")
        if i and (row, offset) <= (rows[i - 1], offsets[i - 1]):
            raise PackingError(f"snapshot {i} ({row}, {offset}) does not ascend (META-9)")
    check_room("snapshots", len(rows), "snapshot_capacity", capacity)
