"""What the README says is so."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from statescan.conformance.client import Client, python_command
from statescan.conformance.runner import results
from statescan.goldens.store import load_vectors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", README, re.MULTILINE)


def test_every_make_target_and_path_is_there():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"`?make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^"]+)"', README):
        assert (ROOT / path).exists(), path
    for folder in re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_the_adapter_is_python_and_says_what_the_api_takes():
    (block,) = [b for b in BLOCKS if "Adapter(" in b]
    code = re.sub(r"^    ", "", block, flags=re.MULTILINE).split(".venv/bin")[0]
    ast.parse(code)
    code = code.replace("import mykernels", "mykernels = None")
    space: dict = {}
    exec(code, space)
    assert space["adapter"].capabilities[0]["op"] == "causal_conv1d_update"


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
