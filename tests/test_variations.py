"""No false alarm: right implementations of every kind pass, and close neighbours that are wrong do not."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch

from statescan.conformance.cases import Missing
from statescan.conformance.variations import (
    AXES,
    COUNTS,
    UNLAWFUL,
    applicable,
    build,
    class_of,
    drawn,
    pairs,
    sample,
    try_one,
    variations,
)
from statescan.conformance.variations.__main__ import count, main
from statescan.conformance.variations.arithmetic import (
    OFF,
    TOTALS,
    add,
    exponential,
    rounded,
)
from statescan.conformance.variations.decays import SCANS, decays
from statescan.goldens.store import load_vectors

VECTORS = load_vectors()
FAMILIES = ("delta", "ssd", "conv", "gates")
PARTS = 4


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small, and so are the machines that run this."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_there_are_at_least_two_hundred_and_no_two_alike() -> None:
    styles = [(v.style, v.choices["types"]) for v in variations()]
    assert len(set(styles)) == len(styles) >= 200
    assert len({v.name for v in variations()}) == len(styles)
    assert {v.family for v in variations()} == set(FAMILIES)


@pytest.mark.parametrize("kind", AXES)
def test_nearly_every_two_choices_meet(kind: str) -> None:
    axes, met = AXES[kind], set()
    for choices in drawn(kind):
        met |= pairs(choices)
    wanted = {((a, x), (b, y)) for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]}
    assert met <= wanted
    assert len(met) >= 0.95 * len(wanted)
    assert {value for pair in met for value in pair} == {(axis, x) for axis, values in axes.items() for x in values}


@pytest.mark.parametrize("part", range(PARTS))
def test_the_sample_raises_no_alarm(part: int) -> None:
    work = [one for n, one in enumerate(sample(VECTORS)) if n % PARTS == part]
    report = count(work, VECTORS)
    assert report["alarms"] == []
    assert report["variations"] == len(work)
    assert report["runs"] >= 4 * len(work)


def test_the_sample_shows_every_variation_every_class_and_every_vector_several_variations() -> None:
    met: Counter[str] = Counter()
    for variation, picked in sample(VECTORS):
        wanted = {class_of(vector) for vector in applicable(variation, VECTORS)}
        assert {class_of(vector) for vector in picked} == wanted
        met.update(vector["id"] for vector in picked)
    judged = {vector["id"] for v in variations() for vector in applicable(v, VECTORS)}
    assert judged == set(met)
    assert min(met.values()) >= 2


def test_the_sample_is_the_same_every_time() -> None:
    once, again = ([(v.name, [x["id"] for x in picked]) for v, picked in sample(VECTORS)] for _ in range(2))
    assert once == again


@pytest.mark.parametrize("why", UNLAWFUL)
def test_a_close_neighbour_that_is_wrong_is_not_let_pass(why: str) -> None:
    family, choices = UNLAWFUL[why]
    wrong = build(family, {"types": "f32", **choices})
    telling = [v for v in applicable(wrong, VECTORS) if v["class"] == "numeric" or "nan" in v["id"]]
    verdicts = [try_one(wrong.adapter(), vector, VECTORS) for vector in telling]
    assert any(not isinstance(verdict, Missing) and not verdict.passed for verdict in verdicts)


def test_the_command_writes_its_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from statescan.conformance.variations import __main__ as command

    few = [(v, picked[:2]) for v, picked in sample(VECTORS) if v.family == "gates"][:3]
    monkeypatch.setattr(command, "sample", lambda corpus: iter(few))
    file = tmp_path / "alarms.json"
    assert main(["--sample", "--only", "gates", "--json", str(file)]) == 0
    report = json.loads(file.read_text("utf-8"))
    assert report["variations"] == 3
    assert report["alarms"] == []
    assert "0 alarms" in capsys.readouterr().out


def test_an_alarm_is_told_and_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from statescan.conformance.variations import __main__ as command

    family, choices = UNLAWFUL["a softplus whose small values cancel"]
    wrong = build(family, {"types": "f32", **choices})
    monkeypatch.setattr(command, "sample", lambda corpus: [(wrong, [VECTORS["softplus-gate-of-small-steps"]])])
    assert main(["--sample"]) == 1
    assert "softplus-gate-of-small-steps: fail.value" in capsys.readouterr().out


@pytest.mark.parametrize("order", TOTALS)
@pytest.mark.parametrize("terms", [0, 1, 2, 7, 8, 9, 48])
def test_every_order_adds_every_term_once(order: str, terms: int) -> None:
    values = torch.arange(1.0, terms + 1)[:, None] * torch.tensor([1.0, -2.0])
    assert add(values, order).tolist() == values.sum(0).tolist()


@pytest.mark.parametrize("scan", SCANS)
def test_decays_are_those_of_the_rows_between(scan: str) -> None:
    a = -torch.tensor([[[0.5], [0.25], [1024.0], [0.0], [2.0]]])
    entry, between = decays(variations()[0].style.arithmetic, scan, a)
    for i in range(5):
        assert entry[0, i, 0] == pytest.approx(float(a[0, : i + 1].sum().exp()), rel=1e-5)
        for j in range(5):
            wanted = float(a[0, j + 1 : i + 1].sum().exp()) if j <= i else 0.0
            # a difference of cumulative sums past -1024 has 2^-14 of the log-decay left
            assert between[0, i, j, 0] == pytest.approx(wanted, rel=2.0**-13)


@pytest.mark.parametrize("kind", ["exact", "base two", "high", "low", "either way"])
def test_exponentials_are_off_by_no_more_than_they_may_be(kind: str) -> None:
    x = torch.linspace(-8, 4, 4001)
    wanted = x.double().exp()
    off = ((exponential(x, kind).double() - wanted).abs() / wanted).max()
    assert off <= OFF + 2.0**-23 + (8 * 2.0**-23 if kind == "base two" else 0)
    assert exponential(torch.tensor([0.0, -1024.0, -torch.inf]), kind).tolist() == [1.0, 0.0, 0.0]


def test_operands_are_rounded_to_nearest_even() -> None:
    x = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11 - 2.0**-20, torch.inf])
    assert rounded(x, "tf32").tolist() == [1.0, 1 + 2.0**-9, -1 - 2.0**-10, torch.inf]
    assert rounded(torch.tensor([257.0, 259.0]), "bf16").tolist() == [256.0, 260.0]


def test_counts_are_those_that_were_asked_for() -> None:
    assert sum(COUNTS.values()) == len(variations())
