"""What a numeric vector must show before it is stored: room for every honest rounding, none for a fault."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from honest import Variant, implementation

from statescan.conformance.cases import Case, execute, tell
from statescan.conformance.compare import Verdict
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.lifts import Story
from statescan.goldens.store import load_vectors
from statescan.spec.contract import OPERATIONS

VECTORS = load_vectors()
NUMERIC = [v for v in VECTORS.values()
           if v["class"] == "numeric" and OPERATIONS[v["op"]].family != "conv" and "grad" not in v]  # fmt: skip
MATRIX = [v for v in NUMERIC if OPERATIONS[v["op"]].family in ("delta", "ssd") and "worked" not in v["id"]]
LONG = [v for v in MATRIX if v["id"].endswith("slow-and-fast-heads")]
HONEST = [Variant(), Variant(order=1), Variant(order=2), Variant(bias=2.0**-22), Variant(bias=-(2.0**-22)),
          *(Variant(chunk=c) for c in (8, 16, 32, 64, 128)), Variant(chunk=64, bias=2.0**-22)]  # fmt: skip
ROOM = {"f32": 0.9, "tf32": 1.0, "f16": 1.0, "bf16": 1.0}
LEAST_KILL = 4.0
EVERYWHERE = ("zeros", "kept", "echo", "leak", "boundary-20")
SEEN_BY_HEADS = ("tiled", "neighbour", "previous")
LATE = [v for v in MATRIX if any(fault.startswith("decay-after-write") for fault in v["kills"])]


@lru_cache(maxsize=64)
def story(key: str) -> Story:
    """The vector's call with inputs, and so outputs, in float32: nothing is excused by the output's rounding."""
    told = tell(VECTORS[key], VECTORS)
    wide = {n: a if a.dtype.kind in "iu" else a.astype(np.float32) for n, a in told.tensors.items()}
    return replace(told, tensors=wide)


def verdict(vector: dict[str, Any], variant: Variant, operand: str) -> Verdict:
    adapter = implementation(variant)
    case = Case(vector, story(vector["id"]), {"operand": operand})
    return execute(case, lambda call, name: invoke(adapter, isolated(call)))


def score(vector: dict[str, Any], variant: Variant, operand: str) -> float:
    found = verdict(vector, variant, operand)
    assert found.score is not None, f"{found.status}: {found.message}"
    return found.score


@pytest.mark.parametrize("vector", NUMERIC, ids=lambda v: v["id"])
def test_every_honest_rounding_has_room(vector: dict[str, Any]) -> None:
    for operand in (o for o in vector["operands"] if o != "f16"):  # as precise as tf32
        worst = max(score(vector, replace(variant, operand=operand), operand) for variant in HONEST)
        assert worst <= ROOM[operand], operand


@pytest.mark.parametrize("vector", MATRIX, ids=lambda v: v["id"])
@pytest.mark.parametrize("fault", EVERYWHERE)
def test_a_fault_scores_four_in_every_operand_class(vector: dict[str, Any], fault: str) -> None:
    for operand in vector["operands"]:
        assert score(vector, Variant(fault=fault), operand) >= LEAST_KILL, operand


@pytest.mark.parametrize("vector", LATE, ids=lambda v: v["id"])
def test_a_late_decay_scores_four_where_the_vector_says_so(vector: dict[str, Any]) -> None:
    for operand in vector["operands"]:
        assert score(vector, Variant(fault="decay-late"), operand) >= LEAST_KILL, operand


@pytest.mark.parametrize("vector", LONG, ids=lambda v: v["id"])
@pytest.mark.parametrize("fault", SEEN_BY_HEADS)
def test_faults_of_heads_and_decays_score_four(vector: dict[str, Any], fault: str) -> None:
    for operand in vector["operands"]:
        assert score(vector, Variant(fault=fault), operand) >= LEAST_KILL, operand


@pytest.mark.parametrize("vector", LONG, ids=lambda v: v["id"])
def test_some_heads_remember_and_some_forget(vector: dict[str, Any]) -> None:
    """Of the first token of the longest segment a quarter is left at its end in one head; another forgets in eight."""
    tensors = story(vector["id"]).tensors
    offsets = tensors["cu_seqlens"].tolist()
    start, end = max(itertools.pairwise(offsets), key=lambda pair: pair[1] - pair[0])
    if "g" in tensors:
        decays = tensors["g"][0, start:end]
    else:
        step = np.log1p(np.exp(tensors["dt"][0, start:end] + tensors["dt_bias"]))
        decays = step * tensors["A"]
    flat = decays.reshape(end - start, -1)
    assert np.exp(flat.sum(axis=0)).max() >= 0.25
    assert np.exp(flat[:8].sum(axis=0)).min() <= 0.01


def test_a_narrow_gate_or_norm_is_not_honest() -> None:
    """Parameters in bfloat16 before the exponential, epsilon outside the root: what float32 must not be taken for."""
    gate = VECTORS["softplus-gate-with-narrow-parameters"]
    told = story(gate["id"])
    narrow = {**told.tensors, "A_log": told.tensors["A_log"] * np.float32(1 + 2.0**-9)}
    adapter = implementation(Variant())
    got = execute(Case(gate, replace(told, tensors=narrow), {"operand": "f32"}),
                  lambda call, name: invoke(adapter, isolated(call)))  # fmt: skip
    assert got.score is not None
    assert got.score >= LEAST_KILL
