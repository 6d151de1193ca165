"""The slot rules around a peer that knows no pools (SLOT-2): rows gathered before its call and scattered after it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Tensor = Any
"""A torch tensor; this module needs no more of torch than its tensors' methods."""


def entering(pool: Tensor, read: Tensor) -> Tensor:
    """The windows `[N, C, W]` that rows resume from, a fresh row's zeros selected and not multiplied (SLOT-7)."""
    windows = pool.new_zeros(len(read), *pool.shape[1:])
    windows[read >= 0] = pool[read[read >= 0].long()]
    return windows


def store(pool: Tensor, write: Tensor, windows: Tensor) -> None:
    """Each row's window to its slot, rounded to the pool's type; nothing where the slot is negative."""
    pool[write[write >= 0].long()] = windows[write >= 0].to(pool.dtype)


def padding(read: Tensor, write: Tensor) -> Tensor:
    """Which rows are padding: neither read nor written, their outputs are 0 (PAD-1)."""
    return (read < 0) & (write < 0)


def silence(y: Tensor, cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """The outputs `[1, T, C]` of a pack, 0 at the tokens of the given rows."""
    for (start, end), silent in zip(pairwise(cu_seqlens.tolist()), rows.tolist(), strict=True):
        if silent:
            y[:, start:end] = 0
    return y
