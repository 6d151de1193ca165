"""Every operation that the reference has is called as the operation table says."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from typing import Any

import pytest

import statescan.reference
from statescan.spec.contract import OPERATIONS, Argument, Operation

MODULES = [
    import_module(module.name)
    for module in pkgutil.walk_packages(statescan.reference.__path__, "statescan.reference.")
    if not module.ispkg and ".second." not in module.name
]
BUILT = {"packed", "versions", "conv", "gates", "norms", "delta", "ssd"}
"""Families that are there as a whole."""


def found(name: str) -> list[Any]:
    """The functions of that name, each where it is defined."""
    functions = [getattr(module, name, None) for module in MODULES]
    return [f for f, module in zip(functions, MODULES, strict=True) if inspect.getmodule(f) is module]


def signature_of(op: Operation) -> inspect.Signature:
    """Tensors by position, settings by keyword, `check` last; None where an optional tensor may be left out."""
    placed = [a for a in op.arguments if is_placed(op, a)]
    needed = max((i for i, a in enumerate(placed) if not a.optional), default=-1)
    parameters = [
        inspect.Parameter(
            a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=inspect.Parameter.empty if i <= needed else None
        )
        for i, a in enumerate(placed)
    ]
    keywords = [*((a.name, a.default) for a in op.arguments if not is_placed(op, a)), ("check", None)]
    parameters += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=default) for n, default in keywords]
    return inspect.Signature(parameters)


def is_placed(op: Operation, argument: Argument) -> bool:
    """Tensors have a place; where an operation has no float tensor, so has everything but its flags."""
    if any(a.kind == "float" for a in op.arguments):
        return argument.is_tensor
    return argument.kind != "flag"


def bare(function: Any) -> inspect.Signature:
    """A function's signature without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return inspect.Signature(parameters)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if found(name)])
def test_the_table_gives_the_signature(name: str) -> None:
    (function,) = found(name)
    assert bare(function) == signature_of(OPERATIONS[name])


def test_no_operation_of_a_built_family_is_missing() -> None:
    assert [name for name, op in OPERATIONS.items() if op.family in BUILT and not found(name)] == []


def gradient_of(op: Operation) -> inspect.Signature:
    """Cotangents first, then the operation's own arguments, `check` left out."""
    first = inspect.Parameter("cotangents", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for p in signature_of(op).parameters.values() if p.name != "check"]
    return inspect.Signature([first, *rest])


@pytest.mark.parametrize("name", [name for name, op in OPERATIONS.items() if op.differentiable])
def test_a_differentiable_operation_has_a_gradient_called_alike(name: str) -> None:
    (function,) = found(f"{name}_grad")
    assert bare(function) == gradient_of(OPERATIONS[name])


@pytest.mark.parametrize("name", [name for name, op in OPERATIONS.items() if op.family in BUILT - {"versions"}])
def test_the_second_definition_takes_the_same_call(name: str) -> None:
    """The same places and keywords; `check` is not taken, a chunk length may be."""
    function = getattr(import_module(f"statescan.reference.second.{OPERATIONS[name].family}"), name)
    wanted, taken = signature_of(OPERATIONS[name]).parameters, bare(function).parameters
    for key, parameter in wanted.items():
        assert key == "check" or taken[key] == parameter
    assert set(taken) - set(wanted) <= {"chunk", "num_householder"}
