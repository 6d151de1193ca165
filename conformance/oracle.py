"""What a vector must give: computed by the reference, and by a second definition that shares no step with it.

Imported only where expectations are made (regen, replay), never by the runner: it judges by stored numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from statescan.conformance.adapter import Adapter
from statescan.conformance.adapters.reference import adapter as reference
from statescan.conformance.calls import Array, Call, Gradient, default_type, plan_results, span
from statescan.conformance.invoke import invoke
from statescan.conformance.lifts import Story
from statescan.goldens.tensors import NAMES
from statescan.spec.contract import OPERATIONS

Outputs = dict[str, Array]

_SECOND_MODULES = {"packed": "packed", "conv": "conv", "delta": "delta", "ssd": "ssd", "gates": "gates",
                   "norms": "norms"}  # fmt: skip


def first(story: Story) -> tuple[Outputs, Any]:
    """Results, gradients and changed pools of a story by the reference; the host value of an operation without."""
    return _outputs(reference, story)


def second(story: Story) -> Outputs | None:
    """The same by the second definition; None where there is none."""
    if story.op not in (op for op, _ in _second_functions(story.op)):
        return None
    adapter = Adapter("second")
    for op, function in _second_functions(story.op):
        adapter.op(op)(function)
    return _differences(adapter, story) if story.grad is not None else _outputs(adapter, story)[0]


def widened(story: Story) -> Story:
    """The same story with every float tensor in float64, so that nothing is rounded."""
    def wide(tensors: Mapping[str, Array]) -> dict[str, Array]:
        return {n: a if a.dtype.kind in "iu" else a.astype(np.float64) for n, a in tensors.items()}

    grad = None if story.grad is None else Gradient(story.grad.of, wide(story.grad.cotangents))
    return replace(story, tensors=wide(story.tensors), grad=grad)


def _second_functions(op: str) -> list[tuple[str, Callable[..., Any]]]:
    name = _SECOND_MODULES.get(OPERATIONS[op].family)
    if name is None:
        return []
    module: Any = import_module(f"statescan.reference.second.{name}")
    return [(op, getattr(module, op))] if hasattr(module, op) else []


def _outputs(adapter: Adapter, story: Story) -> tuple[Outputs, Any]:
    tensors = {name: array.copy() for name, array in story.tensors.items()}
    plans = plan_results(story.op, tensors, story.args, {}, story.grad)
    reply = invoke(adapter, Call(story.op, story.args, tensors, plans, story.grad, story.installed))
    if reply.status != "ok":
        raise RuntimeError(f"{story.op}: {reply.status} {reply.error} {reply.message}")
    pools = {a.name: reply.outputs[f"after.{a.name}"] for a in OPERATIONS[story.op].inout if a.name in tensors}
    return {**{plan.name: reply.outputs[plan.name] for plan in plans}, **pools}, reply.value


def _differences(adapter: Adapter, story: Story) -> Outputs:
    """Results, and gradients by unit steps: exact where the operation is linear in each single number."""
    assert story.grad is not None
    plain = replace(story, grad=None)
    base, _ = _outputs(adapter, plain)

    def loss(results: Outputs) -> float:
        assert story.grad is not None
        return float(sum((results[n].astype(float) * c.astype(float)).sum() for n, c in story.grad.cotangents.items()))

    found = {}
    for name in story.grad.of:
        gradient = np.zeros(story.tensors[name].shape)
        for index in np.ndindex(gradient.shape):
            moved = story.tensors[name].astype(np.float64)
            if np.isnan(moved[index]):
                continue
            moved[index] += 1
            changed, _ = _outputs(adapter, replace(plain, tensors={**plain.tensors, name: moved}))
            gradient[index] = loss(changed) - loss(base)
        found[f"grad.{name}"] = gradient
    return {**base, **found}


def result_types(story: Story) -> dict[str, str]:
    """The element type of each result as the contract gives it, and of each pool as it is."""
    op = OPERATIONS[story.op]
    types = {r.name: default_type(r, story.tensors) for r in op.results}
    return types | {a.name: NAMES[story.tensors[a.name].dtype] for a in op.inout if a.name in story.tensors}





def isolated(call: Call) -> Call:
    """The call on copies of its tensors with the same strides, so that an in-process model cannot change the story."""
    return replace(call, tensors={name: _copy(array) for name, array in call.tensors.items()})


def _copy(array: Array) -> Array:
    whole = span(array).copy()
    return np.lib.stride_tricks.as_strided(whole, array.shape, array.strides) if array.size else array.copy()
