"""The gates in 50-digit decimals: Python's own decimal arithmetic, rounded to float64 once at the end (GATE)."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal

import numpy as np

from statescan.reference.arrays import Array, Float64, dtype_name, round_to, widen

Real = Callable[[Decimal], Decimal]


def digits(count: int) -> Context:
    """Arithmetic of so many digits in which nothing raises."""
    return Context(prec=count, traps=[])


FIFTY = digits(50)


def exp(x: Decimal) -> Decimal:
    """e^x."""
    return FIFTY.exp(x)


def softplus(x: Decimal) -> Decimal:
    """ln(1 + e^x), x itself above 20; below 0 with as many more digits as e^x is small."""
    if x > 20:
        return x
    if x < -800:
        return Decimal(0)
    more = digits(50 + max(0, int(-x)))
    return more.ln(more.add(1, more.exp(x)))


def sigmoid(x: Decimal) -> Decimal:
    """1 / (1 + e^-x)."""
    return FIFTY.divide(Decimal(1), FIFTY.add(1, FIFTY.exp(-x)))


def silu(x: Decimal) -> Decimal:
    """x sigmoid(x)."""
    return FIFTY.multiply(x, sigmoid(x))


def each(function: Real, values: Float64) -> Float64:
    """A function of decimals on every element, rounded to float64.

    >>> each(sigmoid, np.array([1.0])).item().hex()
    '0x1.764d4f5d5a2bdp-1'
    """
    flat = [float(function(Decimal(value))) if value == value else value for value in values.ravel().tolist()]
    return np.array(flat, np.float64).reshape(values.shape)


def softplus_gate(a: Array, A_log: Array, dt_bias: Array | None = None) -> Array:
    """-exp(A_log) softplus(a + dt_bias), element by element."""
    return decay_gate(a, A_log, dt_bias, None)


def kda_gate(
    f: Array, A_log: Array | None = None, dt_bias: Array | None = None, *, lower_bound: float | None = None
) -> Array:
    """The same per channel, or lower_bound sigmoid(exp(A_log) (f + dt_bias))."""
    return decay_gate(f, None if A_log is None else A_log[:, None], dt_bias, lower_bound)


def decay_gate(a: Array, A_log: Array | None, dt_bias: Array | None, lower_bound: float | None) -> Array:
    """Either gate, one element after another."""
    wide = widen(a)
    logs = np.broadcast_to(np.zeros(()) if A_log is None else widen(A_log), wide.shape)
    biases = np.broadcast_to(np.zeros(()) if dt_bias is None else widen(dt_bias), wide.shape)
    g = np.zeros(wide.shape)
    for place in np.ndindex(wide.shape):
        inner, rate = Decimal(wide[place].item()) + Decimal(biases[place].item()), exp(Decimal(logs[place].item()))
        if lower_bound is None:
            g[place] = float(FIFTY.multiply(-rate, softplus(inner)))
        else:
            g[place] = float(FIFTY.multiply(Decimal(lower_bound), sigmoid(FIFTY.multiply(rate, inner))))
    return round_to(g, "f64" if dtype_name(a) == "f64" else "f32")


def beta_gate(b: Array, *, allow_neg_eigval: bool = False) -> Array:
    """sigmoid(b), added to itself if asked."""
    beta = each(sigmoid, widen(b))
    return round_to(beta + beta if allow_neg_eigval else beta, "f64" if dtype_name(b) == "f64" else "f32")
