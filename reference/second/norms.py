"""The norms in 50-digit decimals, one row and one group after another, rounded to float64 once at the end (NORM)."""

from __future__ import annotations

from decimal import Decimal

import numpy as np

from statescan.reference.arrays import Array, Float64, dtype_name, round_to, widen
from statescan.reference.second.gates import FIFTY, each, sigmoid, silu


def l2norm(x: Array, *, eps: float = 1e-6) -> Array:
    """Each row over the root of its squared length and eps.

    >>> l2norm(np.array([3.0, 4.0]), eps=0.0).tolist()
    [0.6, 0.8]
    """
    return round_to(unit_rows(widen(x), eps), dtype_name(x))


def unit_rows(x: Float64, eps: float) -> Float64:
    """The rows of x, each divided by sqrt(its squares' total + eps)."""
    rows = [divided([Decimal(value) for value in row], eps, 1) for row in x.reshape(-1, x.shape[-1]).tolist()]
    return np.array([[float(value) for value in row] for row in rows], np.float64).reshape(x.shape)


def divided(row: list[Decimal], eps: float, share: int) -> list[Decimal]:
    """A row divided by sqrt(its squares' total / share + eps)."""
    total = Decimal(0)
    for value in row:
        total = FIFTY.fma(value, value, total)
    root = FIFTY.sqrt(FIFTY.add(FIFTY.divide(total, Decimal(share)), Decimal(eps)))
    return [FIFTY.divide(value, root) for value in row]


def rmsnorm_gated(
    x: Array, z: Array | None, weight: Array, *, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, gate_activation: str = "silu",
) -> Array:  # fmt: skip
    """Each group of each row over its root mean square, weighted; gated before or after."""
    size = x.shape[-1] if group_size is None else group_size
    gates = np.ones(x.shape) if z is None else each(silu if gate_activation == "silu" else sigmoid, widen(z))
    y = np.zeros((x.size // size, size))
    for i, (row, gate) in enumerate(zip(widen(x).reshape(y.shape), gates.reshape(y.shape), strict=True)):
        values = [Decimal(value) for value in row.tolist()]
        factors = [Decimal(value) for value in gate.tolist()]
        if not norm_before_gate:
            values = [FIFTY.multiply(value, factor) for value, factor in zip(values, factors, strict=True)]
        y[i] = [float(value) for value in divided(values, eps, size)]
        if norm_before_gate:
            y[i] = y[i] * gate
    groups = x.shape[-1] // size
    spread = widen(weight).reshape(-1, size) if weight.shape[0] != size else np.tile(widen(weight), (groups, 1))
    return round_to(y.reshape(x.shape) * spread.reshape(-1), dtype_name(x))
