"""The grammar of edits: models without their faults are right, every edit changes the code, most are noticed."""

import ast

import pytest

from statescan.conformance import generated_mutants as generated
from statescan.goldens.store import load_corpus, manifest

DIGEST = manifest(load_corpus().values())["digest"]


@pytest.mark.parametrize("module", ["delta", "ssd", "conv", "gates", "step"])
def test_a_tree_without_faults_mentions_none(module: str) -> None:
    tree = generated.tree_of(module)
    compared = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    assert not [text for text in compared if "fault ==" in text or "fault !=" in text]


@pytest.mark.parametrize("structure", generated.STRUCTURES)
def test_a_few_of_each_structure(structure: str) -> None:
    """Finding the sites runs every vector on the tree without faults, and raises where one fails."""
    chosen = generated.drawn(structure, 8, DIGEST)
    assert len(chosen) == 8
    assert chosen == generated.drawn(structure, 8, DIGEST)
    for site in chosen:
        before = ast.unparse(generated.tree_of(site.module))
        editor = generated.Editor(site.number)
        assert ast.unparse(ast.fix_missing_locations(editor.visit(generated.tree_of(site.module)))) != before
    fates = [generated.fate(site) for site in chosen]
    assert sum(fate != "survived" for fate in fates) >= 4, dict(zip(map(generated.name_of, chosen), fates, strict=True))


@pytest.mark.parametrize(
    ("source", "edits"),
    [
        ("a[i] + 1", {"Add turned into Sub", "one more", "one less", "the next one", "the one before"}),
        ("x.T if y is None else x[1:n]", {"always", "never", "not transposed", "Is turned into IsNot", "range cut",
                                          "range begun late", "one more", "one less"}),
        ("np.where(a < b, np.exp(a), -b)", {"where turned round", "Lt turned into LtE", "exp dropped",
                                            "sign or negation dropped"}),
    ],
)  # fmt: skip
def test_the_edits_of_an_expression(source: str, edits: set[str]) -> None:
    editor = generated.Editor()
    editor.visit(ast.parse(f"def f(self):\n    return {source}\n"))
    assert {name for _, name in editor.found} == edits
