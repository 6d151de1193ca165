"""The lint of the corpus: labels, coverage by clause and operation, sizes, and comparisons that can fail."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from statescan.conformance import cases, compare
from statescan.conformance.adapters.reference import adapter as reference
from statescan.conformance.cases import ANYTHING, Case, execute, tell
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.mutants import FAULTS
from statescan.goldens.generator import check_gen
from statescan.goldens.store import (
    GOLDENS,
    MANIFEST,
    check_schema,
    load_faults,
    load_traces,
    load_vectors,
    manifest,
    read_json,
)
from statescan.spec.clauses import parse_chapters
from statescan.spec.contract import CLAUSES, OPERATIONS

VECTORS = load_vectors()
TRACES = load_traces()
ACTIVE = {clause.label for clause in CLAUSES.values() if clause.state == "active"}
BUILT = {vector["op"] for vector in VECTORS.values()}

NOTHING_TO_COMPARE = {"cu-offsets-empty"} | {
    vector["id"] for vector in VECTORS.values() if vector["class"] == "reject" and not vector.get("inputs")
}
"""Refusals of calls without a single number: there is nothing that could have been changed."""


@lru_cache(maxsize=1)
def texts():
    return parse_chapters()


def run_reference(call, name):
    return invoke(reference, isolated(call))


def case_of(vector) -> Case:
    return Case(vector, tell(vector, VECTORS), ANYTHING)


def test_text_vectors_and_faults_name_the_active_labels():
    assert set(texts()) == ACTIVE
    assert {label for one in [*VECTORS.values(), *TRACES.values()] for label in one["clauses"]} == ACTIVE
    assert {label for fault in load_faults().values() for label in fault["clauses"]} <= set(CLAUSES)
    assert {fault["clauses"][0] for fault in load_faults().values()} >= ACTIVE


def test_every_clause_is_covered_for_every_operation_it_applies_to():
    have = {(label, vector["op"]) for vector in VECTORS.values() for label in vector["clauses"]}
    have |= {(label, call["op"]) for vector in VECTORS.values() for call in vector.get("calls", {}).values()
             if "op" in call for label in vector["clauses"]}  # fmt: skip
    missing = [(label, op) for label, text in texts().items() for op, _ in text.applies
               if op in BUILT and (label, op) not in have]  # fmt: skip
    assert not missing


def test_what_a_clause_lets_be_seen_decides_what_vectors_it_has():
    by_clause = defaultdict(list)
    for vector in [*VECTORS.values(), *TRACES.values()]:
        for label in vector["clauses"]:
            by_clause[label].append(vector)
    for label, text in texts().items():
        classes = {vector["class"] for vector in by_clause[label]}
        seen = {word.strip() for word in text.options["observable"].split(",")}
        if "value" in seen and "exact" not in text.options:
            assert "exact" in classes, f"{label}: an exact vector, or `exact: no (reason)`"
        if "error" in seen and not any(refuses(one) for one in by_clause[label]):
            assert "reject" in classes, f"{label}: a reject vector"
            assert classes - {"reject"} or any(
                v["op"] in {r["op"] for r in by_clause[label]} and v["class"] != "reject" for v in VECTORS.values()
            ), f"{label}: a legal neighbour"
        if "untouched" in seen:
            assert any(guarded(vector) for vector in by_clause[label]), f"{label}: a vector with guards on both sides"


def refuses(trace) -> bool:
    """A trace with a step that must be refused."""
    return any("reject" in step.get("expect", {}) for step in trace.get("steps", []))


def guarded(vector) -> bool:
    """A pool whose written slots have untouched ones before and behind them, or inputs that are all compared."""
    if "steps" in vector:  # a replay compares every slot in every step, guards of NaN among them
        return True
    for name in vector.get("inout", []):
        written = vector["expect"].get(name, {}).get("bits_outside")
        if written and 0 not in written and vector["inputs"][name]["shape"][0] - 1 not in written:
            return True
    return vector["class"] in ("reject", "relation")


def test_each_clause_has_a_fault_and_a_vector_that_kills_it_under_its_label():
    faults = load_faults()
    for label in ACTIVE:
        own = [key for key, fault in faults.items() if fault["clauses"][0] == label]
        killers = [vector["id"] for vector in [*VECTORS.values(), *TRACES.values()]
                   if vector["clauses"][0] == label and set(own) & set(vector["kills"])]  # fmt: skip
        assert killers, f"{label}: no vector listing it first kills one of {own}"


def test_every_expressible_fault_is_killed():
    killed = {fault for one in [*VECTORS.values(), *TRACES.values()] for fault in one["kills"]}
    assert {key for key, fault in load_faults().items() if fault["expressible"] and key in FAULTS} <= killed


def test_every_argument_and_word_is_exercised():
    given, words = defaultdict(set), defaultdict(set)
    for vector in VECTORS.values():
        for spec in [vector, *vector.get("calls", {}).values()]:
            given[spec.get("op", vector["op"])] |= {name for name, t in (spec.get("inputs") or {}).items() if t}
            for name, value in (spec.get("args") or {}).items():
                words[spec.get("op", vector["op"]), name].add(str(value))
    for op in (OPERATIONS[name] for name in BUILT):
        missing = {a.name for a in op.tensors} - given[op.name]
        assert not missing, f"{op.name}: {missing} never given"
        for argument in op.settings:
            if argument.kind == "word":
                seen = words[op.name, argument.name] | {str(argument.default)}
                lacking = {str(w) for w in argument.words} - seen
                assert not lacking - {"swish"}, f"{op.name}: {argument.name} never {lacking}"


def test_sizes_at_the_edges_are_there():
    for name in ("causal_conv1d", "causal_conv1d_prefill"):
        lengths, places = set(), set()
        for vector in VECTORS.values():
            offsets = vector.get("inputs", {}).get("cu_seqlens", {}).get("data")
            if vector["op"] != name or not offsets or vector["class"] == "reject":
                continue
            sizes = [b - a for a, b in pairwise(offsets)]
            lengths |= set(sizes)
            places |= {place for place, i in (("first", 0), ("last", -1)) if sizes and sizes[i] == 0}
            places |= {"middle"} if 0 in sizes[1:-1] else set()
            places |= {"none"} if not sizes else {"all"} if not any(sizes) else set()
        assert {0, 1, 3, 4, 5} <= lengths, name
        assert {"first", "middle", "last", "all", "none"} <= places, f"{name}: {places}"


def test_the_reference_passes_every_vector():
    failing = {}
    for vector in VECTORS.values():
        verdict = execute(case_of(vector), run_reference)
        if not verdict.passed:
            failing[vector["id"]] = f"{verdict.status}: {verdict.message}"
    assert not failing


def test_every_comparison_can_fail(monkeypatch):
    """With the comparer forced to say "different", every vector fails."""
    def always(got, want, how):
        return np.ones(np.shape(got), bool)

    monkeypatch.setattr(compare, "differs", always)
    monkeypatch.setattr(compare, "_ratio", lambda error, allowed: np.full(error.shape, np.inf))
    monkeypatch.setattr(cases, "differs", always)
    passing = {v["id"] for v in VECTORS.values() if execute(case_of(v), run_reference).passed}
    assert passing == NOTHING_TO_COMPARE


@pytest.mark.parametrize("vector", [v for v in VECTORS.values() if v["class"] in ("exact", "numeric")],
                         ids=lambda v: v["id"])  # fmt: skip
def test_a_changed_expectation_fails(vector):
    """Each expected tensor is looked at: with one of them changed, the reference fails the vector."""
    case = case_of(vector)
    for name, want in case.story.expect.items():
        if name == "value":
            wrong = replace(want, value=["changed"])
        elif want.array is None or want.array.size == 0:
            continue
        elif want.array.dtype.kind in "iu":
            wrong = replace(want, array=-want.array - 1)
        else:
            wide = want.array.astype(np.float64)
            wrong = replace(want, array=np.where(np.isfinite(wide), -wide - 1, 0.0).astype(want.array.dtype))
        story = replace(case.story, expect={**case.story.expect, name: wrong})
        assert not execute(replace(case, story=story), run_reference).passed, name


def test_faults_follow_their_schema():
    check_schema("faults", read_json(GOLDENS / "faults.json"), "faults.json")


def test_the_manifest_lists_the_corpus():
    assert read_json(MANIFEST) == manifest([*VECTORS.values(), *TRACES.values()])


def test_generated_inputs_are_well_formed():
    for vector in VECTORS.values():
        for spec in vector.get("inputs", {}).values():
            if "gen" in spec:
                check_gen(spec["gen"])
