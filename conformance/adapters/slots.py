"""The slot rules around a peer that knows no pools (SLOT-2): rows gathered before its call and scattered after it.

With them what adapters of such peers share: to decline what the peer has no argument for, and offsets beside ids.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from statescan.conformance.adapter import Unsupported

Tensor = Any
"""A torch tensor; this module needs no more of torch than its tensors' methods."""


def entering(pool: Tensor, read: Tensor) -> Tensor:
    """The windows or states that rows `[N]` resume from, a fresh row's zeros selected and not multiplied (SLOT-7)."""
    held = pool.new_zeros(len(read), *pool.shape[1:])
    held[read >= 0] = pool[read[read >= 0].long()]
    return held


def store(pool: Tensor, write: Tensor, held: Tensor) -> None:
    """Each row's window or state to its slot, rounded to the pool's type; nothing where the slot is negative."""
    pool[write[write >= 0].long()] = held[write >= 0].to(pool.dtype)


def padding(read: Tensor, write: Tensor) -> Tensor:
    """Which rows are padding: neither read nor written, their outputs are 0 (PAD-1)."""
    return (read < 0) & (write < 0)


def silence(y: Tensor, cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """The outputs `[1, T, ...]` of a pack, 0 at the tokens of the given rows."""
    for (start, end), silent in zip(pairwise(cu_seqlens.tolist()), rows.tolist(), strict=True):
        if silent:
            y[:, start:end] = 0
    return y


def refuse(**given: Tensor | None) -> None:
    """Decline a call that gives any of these tensors; their names are the missing words."""
    for need, tensor in given.items():
        if tensor is not None:
            raise Unsupported(need)


def refuse_rows(cu_seqlens: Tensor, tokens: int, *, empty: bool = True) -> None:
    """Decline rows past the last offset, and rows without tokens unless a peer takes these."""
    if int(cu_seqlens[-1]) < tokens:
        raise Unsupported("padded_rows")
    if not empty and bool((cu_seqlens.diff() == 0).any()):
        raise Unsupported("empty_segments")


def ids_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Ids `[1, T]` of the segments that offsets name, -1 past the last one."""
    ids = cu_seqlens.new_full((1, tokens), -1)
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        ids[:, start:end] = n
    return ids


def offsets_of(seq_idx: Tensor) -> Tensor:
    """Offsets `[N+1]` of the segments that ids `[1, T]` name."""
    counts = seq_idx[seq_idx >= 0].bincount()
    return seq_idx.new_tensor([0, *counts.cumsum(0).tolist()])
