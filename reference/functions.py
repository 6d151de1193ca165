"""Correctly rounded exp, softplus, sigmoid and silu.

Each value is computed at 128 bits, then a few units below and above are rounded to float64: when both give the same
number that is the answer, else the precision doubles (Ziv's test,
https://perso.ens-lyon.fr/jean-michel.muller/Intro-to-TMD.htm). Vector units and libraries differ in the last bit of
these functions, so a stored expectation may not depend on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from statescan.reference.arrays import Float64

os.environ.setdefault("MPMATH_NOGMPY", "1")  # one backend, so that one answer; read when mpmath is first imported
import mpmath

Real = Callable[["mpmath.mpf"], "mpmath.mpf"]
SOFTPLUS_LINEAR_ABOVE = 20.0


def exp(x: Float64) -> Float64:
    """e^x, elementwise."""
    return _elementwise(_exp, x)


def softplus(x: Float64) -> Float64:
    """ln(1 + e^x), and x itself above 20 (GATE-2), elementwise."""
    return _elementwise(_softplus, x)


def sigmoid(x: Float64) -> Float64:
    """1 / (1 + e^-x), elementwise."""
    return _elementwise(_sigmoid, x)


def silu(x: Float64) -> Float64:
    """x sigmoid(x), elementwise."""
    return _elementwise(_silu, x)


def _elementwise(function: Callable[[float], float], x: Float64) -> Float64:
    flat = np.asarray(x, np.float64)
    return np.array([function(v) for v in flat.ravel().tolist()], np.float64).reshape(flat.shape)


@lru_cache(maxsize=1 << 18)
def _exp(x: float) -> float:
    return _round(mpmath.exp, x, at_inf=(0.0, np.inf))


@lru_cache(maxsize=1 << 18)
def _softplus(x: float) -> float:
    if x > SOFTPLUS_LINEAR_ABOVE:
        return x
    return _round(lambda v: mpmath.log1p(mpmath.exp(v)), x, at_inf=(0.0, np.inf))


@lru_cache(maxsize=1 << 18)
def _sigmoid(x: float) -> float:
    return _round(lambda v: 1 / (1 + mpmath.exp(-v)), x, at_inf=(0.0, 1.0))


@lru_cache(maxsize=1 << 18)
def _silu(x: float) -> float:
    return _round(lambda v: v / (1 + mpmath.exp(-v)), x, at_inf=(-0.0, np.inf))


def _round(real: Real, x: float, at_inf: tuple[float, float]) -> float:
    """The float64 nearest to `real(x)`, ties to even."""
    if x != x:
        return x
    if x in (np.inf, -np.inf):
        return at_inf[x > 0]
    bits = 128
    while True:
        with mpmath.workprec(bits):
            value = real(mpmath.mpf(x))
            unit = abs(value) * mpmath.mpf(2) ** (8 - bits)
            low, high = _to_float(value - unit), _to_float(value + unit)
        if low == high:
            return low
        bits *= 2


def _to_float(value: mpmath.mpf) -> float:
    """Round a multiple-precision number; division of integers rounds correctly, subnormal results included."""
    sign, mantissa, exponent, _ = value._mpf_
    mantissa = -int(mantissa) if sign else int(mantissa)
    try:
        return float(mantissa << exponent) if exponent >= 0 else mantissa / (1 << -exponent)
    except OverflowError:
        return -np.inf if sign else np.inf
