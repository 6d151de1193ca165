"""Which part of a mixer a rank holds: cut by heads, or by tokens (PAR).

    heads    every part of a row is cut by itself: rank r has z_r, x_r, B_r, C_r, dt_r; a group of heads that spans
             several ranks is on each of them
    tokens   rank r has rows r * T/ranks up to (r + 1) * T/ranks of the gathered pack; a segment that crosses an edge
             enters the next rank with the window and the state that it left the last one with

Source: https://github.com/NVIDIA/Megatron-LM (core/ssm), which cuts projections by heads and packs by tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from statescan.reference.host.mixer_config import NORM_FIRST, MixerConfig, read_config
from statescan.reference.host.rules import check_offsets
from statescan.spec.contract import PackingError, ShapeError

Index = npt.NDArray[Any]

OF_GROUPS: tuple[str, ...] = ("B", "C", "q", "k", "Q", "K")
"""Parts of a row that a group of heads shares; the others have a stretch for each head."""
OF_COPIES: tuple[str, ...] = ("V", "K", "b")
"""Parts that a mixer with Householder copies has once a copy, copies outermost (GDP-5)."""


def head_shards(
    mixer: Mapping[str, Any] | MixerConfig, ranks: int, *, check: bool | None = None
) -> list[dict[str, list[int]]]:
    """What each rank has of a mixer that is cut by heads (PAR-2, PAR-4, PAR-5), by number within the whole.

    `row` are columns of a projected row, in the order of the rank's own row; `conv` channels of the convolution; `out`
    channels of an output row; `norm` the norm group of each equal stretch of `out`: ranks that name the same one
    average over both. `mixer` is a configuration or a description of one. Raises ShapeError where heads do not divide.

    >>> head_shards({"kind": "mamba2", "bare": True, "heads": 2}, 2)[1]
    {'row': [1, 2, 3, 5], 'conv': [1, 2, 3], 'out': [1], 'norm': [0]}
    """
    config = mixer if isinstance(mixer, MixerConfig) else read_config(mixer)
    check_heads(config, ranks)
    return [shard_of(config, rank, ranks) for rank in range(ranks)]


def shard_of(config: MixerConfig, rank: int, ranks: int) -> dict[str, list[int]]:
    """One rank's entry of `head_shards`."""
    many, few = heads_and_groups(config)
    heads = range(rank * many // ranks, (rank + 1) * many // ranks)
    groups = sorted({head // (many // few) for head in heads})
    columns: dict[str, list[int]] = {}
    start = 0
    for name, width in config.parts:
        own, all_of = (groups, few) if name in OF_GROUPS else (heads, many)
        copies = config.num_householder if name in OF_COPIES else 1
        each = width // (copies * all_of)
        columns[name] = [start + (copy * all_of + head) * each + i
                         for copy in range(copies) for head in own for i in range(each)]  # fmt: skip
        start += width
    first, inner = conv_start(config), config.d_inner // many
    return {
        "row": [c for part in columns.values() for c in part],
        "conv": [c - first for name in config.conv_parts for c in columns[name]],
        "out": [head * inner + i for head in heads for i in range(inner)],
        "norm": list(heads) if config.kind in NORM_FIRST else groups,
    }


def conv_start(config: MixerConfig) -> int:
    """The column of a row where the convolved stretch begins."""
    names = [name for name, _ in config.parts]
    return sum(width for _, width in config.parts[: names.index(config.conv_parts[0])])


def heads_and_groups(config: MixerConfig) -> tuple[int, int]:
    """Heads that have a state of their own, and groups of them that share keys (Mamba2: B and C)."""
    return (config.heads, config.groups) if config.kind == "mamba2" else (config.hv, config.heads)


def check_heads(config: MixerConfig, ranks: int) -> None:
    """Each rank has as many heads as every other, and whole groups, or an equal share of one (PAR-2, PAR-4)."""
    many, few = heads_and_groups(config)
    if ranks < 1 or many % ranks:
        raise ShapeError(f"ranks={ranks} does not divide {many} heads (PAR-2)")
    if few % ranks and ranks % few:
        raise ShapeError(f"ranks={ranks} and {few} groups: one has to divide the other (PAR-4)")


def shard_config(config: MixerConfig, ranks: int) -> MixerConfig:
    """The configuration of a rank's own mixer: its heads, and the groups that are on it."""
    check_heads(config, ranks)
    many, few = heads_and_groups(config)
    heads, groups = many // ranks, max(1, few // ranks)
    if config.kind == "mamba2":
        return replace(config, heads=heads, groups=groups)
    return replace(config, heads=groups, value_heads=heads)


def token_shards(
    cu_seqlens: Any, total_tokens: int, ranks: int, *, check: bool | None = None
) -> tuple[Index, Index, Index]:
    """What each rank has of a pack that is cut by tokens (PAR-1, PAR-3): (seq_idx, shard_cu_seqlens, entering_rows).

    `cu_seqlens` `[N+1]` and `total_tokens` are those of the gathered pack. seq_idx int32 `[ranks, T/ranks]` are the
    pack's ids, a row for each rank. shard_cu_seqlens int32 `[ranks, N+1]` are the offsets within each rank's rows, for
    all N segments: those that are elsewhere have no tokens here. entering_rows int32 `[ranks]` is the segment that
    comes from the rank before, N for the rows past the last offset, -1 for none.
    Raises PackingError, and ShapeError where the ranks do not divide the rows.

    >>> [a.tolist() for a in token_shards(np.array([0, 3, 4]), 4, 2)]
    [[[0, 0], [0, 1]], [[0, 2, 2], [0, 1, 2]], [-1, 0]]
    """
    offsets = np.asarray(cu_seqlens)
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise PackingError(f"cu_seqlens has type {offsets.dtype}: a vector of integers is needed (PACK-4)")
    check_offsets([int(offset) for offset in offsets], total_tokens)
    if ranks < 1 or total_tokens % ranks:
        raise ShapeError(f"total_tokens={total_tokens} on {ranks} ranks: equal shards are needed (PAR-3)")
    each, starts = total_tokens // ranks, total_tokens // ranks * np.arange(ranks)
    # the id of a row is the number of segments that have ended before it
    ids = np.searchsorted(offsets[1:], np.arange(total_tokens), side="right").astype(np.int32)
    crossing = [0 < start < total_tokens and ids[start - 1] == ids[start] for start in starts]
    entering = [ids[start] if crosses else -1 for start, crosses in zip(starts, crossing, strict=True)]
    local = np.clip(offsets[None] - starts[:, None], 0, each)
    return ids.reshape(ranks, each), local.astype(np.int32), np.array(entering, np.int32)
