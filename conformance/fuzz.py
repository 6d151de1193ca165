"""Files and answers that nobody meant well, by the thousand: each ends in a result or in our own error, nothing else.

    python -m statescan.conformance.fuzz 100000 conformance/fuzz.json      # make fuzz

Hypothesis (https://hypothesis.readthedocs.io) edits what is right: recorded calls, exported folders, answers of an
adapter, vectors, reports. Memory has a limit while it runs, and what lies beside the folder is looked at before and
after.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import io
import json
import os
import platform
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from statescan.conformance import ci, expect, folder, recorded, report
from statescan.conformance.adapter import ALL_FEATURES
from statescan.conformance.cases import prepare, tell_outside
from statescan.conformance.client import ProtocolError, answer_in, reply_of
from statescan.conformance.record import record
from statescan.conformance.replay_call import judge_recorded
from statescan.conformance.traces import is_trace, prepare_trace
from statescan.conformance.untrusted import write_file
from statescan.goldens.store import FormatError, load_corpus, load_vector
from statescan.spec.contract import RULES_VERSION

MEMORY = 3 << 30
"""Bytes of address space that the process may have beyond what it has when it starts."""
SHARES = {"replies": 0.35, "dumps": 0.35, "vectors": 0.2, "folders": 0.05, "reports": 0.05}
EDITS = 3

Target = Callable[[Path, random.Random], None]

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 7, 2**31, 2**53, 2**63, -(2**63), 2**200, 1e308, -1e-308, 0.5, float("nan"), float("inf"),
    "", "nan", "inf", "../../etc/passwd", "000001.in", "\x1b[31m", "\u202e", "x" * 70_000, "a\x00b", [], {}, [0], [[]],
    [-1, 2], [2**40, 2**40], [0, 2**62], {"max": "x"}, {"a": {"b": 1}}, "f32", "bf16", "i64", "KV", "ssd", "within",
)  # fmt: skip
WORDS: tuple[bytes, ...] = (
    b"", b"\x00", b"\xff\xfe", b"{", b"}", b"[" * 64, b"[" * 5000, b"NaN", b"Infinity", b"1e999", b'"', b"\n", b"-",
    b"9" * 5000, b'{"a":1,"a":2}', b"\\ud800", b'"dtype":"F32"', b"null",
)  # fmt: skip


def edited(value: Any, rng: random.Random) -> Any:
    """A JSON value with some of its places odd, gone, twice or changed over."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, EDITS)):
        places = [(box, key) for box in _boxes(value) for key in (box if isinstance(box, dict) else range(len(box)))]
        if not places:
            return rng.choice(ODD)
        box, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind == 0:
            del box[key]
        elif kind == 1 and isinstance(box, dict):
            box[rng.choice(["", "x", "format", "op", "shape", "limits", "\x1b"])] = box[key]
        elif kind == 2 and isinstance(box, list):
            box.extend(box[key : key + 1] * rng.randint(1, 40))
        elif kind == 3:
            other, place = rng.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                box[key] = copy.deepcopy(other[place])
        elif kind == 4 and isinstance(box[key], (int, float)) and not isinstance(box[key], bool):
            box[key] += rng.choice([-1, 1, 8, 0.5, -256, 1 << 20])
        else:
            box[key] = copy.deepcopy(rng.choice(ODD))
    return value


def _boxes(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from _boxes(child)


def text_of(value: Any, rng: random.Random) -> bytes:
    """JSON text of a value, now and then broken."""
    data = json.dumps(value).encode()
    return scrambled(data, rng) if rng.random() < 0.2 else data


def scrambled(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some cut, doubled, flipped or replaced."""
    found = bytearray(data)
    for _ in range(rng.randint(1, EDITS)):
        at, length = rng.randrange(len(found) + 1), rng.choice([1, 1, 2, 8, 64])
        kind = rng.randrange(4)
        if kind == 0:
            del found[at : at + length]
        elif kind == 1:
            found[at:at] = found[at : at + length] * rng.randint(1, 8)
        elif kind == 2 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        else:
            found[at : at + length] = rng.choice(WORDS)
    return bytes(found)


# ---------------------------------------------------------------------------------------------------------------------
# What is read from outside
# ---------------------------------------------------------------------------------------------------------------------


def targets(seeds: Path) -> dict[str, Target]:
    """A function for each kind: it makes something wrong of something right, and reads it."""
    corpus = load_corpus()
    dumps, folders = _record_some(seeds / "dumps"), _export_some(seeds / "folder", corpus)
    small = [v for v in corpus.values()
             if not is_trace(v) and sum(_size(s) for s in v.get("inputs", {}).values()) < 100]  # fmt: skip
    traces = [v for v in corpus.values() if is_trace(v)][:3]
    claims = [{"op": v["op"], "features": v["needs"]["features"], "dtypes": [{"x": "f32"}], "operand": "f32",
               "state_layout": ["KV"], "limits": {"K": [2, 4], "C": {"min": 1, "max": 8, "multiple": 2}, "chunk": 4}}
              for v in small[::80]]  # fmt: skip
    claims += [{"op": "ssm_decode", "features": ["slot.pool"],
                "limits": {"kind": ["gdn"], "key_dim": {"max": 64}}}]  # fmt: skip
    answers = [
        {"id": 1, "ok": True, "protocol": "statescan/1", "name": "x", "version": "1", "device": "cpu", "info": {}},
        {"id": 1, "ok": True, "capabilities": claims}, {"id": 1, "ok": True, "capabilities": claims[-1:]},
        {"id": 1, "ok": True, "ms": 0.5, "value": [1, None]},
        {"id": 1, "ok": False, "status": "rejected", "error": "SlotError", "message": "read_slots[1]=9 (SLOT-5)"},
    ]  # fmt: skip
    made = _report_of(corpus)

    def replies(place: Path, rng: random.Random) -> None:
        answer = answer_in(text_of(edited(rng.choice(answers), rng), rng), 1)
        reply_of(answer)
        if answer.get("capabilities"):
            wanted = [v for v in small if v["op"] in {claim["op"] for claim in answer["capabilities"]}] or small
            prepare(rng.choice(wanted), corpus, answer["capabilities"])
            prepare_trace(rng.choice(traces), corpus, answer["capabilities"])

    def dump(place: Path, rng: random.Random) -> None:
        said, tensors = rng.choice(dumps)
        data = tensors
        if rng.random() < 0.6:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            text = text_of(edited(header, rng), rng) if rng.random() < 0.7 else json.dumps(header).encode()
            stated = len(text) if rng.random() < 0.9 else rng.choice([0, 1, 2**40, 2**63 - 1, len(data)])
            body = data[8 + length :] if rng.random() < 0.7 else scrambled(data[8 + length :], rng)
            data = stated.to_bytes(8, "little") + text + body
        said = edited(said, rng) if rng.random() < 0.7 else said
        (place / "000001.safetensors").write_bytes(data)
        (place / "000001.json").write_bytes(text_of(said, rng))
        judge_recorded(recorded.load(place / "000001.json", 1 << 24), seconds=0 if rng.random() < 0.02 else -1)

    def vector(place: Path, rng: random.Random) -> None:
        one = edited(rng.choice(small), rng)
        if isinstance(one, dict):
            one.pop("digest", None)
        name = one["id"] if isinstance(one, dict) and isinstance(one.get("id"), str) else "x"
        path = place / f"{name if name.replace('-', '').isalnum() and len(name) < 64 else 'x'}.json"
        path.write_bytes(text_of(one, rng))
        read = load_vector(path)
        tell_outside(read, corpus)

    def folder_of(place: Path, rng: random.Random) -> None:
        for name, data in folders.items():
            (place / name).write_bytes(data)
        for _ in range(rng.randint(1, EDITS)):
            name = rng.choice([*folders, "claims.json", "done.jsonl", "calls.jsonl"])
            path = place / name
            kind = rng.randrange(7)
            if kind == 0:
                _replace(path, rng)
                continue
            if name.endswith(".json"):
                data = text_of(edited(json.loads(folders[name]), rng), rng)
            elif name.endswith(".jsonl"):
                lines = folders[name].splitlines()
                spot = rng.randrange(len(lines))
                lines[spot] = text_of(edited(json.loads(lines[spot]), rng), rng)
                data = b"\n".join(lines)
            else:
                data = scrambled(folders[name], rng)
            if not path.is_dir():
                write_file(place, name, [data])  # not into what stands in its place
        list(folder.verify(place, corpus))

    def a_report(place: Path, rng: random.Random) -> None:
        (place / "report.json").write_bytes(text_of(edited(made, rng), rng))
        read = report.read(place / "report.json")
        report.print_matrix(Console(file=io.StringIO()), report.merge([read, read]))
        ci.junit(read)
        list(ci.changes(made, read))
        if rng.random() < 0.05:
            report.html(read)
        known = {made["runs"][0]["results"][0]["vector"]: "a reason"}
        (place / "known.json").write_bytes(text_of(edited(known, rng), rng))
        ci.read_known(place / "known.json")

    return {"replies": replies, "dumps": dump, "vectors": vector, "folders": folder_of, "reports": a_report}


def _replace(path: Path, rng: random.Random) -> None:
    """Something else in the place of a file: nothing, a link out of the folder, a folder, a pipe."""
    if path.is_dir() and not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    kind = rng.randrange(4)
    if kind == 1:
        path.symlink_to(path.parent.parent / "secret")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        os.mkfifo(path)


def _size(spec: Mapping[str, Any]) -> int:
    return int(np.prod(spec["shape"], dtype=np.int64))


def _record_some(place: Path) -> list[tuple[Any, bytes]]:
    """Small recorded calls of several operations, as JSON and bytes."""
    from statescan.conformance.replay_mutants import small_calls

    for op, given_, function in small_calls():
        record(op, place)(function)(**given_)
    return [(json.loads(path.read_bytes()), path.with_suffix(".safetensors").read_bytes())
            for path in sorted(place.glob("*.json"))]  # fmt: skip


def _export_some(place: Path, corpus: Mapping[str, Any]) -> dict[str, bytes]:
    """A small exported folder, answered."""
    chosen = [corpus[key] for key in ("conv-update-one-row", "conv-bias-once", "seq-idx-of-the-seed") if key in corpus]
    claims = [{"op": v["op"], "features": list(ALL_FEATURES), "operand": "f32"} for v in chosen]
    count = folder.export(place, chosen, corpus, claims)
    lines = [json.dumps({"id": i + 1, "ok": True}) for i in range(count)]
    (place / "done.jsonl").write_text("\n".join(lines) + "\n")
    return {path.name: path.read_bytes() for path in sorted(place.iterdir())}


def _report_of(corpus: Mapping[str, Any]) -> dict[str, Any]:
    rows = [{"vector": v["id"], "status": status, "clause": v["clauses"][0], "clauses": v["clauses"], "message": "m",
             "tensor": "y", "place": {"token": 1}, "score": 0.5, "operand": "f32", "ms": 1.5}
            for v, status in zip(corpus.values(), ["pass", "fail.value", "not_run", "error", "xfail", "xpass"],
                                 strict=False)]  # fmt: skip
    run = {"implementation": "x", "version": "1", "rung": "folder", "state": "ran", "results": rows, "seconds": 1.5}
    return {"format": "statescan.report/1", "suite": "0", "rules": RULES_VERSION, "corpus": "sha256:" + "0" * 64,
            "date": "2026-01-01T00:00:00+00:00", "profile": "full", "environment": {}, "runs": [run]}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def fuzz(name: str, target: Target, count: int, room: Path, *, seed: int = 0) -> dict[str, int]:
    """Try `count` inputs on one target; how many were refused and how many were read. Anything else is raised."""
    tally = {"refused": 0, "read": 0}
    secret = room / "secret"
    secret.write_text("not yours")
    place = room / "folder"

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.integers(0, 2**64 - 1))
    def one(number: int) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            target(place, random.Random(number ^ seed))
            tally["read"] += 1
        except (FormatError, ProtocolError):
            tally["refused"] += 1
        assert sorted(p.name for p in room.iterdir()) == ["folder", "secret"], f"{name}: a file beside the folder"
        assert secret.read_text() == "not yours", f"{name}: a file outside the folder was written"

    with expect.quick(), np.errstate(all="ignore"):
        one()
    return tally


def main(count: int = 100_000, out: str = "") -> None:
    """All targets by their shares, under a limit of memory; the result is printed and stored."""
    with tempfile.TemporaryDirectory(prefix="statescan-fuzz-") as name:
        seeds = Path(name) / "seeds"
        seeds.mkdir()
        made = targets(seeds)
        corpus = load_corpus()
        for module in (ci, report):
            module.load_corpus = lambda: corpus  # type: ignore[attr-defined]  # read once, not 10,000 times
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        rows = {}
        for target, share in SHARES.items():
            room, started = Path(name) / target, time.monotonic()
            room.mkdir()
            tally = fuzz(target, made[target], max(1, int(count * share)), room)
            rows[target] = {**tally, "seconds": round(time.monotonic() - started, 1)}
            print(target, rows[target], flush=True)
    summary = {
        "command": f"python -m statescan.conformance.fuzz {count}", "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}", "inputs": sum(
            row["refused"] + row["read"] for row in rows.values()),
        "crashes": 0, "files written outside": 0, "memory limit in MiB": MEMORY >> 20,
        "most memory in MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "targets": rows,
    }  # fmt: skip
    print(json.dumps({key: value for key, value in summary.items() if key != "targets"}))
    if out:
        Path(out).write_text(json.dumps(summary, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, sys.argv[2] if len(sys.argv) > 2 else "")
