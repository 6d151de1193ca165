"""Every finding is still there in the release it is about, and its page shows what its script does."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from statescan.conformance.findings import ABSENT, FAULTY, LARGE, PINNED
from statescan.spec.contract import CLAUSES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "conformance" / "findings"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
MOST_LINES = 20

RUN = """
import runpy, sys
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print("exit", end.code)
"""


class Section(NamedTuple):
    """What the page says of one finding."""

    text: str
    code: str
    output: str


class Outcome(NamedTuple):
    """What a script printed, and its exit code."""

    output: str
    code: int


def package(script: str) -> str:
    first = {"fla": "fla-core", "causal": "causal-conv1d", "mamba": "mamba-ssm"}
    return first.get(script.split("_")[0], "transformers")


@cache
def outcomes(name: str) -> dict[str, Outcome]:
    """All scripts about one package, in one process, which pays for the imports once."""
    scripts = [script for script in SCRIPTS if package(script) == name and script not in LARGE]
    paths = [str(FOLDER / f"{script}.py") for script in scripts]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, *paths], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    parts = re.split(r"^exit (\d+)\n", done.stdout, flags=re.MULTILINE)
    return {script: Outcome(output, int(code)) for script, output, code in
            zip(scripts, parts[::2], parts[1::2], strict=False)}  # fmt: skip


@cache
def sections() -> dict[str, Section]:
    """The page by anchor."""
    page = (ROOT / "spec" / "findings.md").read_text("utf-8")
    found = {}
    for anchor, text in re.findall(
        r"^\(([a-z0-9-]+)\)=\n(.*?)(?=^\([a-z0-9-]+\)=\n|\Z)", page, re.MULTILINE | re.DOTALL
    ):
        code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        output = re.search(r"```text\n(.*?)```", text, re.DOTALL)
        assert code is not None, anchor
        assert output is not None, anchor
        found[anchor] = Section(text, code[1], output[1])
    return found


def shown(script: str) -> str:
    """The code of a script as the page shows it: without what is expected, and what came out printed."""
    source = (FOLDER / f"{script}.py").read_text("utf-8")
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    *body, last = function.body
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.Tuple)
    dropped = {
        node.lineno for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "expected"
    }
    lines = [line for n, line in enumerate(source.splitlines(), 1)
             if body[0].lineno <= n < last.lineno and n not in dropped]  # fmt: skip
    got = last.value.elts[1]
    printed = ast.get_source_segment(source, got) or ""
    printed = printed[1:-1] if isinstance(got, ast.Tuple) else printed
    return f"{textwrap.dedent(chr(10).join(lines)).rstrip()}\nprint({printed})\n"


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in LARGE])
def test_the_fault_is_there(script: str) -> None:
    outcome = outcomes(package(script))[script]
    if outcome.code == ABSENT:
        pytest.skip(outcome.output.strip())
    installed = metadata.version(package(script))
    if package(script) == "transformers" and installed != PINNED["transformers"]:  # any 5 from 5.24 on may be there
        pytest.skip(f"transformers {installed}, the findings are about {PINNED['transformers']}")
    assert installed == PINNED[package(script)], f"the findings are about {PINNED[package(script)]}: judge them anew"
    assert outcome.code == FAULTY, f"cured, or shown no more:\n{outcome.output}"
    lines = outcome.output.splitlines(keepends=True)
    assert "".join(lines[1:]) == sections()[script.replace("_", "-")].output


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_shows_the_script(script: str) -> None:
    section = sections()[script.replace("_", "-")]
    assert section.code == shown(script)
    assert len(section.code.splitlines()) <= MOST_LINES
    for part in ("Mechanism. ", "Effect. ", "GPU. ", "Suite. "):
        assert f"\n{part}" in section.text


def test_every_section_has_a_script_and_a_row() -> None:
    page = (ROOT / "spec" / "findings.md").read_text("utf-8")
    assert list(sections()) == re.findall(r"\(#([a-z0-9-]+)\) \|", page)
    assert sorted(sections()) == sorted(script.replace("_", "-") for script in SCRIPTS)


def test_clauses_named_are_clauses() -> None:
    for section in sections().values():
        named = re.findall(r"\b[A-Z]+-\d+\b", section.text)
        assert named
        assert set(named) <= set(CLAUSES)
