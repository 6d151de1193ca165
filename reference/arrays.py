"""Element types of the reference: what a NumPy array stores, widening to float64, and the one rounding on the way out.

bfloat16 arrays are ml_dtypes' (https://pypi.org/project/ml-dtypes). Rounding goes straight from float64 to the target,
nearest, ties to even (NUM-2): by way of float32 it would be another function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
import numpy as np
import numpy.typing as npt

from statescan.reference.host.rules import Axes, Facts, check_call
from statescan.spec.contract import FLOAT_TYPES, INDEX_TYPES

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(kind.numpy) for name, kind in FLOAT_TYPES.items()},
    **{name: np.dtype(numpy) for name, numpy in INDEX_TYPES.items()},
}
NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(array: Array) -> str:
    """The contract's name of an array's element type; NumPy's own where the contract has none."""
    return NAMES.get(array.dtype, str(array.dtype))


def widen(array: Array) -> Float64:
    """The same numbers in float64; exact for every element type of the contract."""
    return np.asarray(array).astype(np.float64)


def round_to(values: Float64, name: str) -> Array:
    """Round float64 `values` once to the element type `name`, nearest, ties to even (NUM-2).

    >>> float(round_to(np.float64(1 + 2.0**-8 + 2.0**-30), "bf16"))
    1.0078125
    """
    kind = FLOAT_TYPES[name]
    if name == "f64":
        return np.array(values, np.float64)
    _, exponent = np.frexp(values)  # values = m 2^exponent, 1/2 <= m < 1
    least = -126 if kind.eta == -126 else -14  # exponent of the smallest normal number
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, least) - (kind.bits - 1))
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.rint(values / quantum) * quantum
        return np.asarray(np.where(np.isfinite(values), rounded, values)).astype(DTYPES[name])


def add_along(terms: Float64, axis: int) -> Float64:
    """The sum along one axis as an ascending loop that starts from the first term: one order, one answer (NUM-1).

    >>> add_along(np.array([[1.0, 2], [10, 20]]), 0).tolist()
    [11.0, 22.0]
    """
    ordered = np.moveaxis(terms, axis, 0)
    total = ordered[0] if len(ordered) else np.zeros(ordered.shape[1:])
    for term in ordered[1:]:
        total = total + term
    return total


def facts(array: Array | None) -> Facts | None:
    """What the rules may know of an array; the integers of index arrays included."""
    if array is None:
        return None
    array = np.asarray(array)
    integers = array.dtype.kind in "iu"
    return Facts(array.shape, dtype_name(array), [int(i) for i in array.ravel()] if integers else None)


def check_arguments(name: str, tensors: Mapping[str, Array | None], settings: Mapping[str, Any]) -> Axes:
    """Apply every rule of operation `name` to a call of the reference; the sizes of the axis letters."""
    return check_call(name, {key: facts(array) for key, array in tensors.items()}, settings)
