"""The text of every clause, read from the chapters without running them: what `show`, the site and the lint quote.

A clause is one Markdown cell of a chapter (a py:percent file, so every line starts with "# ") and the code cell after
it, which computes the example and its wrong neighbour:

    # %% [markdown]
    # (PACK-3)=
    # ## PACK-3  Rows after the last offset are a segment of their own
    # :::{clause} PACK-3
    # :level: MUST
    # ...
    # :::
    # One sentence with one keyword in capitals.
    # Example. ...        Not this. ... Fault: some-fault-id.        Why. ...
    # %%
    assert ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files

from statescan.spec.contract import OPERATIONS

OPTIONS = ("level", "since", "source", "applies", "observable", "exact")
"""Options of the directive in their one order; `exact` is the only one that may be absent."""

LEVELS = ("MUST NOT", "MUST", "SHOULD", "MAY")
OBSERVABLES = ("value", "bits", "untouched", "error", "shape", "relation", "metadata", "text")
PARTS = ("sentence", "Example", "Not this", "Why")

_CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)
_HEAD = re.compile(r"\(([A-Z]+-\d+)\)=\n## (\S+)  (\S.*)\n\n:::\{clause\} (\S+)\n((?::.*\n)*):::\n\n")
_PART = re.compile(r"\A(Example|Not this|Why)\. ")
_FAULT = re.compile(r"Fault:\s([a-z0-9-]+)\.\Z")


class ClauseFormError(ValueError):
    """A clause that is not written in the one form, with the place."""


@dataclass(frozen=True)
class Cell:
    """One cell of a chapter: its text without comment marks, and whether it is code."""

    text: str
    is_code: bool


@dataclass(frozen=True)
class ClauseText:
    """A clause as its chapter states it; `code` is the cell that computes it."""

    label: str
    title: str
    options: dict[str, str]
    sentence: str
    example: str
    neighbour: str
    fault: str
    why: str
    chapter: str
    code: str

    @property
    def applies(self) -> tuple[tuple[str, str], ...]:
        """(operation, condition) of every operation named; `*` stands for any letters, "" for no condition.

        The option reads `a, b when driven by seq_idx; *_prefill`: entries between semicolons, each a list of
        operations with at most one condition.
        """
        rows: dict[tuple[str, str], None] = {}
        for entry in self.options["applies"].split(";"):
            names, _, condition = entry.strip().partition(" when ")
            for pattern in names.split(","):
                found = [name for name in OPERATIONS if fnmatchcase(name, pattern.strip())]
                if not found:
                    raise ClauseFormError(f"{self.label}: applies names {pattern.strip()!r}, which is no operation")
                rows.update(dict.fromkeys((name, condition.strip()) for name in found))
        return tuple(rows)

    @property
    def observable(self) -> tuple[str, ...]:
        """What a vector may look at, from OBSERVABLES."""
        return tuple(word.strip() for word in self.options["observable"].split(","))


def chapter_names() -> tuple[str, ...]:
    """File names of the chapters, in reading order."""
    names = (entry.name for entry in files("statescan.spec").iterdir())
    return tuple(sorted(name for name in names if re.fullmatch(r"\d\d_\w+\.py", name)))


def parse_chapters() -> dict[str, ClauseText]:
    """Every clause of every chapter by label, in reading order."""
    clauses: dict[str, ClauseText] = {}
    for chapter in chapter_names():
        for clause in parse_chapter(files("statescan.spec").joinpath(chapter).read_text("utf-8"), chapter):
            if clause.label in clauses:
                raise ClauseFormError(f"{chapter}: {clause.label} also stands in {clauses[clause.label].chapter}")
            clauses[clause.label] = clause
    return clauses


def parse_chapter(source: str, chapter: str) -> Iterator[ClauseText]:
    """The clauses of one chapter's source."""
    cells = split_cells(source)
    for n, cell in enumerate(cells):
        if not cell.is_code and cell.text.startswith("("):
            code = cells[n + 1].text if n + 1 < len(cells) and cells[n + 1].is_code else ""
            yield parse_clause(cell.text, code, chapter)


def split_cells(source: str) -> list[Cell]:
    """Cells of a py:percent source; what stands before the first marker is the header and is left out.

    >>> split_cells("# %% [markdown]\\n# Two is\\n# even.\\n\\n# %%\\nassert 2 % 2 == 0\\n")
    [Cell(text='Two is\\neven.', is_code=False), Cell(text='assert 2 % 2 == 0', is_code=True)]
    """
    marks = list(_CELL.finditer(source))
    ends = [mark.start() for mark in marks[1:]] + [len(source)]
    cells = []
    for mark, end in zip(marks, ends, strict=True):
        text = source[mark.end() : end].strip("\n")
        is_code = "[markdown]" not in mark[1]
        if not is_code:
            text = "\n".join(re.sub(r"^# ?", "", line) for line in text.splitlines())
        cells.append(Cell(text, is_code))
    return cells


def parse_clause(text: str, code: str, chapter: str) -> ClauseText:
    """One clause from its Markdown cell; raises ClauseFormError where the cell is not in the form."""
    head = _HEAD.match(text)
    place = f"{chapter}: {text.splitlines()[0]}"
    if head is None:
        raise ClauseFormError(f"{place}: label, heading and directive are needed, in this order")
    label = head[1]
    if (head[2], head[4]) != (label, label):
        raise ClauseFormError(f"{place}: heading and directive name {head[2]} and {head[4]}")
    options = _parse_options(head[5], place)
    parts: dict[str, list[str]] = {"sentence": []}
    for paragraph in text[head.end() :].strip().split("\n\n"):
        named = _PART.match(paragraph)
        if named:
            parts[named[1]] = []
        list(parts.values())[-1].append(paragraph[named.end() :] if named else paragraph)
    if tuple(parts) != PARTS:
        raise ClauseFormError(f"{place}: parts are {', '.join(parts)}; {', '.join(PARTS)} are needed, in this order")
    if len(parts["sentence"]) != 1:
        raise ClauseFormError(f"{place}: the rule is one paragraph of one sentence")
    sentence, example, neighbour, why = ("\n\n".join(parts[name]) for name in PARTS)
    fault = _FAULT.search(neighbour)
    if fault is None:
        raise ClauseFormError(f'{place}: "Not this." ends with "Fault: some-fault-id."')
    return ClauseText(
        label, head[3], options, " ".join(sentence.split()), example, neighbour[: fault.start()].strip(), fault[1],
        why, chapter, code,
    )  # fmt: skip


def _parse_options(block: str, place: str) -> dict[str, str]:
    """Options of the directive; a line that starts with ": " continues the one before it."""
    options: dict[str, str] = {}
    for line in block.splitlines():
        name, separator, value = line[1:].partition(":")
        if line.startswith(": ") and options:
            options[list(options)[-1]] += " " + line[1:].strip()
        elif separator and name in OPTIONS:
            options[name] = value.strip()
        else:
            raise ClauseFormError(f"{place}: option line {line!r}; the options are {', '.join(OPTIONS)}")
    if tuple(options) != OPTIONS[: len(options)] or len(options) < len(OPTIONS) - 1:
        raise ClauseFormError(f"{place}: options are {', '.join(options)}; {', '.join(OPTIONS)} is their order")
    return options
