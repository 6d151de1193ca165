"""The bookkeeping once more, token by token: every array entry answers for itself what stands there (META, STACK).

Nothing is accumulated and nothing padded: the owner of a token is the request whose pieces cover its position, a chunk
boundary is a place where the position within the piece is a multiple of the chunk, an entry past what is real is what
the contract names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from statescan.spec.contract import SSMChunking

Index = npt.NDArray[Any]


def decode_metadata(slots: Any, padded_requests: int) -> Index:
    """Entry n is request n's slot, or -1."""
    return np.array([slots[n] if n < len(slots) else -1 for n in range(padded_requests)], np.int64)


def prefill_metadata(
    lengths: Any, slots: Any, snapshot_rows: Any, snapshot_offsets: Any, padded_requests: int, padded_tokens: int,
    chunk_size: int, decode_tokens: int | None = None, snapshot_capacity: int | None = None,
    d_conv: int | None = None, num_householder: int | None = None,
) -> tuple[Index, ...]:  # fmt: skip
    """The arrays in the order of the operation table, each by its own rule."""
    sizes = [int(lengths[n]) if n < len(lengths) else 0 for n in range(padded_requests)]
    starts = [sum(sizes[:n]) for n in range(padded_requests)]
    total, copies = sum(sizes), num_householder or 1
    owner = [next(n for n in range(padded_requests) if starts[n] <= t < starts[n] + sizes[n]) for t in range(total)]
    chunks = chunk_table(sizes, chunk_size)
    most = padded_tokens // chunk_size + padded_requests
    ends = [min(starts[n] + (part + 1) * chunk_size, starts[n] + sizes[n]) for n, part in chunks]
    taken = [] if snapshot_rows is None else list(zip(snapshot_rows, snapshot_offsets, strict=True))
    room = len(taken) if snapshot_capacity is None else snapshot_capacity
    positions = [starts[n] + int(offset) for n, offset in taken]
    return (
        whole([starts[n] if n < padded_requests else total for n in range(padded_requests + 1)]),
        whole([slots[n] if n < len(slots) else -1 for n in range(padded_requests)]),
        whole([[owner[t] if t < total else -1 for t in range(padded_tokens)]]),
        whole([0, *(ends[c] if c < len(ends) else total for c in range(most))]),
        whole([max(c for c, (row, _) in enumerate(chunks) if row == n) for n in range(padded_requests)]),
        whole([chunks[c][0] if c < len(chunks) else 0 for c in range(most)]),
        whole([owner[t] if t < total else 0 for t in range(padded_tokens)]),
        whole([starts[owner[t]] if t < total else 0 for t in range(padded_tokens)]),
        whole([decode_tokens or 0, total]),
        np.array([ending_chunk(chunks, taken[i], chunk_size, sizes) if i < len(taken) else 0
                  for i in range(room)], np.int64),
        whole([positions[i] if i < len(taken) else d_conv or 4 for i in range(room)]), whole([len(taken)]),
        table(chunks, most), table(chunk_table([n * copies for n in sizes], chunk_size),
                                   padded_tokens * copies // chunk_size + padded_requests),
        whole([len([1 for row, _ in chunks if row < n]) for n in range(padded_requests + 1)]),
    )  # fmt: skip


def chunk_table(sizes: Sequence[int], chunk: int) -> list[tuple[int, int]]:
    """A chunk starts at each token whose place in its piece is a multiple of the length; an empty piece has one."""
    return [(n, t // chunk) for n, size in enumerate(sizes) for t in range(max(size, 1)) if t % chunk == 0]


def ending_chunk(
    chunks: Sequence[tuple[int, int]], snapshot: tuple[int, int], chunk: int, sizes: Sequence[int]
) -> int:
    """The chunk whose last token is the one before the snapshot; -1 where none ends there."""
    row, offset = int(snapshot[0]), int(snapshot[1])
    on_edge = offset % chunk == 0 or offset == sizes[row]
    return chunks.index((row, (offset - 1) // chunk)) if on_edge else -1


def table(pairs: Sequence[tuple[int, int]], length: int) -> Index:
    """Pairs, then (-1, 0)."""
    return np.array([pairs[i] if i < len(pairs) else (-1, 0) for i in range(length)], np.int32).reshape(length, 2)


def whole(values: Any) -> Index:
    """Integers of 32 bits."""
    return np.array(values, np.int32)


def ssm_chunking(layer_type_list: Sequence[str], layers: Sequence[Any]) -> SSMChunking | None:
    """The first recurrent mixer's answer; homogeneous stacks only, refusals are not defined twice."""
    places = {"M": "mixer", "G": "self_attention"}
    mixers = [getattr(layer, places[symbol], None) for symbol, layer in zip(layer_type_list, layers, strict=True)
              if symbol in places]  # fmt: skip
    for mixer in (m for m in mixers if m is not None):
        own = vars(mixer)
        inference = own.get("ssm_inference_chunk_size")
        return SSMChunking(own["chunk_size"], own["chunk_size"] if inference is None else inference,
                           own.get("num_householder") or 0)  # fmt: skip
    return None


def token_shards(cu_seqlens: Any, total_tokens: int, ranks: int) -> tuple[Index, Index, Index]:
    """Row by row of the whole pack: whose it is, and where; a segment enters where it has rows on both sides."""
    each, ends = total_tokens // ranks, [int(end) for end in cu_seqlens]
    owner = [next((n for n in range(len(ends) - 1) if ends[n] <= t < ends[n + 1]), len(ends) - 1)
             for t in range(total_tokens)]  # fmt: skip
    parts = [range(rank * each, (rank + 1) * each) for rank in range(ranks)]
    return (
        whole([[owner[t] for t in part] for part in parts]).reshape(ranks, each),
        whole([[len([t for t in part if t < end]) for end in ends] for part in parts]),
        whole([owner[part[0]] if each and part[0] and owner[part[0] - 1] == owner[part[0]] else -1
               for part in parts]),
    )  # fmt: skip


def accept_drafts(tokens: Any, chosen: Any, num_tokens: Any = None) -> tuple[Index, Index]:
    """The largest count whose drafts all agree; counted down from all of them."""
    sizes = [len(row) for row in tokens] if num_tokens is None else [int(n) for n in num_tokens]
    accepted = [max((a for a in range(size) if list(row[1 : a + 1]) == list(model[:a])), default=-1)
                for row, model, size in zip(tokens, chosen, sizes, strict=True)]  # fmt: skip
    behind = [model[a] if a >= 0 else -1 for model, a in zip(chosen, accepted, strict=True)]
    return whole(accepted), np.array(behind, np.int64)
