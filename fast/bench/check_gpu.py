"""One check of the fast path on a GPU: the whole suite, and what only a GPU and large sizes can show.

    python -m statescan.fast.bench.check_gpu [--tiny] [--json PATH] [--only WORD] [--jobs N]

The suite runs in float32, bfloat16 and float16, in both state layouts, without checks of values, as a server calls
the operations (refusals with them), in several processes that share the device. `--tiny` leaves the suite and large
sizes out and runs every kernel once at small sizes in this process: for compute-sanitizer, with
PYTORCH_NO_CUDA_MEMORY_CACHING=1 so that every tensor is an allocation of its own.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import Call
from statescan.conformance.cases import Missing, execute, prepare
from statescan.conformance.invoke import invoke, isolated
from statescan.fast.bench.bench import environment
from statescan.goldens.store import load_vectors

SOURCES = tuple(f"statescan.fast.bench.check_{name}" for name in ("conv", "decode", "prefill", "serving"))
"""Modules of further checks: `checks(tiny)` gives pairs of a name and a function that raises if something is wrong."""

TYPES = ("f32", "bf16", "f16")
LAYOUTS = ("KV", "VK")
Row = dict[str, Any]


def suite_jobs(shards: int) -> Iterator[tuple[str, str, int, int]]:
    """Element type of the tokens, layout of states, and which share of the vectors."""
    for dtype in TYPES:
        for layout in LAYOUTS:
            for shard in range(shards):
                yield dtype, layout, shard, shards


def run_suite(job: tuple[str, str, int, int]) -> Row:
    """One share of the suite in this process: counts by status, and what failed."""
    dtype, layout, shard, shards = job
    adapter = import_module("statescan.conformance.adapters.fast").adapter
    claims = [claim for c in adapter.capabilities if (claim := narrowed(c, dtype, layout)) is not None]
    corpus = load_vectors()
    statuses: Counter[str] = Counter()
    failed: dict[str, str] = {}
    began = time.perf_counter()
    for i, vector in enumerate(corpus.values()):
        if i % shards != shard:
            continue
        case = prepare(vector, corpus, claims)
        if isinstance(case, Missing):
            statuses["not_applicable"] += 1
            continue
        called = adapter if vector["class"] == "reject" else unchecked(adapter)
        verdict = execute(case, partial(_run, called))
        statuses[verdict.status] += 1
        if not verdict.passed:
            failed[vector["id"]] = f"{verdict.status}: {verdict.message}"[:300]
    return {"dtype": dtype, "layout": layout, "statuses": dict(statuses), "failed": failed,
            "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


def narrowed(claim: Mapping[str, Any], dtype: str, layout: str) -> Mapping[str, Any] | None:
    """A claim for tokens of one type and states of one layout alone; None where another job makes it."""
    if claim["dtypes"]:
        first = next(iter(claim["dtypes"][0]))
        types = [entry for entry in claim["dtypes"] if entry[first] == dtype]
        if not types:
            return None
    elif dtype != TYPES[0]:
        return None
    else:
        types = []
    states = "gated_delta" in claim["op"] or "kimi" in claim["op"]
    if not states and layout != LAYOUTS[0]:
        return None
    return {**claim, "dtypes": types, "state_layout": [layout]}


def unchecked(adapter: Adapter) -> Adapter:
    """The same operations without checks of values."""
    bare = Adapter(adapter.name, arrays="torch", device=adapter.device)
    bare.operations = {name: getattr(function, "func", function) for name, function in adapter.operations.items()}
    return bare


def _run(adapter: Adapter, call: Call, name: str) -> Any:
    return invoke(adapter, isolated(call))


def suite(jobs: int) -> list[Row]:
    """The whole suite over several processes, one row a type and layout."""
    merged: dict[tuple[str, str], Row] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for part in pool.map(run_suite, suite_jobs(max(1, jobs // 3))):
            row = merged.setdefault((part["dtype"], part["layout"]), {
                "name": f"suite {part['dtype']} {part['layout']}", "statuses": Counter(), "failed": {}, "seconds": 0.0,
            })  # fmt: skip
            row["statuses"] += Counter(part["statuses"])
            row["failed"] |= part["failed"]
            row["seconds"] = max(row["seconds"], part["seconds"])
    return list(merged.values())


def further(tiny: bool, words: Sequence[str]) -> Iterator[Row]:
    """Every further check by name: what was wrong, or nothing."""
    for source in SOURCES:
        if find_spec(source) is None:
            continue
        for name, function in import_module(source).checks(tiny):
            if words and not any(word in name for word in words):
                continue
            yield attempt(name, function)


def attempt(name: str, function: Callable[[], None]) -> Row:
    """Run one check."""
    began, wrong = time.perf_counter(), ""
    try:
        function()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a check raises is its result
        place = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"[:600]
    torch.cuda.empty_cache()
    return {"name": name, "wrong": wrong, "seconds": round(time.perf_counter() - began, 1)}


def line(row: Row) -> str:
    """A row of the table; what failed follows, a line each."""
    if "statuses" in row:
        counts = ", ".join(f"{count} {status}" for status, count in row["statuses"].items())
        more = "".join(f"\n    {key}: {text}" for key, text in list(row["failed"].items())[:12])
        return f"{row['name']:52s} {row['seconds']:6.1f} s  {counts}{more}"
    return f"{row['name']:52s} {row['seconds']:6.1f} s  {row['wrong'] or 'ok'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes in this process, no suite")
    parser.add_argument("--json", type=Path, help="where to write all results")
    parser.add_argument("--only", action="append", default=[], help="checks of that name, and no suite")
    parser.add_argument("--jobs", type=int, default=12, help="processes that run the suite")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("check_gpu needs a GPU, and there is none here")
    rows: list[Row] = []
    for row in further(given.tiny, given.only):
        rows.append(row)
        print(line(row), flush=True)
    if not given.tiny and not given.only:
        rows += suite(given.jobs)
    facts = environment()
    print(f"\n{facts['device']}, torch {facts['torch']}, triton {facts['triton']}")
    print("\n".join(line(row) for row in rows))
    bad = [row["name"] for row in rows if row.get("wrong") or row.get("failed")]
    print(f"{len(rows) - len(bad)} of {len(rows)} passed" + "".join(f"\n  FAILED {name}" for name in bad))
    if given.json:
        given.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1, default=dict) + "\n", "utf-8")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
