"""Which drafts stand: the first ones, up to where the model would have gone on otherwise (SPEC-8).

    given       base  d1  d2  d3        a row of a verify step
    chosen       d1   d2   x   y        what the model chose behind each token
    accepted 2: d1 and d2 stand, the next base token is x, and entry 2 of the intermediates is the state behind d2

How the model chooses, by the largest logit or by chance, is the engine's business; that drafts stand from the first on
is not, because the state behind a draft has read all drafts before it.
Source: https://arxiv.org/abs/2211.17192
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from statescan.spec.contract import ShapeError, UnsupportedError

Index = npt.NDArray[Any]


def accept_drafts(
    tokens: Any, chosen: Any, num_tokens: Any = None, *, check: bool | None = None
) -> tuple[Index, Index]:
    """(num_accepted int32 `[N]`, next_tokens int64 `[N]`) of verify rows (SPEC-8).

    `tokens` `[N, J]` are base token and drafts of each row, `chosen` `[N, J]` what the model chose behind each;
    `num_tokens` `[N]` says how many of them are real. A row without tokens is padding: -1 and -1.
    Raises ShapeError, and UnsupportedError for a number of tokens outside 0..J.

    >>> [found.tolist() for found in accept_drafts([[4, 5, 7, 9]], [[5, 8, 9, 6]])]
    [[1], [8]]
    """
    given, model = np.asarray(tokens), np.asarray(chosen)
    if given.ndim != 2 or given.shape != model.shape:
        raise ShapeError(f"tokens have shape {list(given.shape)} and chosen {list(model.shape)}: [N, J] both (SPEC-8)")
    counts = np.full(len(given), given.shape[1]) if num_tokens is None else np.asarray(num_tokens)
    if counts.shape != (len(given),):
        raise ShapeError(f"num_tokens has shape {list(counts.shape)}: [{len(given)}] is needed (SPEC-6)")
    accepted, behind = np.full(len(given), -1, np.int32), np.full(len(given), -1, np.int64)
    for n, count in enumerate(counts.tolist()):
        if not 0 <= count <= given.shape[1]:
            raise UnsupportedError(f"num_tokens[{n}]={count}: 0 to {given.shape[1]} (SPEC-6)")
        if count:
            accepted[n] = count_agreeing(given[n, 1:count].tolist(), model[n].tolist())
            behind[n] = model[n, accepted[n]]
    return accepted, behind


def count_agreeing(drafts: list[int], chosen: list[int]) -> int:
    """Drafts from the first on that are what the model chose behind the token before.

    >>> count_agreeing([5, 7, 9], [5, 8, 9, 6])
    1
    """
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count]:
        count += 1
    return count
