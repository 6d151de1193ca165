"""The benchmark and the GPU check, as far as they go without a GPU."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from statescan.conformance.adapters import interpreter
from statescan.conformance.calls import Call
from statescan.conformance.invoke import isolated
from statescan.fast.bench import bench, check_gpu, timing, yardsticks
from statescan.fast.bench import conv as rows_of_conv
from statescan.fast.bench.conv import Work
from statescan.fast.conv_launch import Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    interpreter.look_once()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of memory are enough where nothing is timed."""
    monkeypatch.setattr(yardsticks, "ROTATED", 1)
    monkeypatch.setattr(yardsticks, "SLOT", 512)
    monkeypatch.setattr(yardsticks, "SHAPES", ((64, 1), (128, 4)))


def test_the_yardsticks_move_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch, "empty_like", lambda t: made.append((t, torch.zeros_like(t))) or made[-1][1])
    for _, launches in yardsticks.copies(8 * 300, DEVICE):
        assert len(launches) == 2
        for launch in launches:
            launch()
    ((source, target),) = made
    assert torch.equal(source[:, :300], target[:, :300])
    for _, launches in yardsticks.updates(4 * 512, DEVICE):
        launches[1]()


def test_an_update_writes_back_what_it_read() -> None:
    pool = torch.arange(6 * 128, dtype=torch.int32, device=DEVICE).view(6, 128)
    before, slots = pool.clone(), torch.tensor([4, 1], dtype=torch.int32, device=DEVICE)
    yardsticks.update_kernel[(4,)](pool, slots, 0, SLOT_WORDS=128, BLOCK=64)
    assert torch.equal(pool, before)
    yardsticks.update_kernel[(4,)](pool, slots, -1, SLOT_WORDS=128, BLOCK=64)
    assert torch.equal(pool[[4, 1]], ~before[[4, 1]])
    assert torch.equal(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


SMALL = [Work("conv prefill", "", 16, (3, 0, 4)), Work("conv prefill", "", 16, (3, 2), pitched=True),
         Work("conv update", "", 16, rows=3, steps=2, entries=True), Work("conv update", "", 16, rows=2, layout="CW"),
         Work("conv training", "", 16, (3, 4)), Work("gated norm", "", 256, (3,)), Work("kda gate", "", 4096, (2,))]


@pytest.mark.parametrize("work", SMALL, ids=lambda work: work.name)
def test_every_kind_of_row_runs(work: Work) -> None:
    ready = rows_of_conv.prepare(work, DEVICE)
    launches = ready.ours()
    assert len(launches) == len(ready.x) == 2
    assert len({int(slot) for slots in ready.slots for slot in slots}) == 2 * len(ready.slots[0])
    results = launches[1]()
    for result in results if isinstance(results, tuple) else (results,):
        assert bool(result.isfinite().all())


def test_a_tile_of_ones_own_gives_the_same() -> None:
    for work in (SMALL[0], SMALL[2]):
        pair = [rows_of_conv.prepare(work, DEVICE) for _ in range(2)]
        results = [pair[0].ours()[0](), pair[1].ours(Tile(2 if work.rows else 4, 8, 1))[0]()]
        assert torch.equal(*results)
        assert torch.equal(pair[0].pool, pair[1].pool)


def test_rows_have_names_of_their_own_and_bytes_counted() -> None:
    table = [work for _, work in bench.chosen([])]
    assert len({work.name for work in table}) == len(table)
    assert all(work.moved > 0 and work.yardstick in yardsticks.YARDSTICKS for work in table)
    prefill = Work("conv prefill", "1.15 copy", 8192, (8192,))
    assert prefill.moved == 2 * (2 * 8192 * 8192 + 7 * 8192)
    assert Work("conv update", "", 8192, rows=256).moved == 2 * 256 * 8192 * 9
    assert next(work.name for _, work in bench.chosen(["conv update B=1 "])) == "conv update B=1 C=8192"


ROW = {"row": "x", "moved": 10**6, "us": 3.0, "tb_s": 0.33, "yardstick_us": 2.5, "ratio": 1.2, "host_us": 9.0,
       "peers": {"slow": 6.0, "slower": 9.0}, "failed": {"broken": "why"}}  # fmt: skip


@pytest.mark.parametrize(("target", "said"), [("3.3 us", "yes"), ("2.9 us", "no"), ("1.15 copy", "no"),
                                              ("1.4 update", "yes"), ("", "")])  # fmt: skip
def test_targets_are_times_or_ratios(target: str, said: str) -> None:
    row = {**ROW, "target": target}
    assert bench.meets(row) == said
    assert "slow 6.0 us (2.00x)  broken FAILED" in bench.line(row)


def test_a_result_is_named_by_date_device_and_what() -> None:
    facts = {"date": "2026-01-02", "device": "NVIDIA H200"}
    assert bench.result_name(facts, "conv") == "2026-01-02-h200-conv.json"


def test_ratios_are_taken_round_by_round() -> None:
    assert timing.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 2.0]) == 2.0
    assert timing.median([3.0, 1.0, 2.0]) == 2.0


def test_results_that_are_kept_are_whole() -> None:
    for path in bench.RESULTS.glob("*.json"):
        made = json.loads(path.read_text("utf-8"))
        assert {"date", "device", "torch", "triton", "statescan"} <= set(made["environment"])
        for row in made["rows"]:
            if "row" in row:
                assert row["us"] > 0
                assert row["yardstick_us"] > 0
            else:
                assert row["wrong"] == "", path.name
        suites = [row for name, rows in made.items() if name.startswith("suite") for row in rows]
        assert all(row["failed"] == {} and row["statuses"]["pass"] > 0 for row in suites)


@pytest.mark.skipif(DEVICE == "cuda", reason="the check itself is for a GPU")
def test_the_suite_of_the_check_runs_in_process() -> None:
    jobs = list(check_gpu.suite_jobs(4))
    assert len(jobs) == len(set(jobs)) == 24
    part = check_gpu.run_suite(("bf16", "KV", 5, 60))
    assert part["failed"] == {}
    assert part["statuses"].get("pass", 0) > 0


def test_a_check_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def wrong() -> None:
        raise AssertionError("3 for 4")

    assert "AssertionError: 3 for 4 (test_fast_bench.py" in check_gpu.line(check_gpu.attempt("x", wrong))
    assert check_gpu.line(check_gpu.attempt("y", lambda: None)).endswith("ok")


def test_strides_of_a_story_are_kept_in_process() -> None:
    base = np.arange(12.0)[::3]
    story = Call("l2norm", {}, {"x": base})
    copied = isolated(story).tensors["x"]
    assert copied.strides == base.strides
    assert np.array_equal(copied, base)
    assert not np.shares_memory(copied, base)
