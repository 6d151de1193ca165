"""Random schedules of bare mixers: pieces, drafts, padding, restored prefixes, reused slots, moves, pauses, evictions.

    statescan schedules --mixer gdn --count 1000

Each schedule becomes a trace, so what every step must give comes from each request run alone; rows are small integers,
so that sums are exact in any order and equality is equality of numbers in float32 pools. A run is entered in a book on
disk batch by batch, and goes on where it was stopped.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from statescan.conformance.cases import Missing
from statescan.conformance.client import Client
from statescan.conformance.compare import Verdict
from statescan.conformance.replay import replay
from statescan.conformance.replay_program import Engine, describe_alone
from statescan.conformance.runner import environment, target
from statescan.conformance.traces import execute_trace, prepare_trace
from statescan.goldens.store import read_json
from statescan.reference.host.mixer_config import read_config
from statescan.reference.mixers import build_mixer

Trace = dict[str, Any]
Some = Callable[[str, str, int, int], dict[str, Any]]
"""Schedules of an implementation and a kind, from a seed on, so many: what became of them."""
TOKENS = 8
THROUGH = ("hooks", "mixin", "stack")
BATCH = 25
"""Schedules between two entries in the book."""


class Draw:
    """Numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def ints(self, low: int, high: int, *shape: int) -> list[Any]:
        """Whole numbers from `low` to `high` as nested lists."""
        found: list[Any] = self.rng.integers(low, high + 1, shape).tolist()
        return found


def random_mixer(kind: str, draw: Draw) -> Trace:
    """A bare mixer of small sizes; taps of keys and queries pass the newest token alone, so that keys stay one-hot."""
    width, heads = 2 + draw.below(3), 1 + draw.below(2)
    described: Trace = {"kind": kind, "bare": True, "heads": heads, "d_conv": width, "chunk": 1 + draw.below(4),
                        "conv_bias": None, "activation": None}  # fmt: skip
    if kind == "mamba2":
        described |= {"heads": 2 * heads, "groups": heads, "headdim": 1 + draw.below(2), "d_state": 2,
                      "A": [draw.below(2) * -1024 for _ in range(2 * heads)], "D": draw.ints(-1, 2, 2 * heads),
                      "dt_bias": None, "dt_softplus": False}  # fmt: skip
    else:
        described |= {"value_heads": heads * (1 + draw.below(2)), "key_dim": 2, "value_dim": 1 + draw.below(2),
                      "scale": 1, **({"householder": 1 + draw.below(3)} if kind == "gdp" else {})}  # fmt: skip
    config, newest = read_config(described), [[0] * (width - 1) + [1]]
    taps: list[list[int]] = []
    for name, channels in (part for part in config.parts if part[0] in config.conv_parts):
        free = name in ("x", "v", "V", "B", "C")
        taps += draw.ints(-1, 2, channels, width) if free else newest * channels
    return {**described, "row": [f"{name}:{width}" for name, width in config.parts], "conv_weight": taps}


def random_rows(described: Mapping[str, Any], draw: Draw) -> list[list[int]]:
    """A row for every token: one-hot keys, beta 0, 1 or 2, log-decays 0 or -1024, other numbers small."""
    config = read_config(described)
    rows = []
    for _ in range(TOKENS):
        row: list[int] = []
        for name, width in config.parts:
            if name in ("k", "K"):
                for _ in range(width // config.key_dim):
                    hot = draw.below(config.key_dim)
                    row += [int(i == hot) for i in range(config.key_dim)]
            elif name in ("beta", "b", "dt"):
                row += draw.ints(0, 2, width)
            elif name in ("alpha", "a", "f"):
                row += [-1024 if draw.chance(0.2) else 0 for _ in range(width)]
            else:
                row += draw.ints(-3, 3, width)
        rows.append(row)
    return rows


def random_trace(kind: str, seed: int) -> Trace:
    """One schedule as a trace with steps; the same seed gives the same."""
    draw = Draw(seed)
    mixer = random_mixer(kind, draw)
    prefix = draw.ints(0, TOKENS - 1, 4)
    tokens = {}
    for name in "ABCDE"[: 2 + draw.below(4)]:
        own = draw.ints(0, TOKENS - 1, 1 + draw.below(8))
        tokens[name] = [*prefix, *own] if draw.chance(0.4) else own
    trace: Trace = {
        "format": "statescan.trace/1", "rules": 1, "id": f"random-{kind}-{seed}", "class": "exact", "mixer": mixer,
        "sizes": {"slots": 2 + draw.below(3), "max_drafts": draw.below(4), "max_snapshots": 2, "pool_fill": "nan",
                  "scratch_fill": -7, "blocks": 2},
        "rows": random_rows(mixer, draw), "requests": {name: {"tokens": own} for name, own in tokens.items()},
        "program": [],
    }  # fmt: skip
    engine, scheduler = Engine(trace), Scheduler(trace, draw)
    trace["steps"] = []
    while scheduler.waiting or scheduler.running or scheduler.away:
        step = scheduler.next(engine)
        trace["program"].append(step)
        trace["steps"].append(engine.step(step))
    trace["alone"] = {name: describe_alone(engine, name) for name in tokens}
    return trace


class Scheduler:
    """Decides one step after another; what it may decide it reads off the engine's book."""

    def __init__(self, trace: Trace, draw: Draw) -> None:
        self.trace, self.draw = trace, draw
        self.waiting = list(trace["requests"])
        self.running: list[str] = []
        self.away: list[str] = []
        self.prompt = {name: 1 + draw.below(len(spec["tokens"])) for name, spec in trace["requests"].items()}
        self.count = 0

    def next(self, engine: Engine) -> Trace:
        """The next step of the program."""
        step: Trace = {"step": self.count}
        self.count += 1
        self.admit(step, engine)
        active = [name for name in self.running if not engine.requests[name].paused and self.draw.chance(0.8)]
        self.draw.rng.shuffle(active)
        done = {name: self.position(step, engine, name) for name in active}
        self.decode(step, engine, [name for name in active if done[name] >= self.prompt[name]])
        self.prefill(step, engine, {name: done[name] for name in active if done[name] < self.prompt[name]})
        self.leave(step, engine)
        return step

    def admit(self, step: Trace, engine: Engine) -> None:
        """Waiting requests take free slots, some from a kept prefix; those that are away come back."""
        free, admitted = list(engine.pool.free), []
        paused = [name for name in self.running if engine.requests[name].paused]
        if paused and self.draw.chance(0.6):
            step["resume"] = paused
            for name in paused:
                engine.requests[name].paused = False
        while free and (self.waiting or self.away) and self.draw.chance(0.7):
            slot = free.pop(self.draw.below(len(free)))
            if self.away and self.draw.chance(0.5):
                name = self.away.pop(0)
                admitted.append({"request": name, "slot": slot, "load": name})
            elif self.waiting:
                name = self.waiting.pop(0)
                admitted.append({"request": name, "slot": slot, **self.kept_prefix(engine, name)})
            else:
                break
            self.running.append(name)
        if admitted:
            step["admit"] = admitted
        if self.draw.chance(0.2) and free:
            step["poison"] = free

    def kept_prefix(self, engine: Engine, name: str) -> Trace:
        """A kept block that is a prefix of the prompt, with at least one token behind it."""
        tokens = engine.requests[name].tokens
        for block, kept in engine.blocks.items():
            if len(kept) < self.prompt[name] and list(tokens[: len(kept)]) == kept and self.draw.chance(0.8):
                return {"restore_block": block, "position": len(kept)}
        return {}

    def position(self, step: Trace, engine: Engine, name: str) -> int:
        """Tokens done when the hooks of this step run."""
        for given in step.get("admit", []):
            if given["request"] == name:
                return len(engine.saved[name]) if "load" in given else int(given.get("position", 0))
        return engine.requests[name].done

    def decode(self, step: Trace, engine: Engine, names: list[str]) -> None:
        """Decode rows, all with drafts or none."""
        most = self.draw.below(1 + self.trace["sizes"]["max_drafts"])
        rows = []
        for name in names:
            at, tokens = self.position(step, engine, name), engine.requests[name].tokens
            row: Trace = {"request": name, "tokens": [at, at + 1]}
            if most:
                accept = self.draw.below(min(most, len(tokens) - at - 1) + 1)
                ahead = list(tokens[at + 1 : at + 1 + accept])
                row |= {"drafts": ahead + self.draw.ints(0, TOKENS - 1, most - accept), "accept": accept}
            rows.append(row)
        if rows or self.draw.chance(0.1):
            step["decode"] = rows
            step["decode_pad_to"] = max(len(rows) + self.draw.below(3), 1)

    def prefill(self, step: Trace, engine: Engine, done: Mapping[str, int]) -> None:
        """Pieces of prompts of any length, snapshots in some of them."""
        rows: list[Trace] = []
        snapshots: list[Trace] = []
        total = 0
        for name, at in done.items():
            length = 1 + self.draw.below(self.prompt[name] - at)
            rows.append({"request": name, "tokens": [at, at + length]})
            total += length
            if len(snapshots) < 2 and self.draw.chance(0.4):
                snapshots.append({"request": name, "position": at + 1 + self.draw.below(length)})
        if not rows and self.draw.chance(0.7):
            return
        step |= {"prefill": rows, "prefill_pad_to": max(len(rows) + self.draw.below(3), 1),
                 "token_pad_to": total + self.draw.below(4)}  # fmt: skip
        if snapshots:
            step["snapshot"] = snapshots
            step["commit"] = [{**snapshot, "block": self.draw.below(3)} for snapshot in snapshots]

    def leave(self, step: Trace, engine: Engine) -> None:
        """Who is done ends; others wait, are pushed out or moved away now and then."""
        after = self.after(step, engine)
        finished = [name for name in self.running if after[name] >= len(engine.requests[name].tokens)]
        rest = [name for name in self.running if name not in finished]
        self.running = rest.copy()
        if finished:
            step["finish"] = finished
        if rest and self.draw.chance(0.15):
            step["pause"] = [rest.pop(0)]
        if rest and self.draw.chance(0.1):
            name = rest.pop(0)
            step["evict"] = [name]
            self.running.remove(name)
            self.waiting.append(name)
        if rest and self.draw.chance(0.15):
            name = rest.pop(0)
            step["save"] = [{"request": name, "name": name}]
            self.running.remove(name)
            self.away.append(name)

    def after(self, step: Trace, engine: Engine) -> dict[str, int]:
        """Tokens done behind this step."""
        found = {name: self.position(step, engine, name) for name in self.running}
        for row in step.get("decode", []):
            found[row["request"]] += 1 + row.get("accept", 0)
        for row in step.get("prefill", []):
            found[row["request"]] = row["tokens"][1]
        return found


def check(kind: str, seed: int, make: Callable[[Mapping[str, Any]], Any] = build_mixer) -> Verdict:
    """One schedule on an implementation, through its hooks, its mixin or a stack by turns; `make` builds its mixer."""
    trace = random_trace(kind, seed)
    return replay(trace, make(trace["mixer"]), through=THROUGH[seed % len(THROUGH)], derived=seed % 2 == 0)


# ---------------------------------------------------------------------------------------------------------------------
# Many of them
# ---------------------------------------------------------------------------------------------------------------------


def check_on(name: str, kind: str, seed: int) -> Verdict:
    """One schedule on an implementation by the name of its adapter; the reference runs in this process."""
    if name == "reference":
        return check(kind, seed)
    client, trace = client_of(name), random_trace(kind, seed)
    if not client.hello["ok"]:
        return Verdict("not_applicable", str(client.hello.get("message", "not installed")))
    case = prepare_trace(trace, {}, client.capabilities)
    if isinstance(case, Missing):
        return Verdict("not_applicable", case.word)
    case = replace(case, ways=(case.ways[seed % len(case.ways)],), derived=seed % 2 == 0)
    return execute_trace(case, client.setup, lambda call, step: client.run(call, vector=trace["id"], name=step))


@lru_cache(maxsize=1)
def client_of(name: str) -> Client:
    """The child of an adapter, one for each of our processes; it ends when its input does."""
    return Client(list(target(name).command)).__enter__()


def run_some(name: str, kind: str, first: int, count: int) -> dict[str, Any]:
    """Schedules of one mixer: how many passed, which did not apply and why, and which failed."""
    found: dict[str, Any] = {"passed": 0, "not_applicable": {}, "failed": []}
    for seed in range(first, first + count):
        verdict = check_on(name, kind, seed)
        if verdict.passed:
            found["passed"] += 1
        elif verdict.status == "not_applicable":
            found["not_applicable"][verdict.message] = found["not_applicable"].get(verdict.message, 0) + 1
        else:
            found["failed"].append({"seed": seed, "status": verdict.status, "message": verdict.message[:500]})
    return found


@dataclass
class Book:
    """What is done of a run of schedules, on disk after every batch, so that it can be taken up again."""

    path: Path
    name: str
    first: int
    mixers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, name: str, first: int, again: bool = False) -> Book:
        """The book of an earlier run of the same code on the same implementation, else a new one."""
        book = cls(path, name, first)
        if path.exists() and not again:
            stored = read_json(path)
            if {key: stored.get(key) for key in book.head()} == book.head():
                book.mixers = stored["mixers"]
        return book

    def head(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {"format": "statescan.schedules/1", "implementation": self.name, "first": self.first,
                "code": code_digest(self.name)}  # fmt: skip

    def done(self, kind: str) -> int:
        """Schedules of a mixer that are behind us; they run in order."""
        return int(self.mixers.get(kind, {}).get("count", 0))

    def add(self, kind: str, count: int, found: Mapping[str, Any]) -> None:
        """Enter a batch and store the book."""
        row = self.mixers.setdefault(kind, {"count": 0, "passed": 0, "not_applicable": {}, "failed": []})
        row["count"] += count
        row["passed"] += found["passed"]
        row["failed"] += found["failed"]
        for word, n in found["not_applicable"].items():
            row["not_applicable"][word] = row["not_applicable"].get(word, 0) + n
        self.path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        stored = {**self.head(), "date": now, "environment": environment(), "mixers": self.mixers}
        text = json.dumps(stored, indent=1, ensure_ascii=False) + "\n"
        beside = self.path.with_suffix(".tmp")
        beside.write_text(text, "utf-8")
        beside.replace(self.path)


@cache
def code_digest(name: str) -> str:
    """What a stored outcome belongs to: the code that makes, replays and serves schedules."""
    root = Path(__file__).parents[1]
    folders = [root / "reference", *([root / "fast"] if name == "fast" else [])]
    files = [*(root / "conformance").glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    parts = [path.relative_to(root).as_posix().encode() + path.read_bytes() for path in sorted(files)]
    return "sha256:" + hashlib.sha256(b"".join(parts)).hexdigest()


def run_schedules(
    book: Book, kinds: Sequence[str], count: int, jobs: int = 1,
    progress: Callable[[str, int], None] = lambda kind, done: None, some: Some | None = None,
) -> None:  # fmt: skip
    """Bring every mixer to `count` schedules, in batches spread over `jobs` processes; `some` makes a batch of them."""
    for kind in kinds:
        starts = range(book.done(kind), count, BATCH)
        sizes = [min(BATCH, count - start) for start in starts]
        firsts = [book.first + start for start in starts]
        progress(kind, book.done(kind))
        batches = _batches(some or run_some, book.name, kind, firsts, sizes, jobs)
        for size, found in zip(sizes, batches, strict=True):
            book.add(kind, size, found)
            progress(kind, book.done(kind))


def _batches(
    some: Some, name: str, kind: str, firsts: Sequence[int], sizes: Sequence[int], jobs: int
) -> Iterator[dict[str, Any]]:
    """The outcome of each batch, in order."""
    if jobs <= 1:
        yield from map(partial(some, name, kind), firsts, sizes)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(some, name, kind), firsts, sizes)
