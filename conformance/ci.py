"""What a continuous build wants of a report: known failures with their reasons, changes since the last one, JUnit XML,
a badge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from statescan.conformance.report import NOT_JUDGED, failed
from statescan.conformance.untrusted import printable
from statescan.goldens.store import FormatError, load_corpus, read_json

Report = dict[str, Any]

XFAIL, XPASS = "xfail", "xpass"


def read_known(path: Path) -> dict[str, str]:
    """Known failures by vector, each with its reason: {"conv-tail-is-zero": "kernel leaves the tail, issue 12"}."""
    known = read_json(path)
    if not isinstance(known, dict) or not all(isinstance(reason, str) for reason in known.values()):
        raise FormatError(f"{path.name}: an object from vectors to reasons is needed")
    corpus = load_corpus()
    for vector, reason in known.items():
        if vector not in corpus:
            raise FormatError(f"{path.name}: {vector!r:.80} is no vector")
        if len(reason.split()) < 2:
            raise FormatError(f"{path.name}: {vector}: a reason of a few words is needed, not {reason!r:.80}")
    return known


def mark_known(report: Report, known: Mapping[str, str]) -> Report:
    """The report with known failures as `xfail`; one that passes is `xpass`, a failure until it leaves the list."""

    def marked(row: Mapping[str, Any]) -> dict[str, Any]:
        reason = known.get(row["vector"])
        if reason is None or row["status"] in NOT_JUDGED:
            return dict(row)
        if failed(row["status"]):
            return {**row, "status": XFAIL, "known": f"{row['status']}: {reason}"}
        said = f"passes, and is listed as a known failure ({reason}): take it off the list"
        return {**row, "status": XPASS, "known": reason, "message": said}

    runs = [{**run, "results": [marked(row) for row in run["results"]]} for run in report["runs"]]
    return {**report, "runs": runs}


def changes(before: Report, after: Report) -> Iterator[tuple[str, str, str, str, Mapping[str, Any]]]:
    """What is not as it was: implementation, vector, old status, new status, and the new row."""
    old = {(run["implementation"], row["vector"]): row["status"] for run in before["runs"] for row in run["results"]}
    for run in after["runs"]:
        seen = any(name == run["implementation"] for name, _ in old)
        for row in run["results"]:
            was = old.get((run["implementation"], row["vector"]), "new")
            if was != row["status"] and seen:
                yield run["implementation"], row["vector"], was, row["status"], row


def got_worse(before: Report, after: Report) -> bool:
    """Whether something fails now that did not fail before, or is no longer judged though it passed."""
    def lost(was: str, now: str) -> bool:
        return (failed(now) and not failed(was)) or (was == "pass" and now in NOT_JUDGED)

    return any(lost(was, now) for _, _, was, now, _ in changes(before, after))


def junit(report: Report) -> bytes:
    """The report as JUnit XML: a suite for each implementation, a case for each vector, its first clause the class."""
    root = ElementTree.Element("testsuites", name="statescan")
    for run in report["runs"]:
        counts = Counter(_outcome(row["status"]) for row in run["results"])
        stopped = run["state"] not in ("ran", "not installed")
        suite = ElementTree.SubElement(
            root, "testsuite", name=_text(run["implementation"]), tests=str(len(run["results"]) + stopped),
            failures=str(counts["failure"]), errors=str(counts["error"] + stopped), skipped=str(counts["skipped"]),
            time=f"{run.get('seconds', 0):.3f}", timestamp=_text(report["date"])[:19],
        )  # fmt: skip
        if stopped:
            case = ElementTree.SubElement(suite, "testcase", name=run["state"], classname="statescan")
            ElementTree.SubElement(case, "error", message=_text(run.get("reason", "")), type=run["state"])
        for row in run["results"]:
            case = ElementTree.SubElement(suite, "testcase", name=row["vector"], classname=f"statescan.{row['clause']}",
                                          time=f"{row.get('ms', 0) / 1e3:.3f}")  # fmt: skip
            outcome = _outcome(row["status"])
            if outcome:
                said = _text(row.get("message") or row.get("known") or row.get("missing") or "")
                more = {} if outcome == "skipped" else {"type": row["status"]}
                ElementTree.SubElement(case, outcome, message=f"{row['status']} {row['clause']}: {said}", **more)
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return text + b"\n"


def _outcome(status: str) -> str:
    """The element of JUnit that a status becomes."""
    if status in (*NOT_JUDGED, XFAIL):
        return "skipped"
    if status in ("error", "timeout", "protocol"):
        return "error"
    return "failure" if failed(status) else ""


def _text(text: str) -> str:
    """Text that XML 1.0 can hold."""
    return "".join(c for c in printable(text) if c in "\n" or 0x20 <= ord(c) <= 0xD7FF or 0xE000 <= ord(c) <= 0xFFFD)


def badge(run: Mapping[str, Any]) -> dict[str, Any]:
    """What a badge says, as https://shields.io/badges/endpoint-badge wants it."""
    judged = [row["status"] for row in run["results"] if row["status"] not in NOT_JUDGED]
    passed, wrong = judged.count("pass"), sum(failed(status) for status in judged)
    if run["state"] != "ran" or not judged:
        said = run["state"] if run["state"] != "ran" else "nothing judged"
        return {"schemaVersion": 1, "label": "statescan", "message": said, "color": "lightgrey"}
    colour = "red" if wrong else "yellow" if XFAIL in judged else "brightgreen"
    return {"schemaVersion": 1, "label": "statescan", "message": f"{passed} of {len(judged)}", "color": colour}
