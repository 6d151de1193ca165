"""The two normalisations beside the scan: l2norm of queries and keys, and the gated root-mean-square norm (NORM).

    y <- x / sqrt(sum of x^2 + eps)                                        epsilon inside the root
    y <- x / sqrt(mean over the group of x^2 + eps) * weight               the gate act(z) multiplies x before (Mamba2,
                                                                           GDP) or y after (GDN, KDA)

Source: https://github.com/state-spaces/mamba (RMSNormGated), https://github.com/fla-org/flash-linear-attention
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from statescan.reference.arrays import Array, Float64, add_along, check_arguments, dtype_name, round_to, widen
from statescan.reference.conv import slope
from statescan.reference.functions import sigmoid, silu
from statescan.reference.gates import Grads, add_rows, pull_sigmoid
from statescan.reference.sites import Site, keep
from statescan.spec.contract import ShapeError

L2NORM_EPS = 1e-6


def l2norm(x: Array, *, eps: float = L2NORM_EPS, check: bool | None = None) -> Array:
    """y = x / sqrt(sum of x^2 + eps) over the last axis, epsilon inside the root (NORM-1).

    x `[..., D]`. Returns y of x's shape and type; a zero row stays zero. Raises ShapeError, DtypeError.
    Source: https://github.com/fla-org/flash-linear-attention (modules/l2norm)

    >>> l2norm(np.array([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]]), eps=16.0).tolist()
    [[0.2, 0.4, 0.4], [0.0, 0.0, 0.0]]
    """
    check_arguments("l2norm", {"x": x}, {"eps": eps})
    return round_to(normalise(widen(x), eps), dtype_name(x))


def normalise(x: Float64, eps: float, at: Site = keep) -> Float64:
    """x over the root of its squared length and eps, along the last axis (NORM-1)."""
    x = at("x", x)
    return x / at("root", np.sqrt(at("sum", add_along(x * x, -1)) + eps))[..., None]


def rmsnorm_gated(
    x: Array, z: Array | None, weight: Array, *, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, gate_activation: str = "silu", check: bool | None = None,
) -> Array:  # fmt: skip
    """Root-mean-square norm of groups of channels with a gate before or after it (NORM-2, NORM-3).

    x and z `[..., D]`, weight `[D]` or `[group_size]`, group_size a divisor of D (None: D), gate_activation "silu" or
    "sigmoid". Returns y of x's shape and type. Raises ShapeError, DtypeError, UnsupportedError.
    Source: https://github.com/state-spaces/mamba (ops/triton/layernorm_gated)

    >>> rmsnorm_gated(np.array([[3.0, 4.0, 0.0, 2.0]]), None, np.array([1.0, 10.0]), eps=0.0, group_size=2).tolist()
    [[0.848528137423857, 11.31370849898476, 0.0, 14.14213562373095]]
    """
    settings = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate,
                "gate_activation": gate_activation}  # fmt: skip
    check_arguments("rmsnorm_gated", {"x": x, "z": z, "weight": weight}, settings)
    size = check_groups(x.shape[-1], weight.shape[0], group_size)
    gate = None if z is None else widen(z)
    y = apply_norm(widen(x), gate, spread(weight, x.shape[-1]), eps, size, norm_before_gate, gate_activation)
    return round_to(y, dtype_name(x))


def check_groups(channels: int, weights: int, group_size: int | None) -> int:
    """The group size of a call; groups fill the channels, and weights are one a channel or one a place (NORM-3)."""
    size = channels if group_size is None else group_size
    if size < 1 or channels % size:
        raise ShapeError(f"group_size={size} does not divide the {channels} channels of x (NORM-3)")
    if weights not in (channels, size):
        raise ShapeError(f"weight has shape [{weights}]: [{channels}] or [{size}] is needed (NORM-3)")
    return size


def apply_norm(
    x: Float64, z: Float64 | None, weight: Float64, eps: float, size: int, norm_first: bool, activation: str,
    at: Site = keep,
) -> Float64:  # fmt: skip
    """The gated norm on float64: x, z `[..., D]`, weight `[D]`, groups of `size` channels (NORM-2, NORM-3)."""
    x = at("x", x)
    gate = None if z is None else at("gate", activate(at("z", z), activation))
    if gate is not None and not norm_first:
        x = x * gate
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)  # [..., D / size, size]
    average = at("sum", add_along(groups * groups, -1)) / size
    y = (groups / at("root", np.sqrt(average + eps))[..., None]).reshape(x.shape) * at("weight", weight)
    return y * gate if gate is not None and norm_first else y


def activate(z: Float64, activation: str) -> Float64:
    """silu or sigmoid, elementwise."""
    return silu(z) if activation == "silu" else sigmoid(z)


def spread(weight: Array, channels: int) -> Float64:
    """One weight a channel, from one a channel or one a place in the group."""
    return widen(weight)[[c % weight.shape[0] for c in range(channels)]]


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------


def l2norm_grad(cotangents: Mapping[str, Array], x: Array, *, eps: float = L2NORM_EPS) -> Grads:
    """Gradient of `l2norm` from the cotangent of `y` (GRAD-1); finite at a zero row, thanks to eps (GRAD-3).

    >>> l2norm_grad({"y": np.array([1.0, 0.0])}, np.zeros(2), eps=0.25)["x"].tolist()
    [2.0, 0.0]
    """
    return {"x": pull_normalise(widen(cotangents["y"]), widen(x), eps)}


def pull_normalise(grad_y: Float64, x: Float64, eps: float) -> Float64:
    """Cotangent of x: that of y less its part along y, over the root."""
    root = keep("root", np.sqrt(keep("sum", add_along(x * x, -1)) + eps))[..., None]
    y = keep("x", x / root)
    return (grad_y - y * keep("sum", add_along(y * grad_y, -1))[..., None]) / root


def rmsnorm_gated_grad(
    cotangents: Mapping[str, Array], x: Array, z: Array | None, weight: Array, *, eps: float = 1e-5,
    group_size: int | None = None, norm_before_gate: bool = False, gate_activation: str = "silu",
) -> Grads:  # fmt: skip
    """Gradients of `rmsnorm_gated` for every input given, from the cotangent of `y` (GRAD-1).

    >>> rmsnorm_gated_grad({"y": np.array([1.0])}, np.array([2.0]), None, np.array([3.0]), eps=0.0)["weight"].tolist()
    [1.0]
    """
    size = check_groups(x.shape[-1], weight.shape[0], group_size)
    grad_y, w, one = widen(cotangents["y"]), spread(weight, x.shape[-1]), np.ones(())
    gate = one if z is None else keep("gate", activate(widen(z), gate_activation))
    before, after = (one, gate) if norm_before_gate else (gate, one)
    gated = (widen(x) * before).reshape(*x.shape[:-1], x.shape[-1] // size, size)  # [..., D / size, size]
    root = keep("root", np.sqrt(keep("sum", add_along(gated * gated, -1)) / size + eps))[..., None]
    unit = keep("x", gated / root)
    grad_unit = (grad_y * after * w).reshape(gated.shape)
    along = keep("sum", add_along(grad_unit * unit, -1))[..., None] / size
    grad_inner = ((grad_unit - unit * along) / root).reshape(x.shape)
    unit = unit.reshape(x.shape)
    grads: dict[str, Any] = {"x": grad_inner * before, "weight": gather(grad_y * after * unit, weight.shape[0])}
    if z is not None:
        grad_gate = grad_y * unit * w if norm_before_gate else grad_inner * widen(x)
        grads["z"] = grad_gate * slope_gate(widen(z), gate_activation)
    return grads


def slope_gate(z: Float64, activation: str) -> Float64:
    """Derivative of the gate's activation."""
    return keep("sigmoid", slope(z, "silu")) if activation == "silu" else pull_sigmoid(z)


def gather(terms: Float64, weights: int) -> Float64:
    """Gradient of `spread`: rows added up, then the groups that share a weight."""
    return add_along(add_rows(terms, 1).reshape(-1, weights), 0)
