"""Before anything else: is the adapter wired rightly? Tiny calls whose wrong answers are recognised by their value.

A wrong answer here says more about the adapter than about the kernels behind it, so the suite does not start and one
sentence says what to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statescan.conformance.calls import Array, Call, Reply
from statescan.conformance.cases import Case, execute, prepare
from statescan.conformance.client import Client

TAPS = [1.0, 4, 16, 64]


@dataclass(frozen=True)
class Probe:
    """One call, its right answer as an exact vector, and the sentences for wrong answers of one tensor."""

    vector: Mapping[str, Any]
    tensor: str
    wrong: Sequence[tuple[Sequence[float], str]]


def _tensor(dtype: str, shape: Sequence[int], data: Sequence[float | str]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data": list(data)}


def _vector(op: str, features: Sequence[str], inputs: Mapping[str, Any], expect: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": f"smoke-{op}", "class": "exact", "op": op, "args": {"activation": None}, "inputs": inputs,
            "expect": {name: {**spec, "how": "equal"} for name, spec in expect.items()}, "lifts": ["channels"],
            "needs": {"op": op, "features": ["act.none", "width:4", *features]}}  # fmt: skip


def _probes() -> list[Probe]:
    weight = _tensor("f32", [1, 4], TAPS)
    reversed_taps = "your taps look reversed: weight[:, W-1] multiplies the current token (CONV-1)"
    pool = _tensor("f32", [2, 1, 4], [3, 3, 3, 3, 0, 1, 2, 3])
    slot = _tensor("i32", [1], [1])
    newest_first = "your windows look newest first: the newest input stands in column W-1 (SLOT-1)"
    cut = "your windows look one column off: of W columns the oldest is the one to drop (CONV-4)"
    by_row = "your slots look like batch rows: row n uses slot read_slots[n] (SLOT-2)"
    stored = _tensor("f32", [2, 1, 4], [3, 3, 3, 3, 1, 2, 3, 1])
    one = {"x": _tensor("f32", [1, 1, 1], [1]), "weight": weight, "conv_pool": pool, "read_slots": slot}
    windowed = [([70.0], newest_first), ([100.0], cut), ([127.0], by_row)]
    return [
        Probe(_vector("causal_conv1d", [], {"x": _tensor("f32", [1, 3, 1], [1, 2, 3]), "weight": weight},
                      {"y": _tensor("f32", [1, 3, 1], [64, 144, 228])}), "y", [([1.0, 6, 27], reversed_taps)]),
        Probe(_vector("causal_conv1d_update", ["slot.pool"], one,
                      {"y": _tensor("f32", [1, 1, 1], [121]), "conv_pool": stored}), "y", windowed),
        Probe(_vector("causal_conv1d_prefill", ["slot.pool", "packed.cu"],
                      {**one, "cu_seqlens": _tensor("i32", [2], [0, 1])},
                      {"y": _tensor("f32", [1, 1, 1], [121]), "conv_pool": stored}), "y", windowed),
    ]  # fmt: skip


def check_wiring(client: Client) -> str:
    """A sentence that says what is wired wrongly, or nothing."""
    for probe in _probes():
        case = prepare(probe.vector, {}, client.capabilities)
        if isinstance(case, Case):
            said = _try(probe, case, client)
            if said:
                return said
    return ""


def _try(probe: Probe, case: Case, client: Client) -> str:
    seen: list[Reply] = []

    def run(call: Call, name: str) -> Reply:
        seen.append(client.run(call, vector=probe.vector["id"], name=name))
        return seen[-1]

    verdict = execute(case, run)
    if verdict.passed:
        return ""
    got = seen[-1].outputs.get(probe.tensor)
    for answer, sentence in probe.wrong:
        if got is not None and seen[-1].status == "ok" and _first_channel(got, answer):
            return sentence
    return f"{probe.vector['op']}: {verdict.status}: {verdict.message}"


def _first_channel(got: Array, answer: Sequence[float]) -> bool:
    """Whether channel 0 (an adapter may ask for more, which the lift fills) holds the recognised values."""
    return bool(np.array_equal(got[..., 0].astype(np.float64).ravel(), np.asarray(answer)))
