"""What a build and a user ask of a report: known failures, changes, JUnit, a badge, fresh vectors, reasons, scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from test_smoke import InProcess

from statescan.conformance import ci, cli, commands, runner
from statescan.conformance import explain as explaining
from statescan.conformance import report as reports
from statescan.conformance.calls import Call, strided
from statescan.conformance.cli import main
from statescan.conformance.client import Client, python_command
from statescan.conformance.fresh import drawn
from statescan.conformance.scripts import Side, write_script
from statescan.conformance.smoke import check_wiring
from statescan.goldens.store import FormatError, check_schema, load_corpus
from statescan.goldens.tensors import DTYPES

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "conformance" / "examples"
CORPUS = load_corpus()
ONLY = "conv-update-[bo]*"
TWO = """
import numpy as np
from statescan.conformance import Adapter
from statescan.reference import conv, delta
adapter = Adapter("mine", "1")
@adapter.op("causal_conv1d_update", operand="f64")
def update(x, weight, *given, **named):
    return conv.causal_conv1d_update(x, weight{taps}, *given, **named)
"""


IN_TORCH = """
import torch
from statescan.conformance import Adapter
adapter = Adapter("torch", arrays="torch")
@adapter.op("causal_conv1d_update", features=["slot.pool", "act.none", "width:4", "window.W"])
def update(x, weight, bias, conv_pool, read_slots, *, activation=None):
    window = torch.cat([conv_pool[read_slots.long()][:, :, 1:], x.transpose(1, 2)], 2)
    conv_pool[read_slots.long()] = window
    return (window * weight.flip(1)).sum(2)[:, None].to(x.dtype)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (commands, reports, cli, ci, runner, explaining):
        if hasattr(module, "load_corpus"):
            monkeypatch.setattr(module, "load_corpus", lambda: CORPUS)
    Path("right_one.py").write_text(TWO.replace("{taps}", ""))
    Path("wrong_one.py").write_text(TWO.replace("{taps}", "* 1.5"))


def call(*words: str):
    return CliRunner().invoke(main, list(words), env={"COLUMNS": "200"})


def run(name: str, *words: str, out: str = "out"):
    done = call("run", "--impl", f"{name}:adapter", "--only", ONLY, "--out", out, *words)
    return done, reports.read(Path(out) / "report.json") if (Path(out) / "report.json").exists() else {}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, dict]:
    """A report of the wrong one and of the right one; a smoke test would stop the wrong one, as it should."""
    place = tmp_path_factory.mktemp("made")
    found = {}
    for name, taps in (("right_one", ""), ("wrong_one", "* 1.5")):
        (place / f"{name}.py").write_text(TWO.replace("{taps}", taps))
        command = python_command(f"{name}:adapter")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            patch.setattr(runner, "check_wiring", lambda client: "")
            chosen = [v for v in CORPUS.values() if runner.Selection("full", [ONLY]).picks(v)]
            run_ = runner.run_target(runner.Target("x", command), chosen, CORPUS, None, lambda *_: None)
        found[name] = {**_report([]), "runs": [run_]}
    return found


def failed_in(report) -> list[str]:
    return [row["vector"] for row in report["runs"][0]["results"] if reports.failed(row["status"])]


def test_known_failures_have_reasons_and_must_go_on_failing(made):
    failed = failed_in(made["wrong_one"])
    assert failed
    known = dict.fromkeys(failed, "taps are scaled, see our issue 7")
    for name, status, bad in (("wrong_one", "xfail", False), ("right_one", "xpass", True)):
        marked = ci.mark_known(made[name], known)
        rows = [row for row in marked["runs"][0]["results"] if row["vector"] in failed]
        assert {row["status"] for row in rows} == {status}
        assert reports.exit_code(marked, ["x"]) == bad
        check_schema("report", marked, "report")
        assert all("issue 7" in row["known"] for row in rows)


def test_a_list_of_known_failures_without_vectors_or_reasons_is_refused():
    for text in ('{"no-such-vector": "a reason"}', '{"conv-update-one-row": ""}', "[]", "{", '{"a": 1}'):
        Path("known.json").write_text(text)
        with pytest.raises(FormatError):
            ci.read_known(Path("known.json"))
    assert call("run", "--impl", "right_one:adapter", "--known", "known.json").exit_code == 2


def test_what_changed_is_told_and_nothing_else(made):
    right, wrong = made["right_one"], made["wrong_one"]
    assert not list(ci.changes(right, right))
    changed = {vector: (was, now) for _, vector, was, now, _ in ci.changes(right, wrong)}
    assert set(changed) == set(failed_in(wrong))
    assert {was for was, _ in changed.values()} == {"pass"}
    assert ci.got_worse(right, wrong)
    assert not ci.got_worse(wrong, right)
    assert not ci.got_worse(wrong, wrong)  # as bad as before


def test_all_of_it_as_a_build_types_it(monkeypatch, made):
    monkeypatch.setattr(runner, "check_wiring", lambda client: "")
    failed = failed_in(made["wrong_one"])
    Path("known.json").write_text(json.dumps({failed[0]: "taps are scaled, see our issue 7"}))
    before = {**made["right_one"], "runs": [{**made["right_one"]["runs"][0], "implementation": "wrong_one:adapter"}]}
    reports.write(before, Path("out"))
    done, after = run("wrong_one", "--known", "known.json", "--track", "--junit", "j/u.xml", "--badge", "j/b.json")
    assert done.exit_code == 1
    told = [line.split()[2:5] for line in done.output.splitlines() if line.startswith("pass -> ")]
    assert sorted(words[-1] for words in told) == sorted(failed)
    assert f"pass -> xfail {CORPUS[failed[0]]['clauses'][0]} {failed[0]}" in done.output
    assert {row["status"] for row in after["runs"][0]["results"] if row["vector"] == failed[0]} == {"xfail"}
    assert ElementTree.fromstring(Path("j/u.xml").read_bytes())[0].get("failures") == str(len(failed) - 1)
    assert json.loads(Path("j/b.json").read_text())["color"] == "red"


def test_junit_and_badge(made):
    report = made["wrong_one"]
    (suite,) = ElementTree.fromstring(ci.junit(report))
    rows = report["runs"][0]["results"]
    assert int(suite.get("tests")) == len(suite) == len(rows)
    failures = {case.get("name") for case in suite if case.find("failure") is not None}
    assert failures == {row["vector"] for row in rows if row["status"].startswith("fail")}
    assert int(suite.get("failures")) == len(failures) > 0
    passed = sum(row["status"] == "pass" for row in rows)
    judged = sum(row["status"] not in reports.NOT_JUDGED for row in rows)
    badge = ci.badge(report["runs"][0])
    assert (badge["message"], badge["color"]) == (f"{passed} of {judged}", "red")
    assert ci.badge(made["right_one"]["runs"][0])["color"] == "brightgreen"
    nothing = {**report["runs"][0], "results": []}
    assert ci.badge(nothing)["color"] == "lightgrey"
    hostile = {**rows[0], "status": "error", "message": "\x1b[31m\x00<b>&\ud800"}
    text = ci.junit({**report, "runs": [{**nothing, "implementation": "\x07", "results": [hostile]}]})
    assert b"\x1b" not in text
    assert ElementTree.fromstring(text) is not None


def test_fresh_vectors_are_new_each_time_and_pass_on_what_is_right():
    first, again = (list(drawn(CORPUS, 40)) for _ in range(2))
    assert len({v["id"] for v in first}) == len(first) == 40
    assert not {v["seed"] for v in first} & {v["seed"] for v in again}
    assert {v["op"] for v in first} >= {"causal_conv1d", "gated_delta_rule_update", "ssd_update"}
    assert not any(v["expect"] for v in first)
    wanted = [v for v in first if v["op"] == "causal_conv1d_update"]
    for name, statuses in (("right_one", {"pass"}), ("wrong_one", {"fail.value"})):
        with Client(python_command(f"{name}:adapter")) as client:
            rows = list(runner.results(client, wanted, CORPUS, None))
        assert {row["status"] for row in rows} == statuses
        check_schema("report", _report(rows), "report")
        assert reports.html(_report(rows))


def _report(rows):
    return {"format": "statescan.report/1", "suite": "0", "rules": 1, "corpus": "sha256:" + "0" * 64, "date": "",
            "profile": "full", "environment": {},
            "runs": [{"implementation": "x", "state": "ran", "results": rows}]}  # fmt: skip


def test_explain_says_what_the_report_says_and_why(made):
    reports.write(made["wrong_one"], Path("out"))
    said = call("explain", "out/report.json", "conv-update-one-row").output
    row = next(r for r in reports.read(Path("out/report.json"))["runs"][0]["results"]
               if r["vector"] == "conv-update-one-row")  # fmt: skip
    for part in (row["message"], CORPUS["conv-update-one-row"]["effect"], "MUST", "statescan repro"):
        assert part in said.replace("\n", " ") or part in said
    assert call("explain", "out/report.json", "nothing-like-it").exit_code == 2


def test_a_script_prints_what_the_report_says():
    impl, vector = "wrong_one:adapter", "conv-update-silu"
    done = call("repro", vector, "--impl", impl)
    assert done.exit_code == 1, done.output
    message = done.output.splitlines()[0].partition(": ")[2]
    script = subprocess.run([sys.executable, f"{vector}.py"], capture_output=True, text=True, timeout=120)
    assert script.returncode == 1, script.stderr
    place, _, said = script.stdout.strip().partition(": ")
    assert message.startswith(place)
    assert said in message
    text = Path(f"{vector}.py").read_text()
    assert "goldens" not in text
    assert len([line for line in text.splitlines() if line.strip()]) < 40


def test_a_script_in_torch():
    Path("in_torch.py").write_text(IN_TORCH)
    x = np.array([[[1, 2]], [[3, 4]]], DTYPES["bf16"])
    tensors = {"x": strided(x), "weight": np.ones((2, 4), DTYPES["bf16"]), "conv_pool": np.ones((3, 2, 4), x.dtype),
               "read_slots": np.array([2, 0], np.int32)}  # fmt: skip
    call_ = Call("causal_conv1d_update", {"activation": None}, tensors)
    write_script(Path("s.py"), "in_torch:adapter", [Side("a", call_, "y", {})], "told", (1, 0, 1), "7", arrays="torch")
    script = subprocess.run([sys.executable, "s.py"], capture_output=True, text=True, timeout=120)
    assert (script.returncode, script.stdout.strip()) == (0, "y[1, 0, 1]: got 7, expected 7"), script.stderr
    assert "torch.empty_strided([2, 1, 2]" in Path("s.py").read_text()


def test_a_script_of_a_relation_shows_both_sides():
    Path("forgets.py").write_text(
        "import numpy as np\nfrom statescan.conformance import Adapter\nfrom statescan.reference import conv\n"
        "adapter = Adapter('forgets')\nseen = []\n"
        "@adapter.op('causal_conv1d_update', operand='f64')\n"
        "def update(*given, **named):\n"
        "    seen.append(1)\n    y = conv.causal_conv1d_update(*given, **named)\n"
        "    return y + y.dtype.type(len(seen))\n"
    )
    done = call("repro", "conv-update-same-call-same-bits", "--impl", "forgets:adapter")
    assert done.output.startswith("fail.unstable")
    script = subprocess.run([sys.executable, "conv-update-same-call-same-bits.py"], capture_output=True, text=True)
    assert script.returncode == 1, script.stderr
    assert " in a, " in script.stdout


def test_nothing_to_show_is_said():
    assert "pass" in call("repro", "conv-update-one-row", "--impl", "right_one:adapter").output
    assert call("repro", "no-such-vector", "--impl", "right_one:adapter").exit_code == 2


# ---------------------------------------------------------------------------------------------------------------------
# A new user
# ---------------------------------------------------------------------------------------------------------------------

KERNELS = """
import numpy as np

def step(q, k, v, g, beta, pool, slots, scale):
    o = np.zeros_like(v)
    group = v.shape[2] // q.shape[2]
    for n, slot in enumerate(slots):
        for j in range(v.shape[1] if slot >= 0 else 0):
            for h in range(v.shape[2]):
                state, key = pool[slot, h].astype(np.float64), k[n, j, {head}].astype(np.float64)
                state = {view} * {decay}
                state = state + np.outer(key, beta[n, j, h] * (v[n, j, h] - key @ state))
                o[n, j, h] = scale * q[n, j, {head}].astype(np.float64) @ state
                pool[slot, h] = {back}
    return o
"""
ADAPTER = """
from statescan.conformance import Adapter
import mykernels

adapter = Adapter("mykernels")

@adapter.op("gated_delta_rule_update", features=["slot.pool", "slot.negative", "tokens.many", "heads.gva"],
            dtypes=[{"q": "f32", "g": "f32", "beta": "f32", "state_pool": "f32"}])
def update(q, k, v, g, beta, state_pool, read_slots, *, scale=None):
    return mykernels.step(q, k, v, g, beta, state_pool, read_slots, q.shape[3] ** -0.5 if scale is None else scale)
"""
RIGHT = {"head": "h // group", "view": "state", "back": "state", "decay": "np.exp(float(g[n, j, h]))"}


def write_user(**wrong: str) -> None:
    text = KERNELS
    for name, code in {**RIGHT, **wrong}.items():
        text = text.replace("{" + name + "}", code)
    Path("mykernels.py").write_text(text)
    Path("my_adapter.py").write_text(ADAPTER)


def test_an_adapter_for_one_function_is_short_and_its_report_is_soon_there():
    write_user()
    lines = [line for line in ADAPTER.splitlines() if line.strip()]
    assert len(lines) < 15
    started = time.monotonic()
    words = [sys.executable, "-m", "statescan.conformance", "run", "--impl", "my_adapter:adapter"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < 120
    (made,) = reports.read(Path("reports/report.json"))["runs"]
    assert sum(row["status"] == "pass" for row in made["results"]) >= 2
    assert Path("reports/report.html").exists()


WIRED_WRONGLY = [
    ({"view": "state.T", "back": "state.T"}, 'your state looks like [V, K]; set state_layout to "VK" (SLOT-6)'),
    ({"decay": "float(g[n, j, h])"},
     "your decay looks like a factor: g is its logarithm, and 0 keeps everything (GDN-1)"),
    ({"head": "h % q.shape[2]"}, "your heads look tiled: value head h uses key head h // (HV / H) (GDN-5)"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "told"), [*WIRED_WRONGLY, ({}, "")])
def test_what_is_wired_wrongly_is_told_in_one_sentence(wrong, told, monkeypatch):
    write_user(**wrong)
    monkeypatch.syspath_prepend(Path.cwd())
    for name in ("mykernels", "my_adapter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert check_wiring(InProcess(import_module("my_adapter").adapter)) == told  # type: ignore[arg-type]


def test_and_the_suite_does_not_start():
    wrong, told = WIRED_WRONGLY[-1]
    write_user(**wrong)
    done = call("run", "--impl", "my_adapter:adapter", "--out", "o")
    assert done.exit_code == 2
    assert reports.read(Path("o/report.json"))["runs"][0]["reason"] == told


def test_smoke_of_what_is_right_or_absent():
    write_user()
    done = call("smoke", "--impl", "my_adapter:adapter")
    assert (done.exit_code, "wired rightly" in done.output) == (0, True)
    assert call("smoke", "--impl", "run:no_such_program").exit_code == 2


def test_the_workflow_says_what_the_command_line_takes():
    text = (EXAMPLES / "workflow.yml").read_text()
    known = {option for command in ("run", "smoke") for p in main.commands[command].params for option in p.opts}
    options = {word for line in text.splitlines() if "statescan" in line or "--" in line for word in line.split()
               if word.startswith("--")}  # fmt: skip
    assert options <= known
    assert {"--known", "--junit", "--badge", "--fresh"} <= options
