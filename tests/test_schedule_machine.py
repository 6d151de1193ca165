"""Everything together, one decision after another: a state machine that plays a scheduler on an engine, and the judge.

A step is put together from decisions (who comes, who has a row, who leaves), then run and judged. What fails comes out
as the shortest run of decisions that shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from statescan.conformance.mutants.scheduler import Engine, Rules
from statescan.conformance.schedules import Judge
from statescan.reference.host.requests import Book, Request, Sizes, describe_end, run_step
from statescan.spec.contract import ContractError

Json = dict[str, Any]
TEXTS = {"A": [1, 2, 3, 4, 5], "B": [1, 2, 3, 9], "C": [1, 2], "D": [7]}
SIZES = st.fixed_dictionaries({
    "slots": st.integers(1, 3), "max_drafts": st.integers(0, 2), "snapshots": st.sampled_from([None, 0, 1, 3]),
    "block_size": st.integers(0, 3), "blocks": st.integers(4, 8), "places": st.integers(0, 3),
    "policy": st.sampled_from(["lru", "ref_zero"]), "alignment": st.integers(1, 2), "least_tokens": st.integers(1, 2),
})  # fmt: skip


class Reference:
    """The reference's book, step by step."""

    def __init__(self, sizes: Json) -> None:
        self.book = Book(Sizes(**sizes))
        for name, prompt in TEXTS.items():
            self.book.add(name, prompt)

    def step(self, given: Json) -> Json:
        return run_step(self.book, given)

    def end(self) -> Json:
        return describe_end(self.book)


def model(fault: str | None) -> Callable[[Json], Any]:
    """The model of a bookkeeper with a fault, step by step."""
    return lambda sizes: Engine(Rules(fault), sizes, TEXTS)


class Day(RuleBasedStateMachine):
    """Decisions of a scheduler; what may be decided is read off a book of its own."""

    make: Callable[[Json], Any] = Reference

    @initialize(sizes=SIZES)
    def begin(self, sizes: Json) -> None:
        self.engine, self.judge, self.truth = type(self).make(sizes), Judge(sizes, TEXTS), Reference(sizes)
        self.sizes, self.given = sizes, {}
        self.ahead = copy.deepcopy(self.truth.book)

    def named(self, *states: str) -> list[Request]:
        return [request for request in self.ahead.requests.values() if request.state in states]

    def free(self) -> list[str]:
        """Those who run and have nothing decided for them in this step."""
        busy = [row["request"] for word in ("decode", "prefill") for row in self.given.get(word, ())]
        gone = [name for word in ("save", "pause", "evict", "finish") for name in self.given.get(word, ())]
        return [request.name for request in self.named("running") if request.name not in (*busy, *gone)]

    @precondition(lambda self: not self.given.keys() - {"resume", "load", "admit"})
    @rule(word=st.sampled_from(["admit", "load", "resume"]), data=st.data())
    def come(self, word: str, data: Any) -> None:
        names = [r.name for r in self.named({"admit": "waiting", "load": "away", "resume": "paused"}[word])]
        order = ("resume", "load", "admit")  # in which a step does them
        if not names or any(later in self.given for later in order[order.index(word) + 1 :]):
            return
        name = data.draw(st.sampled_from(names))
        with suppress(ContractError):  # no room
            getattr(self.ahead, word)(name)
            self.given.setdefault(word, []).append(name)

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def row(self, data: Any) -> None:
        request = self.ahead.requests[data.draw(st.sampled_from(self.free()))]
        if request.done < request.prompt:
            to = data.draw(st.sampled_from([request.prompt, *range(request.done + 1, request.prompt)]))
            chosen = {"chosen": [data.draw(st.integers(0, 1))]} if to == request.prompt else {}
            self.given.setdefault("prefill", []).append({"request": request.name, "to": to, **chosen})
            return
        drafts = data.draw(st.lists(st.integers(0, 1), max_size=self.sizes["max_drafts"]))
        accepted = data.draw(st.integers(0, len(drafts)))
        chosen_ = [*drafts[:accepted], data.draw(st.integers(2, 3))]
        self.given.setdefault("decode", []).append({"request": request.name, "drafts": drafts, "chosen": chosen_})

    @rule(word=st.sampled_from(["save", "pause", "evict", "finish"]), data=st.data())
    def leave(self, word: str, data: Any) -> None:
        gone = [name for other in ("save", "pause", "evict", "finish") for name in self.given.get(other, ())]
        came = [*self.given.get("admit", ()), *self.given.get("load", ())] if word == "save" else []
        names = [r.name for r in self.named("running") if r.name not in (*gone, *came)]
        if names:
            self.given.setdefault(word, []).append(data.draw(st.sampled_from(names)))

    @rule(padding=st.fixed_dictionaries({}, optional={"decode_pad_to": st.integers(4, 6),
                                                      "prefill_pad_to": st.integers(4, 6)}))  # fmt: skip
    def run(self, padding: Json) -> None:
        given = self.given | padding
        self.truth.step(given)
        self.judge.step(given, self.engine.step(given))
        self.given, self.ahead = {}, copy.deepcopy(self.truth.book)

    def teardown(self) -> None:
        if hasattr(self, "judge") and self.judge.number:
            self.judge.count(self.engine.end())


def play(make: Callable[[Json], Any], examples: int, *, shrink: bool = True) -> None:
    """So many days on an engine."""
    machine = type("DayOn", (Day,), {"make": staticmethod(make)})
    run_state_machine_as_test(machine, settings=settings(
        max_examples=examples, stateful_step_count=30, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])], suppress_health_check=list(HealthCheck),
        print_blob=False))  # fmt: skip


def test_the_reference_has_no_bad_day() -> None:
    play(Reference, 60)


def test_neither_has_the_other_right_bookkeeper() -> None:
    play(model(None), 30)


@pytest.mark.parametrize(
    "fault", ["skip-by-matched-blocks", "slot-not-zeroed", "rollback-one-too-far", "pause-gives-the-slot-away",
              "commit-behind-the-end", "second-owner-of-a-slot"],
)  # fmt: skip
def test_a_faulty_one_has(fault: str) -> None:
    with pytest.raises(Exception, match=r"\([A-Z]+-\d+\)"):
        play(model(fault), 300, shrink=False)
