"""The generated pages: what they are made from, the stepper on the whole corpus, and chapters as notebooks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from statescan.conformance.report import read
from statescan.goldens.store import VECTORS, load_faults
from statescan.spec.claims import chapter_claims
from statescan.spec.clauses import chapter_names, parse_chapters, split_cells

ROOT = Path(__file__).parents[1]
NODE = shutil.which("node")
STEP_ALL = """
const { framesOf } = require(process.argv[1]), fs = require("fs"), told = {};
for (const line of fs.readFileSync(0, "utf8").split("\\n").filter(Boolean)) {
  const one = JSON.parse(line), made = framesOf(one);
  const { frames, checked = [], wrong = [], note } = made;
  told[one.id] = { frames: frames.length, checked: checked.length, wrong, note: note || "" };
}
console.log(JSON.stringify(told));
"""


def step(vectors):
    """What the stepper makes of vectors: frames, tensors compared, what differs."""
    text = "".join(json.dumps(vector) + "\n" for vector in vectors)
    words = [NODE, "-e", STEP_ALL, str(ROOT / "docs" / "_static" / "stepper.js")]
    done = subprocess.run(words, input=text, text=True, capture_output=True, check=True, timeout=120)
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="the stepper's script is run by Node.js")
def test_the_stepper_finds_what_every_vector_expects() -> None:
    corpus = {path.stem: json.loads(path.read_text("utf-8")) for path in VECTORS.glob("*/*.json")}
    told = step(corpus.values())
    assert {name: one["wrong"] for name, one in told.items() if one["wrong"]} == {}
    assert all(one["frames"] or one["note"] for one in told.values())
    stepped = [name for name, one in told.items() if one["checked"]]
    exact = [name for name, one in corpus.items() if one["class"] == "exact" and one.get("op", "").startswith(
        ("causal_conv1d", "gated_delta", "kimi", "ssd"))]  # fmt: skip
    without_rows = [name for name in exact if "no row" in told[name]["note"]]
    assert set(exact) - set(without_rows) <= set(stepped)


@pytest.mark.skipif(NODE is None, reason="the stepper's script is run by Node.js")
def test_the_stepper_sees_a_wrong_expectation() -> None:
    vector = json.loads((VECTORS / "conv" / "conv-update-intermediates-by-slot.json").read_text("utf-8"))
    vector["expect"]["y"]["data"][1] += 1
    trace = json.loads((VECTORS / "step" / "trace-life-of-four-requests.json").read_text("utf-8"))
    trace["steps"][2]["pools_after_step"]["ssm_state"][2] = [[[3026]]]
    assert [len(one["wrong"]) for one in step([vector, trace]).values()] == [1, 1]


@pytest.fixture(scope="module")
def pages():
    """The extension that makes the pages, and what it makes them from."""
    pytest.importorskip("sphinx")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import data_pages
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return data_pages, data_pages.Site()


def test_every_clause_vector_and_fault_gets_a_page(pages) -> None:
    data_pages, site = pages
    environment = data_pages.templates(site)
    made = {}
    for name, title, template, given in data_pages.pages(site):
        if name.split("/")[0] in ("vectors", "faults", "api") and len(made) % 40:
            made[name] = ""  # every fortieth is rendered here, and all of them when the site is built
            continue
        made[name] = environment.get_template(template).render(title=title, **given)
    wanted = {f"clauses/{label}" for label in parse_chapters()} | {f"faults/{fault}" for fault in load_faults()}
    wanted |= {f"vectors/{path.stem}" for path in VECTORS.glob("*/*.json")}
    assert wanted <= set(made)
    assert "<script>" not in "".join(made.values()), "text is escaped"


def test_text_of_a_page_is_escaped(pages) -> None:
    data_pages, site = pages
    assert "<b>" not in site.words("a <b>bold</b> `<i>` claim")
    assert "</script>" not in data_pages._script({"why": "</script><script>alert(1)</script>"})
    assert site.words("see PACK-3 and NOPE-3") == 'see <a href="../clauses/PACK-3.html">PACK-3</a> and NOPE-3'


def test_the_stored_report_is_a_report_of_this_corpus() -> None:
    report = read(ROOT / "docs" / "compatibility.json")
    runs = {run["implementation"]: run for run in report["runs"]}
    assert {"reference", "fast", "fla", "causal_conv1d", "mamba_ssm", "transformers"} <= set(runs)
    assert all(row["status"] == "pass" for row in runs["reference"]["results"])
    stored = {path.stem for path in VECTORS.glob("*/*.json")}
    assert {row["vector"] for run in runs.values() for row in run["results"]} <= stored


@pytest.mark.parametrize("chapter", chapter_names())
def test_every_number_has_its_cell(chapter) -> None:
    """A lone number of running text (a size, an exponent) may have none; a run of numbers may not."""
    found = list(chapter_claims(chapter))
    assert found or chapter.startswith("9")
    assert [claim for claim in found if claim.cell is None and not claim.is_single] == []


@pytest.mark.parametrize("chapter", chapter_names())
def test_a_chapter_opens_as_a_notebook(chapter) -> None:
    jupytext = pytest.importorskip("jupytext")
    nbformat = pytest.importorskip("nbformat")
    source = files("statescan.spec").joinpath(chapter).read_text("utf-8")
    notebook = jupytext.reads(source, fmt="py:percent")
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    written = nbformat.reads(jupytext.writes(notebook, fmt="ipynb"), as_version=4)
    nbformat.validate(written)
    kinds = ["code" if cell.is_code else "markdown" for cell in split_cells(source)]
    assert [cell.cell_type for cell in written.cells] == kinds
    again = jupytext.reads(jupytext.writes(written, fmt="py:percent"), fmt="py:percent")
    assert [cell.source for cell in again.cells] == [cell.source for cell in written.cells]
