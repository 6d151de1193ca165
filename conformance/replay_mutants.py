"""Twenty wrong calls at the sizes of production, recorded from mutants, judged and shrunk as `statescan replay` does.

    python -m statescan.conformance.replay_mutants conformance/replay_mutants.json

stores for each the first bad place, the size of the least call that is still wrong, and the seconds it took.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import Array, Call, Reply
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.mutants import mutant
from statescan.conformance.record import record
from statescan.conformance.recorded import load
from statescan.conformance.replay_call import Judged, judge_recorded
from statescan.conformance.shrink import Shrunk, shrink
from statescan.goldens.tensors import DTYPES

SECONDS = 60.0
FEWER_TOKENS, FEWER_HEADS = 16, 2


class Wrong(NamedTuple):
    """A known fault in one operation."""

    fault: str
    op: str


WRONG: tuple[Wrong, ...] = (
    Wrong("decay-of-previous-token", "gated_delta_rule_prefill"), Wrong("decay-after-write", "gated_delta_rule_update"),
    Wrong("state-leaks-across-boundary", "gated_delta_rule"), Wrong("chunk-edge-token-twice", "gated_delta_rule"),
    Wrong("heads-tiled", "gated_delta_rule_prefill"), Wrong("state-kept-in-bf16", "gated_delta_rule_prefill"),
    Wrong("entering-state-not-decayed", "gated_delta_rule_prefill"), Wrong("neighbours-decay", "gated_delta_rule"),
    Wrong("read-before-write", "gated_delta_rule_update"), Wrong("last-partial-chunk-dropped", "gated_delta_rule"),
    Wrong("copies-descend", "gated_delta_product_prefill"), Wrong("one-beta-for-all-copies", "gated_delta_product"),
    Wrong("decay-of-channel-zero", "kimi_delta_attention_prefill"),
    Wrong("decay-on-value-columns", "kimi_delta_attention_update"),
    Wrong("taps-reversed", "causal_conv1d_prefill"),
    Wrong("boundary-seen-by-nearest-tap-only", "causal_conv1d_prefill"),
    Wrong("state-score-only-stores", "gated_delta_rule_update"),
    Wrong("state-negative-slot-clamped", "gated_delta_rule_update"), Wrong("groups-tiled", "ssd_prefill"),
    Wrong("dt-limit-before-softplus", "ssd_update"),
)  # fmt: skip


def arguments(op: str, seed: int = 0) -> dict[str, Any]:
    """A call of the size of a served model: 128 keys and values, 16 heads, packs of 4 requests and batches of 16."""
    draw = np.random.default_rng(seed)
    bf16, f32 = DTYPES["bf16"], np.dtype("f4")

    def normal(dtype: Any, *shape: int, scale: float = 1.0) -> Array:
        return np.asarray((draw.normal(size=shape) * scale).astype(dtype))

    ends = np.array([0, 50, 51, 130, 180], np.int32)
    read, write = np.array([5, -1, 2, 7], np.int32), np.array([5, 4, -1, 7], np.int32)
    update = op.endswith("_update")
    if update:
        lead: tuple[int, ...] = (16, 2)
        read = np.array([9, -1, *range(10, 24)], np.int32)
        write = np.array([9, 3, -1, *range(11, 24)], np.int32)
    else:
        lead = (1, 192)
    pool: dict[str, Any] = {"read_slots": read, "write_slots": write}
    if not update:
        pool["cu_seqlens"] = ends
    packed: dict[str, Any] = {"cu_seqlens": ends, "output_final_state": True}
    slots = 32 if update else 8
    if op.startswith("causal_conv1d"):
        given = {"x": normal(bf16, *lead, 2048), "weight": normal(bf16, 2048, 4), "bias": normal(bf16, 2048),
                 "conv_pool": normal(bf16, slots, 2048, 4), **pool, "activation": "silu"}  # fmt: skip
        return given
    if op.startswith("ssd"):
        heads, groups, width, columns = 32, 8, 64, 128
        given = {"x": normal(bf16, *lead, heads, width), "dt": normal(f32, *lead, heads),
                 "A": -np.exp(normal(f32, heads)), "B": normal(bf16, *lead, groups, columns, scale=0.3),
                 "C": normal(bf16, *lead, groups, columns, scale=0.3),
                 "D": normal(f32, heads), "z": None, "dt_bias": normal(f32, heads), "dt_limit": (0.0, 1.5)}  # fmt: skip
        more = {**pool, "state_pool": normal(f32, slots, heads, width, columns)} if op != "ssd" else packed
        return {**given, **more}
    copies = 2 if op.startswith("gated_delta_product") else 1
    keys, values, few, many = 128, 128, 8, 16
    wide = (lead[0], lead[1] * copies)
    gate = (*lead, many, keys) if op.startswith("kimi") else (*lead, many)
    given = {"q": normal(bf16, *lead, few, keys), "k": normal(bf16, *wide, few, keys, scale=keys**-0.5),
             "v": normal(bf16, *wide, many, values), "g": -np.abs(normal(f32, *gate, scale=0.2)),
             "beta": draw.uniform(0, 1, (*wide, many)).astype(f32)}  # fmt: skip
    more = packed if op in ("gated_delta_rule", "gated_delta_product", "kimi_delta_attention") else {
        **pool, "state_pool": normal(f32, slots, many, keys, values)}  # fmt: skip
    return {**given, **more, **({"num_householder": copies} if copies > 1 else {})}


def run_of(wrong: Wrong) -> Callable[[Call], Reply]:
    """The implementation that is wrong, as the shrinker calls it."""
    adapter = Adapter(wrong.fault)
    adapter.op(wrong.op)(mutant(wrong.fault)[wrong.op])
    return lambda call: invoke(adapter, isolated(call))


def try_one(wrong: Wrong, seconds: float = SECONDS) -> tuple[Judged, Shrunk | None]:
    """Record the wrong call, read it back, judge it and shrink it."""
    with tempfile.TemporaryDirectory() as folder:
        record(wrong.op, folder, max_bytes=1 << 30)(_named(mutant(wrong.fault)[wrong.op]))(**arguments(wrong.op))
        judged = judge_recorded(load(Path(folder) / "000001.json"), "f32")
    return judged, shrink(judged, run_of(wrong), seconds)


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(**given: Any) -> Any:
        return function(**given)

    return mutated


def row_of(wrong: Wrong, judged: Judged, small: Shrunk | None, seconds: float) -> dict[str, Any]:
    """What is stored of one."""
    axes = {} if small is None else small.size
    tokens = axes.get("N", 1) * axes["J"] if "J" in axes else axes.get("T", 0)
    heads = axes.get("HV", axes.get("H", axes.get("C", 0)))
    return {
        "fault": wrong.fault, "op": wrong.op, "status": judged.verdict.status, "first": judged.verdict.message,
        "shrunk": small is not None and 0 < tokens < FEWER_TOKENS and heads < FEWER_HEADS,
        "tokens": tokens, "heads": heads, "sizes": axes, "still": "" if small is None else small.verdict.message,
        "tried": 0 if small is None else small.tried, "seconds": round(seconds, 1),
    }  # fmt: skip


def main(out: str, only: str = "") -> None:
    """Try all of them and store what came out."""
    rows = []
    for wrong in WRONG:
        if only and only not in wrong:
            continue
        started = time.monotonic()
        judged, small = try_one(wrong)
        rows.append(row_of(wrong, judged, small, time.monotonic() - started))
        print(json.dumps(rows[-1]), flush=True)
    shrunk = sum(bool(row["shrunk"]) for row in rows)
    summary: Mapping[str, Any] = {
        "command": "python -m statescan.conformance.replay_mutants", "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, no GPU", "calls": len(rows),
        "judged wrong": sum(row["status"] != "pass" for row in rows), "shrunk": shrunk,
        "shrunk means": f"fewer than {FEWER_TOKENS} tokens and {FEWER_HEADS} heads", "rows": rows,
    }  # fmt: skip
    if out:
        Path(out).write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    print(f"{len(rows)} wrong calls, {shrunk} shrunk to {summary['shrunk means']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
