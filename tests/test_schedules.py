"""Programs for a scheduler's bookkeeping, random ones and all small ones, and the judge of what is made of them."""

from __future__ import annotations

import copy
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statescan import conformance
from statescan.conformance.cli import main
from statescan.conformance.hooks import KINDS
from statescan.conformance.mutants.scheduler import FAULTS, build
from statescan.conformance.replay_random import client_of
from statescan.conformance.schedule_programs import Schedule, check_many, check_small, random_schedule, shrink
from statescan.conformance.schedules import PASS, judge, try_engine
from statescan.goldens.store import load_faults, load_vectors
from statescan.reference.host.requests import run_program


def test_random_schedules_pass_on_the_reference() -> None:
    assert check_many(0, 200) == {"passed": 200, "not_applicable": {}, "failed": []}


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert random_schedule(7) == random_schedule(7)
    assert random_schedule(7) != random_schedule(8)


def test_random_schedules_try_everything() -> None:
    """Every word of a program and every edit of an engine comes up, in steps with both partitions too."""
    words, edits, full, hits = set(), set(), 0, 0
    for seed in range(60):
        schedule = random_schedule(seed)
        for step, told in zip(schedule.program, run_program(*schedule)["steps"], strict=True):
            words |= set(step)
            events = [*told["before"], *told["after"]]
            edits |= {event["op"] for event in events}
            full += sum(event.get("kept") is False for event in events)
            hits += sum(event["op"] == "restore" for event in events)
    assert words == {"resume", "load", "admit", "decode", "prefill", "decode_pad_to", "prefill_pad_to", "token_pad_to",
                     "save", "pause", "evict", "finish"}  # fmt: skip
    assert edits == {"zero", "restore", "load", "commit", "rollback", "save", "free"}
    assert full
    assert hits > 20


def test_every_small_program_passes_on_the_reference() -> None:
    """Two requests with a block in common, every cut, order and batch; with a pause or eviction it is a command."""
    assert check_small(disturbances=0) == 240


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_no_edit_of_a_step_can_be_left_out(seed: int) -> None:
    """Each zero, restore, load, rollback, save and free is needed, where its request runs again before it leaves."""
    schedule = random_schedule(seed)
    log = run_program(*schedule)
    tried = 0
    for n, step in enumerate(log["steps"]):
        for place in ("before", "after"):
            for i, event in enumerate(step[place]):
                name = owner(log, n, event) if event["op"] not in ("commit", "free") else ""
                given = schedule.program[n]
                leaves = place == "after" and name in (*given.get("evict", ()), *given.get("finish", ()))
                gone = leaves or (name and not runs_again(schedule, n + (place == "after"), name))
                if event["op"] == "commit" or gone:
                    continue  # what is kept may never be asked for
                if event["op"] == "rollback" and event["entry"] == len(step["decode"]["rows"][0]["tokens"]) - 1:
                    continue  # all drafts stand
                less = copy.deepcopy(log)
                del less["steps"][n][place][i]
                assert not judge(*schedule, less).passed, (n, event)
                tried += 1
    assert tried


def owner(log: dict[str, Any], step: int, event: dict[str, Any]) -> str:
    """Who holds the event's slot: the last one that came into it."""
    came = [one for told in log["steps"][: step + 1] for one in told["come"] if one["slot"] == event["slot"]]
    return str(came[-1]["request"])


def runs_again(schedule: Schedule, step: int, name: str) -> bool:
    """Whether a request has a row from this step on, before it begins anew or ends."""
    for given in schedule.program[step:]:
        comes = [one if isinstance(one, str) else one["request"] for one in given.get("admit", ())]
        if name in comes and given is not schedule.program[step]:
            return False
        if any(row["request"] == name for row in (*given.get("decode", ()), *given.get("prefill", ()))):
            return True
        if name in (*given.get("evict", ()), *given.get("finish", ())):
            return False
    return False


def rows_of(schedule: Schedule) -> int:
    return sum(len(step.get("prefill", ())) + len(step.get("decode", ())) for step in schedule.program)


def test_what_fails_is_made_small() -> None:
    """Of a schedule that a faulty engine fails at most two requests are left, and less than half of the rows."""
    run = build("skip-by-matched-blocks")["engine.run"]

    def fails(schedule: Schedule) -> bool:
        return try_engine(run, *schedule).tensor == "SNAP-2"

    found = next(schedule for seed in range(100) if fails(schedule := random_schedule(seed)))
    small = shrink(found, fails)
    assert fails(small)
    assert try_engine(run_program, *small) == PASS
    assert len(small.requests) <= 2
    assert rows_of(small) < rows_of(found) / 2


# ---------------------------------------------------------------------------------------------------------------------
# Faulty bookkeepers, and another right one
# ---------------------------------------------------------------------------------------------------------------------


def test_another_right_bookkeeper_passes() -> None:
    """Written apart, slots handed out in another order: what is judged is what the rules say, not how we do it."""
    assert check_many(0, 100, build()["engine.run"]) == {"passed": 100, "not_applicable": {}, "failed": []}


schedule_of = lru_cache(maxsize=None)(random_schedule)

UNSEEN = {"salt-left-out", "victim-among-the-named", "victim-used-last", "places-handed-out-in-part",
          "block-given-back-twice", "place-of-an-unnamed-block-leaks", "paused-request-run", "one-class-for-all",
          "message-without-label"}  # fmt: skip
"""What no right program shows: salt, wrong calls and refusals, an order that costs hits and nothing else."""


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - UNSEEN))
def test_random_schedules_find_every_faulty_bookkeeper_and_name_its_clause(fault: str) -> None:
    clause, run = load_faults()[fault]["clauses"], build(fault)["engine.run"]
    told = []
    for seed in range(300):
        verdict = try_engine(run, *schedule_of(seed))
        told.append(verdict.tensor or verdict.message[-7:-1])
        if told[-1] in clause:
            return
    pytest.fail(f"{fault}: {set(told)}")


# ---------------------------------------------------------------------------------------------------------------------
# A stranger's scheduler, by message
# ---------------------------------------------------------------------------------------------------------------------

CONTRIBUTING = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")


def strangers_scheduler() -> str:
    """The one of CONTRIBUTING.md."""
    block = CONTRIBUTING.partition("# my_scheduler.py\n")[2].partition("    .venv/bin")[0]
    return re.sub(r"^    ", "", block, flags=re.MULTILINE)


def try_stranger(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """A command on a file my_scheduler.py."""
    (folder / "my_scheduler.py").write_text(code, "utf-8")
    monkeypatch.chdir(folder)
    client_of.cache_clear()  # the child of another test has imported another file
    return CliRunner().invoke(main, [*words, "--out", "out"], env={"COLUMNS": "200"})


def test_the_scheduler_of_a_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("schedules", "--engine", "my_scheduler:adapter", "--mixer", "gdn", "--count", "40")
    done = try_stranger(strangers_scheduler(), tmp_path, monkeypatch, *words)
    assert (done.exit_code, "40 as alone" in done.output) == (0, True), done.output


@pytest.mark.parametrize(
    ("right", "wrong", "clause"),
    [
        ("done[name] = 0 if word == \"evict\" else done[name]", "pass", "LIFE-3"),
        ("free.append(slot.pop(name))", "free += [slot[name], slot.pop(name)]", "LIFE-6"),
        ("\"accept\": accept", "\"accept\": 0", "SPEC-3"),
        ("done[name] += 1 + accept", "done[name] += 1", "CONT-1"),
    ],
)  # fmt: skip
def test_and_a_fault_in_it_is_told_with_its_clause_and_made_small(
    right: str, wrong: str, clause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = strangers_scheduler()
    assert right in code
    words = ("schedules", "--engine", "my_scheduler:adapter", "--mixer", "kda", "--count", "25")
    done = try_stranger(code.replace(right, wrong), tmp_path, monkeypatch, *words)
    assert done.exit_code == 1
    assert f"({clause})" in done.output
    failed = json.loads((tmp_path / "out").read_text("utf-8"))["mixers"]["kda"]["failed"]
    assert len(failed[0]["smallest"]["requests"]) <= 2


def test_it_passes_the_vectors_of_engines() -> None:
    space: dict[str, Any] = {}
    exec(strangers_scheduler(), space)
    run = space["adapter"].operations["engine.run"]
    stories = [v["args"] for v in load_vectors().values() if v["op"] == "engine.run" and v["class"] == "exact"]
    assert len(stories) > 30
    for story in stories:
        assert judge(**story, log=run(**story)) == PASS, story


def test_the_recorded_run_of_the_reference_has_no_failure() -> None:
    book = json.loads((Path(conformance.__file__).parent / "schedules.json").read_text("utf-8"))
    assert (book["implementation"], book["first"], set(book["mixers"])) == ("reference", 0, set(KINDS))
    assert all(row["count"] == row["passed"] >= 10_000 and not row["failed"] for row in book["mixers"].values())
    assert book["date"]
    assert book["environment"]["numpy"]
