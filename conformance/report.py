"""The report: on the terminal, as JSON by its schema, and as one self-contained page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from statescan.conformance.traces import operation
from statescan.conformance.untrusted import printable
from statescan.goldens.store import FormatError, check_schema, load_corpus, read_json
from statescan.spec.clauses import parse_chapters
from statescan.spec.contract import FAMILIES

Report = dict[str, Any]
Run = Mapping[str, Any]

NOT_JUDGED = ("not_applicable", "not_run")
WARNINGS = ("fail.wrong_error",)
"""A right refusal of the wrong class, or without the label: told, and no failure unless asked for."""
MOST_COLUMNS = 5
"""Implementations in one table of the terminal, which may be 80 characters wide."""


def failed(status: str) -> bool:
    """Whether a status is a failure."""
    return status not in ("pass", "xfail", *NOT_JUDGED, *WARNINGS)


def print_run(console: Console, run: Run) -> None:
    """One implementation: what failed, at which place, and the counts."""
    name = escape(printable(run["implementation"]))
    if run["state"] != "ran":
        console.print(f"[bold]{name}[/] {run['state']}: {escape(printable(run.get('reason', '')))}")
        if not run["results"]:
            return
    for row in run["results"]:
        if failed(row["status"]) or row["status"] in WARNINGS:
            colour = "yellow" if row["status"] in WARNINGS else "red"
            console.print(f"[{colour}]{row['status']}[/] [bold]{row['clause']}[/] {row['vector']}  [dim]({name})[/]")
            console.print(f"    {escape(printable(row.get('message', '')))}", highlight=False, soft_wrap=True)
            if row.get("candidates"):
                console.print(f"    looks like: {', '.join(row['candidates'])}", highlight=False)
    counts = Counter(row["status"] for row in run["results"])
    told = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    version = escape(printable(run.get("version", "")))
    console.print(f"[bold]{name}[/] {version}: {told} in {run.get('seconds', 0):g} s", highlight=False)


def print_matrix(console: Console, report: Report) -> None:
    """Clause families by implementations: passed of applicable. As many tables as keep the numbers readable."""
    families = [f for f in FAMILIES if any(_family(row) == f for run in report["runs"] for row in run["results"])]
    for first in range(0, max(1, len(report["runs"])), MOST_COLUMNS):
        runs = report["runs"][first : first + MOST_COLUMNS]
        title = "vectors passed of those that applied, by the family of their first clause"
        table = Table(title=None if first else title)
        table.add_column("")
        for run in runs:
            table.add_column(escape(printable(run["implementation"])), justify="center")
        for family in families:
            table.add_row(family, *(cell_text(cell(run, family)) for run in runs))
        table.add_row("", *("" if run["state"] == "ran" else run["state"] for run in runs))
        console.print(table)


def cell(run: Run, family: str) -> tuple[int, int]:
    """Vectors passed and applicable in one family."""
    rows = [row["status"] for row in run["results"] if _family(row) == family and row["status"] not in NOT_JUDGED]
    return len([status for status in rows if status == "pass"]), len(rows)


def cell_text(counts: tuple[int, int]) -> str:
    """One cell of the matrix."""
    passed, of = counts
    if of == 0:
        return "[dim]-[/]"
    return f"[{'green' if passed == of else 'red'}]{passed}/{of}[/]"


def exit_code(report: Report, judged: Sequence[str]) -> int:
    """0 if all judged implementations passed what ran, 1 for failures, 2 where one could not run to its end."""
    runs = [run for run in report["runs"] if run["implementation"] in judged]
    if any(run["state"] in ("smoke failed", "stopped") for run in runs):
        return 2
    if any(run["state"] == "not installed" for run in runs):
        return 2
    return int(any(failed(row["status"]) for run in runs for row in run["results"]))


def write(report: Report, folder: Path) -> list[Path]:
    """Store `report.json` and `report.html` in `folder`."""
    check_schema("report", report, "report")
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "report.json", folder / "report.html"
    data.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    page.write_text(html(report), "utf-8")
    return [data, page]


def read(path: Path) -> Report:
    """A stored report, checked against its schema."""
    report = read_json(path)
    check_schema("report", report, path.name)
    return dict(report)


def merge(many: Iterable[Report]) -> Report:
    """The runs of several reports in one; they must come from one corpus."""
    parts = list(many)
    corpora = {part["corpus"] for part in parts}
    if len(corpora) > 1:
        raise FormatError("these reports were made from different vectors and cannot be put side by side")
    return {**parts[0], "runs": [run for part in parts for run in part["runs"]]}


def html(report: Report) -> str:
    """The report as one page that asks for nothing else; all text from outside is escaped."""
    environment = Environment(loader=PackageLoader("statescan.conformance", "templates"), autoescape=True,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    clauses = {label: _code(text.sentence) for label, text in parse_chapters().items()}
    used = sorted({row["clause"] for run in report["runs"] for row in run["results"]}, key=_clause_order)
    return environment.get_template("report.html").render(
        report=report, vectors=_vectors(report), operation=operation, clauses=clauses, used=used, cell=_clause_cell,
        failed=failed, printable=printable, warnings=WARNINGS,
    )  # fmt: skip


def _vectors(report: Report) -> dict[str, Any]:
    """Every vector that a report names; one that was drawn for the run is told by the one it was drawn from."""
    corpus = load_corpus()
    rows = {row["vector"] for run in report["runs"] for row in run["results"]} - set(corpus)
    origins = {name: next((v for key, v in corpus.items() if name.startswith("fresh-") and key[:40] in name), {})
               for name in rows}  # fmt: skip
    return {**corpus, **{name: {"why": "", "effect": "", "op": "", "format": "statescan.vector/1", **origin}
                         for name, origin in origins.items()}}  # fmt: skip


def _code(sentence: str) -> Markup:
    """A sentence with its `code` marked up, everything else escaped."""
    parts = sentence.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def clause_text(label: str) -> str:
    """A clause as it stands in its chapter: sentence, example, neighbour, reason."""
    found = parse_chapters().get(label)
    if found is None:
        return ""
    return (f"{found.label}  {found.title}\n\n{found.sentence}\n\nExample. {found.example}\n\n"
            f"Not this. {found.neighbour}\n\nWhy. {found.why}\n")  # fmt: skip


def _clause_cell(run: Run, label: str) -> tuple[int, int]:
    rows = [r["status"] for r in run["results"] if r["clause"] == label and r["status"] not in NOT_JUDGED]
    return len([status for status in rows if status == "pass"]), len(rows)


def _family(row: Mapping[str, Any]) -> str:
    return str(row["clause"]).rpartition("-")[0]


def _clause_order(label: str) -> tuple[int, int]:
    family, _, number = label.rpartition("-")
    return FAMILIES.index(family), int(number)
