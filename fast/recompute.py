"""Operations whose gradient runs them again: what a function of plain PyTorch needs to be one of `torch.ops.statescan`.

Between the passes nothing is kept but the inputs. Eager calls and tracers share one function and one gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from statescan.fast.launch import differentiating, is_traced, needs_grad, register, schema_of

Results = tuple[Tensor, Tensor]


class Recomputed:
    """An operation of the table with two results, given as a function that PyTorch can differentiate.

    `compute` takes all arguments by position, as the registered operation does, and checks nothing; `check` looks at
    them first; `fake` gives empty results.
    """

    def __init__(
        self, name: str, compute: Callable[..., Results], check: Callable[..., None], fake: Callable[..., Results]
    ) -> None:
        self.compute = compute

        def run(*arguments: Any) -> Results:
            check(*arguments)
            with torch.no_grad():
                return compute(*arguments)

        def pull(cotangents: Sequence[Tensor], needed: Sequence[bool], *arguments: Any) -> list[Tensor]:
            given = [a.detach().requires_grad_() if need else a for a, need in zip(arguments, needed, strict=True)]
            asked = [a for a, need in zip(given, needed, strict=True) if need]
            with differentiating():
                results = compute(*given)
                # of a pack without segments nothing depends on anything
                pairs = [(y, c) for y, c in zip(results, cotangents, strict=True) if y.requires_grad]
                assert pairs or 0 in (results[0].numel(), results[1].shape[0]), "nothing was recorded"
                if not pairs:
                    return [torch.zeros_like(a) for a in asked]
                found = torch.autograd.grad([y for y, _ in pairs], asked, [c for _, c in pairs], allow_unused=True)
            return [torch.zeros_like(a) if grad is None else grad.contiguous()
                    for a, grad in zip(asked, found, strict=True)]  # fmt: skip

        def spread(needed: Sequence[bool], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
            rest = iter(grads)
            return tuple(next(rest) if need else None for need in needed)

        class WithGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                keep(ctx, arguments, None)
                return run(*arguments)

            @staticmethod
            @once_differentiable
            def backward(ctx: Any, *cotangents: Any) -> Any:
                needed = list(ctx.needs_input_grad)
                return spread(needed, pull(cotangents, needed, *restore(ctx)))

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.tensors = [isinstance(a, Tensor) for a in inputs]
            ctx.save_for_backward(*[a for a in inputs if isinstance(a, Tensor)])
            ctx.settings = [None if isinstance(a, Tensor) else a for a in inputs]

        def restore(ctx: Any) -> list[Any]:
            saved = iter(ctx.saved_tensors)
            return [next(saved) if there else a for there, a in zip(ctx.tensors, ctx.settings, strict=True)]

        schema = f"(Tensor[] cotangents, bool[] needed, {schema_of(name)[1:-1]}) -> Tensor[]"
        traced_pull = torch.library.custom_op(f"statescan::{name}_backward", pull, mutates_args=(), schema=schema)

        @traced_pull.register_fake
        def _(cotangents: Any, needed: Any, *arguments: Any) -> list[Tensor]:
            asked = [a for a, need in zip(arguments, needed, strict=True) if need]
            return [torch.empty_like(a, memory_format=torch.contiguous_format) for a in asked]

        def pull_traced(ctx: Any, *cotangents: Any) -> Any:
            needed = list(ctx.needs_input_grad)
            return spread(needed, traced_pull(list(cotangents), needed, *restore(ctx)))

        self.run = run
        self.with_gradient: Callable[..., Results] = WithGradient.apply
        self.traced = register(name, run, fake, "(Tensor, Tensor)")
        self.traced.register_autograd(pull_traced, setup_context=keep)

    def __call__(self, *arguments: Any) -> Results:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        if is_traced(tensors[0]):
            y, final = self.traced(*arguments)
            return y, final
        return self.with_gradient(*arguments) if needs_grad(*tensors) else self.run(*arguments)
