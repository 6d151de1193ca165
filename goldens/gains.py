"""Noise gains of numeric vectors: how far each element moves if every value at a rounding site is a little off.

The float64 reference runs 16 times with relative changes of +-2^-20 at its sites, signs from the generator; the gain is
the root mean square of the change over 2^-20. It depends on the inputs alone, never on an implementation. Three gains
are kept: `op` (matrix operands), `acc` (carried sums and states), `exp` (exponentials and what is made of them).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from statescan.goldens.generator import word
from statescan.goldens.tensors import Array
from statescan.reference.sites import perturbing

Outputs = Mapping[str, Array]

RUNS = 16
DELTA = 2.0**-20
EXP_UNITS = 4.0
DECAY_WINDOW = 128
"""Tokens whose log-decays a chunked kernel may have added up before it subtracts two such sums."""
ZERO = -128

OP, ACC, EXP_SHARED, EXP_OWN = range(4)
EXP = (EXP_SHARED, EXP_OWN)
SITES: dict[str, tuple[int, tuple[int, ...]]] = {
    # the convolution; x, weight and sum are sites of the norms as well
    "x": (0, (OP,)), "weight": (1, (OP,)), "sum": (2, (ACC,)), "activation": (3, EXP),
    # the delta family; decay, entering, state and state_read are sites of SSD as well
    "entering": (4, (ACC,)), "decay": (5, EXP), "q": (6, (OP,)), "state_read": (7, (OP,)), "k_correct": (8, (OP,)),
    "state_correct": (9, (OP,)), "v": (10, (OP,)), "correction": (11, (OP,)), "k_write": (12, (OP,)),
    "state": (13, (ACC,)), "g": (14, ()),
    # SSD
    "x_dt": (15, (OP,)), "B": (16, (OP,)), "C": (17, (OP,)), "softplus": (18, EXP), "gate": (19, EXP),
    # gates and norms
    "a": (20, (OP,)), "b": (21, (OP,)), "dt_bias": (22, (OP,)), "exp": (23, EXP), "sigmoid": (24, EXP),
    "root": (25, EXP), "z": (26, (OP,)),
}  # fmt: skip
"""Number of each site and the kinds of change that apply to it; `g` is only looked at, for the units of `decay`."""


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
        with perturbing(_Noise(seed, kind, run)):
            moved = compute()
        for name, array in exact.items():
            change = (moved[name] - array) / DELTA
            squares[name] = squares[name] + change * change
    return {name: np.sqrt(total / RUNS) for name, total in squares.items()}


class _Noise:
    """Changes every value at the sites of one kind; elements count in the order in which the reference meets them."""

    def __init__(self, seed: int, kind: int, run: int) -> None:
        self.seed, self.kind, self.first = seed, kind, run * 2**40
        self.met: dict[str, int] = {}
        self.recent: deque[Array] = deque(maxlen=DECAY_WINDOW)

    def __call__(self, site: str, value: Array) -> Array:
        number, kinds = SITES[site]
        if site == "entering":
            self.recent.clear()
        if site == "g" and self.kind in EXP:
            self.recent.append(np.abs(value))
        if self.kind not in kinds:
            return value
        return value * (1.0 + self._units(site) * DELTA * self._signs(2**20 + 16 * number + self.kind, site, value))

    def _units(self, site: str) -> Array | float:
        """Relative size of the change, in units of `DELTA`."""
        if self.kind not in EXP:
            return 1.0
        units: Array | float = EXP_UNITS
        for log_decay in self.recent if site == "decay" else ():
            units = units + log_decay
        return units

    def _signs(self, stream: int, site: str, value: Array) -> Array:
        """A sign for each element; one shared by all tokens is one a head (and key channel) where decays are meant."""
        if self.kind == EXP_SHARED:
            index = np.arange(value.size).reshape(value.shape) if site == "decay" else np.zeros(1, np.int64)
        else:
            start = self.met.get(site, 0)
            self.met[site] = start + value.size
            index = np.arange(start, start + value.size).reshape(value.shape)
        return _signs(self.seed, stream, self.first + index)


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
