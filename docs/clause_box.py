"""Sphinx extension of the site: the `{clause}` box, the parts of a clause, and a link on every clause label.

The chapters stay plain text: a label such as PACK-3 is written as it is and becomes a link here.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from statescan.spec.clauses import LEVELS, OPTIONS, parse_chapters
from statescan.spec.contract import CLAUSES

NAMES = {
    "level": "Level", "since": "Since", "source": "Source", "applies": "Applies to", "observable": "Observed by",
    "exact": "Exact vector",
}  # fmt: skip
_LABEL = re.compile(r"\b([A-Z]+-\d+)\b")
_KEYWORD = re.compile(rf"\b({'|'.join(LEVELS)})\b")
_OPERATION = re.compile(r"([a-z*][a-z0-9_*]*_[a-z0-9_*]+|\*|\bssd\b)")
_ADDRESS = re.compile(r"(https://[^\s,;]+)")
_PARTS = {"Example.": "clause-example", "Not this.": "clause-neighbour", "Why.": "clause-why"}


class ClauseBox(SphinxDirective):
    """`:::{clause} LABEL` with the options of a clause, shown as one box of names and values."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = dict.fromkeys(OPTIONS, directives.unchanged_required)

    def run(self) -> list[nodes.Node]:
        label = self.arguments[0]
        if label not in CLAUSES:
            raise self.error(f"{label} is no label of CLAUSES")
        box = nodes.definition_list(classes=["clause"], ids=[f"clause-{label.lower()}"])
        for name in OPTIONS:
            if name not in self.options:
                continue
            value = nodes.paragraph("", "", *_marked(self.options[name], name))
            term = nodes.term("", NAMES[name])
            box += nodes.definition_list_item("", term, nodes.definition("", value), classes=[f"clause-{name}"])
        page = nodes.reference("", "vectors, faults and results", refuri=f"clauses/{label}.html")
        value = nodes.definition("", nodes.paragraph("", "", page))
        box += nodes.definition_list_item("", nodes.term("", "Page"), value, classes=["clause-page"])
        return [box]


class ClauseList(SphinxDirective):
    """`{clause-list}`: every clause of every chapter, label and title."""

    def run(self) -> list[nodes.Node]:
        listed = nodes.bullet_list(classes=["clause-list"])
        for clause in parse_chapters().values():
            self.env.note_dependency(self.env.doc2path(clause.chapter.removesuffix(".py")))
            words = nodes.paragraph("", f"{clause.label}  {clause.title}")
            listed += nodes.list_item("", words)
        return [listed]


def _marked(text: str, option: str) -> list[nodes.Node]:
    """The value of an option: addresses become links, names of operations are set as code."""
    parts = (_OPERATION if option == "applies" else _ADDRESS).split(text)
    return [_mark(part, option) if n % 2 else nodes.Text(part) for n, part in enumerate(parts) if part]


def _mark(part: str, option: str) -> nodes.Node:
    return nodes.literal(part, part) if option == "applies" else nodes.reference("", part, refuri=part)


class ClauseParts(SphinxTransform):
    """Give the rule, the example, the wrong neighbour and the reason of a clause their classes and run-in heads."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        for box in list(self.document.findall(nodes.definition_list)):
            if "clause" not in box["classes"] or not isinstance(box.parent, nodes.section):
                continue
            following = box.parent.children[box.parent.index(box) + 1 :]
            paragraphs = [node for node in following if isinstance(node, nodes.paragraph)]
            for n, paragraph in enumerate(paragraphs):
                head = next((head for head in _PARTS if paragraph.astext().startswith(head)), None)
                if n == 0:
                    paragraph["classes"].append("clause-rule")
                    _embolden(paragraph, _KEYWORD, "clause-keyword")
                elif head:
                    paragraph["classes"].append(_PARTS[head])
                    _embolden(paragraph, re.compile(rf"^({re.escape(head)})"), "clause-head")
                    if head == "Not this.":
                        _embolden(paragraph, re.compile(r"([a-z0-9-]+)(?=\.\Z)"), "clause-fault")


def _embolden(paragraph: nodes.paragraph, pattern: re.Pattern[str], name: str) -> None:
    for text in [child for child in paragraph.children if isinstance(child, nodes.Text)]:
        parts = pattern.split(str(text), maxsplit=1)
        if len(parts) > 1:
            before, word, after = parts
            marked = nodes.strong(word, word, classes=[name])
            if name == "clause-fault":
                marked = nodes.reference(word, word, refuri=f"faults/{word}.html", classes=[name])
            paragraph.replace(text, [nodes.Text(before), marked, nodes.Text(after)])


class ShortCode(SphinxTransform):
    """Keep short code, `[0, 5, 7, 11]`, on one line."""

    default_priority = 420

    def apply(self, **kwargs: Any) -> None:
        for code in self.document.findall(nodes.literal):
            if len(code.astext()) <= 32:
                code["classes"].append("short")


class ClauseLinks(SphinxTransform):
    """Turn every active label in running text into a link to its clause."""

    default_priority = 410
    quiet = (nodes.title, nodes.literal, nodes.literal_block, nodes.reference, pending_xref, nodes.raw, nodes.comment)

    def apply(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if not _LABEL.search(str(text)) or self._is_quiet(text):
                continue
            parts = _LABEL.split(str(text))
            linked = [self._link(part) if n % 2 else nodes.Text(part) for n, part in enumerate(parts)]
            text.parent.replace(text, linked)

    def _is_quiet(self, node: nodes.Node) -> bool:
        while node is not None:
            if isinstance(node, self.quiet):
                return True
            node = node.parent
        return False

    def _link(self, label: str) -> nodes.Node:
        if label not in CLAUSES or CLAUSES[label].state != "active":
            return nodes.Text(label)
        return pending_xref(
            "", nodes.inline(label, label), refdoc=self.env.docname, refdomain="std", reftype="ref",
            reftarget=label.lower(), refexplicit=True, refwarn=True,
        )  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("clause", ClauseBox)
    app.add_directive("clause-list", ClauseList)
    app.add_transform(ClauseParts)
    app.add_transform(ClauseLinks)
    app.add_transform(ShortCode)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
