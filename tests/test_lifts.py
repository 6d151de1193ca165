"""Lifts cannot change a story: both definitions give exactly the lifted expectation, at every size and chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from statescan.conformance.adapter import Adapter
from statescan.conformance.adapters.reference import adapter as reference
from statescan.conformance.calls import bind_axes
from statescan.conformance.cases import ANYTHING, Case, Missing, execute, prepare, tell
from statescan.conformance.compare import Expected
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.lifts import (
    LIFTS,
    NAMES,
    Story,
    fit_limits,
    lift_heads,
    lift_layout,
    lift_pad_k,
    lift_slots,
    lift_stretch,
    stretches,
)
from statescan.goldens.store import load_vectors
from statescan.spec.contract import OPERATIONS

Vector = dict[str, Any]

VECTORS = load_vectors()
LIFTED = [v for v in VECTORS.values() if v.get("lifts")]
STORIES = [v for v in LIFTED if "story-at-every-chunk" in v["id"]]
SIZES = {"channels": 5, "window": 4, "slots": 11, "pad_rows": 2, "repeat": 3}
CHUNK = 4


def second_of(op: str, chunk: int) -> Adapter:
    """The second definition of one operation as an implementation, in chunks."""
    family = OPERATIONS[op].family
    function: Callable[..., Any] = getattr(import_module(f"statescan.reference.second.{family}"), op)
    adapter = Adapter("second")
    chunked = family in ("delta", "ssd") and op != "commit_accepted"
    adapter.op(op, operand="f64")(partial(function, chunk=chunk) if chunked else function)
    return adapter


def verdicts(vector: Vector, story: Story, chunk: int, definitions: str = "both") -> list[str]:
    """What is wrong with a lifted story under the reference and under the second definition."""
    adapters = [reference] if definitions != "second" else []
    if definitions != "first" and vector["class"] == "exact" and story.grad is None:
        adapters.append(second_of(vector["op"], chunk))
    found = [execute(Case(vector, story, ANYTHING), lambda call, name, a=adapter: invoke(a, isolated(call)))
             for adapter in adapters]  # fmt: skip
    return [f"{adapter.name}: {v.status} {v.message}" for adapter, v in zip(adapters, found, strict=True)
            if not v.passed]  # fmt: skip


def lifted(story: Story, word: str) -> list[Story]:
    """A story under one lift, at small sizes; the heads need as many keys as there are copies."""
    if word == "stretch":
        return [lift_stretch(story, n, lead) for n, lead in ((CHUNK - 1, 0), (CHUNK - 1, CHUNK - 1), (1, 3))]
    if word == "layout":
        return [lift_layout(story)]
    axes = bind_axes(story.op, story.tensors, story.args)
    if word == "heads":
        few, many = (axes["G"], axes["H"]) if "P" in axes else (axes["H"], axes["HV"])
        return [lift_heads(lift_pad_k(story, axes["R" if "P" in axes else "K"] + 2), 2 * few, 6 * many)]
    if word in ("pad_k", "pad_v"):
        key, value = ("R", "P") if "P" in axes else ("K", "V")
        return [LIFTS[word](story, axes[key if word == "pad_k" else value] + 2)]
    return [LIFTS[word](story, SIZES[word])]


@pytest.mark.parametrize("vector", LIFTED, ids=lambda v: v["id"])
def test_every_lift_of_a_vector_keeps_it_true(vector: Vector) -> None:
    story = tell(vector, VECTORS)
    assert set(vector["lifts"]) <= set(NAMES)
    for word in vector["lifts"]:
        for other in lifted(story, word):
            assert verdicts(vector, other, CHUNK) == [], word


@pytest.mark.parametrize("vector", [v for v in LIFTED if v["class"] == "exact"], ids=lambda v: v["id"])
def test_lifts_together_keep_it_true(vector: Vector) -> None:
    story = tell(vector, VECTORS)
    for word in (w for w in vector["lifts"] if w not in ("stretch", "heads")):
        story = lifted(story, word)[0]
    for word in (w for w in ("heads", "stretch") if w in vector["lifts"]):
        story = lifted(story, word)[-1]
    assert verdicts(vector, story, CHUNK) == []


FULL = [
    # story, keys, values, key heads, chunk
    *((v["id"], 32, 16, 2, 16) for v in STORIES),
    *((v["id"], 48, 64, 1, 64) for v in STORIES if not v["id"].endswith("without-decay")),
    ("gdn-story-at-every-chunk", 128, 128, 1, 128), ("ssd-story-at-every-chunk", 128, 64, 1, 128),
    ("gdp-story-at-every-chunk", 128, 16, 1, 128), ("kda-story-at-every-chunk", 128, 32, 1, 128),
]  # fmt: skip


@pytest.mark.parametrize(("key", "keys", "values", "heads", "chunk"), FULL)
def test_stories_at_real_sizes_and_every_edge(key: str, keys: int, values: int, heads: int, chunk: int) -> None:
    """The sizes of a kernel, twice as many value heads as key heads, tokens first and last in their chunks."""
    vector, story = VECTORS[key], tell(VECTORS[key], VECTORS)
    own = bind_axes(story.op, story.tensors, story.args)
    if "P" in own:
        limits = {"R": [keys], "P": [values], "G": [heads], "H": [2 * heads * max(1, own["H"] // own["G"])]}
    else:
        limits = {"K": [keys], "V": [values], "H": [heads], "HV": [2 * heads]}
    fitted = fit_limits(story, vector, limits)
    assert not isinstance(fitted, str), fitted
    whole, _ = fitted
    more = stretches(whole, vector, {"chunk": chunk})
    assert len(more) == 3
    for other in (whole, *(s for s, _ in more)):
        assert verdicts(vector, other, chunk) == []


# ---------------------------------------------------------------------------------------------------------------------
# What a lift does
# ---------------------------------------------------------------------------------------------------------------------


def one_head(key: str = "gdn-story-at-every-chunk") -> Story:
    return tell(VECTORS[key], VECTORS)


def expected(story: Story, name: str) -> Any:
    array = story.expect[name].array
    assert array is not None
    return array


def test_no_two_lifted_heads_are_alike() -> None:
    story = lift_heads(lift_pad_k(one_head(), 4), 4, 16)
    states = expected(story, "final_state")  # [N, HV, K, V]
    alike = [(i, j) for i in range(16) for j in range(i) if (states[:, i] == states[:, j]).all()]
    assert alike == []
    assert (expected(story, "o")[0, :, 1] == 2 * expected(story, "o")[0, :, 0]).all()


def test_scales_go_round_after_eight_value_heads() -> None:
    o = expected(lift_heads(one_head(), 1, 10), "o")
    assert (o[:, :, 7] == 128 * o[:, :, 0]).all()
    assert (o[:, :, 8] == o[:, :, 0]).all()


def test_a_guard_of_nan_stays_one_when_padded() -> None:
    story = lift_pad_k(one_head("gdn-prefill-every-kind-of-row"), 6)
    pool, after = story.tensors["state_pool"], expected(story, "state_pool")
    assert np.isnan(pool[8]).all()
    assert np.isnan(after[8]).all()
    assert (after[2][:, 3:] == 0).all(), "a fresh row stores zeros in the keys that were added"


def test_stretched_tokens_stand_where_they_are_wanted() -> None:
    vector, story = VECTORS["gdn-story-at-every-chunk"], one_head()
    starts = story.tensors["cu_seqlens"].tolist()[:-1]
    for (other, words), row in zip(stretches(story, vector, {"chunk": 16}), (0, 15), strict=False):
        offsets = other.tensors["cu_seqlens"].tolist()
        written = np.flatnonzero(other.tensors["beta"][0, :, 0]).tolist()
        inside = [t - max(o for o in offsets if o <= t) for t in written]
        assert {place % 16 for place in inside} == {row}, words
    assert starts == [0, 8, 11]


def test_a_stretched_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient"):
        lift_stretch(one_head("gdn-gradient-of-every-input"), 1, 0)


def test_intermediates_move_with_their_slots() -> None:
    story = lift_slots(one_head("gdn-update-intermediates-by-slot"), 9)
    before = story.expect["intermediate_states"].bits_outside
    assert before == (5, 7), "slots 3 and 1 of nine, counted from the other end"


# ---------------------------------------------------------------------------------------------------------------------
# Which lifts are applied
# ---------------------------------------------------------------------------------------------------------------------


def fit(limits: dict[str, Any], key: str = "gdn-story-at-every-chunk", **changes: Any) -> tuple[Story, str] | str:
    return fit_limits(one_head(key), {**VECTORS[key], **changes}, limits)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, ""),
        ({"K": [2, 64, 128], "V": {"min": 16, "multiple": 16}}, "pad_k 64, pad_v 16"),
        ({"H": {"max": 64}, "HV": {"multiple": 4}}, "heads 1, 4"),
        ({"H": [4], "K": {"max": 256}}, "pad_k 4, heads 4, 4"),
        ({"H": [2], "HV": [4], "chunk": 64}, "heads 2, 4"),
    ],
)
def test_a_story_is_lifted_into_the_limits(limits: dict[str, Any], words: str) -> None:
    fitted = fit(limits)
    assert not isinstance(fitted, str)
    assert fitted[1] == words


@pytest.mark.parametrize(
    ("limits", "changes", "missing"),
    [
        ({"K": {"max": 2}}, {}, "K=3"),
        ({"K": [64]}, {"lifts": ["pad_v"]}, "K=3"),
        ({"HV": [4]}, {"lifts": ["pad_k"]}, "HV=1"),
        ({"H": [8]}, {"lifts": ["heads"]}, "H=1"),
        ({"T": {"max": 8}}, {}, "T=13"),
    ],
)
def test_what_no_lift_meets_is_named(limits: dict[str, Any], changes: dict[str, Any], missing: str) -> None:
    assert fit(limits, **changes) == missing


def test_a_pool_is_turned_for_an_implementation_of_one_layout() -> None:
    key = "gdn-prefill-story-from-slots"
    fitted = fit({"state_layout": ["VK"]}, key)
    assert not isinstance(fitted, str)
    assert fitted[1] == "layout VK"
    assert fitted[0].tensors["state_pool"].shape == (5, 1, 2, 3)
    assert fit({"state_layout": ["VK"]}, key, lifts=[]) == "state_layout.KV"
    assert fit({"state_layout": ["KV"]}, "gdn-prefill-values-before-keys") == "state_layout.VK"


def test_a_chunked_claim_runs_the_story_four_times() -> None:
    claim = {"op": "gated_delta_rule", "features": VECTORS["gdn-story-at-every-chunk"]["needs"]["features"],
             "operand": "f64", "limits": {"K": [8], "V": [4], "chunk": 6}}  # fmt: skip
    case = prepare(VECTORS["gdn-story-at-every-chunk"], VECTORS, [claim])
    assert not isinstance(case, Missing)
    assert [one.lift for one in (case, *case.variants)] == [
        "pad_k 8, pad_v 4", "pad_k 8, pad_v 4, stretch 5, 0", "pad_k 8, pad_v 4, stretch 5, 5",
        "pad_k 8, pad_v 4, stretch 2, 3",
    ]  # fmt: skip
    seen: list[str] = []

    def run(call: Any, name: str) -> Any:
        seen.append(name)
        return invoke(reference, isolated(call))

    assert execute(case, run).passed
    assert len(seen) == 4


def test_a_failure_names_the_lift_under_which_it_shows() -> None:
    vector = VECTORS["gdn-story-at-every-chunk"]
    claim = {"op": "gated_delta_rule", "features": vector["needs"]["features"], "limits": {"chunk": 6}}
    case = prepare(vector, VECTORS, [claim])
    assert not isinstance(case, Missing)
    want = case.variants[1].story.expect["o"]
    assert want.array is not None
    wrong: dict[str, Expected] = {**case.variants[1].story.expect, "o": replace(want, array=-want.array - 1)}
    bad = replace(case.variants[1], story=replace(case.variants[1].story, expect=wrong))
    verdict = execute(replace(case, variants=(case.variants[0], bad)), lambda c, n: invoke(reference, isolated(c)))
    assert not verdict.passed
    assert "(lifted: stretch 5, 5)" in verdict.message
