"""What goes wrong with pools whatever the recurrence, around the models of all operations that have one.

Slots found with offsets of 32 bits (MEM-4), states stored in another type than the pool's (DET-4), contents that are
not checked although that is asked for (ERR-4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from statescan.conformance.mutants import delta, ssd
from statescan.conformance.mutants.conv import build as build_conv
from statescan.reference.arrays import Array, round_to, widen
from statescan.spec.contract import OPERATIONS

FAULTS: tuple[str, ...] = ("offsets-of-32-bits", "check-word-ignored")
STATE_FAULTS: tuple[str, ...] = (*FAULTS, "state-stored-in-operand-type")

Operation = Callable[..., Any]
Call = Mapping[str, Any]


def build_windows(fault: str | None = None) -> Mapping[str, Operation]:
    """The convolutions on pools."""
    return _build(build_conv(None), fault)


def build_states(fault: str | None = None) -> Mapping[str, Operation]:
    """The recurrences on pools."""
    return _build({**delta.build(None), **ssd.build(None)}, fault)


def _build(right: Mapping[str, Operation], fault: str | None) -> dict[str, Operation]:
    served = {name: operation for name, operation in right.items() if name.endswith(("_prefill", "_update"))}
    return {name: partial(_run, name, operation, fault) for name, operation in served.items()}


def _run(
    name: str, operation: Operation, fault: str | None, *given: Any, check: bool | None = None, **settings: Any
) -> Any:
    call = dict(zip((argument.name for argument in OPERATIONS[name].arguments), given, strict=False)) | settings
    pool = call.get("conv_pool", call.get("state_pool"))
    if not isinstance(pool, np.ndarray):
        return operation(**call)
    if fault == "offsets-of-32-bits":
        call |= _slots(call, partial(_cut, pool.strides[0] // pool.itemsize))
    if fault == "check-word-ignored" and check:
        call |= _slots(call, lambda slots: np.where(slots < len(pool), slots, -1))
    results = operation(**call)
    if fault == "state-stored-in-operand-type":
        _narrow(call, pool)
    return results


def _slots(call: Call, change: Callable[[Array], Array]) -> dict[str, Array]:
    """The slots of a call after a change."""
    named = {name: call.get(name) for name in ("read_slots", "write_slots")}
    return {name: change(slots).astype(slots.dtype) for name, slots in named.items()
            if isinstance(slots, np.ndarray) and slots.dtype.kind == "i"}  # fmt: skip


def _cut(step: int, slots: Array) -> Array:
    """Where slots lead whose offset in elements is cut to 32 bits; what leads between slots stays where it is."""
    offsets = (slots.astype(np.int64) * step).astype(np.int32).astype(np.int64)
    inside = (slots >= 0) & (offsets >= 0) & (offsets % max(step, 1) == 0)
    return np.where(inside, offsets // max(step, 1), slots)


def _narrow(call: Call, pool: Array) -> None:
    """What was stored passes through bfloat16 on its way to the pool."""
    slots = call.get("write_slots")
    for slot in (call["read_slots"] if slots is None else slots).tolist():
        if slot >= 0:
            pool[slot] = widen(round_to(widen(pool[slot]), "bf16"))
