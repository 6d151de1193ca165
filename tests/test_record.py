"""Recorded calls: stored as they were, judged right or wrong, shrunk, and never in the way of what they record."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from statescan.conformance import Adapter, record
from statescan.conformance.cli import main
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.mutants import models, mutant
from statescan.conformance.recorded import load
from statescan.conformance.replay_call import candidates, judge_recorded
from statescan.conformance.replay_mutants import OPERATIONS_TRIED, Wrong, small_calls, try_one
from statescan.conformance.shrink import shrink, shrink_record
from statescan.spec.contract import SlotError

ROOT = Path(__file__).parents[1]
RIGHT = next(iter(models().values()))
SMALL = {op: (given, function) for op, given, function in small_calls()}


def recorded(op: str, function, given, folder, **more):
    record(op, folder, **more)(function)(**given)
    return load(Path(folder) / "000001.json")


@pytest.mark.parametrize("op", OPERATIONS_TRIED)
def test_a_right_call_is_right_and_its_negative_is_not(op, tmp_path):
    given, function = SMALL[op]
    call = recorded(op, function, given, tmp_path)
    judged = judge_recorded(call, "f32", seconds=0)
    assert judged.verdict.passed, judged.verdict.message
    assert judged.places == 1
    name = call.call.results[0].name
    call.reply.outputs[name][...] = -call.reply.outputs[name]
    wrong = judge_recorded(call, "f32", seconds=0).verdict
    assert wrong.status == "fail.value"
    assert wrong.message.startswith(f"{name}[0, 0")
    assert wrong.score > 1


def test_what_is_stored_is_the_call(tmp_path):
    given, function = SMALL["gated_delta_rule_update"]
    pool = np.zeros((500, *given["state_pool"].shape[1:]), np.float32)
    slots = np.array([40, -1, 7, 12], np.int32)[: len(given["read_slots"])]
    pool[slots] = 1 + np.arange(len(slots))[:, None, None, None]
    before = pool.copy()
    given = {**given, "state_pool": pool, "read_slots": slots, "write_slots": None, "scale": np.float64(0.5)}
    stored = recorded("gated_delta_rule_update", function, given, tmp_path)
    assert stored.slots == (7, 12, 40)
    assert stored.pool_slots == 500
    assert stored.call.tensors["read_slots"].tolist() == [2, -1, 0, 1]
    assert (stored.call.tensors["state_pool"] == before[[7, 12, 40]]).all()
    assert (stored.reply.outputs["after.state_pool"] == pool[[7, 12, 40]]).all()
    assert (pool[[7, 12, 40]] != before[[7, 12, 40]]).any()
    assert stored.call.args == {"scale": 0.5}
    assert (tmp_path / "000001.safetensors").stat().st_size < pool.nbytes / 8
    assert stored.others == ()


def test_torch_bfloat16_and_strides(tmp_path):
    x = torch.randn(2, 1, 6).to(torch.bfloat16)[:, :, ::2]
    given = {"x": x, "weight": torch.randn(3, 4).to(torch.bfloat16), "bias": None,
             "conv_pool": torch.randn(5, 3, 4).to(torch.bfloat16), "read_slots": torch.tensor([4, 1])}  # fmt: skip

    def convolve(x, weight, bias, conv_pool, read_slots):
        window = torch.cat([conv_pool[read_slots][:, :, 1:], x.transpose(1, 2)], 2)
        conv_pool[read_slots] = window
        return (window.double() * weight.double()).sum(2)[:, None].to(x.dtype)

    stored = recorded("causal_conv1d_update", convolve, given, tmp_path)
    assert stored.call.tensors["x"].dtype.name == "bfloat16"
    assert stored.strides == {"x": (6, 6, 2)}
    assert stored.implementation.endswith("convolve")
    assert judge_recorded(stored).verdict.passed


def test_a_slot_that_nobody_named_is_seen(tmp_path):
    given, function = SMALL["gated_delta_rule_update"]
    pool = np.concatenate([given["state_pool"], np.full_like(given["state_pool"], np.nan)])

    def careless(**named):
        o = function(**named)
        named["state_pool"][-2] = 0
        return o

    stored = recorded("gated_delta_rule_update", careless, {**given, "state_pool": pool}, tmp_path)
    assert stored.others == (len(pool) - 2,)
    verdict = judge_recorded(stored).verdict
    assert (verdict.status, verdict.place["slot"]) == ("fail.touched", len(pool) - 2)


def test_a_recorder_never_breaks_what_it_records(tmp_path):
    given, function = SMALL["causal_conv1d_update"]
    step = record("causal_conv1d_update", tmp_path / "no" / "x", max_bytes=10)(function)
    with pytest.warns(UserWarning, match="max_bytes=10"):
        step(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**given)  # told once
        record("causal_conv1d_update", tmp_path / "few", most=2)(function)(**given)
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="was not recorded"):
        record("causal_conv1d_update", tmp_path / "file")(function)(**given)
    with pytest.raises(SlotError):
        record("causal_conv1d_update", tmp_path / "r")(function)(**{**given, "read_slots": given["read_slots"] + 99})
    refused = load(tmp_path / "r" / "000001.json")
    assert (refused.reply.status, refused.reply.error) == ("rejected", "SlotError")
    assert judge_recorded(refused).verdict.passed
    with pytest.raises(ValueError, match="is no operation that can be recorded"):
        record("ssm_chunking", tmp_path)


def test_how_many_and_which_calls_are_kept(tmp_path):
    given, function = SMALL["causal_conv1d_update"]
    step = record("causal_conv1d_update", tmp_path, most=2, every=3, only=lambda a: a["x"].shape[0] > 1)(function)
    for _ in range(12):
        step(**given)
    assert sorted(p.name for p in tmp_path.glob("*.json")) == ["000001.json", "000002.json"]


def test_a_block_is_recorded_too_with_its_error(tmp_path):
    given, function = SMALL["causal_conv1d_update"]
    with record("causal_conv1d_update", tmp_path, **given) as call:
        call.returns(function(**given))
    assert judge_recorded(load(tmp_path / "000001.json")).verdict.passed
    with pytest.raises(RuntimeError), record("causal_conv1d_update", tmp_path, **given):
        raise RuntimeError("out of memory")
    assert judge_recorded(load(tmp_path / "000002.json")).verdict.status == "error"


def test_a_bad_call_that_was_taken_is_wrong(tmp_path):
    given, _ = SMALL["gated_delta_rule_prefill"]
    slots = np.full_like(given["read_slots"], 1)
    taken = mutant("duplicate-write-accepted")["gated_delta_rule_prefill"]
    call = recorded("gated_delta_rule_prefill", lambda **g: taken(**g),
                    {**given, "read_slots": slots, "write_slots": slots}, tmp_path)  # fmt: skip
    verdict = judge_recorded(call).verdict
    assert verdict.status == "fail.accepted"
    assert "SLOT-4" in verdict.message


def test_a_wrong_call_of_the_size_of_production_is_shrunk():
    wrong = Wrong("state-leaks-across-boundary", "gated_delta_rule")
    judged, small = try_one(wrong)
    assert judged.verdict.status == "fail.value"
    assert small is not None
    assert not small.verdict.passed
    axes = small.size
    assert axes["HV"] == 1
    assert axes.get("T", axes.get("J", 0)) <= 2
    assert axes["K"] * axes["V"] <= 4
    assert wrong.fault in candidates(small.piece, small.reply, judged)


def test_the_recorded_twenty():
    made = json.loads((ROOT / "conformance" / "replay_mutants.json").read_text("utf-8"))
    assert made["wrong calls"] == len(made["rows"]) == 20
    assert made["shrunk"] == sum(row["shrunk"] for row in made["rows"]) >= 18
    for row in made["rows"]:
        assert row["first"]
        assert not row["shrunk"] or (row["tokens"] < 16 and row["heads"] < 2 and row["seconds"] < 60)


def test_without_the_implementation_the_record_itself_is_cut(tmp_path):
    given, _ = SMALL["gated_delta_rule_prefill"]
    fault = mutant("decay-of-previous-token")["gated_delta_rule_prefill"]
    judged = judge_recorded(recorded("gated_delta_rule_prefill", lambda **g: fault(**g), given, tmp_path), "f32")
    small = shrink_record(judged)
    assert small.size["HV"] == small.size["N"] == small.size["V"] == 1
    assert small.verdict.status == "fail.value"


ADAPTER = """
from statescan.conformance import Adapter
from statescan.conformance.mutants import mutant
adapter = Adapter("wrong")
adapter.op("gated_delta_rule_update")(mutant("decay-after-write")["gated_delta_rule_update"])
"""


def test_replay_as_a_user_types_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_kernels.py").write_text(ADAPTER)
    given, right = SMALL["gated_delta_rule_update"]
    wrong = mutant("decay-after-write")["gated_delta_rule_update"]
    for function in (lambda **g: wrong(**g), right):
        record("gated_delta_rule_update", "calls")(function)(**{k: np.copy(v) if isinstance(v, np.ndarray) else v
                                                               for k, v in given.items()})  # fmt: skip

    def call(*words: str):
        return CliRunner().invoke(main, ["replay", *words, "--operand", "f32"])

    right_one = call("calls/000002.json")
    assert (right_one.exit_code, right_one.output[:5]) == (0, "right")
    alone = call("calls/000001.json")
    assert alone.exit_code == 1
    assert "decay-after-write" in alone.output
    assert not judge_recorded(load(Path("calls/000001_small.json")), "f32").verdict.passed
    done = call("calls/000001.json", "--impl", "wrong_kernels:adapter")
    assert done.exit_code == 1, done.output
    assert "decay-after-write" in done.output
    still = done.output.splitlines()[-2].strip()
    script = subprocess.run([sys.executable, "calls/000001_small.py"], capture_output=True, text=True, timeout=60)
    assert script.returncode == 1, script.stderr
    place, _, said = script.stdout.strip().partition(": ")
    assert still.startswith(place)
    assert said in still


def test_what_the_implementation_does_right_now_is_said(tmp_path):
    given, function = SMALL["gated_delta_rule_update"]
    wrong = mutant("decay-after-write")["gated_delta_rule_update"]
    judged = judge_recorded(recorded("gated_delta_rule_update", lambda **g: wrong(**g), given, tmp_path), "f32")
    assert not judged.verdict.passed
    healed = Adapter("healed")
    healed.op("gated_delta_rule_update")(function)
    assert shrink(judged, lambda call: invoke(healed, isolated(call))) is None
