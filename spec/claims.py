"""Every number and every rule of the chapters with the cell that checks it: what the site lists and the lint reads.

A number of a clause must stand in the clause's own cell, in its order where it stands in a code span. Numbers between
clauses must stand in some cell of the chapter. Cells run when the chapters are built and when they are tested, so a
number that is in the cell's assertion and wrong cannot get this far.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

from statescan.spec.clauses import Cell, split_cells

NUMBER = re.compile(r"(?<![\w.-])(?:nan\b|\d+x\d+|-?\d+(?:\.\d+)*)", re.IGNORECASE)
_LABEL = re.compile(r"^\(([A-Z]+-\d+)\)=")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^:::.*?^:::$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Claim:
    """One rule, or one run of numbers, of a chapter, with the cell that checks it.

    `cell` counts the code cells of the chapter from 1, in the order in which they run; None where no cell holds it.
    `line` is the first line of that cell that holds the first number.
    """

    place: str
    text: str
    cell: int | None
    line: str

    @property
    def is_single(self) -> bool:
        """A lone number of running text: a label, a version, a count of things, which no cell has to compute."""
        return len(NUMBER.findall(self.text)) == 1


def numbers_of_code(code: str) -> list[str]:
    """Every number of a cell in order, those in strings included and those in comments left out.

    >>> numbers_of_code("assert numbers(y) == [1, -12.5, NAN]  # 7")
    ['1', '-12.5', 'nan']
    """
    parts = [
        "nan" if token.string == "NAN" else token.string
        for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline)
        if token.type != tokenize.COMMENT
    ]
    joined = re.sub(r"(^|[=(\[,:]|\b(?:in|return)) - (?=\d)", r"\1 -", " ".join(parts))
    return [number.lower() for number in NUMBER.findall(joined)]


def pieces(text: str) -> Iterator[tuple[str, list[str]]]:
    """(words to show, numbers) of what has to be found: each code span as a whole, every other number by itself."""
    for n, piece in enumerate(text.split("`")):
        wanted = NUMBER.findall(piece)
        if n % 2 == 1 and wanted:
            yield piece, wanted
        elif n % 2 == 0:
            yield from ((number, [number]) for number in wanted)


def holds(code: str, wanted: list[str]) -> bool:
    """Whether the numbers stand in the code, in their order and without a gap."""
    return " ".join(["", *wanted, ""]).lower() in " ".join(["", *numbers_of_code(code), ""])


def missing_numbers(text: str, code: str) -> Iterator[str]:
    """Pieces of a text whose numbers do not stand in the code; those of a code span in its order, without a gap."""
    return (shown for shown, wanted in pieces(text) if not holds(code, wanted))


def chapter_claims(chapter: str) -> Iterator[Claim]:
    """The rules and numbers of one chapter, in reading order."""
    cells = split_cells(files("statescan.spec").joinpath(chapter).read_text("utf-8"))
    code = [(n, cell.text) for n, cell in enumerate(cells) if cell.is_code]
    heading = ""
    for at, cell in enumerate(cells):
        if cell.is_code:
            continue
        label = _LABEL.match(cell.text)
        heading = label[1] if label else (_HEADING.findall(cell.text) or [heading])[0]
        near = _by_distance(code, at, own=label is not None)
        if label:
            rule = _DIRECTIVE.split(cell.text)[-1].strip().split("\n\n")[0]
            yield Claim(label[1], " ".join(rule.split()), _count(cells, near[0][0]), _told(near[0][1]))
        yield from _numbers(_checked_text(cell, label is not None), heading, near, cells)


def _checked_text(cell: Cell, is_clause: bool) -> str:
    text = _LINK.sub(r"\1", _HEADING.sub("", cell.text))
    return text[text.find("Example. ") :] if is_clause else text


def _by_distance(code: list[tuple[int, str]], at: int, own: bool) -> list[tuple[int, str]]:
    """The cells to look in: a clause's own, or all of the chapter, the next one below first."""
    after = [one for one in code if one[0] > at]
    return after[:1] if own else after + [one for one in reversed(code) if one[0] < at]


def _numbers(text: str, heading: str, near: list[tuple[int, str]], cells: list[Cell]) -> Iterator[Claim]:
    for shown, wanted in pieces(text):
        found = next(((n, code) for n, code in near if holds(code, wanted)), None)
        if found:
            lines = [line.strip() for line in found[1].splitlines() if wanted[0].lower() in line.lower()]
            yield Claim(heading, shown, _count(cells, found[0]), (lines or [""])[0])
        else:
            yield Claim(heading, shown, None, "")


def _count(cells: list[Cell], at: int) -> int:
    return sum(cell.is_code for cell in cells[: at + 1])


def _told(code: str) -> str:
    return next((line.strip() for line in code.splitlines() if line.startswith("assert ")), "")
