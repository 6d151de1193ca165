"""Files from outside are data: regular files inside their folder, of a size that was asked for, read by strict rules.

Whatever is wrong with one is a `FormatError` that names the file and the place. Nothing is unpickled or evaluated, no
link is followed, and no size in a file decides how much memory is asked for before it has been checked.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from statescan.goldens.store import FormatError, parse_json
from statescan.goldens.tensors import DTYPES, Array

MAX_BYTES = 1 << 30
MAX_HEADER = 1 << 20
MAX_TENSORS = 4096
MAX_RANK = 8

STORED = {"f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "i32": "I32", "i64": "I64", "i8": "I8"}
"""Our names of element types, and those of safetensors."""
_OURS = {stored: name for name, stored in STORED.items()}


def read_file(folder: Path, name: str, most: int = MAX_BYTES, *, size: int | None = None) -> bytearray:
    """The bytes of a regular file in a folder, at most `most` of them (exactly `size` where that is given)."""
    with _opened(folder, name) as handle:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise FormatError(f"{name}: no regular file")
        if found.st_size > most or (size is not None and found.st_size != size):
            wanted = f"{most} at most" if size is None else f"{size} expected"
            raise FormatError(f"{name}: {found.st_size} bytes, {wanted}")
        data = bytearray(found.st_size)
        view, done = memoryview(data), 0
        while done < len(data):
            count = os.preadv(handle, [view[done:]], done)
            if count == 0:
                raise FormatError(f"{name}: ended after {done} of {len(data)} bytes")
            done += count
        return data


def write_file(folder: Path, name: str, parts: Iterable[bytes]) -> None:
    """Make a file of this name in a folder; what stood there is taken away first, and never written through."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(name, flags, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    with os.fdopen(handle, "wb") as file:
        file.writelines(parts)


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[int]:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise FormatError(f"{name!r} is no file name")
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # not to wait for the other end of a pipe
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as error:
        said = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise FormatError(f"{name}: {said}") from error
    try:
        yield handle
    finally:
        os.close(handle)


def read_tensors(folder: Path, name: str, max_bytes: int = MAX_BYTES) -> dict[str, Array]:
    """The tensors of a safetensors file (https://github.com/huggingface/safetensors), each writable and packed."""
    return parse_tensors(read_file(folder, name, max_bytes), name)


def parse_tensors(data: bytearray, where: str) -> dict[str, Array]:
    """The tensors in the bytes of a safetensors file; its offsets must be contiguous and fill it."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > MAX_HEADER or length > len(data) - 8:
        raise FormatError(f"{where}: a header of {length} bytes in a file of {len(data)}, {MAX_HEADER} at most")
    header = parse_json(bytes(data[8 : 8 + length]).rstrip(b" "), where)
    if not isinstance(header, dict):
        raise FormatError(f"{where}: the header is no object")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise FormatError(f"{where}: {len(header)} tensors, {MAX_TENSORS} at most")
    body = memoryview(data)[8 + length :]
    rows = {key: _row(entry, f"{where}: {key!r:.80}") for key, entry in header.items()}
    end, tensors = 0, {}
    for key, (dtype, shape, start, stop) in sorted(rows.items(), key=lambda item: (item[1][2], item[1][3])):
        if start != end or stop > len(body):
            raise FormatError(f"{where}: {key!r:.80} lies at {start}..{stop} of {len(body)}, {end} was the end so far")
        end = stop
        flat = np.frombuffer(body[start:stop], np.uint8)
        aligned = flat if flat.ctypes.data % dtype.itemsize == 0 else flat.copy()
        tensors[key] = aligned.view(dtype).reshape(shape)
    if end != len(body):
        raise FormatError(f"{where}: {len(body) - end} bytes behind the last tensor")
    return tensors


def _row(entry: Any, where: str) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Element type, shape and span of one entry of a header."""
    if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: dtype, shape and data_offsets are needed")
    stored = entry["dtype"]
    if not isinstance(stored, str) or stored not in _OURS:
        raise FormatError(f"{where}: dtype {stored!r:.40}, one of {', '.join(_OURS)}")
    dtype, shape, offsets = DTYPES[_OURS[stored]], _sizes(entry["shape"], where), _sizes(entry["data_offsets"], where)
    if len(offsets) != 2 or len(shape) > MAX_RANK:
        raise FormatError(f"{where}: two offsets, and {MAX_RANK} axes at most")
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise FormatError(f"{where}: {offsets[1] - offsets[0]} bytes for {stored} of shape {list(shape)}")
    # an axis of length 0 must not hide another that no array can have
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 62:
        raise FormatError(f"{where}: shape {list(shape)}")
    return dtype, shape, offsets[0], offsets[1]


def _sizes(values: Any, where: str) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(n) is not int or n < 0 for n in values):
        raise FormatError(f"{where}: {values!r:.80} are no sizes")
    return tuple(values)


def printable(text: object) -> str:
    """Text from outside with control characters shown, not obeyed."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in str(text))
