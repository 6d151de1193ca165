"""Shards of a mixer and of a pack with at most one fault (PAR).

A row is a list of words, one a column, such as `x1.0` for the first channel of head 1; a rank keeps the words of its
heads. A pack is a list of owners. Each fault is one comparison with its id, at the place where its mechanism sits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from statescan.conformance.mutants.packed import refusals
from statescan.reference.arrays import Array
from statescan.reference.host.mixer_config import MixerConfig, read_config
from statescan.reference.host.rules import check_offsets
from statescan.reference.host.shards import check_heads, heads_and_groups
from statescan.spec.contract import ShapeError

FAULTS: tuple[str, ...] = (
    "ids-built-before-the-gather", "sharded-pack-is-one-sequence", "row-cut-in-equal-stretches",
    "crossing-segment-starts-afresh", "first-segment-of-a-shard-enters", "groups-dealt-by-rank-number",
    "norm-over-a-shard", "norm-group-of-the-unsharded-count", "one-class-for-all", "message-without-label",
)  # fmt: skip

_SHARED: dict[str, str] = {"mamba2": "B C", "gdn": "q k", "gdp": "Q K", "kda": "q k"}
"""Parts that belong to a group of heads."""


def build(fault: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """The operations of this module, right or with one fault."""
    model = ShardModel(fault)
    return {"head_shards": model.head_shards, "token_shards": model.token_shards}


class ShardModel:
    """The cuts with at most one fault."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault

    def head_shards(self, mixer: Any, ranks: int, *, check: bool | None = None) -> list[dict[str, list[int]]]:
        """Columns, channels and norm groups of each rank."""
        with refusals(self.fault):
            config = mixer if isinstance(mixer, MixerConfig) else read_config(mixer)
            check_heads(config, ranks)
            return [self.one(config, rank, ranks) for rank in range(ranks)]

    def one(self, config: MixerConfig, rank: int, ranks: int) -> dict[str, list[int]]:
        """What one rank has, found by asking each column whose it is."""
        many, few = heads_and_groups(config)
        heads = {h for h in range(many) if h * ranks // many == rank}
        groups = {h * few // many for h in heads}
        if self.fault == "groups-dealt-by-rank-number" and few < ranks:
            groups = {rank % few}
        words = [(name, self.owner(config, name, i, width)) for name, width in config.parts for i in range(width)]
        row = [c for c, (name, owner) in enumerate(words)
               if owner in (groups if name in _SHARED[config.kind].split() else heads)]  # fmt: skip
        stretch = [c for c, (name, _) in enumerate(words) if name in config.conv_parts]
        conv = [stretch.index(c) for c in row if c in stretch]
        out = [c for c in range(config.d_inner) if c // (config.d_inner // many) in heads]
        if self.fault == "row-cut-in-equal-stretches":
            row, conv = ([i + rank * len(part) for i in range(len(part))] for part in (row, conv))
        return {"row": row, "conv": conv, "out": out, "norm": self.norm(config, rank, ranks, len(out), out)}

    def owner(self, config: MixerConfig, name: str, i: int, width: int) -> int:
        """The head, or group of heads, of column i of a part: copies are outermost."""
        many, few = heads_and_groups(config)
        count = few if name in _SHARED[config.kind].split() else many
        per_copy = width // config.num_householder if name in ("V", "K", "b") else width
        return i % per_copy // (per_copy // count)

    def norm(self, config: MixerConfig, rank: int, ranks: int, channels: int, out: list[int]) -> list[int]:
        """The norm group of each stretch of the rank's outputs."""
        size = config.norm_group
        if self.fault == "norm-group-of-the-unsharded-count" and config.kind == "mamba2":
            size = channels // config.groups
            return [rank * channels // size + i for i in range(channels // size)]
        found = sorted({c // size for c in out})
        if self.fault == "norm-over-a-shard" and len(out) < size:
            return [rank for _ in found]
        return found

    def token_shards(
        self, cu_seqlens: Any, total_tokens: int, ranks: int, *, check: bool | None = None
    ) -> tuple[Array, Array, Array]:
        """Ids, offsets and entering segment of each rank."""
        with refusals(self.fault):
            ends = [int(end) for end in cu_seqlens]
            check_offsets(ends, total_tokens)
            if ranks < 1 or total_tokens % ranks:
                raise ShapeError(f"total_tokens={total_tokens} on {ranks} ranks: equal shards are needed (PAR-3)")
            each = total_tokens // ranks
            owners = [n for n, (start, end) in enumerate(pairwise(ends)) for _ in range(end - start)]
            owners += [len(ends) - 1] * (total_tokens - len(owners))
            if self.fault == "sharded-pack-is-one-sequence":
                owners = [0] * total_tokens
            ids = [owners[rank * each : (rank + 1) * each] for rank in range(ranks)]
            if self.fault == "ids-built-before-the-gather":
                ids = [owners[:each]] * ranks
            local = [[min(max(end - rank * each, 0), each) for end in ends] for rank in range(ranks)]
            entering = [self.entering(owners, rank * each, each) for rank in range(ranks)]
            return (np.array(ids, np.int32).reshape(ranks, each), np.array(local, np.int32),
                    np.array(entering, np.int32))  # fmt: skip

    def entering(self, owners: list[int], start: int, each: int) -> int:
        """The segment that has rows on both sides of a shard's first row."""
        if not each or start == 0 or self.fault == "crossing-segment-starts-afresh":
            return -1
        crosses = owners[start - 1] == owners[start] or self.fault == "first-segment-of-a-shard-enters"
        return owners[start] if crosses else -1
