"""The suite as a folder of calls, to be answered anywhere: on a machine with the accelerator, in another language.

    calls.jsonl      one `run` message a line, its number as id, and the digest of its vector
    NNNNNN.in        the tensors of a call, NNNNNN.out the blanks to fill in
    claims.json      what the calls were made for
    done.jsonl       the answers, written by whoever fills the blanks: {"id": 1, "ok": true}

Expectations never enter the folder. `verify` makes the calls again from its own vectors, and of the folder it reads
the blanks and the answers alone.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from statescan.conformance.calls import Call, Reply
from statescan.conformance.cases import Case, Missing, build, execute, prepare, related_tensors, vary
from statescan.conformance.claims import check_claims
from statescan.conformance.client import message_of, reply_of, tensors_of
from statescan.conformance.compare import Verdict
from statescan.conformance.runner import Result, result
from statescan.conformance.traces import is_trace
from statescan.conformance.transport import blanks, take_tensors, write_blank, write_inputs
from statescan.conformance.untrusted import read_file, write_file
from statescan.goldens.store import FormatError, check_schema, parse_json

Vector = Mapping[str, Any]
Claims = Sequence[Mapping[str, Any]]

MOST_LINE = MOST_CLAIMS = 1 << 20
MOST_CALLS = 999_999


def read_claims(path: Path) -> list[dict[str, Any]]:
    """A list of claims (capabilities) from a file."""
    claims = parse_json(bytes(read_file(path.parent, path.name, MOST_CLAIMS)), path.name)
    check_schema("message", {"id": 0, "ok": True, "capabilities": claims}, path.name)
    check_claims(claims, path.name)
    return list(claims)


def export(folder: Path, vectors: Sequence[Vector], corpus: Mapping[str, Vector], claims: Claims) -> int:
    """Write the calls of all vectors that the claims cover into an empty folder; how many."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FormatError(f"{folder.name}: the folder is not empty")
    lines: list[str] = []
    for vector in vectors:
        for name, call in calls_of(vector, corpus, claims):
            number = len(lines) + 1
            if number > MOST_CALLS:
                raise FormatError(f"more than {MOST_CALLS} calls")
            inputs, outputs = _write(folder, number, call)
            lines.append(json.dumps({"id": number, **message_of(call, f"{number:06d}", inputs, outputs, vector["id"],
                                                                name), "digest": vector["digest"]},
                                    separators=(",", ":")))  # fmt: skip
    write_file(folder, "calls.jsonl", [f"{line}\n".encode() for line in lines])
    write_file(folder, "claims.json", [(json.dumps(list(claims), indent=1) + "\n").encode()])
    return len(lines)


def calls_of(vector: Vector, corpus: Mapping[str, Vector], claims: Claims) -> list[tuple[str, Call]]:
    """Every call of a vector, in order; none where one of them needs the answer to another, or a step of an engine."""
    if is_trace(vector):
        return []
    case = prepare(vector, corpus, claims)
    if isinstance(case, Missing):
        return []
    try:
        return [pair for one in (case, *case.variants) for pair in _calls_of(one)]
    except KeyError:  # the reply to an earlier call
        return []


def _calls_of(case: Case) -> Iterator[tuple[str, Call]]:
    if case.vector["class"] != "relation":
        yield "a", build(case, case.story)
        return
    wanted = sorted(related_tensors(case.vector))
    for name, spec in case.vector["calls"].items():
        yield name, build(case, vary(case, spec, {}, {}), wanted)


def verify(folder: Path, corpus: Mapping[str, Vector]) -> Iterator[Result]:
    """A result for every vector that stands in the folder, and was exported from these vectors."""
    claims = read_claims(folder / "claims.json")
    numbers: dict[str, list[int]] = {}
    for line in _lines(folder, "calls.jsonl"):
        vector = line.get("vector") if isinstance(line, dict) else None
        if not isinstance(vector, str) or vector not in corpus or line.get("digest") != corpus[vector]["digest"]:
            raise FormatError(f"calls.jsonl: {vector!r:.80} is no vector of this version: export the folder again")
        number = line.get("id")
        if type(number) is not int or not 0 < number <= MOST_CALLS:
            raise FormatError(f"calls.jsonl: id {number!r:.40}")
        numbers.setdefault(vector, []).append(number)
    answers = _answers(folder)
    for vector, own in numbers.items():
        case = prepare(corpus[vector], corpus, claims)
        if isinstance(case, Missing):
            raise FormatError(f"calls.jsonl: {vector} needs {case.word}, which claims.json does not claim")
        if not set(own) & set(answers):
            yield result(corpus[vector], Verdict("not_run", "not answered"), case=case)
            continue
        left = list(own)

        def run(call: Call, name: str, left: list[int] = left) -> Reply:
            return _reply(folder, left.pop(0), call, answers) if left else Reply("protocol", message="no such call")

        yield result(corpus[vector], execute(case, run), case=case)


def _answers(folder: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in _lines(folder, "done.jsonl"):
        check_schema("message", line, "done.jsonl")
        if line["id"] in found:
            raise FormatError(f"done.jsonl: {line['id']} is answered twice")
        found[line["id"]] = line
    return found


def _lines(folder: Path, name: str) -> Iterator[Any]:
    for line in bytes(read_file(folder, name)).splitlines():
        if len(line) > MOST_LINE:
            raise FormatError(f"{name}: a line of {len(line)} bytes")
        if line.strip():
            yield parse_json(line, name)


def _reply(folder: Path, number: int, call: Call, answers: Mapping[int, Mapping[str, Any]]) -> Reply:
    """The reply to one call: the answer, and the blanks as they lie in the folder."""
    if number not in answers:
        return Reply("protocol", message=f"call {number} is not answered")
    outputs, made = plan_blank(call)
    try:
        return reply_of(answers[number], take_tensors(folder, f"{number:06d}.out", outputs, made))
    except FormatError as error:
        return Reply("protocol", message=str(error))


def plan_blank(call: Call) -> tuple[list[dict[str, Any]], tuple[int, bytes]]:
    """Where the tensors of a call's blanks lie, and what of their file may not change."""
    with tempfile.TemporaryDirectory(prefix="statescan-") as folder:
        rows = write_blank(Path(folder), "000000.out", call.results, call.tensors)
        return rows, blanks(Path(folder), "000000.out")


def _write(folder: Path, number: int, call: Call) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    inputs = write_inputs(folder, f"{number:06d}.in", tensors_of(call))
    return inputs, write_blank(folder, f"{number:06d}.out", call.results, call.tensors)
