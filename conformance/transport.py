"""Tensors on their way between runner and adapter: files in one scratch folder, described byte by byte in the message.

Files are safetensors without metadata (https://github.com/huggingface/safetensors), and the message repeats every
offset, so that an adapter may map the file and go. A strided tensor is stored as its whole span; shape and strides (in
elements) are in the message. Names match a fixed pattern, are opened relative to the folder and never through a link.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from statescan.conformance.calls import Array, Plan, span
from statescan.conformance.untrusted import STORED, read_file, write_file
from statescan.goldens.store import FormatError
from statescan.goldens.tensors import DTYPES, NAMES

Described = dict[str, Any]

FILE_NAME = re.compile(r"[0-9]{6}\.(in|out)")
SENTINEL_BITS = {"f64": 0x7FF8A5A5A5A5A5A5, "f32": 0x7FC5A5A5, "f16": 0x7EA5, "bf16": 0x7FE5}
SENTINEL_INTEGER = -(2**31) + 7

_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def write_inputs(folder: Path, name: str, tensors: Mapping[str, Array]) -> list[Described]:
    """Store tensors in `folder/name`; their descriptions for the message."""
    return _write(folder / name, [(key, array, array.shape, element_strides(array)) for key, array in tensors.items()])


def write_blank(folder: Path, name: str, plans: Iterable[Plan], tensors: Mapping[str, Array]) -> list[Described]:
    """Make the output file at its full size, every element a sentinel, for the adapter to fill in."""
    rows = [(plan.name, blank(plan), plan.shape, _packed_strides(plan.shape)) for plan in plans]
    for key, array in tensors.items():
        whole = blank(Plan(key, NAMES[array.dtype], (span(array).size,)))
        rows.append((f"after.{key}", whole, array.shape, element_strides(array)))
    return _write(folder / name, rows)


def blank(plan: Plan) -> Array:
    """A tensor full of sentinels: a NaN that no arithmetic makes, or one integer."""
    array = np.empty(plan.shape, DTYPES[plan.dtype])
    if plan.dtype in SENTINEL_BITS:
        array.view(_UNSIGNED[array.itemsize])[...] = SENTINEL_BITS[plan.dtype]
    else:
        array[...] = SENTINEL_INTEGER
    return array


def is_blank(array: Array) -> Any:
    """Where an array still holds the sentinel."""
    name = NAMES[array.dtype]
    if name in SENTINEL_BITS:
        return np.ascontiguousarray(array).view(_UNSIGNED[array.itemsize]).reshape(array.shape) == SENTINEL_BITS[name]
    return array == SENTINEL_INTEGER


def open_tensors(folder: Path, name: str, described: Iterable[Described], writable: bool = False) -> dict[str, Array]:
    """Map the tensors of a file as its message describes them (strides honoured); sizes are checked first."""
    raw = _read(folder, name, writable)
    return {row["name"]: _view(raw, row) for row in described}


def blanks(folder: Path, name: str) -> tuple[int, bytes]:
    """What may not change of a file of blanks: its size, and what stands before its first tensor."""
    with (folder / name).open("rb") as file:
        head = file.read(8)
        return os.fstat(file.fileno()).st_size, head + file.read(int.from_bytes(head, "little"))


def take_tensors(
    folder: Path, name: str, described: Iterable[Described], made: tuple[int, bytes]
) -> dict[str, Array]:
    """The tensors of a file that someone else had in hand, in memory of our own; `made` is what `blanks` told of it."""
    if not FILE_NAME.fullmatch(name):
        raise FormatError(f"file name {name!r}: six digits and .in or .out")
    size, head = made
    data = read_file(folder, name, size=size, most=size)
    if data[: len(head)] != head:
        raise FormatError(f"{name} was written before its first tensor, as an index below 0 would do (SLOT-2)")
    raw = np.frombuffer(data, np.uint8)
    return {row["name"]: _view(raw, row) for row in described}


def element_strides(array: Array) -> tuple[int, ...]:
    """Strides in elements; those of a packed tensor where the array is one."""
    if array.flags.c_contiguous or array.size == 0:
        return _packed_strides(array.shape)
    return tuple(stride // array.itemsize for stride in array.strides)


def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides[: len(shape)]))


def _write(path: Path, rows: list[tuple[str, Array, tuple[int, ...], tuple[int, ...]]]) -> list[Described]:
    """Write a safetensors file, largest elements first so that each tensor is aligned, and describe its tensors."""
    header: dict[str, Any] = {}
    flats: dict[str, Array] = {}
    end = 0
    for key, array, shape, _ in sorted(rows, key=lambda row: (-row[1].itemsize, row[0])):
        flat = flats[key] = span(array)
        packed = flat.size == math.prod(shape)
        start, end = end, end + flat.nbytes
        header[key] = {"dtype": STORED[NAMES[array.dtype]], "shape": list(shape) if packed else [flat.size],
                       "data_offsets": [start, end]}  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = (flat.tobytes() for flat in flats.values())
    write_file(path.parent, path.name, (len(text).to_bytes(8, "little"), text, *parts))
    return [
        {"name": key, "dtype": NAMES[array.dtype], "shape": list(shape), "strides": list(strides),
         "offset": 8 + len(text) + header[key]["data_offsets"][0], "nbytes": flats[key].nbytes}
        for key, array, shape, strides in rows
    ]  # fmt: skip


def _read(folder: Path, name: str, writable: bool) -> Array:
    if not FILE_NAME.fullmatch(name):
        raise FormatError(f"file name {name!r}: six digits and .in or .out")
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        handle = os.open(name, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW, dir_fd=directory)
    finally:
        os.close(directory)
    with os.fdopen(handle, "r+b" if writable else "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FormatError(f"{name} is no regular file")
        return np.memmap(file, np.uint8, "r+" if writable else "c")


def _view(raw: Array, row: Described) -> Array:
    dtype, shape, strides = DTYPES[row["dtype"]], tuple(row["shape"]), tuple(row["strides"])
    start, nbytes = int(row["offset"]), int(row["nbytes"])
    reach = 0 if 0 in shape else 1 + sum(stride * (n - 1) for stride, n in zip(strides, shape, strict=True))
    inside = start >= 0 and nbytes >= 0 and start + nbytes <= raw.size
    if not inside or reach * dtype.itemsize > nbytes or min(strides, default=0) < 0:
        raise FormatError(f"{row['name']} does not lie inside its file")
    if nbytes == 0:
        return np.empty(shape, dtype)
    flat = raw[start : start + nbytes].view(dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * dtype.itemsize for s in strides))
