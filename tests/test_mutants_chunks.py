"""Faults of chunked models fall at every length of chunk, by the stories stretched to its edges."""

from __future__ import annotations

from types import ModuleType

import pytest

from statescan.conformance.adapter import Adapter
from statescan.conformance.cases import Missing, prepare
from statescan.conformance.mutants import delta, ssd
from statescan.goldens.regenerate import adapter_of, run_in_process
from statescan.goldens.store import load_vectors

VECTORS = load_vectors()
TELLING = ("exact", "relation")
FALLING = [(part, fault) for part in (delta, ssd) for fault in part.CHUNKED_FAULTS
           if any(fault in v["kills"] and v["class"] in TELLING for v in VECTORS.values()
                  if v["op"] in part.build_chunked())]  # fmt: skip
"""The others are faults of refusals, which know no chunk, and of precision, which numeric vectors tell."""


def model(part: ModuleType, fault: str | None, chunk: int) -> Adapter:
    """A chunked model that says how long its chunks are."""
    return adapter_of(part.build_chunked(fault, chunk=chunk), limits={"chunk": chunk}, state_layout=("KV", "VK"))


def falls(adapter: Adapter, identity: str) -> bool | None:
    """Whether a vector tells that something is wrong; None where it does not apply."""
    case = prepare(VECTORS[identity], VECTORS, adapter.capabilities)
    if isinstance(case, Missing):
        return None
    return not run_in_process(case, adapter).passed


def test_most_faults_are_told_without_a_tolerance() -> None:
    assert len(FALLING) > 150


@pytest.mark.parametrize("chunk", [16, 64, 128])
def test_every_fault_falls_at_every_chunk(chunk: int) -> None:
    for part, fault in FALLING:
        adapter = model(part, fault, chunk)
        telling = [v["id"] for v in VECTORS.values() if fault in v["kills"] and v["class"] in TELLING]
        telling.sort(key=lambda identity: "stretch" not in VECTORS[identity].get("lifts", []))
        assert any(falls(adapter, identity) for identity in telling if VECTORS[identity]["op"] in adapter.operations), (
            fault, chunk)  # fmt: skip


@pytest.mark.parametrize("part", [delta, ssd])
def test_without_a_fault_nothing_falls(part: ModuleType) -> None:
    adapter = model(part, None, 16)
    for vector in VECTORS.values():
        if vector["op"] in adapter.operations and vector["class"] in TELLING:
            assert not falls(adapter, vector["id"]), vector["id"]
