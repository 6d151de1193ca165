"""Sphinx extension of the site: a page for each clause, vector, trace and known fault, the table of released packages,
the list of checked numbers, and the API, made while the site is built from the data the suite itself runs on.

These pages are no documents of Sphinx: a thousand of them are rendered in seconds, and the search knows their words.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from api_pages import modules
from docutils import nodes
from docutils.frontend import get_default_settings
from docutils.utils import new_document
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markupsafe import Markup
from sphinx.application import Sphinx
from sphinx.environment.adapters.toctree import global_toctree_for_doc

from statescan.conformance.report import cell, failed
from statescan.conformance.traces import is_trace, operation
from statescan.goldens.store import VECTORS, load_faults, read_json, vector_text
from statescan.spec.claims import chapter_claims
from statescan.spec.clauses import ClauseText, chapter_names, parse_chapters
from statescan.spec.contract import FAMILIES

HERE = Path(__file__).parent
REPORT = HERE / "compatibility.json"
SHOWN_STATUS = {"pass": "pass", "not_run": "not run", "not_applicable": "not applicable"}
_LABEL = re.compile(r"\b([A-Z]+-\d+)\b")
_FINDING = re.compile(r"^\((?P<anchor>[a-z0-9-]+)\)=\n## (?P<title>.+)$", re.MULTILINE)
_ISSUE = re.compile(r"[\w.-]+/[\w.-]+#\d+")

Page = tuple[str, dict[str, Any], str]


class Site:
    """What the pages are made from, read once a build."""

    def __init__(self) -> None:
        self.clauses = parse_chapters()
        self.corpus = {path.stem: read_json(path) for path in sorted(VECTORS.glob("*/*.json"))}
        self.faults = load_faults()
        self.report: Mapping[str, Any] = read_json(REPORT) if REPORT.exists() else {"runs": []}
        self.runs = [run for run in self.report["runs"] if run["results"]]
        self.titles = dict(_FINDING.findall((HERE.parent / "spec" / "findings.md").read_text("utf-8")))
        self.markdown = MarkdownIt("commonmark", {"html": False})

    @cached_property
    def by_clause(self) -> dict[str, list[dict[str, Any]]]:
        """Vectors that name a clause, those that name it first before the others."""
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for first in (True, False):
            for one in self.corpus.values():
                for label in one["clauses"]:
                    if (label == one["clauses"][0]) == first:
                        found[label].append(one)
        return found

    @cached_property
    def killers(self) -> dict[str, list[dict[str, Any]]]:
        """Vectors that kill a fault."""
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for one in self.corpus.values():
            for fault in one.get("kills", []):
                found[fault].append(one)
        return found

    @cached_property
    def results(self) -> dict[str, dict[str, Mapping[str, Any]]]:
        """vector -> implementation -> its row of the stored report."""
        found: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for run in self.runs:
            for row in run["results"]:
                found[row["vector"]][run["implementation"]] = row
        return found

    def counts(self, label: str) -> dict[str, Counter[str]]:
        """Statuses of the vectors whose first clause is `label`, by implementation."""
        first = [one["id"] for one in self.by_clause[label] if one["clauses"][0] == label]
        return {
            run["implementation"]: Counter(
                self.results[name][run["implementation"]]["status"]
                for name in first
                if run["implementation"] in self.results[name]
            )
            for run in self.runs
        }

    # -- text ---------------------------------------------------------------------------------------------------------

    def prose(self, text: str, root: str = "../") -> Markup:
        """Markdown of a chapter or a docstring as HTML, labels as links; raw HTML in it stays text."""
        return Markup(self.linked(self.markdown.render(text), root))

    def words(self, text: str, root: str = "../") -> Markup:
        """The same for one run of words."""
        return Markup(self.linked(self.markdown.renderInline(text), root))

    def linked(self, html: str, root: str) -> str:
        parts = re.split(r"(<a .*?</a>|<code.*?</code>|<[^>]*>)", html, flags=re.DOTALL)
        for n in range(0, len(parts), 2):
            parts[n] = _LABEL.sub(lambda match: self.label(match[1], root), parts[n])
        return "".join(parts)

    def label(self, label: str, root: str = "../") -> str:
        """A link to the page of a clause, or the bare label."""
        return f'<a href="{root}clauses/{label}.html">{label}</a>' if label in self.clauses else label

    def seen(self, reference: str) -> Markup:
        """A public reference as a link where it is an address or an issue."""
        if reference.startswith("https://"):
            return Markup('<a class="external" href="{0}">{0}</a>').format(reference)
        if _ISSUE.fullmatch(reference):
            owner, number = reference.split("#")
            return Markup('<a class="external" href="https://github.com/{0}/issues/{1}">{2}</a>').format(
                owner, number, reference)  # fmt: skip
        return Markup("{}").format(reference)


def chapter_page(clause: ClauseText) -> str:
    return clause.chapter.removesuffix(".py") + ".html#" + clause.label.lower()


def tensor_rows(vector: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(role, name, type and shape, numbers in short) of each tensor of a vector."""
    for role in ("inputs", "expect"):
        for name, spec in vector.get(role, {}).items():
            if isinstance(spec, dict) and "shape" in spec:
                kind = f"{spec.get('dtype', '')} {json.dumps(spec['shape'])}".strip()
                yield role, name, kind, _short(spec)
            else:
                yield role, name, "", json.dumps(spec)[:400]


def _short(spec: Mapping[str, Any]) -> str:
    if "gen" in spec:
        return "generated: " + json.dumps(spec["gen"])
    if "blob" in spec:
        return "kept in a file of its own"
    data = spec["data"] if isinstance(spec["data"], list) else [spec["data"]]
    text = ", ".join(str(value) for value in data[:32])
    return text + (f", and {len(data) - 32} more" if len(data) > 32 else "")


# ---------------------------------------------------------------------------------------------------------------------
# The pages
# ---------------------------------------------------------------------------------------------------------------------


def pages(site: Site) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(page name, title, template, what the template is given); `found_by` are the words for the search."""
    listed = {family: [c for c in site.clauses.values() if c.label.split("-")[0] == family] for family in FAMILIES}
    yield "clauses/index", "Clauses", "clauses.html", {"families": {k: v for k, v in listed.items() if v}}
    for clause in site.clauses.values():
        known = [fault for fault in site.faults.values() if clause.label in fault["clauses"]]
        yield f"clauses/{clause.label}", f"{clause.label}  {clause.title}", "clause.html", {
            "clause": clause, "vectors": site.by_clause[clause.label], "known": known,
            "counts": site.counts(clause.label), "chapter": chapter_page(clause),
            "found_by": f"{clause.sentence} {clause.example} {clause.neighbour} {clause.why}",
        }  # fmt: skip
    families: dict[str, list[Any]] = defaultdict(list)
    for one in site.corpus.values():
        families[one["clauses"][0].split("-")[0]].append(one)
    yield "vectors/index", "Vectors and traces", "vectors.html", {"families": families}
    for one in site.corpus.values():
        stepped = site.corpus[one["base"]] if "base" in one else one
        yield f"vectors/{one['id']}", one["id"], "vector.html", {
            "one": one, "stepped": stepped, "json": _script(stepped), "tensors": list(tensor_rows(one)),
            "results": site.results.get(one["id"], {}),
            "source": vector_text(one, "trace" if is_trace(one) else "vector"),
            "found_by": f"{one['why']} {one['effect']} {operation(one)} {' '.join(one['clauses'])}",
        }  # fmt: skip
    yield "faults/index", "Known faults", "faults.html", {}
    for fault in site.faults.values():
        yield f"faults/{fault['id']}", fault["id"], "fault.html", {
            "fault": fault, "killers": site.killers[fault["id"]],
            "finding": fault["id"] if fault["id"] in site.titles else None,
            "found_by": f"{fault['mechanism']} {fault['effect']} {' '.join(fault['seen'])}",
        }  # fmt: skip
    lines = {family: [cell(run, family) for run in site.runs] for family in FAMILIES}
    yield "compatibility", "Released packages", "compatibility.html", {
        "root": "", "failed": failed,
        "lines": {name: cells for name, cells in lines.items() if any(of for _, of in cells)},
        "sums": [tuple(sum(cells[n][i] for cells in lines.values()) for i in (0, 1)) for n in range(len(site.runs))],
    }  # fmt: skip
    yield "claims", "Numbers and claims", "claims.html", {
        "root": "", "chapters": {name: list(chapter_claims(name)) for name in chapter_names()},
    }  # fmt: skip
    yield "stepper", "Step through a file", "stepper.html", {"root": ""}
    found = modules()
    yield "api/index", "API", "api.html", {"modules": found}
    for module in found:
        yield f"api/{module.name}", module.name, "module.html", {
            "module": module, "found_by": " ".join([module.doc, *(f"{e.name} {e.doc}" for e in module.entries)]),
        }  # fmt: skip


def _script(one: Mapping[str, Any]) -> Markup:
    """JSON that may stand inside a script element."""
    return Markup(json.dumps(one, separators=(",", ":")).replace("<", "\\u003c"))


def templates(site: Site) -> Environment:
    """The templates of the generated pages; everything that they are given is escaped."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "_templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(site=site, operation=operation, is_trace=is_trace, status=SHOWN_STATUS, root="../")
    return environment


def collect(app: Sphinx) -> Iterator[Page]:
    """Render every page, and tell the search its title and words."""
    if app.builder.format != "html" or not app.config.data_pages:
        return
    site = Site()
    environment = templates(site)
    trees: dict[int, str] = {}

    def navigation(name: str, **how: Any) -> str:
        """The tree of documents, which is the same on every page of one depth, made once."""
        depth = name.count("/")
        if depth not in trees:
            tree = global_toctree_for_doc(app.env, name, app.builder, tags=app.tags, **how)
            trees[depth] = app.builder.render_partial(tree)["fragment"]
        return trees[depth]

    for name, title, template, given in pages(site):
        body = environment.get_template(template).render(title=title, **given)
        feed(app, name, title, given.get("found_by", ""))
        shown = {"title": title, "body": body, "display_toc": False, "toc": ""}
        yield name, {**shown, "toctree": partial(navigation, name)}, "page.html"


def feed(app: Sphinx, name: str, title: str, words: str) -> None:
    """Make a page found by its title and words."""
    document = new_document(name, get_default_settings())
    document += nodes.title("", title)
    document += nodes.paragraph("", words)
    if app.builder.indexer is not None:
        app.builder.indexer.feed(name, f"{name}.html", title, document)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("data_pages", True, "html", bool)
    app.connect("html-collect-pages", collect)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
