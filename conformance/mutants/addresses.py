"""Slots found with offsets of 32 bits, around the models of the operations that have pools (MEM-4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from statescan.conformance.mutants import delta, ssd
from statescan.conformance.mutants.conv import build as build_conv
from statescan.reference.arrays import Array
from statescan.spec.contract import OPERATIONS

FAULTS: tuple[str, ...] = ("offsets-of-32-bits",)
POOLS = ("conv_pool", "state_pool")

Operation = Callable[..., Any]


def build_windows(fault: str | None = None) -> Mapping[str, Operation]:
    """The convolutions on pools."""
    return _build(build_conv(None), fault)


def build_states(fault: str | None = None) -> Mapping[str, Operation]:
    """The recurrences on pools."""
    return _build({**delta.build(None), **ssd.build(None)}, fault)


def _build(right: Mapping[str, Operation], fault: str | None) -> dict[str, Operation]:
    served = {name: operation for name, operation in right.items() if name.endswith(("_prefill", "_update"))}
    return {name: partial(_at, name, operation, fault) for name, operation in served.items()}


def _at(name: str, operation: Operation, fault: str | None, *given: Any, **settings: Any) -> Any:
    """The call, its pool seen as the slots that a product of slot and stride leads to."""
    call = dict(zip((argument.name for argument in OPERATIONS[name].arguments), given, strict=False)) | settings
    for pool in POOLS:
        if fault is not None and isinstance(call.get(pool), np.ndarray):
            call = {**call, **_wrapped(call, call[pool])}
    return operation(**call)


def _wrapped(call: Mapping[str, Any], pool: Array) -> dict[str, Array]:
    """Slots whose offset in elements is cut to 32 bits; what leads outside the pool stays where it is."""
    step = pool.strides[0] // pool.itemsize
    found = {}
    for name in ("read_slots", "write_slots"):
        slots = call.get(name)
        if isinstance(slots, np.ndarray) and slots.dtype.kind == "i" and step:
            offsets = (slots.astype(np.int64) * step).astype(np.int32).astype(np.int64)
            inside = (offsets % step == 0) & (offsets >= 0) & (slots >= 0)
            found[name] = np.where(inside, offsets // step, slots).astype(slots.dtype)
    return found
