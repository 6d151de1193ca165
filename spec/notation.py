"""Shorthand of the worked examples: one channel at a time, so that a tensor is a short row of numbers.

A number that looks like its inputs is checked by eye. With the weight `taps(1000, 100, 10, 1)` and one-digit tokens,
the digits of an output spell the tokens that it read, oldest first: 1234 read tokens 1, 2, 3 and 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NAN = float("nan")


def tokens(*rows: float | Sequence[float]) -> Array:
    """Numbers as one pack `[1, T, 1]`; lists as batch rows `[N, J, 1]`; float32.

    >>> tokens(1, 2, 3).shape, tokens([1, 2, 3], [4, 5, 6]).shape
    ((1, 3, 1), (2, 3, 1))
    """
    return np.atleast_2d(np.array(rows, np.float32))[:, :, None]


def taps(*weights: float) -> Array:
    """The weight `[1, W]` of one channel, oldest tap first."""
    return np.array([weights], np.float32)


def channels(*values: float) -> Array:
    """One number per channel `[C]`: a bias."""
    return np.array(values, np.float32)


def windows(*rows: Sequence[float]) -> Array:
    """One window a row, of one channel: entering windows `[N, 1, W]` or a pool `[slots, 1, W]`, oldest column first."""
    return np.array(rows, np.float32)[:, None, :]


def entries(*slots: Sequence[Sequence[float]]) -> Array:
    """Intermediate windows `[slots, I, 1, W]` of one channel."""
    return np.array(slots, np.float32)[:, :, None, :]


def vectors(*tokens: float | Sequence[float]) -> Array:
    """A vector a token, of one head, `[1, T, 1, X]`: keys, queries, values; a number is a vector of length 1; float32.

    >>> vectors([1, 0], [0, 1]).shape, vectors(4, 6, 10).shape
    ((1, 2, 1, 2), (1, 3, 1, 1))
    """
    rows = [np.atleast_1d(np.array(token, np.float32)) for token in tokens]
    return np.array(rows, np.float32)[None, :, None, :]


def one_hot(*drawers: int, size: int = 2) -> Array:
    """The key or query of a drawer, a token each: 1 at the drawer's number, 0 elsewhere, `[1, T, 1, size]`.

    >>> numbers(one_hot(0, 1, 1))
    [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    """
    return np.eye(size, dtype=np.float32)[list(drawers)][None, :, None, :]


def heads(*numbers: float) -> Array:
    """One token that has a number in each of its heads, `[1, 1, heads, 1]`; float32."""
    return np.array(numbers, np.float32)[None, None, :, None]


def states(*rows: Sequence[float] | Sequence[Sequence[float]]) -> Array:
    """A state a row or slot, of one head, `[N, 1, X, Y]`; a plain list of numbers is a state of one column; float32.

    >>> states([8, 16]).shape, states([[8, 1], [16, 2]], [[0, 0], [5, 7]]).shape
    ((1, 1, 2, 1), (2, 1, 2, 2))
    """
    found = np.array(rows, np.float32)
    return (found if found.ndim == 3 else found[:, :, None])[:, None]


def index(*values: int) -> Array:
    """An int32 vector: offsets, slots, positions or counts."""
    return np.array(values, np.int32)


def ids(*values: int) -> Array:
    """Segment ids `[1, T]`, int32."""
    return np.array([values], np.int32)


def numbers(array: Array) -> Any:
    """The numbers of a tensor as nested lists, axes of length 1 left out: the shortest decimals that its element type
    reads back as the same numbers, and "nan", "inf" as the vectors write them.

    >>> numbers(tokens(1, 0.1)), numbers(windows([1, 2], [3, NAN])), numbers(tokens(5))
    ([1.0, 0.1], [[1.0, 2.0], [3.0, 'nan']], [5.0])
    """
    found = np.atleast_1d(np.squeeze(array))
    if found.ndim > 1:
        return [numbers(row) for row in found]
    return [float(str(x)) if np.isfinite(x) else str(x) for x in found]


def runs(values: Array | Iterable[int]) -> str:
    """Ids in runs, id x length: the five rows 0 0 0 1 1 are `0x3 1x2`.

    >>> runs([0, 0, 0, 1, 1])
    '0x3 1x2'
    """
    return " ".join(f"{value}x{len(list(run))}" for value, run in itertools.groupby(np.ravel(np.asarray(values))))


def refusal(call: Callable[..., object], *arguments: Any, **settings: Any) -> str:
    """What a call is refused with, as "Class: message", of any ValueError; "accepted" where it returns.

    >>> refusal(tokens, 1, 2)
    'accepted'
    """
    try:
        call(*arguments, **settings)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Markdown(str):
    """Text that a notebook renders as Markdown and a console prints as it is."""

    def _repr_markdown_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return str(self)
