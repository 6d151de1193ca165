"""Noise gains: every site is known, the decay's units follow the rule, signs are shared where they should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from statescan.conformance import oracle
from statescan.conformance.cases import tell
from statescan.goldens import gains as measure
from statescan.goldens.gains import ACC, EXP_OWN, EXP_SHARED, OP, RUNS, SITES
from statescan.goldens.store import load_vectors
from statescan.reference import delta, ssd
from statescan.reference.sites import perturbing

Array = Any
VECTORS = load_vectors()
SEED = 7


def hook(kind: int, run: int = 0) -> Callable[[str, Array], Array]:
    return measure._Noise(SEED, kind, run)


def change(noise: Callable[[str, Array], Array], site: str, value: Array) -> Array:
    """Relative change at a site, in units."""
    return (noise(site, value) / value - 1) / measure.DELTA


def test_numbers_of_sites_are_their_own_and_stay() -> None:
    numbers = [number for number, _ in SITES.values()]
    assert len(set(numbers)) == len(numbers)
    assert {"x": 0, "weight": 1, "sum": 2, "activation": 3, "entering": 4, "decay": 5}.items() <= {
        name: number for name, (number, _) in SITES.items()
    }.items()


def test_every_site_of_the_reference_is_known() -> None:
    met: set[str] = set()

    def record(site: str, value: Array) -> Array:
        met.add(site)
        return value

    seen_ops = set()
    for vector in VECTORS.values():
        if (vector["class"] in ("exact", "numeric") and vector["op"] not in seen_ops) or vector["class"] == "numeric":
            seen_ops.add(vector["op"])
            with perturbing(record):
                oracle.first(tell(vector, VECTORS))
    assert met - set(SITES) == set()
    assert {"decay", "g", "entering", "state", "correction", "x_dt", "softplus", "gate", "sigmoid", "root"} <= met


def test_a_decay_is_off_by_four_units_and_what_has_decayed_of_late() -> None:
    noise = hook(EXP_OWN)
    noise("entering", np.ones(1))
    for t in range(200):
        noise("g", np.array([[-1.0], [0.0]]))
        units = np.abs(change(noise, "decay", np.ones((2, 1)))).ravel()
        assert units == pytest.approx([4 + min(t + 1, 128), 4], rel=1e-6), t
    noise("entering", np.ones(1))
    noise("g", np.array([[-0.5], [-3.0]]))
    assert np.abs(change(noise, "decay", np.ones((2, 1)))).ravel() == pytest.approx([4.5, 7], rel=1e-6)


def test_one_sign_for_a_head_and_channel_and_one_for_each_token() -> None:
    shared, own = hook(EXP_SHARED), hook(EXP_OWN)
    signs = {kind: np.array([np.sign(change(noise, "decay", np.ones((4, 8)))) for _ in range(20)])
             for kind, noise in (("shared", shared), ("own", own))}  # fmt: skip
    assert (signs["shared"] == signs["shared"][0]).all()
    assert {-1.0, 1.0} == set(signs["shared"][0].ravel()), "heads and channels have signs of their own"
    assert not (signs["own"] == signs["own"][0]).all()
    assert np.abs(signs["own"].mean()) < 0.2


def test_runs_have_other_signs_and_the_same_run_the_same() -> None:
    value = np.ones(64)
    first, again, other = (change(hook(OP, run), "q", value) for run in (0, 0, 1))
    assert (first == again).all()
    assert not (first == other).all()


@pytest.mark.parametrize(("site", "kinds"), [("state", {ACC}), ("k_write", {OP}), ("g", set()),
                                             ("decay", {EXP_SHARED, EXP_OWN})])  # fmt: skip
def test_a_site_moves_under_its_own_kinds(site: str, kinds: set[int]) -> None:
    moved = {kind for kind in (OP, ACC, EXP_SHARED, EXP_OWN) if (hook(kind)(site, np.ones(3)) != 1).any()}
    assert moved == kinds


def one_token(g: float, entering: float, beta: float) -> Callable[[], dict[str, Array]]:
    """One token of one key and one value: o = e^g entering + beta (v - e^g entering) with k = q = v = 1."""
    one = np.ones((1, 1, 1, 1))

    def compute() -> dict[str, Array]:
        o, last = delta.gated_delta_rule(one, one, one, np.full((1, 1, 1), g), np.full((1, 1, 1), beta), None,
                                         entering * one, scale=1.0, output_final_state=True)  # fmt: skip
        assert last is not None
        return {"o": o, "final_state": last}

    return compute


def found(compute: Callable[[], dict[str, Array]], name: str, part: str) -> float:
    code = measure.gains(compute, SEED)[name][part]
    return float(np.where(code == measure.ZERO, 0.0, np.exp2(code.astype(float) / 2)).ravel()[0])


def test_gains_of_one_token_are_those_worked_by_hand() -> None:
    kept = 2 * np.exp(-3.0)
    reading = one_token(-3.0, 2.0, 0.0)  # nothing is written: o = 2 e^-3
    assert kept * 7 * 2**0.5 <= found(reading, "o", "exp") <= kept * 7 * 2 * 1.0001  # two kinds, half an octave up
    assert kept <= found(reading, "o", "acc") <= kept * 2  # entering state and state, one sign each
    writing = one_token(0.0, 0.0, 1.0)  # o = q k beta v = 1
    assert found(writing, "o", "exp") == 0
    assert 1 <= found(writing, "o", "acc") <= 2**0.5
    # v, correction, k, state read and q, five signs of one size: the root of five, as far as 16 runs tell
    assert 1.2 <= found(writing, "o", "op") <= 5
    assert 1 <= found(writing, "final_state", "op") <= 3, "neither the read nor the query reach the state"


def test_a_mamba_step_moves_under_softplus_and_decay() -> None:
    one = np.ones((1, 1, 1, 1))

    def compute() -> dict[str, Array]:
        y, _ = ssd.ssd(0 * one, 0.5 * one[0], np.full(1, -2.0), one, one, None, None, None, None, None, 3 * one)
        return {"y": y}

    step = float(np.log1p(np.exp(0.5)))
    y = 3 * np.exp(-2 * step)
    at_least = y * np.hypot(4 * 2 * step, 4 + 2 * step)  # softplus by 4 units of the step, the decay by its own
    assert 0.5 * at_least <= found(compute, "y", "exp") <= 4 * at_least


def test_gains_are_repeatable() -> None:
    compute = one_token(-0.5, 1.0, 0.5)
    first, again = measure.gains(compute, SEED), measure.gains(compute, SEED)
    assert all((first[name][part] == again[name][part]).all() for name in first for part in ("op", "acc", "exp"))
    assert RUNS == 16


def test_a_long_decay_is_measured_from_its_segment() -> None:
    """The second of two segments has the gain that it has alone, up to the signs drawn for it."""
    q = np.ones((1, 6, 1, 1))
    g, beta = np.array([[[-200.0]] * 3 + [[-1.0]] * 3]).reshape(1, 6, 1), np.zeros((1, 6, 1))

    def compute() -> dict[str, Array]:
        o, _ = delta.gated_delta_rule(q, q, q, g, beta, np.array([0, 3, 6]), np.ones((2, 1, 1, 1)), scale=1.0)
        return {"o": o}

    code = measure.gains(compute, SEED)["o"]["exp"][0, 3:, 0, 0].astype(float)
    alone = [np.exp(-float(n)) * 5 for n in (1, 2, 3)]  # e^-n moved by 4 + n units and more
    bound = np.exp2(code / 2)
    assert (bound >= alone).all()
    assert (bound <= [16 * x for x in alone]).all(), "the 600 of the segment before would show"
