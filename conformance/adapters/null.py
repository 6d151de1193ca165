"""Null implementations: they claim everything and compute nothing. A suite that they pass tests nothing.

`zeros` returns zeros and leaves every pool; `echo` returns its inputs, bent to the shapes asked for; `nothing` returns
memory that nobody wrote; `refuses` raises the contract's errors at every call, with no reason given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import Array, Plan, plan_results
from statescan.conformance.transport import blank
from statescan.goldens.tensors import DTYPES, NAMES
from statescan.spec.contract import (
    OPERATIONS,
    ContractError,
    Operation,
    PackedSeqParams,
    PackingError,
    SlotError,
    UnsupportedError,
)

Tensors = Mapping[str, Array]
Make = Callable[[Plan, Tensors], Array]
"""A result as planned, from the tensors of the call."""


def _null(name: str, make: Make) -> Adapter:
    adapter = Adapter(name, source=__name__)
    for op in OPERATIONS.values():
        adapter.op(op.name, state_layout=("KV", "VK"))(_operation(op, make))
        if op.differentiable:
            adapter.grad(op.name)(_gradient(op, make))
    return adapter


def _operation(op: Operation, make: Make) -> Callable[..., Any]:
    def operation(**given: Any) -> Any:
        tensors, args = _told_apart(op, given)
        made = {plan.name: make(plan, tensors) for plan in plan_results(op.name, tensors, args, {}, None)}
        parts = tuple(made.get(result.name) for result in op.results)
        return parts[0] if len(parts) == 1 else parts or None

    return operation


def _gradient(op: Operation, make: Make) -> Callable[..., Any]:
    def gradient(cotangents: Tensors, **given: Any) -> dict[str, Array]:
        tensors, _ = _told_apart(op, given)
        return {name: make(Plan(f"grad.{name}", NAMES[array.dtype], array.shape), {**cotangents, **tensors})
                for name, array in tensors.items() if array.dtype.kind not in "iu"}  # fmt: skip

    return gradient


def _told_apart(op: Operation, given: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors of a call and its settings; those of a PackedSeqParams are its fields."""
    fields = {key: value for each in given.values() if isinstance(each, PackedSeqParams)
              for key, value in asdict(each).items()}  # fmt: skip
    named = {argument.name for argument in op.tensors}
    tensors = {key: value for key, value in {**given, **fields}.items() if isinstance(value, np.ndarray)}
    return tensors, {key: value for key, value in given.items() if key not in named}


def _zeros(plan: Plan, tensors: Tensors) -> Array:
    return np.zeros(plan.shape, DTYPES[plan.dtype])


def _echo(plan: Plan, tensors: Tensors) -> Array:
    """The input of that shape, else the first input of floats, else the first of all, repeated to fill it."""
    floats = [array for array in tensors.values() if array.dtype.kind not in "iu"]
    alike = [array for array in floats if array.shape == plan.shape]
    first = next(iter([*alike, *floats, *tensors.values()]), np.zeros(1))
    return np.resize(first, plan.shape).astype(DTYPES[plan.dtype])


def _nothing(plan: Plan, tensors: Tensors) -> Array:
    return blank(plan)


def _refuse(op: Operation) -> Callable[..., Any]:
    """Raise the class that most refusals of the operation have, so that only the message is left to tell by."""
    classes: dict[str, type[ContractError]] = {"packed": PackingError}
    error = SlotError if op.name.endswith(("_prefill", "_update")) else classes.get(op.family, UnsupportedError)

    def operation(*_: Any, **__: Any) -> Any:
        raise error("refused")

    return operation


def _refuses() -> Adapter:
    adapter = Adapter("refuses", source=__name__)
    for op in OPERATIONS.values():
        adapter.op(op.name, state_layout=("KV", "VK"))(_refuse(op))
        if op.differentiable:
            adapter.grad(op.name)(_refuse(op))
    return adapter


zeros = _null("zeros", _zeros)
echo = _null("echo", _echo)
nothing = _null("nothing", _nothing)
refuses = _refuses()
