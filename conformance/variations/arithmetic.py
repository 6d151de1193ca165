"""The arithmetic that a right kernel is free to choose: how it adds, multiplies, and makes an exponential.

Everything here is float32 or wider (CONTRACT: rounding). What differs is the order of a sum, where a product is rounded
first, and how far from the true value an exponential may be: 2^-22, and right at 0 and where it vanishes, as hardware
exponentials are. Each choice is differentiable, with the slope of the true function, as a kernel's own backward is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor

OFF = 2.0**-22
"""How far an exponential is off, relative."""
LANES = 8
TILE = 16

TOTALS = ("native", "tree", "pairwise", "reversed", "kahan", "lanes")
PRODUCTS = ("matmul", "numpy", "summed", "tiles", "wide")
EXPONENTIALS = ("exact", "base two", "high", "low", "either way")
SOFTPLUSES = ("folded", "logaddexp", "base two")
SIGMOIDS = ("native", "reciprocal", "two sided")
ROOTS = ("reciprocal root", "divide", "wide")


@dataclass(frozen=True)
class Arithmetic:
    """One choice of each; `operand` is the class to which matrix operands are rounded."""

    total: str = "native"
    product: str = "matmul"
    exponential: str = "exact"
    softplus: str = "folded"
    sigmoid: str = "native"
    root: str = "reciprocal root"
    operand: str = "f32"

    def sum(self, terms: Tensor, axis: int) -> Tensor:
        """The sum along an axis, in the order of `total`."""
        return add(terms.movedim(axis, 0), self.total)

    def dot(self, spec: str, a: Tensor, b: Tensor) -> Tensor:
        """A contraction over one letter, both operands in the operand class, e.g. `"hik,hkv->hiv"`."""
        recorded = a.requires_grad or b.requires_grad
        return differentiable(Contraction, self, spec, a, b) if recorded else self.contract(spec, a, b)

    def contract(self, spec: str, a: Tensor, b: Tensor) -> Tensor:
        """The same without a record for gradients."""
        return multiply(spec, to_class(a, self.operand), to_class(b, self.operand), self.product, self.total)

    def exp(self, x: Tensor) -> Tensor:
        """e^x of x <= 88 or so."""
        return differentiable(Exponential, x, self.exponential)

    def soft(self, x: Tensor) -> Tensor:
        """ln(1 + e^x), and x itself above 20."""
        return differentiable(Softplus, x, self)

    def open(self, x: Tensor) -> Tensor:
        """1 / (1 + e^-x)."""
        return differentiable(Sigmoid, x, self)

    def silu(self, x: Tensor) -> Tensor:
        """x / (1 + e^-x)."""
        return x * self.open(x)

    def over_root(self, x: Tensor, square: Tensor) -> Tensor:
        """x over the root of `square`."""
        if self.root == "divide":
            return x / torch.sqrt(square)
        if self.root == "wide":
            return x * torch.rsqrt(square.double()).float()
        return x * torch.rsqrt(square)


def differentiable(function: Any, *given: Any) -> Tensor:
    """A function with a slope of its own, applied."""
    value: Tensor = function.apply(*given)
    return value


def add(terms: Tensor, order: str) -> Tensor:
    """The sum along the first axis."""
    if order == "native" or terms.shape[0] < 2:
        return terms.sum(0)
    if order == "tree":
        return _halves(terms)
    if order == "pairwise":
        return _neighbours(terms)
    if order == "reversed":
        return _one_by_one(terms.flip(0))
    if order == "lanes":
        return _halves(_lanes(terms))
    return _narrow(terms) if order == "bfloat16" else _compensated(terms)


def _halves(terms: Tensor) -> Tensor:
    """First half plus second half, as the lanes of a warp are added."""
    while (n := terms.shape[0]) > 1:
        half = n // 2
        terms = torch.cat([terms[:half] + terms[half : 2 * half], terms[2 * half :]])
    return terms[0]


def _neighbours(terms: Tensor) -> Tensor:
    """Neighbours first."""
    while (n := terms.shape[0]) > 1:
        even = n // 2 * 2
        terms = torch.cat([terms[0:even:2] + terms[1:even:2], terms[even:]])
    return terms[0]


def _one_by_one(terms: Tensor) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _narrow(terms: Tensor) -> Tensor:
    """Not lawful: each partial sum is stored in bfloat16."""
    total = terms[0]
    for term in terms[1:]:
        total = to_class(total + term, "bf16")
    return total


def _lanes(terms: Tensor) -> Tensor:
    """Each lane adds every eighth term."""
    count = terms.shape[0]
    padded = torch.cat([terms, terms.new_zeros(-count % LANES, *terms.shape[1:])])
    return _one_by_one(padded.reshape(-1, LANES, *terms.shape[1:]))


def _compensated(terms: Tensor) -> Tensor:
    """Kahan's sum: what an addition lost is added to the next term."""
    total, lost = terms[0], torch.zeros_like(terms[0])
    for term in terms[1:]:
        wanted = term - lost
        longer = total + wanted
        lost = (longer - total) - wanted
        total = longer
    return total


def multiply(spec: str, a: Tensor, b: Tensor, product: str, total: str) -> Tensor:
    """A contraction of two float32 tensors over one letter."""
    given, out = spec.split("->")
    left, right = given.split(",")
    (letter,) = (set(left) | set(right)) - set(out)
    if product == "matmul":
        return torch.einsum(spec, a, b)
    if product == "numpy":
        return torch.from_numpy(np.ascontiguousarray(np.einsum(spec, a.detach().numpy(), b.detach().numpy())))
    if product == "wide":
        return torch.einsum(spec, a.double(), b.double()).float()
    if product == "summed":
        letters = letter + out
        return add(_aligned(a, left, letters) * _aligned(b, right, letters), total)
    size = a.shape[left.index(letter)] if letter in left else b.shape[right.index(letter)]
    parts = []
    for start in range(0, max(size, 1), TILE):
        pick = slice(start, start + TILE)
        parts.append(torch.einsum(spec, _cut(a, left, letter, pick), _cut(b, right, letter, pick)))
    return _one_by_one(torch.stack(parts))


def _aligned(a: Tensor, own: str, letters: str) -> Tensor:
    """A tensor with an axis for each letter, in their order, of size 1 where it has none."""
    present = [letter for letter in letters if letter in own]
    turned = a.permute([own.index(letter) for letter in present])
    return turned[tuple(slice(None) if letter in own else None for letter in letters)]


def _cut(a: Tensor, own: str, letter: str, pick: slice) -> Tensor:
    return a[tuple(pick if axis == letter else slice(None) for axis in own)]


def to_class(x: Tensor, operand: str) -> Tensor:
    """A matrix operand in its class, as float32; a gradient goes through unrounded."""
    return x if operand == "f32" else differentiable(Rounding, x, operand)


class Rounding(torch.autograd.Function):
    """The rounding of an operand, whose slope is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operand: str) -> Tensor:
        return rounded(x, operand)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0], None


def rounded(x: Tensor, operand: str) -> Tensor:
    """The value of `Rounding`."""
    if operand in ("bf16", "f16"):
        return x.to(torch.bfloat16 if operand == "bf16" else torch.float16).float()
    if operand == "tf32":  # 13 bits fall away, to nearest, ties to even
        bits = x.contiguous().view(torch.int32)
        kept = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
        return torch.where(torch.isfinite(x), kept.view(torch.float32), x)
    raise ValueError(f"operand={operand!r}: f32, tf32, f16 or bf16")


class Contraction(torch.autograd.Function):
    """A contraction whose two gradients are contractions of the same kind."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Arithmetic, spec: str, a: Tensor, b: Tensor) -> Tensor:
        ctx.arithmetic, ctx.spec = arithmetic, spec
        ctx.save_for_backward(a, b)
        return arithmetic.contract(spec, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (a, b), (grad,) = ctx.saved_tensors, grads
        given, out = ctx.spec.split("->")
        left, right = given.split(",")
        return None, None, _pulled(out, grad, right, b, left, ctx.arithmetic), _pulled(
            out, grad, left, a, right, ctx.arithmetic
        )


def _pulled(out: str, grad: Tensor, other: str, with_: Tensor, own: str, arithmetic: Arithmetic) -> Tensor:
    """The gradient of the operand `own`; with no letter to sum over it is a plain product."""
    spec = f"{out},{other}->{own}"
    if (set(out) | set(other)) - set(own):
        return arithmetic.contract(spec, grad, with_)
    return torch.einsum(spec, grad, with_)


class Exponential(torch.autograd.Function):
    """e^x, off by at most 2^-22; exactly 1 at 0 and 0 where the true value vanishes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        value = exponential(x, kind)
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0] * ctx.saved_tensors[0], None


def exponential(x: Tensor, kind: str) -> Tensor:
    """The value of `Exponential`."""
    if kind == "base two":
        return torch.exp2(x * math.log2(math.e))
    value = torch.exp(x)
    if kind == "exact":
        return value
    sign: Tensor | float = 1.0 if kind == "high" else -1.0
    if kind == "either way":  # up or down by the last bit of the true value
        sign = 1.0 - 2.0 * (value.contiguous().view(torch.int32) & 1).float()
    return torch.where(x == 0, value, value * (1.0 + OFF * sign))


class Softplus(torch.autograd.Function):
    """ln(1 + e^x), and x itself above 20; its slope is the sigmoid, and 1 above 20."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.save_for_backward(x)
        if arithmetic.softplus == "logaddexp":
            soft = torch.logaddexp(x, torch.zeros_like(x))
        elif arithmetic.softplus == "logarithm":  # not lawful: 1 + e^x drops what a small e^x says
            soft = torch.log(1.0 + torch.exp(torch.minimum(x, torch.full_like(x, 80.0))))
        else:
            tail = torch.log1p(exponential(-x.abs(), arithmetic.exponential))
            soft = torch.maximum(x, torch.zeros_like(x)) + tail
        if arithmetic.softplus == "base two":  # the logarithm is made to base two and turned back
            log2e = math.log2(math.e)
            soft = (soft * log2e) * math.log(2.0)
        return torch.where(x > 20, x, soft)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.where(x > 20, 1.0, torch.sigmoid(x)), None


class Sigmoid(torch.autograd.Function):
    """1 / (1 + e^-x), which keeps its relative precision on both sides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        if arithmetic.sigmoid == "native":
            value = torch.sigmoid(x)
        elif arithmetic.sigmoid == "reciprocal":
            value = 1.0 / (1.0 + exponential(-x, arithmetic.exponential))
        elif arithmetic.sigmoid == "tanh":  # not lawful: a small value is a difference of two large ones
            value = 0.5 + 0.5 * torch.tanh(0.5 * x)
        else:
            least = exponential(-x.abs(), arithmetic.exponential)
            value = torch.where(x < 0, least, torch.ones_like(x)) * torch.reciprocal(1.0 + least)
        ctx.save_for_backward(x, value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, value = ctx.saved_tensors
        return grads[0] * value * torch.sigmoid(-x), None
