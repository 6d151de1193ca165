"""The chapters run, every clause is in the one form, and no number stands in the text that no cell computes."""

from __future__ import annotations

import doctest
import json
import re
import runpy
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

from statescan.conformance.mutants import FAULTS
from statescan.spec import claims, clauses, figures, notation
from statescan.spec.claims import NUMBER, missing_numbers, numbers_of_code
from statescan.spec.clauses import (
    LEVELS,
    OBSERVABLES,
    ClauseFormError,
    ClauseText,
    chapter_names,
    parse_chapter,
    parse_chapters,
    split_cells,
)
from statescan.spec.contract import CLAUSES
from statescan.spec.figures import chunk_grid, committed, conv_window, decay_map, dictionary_lens, segment_strip

ROOT = Path(__file__).parent.parent
KEYWORD = re.compile(rf"\b(?:{'|'.join(LEVELS)})\b")
CLAUSES_HERE = parse_chapters()


def source(chapter: str) -> str:
    return files("statescan.spec").joinpath(chapter).read_text("utf-8")


@pytest.mark.parametrize("chapter", chapter_names())
def test_chapter_runs(chapter: str) -> None:
    runpy.run_path(str(files("statescan.spec").joinpath(chapter)))


@pytest.mark.parametrize("module", [claims, clauses, figures, notation], ids=lambda module: module.__name__)
def test_docstrings_show_what_happens(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


# ---------------------------------------------------------------------------------------------------------------------
# Form
# ---------------------------------------------------------------------------------------------------------------------


def test_labels_are_the_active_ones() -> None:
    assert set(CLAUSES_HERE) == {label for label, clause in CLAUSES.items() if clause.state == "active"}


@pytest.mark.parametrize("clause", CLAUSES_HERE.values(), ids=CLAUSES_HERE)
def test_clause_is_in_the_form(clause: ClauseText) -> None:
    assert KEYWORD.findall(clause.sentence) == [clause.options["level"]]
    prose = re.sub(r"`[^`]*`", "", clause.sentence)
    assert prose.endswith(".")
    assert not re.search(r"[.!?] ", prose), "the rule is one sentence"
    assert clause.options["since"] == CLAUSES[clause.label].since
    assert clause.options["source"]
    assert clause.applies
    assert set(clause.observable) <= set(OBSERVABLES)
    assert re.fullmatch(r"no \(.+\)", clause.options.get("exact", "no (x)"))
    assert f'mutant("{clause.fault}")' in clause.code, "the cell runs the fault"
    assert "assert " in clause.code.partition("mutant(")[0], "the cell runs the example"


@pytest.mark.parametrize("chapter", [*chapter_names(), "index.md"])
def test_keywords_stand_in_clauses_only(chapter: str) -> None:
    clauses = [clause for clause in CLAUSES_HERE.values() if clause.chapter == chapter]
    in_rules_and_boxes = 2 * len(clauses)
    assert len(KEYWORD.findall(source(chapter))) == in_rules_and_boxes


def test_every_fault_is_on_record_and_can_be_built() -> None:
    faults = {clause.fault for clause in CLAUSES_HERE.values()}
    assert faults <= set(FAULTS)
    assert len(faults) == len(CLAUSES_HERE), "each clause has a fault of its own"
    recorded = json.loads(files("statescan.goldens").joinpath("faults.json").read_text("utf-8"))["faults"]
    first_clause = {fault["id"]: fault["clauses"][0] for fault in recorded}
    assert {clause.label: first_clause.get(clause.fault) for clause in CLAUSES_HERE.values()} == {
        label: label for label in CLAUSES_HERE
    }


GOOD = """\
# %% [markdown]
# (PACK-3)=
# ## PACK-3  A title
#
# :::{clause} PACK-3
# :level: MUST
# :since: 0.1
# :source: somewhere
# :applies: build_packed_seq_idx; causal_conv1d,
# : ssd when driven by seq_idx
# :observable: value, relation
# :::
#
# Rows MUST
# be so.
#
# Example. `1`.
#
# Not this. `2`. Fault:
# a-fault.
#
# Why. Because.

# %%
assert 1
"""


def test_parser_reads_every_part() -> None:
    (clause,) = parse_chapter(GOOD, "99_good.py")
    assert (clause.label, clause.title, clause.chapter) == ("PACK-3", "A title", "99_good.py")
    assert (clause.sentence, clause.example, clause.neighbour) == ("Rows MUST be so.", "`1`.", "`2`.")
    assert (clause.fault, clause.why, clause.code) == ("a-fault", "Because.", "assert 1")
    conditions = {"build_packed_seq_idx": "", "causal_conv1d": "driven by seq_idx", "ssd": "driven by seq_idx"}
    assert dict(clause.applies) == conditions
    assert clause.observable == ("value", "relation")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# ## PACK-3  ", "# ## PACK-4  "),
        ("# ## PACK-3  ", "# # PACK-3  "),
        ("{clause} PACK-3", "{clause} PACK-4"),
        ("# :since: 0.1\n", ""),
        ("# :since: 0.1\n# :source: somewhere\n", "# :source: somewhere\n# :since: 0.1\n"),
        (":observable:", ":seen:"),
        ("# Rows MUST\n", "# Rows MUST\n#\n"),
        ("# Why. Because.\n", ""),
        ("# Example. `1`.\n#\n", ""),
        ("# Example. `1`.\n#\n# Not this.", "# Not this. `3`. Fault: b.\n#\n# Example."),
        ("# a-fault.", "# a-fault, more or less."),
    ],
)  # fmt: skip
def test_parser_refuses_another_form(old: str, new: str) -> None:
    assert old in GOOD
    with pytest.raises(ClauseFormError, match=r"99_bad\.py: \(PACK-3\)="):
        list(parse_chapter(GOOD.replace(old, new), "99_bad.py"))


def test_applies_names_operations_only() -> None:
    (clause,) = parse_chapter(GOOD.replace("causal_conv1d,", "causal_conv2d,"), "99_bad.py")
    with pytest.raises(ClauseFormError, match="causal_conv2d"):
        _ = clause.applies


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clause", CLAUSES_HERE.values(), ids=CLAUSES_HERE)
def test_numbers_of_a_clause_are_computed(clause: ClauseText) -> None:
    assert not list(missing_numbers(f"{clause.example}\n{clause.neighbour}", clause.code))
    spans_of_why = " ".join(re.findall("`[^`]+`", clause.why))
    assert not list(missing_numbers(spans_of_why, clause.code))


@pytest.mark.parametrize("chapter", chapter_names())
def test_numbers_between_clauses_are_computed(chapter: str) -> None:
    cells = split_cells(source(chapter))
    code = "\n".join(cell.text for cell in cells if cell.is_code)
    text = "\n".join(cell.text for cell in cells if not cell.is_code and not cell.text.startswith("("))
    assert not [piece for piece in missing_numbers(text, code) if len(NUMBER.findall(piece)) > 1]


def test_a_wrong_number_is_found() -> None:
    code = "assert numbers(y) == [1, -12.5, NAN]  # 7\nassert message == 'cu_seqlens[3]=6 (PACK-4)'\n"
    assert numbers_of_code(code) == ["1", "-12.5", "nan", "3", "6"]
    assert not list(missing_numbers("`1, -12.5, nan`, `cu_seqlens[3]=6 (PACK-4)`, `-12.5`, `name`", code))
    assert list(missing_numbers("`1, 12.5`, `7`, 6, `6, 3`, 2.5 and 3", code)) == ["1, 12.5", "7", "6, 3", "2.5"]


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", committed())
def test_figure_on_disk_is_up_to_date(name: str) -> None:
    """If this fails, run `python -m statescan.spec.figures docs` and look at the pictures."""
    assert (ROOT / "docs" / name).read_text("utf-8") == committed()[name]._repr_svg_()


@pytest.mark.parametrize(
    "figure",
    [
        segment_strip([0, 2, 2, 3], 5), conv_window([5, 6], [1], [10, 1]), dictionary_lens([8, 16], [(0, 4, 0.25, -2)]),
        decay_map([0, -1, -1024], [0, 1, 1, 3]), chunk_grid([0, 3, 3], 2),
    ],
)  # fmt: skip
def test_figure_says_the_same_without_the_picture(figure: object) -> None:
    svg = figure._repr_svg_()  # type: ignore[attr-defined]
    assert re.search(r"<title [^>]*>.+</title>", svg)
    assert re.search(r"<desc [^>]*>.+</desc>", svg, re.DOTALL)
    assert "fill=\"white\"" not in svg
    assert repr(figure).splitlines()[1:] == figure.text.splitlines()  # type: ignore[attr-defined]
