"""Implementations from outside: an adapter in C, one in Python without statescan, exported folders; and how they may
misbehave without ending the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from statescan.conformance import client as client_module
from statescan.conformance import commands, folder, runner
from statescan.conformance import report as reports
from statescan.conformance.cli import main
from statescan.conformance.client import Client, ProtocolError
from statescan.conformance.smoke import check_wiring
from statescan.goldens.store import FormatError, load_corpus

EXAMPLES = Path(__file__).parents[1] / "conformance" / "examples"
FOREIGN = [sys.executable, str(EXAMPLES / "foreign.py")]
CORPUS = load_corpus()
CONV = [v for v in CORPUS.values() if v.get("op") == "causal_conv1d_update"]
DELTA = [v for v in CORPUS.values() if v.get("op") == "gated_delta_rule_update"]
COMPILER = shutil.which("cc")


def results(command: list[str], vectors, seconds: float = 20.0) -> dict[str, dict]:
    with Client(command, run_seconds=seconds) as client:
        assert check_wiring(client) == ""
        return {row["vector"]: row for row in runner.results(client, vectors, CORPUS, None)}


def judged(rows) -> dict[str, str]:
    return {key: row["status"] for key, row in rows.items() if row["status"] != "not_applicable"}


@pytest.fixture(scope="module")
def in_c(tmp_path_factory) -> list[str]:
    if COMPILER is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("c") / "conv_update"
    words = [COMPILER, "-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program)]
    subprocess.run([*words, str(EXAMPLES / "conv_update.c"), "-lm"], check=True)
    return [str(program)]


def test_the_adapter_in_c_passes_what_it_claims(in_c):
    found = judged(results(in_c, CONV))
    assert len(found) >= 15
    assert set(found.values()) == {"pass"}


@pytest.mark.parametrize(("right", "wrong", "status"), [
    ("window[w - 1] = x[at];", "window[0] = x[at];", "fail.value"),
    ("y[at] = read[row] < 0 && write[row] < 0 ? 0 :", "y[at] =", "fail.value"),
    ("if (write[row] >= 0) memcpy", "if (write[row] != -1) memcpy", "protocol"),
])  # fmt: skip
def test_a_fault_in_c_is_found(in_c, tmp_path, right, wrong, status):
    source = (EXAMPLES / "conv_update.c").read_text()
    assert source.count(right) == 1
    (tmp_path / "wrong.c").write_text(source.replace(right, wrong))
    subprocess.run([COMPILER, "-O1", "-o", tmp_path / "wrong", tmp_path / "wrong.c", "-lm"], check=True)
    with Client([str(tmp_path / "wrong")]) as client:
        rows = list(runner.results(client, CONV, CORPUS, None))
    statuses = {row["status"] for row in rows}
    assert status in statuses
    assert "pass" in statuses


def test_the_foreign_adapter_passes_what_it_claims():
    found = judged(results(FOREIGN, DELTA))
    assert len(found) >= 4
    assert set(found.values()) == {"pass"}


def test_the_foreign_adapter_needs_numpy_alone(tmp_path):
    code = ("import sys; sys.path = [p for p in sys.path if 'statescan' not in p]; sys.argv = ['foreign.py', 'x'];"
            "sys.modules['statescan'] = None; import runpy; runpy.run_path(sys.argv[0], run_name='other')")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=True)
    claims = json.loads((EXAMPLES / "foreign.json").read_text())
    names: dict = {}
    exec(compile((EXAMPLES / "foreign.py").read_text(), "foreign.py", "exec"), {**names, "__name__": "x"}, names)
    assert names["CLAIMS"] == claims


# ---------------------------------------------------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path) -> Path:
    place = tmp_path / "calls"
    claims = folder.read_claims(EXAMPLES / "foreign.json")
    assert folder.export(place, DELTA, CORPUS, claims) >= 4
    return place


def verdicts(place: Path) -> dict[str, str]:
    return {row["vector"]: row["status"] for row in folder.verify(place, CORPUS)}


def test_a_folder_that_was_filled_elsewhere_is_judged(exported):
    text = "".join(path.read_text() for path in exported.glob("*.json*"))
    assert '"expect"' not in text
    subprocess.run([*FOREIGN, str(exported)], check=True)
    assert set(verdicts(exported).values()) == {"pass"}


def test_folder_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (commands, reports):
        monkeypatch.setattr(module, "load_corpus", lambda: CORPUS)

    def call(*words: str):
        return CliRunner().invoke(main, list(words))

    made = call("export", "calls", "--claims", str(EXAMPLES / "foreign.json"), "--only", "GDN")
    assert made.exit_code == 0, made.output
    assert "done.jsonl" in call("verify", "calls").output  # nobody has answered
    subprocess.run([*FOREIGN, "calls"], check=True)
    done = call("verify", "calls", "--name", "theirs", "--out", "out")
    assert done.exit_code == 0, done.output
    run = json.loads((tmp_path / "out" / "report.json").read_text())["runs"][0]
    assert (run["implementation"], run["rung"]) == ("theirs", "folder")
    assert call("export", "calls").exit_code == 2  # not empty


def test_what_is_not_filled_in_is_seen(exported):
    subprocess.run([*FOREIGN, str(exported)], check=True)
    first = json.loads((exported / "calls.jsonl").read_text().splitlines()[0])
    out = exported / first["outputs"]["file"]
    data = bytearray(out.read_bytes())
    (row,) = [r for r in first["outputs"]["tensors"] if r["name"] == "o"]
    data[row["offset"] : row["offset"] + row["nbytes"]] = bytes.fromhex("a5a5c57f") * (row["nbytes"] // 4)
    out.write_bytes(data)
    assert verdicts(exported)[first["vector"]] == "fail.unwritten"
    out.write_bytes(data[:-8])
    assert verdicts(exported)[first["vector"]] == "protocol"
    out.unlink()
    os.symlink("/etc/hostname", out)
    assert verdicts(exported)[first["vector"]] == "protocol"
    answers = (exported / "done.jsonl").read_text().splitlines()
    (exported / "done.jsonl").write_text("\n".join(answers[1:]))
    assert verdicts(exported)[first["vector"]] in ("protocol", "not_run")
    assert [s for s in verdicts(exported).values() if s == "pass"]


def test_a_folder_of_other_vectors_is_refused(exported):
    (exported / "done.jsonl").write_text("")
    lines = (exported / "calls.jsonl").read_text()
    (exported / "calls.jsonl").write_text(lines.replace("sha256:", "sha256:0", 1))
    with pytest.raises(FormatError, match="export the folder again"):
        verdicts(exported)


# ---------------------------------------------------------------------------------------------------------------------
# Misbehaviour: one failed vector with the right status, and the run goes on
# ---------------------------------------------------------------------------------------------------------------------

STEP = "    given = open_file(folder, message["
BAD = {
    "crash": ("os.abort()", "error"),
    "exit": ("os._exit(3)", "error"),
    "hang": ("import time; time.sleep(60)", "timeout"),
    "stray print past the protocol's own way": ("os.write(5, b'hello\\n')", "protocol"),
    "stray print": ("print('hello')", "pass"),
    "silent end": ("os.close(0); sys.exit(0)", "error"),
    "not the id": ("return {'ok': True, 'id': 999999}", "protocol"),
    "unknown key": ("return {'ok': True, 'more': 1}", "protocol"),
    "not finite": ("return {'ok': True, 'ms': float('nan')}", "protocol"),
    "long line": ("return {'ok': True, 'value': 'x' * 3_000_000}", "protocol"),
    "nothing written": ("return {'ok': True}", "fail.unwritten"),
    "short file": ("os.truncate(os.path.join(folder, message['outputs']['file']), 100); return {'ok': True}",
                   "protocol"),
    "long file": ("open(os.path.join(folder, message['outputs']['file']), 'ab').write(b'x'); return {'ok': True}",
                  "protocol"),
    "no file": ("os.unlink(os.path.join(folder, message['outputs']['file'])); return {'ok': True}", "protocol"),
    "a link": ("p = os.path.join(folder, message['outputs']['file']); os.unlink(p); os.symlink('/dev/zero', p);"
               " return {'ok': True}", "protocol"),
    "a pipe": ("p = os.path.join(folder, message['outputs']['file']); os.unlink(p); os.mkfifo(p);"
               " return {'ok': True}", "protocol"),
    "an exception": ("raise MemoryError('none left')", "error"),
}  # fmt: skip


def test_misbehaviour_is_one_failed_vector(tmp_path, monkeypatch):
    """One run, in which every second vector is one that the adapter answers in its own bad way."""
    monkeypatch.setattr(client_module, "QUICK_SECONDS", 0.0)  # so many deaths in a row would end a run
    source = (EXAMPLES / "foreign.py").read_text()
    base = next(v for v in DELTA if prepared(v))
    vectors, bad = [], {}
    for kind, (line, status) in BAD.items():
        slug = "bad-" + "".join(c if c.isalpha() else "-" for c in kind)
        bad[slug] = status
        vectors += [{**base, "id": slug}, {**base, "id": f"good-behind-{slug}"}]
        source = source.replace(STEP, f"    if message['vector'] == {slug!r}:\n        {line}\n{STEP}")
    source = source.replace("os.dup(1)", "os.dup2(1, 5)")
    source = source.replace('{"id": message["id"], **said}', '{**{"id": message["id"]}, **said}')
    (tmp_path / "bad.py").write_text(source)
    corpus = {**CORPUS, **{v["id"]: v for v in vectors}}
    with Client([sys.executable, str(tmp_path / "bad.py")], run_seconds=3.0) as client:
        rows = {row["vector"]: row["status"] for row in runner.results(client, vectors, corpus, None)}
    assert {key: status for key, status in rows.items() if key in bad} == bad
    assert {status for key, status in rows.items() if key not in bad} == {"pass"}


def test_a_child_that_says_nothing_right_is_gone_with_its_folder():
    client = Client([sys.executable, "-c", "print('hello'); import time; time.sleep(60)"])
    with pytest.raises(ProtocolError, match="not an answer"), client:
        pass
    assert client._process is None
    assert not client.folder.exists()


def test_too_many_deaths_in_a_row_end_the_run(tmp_path):
    source = (EXAMPLES / "foreign.py").read_text().replace(STEP, f"    os._exit(3)\n{STEP}")
    (tmp_path / "bad.py").write_text(source)
    made = runner.run_target(runner.Target("bad", [sys.executable, str(tmp_path / "bad.py")]), DELTA, CORPUS, None,
                             lambda *_: None)  # fmt: skip
    assert made["state"] in ("stopped", "smoke failed")


def prepared(vector) -> bool:
    return bool(folder.calls_of(vector, CORPUS, folder.read_claims(EXAMPLES / "foreign.json")))


def test_a_link_in_the_scratch_folder_is_not_written_through(tmp_path):
    """The child lays a link where the runner will put its next file."""
    target = tmp_path / "mine"
    target.write_text("mine")
    source = (EXAMPLES / "foreign.py").read_text()
    links = (f"[os.symlink({str(target)!r}, os.path.join(folder, f'{{n:06d}}.in')) for n in range(4, 40)"
             " if not os.path.lexists(os.path.join(folder, f'{n:06d}.in'))]")  # fmt: skip
    (tmp_path / "bad.py").write_text(source.replace(STEP, f"    {links}\n{STEP}"))
    found = judged(results([sys.executable, str(tmp_path / "bad.py")], DELTA))
    assert target.read_text() == "mine"
    assert set(found.values()) == {"pass"}
