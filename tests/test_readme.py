"""What the README says is so."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from statescan.conformance.cli import main
from statescan.conformance.client import Client, python_command
from statescan.conformance.runner import results
from statescan.goldens.store import load_corpus, load_vectors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", README, re.MULTILINE)


def test_every_make_target_and_path_is_there():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"`?make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^"]+)"', README):
        assert (ROOT / path).exists(), path
    for folder in re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_the_adapter_is_python_and_says_what_the_api_takes():
    code = code_with("@adapter.op")
    ast.parse(code)
    code = code.replace("import mykernels", "mykernels = None")
    space: dict = {}
    exec(code, space)
    assert space["adapter"].capabilities[0]["op"] == "causal_conv1d_update"


def code_with(words: str) -> str:
    """The Python of the one example that has these words in it."""
    (block,) = [b for b in BLOCKS if words in b]
    return re.sub(r"^    ", "", block, flags=re.MULTILINE).split(".venv/bin")[0]


def run_mixer(code: str, only: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict]:
    """The README's command on an adapter file, as a user types it: exit code and results by vector."""
    (folder / "my_mixer.py").write_text(code, "utf-8")
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(main, ["run", "--impl", "my_mixer:adapter", "--only", only, "--out", "out"])
    (run,) = json.loads((folder / "out" / "report.json").read_text("utf-8"))["runs"]
    return done.exit_code, {row["vector"]: row for row in run["results"]}


def test_a_strangers_mixer_of_two_hooks_passes_the_traces(tmp_path, monkeypatch):
    code = code_with("@adapter.mixer")
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) < 25
    exit_code, rows = run_mixer(code, "trace-*", tmp_path, monkeypatch)
    assert exit_code == 0
    passed = {key for key, row in rows.items() if row["status"] == "pass"}
    missing = {row.get("missing") for key, row in rows.items() if key not in passed}
    assert len(passed) == 10
    assert all(key.endswith("-gdn") for key in passed)
    assert missing == {"kind=mamba2", "kind=gdp", "kind=kda", "ssm_dynamic_inference", "snapshots.grid",
                       "snapshots.any"}  # fmt: skip


@pytest.mark.parametrize(
    ("right", "wrong", "trace", "told"),
    [
        ("if slot >= 0 else ()", "", "trace-two-layers-and-one-slot-gdn", "(padding row 1"),
        ("entry[slot, j]", "entry[0, j]", "trace-short-prompt-beside-a-verify-step-gdn", "entry"),
        ("window[:, 1:]", "0 * window[:, 1:]", "trace-pieces-shorter-than-the-window-gdn", "request A"),
    ],
)
def test_and_a_fault_in_it_is_told_by_step_request_and_place(right, wrong, trace, told, tmp_path, monkeypatch):
    code = code_with("@adapter.mixer")
    assert right in code
    exit_code, rows = run_mixer(code.replace(right, wrong), trace, tmp_path, monkeypatch)
    row = rows[trace]
    assert exit_code == 1
    assert row["status"].startswith("fail.")
    assert row["clause"] == load_corpus()[trace]["clauses"][0]
    assert row["message"].startswith(f"step {row['place']['step']}: {row['tensor']}")
    assert told in row["message"]


def test_the_quoted_failure_is_what_the_suite_says():
    pytest.importorskip("fla")
    (block,) = [b for b in BLOCKS if "fail." in b]
    status, clause, vector = block.split()[:3]
    message = block.strip().splitlines()[1].strip()
    corpus = load_vectors()
    with Client(python_command("statescan.conformance.adapters.fla:adapter")) as client:
        (row,) = results(client, [corpus[vector]], corpus, None)
    assert (row["status"], row["clause"], row["message"]) == (status, clause, message)


def test_measured_numbers_are_those_of_the_result_files():
    found = {}
    for path in (ROOT / "fast" / "bench" / "results").glob("2026-12-01-h200-*.json"):
        for row in json.loads(path.read_text("utf-8"))["rows"]:
            if "row" in row:
                best = min(row["peers"].items(), key=lambda item: item[1], default=None)
                peer = "" if best is None else f"{best[0]}: {best[1]:.1f}"
                found[row["row"]] = (f"{row['us']:.1f}", f"{row['ratio']:.2f} {row['yardstick'].split()[0]}", peer)
    quoted = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+ \w+) \| ([^|]*) \|$", README, re.MULTILINE)
    assert quoted
    for name, *numbers in quoted:
        assert tuple(n.strip() for n in numbers) == found[name], name
