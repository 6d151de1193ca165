"""Implementations that compute nothing fail in every family, and what they do pass is known, vector by vector."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest

from statescan.conformance.adapters import NULLS, null
from statescan.conformance.cases import Missing, execute, prepare, tell
from statescan.conformance.compare import Verdict
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.lifts import Story
from statescan.goldens.store import load_vectors

Vector = dict[str, Any]

ECHO_IS_RIGHT = {
    "conv-all-segments-empty": "no tokens: the windows that enter leave again",
    "conv-prefill-all-requests-empty": "no tokens: every slot keeps its window",
    "conv-update-no-rows": "no rows: no output, and the pool as it was",
    "gdn-update-no-rows": "no rows: no output, and the pool as it was",
    **{f"{op}-all-segments-empty": "no tokens: what enters leaves again" for op in ("gdn", "gdp", "kda", "ssd")},
    **{f"{op}-{of}a-zero-row": "zeros in, zeros out" for op in ("l2norm", "rmsnorm") for of in ("of-", "gradient-of-")},
    "cu-actual-offsets-stand-alone": "the offsets that count are the ones given",
    "seq-idx-of-an-empty-pack": "no tokens, no ids",
    "stack-without-recurrent-layers": "no layer, no chunking: None, which is what an echo of no tensors gives too",
    "stack-of-no-layers": "the same",
    "seq-idx-only-a-tail": "the offset given and the ordinal asked for are both 0",
}
"""Exact vectors whose answer is one of their inputs."""

@cache
def corpus() -> dict[str, Vector]:
    return load_vectors()


@cache
def verdicts(name: str) -> dict[str, Verdict]:
    """What becomes of every vector under a null implementation, run in this process."""
    adapter, found = getattr(null, name), {}
    for vector in corpus().values():
        case = prepare(vector, corpus(), adapter.capabilities)
        assert not isinstance(case, Missing), f"{vector['id']}: {name} claims everything, and {case.word} is missing"
        found[vector["id"]] = execute(case, lambda call, _: invoke(adapter, isolated(call)))
    return found


def may_pass(name: str, vector: Vector) -> bool:
    """Whether a vector cannot tell the null implementation from a right one."""
    if name == "refuses" or vector["class"] == "reject":
        return False  # a class of error without the rule and the place is no refusal
    if vector["class"] == "relation":
        quiet = not _fills_a_pool_two_ways(vector)
        # an echo of x is repeatable, causal, isolated and the same however it is cut: exact vectors tell it apart
        echoes = quiet
        return {"zeros": quiet and _asks_for_no_difference(vector), "echo": echoes}.get(name, False)
    if name == "echo":
        return vector["id"] in ECHO_IS_RIGHT
    story = tell(vector, corpus())
    return _pools_stand(story) and (_all_zero(story) if name == "zeros" else _all_empty(story))


def _asks_for_no_difference(vector: Vector) -> bool:
    """Two calls that ignore their inputs alike are repeatable, causal and isolated."""
    return all(entry["how"] != "differs" for entry in vector["relate"])


def _fills_a_pool_two_ways(vector: Vector) -> bool:
    """A compared pool that the calls are given with different contents: to leave it alone is seen."""
    related = {entry["of"] for entry in vector["relate"]}
    given = {name for call in vector["calls"].values() for name, spec in (call.get("inputs") or {}).items()
             if spec and "from" not in spec and "concat" not in spec}  # fmt: skip
    changed = {change["tensor"] for call in vector["calls"].values() for change in call.get("change", [])}
    return bool(related & (given | changed))


def _pools_stand(story: Story) -> bool:
    pairs = [(want.array, story.tensors[name]) for name, want in story.expect.items() if name in story.tensors]
    return all(want is not None and np.array_equal(want, before, equal_nan=True) for want, before in pairs)


def _results(story: Story) -> list[Any]:
    """Expected results, pools aside; a host value counts as one that is neither empty nor 0, and None as nothing."""
    return [np.ones(0 if want.value is None else 1) if want.array is None else want.array
            for name, want in story.expect.items() if name not in story.tensors and want.how != "finite"]  # fmt: skip


def _all_zero(story: Story) -> bool:
    return all((array == 0).all() for array in _results(story))


def _all_empty(story: Story) -> bool:
    return all(array.size == 0 for array in _results(story))


@pytest.mark.parametrize("name", NULLS)
def test_a_null_implementation_fails_in_every_family(name: str) -> None:
    families: dict[str, list[bool]] = defaultdict(list)
    for vector in corpus().values():
        families[vector["clauses"][0].rpartition("-")[0]].append(verdicts(name)[vector["id"]].passed)
    assert families
    assert [family for family, passed in families.items() if all(passed)] == []


@pytest.mark.parametrize("name", NULLS)
def test_a_null_implementation_passes_what_it_may_and_nothing_else(name: str) -> None:
    passed = {vector for vector, verdict in verdicts(name).items() if verdict.passed}
    allowed = {vector["id"] for vector in corpus().values() if may_pass(name, vector)}
    assert sorted(passed - allowed) == [], "these vectors let an implementation pass that computes nothing"
    if name != "echo":  # whether an echo of the first tensor follows a relation hangs on which tensor that is
        assert sorted(allowed - passed) == [], "these are told apart after all: take them out of the table"


def test_nothing_writes_nothing() -> None:
    statuses = {verdict.status for verdict in verdicts("nothing").values()}
    assert "fail.unwritten" in statuses
