"""Who may import whom: the arrows of the house, read module by module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("spec", "reference", "goldens", "conformance", "fast")

# (who, what it may import); the first prefix that fits decides
ARROWS = [
    ("spec.contract", ()),
    ("spec.clauses", ("spec.contract",)),
    ("spec.figures", ("spec",)),
    ("spec", ("spec", "reference", "conformance.mutants")),
    ("reference", ("spec.contract", "reference")),
    ("fast.bench", ("spec.contract", "reference.host", "fast", "goldens.store", "conformance")),
    ("fast", ("spec.contract", "reference.host", "fast")),
    ("goldens.regenerate", ("spec.contract", "reference", "goldens", "conformance")),
    ("goldens.gains", ("spec.contract", "reference.sites", "goldens")),
    ("goldens", ("spec.contract", "goldens")),
    ("conformance.mutants", ("spec.contract", "reference", "conformance.mutants")),
    ("conformance.oracle", ("spec.contract", "reference", "goldens", "conformance")),
    ("conformance.replay_program", ("spec.contract", "reference", "goldens", "conformance")),
    ("conformance.generated_mutants", ("spec.contract", "reference", "goldens", "conformance")),
    ("conformance.replay_random", ("spec.contract", "reference", "goldens", "conformance")),
    ("conformance.expect", ("spec.contract", "reference.functions", "goldens", "conformance")),
    ("conformance.schedule_programs", ("spec.contract", "reference.host", "conformance")),
    ("conformance.adapters.reference", ("spec.contract", "reference", "conformance.adapter", "conformance.hooks")),
    ("conformance.adapters.fast",
     ("spec.contract", "fast", "conformance.adapter", "conformance.adapters", "conformance.hooks")),
    ("conformance.cli", ("spec.contract", "spec.clauses", "goldens", "conformance", "fast.bench")),
    ("conformance.report", ("spec.contract", "spec.clauses", "goldens", "conformance")),
    ("conformance", ("spec.contract", "goldens", "conformance")),
]


def modules():
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            if "findings" not in path.parts:
                yield pytest.param(path, id=str(path.relative_to(ROOT)))


def imports(path: Path, top_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    nodes = tree.body if top_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("statescan"):
            for alias in node.names:
                deeper = ROOT / node.module.removeprefix("statescan").strip(".").replace(".", "/") / f"{alias.name}.py"
                found.add(f"{node.module}.{alias.name}" if deeper.exists() else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("statescan")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
    return {name.removeprefix("statescan.") for name in found if name != "statescan"}


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("path", list(modules()))
def test_imports_follow_the_arrows(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    allowed = next(targets for who, targets in ARROWS if under(name, who))
    for target in imports(path):
        assert any(under(target, prefix) for prefix in allowed), f"{name} must not import {target}"


def test_the_runner_imports_no_reference():
    """Whoever judges must not hold the answers' source: neither the reference nor the oracle, even by way of others."""
    seen, todo = set(), [ROOT / "conformance" / "runner.py"]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for target in imports(path, top_only=True):
            assert not under(target, "reference"), f"{path} brings the reference into the runner"
            file = ROOT / (target.replace(".", "/") + ".py")
            todo.append(file if file.exists() else ROOT / target.replace(".", "/") / "__init__.py")


def test_the_reference_imports_no_torch():
    for path in (ROOT / "reference").rglob("*.py"):
        if path.name not in ("inference.py", "parallel.py") and "mixers" not in path.parts:
            assert "import torch" not in path.read_text("utf-8"), path
