"""Noise gains of numeric vectors: how far each element moves if every value at a rounding site is a little off.

The float64 reference runs 16 times with relative changes of +-2^-20 at its sites, signs from the generator; the gain is
the root mean square of the change over 2^-20. It depends on the inputs alone, never on an implementation. Three gains
are kept: `op` (matrix operands), `acc` (carried sums and states), `exp` (exponentials and what is made of them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from statescan.goldens.generator import word
from statescan.goldens.tensors import Array
from statescan.reference.sites import Site, perturbing

Outputs = Mapping[str, Array]

RUNS = 16
DELTA = 2.0**-20
EXP_UNITS = 4.0
ZERO = -128

OP, ACC, EXP_SHARED, EXP_OWN = range(4)
SITES: dict[str, tuple[int, tuple[int, ...]]] = {
    "x": (0, (OP,)), "weight": (1, (OP,)), "sum": (2, (ACC,)), "activation": (3, (EXP_SHARED, EXP_OWN)),
}  # fmt: skip
"""Number of each site and the kinds of change that apply to it."""


def gains(compute: Callable[[], Outputs], seed: int) -> dict[str, dict[str, Array]]:
    """For each output its gains `op`, `acc`, `exp` as int8 codes; `compute` runs the reference in float64."""
    exact = compute()
    by_kind = [_gain(compute, exact, seed, kind) for kind in (OP, ACC, EXP_SHARED, EXP_OWN)]
    return {
        name: {"op": encode(by_kind[OP][name]), "acc": encode(by_kind[ACC][name]),
               "exp": encode(np.sqrt(by_kind[EXP_SHARED][name] ** 2 + by_kind[EXP_OWN][name] ** 2))}
        for name in exact
    }  # fmt: skip


def encode(gain: Array) -> Array:
    """Gains in half octaves, rounded up, as int8: the bound used is 2^(code/2), and -128 is no gain at all.

    >>> encode(np.array([0.0, 0.5, 0.6, 0.75, 1.0])).tolist()
    [-128, -2, -1, 0, 0]
    """
    mantissa, exponent = np.frexp(gain)
    below = np.where(mantissa * mantissa > 0.5, 0, np.where(mantissa > 0.5, 1, 2))
    code = 2 * exponent - below
    return np.where(gain == 0, ZERO, np.clip(code, -127, 127)).astype(np.int8)


def _gain(compute: Callable[[], Outputs], exact: Outputs, seed: int, kind: int) -> dict[str, Array]:
    squares = {name: np.zeros(array.shape) for name, array in exact.items()}
    for run in range(RUNS):
        with perturbing(_hook(seed, kind, run)):
            moved = compute()
        for name, array in exact.items():
            change = (moved[name] - array) / DELTA
            squares[name] = squares[name] + change * change
    return {name: np.sqrt(total / RUNS) for name, total in squares.items()}


def _hook(seed: int, kind: int, run: int) -> Site:
    """Change every value at the sites of one kind; elements count in the order in which the reference meets them."""
    met: dict[str, int] = {}

    def change(site: str, value: Array) -> Array:
        number, kinds = SITES[site]
        if kind not in kinds:
            return value
        stream = 2**20 + 16 * number + kind
        first = met.get(site, 0)
        met[site] = first + value.size
        if kind == EXP_SHARED:
            signs = _signs(seed, stream, np.full(1, run * 2**40))
        else:
            signs = _signs(seed, stream, run * 2**40 + np.arange(first, first + value.size)).reshape(value.shape)
        units = EXP_UNITS if kind in (EXP_SHARED, EXP_OWN) else 1.0
        return value * (1.0 + units * DELTA * signs)

    return change


def _signs(seed: int, stream: int, index: Array) -> Array:
    top = (word(seed, stream, index) >> np.uint64(63)).astype(np.int64)
    return 1.0 - 2.0 * top


def significant_bits(array: Array) -> int:
    """The most significand bits that an element of an exact tensor needs."""
    most = 0
    for value in array.astype(np.float64).ravel().tolist():
        if math.isfinite(value) and value != 0:
            numerator, _ = abs(value).as_integer_ratio()
            while numerator % 2 == 0:
                numerator //= 2
            most = max(most, numerator.bit_length())
    return most
