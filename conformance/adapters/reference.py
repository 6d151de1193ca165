"""The reference under its own suite: every operation it has, in every element type."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from statescan.conformance.adapter import Adapter
from statescan.spec.contract import OPERATIONS

adapter = Adapter("reference", metadata.version("statescan"), source="statescan.reference")

_MODULES = {"packed": ("packed",), "versions": ("packed",), "conv": ("conv",)}


def _register() -> None:
    for op in OPERATIONS.values():
        for name in _MODULES.get(op.family, ()):
            module: Any = import_module(f"statescan.reference.{name}")
            adapter.op(op.name, operand="f64")(getattr(module, op.name))
            if op.differentiable:
                adapter.grad(op.name)(_gradient(getattr(module, f"{op.name}_grad")))


def _gradient(function: Any) -> Any:
    def gradient(cotangents: Any, **given: Any) -> Any:
        return function(cotangents, **{name: value for name, value in given.items() if name != "check"})

    return gradient


_register()
