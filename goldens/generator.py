"""Counter-based generator of exact inputs: any element by itself, no state, no floating-point operation, no rounding.

`word(seed, stream, i)` is the SplitMix64 finaliser (https://doi.org/10.1145/2714064.2660195) applied twice. A `gen`
object turns words into integers n; the element is n * 2^-shift, exact in the element type that the vector states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_KINDS: dict[str, tuple[str, ...]] = {
    "int": ("lo", "hi"), "pick": ("of",), "flat": ("bits",), "bell": ("bits",), "neg": ("bits",),
    "onehot": ("size",), "perm": ("size",), "const": ("value",),
}  # fmt: skip
_MOST_BITS = {"flat": 24, "neg": 24, "bell": 16}


def mix(z: Words) -> Words:
    """The SplitMix64 finaliser, elementwise modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def word(seed: int, stream: int, index: npt.ArrayLike) -> Words:
    """The 64-bit word of element `index` of tensor `stream` under `seed`.

    >>> hex(int(word(1, 0, 0)))
    '0x5e41ab087439611e'
    """
    key = mix(np.array((seed + GAMMA * (stream + 1)) & _MASK, np.uint64).reshape(1))
    counters = (np.asarray(index, np.uint64) + np.uint64(1)) * np.array(GAMMA, np.uint64).reshape(1)
    return mix(key + counters).reshape(np.shape(index))


def below(words: Words, n: int) -> Integers:
    """Words mapped to 0 .. n-1, n < 2^31."""
    found: Integers = (((words >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32)).astype(np.int64)
    return found


def integers(gen: Mapping[str, Any], shape: tuple[int, ...], seed: int) -> Integers:
    """The integers n of a `gen` object for a whole tensor, C order."""
    kind, stream = check_gen(gen), int(gen.get("stream", 0))
    count = math.prod(shape)
    if kind == "const":
        return np.full(shape, gen["value"], np.int64)
    if kind == "perm":
        return _permutation(int(gen["size"]), seed, stream).reshape(shape)
    if kind == "onehot":
        size = int(gen["size"])
        columns = below(word(seed, stream, np.arange(count // size)), size)
        hits: Integers = (columns[:, None] == np.arange(size)).astype(np.int64)
        return hits.reshape(shape)
    return _from_words(kind, gen, word(seed, stream, np.arange(count))).reshape(shape)


def values(gen: Mapping[str, Any], shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float64]:
    """The elements n * 2^-shift of a `gen` object in float64; `shift` may be a list along `axis`."""
    n = integers(gen, shape, seed).astype(np.float64)
    shift = np.asarray(gen.get("shift", 0), np.int64)
    if shift.ndim:
        along = [1] * len(shape)
        along[int(gen["axis"])] = shift.size
        shift = shift.reshape(along)
    return np.ldexp(n, -shift)


def check_gen(gen: Mapping[str, Any]) -> str:
    """Refuse a `gen` object with a missing, unknown or too large field; its kind."""
    kind = gen.get("kind")
    if kind not in _KINDS:
        raise ValueError(f"gen.kind={kind!r}: one of {', '.join(_KINDS)}")
    missing = [name for name in _KINDS[kind] if name not in gen]
    unknown = set(gen) - {"kind", "stream", "shift", "axis", *_KINDS[kind]}
    if missing or unknown:
        raise ValueError(f"gen of kind {kind}: missing {missing}, unknown {sorted(unknown)}")
    if kind in _MOST_BITS and not 1 <= gen["bits"] <= _MOST_BITS[kind]:
        raise ValueError(f"gen.bits={gen['bits']} of kind {kind}: 1..{_MOST_BITS[kind]}")
    return str(kind)


def _from_words(kind: str, gen: Mapping[str, Any], words: Words) -> Integers:
    if kind == "int":
        return int(gen["lo"]) + below(words, int(gen["hi"]) - int(gen["lo"]) + 1)
    if kind == "pick":
        choice: Integers = np.asarray(gen["of"], np.int64)[below(words, len(gen["of"]))]
        return choice
    bits = int(gen["bits"])
    top = (words >> np.uint64(64 - bits)).astype(np.int64)
    if kind == "flat":
        return 2 * top + 1 - (1 << bits)
    if kind == "neg":
        return -(top + 1)
    low = np.uint64((1 << bits) - 1)
    parts = [((words >> np.uint64(16 * part)) & low).astype(np.int64) for part in range(4)]
    return parts[0] + parts[1] + parts[2] + parts[3] - 2 * ((1 << bits) - 1)


def _permutation(size: int, seed: int, stream: int) -> Integers:
    a = np.arange(size, dtype=np.int64)
    for j in range(size - 1, 0, -1):
        other = int(below(word(seed, stream, j), j + 1))
        a[[j, other]] = a[[other, j]]
    return a
