"""Record calls of a running system, to ask later: was this call right?

    from statescan.conformance import record

    step = record("gated_delta_rule_update", "calls")(step)         # a decorator around a callable

    with record("gated_delta_rule_update", "calls", **arguments) as call:
        call.returns(step(**arguments))                              # or a block

`statescan replay calls/000001.json` judges what was recorded. The callable takes the arguments of the operation table,
by place or by name, in NumPy or torch. A recording never changes a call: what cannot be recorded is left out with one
warning, and errors of the callable pass through, recorded.
"""

from __future__ import annotations

import datetime
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from statescan.conformance.calls import Array, Call, Plan, Reply
from statescan.conformance.invoke import from_torch
from statescan.conformance.recorded import RECORDABLE, Recorded, save
from statescan.goldens.tensors import NAMES
from statescan.spec.contract import ERRORS, OPERATIONS

Function = TypeVar("Function", bound=Callable[..., Any])

MAX_BYTES = 256 << 20
MOST = 100
_REFUSALS = {error.__name__ for error in ERRORS}
_BY_SLOT = {"conv_pool", "state_pool", "intermediate_windows", "intermediate_states"}
"""Tensors whose first axis is the slot."""


class record:  # noqa: N801  used like a function
    """A decorator, or with the call's arguments a context manager, that stores calls of operation `op` in `folder`.

    At most `most` calls are stored, none of more than `max_bytes`, and one of every `every`; `only(arguments)` may pick
    them. Of pools the slots that the call names are stored, and of all others a checksum decides whether they changed
    (`others=False` leaves that out: it reads the pool twice). A call inside a CUDA graph capture is not recorded.
    """

    def __init__(
        self, op: str, folder: str | Path, *, max_bytes: int = MAX_BYTES, most: int = MOST, every: int = 1,
        only: Callable[[Mapping[str, Any]], bool] | None = None, others: bool = True, implementation: str = "",
        **arguments: Any,
    ) -> None:  # fmt: skip
        if op not in RECORDABLE:
            raise ValueError(f"{op!r} is no operation that can be recorded: {', '.join(RECORDABLE)}")
        self.op, self.folder, self.max_bytes, self.most, self.every = op, Path(folder), max_bytes, most, every
        self.only, self.others, self.implementation, self.arguments = only, others, implementation, arguments
        self._seen = self._stored = 0
        self._warned = False
        self._open: _Recording | None = None

    def __call__(self, function: Function) -> Function:
        """`function` with its calls recorded."""
        self.implementation = self.implementation or f"{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def recorded(*given: Any, **named: Any) -> Any:
            call = self._begin({**dict(zip(_places(self.op), given, strict=False)), **named})
            try:
                returned = function(*given, **named)
            except Exception as error:
                self._end(call, None, error)
                raise
            self._end(call, returned, None)
            return returned

        return recorded  # type: ignore[return-value]

    def __enter__(self) -> record:
        self._returned: Any = None
        self._open = self._begin(self.arguments)
        return self

    def returns(self, returned: Any) -> Any:
        """Tell what the call returned; hands it back."""
        self._returned = returned
        return returned

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end(self._open, self._returned, error)

    def _begin(self, arguments: Mapping[str, Any]) -> _Recording | None:
        self._seen += 1
        if self._stored >= self.most or (self._seen - 1) % self.every:
            return None
        try:
            if _capturing() or (self.only is not None and not self.only(arguments)):
                return None
            return _Recording(self.op, arguments, self.max_bytes, self.others)
        except Exception as error:  # a recorder must not break what it records
            self._warn(error)
            return None

    def _end(self, call: _Recording | None, returned: Any, error: BaseException | None) -> None:
        if call is None:
            return
        try:
            recorded = call.finish(returned, error, self.implementation)
            self.folder.mkdir(parents=True, exist_ok=True)
            save(recorded, self.folder, _free_name(self.folder))
            self._stored += 1
        except Exception as wrong:
            self._warn(wrong)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            warnings.warn(f"statescan: a call of {self.op} was not recorded: {error}", stacklevel=4)
        self._warned = True


class _Recording:
    """What a call was given, copied before it runs."""

    def __init__(self, op: str, arguments: Mapping[str, Any], max_bytes: int, others: bool) -> None:
        table = OPERATIONS[op]
        unknown = set(arguments) - {a.name for a in table.arguments}
        if unknown:
            raise TypeError(f"{op} has no argument {sorted(unknown)[0]!r}")
        self.op = table
        self.given = {a.name: arguments[a.name] for a in table.tensors if arguments.get(a.name) is not None}
        defaults = {a.name: a.default for a in table.settings}
        self.args = {name: _setting(value) for name, value in arguments.items()
                     if name in defaults and value != defaults[name]}  # fmt: skip
        self.slots = _touched(self.given)
        pools = [name for name in self.given if name in _BY_SLOT]
        self.pool_slots = int(self.given[pools[0]].shape[0]) if pools else 0
        size = sum(self._bytes(name) for name in self.given)
        if size > max_bytes:
            raise ValueError(f"{size} bytes are more than max_bytes={max_bytes}")
        self.before = {name: self._take(name).copy() for name in self.given}
        self.sums = {name: _sums(self.given[name]) for name in pools} if others else {}
        self.time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")

    def finish(self, returned: Any, error: BaseException | None, implementation: str) -> Recorded:
        parts = returned if isinstance(returned, (tuple, list)) else (returned,)
        outputs = {r.name: _array(part).copy() for r, part in zip(self.op.results, parts, strict=False)
                   if part is not None and error is None}  # fmt: skip
        results = tuple(Plan(name, NAMES[array.dtype], array.shape) for name, array in outputs.items())
        after = {f"after.{name}": self._take(name) for name in self.given}
        changed = {i for name, old in self.sums.items() for i in np.nonzero(_sums(self.given[name]) != old)[0].tolist()}
        status, kind = "ok", "" if error is None else type(error).__name__
        if error is not None:
            status = "rejected" if kind in _REFUSALS else "error"
        first = next(iter(self.given.values()))
        return Recorded(
            Call(self.op.name, self.args, self._renumbered(), results),
            Reply(status, {**outputs, **self._renumbered_after(after)}, error=kind, message=str(error or "")[:2000]),
            tuple(self.slots), self.pool_slots, tuple(sorted(changed - set(self.slots))), _gaps(self.given),
            implementation, str(getattr(first, "device", "cpu")), self.time,
        )  # fmt: skip

    def _bytes(self, name: str) -> int:
        tensor = self.given[name]
        size = int(np.prod(tensor.shape)) * _itemsize(tensor)
        return size * len(self.slots) // max(tensor.shape[0], 1) if name in _BY_SLOT else size

    def _take(self, name: str) -> Array:
        tensor = self.given[name]
        return np.ascontiguousarray(_array(tensor[self.slots] if name in _BY_SLOT else tensor))

    def _renumbered(self) -> dict[str, Array]:
        return {name: self._compact(name, array) for name, array in self.before.items()}

    def _renumbered_after(self, after: Mapping[str, Array]) -> dict[str, Array]:
        return {key: self._compact(key.removeprefix("after."), array) for key, array in after.items()}

    def _compact(self, name: str, array: Array) -> Array:
        """Slot indices in the numbers of the stored slots; what lies outside the pool stays outside."""
        if name not in ("read_slots", "write_slots"):
            return array
        new = {slot: i for i, slot in enumerate(self.slots)}
        past = len(self.slots) - self.pool_slots
        return np.array([new.get(int(s), int(s) + (past if s >= 0 else 0)) for s in array.ravel()],
                        array.dtype).reshape(array.shape)  # fmt: skip


def _places(op: str) -> list[str]:
    """Arguments by place: the tensors; settings go by name."""
    return [argument.name for argument in OPERATIONS[op].tensors]


def _touched(given: Mapping[str, Any]) -> list[int]:
    """Slots of the pool that the call names, ascending."""
    pool = next((given[name] for name in ("conv_pool", "state_pool") if name in given), None)
    named = [_array(given[name]).ravel() for name in ("read_slots", "write_slots") if name in given]
    if pool is None or not named:
        return []
    slots = np.unique(np.concatenate(named))
    return [int(s) for s in slots if 0 <= s < pool.shape[0]]


def _sums(pool: Any) -> Array:
    """A checksum of each slot, made where the pool lies."""
    if hasattr(pool, "detach"):
        import torch

        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.element_size()]
        rows = pool.detach().reshape(pool.shape[0], -1) if pool.numel() else pool.detach().new_zeros(pool.shape[0], 1)
        return np.asarray(rows.view(whole).sum(1, dtype=torch.int64).cpu().numpy())
    rows = np.ascontiguousarray(pool).reshape(pool.shape[0], -1) if pool.size else np.zeros((pool.shape[0], 1), "f4")
    unsigned = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[rows.itemsize]
    return np.asarray(rows.view(unsigned).sum(1, dtype=np.int64))


def _array(tensor: Any) -> Array:
    return from_torch(tensor, "cpu") if hasattr(tensor, "detach") else np.asarray(tensor)


def _itemsize(tensor: Any) -> int:
    return int(tensor.element_size() if hasattr(tensor, "element_size") else np.asarray(tensor).itemsize)


def _setting(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _gaps(given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Strides, in elements, of tensors that are not packed."""
    found = {}
    for name, tensor in given.items():
        if hasattr(tensor, "detach"):
            if not tensor.is_contiguous():
                found[name] = tuple(int(s) for s in tensor.stride())
        elif isinstance(tensor, np.ndarray) and not tensor.flags.c_contiguous:
            found[name] = tuple(s // tensor.itemsize for s in tensor.strides)
    return {name: strides for name, strides in found.items() if min(strides, default=0) >= 0}


def _capturing() -> bool:
    """Whether torch is capturing a CUDA graph, in which nothing may be copied to the host."""
    import sys

    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _free_name(folder: Path) -> str:
    """The next number that no file in the folder has."""
    taken = [int(p.name[:6]) for p in folder.iterdir() if p.name[:6].isdigit()]
    while True:
        name = f"{max(taken, default=0) + 1:06d}"
        try:  # of several processes that record into one folder each has a number of its own
            os.close(os.open(folder / f"{name}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            taken.append(int(name))
            continue
        return name


