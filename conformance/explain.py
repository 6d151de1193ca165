"""Failures after a run: what a report says of one vector, in full, and a script that shows it with the implementation.

    statescan explain reports/report.json conv-rows-past-the-last-offset-are-zero
    statescan repro conv-rows-past-the-last-offset-are-zero --impl my_adapter:adapter
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statescan.conformance.calls import Call, Reply
from statescan.conformance.cases import Missing, execute, prepare
from statescan.conformance.client import Client
from statescan.conformance.compare import Verdict
from statescan.conformance.report import clause_text, failed
from statescan.conformance.scripts import Side, can_write, expected_in, write_script
from statescan.conformance.traces import is_trace, operation
from statescan.conformance.untrusted import printable
from statescan.goldens.store import load_corpus, load_faults


def explain(report: Mapping[str, Any], identifier: str) -> Iterator[str]:
    """Lines about one vector: what came out everywhere, why the vector is there, the rule, and known faults."""
    corpus, faults = load_corpus(), load_faults()
    rows = [(run, row) for run in report["runs"] for row in run["results"] if row["vector"] == identifier]
    if not rows:
        return
    for run, row in rows:
        name = printable(run["implementation"])
        yield f"{name}: {row['status']}" + (f" ({row['missing']})" if row.get("missing") else "")
        for key in ("message", "known", "lift"):
            if row.get(key):
                yield f"    {printable(row[key])}"
        if row.get("place"):
            yield "    at " + ", ".join(f"{printable(k)} {printable(v)}" for k, v in row["place"].items())
        if row.get("score") is not None:
            yield f"    score {row['score']:g} for {printable(row.get('operand', 'f32'))} operands (1 is the limit)"
        if row.get("candidates"):
            yield f"    looks like: {', '.join(row['candidates'])}"
        if failed(row["status"]) and run.get("rung") == "in process":
            yield f"    statescan repro {identifier} --impl {name}"
    vector = corpus.get(identifier)
    if vector is None:
        return
    yield f"\n{operation(vector)}: {vector['why']}\nOtherwise: {vector['effect']}"
    for seen in vector.get("seen", []):
        yield f"Seen: {seen}"
    yield f"\n{clause_text(vector['clauses'][0])}"
    for fault in vector.get("kills", [])[:12]:
        yield f"Fails for {fault}: {faults[fault]['mechanism']}" if fault in faults else f"Fails for {fault}"


@dataclass(frozen=True)
class Seen:
    """A vector run on an implementation: the verdict, and the calls that were made, with their replies."""

    verdict: Verdict
    calls: Sequence[tuple[str, Call, Reply]]


def look(client: Client, vector: Mapping[str, Any], corpus: Mapping[str, Any]) -> Seen | Missing:
    """Run one vector and keep its calls."""
    case = prepare(vector, corpus, client.capabilities)
    if isinstance(case, Missing):
        return case
    calls: list[tuple[str, Call, Reply]] = []

    def run(call: Call, name: str) -> Reply:
        reply = client.run(call, vector=vector["id"], name=name)
        calls.append((name, call, reply))
        return reply

    return Seen(execute(case, run), calls)


def repro(
    vector: Mapping[str, Any], seen: Seen, impl: str, path: Path, *, arrays: str = "numpy", device: str = "cpu"
) -> Path | None:
    """Write the script of a failure; None where a call cannot be written with numbers alone."""
    latest = {name: (call, reply) for name, call, reply in seen.calls}
    if is_trace(vector) or not all(can_write(call) for call, _ in latest.values()):
        return None
    verdict = seen.verdict
    said = f"{verdict.status} {vector['clauses'][0]} {vector['id']}\n    {verdict.message}"
    index = index_in(verdict.message)
    if vector["class"] == "relation" and verdict.status in ("fail.relation", "fail.unstable"):
        entry = _failed_entry(vector, verdict)
        names = [name for name in entry if name in latest]
        sides = [Side(name, latest[name][0], entry[name].get("of", entry["of"]), entry[name]) for name in names]
        return write_script(path, impl, sides, said, index, arrays=arrays, device=device)
    name, call, _ = seen.calls[-1]
    side = Side(name, call, verdict.tensor or next((plan.name for plan in call.results), ""), {})
    wanted = expected_in(verdict.message)
    return write_script(path, impl, [side], said, index, wanted, arrays=arrays, device=device)


def _failed_entry(vector: Mapping[str, Any], verdict: Verdict) -> Mapping[str, Any]:
    """The relation that failed: the one of the tensor and of the calls that the message names."""
    named = [entry for entry in vector["relate"] if entry["of"] == verdict.tensor]
    return next((entry for entry in named if all(f" in {name}" in verdict.message for name in entry
                                                 if name in vector["calls"])), named[0])  # fmt: skip


def index_in(message: str) -> tuple[int, ...] | None:
    """The index of the first bad place, with which a message begins."""
    parts = message.partition("[")[2].partition("]")[0].split(", ")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None
