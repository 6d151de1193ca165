"""What a call must give, computed when it is asked for: of recorded calls, and of vectors that are drawn at run time.

The reference in float64 says what is right, noise gains say how far an element may be off (goldens/gains.py). Gains
cost 64 runs of the reference, so a call is looked over first with a rough bound in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np

from statescan.conformance import oracle
from statescan.conformance.adapters.reference import adapter as reference
from statescan.conformance.calls import Array, Call, Reply, in_place, plan_results
from statescan.conformance.compare import Expected
from statescan.conformance.cut import Piece, letters, offsets, written_slots
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.lifts import Story
from statescan.goldens.gains import encode, gains
from statescan.reference import functions

ROUGH = 2.0
"""Gains of a rough bound, in root mean squares of a segment and head."""


def truth(call: Call) -> Reply:
    """The reference's reply to a call, in float64, nothing rounded."""
    wide = oracle.widened(Story(call.op, call.args, call.tensors, grad=call.grad))
    plans = plan_results(call.op, wide.tensors, wide.args, {}, wide.grad) if _sized(call) else ()
    with quick():
        return invoke(reference, isolated(Call(call.op, call.args, wide.tensors, plans, wide.grad)))


def call_of(story: Story) -> Call:
    """The call of a story, with all its results."""
    return Call(story.op, story.args, story.tensors, plan_results(story.op, story.tensors, story.args, {}, story.grad))


def expected(call: Call, right: Reply, *, exact: bool, seed: int = 0) -> dict[str, Expected]:
    """Results and pools of a call that the reference serves: values, and with `exact` their gains, else rough ones."""
    piece = Piece(call.op, call.args, call.tensors, {})
    names = [*(plan.name for plan in call.results), *in_place(call.op, call.tensors)]
    arrays = {name: right.outputs[name if name in right.outputs else f"after.{name}"] for name in names}
    codes: dict[str, Mapping[str, Array]]
    if exact:
        found = noise(call, seed)
        codes = {name: found[name] for name in names}
    else:
        codes = {name: _rough(piece, name, array) for name, array in arrays.items()}
    slots = written_slots(piece)
    return {name: Expected(array, "within", tuple(slots) if name in call.tensors and not name.startswith("snapshot")
                           else None, gain=codes[name])
            for name, array in arrays.items()}  # fmt: skip


def noise(call: Call, seed: int = 0) -> dict[str, dict[str, Array]]:
    """The gains of every result and pool of a call, as codes."""
    wide = oracle.widened(Story(call.op, call.args, call.tensors, grad=call.grad))
    with quick(), np.errstate(all="ignore"):
        return gains(lambda: oracle.first(wide)[0], seed)


@contextmanager
def quick() -> Iterator[None]:
    """The reference with NumPy's exponentials: a unit of float64 off, which no judged type shows, and much faster."""
    table: dict[Any, Any] = {functions._exp: np.exp, functions._softplus: _softplus, functions._sigmoid: _sigmoid,
             functions._silu: lambda x: x * _sigmoid(x)}  # fmt: skip

    def elementwise(function: Any, x: Any) -> Any:
        with np.errstate(all="ignore"):
            return table[function](np.asarray(x, np.float64))

    with mock.patch.object(functions, "_elementwise", elementwise):
        yield


def _softplus(x: Array) -> Array:
    linear = functions.SOFTPLUS_LINEAR_ABOVE
    return np.where(x > linear, x, np.log1p(np.exp(np.minimum(x, linear))))


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1.0 + small)


def _rough(piece: Piece, name: str, array: Array) -> Mapping[str, Array]:
    """Codes of one size for each segment and head: a few times the root mean square of what comes out there."""
    named = letters(piece, name, array)
    kept = [axis for axis, letter in enumerate(named) if letter in ("N", "slots", "H", "HV", "C", "batch")]
    bound = np.zeros(array.shape)
    ends = offsets(piece) if "T" in named else []
    segments = [*pairwise(ends), (ends[-1], array.shape[named.index("T")])] if "T" in named else [(0, 0)]
    for start, end in segments:
        part = tuple(slice(start, end) if letter == "T" else slice(None) for letter in named)
        square = np.nan_to_num(array[part], nan=0.0, posinf=0.0, neginf=0.0) ** 2
        over = tuple(axis for axis in range(array.ndim) if axis not in kept)
        if square.size:
            bound[part] = np.sqrt(square.mean(axis=over, keepdims=True))
    code = encode(ROUGH * bound)
    return {"op": code, "acc": code, "exp": code}


def _sized(call: Call) -> bool:
    """Whether shapes of results can be told: a call that is wrong by its shapes is refused before."""
    try:
        plan_results(call.op, call.tensors, call.args, {}, call.grad)
    except (KeyError, ValueError, IndexError, TypeError):
        return False
    return True


