"""What drives decay and writing: the softplus gate, its per-channel and bounded forms, and beta (GATE).

    g    <- -exp(A_log) softplus(a + dt_bias)                    softplus(s) = s above 20
    g    <- lower_bound sigmoid(exp(A_log) (f + dt_bias))        where a lower bound is given
    beta <- sigmoid(b), doubled if asked

All in float64 from whatever types the parameters have (GATE-6). A gate does not know of packs: rows of padding are
rows like others here. Sources: https://github.com/NVIDIA/Megatron-LM, https://github.com/fla-org/flash-linear-attention
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from statescan.reference.arrays import Array, Float64, add_along, check_arguments, dtype_name, round_to, widen
from statescan.reference.functions import SOFTPLUS_LINEAR_ABOVE, exp, sigmoid, softplus
from statescan.reference.host.rules import LEAST_GATE
from statescan.reference.sites import Site, keep
from statescan.spec.contract import UnsupportedError

Grads = dict[str, Float64]


def apply_gate(
    a: Float64, A_log: Float64 | None, dt_bias: Float64 | None, lower_bound: float | None = None, at: Site = keep
) -> Float64:
    """Log-decay of every element of a `[..., HV]` or `[..., HV, K]`; parameters broadcast from the right (GATE-1).

    >>> apply_gate(np.array([30.0]), np.array([0.0]), None).tolist()
    [-30.0]
    """
    rate = np.ones(()) if A_log is None else at("exp", exp(A_log))
    biased = at("sum", at("a", a) if dt_bias is None else at("a", a) + at("dt_bias", dt_bias))
    if lower_bound is None:
        return -(rate * at("softplus", softplus(biased)))
    return lower_bound * at("sigmoid", sigmoid(rate * biased))


def softplus_gate(a: Array, A_log: Array, dt_bias: Array | None = None, *, check: bool | None = None) -> Array:
    """g = -exp(A_log) softplus(a + dt_bias), a log-decay per value head (GATE-1, GATE-2, GATE-6).

    a `[..., HV]`, A_log and dt_bias `[HV]`, any float types. Returns g `[..., HV]`, float32 or float64 as a is wide.
    Raises ShapeError, DtypeError. Source: https://arxiv.org/abs/2312.00752

    >>> softplus_gate(np.array([[0.5, 30.0]]), np.zeros(2), np.array([1.0, 0.0])).tolist()
    [[-1.7014132779827524, -30.0]]
    """
    check_arguments("softplus_gate", {"a": a, "A_log": A_log, "dt_bias": dt_bias}, {})
    g = apply_gate(widen(a), widen(A_log), None if dt_bias is None else widen(dt_bias))
    return round_to(g, gate_type(a))


def kda_gate(
    f: Array, A_log: Array | None = None, dt_bias: Array | None = None, *, lower_bound: float | None = None,
    check: bool | None = None,
) -> Array:  # fmt: skip
    """The gate per key channel, or with a lower bound b: g = b sigmoid(exp(A_log) (f + dt_bias)) (GATE-3, GATE-4).

    f `[..., HV, K]`, A_log `[HV]` (None: factor 1), dt_bias `[HV, K]`, lower_bound in -1024..0. Returns g
    `[..., HV, K]`. Raises ShapeError, DtypeError, UnsupportedError. Source: https://arxiv.org/abs/2510.26692

    >>> kda_gate(np.zeros((1, 1, 2)), lower_bound=-5.0).tolist()
    [[[-2.5, -2.5]]]
    """
    check_arguments("kda_gate", {"f": f, "A_log": A_log, "dt_bias": dt_bias}, {"lower_bound": lower_bound})
    check_lower_bound(lower_bound)
    rate, bias = None if A_log is None else widen(A_log)[:, None], None if dt_bias is None else widen(dt_bias)
    return round_to(apply_gate(widen(f), rate, bias, lower_bound), gate_type(f))


def check_lower_bound(lower_bound: float | None) -> None:
    """The bound itself must be a log-decay, or no gate under it would be one (GATE-4, NUM-3)."""
    if lower_bound is not None and not LEAST_GATE <= lower_bound <= 0:
        raise UnsupportedError(f"lower_bound={lower_bound!r} is outside {LEAST_GATE:g}..0 (GATE-4)")


def beta_gate(b: Array, *, allow_neg_eigval: bool = False, check: bool | None = None) -> Array:
    """beta = sigmoid(b), doubled if negative eigenvalues are allowed, never in a narrow type (GATE-5).

    b `[..., HV]`. Returns beta `[..., HV]`, float32 or float64 as b is wide. Raises ShapeError, DtypeError.
    Source: https://arxiv.org/abs/2411.12537

    >>> beta_gate(np.array([0.0]), allow_neg_eigval=True).tolist()
    [1.0]
    """
    check_arguments("beta_gate", {"b": b}, {"allow_neg_eigval": allow_neg_eigval})
    return round_to(apply_beta(widen(b), allow_neg_eigval), gate_type(b))


def apply_beta(b: Float64, allow_neg_eigval: bool, at: Site = keep) -> Float64:
    """sigmoid(b), or twice that, elementwise (GATE-5)."""
    return (2.0 if allow_neg_eigval else 1.0) * at("sigmoid", sigmoid(at("b", b)))


def gate_type(source: Array) -> str:
    """Gates are delivered in f32, beside f64 inputs in f64."""
    return "f64" if dtype_name(source) == "f64" else "f32"


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------


def slope_softplus(s: Float64) -> Float64:
    """Derivative of softplus: sigmoid, and 1 on the linear part (GATE-2)."""
    return np.where(s > SOFTPLUS_LINEAR_ABOVE, 1.0, sigmoid(s))


def pull_sigmoid(x: Float64) -> Float64:
    """The slope of sigmoid, s (1 - s) of the value s that frameworks keep: near 1 they have lost digits of the rest."""
    s = sigmoid(x)
    kept, rest = keep("sigmoid", s), keep("sigmoid", sigmoid(-x))
    return kept * (rest - (kept - s))


def softplus_gate_grad(
    cotangents: Mapping[str, Array], a: Array, A_log: Array, dt_bias: Array | None = None
) -> Grads:
    """Gradients of `softplus_gate` for every input given, from the cotangent of `g` (GRAD-1).

    >>> grads = softplus_gate_grad({"g": np.array([[1.0]])}, np.array([[30.0]]), np.zeros(1))
    >>> grads["a"].tolist(), grads["A_log"].tolist()
    ([[-1.0]], [-30.0])
    """
    rate = keep("exp", exp(widen(A_log)))  # [HV]
    biased = keep("sum", widen(a) if dt_bias is None else widen(a) + widen(dt_bias))  # [..., HV]
    grad_g = widen(cotangents["g"])
    grad_inner = -(grad_g * rate * keep("sigmoid", slope_softplus(biased)))
    grads = {"a": grad_inner, "A_log": add_rows(-(grad_g * rate * keep("softplus", softplus(biased))), 1)}
    return grads if dt_bias is None else {**grads, "dt_bias": add_rows(grad_inner, 1)}


def kda_gate_grad(
    cotangents: Mapping[str, Array], f: Array, A_log: Array | None = None, dt_bias: Array | None = None, *,
    lower_bound: float | None = None,
) -> Grads:  # fmt: skip
    """Gradients of `kda_gate` for every input given, from the cotangent of `g` (GRAD-1).

    >>> kda_gate_grad({"g": np.ones((1, 1, 1))}, np.zeros((1, 1, 1)), lower_bound=-4.0)["f"].tolist()
    [[[-1.0]]]
    """
    rate = np.ones((f.shape[-2], 1)) if A_log is None else keep("exp", exp(widen(A_log)))[:, None]  # [HV, 1]
    biased = keep("sum", widen(f) if dt_bias is None else widen(f) + widen(dt_bias))  # [..., HV, K]
    grad_g = widen(cotangents["g"])
    if lower_bound is None:
        grad_inner = -(grad_g * rate * keep("sigmoid", slope_softplus(biased)))
        grad_log = -(grad_g * rate * keep("softplus", softplus(biased)))
    else:
        grad_inner = grad_g * lower_bound * pull_sigmoid(rate * biased) * rate
        grad_log = grad_inner * biased
    grads: dict[str, Any] = {"f": grad_inner}
    if A_log is not None:
        grads["A_log"] = add_along(add_rows(grad_log, 2), 1)
    return grads if dt_bias is None else {**grads, "dt_bias": add_rows(grad_inner, 2)}


def beta_gate_grad(cotangents: Mapping[str, Array], b: Array, *, allow_neg_eigval: bool = False) -> Grads:
    """Gradient of `beta_gate` from the cotangent of `beta` (GRAD-1).

    >>> beta_gate_grad({"beta": np.array([1.0])}, np.array([0.0]))["b"].tolist()
    [0.25]
    """
    return {"b": (2.0 if allow_neg_eigval else 1.0) * widen(cotangents["beta"]) * pull_sigmoid(widen(b))}


def add_rows(terms: Float64, axes: int) -> Float64:
    """The sum over all leading axes, in C order, leaving the last `axes`: the gradient of a shared parameter."""
    kept = terms.shape[terms.ndim - axes :]
    count = 1
    for size in terms.shape[: terms.ndim - axes]:
        count *= size
    return keep("sum", add_along(terms.reshape(count, *kept), 0))
