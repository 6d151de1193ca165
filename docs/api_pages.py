"""The API as the sources state it: every public module, function and class with its signature and docstring.

Read from the syntax tree: nothing is imported, so the pages are the same with and without a GPU, Triton or a peer.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("spec", "reference", "fast", "goldens", "conformance")
LEFT_OUT = ("mutants", "findings", "variations", "second", "bench", "kernels", "adapters", "vectors")
"""Folders that are not called from outside; of `adapters` and `kernels` the sources are the documentation."""


@dataclass(frozen=True)
class Entry:
    """One function, class or method."""

    name: str
    signature: str
    doc: str
    kind: str
    members: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Module:
    """One module: its file inside the repository, its docstring, its public names."""

    name: str
    path: str
    doc: str
    entries: tuple[Entry, ...]


def modules(root: Path = ROOT) -> list[Module]:
    """Every public module, in the order of the house."""
    paths = [path for part in PARTS for path in sorted((root / part).rglob("*.py"))]
    return [found for path in paths if (found := _module(path, root)) is not None]


def _module(path: Path, root: Path) -> Module | None:
    place = path.relative_to(root)
    if set(place.parts) & set(LEFT_OUT) or path.stem == "__main__" or not path.stem.isidentifier():
        return None
    tree = ast.parse(path.read_text("utf-8"))
    name = ".".join(["statescan", *place.with_suffix("").parts]).removesuffix(".__init__")
    entries = tuple(entry for node in tree.body if (entry := _entry(node)) is not None)
    doc = ast.get_docstring(tree) or ""
    return Module(name, place.as_posix(), doc, entries) if doc or entries else None


def _entry(node: ast.stmt) -> Entry | None:
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
        return None
    doc = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        members = tuple(entry for child in node.body if (entry := _entry(child)) is not None and entry.doc)
        fields = [ast.unparse(child) for child in node.body if isinstance(child, ast.AnnAssign)]
        head = f"class {node.name}({bases})" if bases else f"class {node.name}"
        return Entry(node.name, "\n    ".join([head, *fields]), doc, "class", members)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return Entry(node.name, f"{node.name}({_arguments(node.args)}){returns}", doc, "function")


def _arguments(arguments: ast.arguments) -> str:
    text = ast.unparse(arguments)
    return text if len(text) < 80 else "\n    " + text.replace(", ", ",\n    ") + "\n"
