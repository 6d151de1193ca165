"""Tensors of vectors: JSON to arrays and back without a rounding, digests, and blob files named by their digest."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from statescan.goldens import generator
from statescan.spec.contract import FLOAT_TYPES, INDEX_TYPES

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(kind.numpy) for name, kind in FLOAT_TYPES.items()},
    **{name: np.dtype(numpy) for name, numpy in INDEX_TYPES.items()},
    "i8": np.dtype(np.int8),
}
NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}
NAN_BITS = {"f64": 0x7FF8000000000000, "f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0}
BLOBS = Path(__file__).parent / "blobs"

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_BITS = {1: np.int8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MOST_ELEMENTS = 1 << 26


def decode(spec: Mapping[str, Any], seed: int = 0) -> Array:
    """The array of a tensor object with `dtype`, `shape` and one of `data`, `gen`, `blob`.

    A number that its element type cannot hold is refused, not rounded. NaN stands for one bit pattern (`NAN_BITS`).

    >>> decode({"dtype": "bf16", "shape": [2], "data": [1, "nan"]}).tolist()
    [1.0, nan]
    """
    name, shape = str(spec["dtype"]), tuple(int(n) for n in spec["shape"])
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r}: one of {', '.join(DTYPES)}")
    if any(n < 0 for n in shape) or math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"shape={list(shape)}: sizes of at least 0, at most {_MOST_ELEMENTS} elements")
    if "blob" in spec:
        return _checked(load_blob(str(spec["blob"])), name, shape)
    exact = generator.values(spec["gen"], shape, seed) if "gen" in spec else _from_data(spec["data"], shape)
    return narrow(exact, name)


def narrow(exact: Array, name: str) -> Array:
    """Float64 (or integer) numbers in element type `name`; refused where one would change."""
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.asarray(exact).astype(DTYPES[name])
        back = array.astype(np.float64)
    wrong = ~((back == exact) | (np.isnan(back) & np.isnan(exact)))
    if wrong.any():
        raise ValueError(f"{float(np.asarray(exact)[wrong].flat[0])!r} cannot be held by {name}")
    if name in NAN_BITS:
        array.view(_BITS[array.itemsize])[np.isnan(back)] = NAN_BITS[name]
    return array


def encode(array: Array) -> dict[str, Any]:
    """The tensor object that `decode` turns into `array`, numbers written exactly and flat."""
    return {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data": [number(v) for v in array.ravel()]}


def number(value: Any) -> int | float | str:
    """One JSON number: whole numbers without a point, -0.0 kept, what JSON lacks as a word."""
    x = float(value)
    if math.isnan(x):
        return "nan"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return x if x == 0 and math.copysign(1, x) < 0 else int(x) if x.is_integer() and abs(x) < 2**53 else x


def nested(array: Array) -> Any:
    """An array as nested lists of JSON numbers."""
    wide = array.astype(np.float64)
    if (np.abs(wide) < 2**53).all() and (wide % 1 == 0).all() and not np.signbit(wide[wide == 0]).any():
        return wide.astype(np.int64).tolist()  # the same numbers, all at once
    return [nested(row) for row in array] if array.ndim else number(array)


def from_nested(values: Any, name: str) -> Array:
    """Nested lists of JSON numbers in element type `name`; one that it cannot hold is refused.

    >>> from_nested([[1, "nan"]], "bf16").tolist()
    [[1.0, nan]]
    """
    def plain(value: Any) -> Any:
        return [plain(v) for v in value] if isinstance(value, list) else _number(value)

    found = np.array(values)
    return narrow(found if found.dtype.kind in "if" else np.array(plain(values), np.float64), name)


def filled(shape: tuple[int, ...], fill: Any, name: str) -> Array:
    """A tensor of one JSON number; NaN in the bit pattern of the formats."""
    return narrow(np.full(shape, _number(fill), np.float64), name)


def bits(array: Array) -> Array:
    """The same bytes as unsigned integers, for comparisons that see NaN payloads and signs of zero."""
    return np.ascontiguousarray(array).view(_BITS[array.itemsize]).reshape(array.shape)


def digest(name: str, array: Array) -> str:
    """SHA-256 over name, type, shape and the little-endian bytes in C order."""
    head = f"{name}|{NAMES[array.dtype]}|{'x'.join(map(str, array.shape))}|"
    body = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return hashlib.sha256(head.encode("ascii") + body).hexdigest()


def save_blob(name: str, array: Array, folder: Path = BLOBS) -> str:
    """Store one tensor in a file named by its digest; the reference to it."""
    key = digest(name, array)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{key}.safetensors").write_bytes(save({name: np.ascontiguousarray(array)}))
    return f"sha256:{key}"


def load_blob(reference: str, folder: Path = BLOBS) -> Array:
    """The tensor that a `sha256:...` reference names; refused where file and digest differ."""
    match = _DIGEST.fullmatch(reference)
    if match is None:
        raise ValueError(f"blob={reference!r}: sha256: and 64 hexadecimal digits")
    tensors: dict[str, Array] = load((folder / f"{match[1]}.safetensors").read_bytes())
    (name, array), *rest = tensors.items()
    if rest or digest(name, array) != match[1]:
        raise ValueError(f"blob {match[1][:12]} does not hold what its name says")
    return array


def _from_data(data: Any, shape: tuple[int, ...]) -> Array:
    if not isinstance(data, list):
        return np.full(shape, _number(data))
    if len(data) != math.prod(shape):
        raise ValueError(f"data has {len(data)} numbers and shape {list(shape)} needs {math.prod(shape)}")
    exact = np.array([_number(v) for v in data], np.float64)
    return exact.reshape(shape)


def _number(value: Any) -> float:
    if isinstance(value, str):
        if value not in _WORDS:
            raise ValueError(f"{value!r} is no number: {', '.join(_WORDS)}")
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _checked(array: Array, name: str, shape: tuple[int, ...]) -> Array:
    if NAMES[array.dtype] != name or array.shape != shape:
        raise ValueError(f"blob holds {NAMES[array.dtype]} {list(array.shape)} and {name} {list(shape)} is stated")
    return array
