"""Mutants that nobody thought of: a grammar of edits applied to our own models, drawn by the digest of the corpus.

    python -m statescan.conformance.generated_mutants [--count 500] [--only STRUCTURE] [--jobs N] [--json FILE]

The models of `statescan.conformance.mutants` are read as syntax trees. An edit moves an index by one, cuts a range,
turns a comparison, a sum or a choice, drops a statement, a copy or a transposition, or rounds a product to bfloat16.
Only statements that some vector runs are edited, and a mutant is tried on the vectors that run its statement, the quick
ones first. It is killed by a failed comparison; one that raises or never ends is counted by itself, since anybody would
notice it. What survives is listed with its line: either it computes the same, or a vector is missing. `--json` keeps
what has been tried, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from statescan.conformance import replay_program
from statescan.conformance.cases import ANYTHING, Case, tell
from statescan.goldens.regenerate import LEAST_KILL, run_model
from statescan.goldens.store import load_corpus, load_traces, load_vectors, manifest
from statescan.reference.arrays import round_to, widen

STRUCTURES: dict[str, tuple[tuple[str, str], ...]] = {
    "recurrent": (("delta", "build"), ("ssd", "build")),
    "chunked": (("delta", "build_chunked"), ("ssd", "build_chunked")),
    "kernel-like": (("conv", "build"), ("gates", "build")),
    "engine": (("step", "build"),),
}
"""The modules of each structure, and the function that builds its operations."""
SECONDS = 30.0
"""What one vector may take before a mutant counts as one that never ends."""


class Site(NamedTuple):
    """One edit of one module: the number of the edit in the order of the tree, its line and name."""

    module: str
    build: str
    number: int
    line: int
    edit: str


# ---------------------------------------------------------------------------------------------------------------------
# The grammar
# ---------------------------------------------------------------------------------------------------------------------

_TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_OTHER = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
_DROPPED = {"exp", "copy", "cumsum", "flip", "sqrt", "log1p"}


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every edit of one node: its name, and what stands in the node's place."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= 64:
        yield "one more", ast.Constant(node.value + 1)
        yield "one less", ast.Constant(node.value - 1)
    elif isinstance(node, (ast.Compare, ast.BinOp, ast.BoolOp)):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        if type(operator) in _TURNED and (not isinstance(node, ast.Compare) or len(node.ops) == 1):
            other = copy.copy(node)
            turned: Any = _TURNED[type(operator)]()
            if isinstance(other, ast.Compare):
                other.ops = [turned]
            else:
                other.op = turned
            yield f"{type(operator).__name__} turned into {type(turned).__name__}", other
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
        for name, operator in (("the next one", ast.Add()), ("the one before", ast.Sub())):
            yield name, ast.Subscript(node.value, ast.BinOp(node.slice, operator, ast.Constant(1)), node.ctx)
    elif isinstance(node, ast.Slice):
        if node.upper is not None:
            yield "range cut", ast.Slice(node.lower, ast.BinOp(node.upper, ast.Sub(), ast.Constant(1)), node.step)
        if node.lower is not None:
            later = ast.BinOp(node.lower, ast.Add(), ast.Constant(1))
            yield "range begun late", ast.Slice(later, node.upper, node.step)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.Attribute) and node.attr in ("mT", "T") and isinstance(node.ctx, ast.Load):
        yield "not transposed", node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield "sign or negation dropped", node.operand
    elif isinstance(node, ast.IfExp):
        yield "always", node.body
        yield "never", node.orelse
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "statement dropped", ast.Pass()
    elif isinstance(node, ast.Assign) and any(_is_product(part) for part in ast.walk(node.value)):
        rounded = ast.Call(ast.Name("_narrow", ast.Load()), [node.value], [])
        yield "rounded to bfloat16", ast.Assign(node.targets, rounded)


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _OTHER:
        func = copy.copy(node.func)
        setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", _OTHER[name])
        yield f"{name} turned into {_OTHER[name]}", ast.Call(func, node.args, node.keywords)
    if name in _DROPPED:
        yield f"{name} dropped", node.args[0] if node.args else node.func.value  # type: ignore[attr-defined]
    if name == "where" and len(node.args) == 3:
        yield "where turned round", ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)
    if name == "range" and node.args:
        last = ast.BinOp(node.args[-1], ast.Sub(), ast.Constant(1))
        yield "loop cut", ast.Call(node.func, [*node.args[:-1], last], node.keywords)


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.MatMult))


class Right(ast.NodeTransformer):
    """The model without its faults: comparisons with a fault are decided, and what is left without use is taken out."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if getattr(node.left, "attr", getattr(node.left, "id", "")) != "fault":
            return self.generic_visit(node)
        return ast.Constant(isinstance(node.ops[0], (ast.NotEq, ast.NotIn, ast.Is)))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        decided = isinstance(node.op, ast.Or)  # what one value decides for all
        values = [self.visit(value) for value in node.values]
        if any(_constant(value) is decided for value in values):
            return ast.Constant(decided)
        values = [value for value in values if _constant(value) is None] or [ast.Constant(not decided)]
        return values[0] if len(values) == 1 else ast.BoolOp(node.op, values)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        nothing = _constant(node.right) is False and isinstance(node.op, (ast.Add, ast.Sub, ast.BitOr))
        return node.left if nothing else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        node.operand = self.visit(node.operand)
        known = _constant(node.operand)
        return ast.Constant(not known) if isinstance(node.op, ast.Not) and known is not None else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        known = _constant(node.test)
        return node if known is None else node.body if known else node.orelse

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        known = _constant(node.test)
        return node if known is None else (node.body if known else node.orelse) or ast.Pass()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        while known := _decided(node):
            _Known(known).visit(node)
            self.generic_visit(node)
        while True:
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
            idle = _Idle(used)
            idle.visit(node)
            if not idle.dropped:
                return node


def _decided(node: ast.FunctionDef) -> dict[str, bool]:
    """Local names that are set once, to True or False, and read."""
    stored, known = Counter[str](), dict[str, bool]()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            stored[part.id] += 1
        if not isinstance(part, ast.Assign) or len(part.targets) != 1:
            continue
        target, value = part.targets[0], part.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        known |= {name.id: found for name, one in pairs
                  if isinstance(name, ast.Name) and (found := _constant(one)) is not None}  # fmt: skip
    read = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    return {name: value for name, value in known.items() if stored[name] == 1 and name in read}


class _Known(ast.NodeTransformer):
    """Puts the value of a decided name in the place of the name."""

    def __init__(self, known: dict[str, bool]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.AST:
        reads = isinstance(node.ctx, ast.Load) and node.id in self.known
        return ast.Constant(self.known[node.id]) if reads else node


class _Idle(ast.NodeTransformer):
    """Takes out what is assigned and never read."""

    def __init__(self, used: set[str]) -> None:
        self.used, self.dropped = used, 0

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        names = [part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        plain = all(isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets)
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple) and len(node.targets) == 1:
            return self._pairs(node, node.targets[0], node.value)
        if not plain or self.used & set(names):
            return node
        self.dropped += 1
        return ast.Pass()


    def _pairs(self, node: ast.Assign, targets: ast.Tuple, values: ast.Tuple) -> ast.AST:
        """Several at once: those that are read stay."""
        pairs = [(target, value) for target, value in zip(targets.elts, values.elts, strict=True)
                 if not isinstance(target, ast.Name) or target.id in self.used]  # fmt: skip
        if len(pairs) == len(targets.elts):
            return node
        self.dropped += 1
        if not pairs:
            return ast.Pass()
        kept, given = [list(part) for part in zip(*pairs, strict=True)]
        if len(pairs) == 1:
            return ast.Assign(kept, given[0], lineno=node.lineno)
        return ast.Assign([ast.Tuple(kept, ast.Store())], ast.Tuple(given, ast.Load()), lineno=node.lineno)


class _Forgotten(ast.NodeTransformer):
    """Takes out what is kept in an attribute that nothing reads."""

    def __init__(self, tree: ast.Module) -> None:
        self.read = {node.attr for node in ast.walk(tree)
                     if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}  # fmt: skip

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        idle = all(isinstance(target, ast.Attribute) and target.attr not in self.read for target in node.targets)
        return ast.Pass() if idle else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return ast.Pass() if isinstance(node.target, ast.Attribute) and node.target.attr not in self.read else node


def _constant(node: ast.AST) -> bool | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, bool) else None


class Editor(ast.NodeTransformer):
    """Counts the edits inside functions, and makes the wanted one."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.found, self.line, self.depth = wanted, list[tuple[int, str]](), 0, 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            return self._inside(node)
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.arguments)) or not self.depth:
            return node if self.depth else self.generic_visit(node)
        if isinstance(node, ast.stmt):
            self.line = node.lineno
        for name, other in variants(node):
            self.found.append((self.line, name))
            if len(self.found) - 1 == self.wanted:
                return ast.copy_location(other, node)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node.value = self.visit(node.value)
            return node
        return self.generic_visit(node)

    def _inside(self, node: ast.FunctionDef | ast.Lambda) -> ast.AST:
        self.depth += 1
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
        else:
            node.body = [self.visit(part) for part in node.body]
        self.depth -= 1
        return node


class Marker(ast.NodeTransformer):
    """Puts a call in front of every statement of a function, to see what runs."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse"):
            statements = getattr(node, name, None)
            if isinstance(statements, list) and not isinstance(node, (ast.Module, ast.ClassDef)):
                marked: list[ast.stmt] = []
                for part in statements:
                    marked += [ast.Expr(ast.Call(ast.Name("_ran", ast.Load()), [ast.Constant(part.lineno)], [])), part]
                setattr(node, name, marked)
        return node


# ---------------------------------------------------------------------------------------------------------------------
# Models from trees
# ---------------------------------------------------------------------------------------------------------------------


def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module of models, without the faults that were put in by hand."""
    path = import_module(f"statescan.conformance.mutants.{module}").__file__
    tree: ast.Module = Right().visit(ast.parse(Path(str(path)).read_text("utf-8")))
    found: ast.Module = ast.fix_missing_locations(_Forgotten(tree).visit(tree))
    return found


def load(module: str, tree: ast.Module, **names: Any) -> ModuleType:
    """A module made from a changed tree."""
    made = ModuleType(f"statescan.conformance.mutants.{module}")
    vars(made).update({"_narrow": _narrow, **names})
    exec(compile(ast.fix_missing_locations(tree), f"<{module}>", "exec"), vars(made))
    return made


def _narrow(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return widen(round_to(value, "bf16"))
    return value


def mutate(site: Site) -> ModuleType:
    """The module with one edit."""
    editor = Editor(site.number)
    return load(site.module, editor.visit(tree_of(site.module)))


# ---------------------------------------------------------------------------------------------------------------------
# What runs where, and what is killed
# ---------------------------------------------------------------------------------------------------------------------


def try_one(made: ModuleType, build: str, key: str) -> str:
    """Run one vector or trace on a module: `pass`, `fail` or `raise`."""
    if key in _traces():
        with mock.patch.object(replay_program, "models", made):
            told = replay_program.replay_model(_traces()[key], None)
        return "pass" if told is None else "fail" if told.status.startswith("fail.") else "raise"
    verdict = run_model(_case(key), getattr(made, build)(None))
    if verdict.passed or (verdict.score is not None and verdict.score < LEAST_KILL):
        return "pass"
    return "fail" if verdict.status.startswith("fail.") else "raise"


_traces, _vectors = cache(load_traces), cache(load_vectors)


@cache
def _case(key: str) -> Case:
    return Case(_vectors()[key], tell(_vectors()[key], _vectors()), ANYTHING)


@cache
def ran(module: str, build: str) -> dict[int, list[str]]:
    """For every line of a module the vectors that run it, the quick ones first."""
    seen: set[int] = set()
    made = load(module, Marker().visit(tree_of(module)), _ran=seen.add)
    operations = getattr(made, build)(None)
    keys = list(_traces()) if module == "step" else [k for k, v in _vectors().items() if v["op"] in operations]
    lines, took = defaultdict(list), dict[str, float]()
    for key in keys:
        seen.clear()
        started = time.perf_counter()
        if try_one(made, build, key) != "pass":
            raise RuntimeError(f"{key}: the marked model of {module} fails it")
        took[key] = time.perf_counter() - started
        for line in seen:
            lines[line].append(key)
    return {line: sorted(found, key=took.__getitem__) for line, found in lines.items()}


def sites(structure: str) -> list[Site]:
    """Every edit of a structure whose statement some vector runs."""
    found = []
    for module, build in STRUCTURES[structure]:
        editor = Editor()
        editor.visit(tree_of(module))
        lines = ran(module, build)
        found += [Site(module, build, n, line, name) for n, (line, name) in enumerate(editor.found) if line in lines]
    return found


def fate(site: Site) -> str:
    """What becomes of a mutant: `killed` by a comparison, `raised` (or without an end), or `survived`."""
    made, raised = mutate(site), False
    signal.signal(signal.SIGALRM, _too_long)
    for key in ran(site.module, site.build)[site.line]:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            told = try_one(made, site.build, key)
        except Exception:  # whatever a broken model raises
            told = "raise"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if told == "fail":
            return "killed"
        raised |= told == "raise"
    return "raised" if raised else "survived"


def _too_long(*_: Any) -> None:
    raise TimeoutError


def drawn(structure: str, count: int, digest: str) -> list[Site]:
    """So many edits of a structure, by the digest of the corpus; all of them where there are fewer."""
    every = sites(structure)
    return every if len(every) <= count else random.Random(f"{digest} {structure}").sample(every, count)


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, try, count; 0 where at least 98 in 100 are noticed."""
    parser = argparse.ArgumentParser(prog="statescan.conformance.generated_mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="mutants of each structure")
    parser.add_argument("--only", choices=list(STRUCTURES), help="one structure")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was tried, and go on from there")
    options = parser.parse_args(argv)
    digest = manifest(load_corpus().values())["digest"]
    kept = _kept(options.json, digest)
    enough = True
    for structure in [options.only] if options.only else STRUCTURES:
        chosen = drawn(structure, options.count, digest)
        fates = kept.setdefault(structure, {})
        todo = [site for site in chosen if name_of(site) not in fates]
        with ProcessPoolExecutor(options.jobs) as pool:
            for done, (site, told) in enumerate(zip(todo, pool.map(fate, todo), strict=True), 1):
                fates[name_of(site)] = told
                if options.json and (done % 20 == 0 or done == len(todo)):
                    _keep(options.json, digest, kept)
                if sys.stderr.isatty():
                    print(f"\r{structure}: {done} of {len(todo)}", end="", file=sys.stderr)
        counts = Counter(fates[name_of(site)] for site in chosen)
        noticed = (counts["killed"] + counts["raised"]) / max(len(chosen), 1)
        enough &= noticed >= 0.98
        print(f"{structure}: {len(chosen)} mutants, {counts['killed']} killed, {counts['raised']} raise or do not end, "
              f"{counts['survived']} survive ({noticed:.1%} noticed)")  # fmt: skip
        for site in chosen:
            if fates[name_of(site)] == "survived":
                print(f"  {name_of(site)}")
    return 0 if enough else 1


def name_of(site: Site) -> str:
    """A mutant in one line."""
    return f"{site.module}.{site.build}:{site.line} #{site.number} {site.edit}"


def _kept(path: Path | None, digest: str) -> dict[str, dict[str, str]]:
    """What was tried already, of the same corpus."""
    if path is None or not path.exists():
        return {}
    stored: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    return dict(stored["fates"]) if stored.get("corpus") == digest else {}


def _keep(path: Path, digest: str, kept: Mapping[str, Mapping[str, str]]) -> None:
    body = {"format": "statescan.generated/1", "corpus": digest, "date": time.strftime("%Y-%m-%d"), "fates": kept}
    path.write_text(json.dumps(body, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
