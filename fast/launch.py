"""Around a launch: its device, strides of tensors that may be absent, and the operations that PyTorch knows of.

A call of a public function goes straight to its kernels. Only while torch.compile, export or fake tensors trace it does
it go through the operation registered under `torch.ops.statescan`, which costs several microseconds of host time more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from statescan.spec.contract import OPERATIONS, Argument

_HERE: AbstractContextManager[Any] = nullcontext()


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up; Triton's own costs microseconds a call."""
    return -(-n // d)


def power_of_2(n: int) -> int:
    """The least power of two that is at least n, and 1."""
    return 1 << max(n - 1, 0).bit_length()


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, so make it that of x; nothing is done where it is already."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def strides(t: Tensor | None, rank: int) -> tuple[int, ...]:
    """Strides in elements, zeros for a tensor that is absent."""
    return (0,) * rank if t is None else t.stride()


def is_traced(x: Tensor) -> bool:
    """Whether a call must go through the registered operation: a tracer sees no kernel, a fake tensor has no data."""
    return type(x) is not Tensor or torch.compiler.is_compiling()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient will be asked of the result of these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def register(name: str, function: Callable[..., Any], fake: Callable[..., Any], returns: str = "Tensor") -> Any:
    """Register `function` as `torch.ops.statescan.<name>`: all arguments of the table by position, `check` last.

    `fake` gives empty results of the right shape and type. Returns the operation, to be called like `function`.
    """
    pools = tuple(argument.name for argument in OPERATIONS[name].inout)
    schema = f"{schema_of(name)} -> {returns}"
    operation = torch.library.custom_op(f"statescan::{name}", function, mutates_args=pools, schema=schema)
    operation.register_fake(fake)
    return operation


class Differentiable:
    """An operation of the table with a gradient, and the three ways to run it: straight to its kernels, with its
    gradient, and as tracers see it.

    `keep(ctx, inputs, output)` saves what `pull(ctx, cotangent)` needs; inputs are all arguments of the registered
    operation, and `pull` returns something for each of them.
    """

    def __init__(
        self, name: str, function: Callable[..., Tensor], fake: Callable[..., Tensor], pull: Callable[..., Any],
        keep: Callable[..., None],
    ) -> None:  # fmt: skip
        self.function, self.traced = function, register(name, function, fake)
        self.traced.register_autograd(pull, setup_context=keep)

        class WithGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Tensor:
                keep(ctx, inputs, None)
                return function(*inputs)

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                return pull(ctx, *cotangents)

        self.with_gradient: Callable[..., Tensor] = WithGradient.apply

    def __call__(self, *arguments: Any) -> Tensor:
        if is_traced(arguments[0]):
            return cast(Tensor, self.traced(*arguments))
        if needs_grad(*[a for a in arguments if isinstance(a, Tensor)]):
            return self.with_gradient(*arguments)
        return self.function(*arguments)


def schema_of(name: str) -> str:
    """The arguments of an operation in PyTorch's schema language; tensors that are changed carry a mark each.

    >>> schema_of("l2norm")
    '(Tensor x, float eps, bool? check)'
    """
    op = OPERATIONS[name]
    tensors = [f"Tensor{_mark(op.inout, a)}{'?' if a.optional else ''} {a.name}" for a in op.tensors]
    settings = [f"{_setting_type(a)} {a.name}" for a in op.settings]
    return f"({', '.join([*tensors, *settings, 'bool? check'])})"


def _mark(inout: tuple[Argument, ...], argument: Argument) -> str:
    return f"({'abcd'[inout.index(argument)]}!)" if argument in inout else ""


def _setting_type(argument: Argument) -> str:
    if argument.kind == "number":
        kind = "int" if argument.name in ("num_householder", "group_size") else "float"
        return kind if argument.default is not None else f"{kind}?"
    if argument.kind == "word":
        return "str" if argument.default is not None else "str?"
    return {"flag": "bool", "object": "float[]"}[argument.kind]
