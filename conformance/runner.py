"""Run the corpus on implementations, each in its own process, and collect the report."""

from __future__ import annotations

import datetime
import fnmatch
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

from statescan import __version__
from statescan.conformance.adapter import ALL_FEATURES
from statescan.conformance.adapters import SHIPPED
from statescan.conformance.calls import Call, Reply
from statescan.conformance.cases import Case, Missing, Vector, execute, outside, prepare
from statescan.conformance.client import Client, ProtocolError, python_command
from statescan.conformance.compare import Verdict
from statescan.conformance.fresh import drawn
from statescan.conformance.fresh import prepared as prepare_drawn
from statescan.conformance.invoke import NOTHING
from statescan.conformance.smoke import check_wiring
from statescan.conformance.traces import TraceCase, execute_trace, is_trace, prepare_trace
from statescan.goldens.store import load_corpus, manifest
from statescan.spec.contract import CLAUSES, RULES_VERSION

Result = dict[str, Any]
Report = dict[str, Any]
Progress = Callable[[str, int, int], None]

FULL = "full"
QUICK = "quick"
QUICK_SECONDS = 60.0
"""What a peer may take in the quick profile."""
OWN_SECONDS = 120.0
"""What this project's own implementations may: all of it is to be seen, and kernels are slow when interpreted."""
OWN = ("reference", "fast")


@dataclass(frozen=True)
class Selection:
    """Which vectors to run: a profile, and patterns over ids, clauses and families."""

    profile: str = QUICK
    only: Sequence[str] = field(default_factory=tuple)

    def picks(self, vector: Vector) -> bool:
        """Whether the vector is wanted."""
        if self.profile not in (QUICK, FULL) and vector["profile"] != self.profile:
            return False
        return not self.only or any(self._matches(vector, pattern) for pattern in self.only)

    @staticmethod
    def _matches(vector: Vector, pattern: str) -> bool:
        if pattern in CLAUSES:
            return pattern in vector["clauses"]
        families = {clause.rpartition("-")[0] for clause in vector["clauses"]}
        return pattern in families or fnmatch.fnmatch(vector["id"], pattern)


@dataclass(frozen=True)
class Target:
    """An implementation to run: its name in the report, the child's command, and how it is reached."""

    name: str
    command: Sequence[str]
    rung: str = "in process"


def target(name: str) -> Target:
    """A shipped adapter by name, `module:object` in process, or `run:COMMAND` for a subprocess of any language."""
    if name in SHIPPED:
        return Target(name, python_command(f"{SHIPPED[name]}:adapter"))
    if name.startswith("run:"):
        import shlex

        return Target(name.removeprefix("run:"), shlex.split(name.removeprefix("run:")), "subprocess")
    if ":" in name:
        return Target(name, python_command(name))
    raise ValueError(f"--impl {name}: one of {', '.join(SHIPPED)}, or module:object, or run:COMMAND")


def run(
    targets: Iterable[Target], selection: Selection, *, seconds: float | None = None,
    progress: Progress = lambda name, done, of: None, fresh: int = 0,
) -> Report:  # fmt: skip
    """Run the selected vectors, and `fresh` ones drawn now, on every target; the report as it is written to JSON."""
    corpus = load_corpus()
    vectors = [*(vector for vector in corpus.values() if selection.picks(vector)), *drawn(corpus, fresh)]
    runs = [run_target(one, vectors, corpus, limit_of(one, selection, seconds), progress) for one in targets]
    return {
        "format": "statescan.report/1", "suite": __version__, "rules": RULES_VERSION,
        "corpus": manifest(corpus.values())["digest"],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "profile": selection.profile, "environment": environment(), "runs": runs,
    }  # fmt: skip


def limit_of(one: Target, selection: Selection, seconds: float | None) -> float | None:
    """The seconds an implementation has: those asked for, else a limit in the quick profile alone."""
    if seconds is not None or selection.profile != QUICK:
        return seconds
    return OWN_SECONDS if one.name in OWN else QUICK_SECONDS


def run_target(
    one: Target, vectors: Sequence[Vector], corpus: Mapping[str, Vector], seconds: float | None, progress: Progress
) -> dict[str, Any]:
    """One implementation's part of the report; whatever goes wrong with it is said there."""
    started = time.monotonic()
    head: dict[str, Any] = {"implementation": one.name, "rung": one.rung, "state": "ran", "results": []}
    try:
        with Client(list(one.command)) as client:
            hello = client.hello
            if not hello["ok"]:
                return {**head, "state": "not installed", "reason": hello.get("message", "")}
            head |= {key: hello[key] for key in ("version", "device", "source", "info") if key in hello}
            wiring = check_wiring(client)
            if wiring:
                return {**head, "state": "smoke failed", "reason": wiring}
            for result in results(client, vectors, corpus, seconds, lambda i, n: progress(one.name, i, n)):
                head["results"].append(result)
    except ProtocolError as error:
        head |= {"state": "stopped", "reason": str(error)}
    return {**head, "seconds": round(time.monotonic() - started, 2)}


def results(
    client: Client, vectors: Sequence[Vector], corpus: Mapping[str, Vector], seconds: float | None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Result]:  # fmt: skip
    """The result of every vector, in order; those that the time no longer allows are `not_run`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    probed: set[str] = set()
    for i, vector in enumerate(vectors):
        progress(i, len(vectors))
        if deadline is not None and time.monotonic() > deadline:
            yield result(vector, Verdict("not_run", f"left out after {seconds:g} s"))
            continue
        ready = prepare_trace if is_trace(vector) else prepare if vector["id"] in corpus else prepare_drawn
        case = ready(vector, corpus, client.capabilities)
        if isinstance(case, Missing):
            yield result(vector, probe(client, vector, corpus, case, probed), missing=case.word)
            continue
        began = time.perf_counter()
        run_on = partial(_run_on, client, vector["id"])
        if isinstance(case, TraceCase):
            verdict = execute_trace(case, partial(client.setup, vector=vector["id"]), run_on)
        else:
            verdict = execute(case, run_on)
        spent = round((time.perf_counter() - began) * 1e3, 2)
        yield result(vector, verdict, case=case, ms=spent)


def probe(
    client: Client, vector: Vector, corpus: Mapping[str, Vector], missing: Missing, probed: set[str]
) -> Verdict:
    """Send one call outside the claims for each missing word: a refusal, None in place of a result or a right answer
    are fine, a wrong answer means that an argument is taken and ignored."""
    quiet = Verdict("not_applicable", f"{missing.word} is not claimed")
    if is_trace(vector) or vector["id"] not in corpus:
        return quiet
    case = outside(vector, corpus, client.capabilities)
    once = f"{vector['op']} {missing.word}"
    if case is None or once in probed or vector["class"] != "exact" or missing.word not in ALL_FEATURES:
        return quiet
    probed.add(once)
    refused = []

    def call(wanted: Call, name: str) -> Reply:
        reply = _run_on(client, vector["id"], wanted, name)
        refused.extend([name] if reply.error == NOTHING else [])
        return reply

    verdict = execute(case, call)
    if refused:
        return quiet
    if verdict.status in ("fail.value", "fail.touched", "fail.nonfinite", "fail.shape", "fail.unwritten"):
        said = f"{missing.word} is not claimed, and the call gave a wrong answer: {verdict.message}"
        return Verdict("fail.silent", said, verdict.tensor, verdict.place)
    return quiet


def _run_on(client: Client, vector: str, call: Call, name: str) -> Reply:
    return client.run(call, vector=vector, name=name)


def result(
    vector: Vector, verdict: Verdict, *, case: Case | TraceCase | None = None, ms: float | None = None,
    missing: str = "",
) -> Result:  # fmt: skip
    """One row of the report."""
    row: Result = {"vector": vector["id"], "status": verdict.status, "clause": vector["clauses"][0],
                   "clauses": list(vector["clauses"])}  # fmt: skip
    if verdict.message:
        row["message"] = verdict.message
    if missing:
        row["missing"] = missing
    if verdict.tensor:
        row |= {"tensor": verdict.tensor, "place": dict(verdict.place)}
    if verdict.score is not None:
        row["score"] = round(verdict.score, 4) if verdict.score < 1e6 else None
    if case is not None:
        row["operand"] = case.capability.get("operand", "f32")
        if case.declared:
            row["dtypes"] = dict(case.declared)
        if case.lift:
            row["lift"] = case.lift
    if ms is not None:
        row["ms"] = ms
    return row


def environment() -> dict[str, str]:
    """Machine and versions, for the head of a report."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for package in ("numpy", "torch", "triton", "fla-core", "causal-conv1d", "mamba-ssm", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
