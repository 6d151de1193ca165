"""Twenty wrong calls at the sizes of production, recorded from mutants, judged and shrunk as `statescan replay` does.

The faults are drawn by a seed from all that are known of the operations on tokens; those that the call does not show
(gradients, arguments that it lacks) are counted and left out.

    python -m statescan.conformance.replay_mutants conformance/replay_mutants.json

stores for each the first bad place, the size of the least call that is still wrong, and the seconds it took.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import Array, Call, Reply
from statescan.conformance.cut import HEADS, Piece, cut, cut_heads, live_slots, sizes
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.mutants import faults_of, models, mutant
from statescan.conformance.record import record
from statescan.conformance.recorded import load
from statescan.conformance.replay_call import Judged, judge_recorded
from statescan.conformance.shrink import Shrunk, shrink
from statescan.goldens.tensors import DTYPES
from statescan.spec.contract import OPERATIONS

SECONDS = 60.0
CALLS, SEED = 20, 7
FEWER_TOKENS, FEWER_HEADS = 16, 2


class Wrong(NamedTuple):
    """A known fault in one operation."""

    fault: str
    op: str


OPERATIONS_TRIED = tuple(f"{name}{kind}" for name in ("causal_conv1d", "gated_delta_rule", "gated_delta_product",
                                                      "kimi_delta_attention", "ssd")
                         for kind in ("", "_prefill", "_update"))  # fmt: skip


def drawn(seed: int = SEED) -> Iterator[Wrong]:
    """Known faults in operations that have them, in an order that nobody chose."""
    pairs = [Wrong(fault, op) for op in OPERATIONS_TRIED for fault in faults_of(op)]
    return iter([pairs[i] for i in np.random.default_rng(seed).permutation(len(pairs))])


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
    if op == "causal_conv1d":
        return {"x": normal(bf16, *lead, 2048), "weight": normal(bf16, 2048, 4), "bias": normal(bf16, 2048),
                "initial_windows": normal(bf16, 4, 2048, 4), "activation": "silu", "cu_seqlens": ends}  # fmt: skip
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


def small_calls() -> Iterator[tuple[str, dict[str, Any], Callable[..., Any]]]:
    """The same calls cut to a few heads, channels and tokens, on right models: what other tests start from."""
    right = next(iter(models().values()))
    for op in OPERATIONS_TRIED:
        given = arguments(op)
        settings = {a.name for a in OPERATIONS[op].settings}
        piece = Piece(op, {k: v for k, v in given.items() if k in settings},
                      {k: v for k, v in given.items() if k not in settings and v is not None}, {})  # fmt: skip
        few, many = HEADS.get(OPERATIONS[op].family, ("", ""))
        if few:
            group = sizes(piece)[many] // sizes(piece)[few]
            piece = cut_heads(piece, [0, 1], range(min(group, 2)))
        for letter, keep in (("T", range(45, 60)), ("K", range(4)), ("V", range(3)), ("R", range(4)), ("P", range(3)),
                             ("C", range(3))):  # fmt: skip
            if letter in sizes(piece) and sizes(piece)[letter] > len(keep):
                piece = cut(piece, letter, keep)
        if op.endswith("_update"):
            piece = cut(piece, "N", range(4))
        if live_slots(piece):
            piece = cut(piece, "slots", live_slots(piece))
        required = [a.name for a in OPERATIONS[op].tensors if not a.optional or a.name in given]
        yield op, {**dict.fromkeys(required), **piece.tensors, **piece.args}, _named(right[op])


def run_of(wrong: Wrong) -> Callable[[Call], Reply]:
    """The implementation that is wrong, as the shrinker calls it."""
    adapter = Adapter(wrong.fault)
    adapter.op(wrong.op)(mutant(wrong.fault)[wrong.op])
    return lambda call: invoke(adapter, isolated(call))


def try_one(wrong: Wrong, seconds: float = SECONDS) -> tuple[Judged, Shrunk | None]:
    """Record the wrong call, read it back, judge it and, if it is wrong, shrink it."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(Exception):  # a fault may be an exception
            record(wrong.op, folder, max_bytes=1 << 30)(_named(mutant(wrong.fault)[wrong.op]))(**arguments(wrong.op))
        judged = judge_recorded(load(Path(folder) / "000001.json"), "f32", seconds=1)
    return judged, None if judged.verdict.passed else shrink(judged, run_of(wrong), seconds)


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
        "shrunk": small is not None and tokens < FEWER_TOKENS and heads < FEWER_HEADS and seconds < SECONDS,
        "tokens": tokens, "heads": heads, "sizes": axes, "still": "" if small is None else small.verdict.message,
        "tried": 0 if small is None else small.tried, "seconds": round(seconds, 1),
    }  # fmt: skip


def main(out: str = "", calls: int = CALLS) -> None:
    """Try faults as they are drawn until `calls` of them have shown, and store what came out."""
    rows: list[dict[str, Any]] = []
    quiet = 0
    for wrong in drawn():
        if len(rows) == calls:
            break
        started = time.monotonic()
        judged, small = try_one(wrong)
        if judged.verdict.passed:
            quiet += 1
            continue
        rows.append(row_of(wrong, judged, small, time.monotonic() - started))
        print(json.dumps(rows[-1]), flush=True)
    shrunk = sum(bool(row["shrunk"]) for row in rows)
    summary: Mapping[str, Any] = {
        "command": "python -m statescan.conformance.replay_mutants", "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, no GPU", "seed": SEED, "wrong calls": len(rows),
        "faults drawn that these calls do not show": quiet, "shrunk": shrunk,
        "shrunk means": f"fewer than {FEWER_TOKENS} tokens and {FEWER_HEADS} heads, in {SECONDS:g} s at most",
        "rows": rows,
    }  # fmt: skip
    if out:
        Path(out).write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    print(f"{len(rows)} wrong calls, {shrunk} shrunk to {summary['shrunk means']}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
