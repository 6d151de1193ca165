"""Segment ids by counting: row t belongs to segment (offsets at or below t) - 1 (PACK-2, PACK-3, PACK-11)."""

from __future__ import annotations

from typing import Any

import numpy as np

from statescan.reference.arrays import Array
from statescan.spec.contract import PackedSeqParams


def get_cu_seqlens(packed_seq_params: PackedSeqParams) -> Array:
    """The first offsets that are there, padded ones before actual ones (PACK-1).

    >>> get_cu_seqlens(PackedSeqParams(cu_seqlens_q=[0, 2])).tolist()
    [0, 2]
    """
    given: list[Any] = [packed_seq_params.cu_seqlens_q_padded, packed_seq_params.cu_seqlens_q]
    return np.asarray(next(offsets for offsets in given if offsets is not None))


def build_packed_seq_idx(packed_seq_params: PackedSeqParams, total_tokens: int) -> Array:
    """Ids `[1, total_tokens]`, int32.

    >>> build_packed_seq_idx(PackedSeqParams(cu_seqlens_q=[0, 2, 2, 3]), 5).tolist()
    [[0, 0, 2, 3, 3]]
    """
    offsets = get_cu_seqlens(packed_seq_params).tolist()
    return np.array([[len([o for o in offsets if o <= t]) - 1 for t in range(total_tokens)]], np.int32)


def segments(
    shape: tuple[int, ...], seq_idx: Array | None, cu_seqlens: Array | None, entering: Array | None
) -> list[tuple[int, list[int]]]:
    """Each segment's batch row and its tokens one by one; `shape` starts with (batch, tokens) (PACK-14).

    >>> segments((1, 4), np.array([[0, 2, 2, -1]]), None, None)
    [(0, [0]), (0, []), (0, [1, 2])]
    """
    every = list(range(shape[1]))
    if cu_seqlens is not None:
        owner = build_packed_seq_idx(PackedSeqParams(cu_seqlens_q=cu_seqlens), shape[1])[0].tolist()
        return [(0, [t for t in every if owner[t] == n]) for n in range(len(cu_seqlens) - 1)]
    if seq_idx is not None:
        owner = seq_idx[0].tolist()
        count = max([*owner, -1]) + 1 if entering is None else len(entering)
        return [(0, [t for t in every if owner[t] == n]) for n in range(count)]
    return [(row, every) for row in range(shape[0])]
