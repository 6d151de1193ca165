"""The command line, as a user types it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from statescan.conformance import report as reports
from statescan.conformance.cli import main
from statescan.goldens.store import FormatError, check_schema, load_vectors

HERE = Path(__file__).parent


def call(*words: str):
    return CliRunner().invoke(main, list(words), env={"COLUMNS": "200"})


def test_list_and_show():
    assert "seq-idx-of-the-seed" in call("list", "--only", "PACK-2").output
    assert '"id": "seq-idx-of-the-seed"' in call("show", "seq-idx-of-the-seed").output
    clause = call("show", "PACK-3").output
    assert "MUST" in clause
    assert "Not this." in clause
    assert "seq-idx-tail-is-its-own-segment" in clause
    assert "mechanism" in call("show", "tail-joins-last-segment").output
    assert call("show", "no-such-thing").exit_code == 2


def test_run_writes_both_reports_and_says_where(tmp_path):
    done = call("run", "--impl", "reference", "--only", "PACK", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert str(tmp_path) in done.output.replace("\n", "")
    made = json.loads((tmp_path / "report.json").read_text("utf-8"))
    check_schema("report", made, "report.json")
    assert {row["status"] for row in made["runs"][0]["results"]} == {"pass"}
    assert "<!doctype html>" in (tmp_path / "report.html").read_text("utf-8")


def test_exit_codes(tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    out = ["--out", str(tmp_path), "--only", "conv-update-one-row"]
    assert call("run", "--impl", "miniatures:right", *out).exit_code == 0
    assert call("run", "--impl", "miniatures:writes_input", *out).exit_code in (1, 2)
    assert call("run", "--impl", "nothing", *out).exit_code == 2
    assert call("run", "--impl", "miniatures:absent", *out).exit_code == 2
    assert call("run", "--impl", "miniatures:no_such_adapter", *out).exit_code == 2


def test_matrix_joins_reports_of_one_corpus(tmp_path):
    call("run", "--impl", "reference", "--only", "CAP", "--out", str(tmp_path))
    path = tmp_path / "report.json"
    assert "CAP" in call("matrix", str(path), str(path)).output
    other = json.loads(path.read_text("utf-8"))
    other["corpus"] = "sha256:" + "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert call("matrix", str(path), str(tmp_path / "other.json")).exit_code == 2
    with pytest.raises(FormatError):
        reports.merge([reports.read(path), reports.read(tmp_path / "other.json")])


def test_the_pytest_plugin_runs_the_suite(tmp_path):
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "statescan.conformance",
             "--impl", "reference", "--statescan-only", "PACK-2"]  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    count = len([v for v in load_vectors().values() if "PACK-2" in v["clauses"]])
    assert f"{count} passed" in done.stdout


def test_numbers_of_many_implementations_fit_on_a_narrow_terminal(tmp_path):
    passed = [{"vector": f"v{i}", "status": "pass", "clause": "PACK-1", "clauses": ["PACK-1"]} for i in range(112)]
    runs = [{"implementation": f"implementation_{i}", "state": "ran", "results": passed} for i in range(9)]
    console = Console(width=80, record=True, file=io.StringIO())
    reports.print_matrix(console, {"runs": runs})
    assert console.export_text().count("112/112") == len(runs)
