"""`make bench`, `statescan bench`: the table of the fast path on this GPU, yardsticks and peers in the same run.

    python -m statescan.fast.bench.bench [WORD ...] [--out DIR] [--what NAME] [--quick]

Rows come from the modules of SOURCES; words choose the rows whose name contains one of them. For every row the
yardstick of its size, the fast path and its peers are captured in CUDA graphs that go over more memory than three L2
caches hold, and are replayed in turn, round by round. Written to `results/<date>-<device>-<what>.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from statescan import __version__
from statescan.fast.bench.timing import ROUNDS, Graph, host_time, median, ratio, time_in_turn
from statescan.fast.bench.yardsticks import YARDSTICKS, Launches

SOURCES = ("statescan.fast.bench.conv", "statescan.fast.bench.decode", "statescan.fast.bench.prefill")
"""Modules of rows. Each has `rows()`, whose entries have name, target, moved (bytes) and yardstick; `prepare(row)`,
whose result has `ours()`, a list of launches; and `peers(prepared)`, pairs of a name and a list of launches."""

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def chosen(words: list[str]) -> Iterator[tuple[Any, Any]]:
    """Every row whose name contains one of the words (or every row), with its module."""
    for name in SOURCES:
        module = import_module(name)
        for work in module.rows():
            if not words or any(word in work.name for word in words):
                yield module, work


def best_yardstick(kind: str, moved: int) -> tuple[str, Graph]:
    """The fastest shape of a yardstick of that many bytes."""
    graphs = {name: Graph(launches) for name, launches in YARDSTICKS[kind](moved)}
    times = time_in_turn(graphs, 3)
    best = min(graphs, key=lambda name: median(times[name]))
    return best, graphs[best]


def measure(module: Any, work: Any, rounds: int) -> Row:
    """One row: medians in microseconds, ratios of the same round, bytes a second, host time."""
    label, yardstick = best_yardstick(work.yardstick, work.moved)
    ready = module.prepare(work)
    graphs = {label: yardstick, "ours": Graph(ready.ours())}
    failed: dict[str, str] = {}
    for name, launches in module.peers(ready):
        try:
            graphs[name] = Graph(launches)
        except Exception as error:  # a peer may refuse in any way; that is its result
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    times = time_in_turn(graphs, rounds)
    ours = median(times["ours"])
    others = {name: round(median(t), 2) for name, t in times.items() if name not in ("ours", label)}
    return {
        "row": work.name, "target": work.target, "moved": work.moved, "us": round(ours, 3),
        "low": round(min(times["ours"]), 3), "high": round(max(times["ours"]), 3), "yardstick": label,
        "yardstick_us": round(median(times[label]), 3), "ratio": round(ratio(times["ours"], times[label]), 3),
        "tb_s": round(work.moved / ours / 1e6, 3), "host_us": round(host_time(ready.ours()), 1), "peers": others,
        "failed": failed,
    }  # fmt: skip


def meets(row: Row) -> str:
    """Whether the row's target is met: "3.3 us" is a time, "1.05 update" a ratio to the yardstick."""
    if not row["target"]:
        return ""
    limit, kind = row["target"].split()
    return "yes" if (row["us"] if kind == "us" else row["ratio"]) <= float(limit) else "no"


HEAD = f"{'row':44s} {'MB':>8s} {'us':>9s} {'TB/s':>6s} {'stick us':>9s} {'ratio':>6s} {'target':>12s} met  host"


def line(row: Row) -> str:
    """The row as the table shows it, best peer last."""
    best = min(row["peers"].items(), key=lambda item: float(item[1]), default=None)
    peer = "" if best is None else f"  {best[0]} {best[1]} us ({best[1] / row['us']:.2f}x)"
    broken = "".join(f"  {name} FAILED" for name in row["failed"])
    times = f"{row['moved'] / 1e6:8.1f} {row['us']:9.2f} {row['tb_s']:6.2f} {row['yardstick_us']:9.2f}"
    judged = f"{row['ratio']:6.2f} {row['target']:>12s} {meets(row):3s} {row['host_us']:5.0f}"
    return f"{row['row']:44s} {times} {judged}{peer}{broken}"


def environment() -> dict[str, Any]:
    """Machine and versions."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(), "statescan": __version__,
        "python": platform.python_version(), "cuda": torch.version.cuda,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
    }  # fmt: skip
    for package in ("torch", "triton", "fla-core", "causal-conv1d", "mamba-ssm"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def result_name(facts: dict[str, Any], what: str) -> str:
    """`<date>-<device>-<what>.json`, in letters, digits and dashes."""
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower().removeprefix("nvidia ")).strip("-")
    return f"{facts['date']}-{device}-{what}.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="rows whose name contains one of these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--what", default="all", help="last part of the result's name")
    parser.add_argument("--quick", action="store_true", help="five rounds instead of fifteen")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("statescan bench measures a GPU, and there is none here")
    facts, table = environment(), []
    print(f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}\n{HEAD}", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / result_name(facts, given.what)
    for module, work in chosen(given.words):
        try:
            table.append(measure(module, work, 5 if given.quick else ROUNDS))
            print(line(table[-1]), flush=True)
        except torch.cuda.OutOfMemoryError as error:
            print(f"{work.name:44s} left out: {str(error)[:80]}", flush=True)
        torch.cuda.empty_cache()
        # after every row: a run that is stopped leaves what it has measured
        path.write_text(json.dumps({"environment": facts, "rows": table}, indent=1) + "\n", encoding="utf-8")
    met, judged = sum(meets(row) == "yes" for row in table), sum(bool(row["target"]) for row in table)
    print(f"{met} of {judged} targets met; {path}")


__all__ = ["SOURCES", "Launches", "main", "measure"]

if __name__ == "__main__":
    main()
