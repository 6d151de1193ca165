"""What drives decay and writing, on CUDA tensors: the softplus gate, its per-channel and bounded forms, beta (GATE).

Names, arguments and meaning are those of `statescan.reference.gates`. Everything is computed and returned in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statescan.fast.checks import check_call
from statescan.fast.kernels.gates import beta_kernel, decay_kernel
from statescan.fast.launch import Differentiable, ceil_div, device_of, power_of_2, strides
from statescan.reference.host.rules import LEAST_GATE
from statescan.spec.contract import UnsupportedError

SOFTPLUS_LINEAR_ABOVE = 20.0


def softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, *, check: bool | None = None) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias), a log-decay per value head (GATE-1, GATE-2, GATE-6).

    a `[..., HV]`, A_log and dt_bias `[HV]`, any types served. Returns g `[..., HV]` in float32. Differentiable. Raises
    ShapeError, DtypeError. Source: https://arxiv.org/abs/2312.00752
    """
    return _softplus_op(a, A_log, dt_bias, check)


def _softplus(a: Tensor, A_log: Tensor, dt_bias: Tensor | None, check: bool | None) -> Tensor:
    check_call("softplus_gate", {"a": a, "A_log": A_log, "dt_bias": dt_bias}, {}, check)
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    _launch(a[..., None], A_log, None if dt_bias is None else dt_bias[:, None], None, g)
    return g


def kda_gate(
    f: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *, lower_bound: float | None = None,
    check: bool | None = None,
) -> Tensor:  # fmt: skip
    """The gate per key channel, or with a lower bound b: g = b sigmoid(exp(A_log) (f + dt_bias)) (GATE-3, GATE-4).

    f `[..., HV, K]`, A_log `[HV]` (None: factor 1), dt_bias `[HV, K]`, lower_bound in -1024..0. Returns g
    `[..., HV, K]` in float32. Differentiable. Raises ShapeError, DtypeError, UnsupportedError.
    Source: https://arxiv.org/abs/2510.26692
    """
    return _kda_op(f, A_log, dt_bias, lower_bound, check)


def _kda(
    f: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, check: bool | None
) -> Tensor:
    tensors = {"f": f, "A_log": A_log, "dt_bias": dt_bias}
    check_call("kda_gate", tensors, {"lower_bound": lower_bound}, check)
    if lower_bound is not None and not LEAST_GATE <= lower_bound <= 0:
        raise UnsupportedError(f"lower_bound={lower_bound!r} is outside {LEAST_GATE:g}..0 (GATE-4)")
    g = torch.empty(f.shape, dtype=torch.float32, device=f.device)
    _launch(f, A_log, dt_bias, lower_bound, g)
    return g


def _launch(f: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, g: Tensor) -> None:
    heads, channels = f.shape[-2:]
    if g.numel() == 0:
        return
    f = f.reshape(-1, heads, channels)
    block = min(power_of_2(heads * channels), 1024)
    together = max(1, 1024 // block)
    grid = (ceil_div(f.shape[0], together), ceil_div(heads * channels, block))
    with device_of(f):
        decay_kernel[grid](
            f, *f.stride(), A_log, *strides(A_log, 1), dt_bias, *strides(dt_bias, 2), g, f.shape[0], heads, channels,
            0.0 if lower_bound is None else float(lower_bound), BOUNDED=lower_bound is not None, BR=together, BC=block,
        )  # fmt: skip


def beta_gate(b: Tensor, *, allow_neg_eigval: bool = False, check: bool | None = None) -> Tensor:
    """beta = sigmoid(b), doubled if negative eigenvalues are allowed, never in a narrow type (GATE-5).

    b `[..., HV]`. Returns beta `[..., HV]` in float32. Differentiable. Raises ShapeError, DtypeError.
    Source: https://arxiv.org/abs/2411.12537
    """
    return _beta_op(b, allow_neg_eigval, check)


def _beta(b: Tensor, allow_neg_eigval: bool, check: bool | None) -> Tensor:
    check_call("beta_gate", {"b": b}, {"allow_neg_eigval": allow_neg_eigval}, check)
    beta = torch.empty(b.shape, dtype=torch.float32, device=b.device)
    if b.numel() == 0:
        return beta
    heads = b.shape[-1]
    b = b.reshape(-1, heads)
    block = min(power_of_2(heads), 1024)
    together = 1024 // block
    with device_of(b):
        beta_kernel[(ceil_div(b.shape[0], together), ceil_div(heads, block))](
            b, *b.stride(), beta, b.shape[0], heads, 2.0 if allow_neg_eigval else 1.0, BR=together, BC=block
        )
    return beta


# ---------------------------------------------------------------------------------------------------------------------
# Gradients, and what tracers see
# ---------------------------------------------------------------------------------------------------------------------


def pull_decay(
    grad_g: Tensor, f: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Cotangents of f `[..., HV, K]`, A_log `[HV]` and dt_bias `[HV, K]` from that of g (GRAD-1)."""
    biased = f.float() if dt_bias is None else f.float() + dt_bias.float()
    rate = torch.ones((), device=f.device) if A_log is None else A_log.float().exp()[:, None]
    grad_g = grad_g.float()
    if lower_bound is None:
        linear = biased > SOFTPLUS_LINEAR_ABOVE
        inner = -(grad_g * rate) * torch.where(linear, 1.0, torch.sigmoid(biased))
        grad_log = -(grad_g * rate) * torch.nn.functional.softplus(biased, threshold=SOFTPLUS_LINEAR_ABOVE)
    else:
        s = rate * biased
        inner = grad_g * lower_bound * torch.sigmoid(s) * torch.sigmoid(-s) * rate
        grad_log = inner * biased
    heads, channels = f.shape[-2:]
    to_log = None if A_log is None else grad_log.reshape(-1, heads, channels).sum((0, 2)).to(A_log.dtype)
    to_bias = None if dt_bias is None else inner.reshape(-1, heads, channels).sum(0).to(dt_bias.dtype)
    return inner.to(f.dtype), to_log, to_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors = [t for t in inputs if t is None or isinstance(t, Tensor)]
    ctx.save_for_backward(*tensors[:3])
    ctx.setting = inputs[-2]


def _pull_softplus(ctx: Any, grad_g: Tensor) -> tuple[Tensor | None, ...]:
    a, A_log, dt_bias = ctx.saved_tensors
    bias = None if dt_bias is None else dt_bias[:, None]
    to_a, to_log, to_bias = pull_decay(grad_g[..., None], a[..., None], A_log, bias, None)
    return to_a[..., 0], to_log, None if to_bias is None else to_bias[:, 0], None


def _pull_kda(ctx: Any, grad_g: Tensor) -> tuple[Tensor | None, ...]:
    f, A_log, dt_bias = ctx.saved_tensors
    return *pull_decay(grad_g, f, A_log, dt_bias, ctx.setting), None, None


def _pull_beta(ctx: Any, grad_beta: Tensor) -> tuple[Tensor | None, ...]:
    (b,) = ctx.saved_tensors[:1]
    s = b.float()
    grad = grad_beta * (2.0 if ctx.setting else 1.0) * torch.sigmoid(s) * torch.sigmoid(-s)
    return grad.to(b.dtype), None, None


def _float_like(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


_softplus_op = Differentiable("softplus_gate", _softplus, _float_like, _pull_softplus, _keep)
_kda_op = Differentiable("kda_gate", _kda, _float_like, _pull_kda, _keep)
_beta_op = Differentiable("beta_gate", _beta, _float_like, _pull_beta, _keep)
