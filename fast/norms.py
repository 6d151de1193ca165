"""The two normalisations beside the scan, on CUDA tensors: l2norm, and the gated root-mean-square norm (NORM).

Names, arguments and meaning are those of `statescan.reference.norms`. Sums are formed in float32 whatever the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statescan.fast.checks import check_call
from statescan.fast.kernels.norms import norm_kernel
from statescan.fast.launch import Differentiable, ceil_div, device_of, power_of_2, strides
from statescan.spec.contract import ShapeError

L2NORM_EPS = 1e-6
MOST_CHANNELS = 4096
"""A block's channels; longer groups are read twice."""


def l2norm(x: Tensor, *, eps: float = L2NORM_EPS, check: bool | None = None) -> Tensor:
    """y = x / sqrt(sum of x^2 + eps) over the last axis, epsilon inside the root (NORM-1).

    x `[..., D]`. Returns y of x's shape and type; a zero row stays zero. Differentiable. Raises ShapeError, DtypeError.
    Source: https://github.com/fla-org/flash-linear-attention (modules/l2norm)
    """
    return _l2norm_op(x, eps, check)


def _l2norm(x: Tensor, eps: float, check: bool | None) -> Tensor:
    check_call("l2norm", {"x": x}, {"eps": eps}, check)
    return _launch(x, None, None, x.shape[-1], 1, eps, False, True)


def rmsnorm_gated(
    x: Tensor, z: Tensor | None, weight: Tensor, *, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, gate_activation: str = "silu", check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Root-mean-square norm of groups of channels with a gate before or after it (NORM-2, NORM-3).

    x and z `[..., D]`, weight `[D]` or `[group_size]`, group_size a divisor of D (None: D), gate_activation "silu" or
    "sigmoid". Returns y of x's shape and type. Differentiable. Raises ShapeError, DtypeError, UnsupportedError.
    Source: https://github.com/state-spaces/mamba (ops/triton/layernorm_gated)
    """
    return _rmsnorm_op(x, z, weight, eps, group_size, norm_before_gate, gate_activation, check)


def _rmsnorm(
    x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool,
    gate_activation: str, check: bool | None,
) -> Tensor:  # fmt: skip
    settings = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate,
                "gate_activation": gate_activation}  # fmt: skip
    check_call("rmsnorm_gated", {"x": x, "z": z, "weight": weight}, settings, check)
    size = check_groups(x.shape[-1], weight.shape[0], group_size)
    return _launch(x, z, weight, size, size, eps, not norm_before_gate, gate_activation == "silu")


def check_groups(channels: int, weights: int, group_size: int | None) -> int:
    """The group size of a call; groups fill the channels, and weights are one a channel or one a place (NORM-3)."""
    size = channels if group_size is None else group_size
    if size < 1 or channels % size:
        raise ShapeError(f"group_size={size} does not divide the {channels} channels of x (NORM-3)")
    if weights not in (channels, size):
        raise ShapeError(f"weight has shape [{weights}]: [{channels}] or [{size}] is needed (NORM-3)")
    return size


def _launch(
    x: Tensor, z: Tensor | None, weight: Tensor | None, size: int, divisor: int, eps: float, gate_first: bool,
    silu: bool,
) -> Tensor:  # fmt: skip
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    channels = x.shape[-1]
    rows, gate = x.reshape(-1, channels), None if z is None else z.reshape(-1, channels)
    block = min(power_of_2(size), MOST_CHANNELS)
    together = max(1, 1024 // block)
    with device_of(x):
        norm_kernel[(ceil_div(rows.shape[0], together), channels // size)](
            rows, *rows.stride(), gate, *strides(gate, 2), weight, *strides(weight, 1), y, rows.shape[0], channels,
            size, 1 if weight is None else weight.shape[0], divisor, float(eps), BEFORE=gate_first, SILU=silu,
            BR=together, BC=block, WHOLE=size <= block, num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return y


# ---------------------------------------------------------------------------------------------------------------------
# Gradients, and what tracers see
# ---------------------------------------------------------------------------------------------------------------------


def pull_norm(grad: Tensor, unit: Tensor, root: Tensor, divisor: int) -> Tensor:
    """Cotangent of x from that of `unit` = x / root: less its part along `unit` (over the last axis)."""
    return (grad - unit * (unit * grad).sum(-1, keepdim=True) / divisor) / root


def _pull_l2norm(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    wide = x.float()
    root = (wide.square().sum(-1, keepdim=True) + ctx.settings[0]).sqrt()
    return pull_norm(grad_y.float(), wide / root, root, 1).to(x.dtype), None, None


def _pull_rmsnorm(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, z, weight = ctx.saved_tensors
    eps, group_size, norm_first, activation = ctx.settings
    channels = x.shape[-1]
    size = channels if group_size is None else group_size
    wide, grad_y, w = x.float(), grad_y.float(), weight.float().repeat(channels // weight.shape[0])
    gate = torch.ones((), device=x.device) if z is None else _activate(z.float(), activation)
    gated = (wide if norm_first else wide * gate).unflatten(-1, (-1, size))
    root = (gated.square().mean(-1, keepdim=True) + eps).sqrt()
    unit = gated / root
    outer = grad_y * gate if norm_first else grad_y
    inner = pull_norm((outer * w).unflatten(-1, (-1, size)), unit, root, size).flatten(-2)
    unit = unit.flatten(-2)
    dw = (outer * unit).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
    dx = inner if norm_first else inner * gate
    if z is None:
        return dx.to(x.dtype), None, dw, None, None, None, None, None
    grad_gate = grad_y * unit * w if norm_first else inner * wide
    dz = (grad_gate * _slope(z.float(), activation)).to(z.dtype)
    return dx.to(x.dtype), dz, dw, None, None, None, None, None


def _activate(z: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.silu(z) if activation == "silu" else torch.sigmoid(z)


def _slope(z: Tensor, activation: str) -> Tensor:
    s = torch.sigmoid(z)
    slope = s * torch.sigmoid(-z)
    return s + z * slope if activation == "silu" else slope


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors = 1 if len(inputs) == 3 else 3
    ctx.save_for_backward(*inputs[:tensors])
    ctx.settings = inputs[tensors:-1]


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_l2norm_op = Differentiable("l2norm", _l2norm, _like, _pull_l2norm, _keep)
_rmsnorm_op = Differentiable("rmsnorm_gated", _rmsnorm, _like, _pull_rmsnorm, _keep)
