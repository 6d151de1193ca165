"""Faults reported in public: each has faults of ours, killed on their clauses, or the reason why it has none."""

import json

import pytest

from statescan.goldens.store import GOLDENS, load_faults, load_traces, load_vectors

REPORTED = json.loads((GOLDENS / "catalogue.json").read_text("utf-8"))["reported"]
FAULTS = load_faults()
CORPUS = [*load_vectors().values(), *load_traces().values()]


def killed_on_its_clauses(fault: str) -> bool:
    clauses = set(FAULTS[fault]["clauses"])
    return any(fault in one["kills"] and clauses & set(one["clauses"]) for one in CORPUS)


@pytest.mark.parametrize("row", REPORTED, ids=lambda row: row["ref"])
def test_a_reported_fault_is_killed_or_explained(row):
    assert row["how"] in ("same", "analogue", "not")
    assert ("why" in row) == (row["how"] != "same")
    if row["how"] == "not":
        assert not row["faults"]
        return
    assert row["faults"]
    for fault in row["faults"]:
        assert FAULTS[fault]["expressible"], fault
        assert killed_on_its_clauses(fault), fault


def test_hardly_any_is_left_out():
    told = [row for row in REPORTED if row["how"] != "not"]
    assert len(REPORTED) >= 100
    assert len(told) >= 0.9 * len(REPORTED)


@pytest.mark.parametrize("fault", [key for key, fault in FAULTS.items() if fault["expressible"]])
def test_an_expressible_fault_is_killed_on_its_clauses(fault):
    assert killed_on_its_clauses(fault)
