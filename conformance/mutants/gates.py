"""Gates and norms as elementwise kernels compute them: exponentials of -abs only, sums over a last axis of groups.

Each fault is one comparison with its id, at the place where its mechanism sits. What the recurrences need of gates and
norms (softplus, silu, normalised keys) they take from here, faults included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from statescan.conformance.mutants.packed import refusals
from statescan.reference.arrays import DTYPES, Array, Float64, check_arguments, dtype_name, round_to, widen
from statescan.reference.gates import check_lower_bound
from statescan.reference.norms import check_groups

Grads = dict[str, Float64]

LINEAR_ABOVE = 20.0
LARGEST_EXPONENT = 88.7
"""Above it the exponential of a float32 is infinite."""

SOFTPLUS_FAULTS: tuple[str, ...] = (
    "softplus-overflows", "softplus-linear-from-zero", "softplus-tail-cancels", "softplus-gradient-overflows",
)  # fmt: skip
L2NORM_FAULTS: tuple[str, ...] = (
    "l2norm-epsilon-as-maximum", "l2norm-epsilon-outside-the-root", "l2norm-in-bf16",
    "l2norm-gradient-of-zero-key-nan",
)  # fmt: skip
FAULTS: tuple[str, ...] = (
    "gate-bias-after-softplus", "a-log-not-exponentiated", *SOFTPLUS_FAULTS,
    "kda-gate-of-channel-zero", "kda-rate-of-head-zero", "lower-bound-as-clamp", "lower-bound-before-negation",
    "rate-outside-the-sigmoid", "beta-not-doubled", "beta-always-doubled", "beta-rounded-to-input-type",
    "parameters-exponentiated-in-their-own-type", "bias-added-in-a-narrow-type",
    *L2NORM_FAULTS, "norm-order-ignored", "sigmoid-gate-taken-as-silu", "group-size-ignored",
    "norm-weight-of-first-group", "one-class-for-all", "message-without-label",
)  # fmt: skip


def build(fault: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """The operations of this module, right or with one fault, and their gradients."""
    model = GateModel(fault)
    names = ("softplus_gate", "kda_gate", "beta_gate", "l2norm", "rmsnorm_gated")
    return {f"{name}{end}": getattr(model, f"{name}{end}") for name in names for end in ("", "_grad")}


# ---------------------------------------------------------------------------------------------------------------------
# Functions of one number
# ---------------------------------------------------------------------------------------------------------------------


def softplus(x: Float64, fault: str | None = None) -> Float64:
    """ln(1 + e^x), and x itself above 20."""
    soft = np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0.0)
    if fault == "softplus-overflows":
        return np.where(x > LARGEST_EXPONENT, np.inf, soft)
    if fault == "softplus-tail-cancels":
        narrow = np.minimum(x, LARGEST_EXPONENT).astype(np.float32)
        soft = np.log(np.float32(1.0) + np.exp(narrow)).astype(np.float64)
    linear = 0.0 if fault == "softplus-linear-from-zero" else LINEAR_ABOVE
    return np.where(x > linear, x, soft)


def slope_softplus(x: Float64, fault: str | None = None) -> Float64:
    """Derivative of softplus: 1 on the linear part."""
    slope = np.where(x > LINEAR_ABOVE, 1.0, sigmoid(x))
    if fault == "softplus-gradient-overflows":  # e^x / (1 + e^x): infinity over infinity
        return np.where(x > LARGEST_EXPONENT, np.nan, slope)
    return slope


def sigmoid(x: Float64) -> Float64:
    """1 / (1 + e^-x), from an exponential that never overflows."""
    least = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, least, 1.0) / (1.0 + least))


def slope_sigmoid(x: Float64) -> Float64:
    """Derivative of the sigmoid, even in x."""
    least = np.exp(-np.abs(x))
    return np.asarray(least / (1.0 + least) ** 2)


def silu(x: Float64) -> Float64:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def slope_silu(x: Float64) -> Float64:
    """Derivative of silu."""
    return sigmoid(x) + x * slope_sigmoid(x)


# ---------------------------------------------------------------------------------------------------------------------
# Functions of a row
# ---------------------------------------------------------------------------------------------------------------------


def unit_rows(x: Float64, eps: float, fault: str | None = None) -> Float64:
    """Rows `[..., D]` over the root of their squared length and eps."""
    return np.asarray(x / root_of_squares(x, eps, fault))


def root_of_squares(x: Float64, eps: float, fault: str | None = None) -> Float64:
    """What a row is divided by, `[..., 1]`."""
    total = (x * x).sum(-1, keepdims=True)
    if fault == "l2norm-epsilon-as-maximum":
        return np.asarray(np.sqrt(np.maximum(total, eps)))
    if fault == "l2norm-epsilon-outside-the-root":
        return np.asarray(np.sqrt(total) + eps)
    if fault == "l2norm-in-bf16":
        return to_bf16(np.sqrt(to_bf16(total) + eps))
    return np.asarray(np.sqrt(total + eps))


def pull_unit_rows(grad: Float64, x: Float64, eps: float, fault: str | None = None) -> Float64:
    """Cotangent of x from that of its unit rows."""
    root = root_of_squares(x, eps, fault)
    pulled = grad / root - x * (x * grad).sum(-1, keepdims=True) / root**3
    if fault == "l2norm-gradient-of-zero-key-nan":  # x over the length, whose own slope is 0 / 0 at a zero row
        pulled = np.where((x == 0).all(-1, keepdims=True), np.nan, pulled)
    return np.asarray(pulled)


def to_bf16(x: Float64) -> Float64:
    """The same numbers after a visit to bfloat16."""
    return np.asarray(x).astype(DTYPES["bf16"]).astype(np.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------------------------------------------------


class GateModel:
    """Gates and norms with at most one fault."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault

    def softplus_gate(
        self, a: Array, A_log: Array, dt_bias: Array | None = None, *, check: bool | None = None
    ) -> Array:
        """The log-decay of every value head."""
        self._check("softplus_gate", {"a": a, "A_log": A_log, "dt_bias": dt_bias}, {})
        return round_to(self._gate(a, self._rate(A_log), dt_bias), gate_type(a))

    def kda_gate(
        self, f: Array, A_log: Array | None = None, dt_bias: Array | None = None, *, lower_bound: float | None = None,
        check: bool | None = None,
    ) -> Array:  # fmt: skip
        """The log-decay of every key channel."""
        self._check("kda_gate", {"f": f, "A_log": A_log, "dt_bias": dt_bias}, {"lower_bound": lower_bound})
        with refusals(self.fault):
            check_lower_bound(lower_bound)
        if self.fault == "kda-gate-of-channel-zero":
            f = np.broadcast_to(f[..., :1], f.shape)
            dt_bias = None if dt_bias is None else np.broadcast_to(dt_bias[:, :1], dt_bias.shape)
        rate = np.ones((f.shape[-2], 1)) if A_log is None else self._rate(A_log)[:, None]
        if self.fault == "kda-rate-of-head-zero":
            rate = np.broadcast_to(rate[:1], rate.shape)
        g = self._gate(f, rate, dt_bias) if lower_bound is None else self._bounded(f, rate, dt_bias, lower_bound)
        return round_to(g, gate_type(f))

    def beta_gate(self, b: Array, *, allow_neg_eigval: bool = False, check: bool | None = None) -> Array:
        """beta, doubled if asked."""
        self._check("beta_gate", {"b": b}, {"allow_neg_eigval": allow_neg_eigval})
        half = sigmoid(widen(b))
        if self.fault == "beta-rounded-to-input-type":
            half = widen(round_to(half, dtype_name(b)))
        doubled = allow_neg_eigval and self.fault != "beta-not-doubled"
        return round_to(half * 2.0 if doubled or self.fault == "beta-always-doubled" else half, gate_type(b))

    def l2norm(self, x: Array, *, eps: float = 1e-6, check: bool | None = None) -> Array:
        """Rows of length 1, nearly."""
        self._check("l2norm", {"x": x}, {"eps": eps})
        with np.errstate(invalid="ignore", divide="ignore"):
            return round_to(unit_rows(widen(x), eps, self.fault), dtype_name(x))

    def rmsnorm_gated(
        self, x: Array, z: Array | None, weight: Array, *, eps: float = 1e-5, group_size: int | None = None,
        norm_before_gate: bool = False, gate_activation: str = "silu", check: bool | None = None,
    ) -> Array:  # fmt: skip
        """The gated norm over groups of channels."""
        size = self._accept_norm(x, z, weight, eps, group_size, norm_before_gate, gate_activation)
        gate = 1.0 if z is None else self._activate(widen(z), gate_activation)
        last = norm_before_gate and self.fault != "norm-order-ignored"
        before, after = (1.0, gate) if last else (gate, 1.0)
        groups = (widen(x) * before).reshape(*x.shape[:-1], x.shape[-1] // size, size)
        with np.errstate(invalid="ignore", divide="ignore"):
            unit = groups / np.sqrt((groups * groups).sum(-1, keepdims=True) / size + eps)
        y = unit.reshape(x.shape) * self._weights(weight, x.shape[-1], size) * after
        return round_to(y, dtype_name(x))

    # -----------------------------------------------------------------------------------------------------------------
    # Parts
    # -----------------------------------------------------------------------------------------------------------------

    def _check(self, name: str, tensors: Mapping[str, Array | None], settings: Mapping[str, Any]) -> None:
        with refusals(self.fault):
            check_arguments(name, tensors, settings)

    def _rate(self, A_log: Array) -> Float64:
        """exp(A_log), per head."""
        if self.fault == "a-log-not-exponentiated":
            return widen(A_log)
        rate = np.exp(widen(A_log))
        if self.fault == "parameters-exponentiated-in-their-own-type":
            return widen(round_to(rate, dtype_name(A_log)))
        return rate

    def _biased(self, a: Array, dt_bias: Array | None) -> Float64:
        if dt_bias is None:
            return widen(a)
        biased = widen(a) + widen(dt_bias)
        return widen(round_to(biased, dtype_name(a))) if self.fault == "bias-added-in-a-narrow-type" else biased

    def _gate(self, a: Array, rate: Float64, dt_bias: Array | None) -> Float64:
        if self.fault == "gate-bias-after-softplus" and dt_bias is not None:
            return -(rate * (softplus(widen(a), self.fault) + widen(dt_bias)))
        return -(rate * softplus(self._biased(a, dt_bias), self.fault))

    def _bounded(self, f: Array, rate: Float64, dt_bias: Array | None, bound: float) -> Float64:
        biased = self._biased(f, dt_bias)
        if self.fault == "lower-bound-as-clamp":
            return np.maximum(-(rate * softplus(biased)), bound)
        if self.fault == "lower-bound-before-negation":
            return -np.minimum(rate * softplus(biased), bound)
        if self.fault == "rate-outside-the-sigmoid":
            return bound * rate * sigmoid(biased)
        return bound * sigmoid(rate * biased)

    def _accept_norm(
        self, x: Array, z: Array | None, weight: Array, eps: float, group_size: int | None, norm_first: bool,
        activation: str,
    ) -> int:  # fmt: skip
        """The group size of a norm, once the rules are kept."""
        settings = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_first,
                    "gate_activation": activation}  # fmt: skip
        self._check("rmsnorm_gated", {"x": x, "z": z, "weight": weight}, settings)
        with refusals(self.fault):
            size = check_groups(x.shape[-1], weight.shape[0], group_size)
        return x.shape[-1] if self.fault == "group-size-ignored" else size

    def _activate(self, z: Float64, activation: str) -> Float64:
        return silu(z) if activation == "silu" or self.fault == "sigmoid-gate-taken-as-silu" else sigmoid(z)

    def _weights(self, weight: Array, channels: int, size: int) -> Float64:
        """One weight a channel."""
        given = widen(weight)[:size] if self.fault == "norm-weight-of-first-group" else widen(weight)
        return np.tile(given, channels // max(len(given), 1))

    # -----------------------------------------------------------------------------------------------------------------
    # Gradients
    # -----------------------------------------------------------------------------------------------------------------

    def softplus_gate_grad(
        self, cotangents: Mapping[str, Array], a: Array, A_log: Array, dt_bias: Array | None = None
    ) -> Grads:
        """From the cotangent of g."""
        return self._pull_gate(widen(cotangents["g"]), "a", a, self._rate(A_log), True, dt_bias, 1)

    def kda_gate_grad(
        self, cotangents: Mapping[str, Array], f: Array, A_log: Array | None = None, dt_bias: Array | None = None, *,
        lower_bound: float | None = None,
    ) -> Grads:  # fmt: skip
        """From the cotangent of g."""
        rate = np.ones((f.shape[-2], 1)) if A_log is None else self._rate(A_log)[:, None]
        grads = self._pull_gate(widen(cotangents["g"]), "f", f, rate, A_log is not None, dt_bias, 2, lower_bound)
        return {name: grad.sum(-1) if name == "A_log" else grad for name, grad in grads.items()}

    def _pull_gate(
        self, grad: Float64, name: str, a: Array, rate: Float64, has_rate: bool, dt_bias: Array | None, axes: int,
        bound: float | None = None,
    ) -> Grads:  # fmt: skip
        """The last `axes` axes are those of the parameters; leading ones are added up for these."""
        biased = self._biased(a, dt_bias)
        if bound is None:
            inner, log = -(grad * rate * slope_softplus(biased, self.fault)), -(grad * rate * softplus(biased))
        else:
            inner = bound * grad * rate * slope_sigmoid(rate * biased)
            log = inner * biased
        lead = tuple(range(a.ndim - axes))
        grads = {name: inner}
        if has_rate:
            grads["A_log"] = np.asarray(log.sum(lead))
        return grads if dt_bias is None else {**grads, "dt_bias": np.asarray(inner.sum(lead))}

    def beta_gate_grad(self, cotangents: Mapping[str, Array], b: Array, *, allow_neg_eigval: bool = False) -> Grads:
        """From the cotangent of beta."""
        slope = slope_sigmoid(widen(b)) * (2.0 if allow_neg_eigval else 1.0)
        return {"b": widen(cotangents["beta"]) * slope}

    def l2norm_grad(self, cotangents: Mapping[str, Array], x: Array, *, eps: float = 1e-6) -> Grads:
        """From the cotangent of y."""
        return {"x": pull_unit_rows(widen(cotangents["y"]), widen(x), eps, self.fault)}

    def rmsnorm_gated_grad(
        self, cotangents: Mapping[str, Array], x: Array, z: Array | None, weight: Array, *, eps: float = 1e-5,
        group_size: int | None = None, norm_before_gate: bool = False, gate_activation: str = "silu",
    ) -> Grads:  # fmt: skip
        """From the cotangent of y."""
        size = self._accept_norm(x, z, weight, eps, group_size, norm_before_gate, gate_activation)
        grad, w, wide = widen(cotangents["y"]), self._weights(weight, x.shape[-1], size), widen(x)
        gate = np.ones(x.shape) if z is None else self._activate(widen(z), gate_activation)
        first = not norm_before_gate
        groups = (wide * gate if first else wide).reshape(*x.shape[:-1], x.shape[-1] // size, size)
        root = np.sqrt((groups * groups).sum(-1, keepdims=True) / size + eps)
        unit = (groups / root).reshape(x.shape)
        above = (grad * w if first else grad * w * gate).reshape(groups.shape)
        along = (above * groups).sum(-1, keepdims=True) / size
        inner = (above / root - groups * along / root**3).reshape(x.shape)
        terms = (grad * unit if first else grad * unit * gate).reshape(-1, len(weight))
        grads = {"x": inner * gate if first else inner, "weight": np.asarray(terms.sum(0))}
        if z is None:
            return grads
        slope = slope_silu(widen(z)) if gate_activation == "silu" else slope_sigmoid(widen(z))
        return {**grads, "z": (inner * wide if first else grad * unit * w) * slope}


def gate_type(source: Array) -> str:
    """Gates come in f32, beside f64 inputs in f64."""
    return "f64" if source.dtype == np.float64 else "f32"
