"""What a vector must give: computed by the reference, and by a second definition that shares no step with it.

Imported only where expectations are made (regen, replay), never by the runner: it judges by stored numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from statescan.conformance.adapter import Adapter
from statescan.conformance.adapters.reference import adapter as reference
from statescan.conformance.calls import Array, Call, Gradient, default_type, in_place, plan_results
from statescan.conformance.invoke import invoke
from statescan.conformance.lifts import Story
from statescan.goldens.tensors import NAMES
from statescan.spec.contract import OPERATIONS

Outputs = dict[str, Array]

_SECOND_MODULES = {"packed": "packed", "conv": "conv", "delta": "delta", "ssd": "ssd", "gates": "gates",
                   "norms": "norms", "host": "host"}  # fmt: skip
_CHUNKED = ("delta", "ssd")
_EXPONENTS: dict[str, str] = {
    "softplus_gate": "A_log", "kda_gate": "A_log", "gated_delta_rule": "g", "gated_delta_product": "g",
    "kimi_delta_attention": "g", "ssd": "A",
}  # fmt: skip
"""Inputs that act through their exponential, in which an operation is linear (SSD: for one step of 1 a head)."""
NOTHING = -1024.0
"""Its exponential is 0."""


def first(story: Story) -> tuple[Outputs, Any]:
    """Results, gradients and changed pools of a story by the reference; the host value of an operation without."""
    return _outputs(reference, story)


def second(story: Story, chunk: int | None = None, smooth: bool = False) -> Outputs | None:
    """The same by the second definition, in chunks of that length where it has any; None where there is none.

    Gradients are differences of its results: exact ones, or where `smooth` close ones of any smooth operation.
    """
    function = _second_function(story.op)
    if function is None:
        return None
    chunked = chunk is not None and OPERATIONS[story.op].family in _CHUNKED and story.op != "commit_accepted"
    adapter = Adapter("second")
    adapter.op(story.op)(partial(function, chunk=chunk) if chunked else function)
    return _differences(adapter, story, smooth) if story.grad is not None else _outputs(adapter, story)[0]


def widened(story: Story) -> Story:
    """The same story with every float tensor in float64, so that nothing is rounded."""
    def wide(tensors: Mapping[str, Array]) -> dict[str, Array]:
        return {n: a if a.dtype.kind in "iu" else a.astype(np.float64) for n, a in tensors.items()}

    grad = None if story.grad is None else Gradient(story.grad.of, wide(story.grad.cotangents))
    return replace(story, tensors=wide(story.tensors), grad=grad)


def _second_function(op: str) -> Callable[..., Any] | None:
    name = _SECOND_MODULES.get(OPERATIONS[op].family)
    if name is None:
        return None
    function: Callable[..., Any] | None = getattr(import_module(f"statescan.reference.second.{name}"), op, None)
    return function


def _outputs(adapter: Adapter, story: Story) -> tuple[Outputs, Any]:
    tensors = {name: array.copy() for name, array in story.tensors.items()}
    plans = plan_results(story.op, tensors, story.args, {}, story.grad)
    reply = invoke(adapter, Call(story.op, story.args, tensors, plans, story.grad, story.installed, story.far))
    if reply.status != "ok":
        raise RuntimeError(f"{story.op}: {reply.status} {reply.error} {reply.message}")
    pools = {name: reply.outputs[f"after.{name}"] for name in in_place(story.op, tensors)}
    return {**{plan.name: reply.outputs[plan.name] for plan in plans}, **pools}, reply.value


def _differences(adapter: Adapter, story: Story, smooth: bool) -> Outputs:
    """Results, and gradients by differences: exact where the operation is a polynomial of degree two at most in each
    single number, or linear in its exponential; to 11 digits where it is merely smooth."""
    assert story.grad is not None
    plain = replace(story, grad=None)
    exact = widened(plain)

    def loss(name: str, index: tuple[int, ...], value: float) -> float:
        assert story.grad is not None
        moved = exact.tensors[name].copy()
        moved[index] = value
        results, _ = _outputs(adapter, replace(exact, tensors={**exact.tensors, name: moved}))
        return float(sum((results[n].astype(float) * c.astype(float)).sum() for n, c in story.grad.cotangents.items()))

    found = {}
    for name in story.grad.of:
        values = exact.tensors[name]
        gradient = np.zeros(values.shape)
        for index in np.ndindex(gradient.shape):
            if not np.isnan(values[index]):
                at = partial(loss, name, index)
                exponent = _EXPONENTS.get(story.op) == name
                slope = _smooth_slope if smooth else _exponent_slope if exponent else _slope
                gradient[index] = slope(at, float(values[index]))
        found[f"grad.{name}"] = gradient
    return {**_outputs(adapter, plain)[0], **found}


def _slope(loss: Callable[[float], float], value: float) -> float:
    """The derivative of a polynomial of degree two, by a central difference."""
    return (loss(value + 1) - loss(value - 1)) / 2


def _smooth_slope(loss: Callable[[float], float], value: float, step: float = 2.0**-11) -> float:
    """The derivative of a smooth function, by the difference that is exact up to degree four."""
    near, far = (loss(value + n * step) - loss(value - n * step) for n in (1, 2))
    return (8 * near - far) / (12 * step)


def _exponent_slope(loss: Callable[[float], float], value: float) -> float:
    """The derivative where the loss is linear in e^value, at value 0 or where e^value is 0."""
    if value not in (0.0, NOTHING):
        raise ValueError(f"a gradient at exponent {value}: 0 or {NOTHING:g} can be stated exactly")
    return loss(0.0) - loss(NOTHING) if value == 0 else 0.0


def result_types(story: Story) -> dict[str, str]:
    """The element type of each result as the contract gives it, and of each pool as it is."""
    op = OPERATIONS[story.op]
    types = {r.name: default_type(r, story.tensors) for r in op.results}
    return types | {name: NAMES[story.tensors[name].dtype] for name in in_place(story.op, story.tensors)}
