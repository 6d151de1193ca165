"""Gates and norms as right kernels write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from statescan.conformance.variations.arithmetic import Arithmetic, to_class
from statescan.conformance.variations.delta import unit

Tensor = torch.Tensor

MEANS = ("divide", "multiply")
WEIGHTS = ("after the root", "before the root")
SIGNS = ("last", "first")
BLOCKS = ("whole", "a row at a time")


@dataclass(frozen=True)
class Gates:
    """How one kernel does it."""

    arithmetic: Arithmetic = Arithmetic()  # noqa: RUF009  frozen
    mean: str = "divide"
    weight: str = "after the root"
    sign: str = "last"

    def operations(self) -> dict[str, Any]:
        """The three gates and two norms."""
        return {name: getattr(self, f"_{name}")
                for name in ("softplus_gate", "kda_gate", "beta_gate", "l2norm", "rmsnorm_gated")}  # fmt: skip

    def _rate(self, A_log: Tensor) -> Tensor:
        return self.arithmetic.exp(A_log.float())

    def _signed(self, rate: Tensor | float, soft: Tensor) -> Tensor:
        return (-rate) * soft if self.sign == "first" else -(rate * soft)

    def _softplus_gate(self, *, a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, **_: Any) -> Tensor:
        return self._signed(self._rate(A_log), self.arithmetic.soft(biased(a, dt_bias)))

    def _kda_gate(self, *, f: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
                  lower_bound: float | None = None, **_: Any) -> Tensor:  # fmt: skip
        rate = 1.0 if A_log is None else self._rate(A_log)[:, None]
        if lower_bound is None:
            return self._signed(rate, self.arithmetic.soft(biased(f, dt_bias)))
        return lower_bound * self.arithmetic.open(rate * biased(f, dt_bias))

    def _beta_gate(self, *, b: Tensor, allow_neg_eigval: bool = False, **_: Any) -> Tensor:
        half = self.arithmetic.open(loaded(b))
        return half * 2.0 if allow_neg_eigval else half

    def _l2norm(self, *, x: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
        return unit(self.arithmetic, to_class(loaded(x), self.arithmetic.operand), eps).to(x.dtype)

    def _rmsnorm_gated(self, *, x: Tensor, z: Tensor | None, weight: Tensor, eps: float = 1e-5,
                       group_size: int | None = None, norm_before_gate: bool = False, gate_activation: str = "silu",
                       **_: Any) -> Tensor:  # fmt: skip
        kind, size = x.dtype, group_size or x.shape[-1]
        x = to_class(loaded(x), self.arithmetic.operand)
        gate = None if z is None else self._gate(to_class(loaded(z), self.arithmetic.operand), gate_activation)
        if gate is not None and not norm_before_gate:
            x = x * gate
        groups = x.reshape(*x.shape[:-1], -1, size)
        spread = to_class(weight.float(), self.arithmetic.operand).repeat(x.shape[-1] // len(weight))
        spread = spread.reshape(-1, size)
        total = self.arithmetic.sum(groups * groups, -1)
        square = ((total / size if self.mean == "divide" else total * (1.0 / size)) + eps)[..., None]
        if self.weight == "before the root":
            y = self.arithmetic.over_root(groups * spread, square)
        else:
            y = self.arithmetic.over_root(groups, square) * spread
        y = y.flatten(-2)
        return (y if gate is None or not norm_before_gate else y * gate).to(kind)

    def _gate(self, z: Tensor, activation: str) -> Tensor:
        return self.arithmetic.silu(z) if activation == "silu" else self.arithmetic.open(z)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    """A logit with its bias, in float32."""
    return loaded(x) if bias is None else loaded(x) + bias.float()


def loaded(x: Tensor) -> Tensor:
    """In float32 and in C order, so that strides cannot choose another vector loop."""
    return x.float().contiguous()
