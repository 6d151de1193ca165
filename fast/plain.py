"""Convolution, gates and norms in plain PyTorch, differentiable: what a CPU runs, where no kernel does.

Formulas and names are those of the operations; everything is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from statescan.fast.launch import differentiating

SOFTPLUS_LINEAR_ABOVE = 20.0


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, rows: int,
    initial_windows: Tensor | None, activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y `[batch, T, C]` and the final windows `[N, C, W]` of a checked call (CONV-1 to CONV-5)."""
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    cu = torch.arange(rows + 1, device=x.device) * tokens if cu_seqlens is None else cu_seqlens.to(torch.int64)
    flat = x.reshape(batch * tokens, channels)
    if rows == 0:
        return torch.zeros_like(x), x.new_zeros(0, channels, width)
    row = torch.arange(batch * tokens, device=x.device)
    segment = (torch.searchsorted(cu, row, right=True) - 1).clamp(max=rows - 1)
    live = row < cu[-1]
    taps = (row - cu[segment])[:, None] - torch.arange(width - 1, -1, -1, device=x.device)
    inputs = _columns(flat, cu, segment, torch.where(live[:, None], taps, -width - 1), initial_windows)
    y = (inputs.float() * weight.float()).sum(-1)
    y = y if bias is None else y + bias.float()
    y = y if activation is None else silu(y)
    ends = cu.diff()[:, None] - torch.arange(width, 0, -1, device=x.device)
    final = _columns(flat, cu, torch.arange(rows, device=x.device), ends, initial_windows)
    return torch.where(live[:, None], y, 0.0).to(x.dtype).view(x.shape), final


def pull_convolve(
    grad_y: Tensor, grad_final: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None,
    rows: int, initial_windows: Tensor | None, activation: str | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Cotangents of x, weight, bias and initial_windows from those of the results, for tracers."""
    given = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, initial_windows)]
    asked = [t for t in given if t is not None]
    if rows == 0:
        dx, dw, db, enter = (None if t is None else torch.zeros_like(t) for t in given)
    else:
        with differentiating():
            results = convolve(given[0], given[1], given[2], cu_seqlens, rows, given[3], activation)  # type: ignore[arg-type]
            found = iter(torch.autograd.grad(results, asked, (grad_y, grad_final), materialize_grads=True))
        dx, dw, db, enter = (None if t is None else next(found).contiguous() for t in given)
    assert dx is not None
    assert dw is not None
    return dx, dw, db, enter


def _columns(flat: Tensor, cu: Tensor, segment: Tensor, at: Tensor, windows: Tensor | None) -> Tensor:
    """Inputs `[n, C, W]` of segments `[n]` at places `at [n, W]` counted from each one's start; before it the entering
    window, whose last column is place -1, and before that 0."""
    inside = at >= 0
    if len(flat):
        found = flat[(cu[segment][:, None] + at).masked_fill(~inside, 0)].mT
    else:
        found = flat.new_zeros(at.shape[0], flat.shape[1], at.shape[1])
    before: Tensor | float = 0.0
    if windows is not None:
        width = windows.shape[-1]
        entered = windows[segment[:, None], :, (at + width).clamp(0, width - 1)].mT
        before = torch.where((~inside & (at >= -width))[:, None], entered, 0.0).to(flat.dtype)
    return torch.where(inside[:, None], found, before)


def decay(f: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Log-decays of f `[..., HV, K]`: the softplus gate, or the bounded one (GATE-1 to GATE-4)."""
    biased = f.float() if dt_bias is None else f.float() + dt_bias.float()
    rate = torch.ones((), device=f.device) if A_log is None else A_log.float().exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * biased)
    return -rate * softplus(biased, threshold=SOFTPLUS_LINEAR_ABOVE)


def norm(
    x: Tensor, z: Tensor | None, weight: Tensor | None, size: int, divisor: int, eps: float, gate_first: bool,
    act_silu: bool,
) -> Tensor:  # fmt: skip
    """x over the root of a group's sum of squares / divisor + eps, gated before or after (NORM-1 to NORM-3)."""
    wide: Tensor = x.float()
    gate = None if z is None else silu(z.float()) if act_silu else torch.sigmoid(z.float())
    if gate is not None and gate_first:
        wide = wide * gate
    groups = wide.reshape(*x.shape[:-1], -1, size)
    y = (groups / (groups.square().sum(-1, keepdim=True) / divisor + eps).sqrt()).flatten(-2)
    if weight is not None:
        y = y * weight.float().repeat(x.shape[-1] // weight.shape[0])
    return (y if gate is None or gate_first else y * gate).to(x.dtype)
