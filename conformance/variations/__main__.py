"""Every variation against every vector it could trip, counted: `python -m statescan.conformance.variations`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from statescan.conformance.cases import Missing, Vector
from statescan.conformance.variations import Variation, applicable, sample, try_one, variations
from statescan.goldens.store import load_vectors, manifest


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 without an alarm, 1 with one."""
    parser = argparse.ArgumentParser(prog="statescan.conformance.variations", description=__doc__)
    parser.add_argument("--sample", action="store_true", help="the part that runs in the tests")
    parser.add_argument("--only", default="", metavar="FAMILY", help="delta, ssd, conv or gates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # the tensors are small
    corpus = load_vectors()
    work = sample(corpus) if options.sample else ((one, applicable(one, corpus)) for one in variations())
    chosen = [(one, vectors) for one, vectors in work if one.family.startswith(options.only)]
    report = {"format": "statescan.alarms/1", "corpus": manifest(corpus.values())["digest"],
              **count(chosen, corpus, show=sys.stderr.isatty())}  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for alarm in report["alarms"]:
        print(f"{alarm['vector']}: {alarm['status']} {alarm['message']}\n  {alarm['variation']}")
    print(f"{len(report['alarms'])} alarms in {report['runs']} runs of {report['variations']} variations, "
          f"{report['not_applicable']} not applicable, {report['seconds']:g} s")  # fmt: skip
    for operand, largest in report["largest_scores"].items():
        print(f"largest score, {operand} operands and float32 outputs: {largest['score']:g} ({largest['vector']})")
    return 1 if report["alarms"] else 0


def count(
    work: Iterable[tuple[Variation, Sequence[Vector]]], corpus: Mapping[str, Vector], show: bool = False
) -> dict[str, Any]:
    """Runs, alarms with their places, and the largest score of each operand class where outputs are float32."""
    started, classes, alarms = time.monotonic(), Counter[str](), []
    largest: dict[str, dict[str, Any]] = {}
    met = Counter[str]()
    absent = done = 0
    for done, (variation, vectors) in enumerate(work, 1):
        adapter = variation.adapter()
        for vector in vectors:
            verdict = try_one(adapter, vector, corpus)
            if isinstance(verdict, Missing):
                absent += 1
                continue
            classes[vector["class"]] += 1
            met[vector["id"]] += 1
            if not verdict.passed:
                alarms.append({"variation": variation.name, "vector": vector["id"], "status": verdict.status,
                               "message": verdict.message})  # fmt: skip
            _keep_largest(largest, variation, vector, verdict.score)
        if show:
            print(f"\r{done} variations, {sum(classes.values())} runs, {len(alarms)} alarms", end="", file=sys.stderr)
    if show:
        print(file=sys.stderr)
    return {
        "variations": done, "vectors": len(met), "runs": sum(classes.values()), "runs_by_class": dict(classes),
        "not_applicable": absent, "least_runs_of_a_vector": min(met.values(), default=0),
        "largest_scores": dict(sorted(largest.items())), "seconds": round(time.monotonic() - started, 1),
        "alarms": alarms,
    }  # fmt: skip


def _keep_largest(
    largest: dict[str, dict[str, Any]], variation: Variation, vector: Vector, score: float | None
) -> None:
    if score is None or variation.choices.get("types") != "f32":
        return
    operand = "f32" if vector["op"].endswith("_gate") else variation.operand
    if score > largest.get(operand, {"score": 0.0})["score"]:
        largest[operand] = {"score": round(score, 4), "vector": vector["id"], "variation": variation.name}


if __name__ == "__main__":
    raise SystemExit(main())
