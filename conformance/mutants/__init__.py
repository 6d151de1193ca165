"""Right models of every operation, and the same models with one known fault each: what measures the suite's strength.

    mutant("taps-reversed")["causal_conv1d"](x, weight)

A model is written apart from the reference and shares only its checks and roundings, so that the two can be compared. A
fault is one switch at the place where its mechanism sits; `goldens/faults.json` says what each does and who saw it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import signature
from typing import Any, NamedTuple

from statescan.conformance.mutants import batch, delta, gates, host, parallel, pools, scheduler, ssd, step
from statescan.conformance.mutants.conv import FAULTS as CONV_FAULTS
from statescan.conformance.mutants.conv import build as build_conv
from statescan.conformance.mutants.packed import FAULTS as PACKED_FAULTS
from statescan.conformance.mutants.packed import build as build_packed

Operations = Mapping[str, Callable[..., Any]]


class Part(NamedTuple):
    """The operations one module models: what kind of model it is, how to build it, the faults it knows."""

    structure: str
    build: Callable[[str | None], Operations]
    faults: tuple[str, ...]


PARTS: tuple[Part, ...] = (
    Part("kernel-like", build_conv, CONV_FAULTS),
    Part("host", build_packed, PACKED_FAULTS),
    Part("kernel-like", gates.build, gates.FAULTS),
    Part("recurrent", delta.build, delta.FAULTS),
    Part("recurrent", ssd.build, ssd.FAULTS),
    Part("chunked", delta.build_chunked, delta.CHUNKED_FAULTS),
    Part("chunked", ssd.build_chunked, ssd.CHUNKED_FAULTS),
    Part("host", host.build, host.FAULTS),
    Part("host", batch.build, batch.FAULTS),
    Part("host", parallel.build, parallel.FAULTS),
    Part("engine", step.build, step.FAULTS),
    Part("host", scheduler.build, scheduler.FAULTS),
    Part("kernel-like", pools.build_windows, pools.FAULTS),
    Part("recurrent", pools.build_states, pools.STATE_FAULTS),
)
"""Where an operation is modelled more than once, the first part here serves it unless another is asked for."""

FAULTS: tuple[str, ...] = tuple(dict.fromkeys(fault for part in PARTS for fault in part.faults))
"""Every fault that can be built."""


def mutant(fault_id: str) -> Operations:
    """All operations with exactly this fault, in every part that knows it; KeyError for an unknown id."""
    if fault_id not in FAULTS:
        raise KeyError(f"{fault_id!r} is no known fault: see statescan.conformance.mutants.FAULTS")
    return _assemble([part for part in PARTS if fault_id in part.faults], fault_id)


@cache
def faults_of(operation: str) -> tuple[str, ...]:
    """The faults that can show in this operation: those of the parts that model it."""
    return tuple(dict.fromkeys(fault for part in PARTS if operation in part.build(None) for fault in part.faults))


def models(operation: str | None = None) -> dict[str, Operations]:
    """The unmutated models by structure; what a structure does not model comes from the others.

    With an `operation`, only the structures that model it.
    """
    chosen = [part for part in PARTS if operation is None or operation in part.build(None)]
    structures = dict.fromkeys(part.structure for part in chosen)
    return {name: _assemble([part for part in PARTS if part.structure == name]) for name in structures}


def _assemble(first: list[Part], fault: str | None = None) -> Operations:
    """Every operation once, from the parts named `first` where there is a choice; these alone get the fault."""
    operations: dict[str, Callable[..., Any]] = {}
    for part in (*first, *(part for part in PARTS if part not in first)):
        for name, operation in part.build(fault if part in first else None).items():
            operations.setdefault(name, _with_check(operation))
    return operations


def _with_check(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that takes the word `check`: on a CPU contents are always checked."""
    if "check" in signature(operation).parameters:
        return operation

    @wraps(operation)
    def called(*given: Any, check: bool | None = None, **settings: Any) -> Any:
        return operation(*given, **settings)

    return called
