"""The runner, tried on implementations that behave badly: one bad call is one result, and the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from statescan.conformance import report as reports
from statescan.conformance import runner
from statescan.conformance.adapter import ALL_FEATURES
from statescan.conformance.cases import prepare
from statescan.conformance.client import Client, ProtocolError, python_command
from statescan.conformance.runner import Selection, Target
from statescan.conformance.smoke import check_wiring
from statescan.goldens.store import load_vectors

HERE = Path(__file__).parent
CORPUS = load_vectors()
CHOSEN = [CORPUS[key] for key in (
    "conv-update-one-token", "conv-update-bias-once", "conv-update-guards-keep-their-bits",
    "conv-update-padding-row-is-zero", "conv-update-one-row", "conv-update-same-call-same-bits",
    "conv-update-slot-past-the-pool",
)]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(HERE)


def run(name: str, vectors=CHOSEN, seconds: float = 20.0) -> dict[str, dict]:
    """Results by vector, smoke left out."""
    with Client(python_command(f"miniatures:{name}"), run_seconds=seconds) as client:
        return {row["vector"]: row for row in runner.results(client, vectors, CORPUS, None)}


def statuses(rows) -> set[str]:
    return {row["status"] for row in rows.values()}


def test_a_right_implementation_passes():
    assert statuses(run("right")) == {"pass"}


def test_a_plain_mapping_is_an_adapter():
    assert statuses(run("plain")) == {"pass"}


@pytest.mark.parametrize("name", ["crashes", "aborts"])
def test_a_crash_is_one_result(name):
    rows = run(name)
    assert rows["conv-update-padding-row-is-zero"]["status"] == "error"
    assert "exit code 7" in rows["conv-update-padding-row-is-zero"]["message"] or name == "aborts"
    assert "SIGABRT" in rows["conv-update-padding-row-is-zero"]["message"] or name == "crashes"
    assert rows["conv-update-one-row"]["status"] == "pass"


def test_a_hang_is_one_result():
    rows = run("hangs", seconds=1.0)
    assert rows["conv-update-padding-row-is-zero"]["status"] == "timeout"
    assert rows["conv-update-one-row"]["status"] == "pass"


def test_prints_do_not_disturb():
    assert statuses(run("prints")) == {"pass"}


@pytest.mark.parametrize(("name", "status"), [
    ("wrong_shape", "fail.shape"), ("wrong_type", "fail.dtype"), ("unwritten", "fail.unwritten"),
    ("writes_input", "fail.touched"), ("reversed_taps", "fail.value"), ("claims_then_refuses", "error"),
])  # fmt: skip
def test_each_fault_has_its_status(name, status):
    assert run(name)["conv-update-bias-once"]["status"] == status


def test_a_written_guard_is_found_by_its_slot():
    row = run("writes_guard")["conv-update-guards-keep-their-bits"]
    assert row["status"] == "fail.touched"
    assert row["tensor"] == "conv_pool"
    assert row["place"]["slot"] == 0


def test_the_first_bad_place_is_named():
    row = run("reversed_taps")["conv-update-one-row"]
    assert row["place"] == {"row": 0, "token": 0, "channel": 0}
    assert "got" in row["message"]


def test_an_ignored_argument_is_a_silent_failure():
    vectors = [CORPUS["conv-update-rows-of-fewer-tokens"]]
    (row,) = run("ignores_tokens", vectors).values()
    assert row["status"] == "fail.silent"


def test_no_result_is_no_wrong_result_where_none_is_claimed():
    (row,) = run("windowless", [CORPUS["conv-final-window-from-nothing"]]).values()
    assert (row["status"], row["missing"]) == ("not_applicable", "state.out")


def test_no_result_is_a_failure_where_one_is_claimed():
    (row,) = run("forgets_windows", [CORPUS["conv-final-window-from-nothing"]]).values()
    assert (row["status"], row["message"]) == ("fail.shape", "final_windows is None, a tensor expected")


@pytest.mark.parametrize(("kept", "short"), [("window.W", False), ("window.W-1", True)])
def test_a_relation_leaves_out_the_column_that_one_of_its_operations_lacks(kept, short):
    words = [word for word in ALL_FEATURES if not word.startswith("window")]
    claims = [{"op": "causal_conv1d_update", "features": [*words, "window.W"]},
              {"op": "causal_conv1d_prefill", "features": [*words, kept]}]  # fmt: skip
    assert prepare(CORPUS["conv-update-equals-prefill"], CORPUS, claims).short_windows is short


def test_what_is_not_claimed_does_not_apply():
    (row,) = run("right", [CORPUS["conv-taps-newest-last"]]).values()
    assert (row["status"], row["missing"]) == ("not_applicable", "causal_conv1d")


def test_time_that_is_up_is_not_a_pass():
    with Client(python_command("miniatures:right")) as client:
        rows = list(runner.results(client, CHOSEN, CORPUS, -1.0))
    assert {row["status"] for row in rows} == {"not_run"}


def test_a_missing_package_is_said_and_is_no_error():
    made = runner.run_target(Target("absent", python_command("miniatures:absent")), CHOSEN, CORPUS, None, print)
    assert made["state"] == "not installed"
    assert made["results"] == []


def test_smoke_names_what_is_wired_wrongly():
    with Client(python_command("miniatures:reversed_taps")) as client:
        assert check_wiring(client)
    with Client(python_command("miniatures:right")) as client:
        assert check_wiring(client) == ""


@pytest.mark.parametrize("script", [
    "print('hello')", "import sys; sys.exit(3)",
    "import sys; sys.stdin.readline(); print('{\"id\": 99, \"ok\": true}')",
    "import sys; sys.stdin.readline(); print('{\"id\": 1, \"ok\": true, \"more\": 1}')",
    "import sys; sys.stdin.readline(); print('{\"id\": 1, \"ok\": NaN}')",
    "import sys; sys.stdin.readline(); print('x' * 3000000)",
])  # fmt: skip
def test_a_child_that_does_not_speak_the_protocol_is_stopped(script):
    with pytest.raises(ProtocolError), Client([sys.executable, "-c", script]):
        pass


def test_a_subprocess_of_any_language_is_a_target():
    chosen = runner.target("run:./mykernels --fast")
    assert (chosen.command, chosen.rung) == (["./mykernels", "--fast"], "subprocess")
    with pytest.raises(ValueError, match="--impl"):
        runner.target("nothing")


def test_text_from_outside_is_shown_and_not_obeyed(tmp_path):
    targets = [Target("escapes", python_command("miniatures:escapes"))]
    made = runner.run(targets, Selection("full", ["conv-update-one-row"]))
    row = runner.result(CHOSEN[0], runner.Verdict("error", "\x1b[31m<b>x</b>"))
    made["runs"][0] |= {"state": "ran", "results": [row]}
    data, page = reports.write(made, tmp_path)
    text = page.read_text("utf-8")
    assert "<b>x</b>" not in text
    assert "\x1b" not in text
    assert "\\x1b[31m" in text
    assert json.loads(data.read_text("utf-8"))["format"] == "statescan.report/1"
    assert "http://" not in text
    assert "https://" not in text.replace(made["runs"][0].get("source", "-"), "")


def test_selection_by_clause_family_profile_and_pattern():
    def picked(profile="full", *only):
        return {v["id"] for v in CORPUS.values() if Selection(profile, only).picks(v)}

    assert picked("full", "CONV-9") == {v["id"] for v in CORPUS.values() if "CONV-9" in v["clauses"]}
    assert "seq-idx-of-the-seed" in picked("full", "PACK")
    assert picked("full", "conv-update-one-[rt]*") == {"conv-update-one-row", "conv-update-one-token"}
    assert all(CORPUS[key]["profile"] == "Speculative" for key in picked("Speculative"))


def test_the_quick_profile_has_a_limit_and_our_own_have_a_wider_one():
    ours, peer = (Target(name, ("true",)) for name in ("fast", "fla"))
    quick, full = Selection(), Selection("full")
    assert (runner.limit_of(ours, quick, None), runner.limit_of(peer, quick, None)) == (120.0, 60.0)
    assert runner.limit_of(peer, full, None) is None
    assert runner.limit_of(ours, full, 7.0) == 7.0
