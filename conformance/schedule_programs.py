"""Programs for a scheduler's bookkeeping: random ones from a seed, and all small ones one by one.

    statescan schedules --engine reference --count 10000
    python -m statescan.conformance.schedule_programs

A program is decided step by step on the reference's book, which says what may be done, and then tried on any engine
(`statescan.conformance.schedules`): pieces, prefixes, drafts, pauses, evictions, off-loads, padding, a full cache, a
full table, all at once. No tensor takes part, so that one takes about a millisecond.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from statescan.conformance.calls import Call
from statescan.conformance.compare import Verdict, judge_reply
from statescan.conformance.schedules import PASS, judge, try_engine
from statescan.reference.host.requests import Book, Request, Sizes, run_program, run_step
from statescan.spec.contract import CapacityError, PackingError

Json = dict[str, Any]


class Schedule(NamedTuple):
    """A program, with the engine's sizes and the prompts of its requests."""

    sizes: Json
    requests: dict[str, list[int]]
    program: list[Json]


# ---------------------------------------------------------------------------------------------------------------------
# Random
# ---------------------------------------------------------------------------------------------------------------------

MOST_STEPS = 200


class Decider:
    """Decides one random step after another, until every request has ended."""

    def __init__(self, seed: int, kind: str) -> None:
        self.draw = random.Random(f"{kind} {seed}")
        self.sizes = random_sizes(self.draw, kind)
        self.texts = random_texts(self.draw)
        self.prompts = {name: self.draw.randint(1, len(text)) for name, text in self.texts.items()}
        requests = {name: text[: self.prompts[name]] for name, text in self.texts.items()}
        most = max(len(text) for text in self.texts.values()) // (self.sizes["block_size"] or 1) + 1
        self.sizes["blocks"] = most + self.draw.choice([0, 1, 3, 8, 20]) if self.sizes["block_size"] else 0
        self.names_slots = self.chance(0.3)
        self.schedule = Schedule(self.sizes, requests, [])
        self.book = Book(Sizes(**self.sizes))
        for name, prompt in requests.items():
            self.book.add(name, prompt)

    def run(self) -> Schedule:
        """All steps."""
        while any(request.state != "finished" for request in self.book.requests.values()):
            step = self.decide()
            self.schedule.program.append(step)
            run_step(self.book, step)
            if len(self.schedule.program) > MOST_STEPS:
                raise RuntimeError("a random schedule does not end")
        return self.schedule

    def chance(self, p: float) -> bool:
        return self.draw.random() < p

    def named(self, *states: str) -> list[str]:
        """Requests in one of these states, in random order."""
        found = [name for name, request in self.book.requests.items() if request.state in states]
        self.draw.shuffle(found)
        return found

    def decide(self) -> Json:
        """One step; it is tried on a copy of the book, so that what there is no room for is left out."""
        step: Json = {}
        trial = copy.deepcopy(self.book)
        step["resume"] = [name for name in self.named("paused") if self.chance(0.5)]
        for name in step["resume"]:
            trial.resume(name)
        for word, state in (("load", "away"), ("admit", "waiting")):
            step[word] = [one for name in self.named(state) if self.chance(0.6)
                          for one in self.comes(trial, word, name)]  # fmt: skip
        running = [name for name, request in trial.requests.items() if request.state == "running"]
        self.begun = {name: trial.requests[name].done for name in running}
        self.draw.shuffle(running)
        self.rows(step, [trial.requests[name] for name in running if self.chance(0.8)])
        self.pad(step)
        self.leave(step, trial)
        return {word: value for word, value in step.items() if value or word.endswith("_pad_to")}

    def comes(self, trial: Book, word: str, name: str) -> list[Any]:
        """A request that comes, if there is room for it: by name, or into a named slot, the same way all along."""
        free = trial.pool.free
        chosen: Any = {"request": name, "slot": self.draw.choice(free)} if free and self.names_slots else name
        try:
            getattr(trial, word)(name, chosen["slot"] if isinstance(chosen, dict) else None)
        except CapacityError:
            return []
        return [chosen]

    def rows(self, step: Json, active: Sequence[Request]) -> None:
        """Decode rows with drafts for those behind their prompts, pieces for the others."""
        step["decode"], step["prefill"] = [], []
        most = self.draw.randint(0, self.sizes["max_drafts"])
        for request in active:
            text, known = self.texts[request.name], len(request.tokens)
            if request.done < request.prompt:
                left = request.prompt - request.done
                length = self.draw.choice([left, self.draw.randint(1, left)])
                ends = length == left
                step["prefill"].append({"request": request.name, "to": request.done + length,
                                        **({"chosen": self.next_tokens(text, known, 1)} if ends else {})})  # fmt: skip
                continue
            count = self.draw.randint(0, most)
            accepted = self.draw.randint(0, count)
            chosen = self.next_tokens(text, known, 1 + accepted)
            wrong = [self.draw.randint(0, 9) for _ in range(count - accepted)]
            step["decode"].append({"request": request.name, "drafts": chosen[:-1] + wrong, "chosen": chosen})

    def next_tokens(self, text: Sequence[int], known: int, count: int) -> list[int]:
        """How a text goes on; past its end it goes on with anything."""
        own = list(text[known : known + count])
        return own + [self.draw.randint(0, 9) for _ in range(count - len(own))]

    def pad(self, step: Json) -> None:
        """Sizes of a captured graph, sometimes."""
        if self.chance(0.4):
            step["decode_pad_to"] = len(step["decode"]) + self.draw.randint(0, 3)
        if self.chance(0.4):
            step["prefill_pad_to"] = len(step["prefill"]) + self.draw.randint(0, 3)
        if self.chance(0.4):
            tokens = sum(row["to"] - self.begun[row["request"]] for row in step["prefill"])
            step["token_pad_to"] = tokens + self.draw.randint(0, 5)

    def leave(self, step: Json, trial: Book) -> None:
        """Those whose text is complete end, sometimes others too; some pause, are off-loaded or pushed out."""
        given = {row["request"]: len(row.get("chosen", ())) for row in (*step["decode"], *step["prefill"])}
        step |= {word: [] for word in ("save", "pause", "evict", "finish")}
        for name in self.named("running", "paused", "waiting", "away"):
            request = trial.requests[name]
            if request.state not in ("running", "paused"):
                continue
            if len(request.tokens) + given.get(name, 0) >= len(self.texts[name]) or self.chance(0.02):
                step["finish"].append(name)
            elif self.chance(0.06):
                step["evict"].append(name)
            elif self.chance(0.06) and name in given:
                step["save"].append(name)
            elif self.chance(0.1) and request.state == "running":
                step["pause"].append(name)


def random_sizes(draw: random.Random, kind: str) -> Json:
    """Sizes of an engine for a kind of mixer, small enough that everything runs out."""
    block = draw.choice([0, 1, 2, 2, 3, 4])
    return {
        "slots": draw.randint(1, 4), "max_drafts": draw.randint(0, 3), "snapshots": draw.choice([None, 0, 1, 2, 6]),
        "chunk_size": draw.randint(1, 4), "d_conv": draw.randint(2, 4), "block_size": block,
        "places": draw.choice([0, 1, 2, 3, 5, 12]) if block else 0, "policy": draw.choice(["lru", "lru", "ref_zero"]),
        "alignment": draw.choice([1, 1, 2, block or 1]), "least_tokens": draw.randint(1, 2),
        "num_householder": draw.randint(1, 3) if kind == "gdp" else 1,
    }  # fmt: skip


def random_texts(draw: random.Random) -> dict[str, list[int]]:
    """Up to six texts of up to 40 tokens, many with a beginning in common."""
    trunk = [draw.randint(0, 9) for _ in range(draw.randint(1, 24))]
    texts = {}
    for name in "ABCDEF"[: draw.randint(1, 6)]:
        shared = trunk[: draw.randint(0, len(trunk))] if draw.random() < 0.8 else []
        texts[name] = shared + [draw.randint(0, 9) for _ in range(draw.randint(1, 16))]
    return texts


def random_schedule(seed: int, kind: str = "gdp") -> Schedule:
    """One schedule; the same seed and kind of mixer give the same."""
    return Decider(seed, kind).run()


# ---------------------------------------------------------------------------------------------------------------------
# All small ones
# ---------------------------------------------------------------------------------------------------------------------

SMALL = Schedule(
    {"slots": 2, "max_drafts": 1, "snapshots": 2, "chunk_size": 2, "d_conv": 3, "block_size": 2, "blocks": 3,
     "places": 1}, {"A": [1, 2, 3], "B": [1, 2, 4]}, [],
)  # fmt: skip
"""Two requests that share a block of two tokens, two slots, a place for one state; each text has one token more."""
TEXTS = {"A": [1, 2, 3, 5], "B": [1, 2, 4, 6]}
Action = tuple[str, ...]


def small_schedules(
    disturbances: int = 1, start: Schedule = SMALL, texts: Mapping[str, Sequence[int]] = TEXTS
) -> Iterator[Schedule]:
    """Every program of these requests: all cuts, orders and batches, with so many pauses and evictions at any step."""
    book = Book(Sizes(**start.sizes))
    for name, prompt in start.requests.items():
        book.add(name, prompt)
    yield from _grow(book, start, texts, disturbances)


def _grow(book: Book, so_far: Schedule, texts: Mapping[str, Sequence[int]], left: int) -> Iterator[Schedule]:
    """All continuations of a program; `left` pauses and evictions may come yet."""
    if all(request.state == "finished" for request in book.requests.values()):
        yield so_far
        return
    for picked in product(*([(), *_actions(request, left)] for request in book.requests.values())):
        spent = sum(action[:1] in (("pause",), ("evict",)) for action in picked)
        if not any(picked) or spent > left:
            continue
        trial = copy.deepcopy(book)
        step: Json = {}
        try:
            for action, name in zip(picked, book.requests, strict=True):
                _enter(step, action, trial, name, texts[name])
            trial = copy.deepcopy(book)
            run_step(trial, step)
        except (CapacityError, PackingError):  # no room, or a piece that passes what the prefix leaves to compute
            continue
        yield from _grow(trial, so_far._replace(program=[*so_far.program, step]), texts, left - spent)


def _actions(request: Request, disturbances: int) -> Iterator[Action]:
    """What may be done with a request in a step: admitted with its first piece, or run, or disturbed."""
    left = request.prompt - request.done
    if request.state == "paused":
        yield ("resume",)
    elif request.state in ("waiting", "running"):
        for length in range(1, left + 1):
            yield ("piece", str(length))
        if left <= 0:
            yield from (("token",), ("token", "right"), ("token", "wrong"))
        if disturbances and request.state == "running":
            yield from (("pause",), ("evict",))


def _enter(step: Json, action: Action, trial: Book, name: str, text: Sequence[int]) -> None:
    """One request's part of a step; a text that is complete ends with it."""
    if not action:
        return
    request = trial.requests[name]
    word, known = action[0], len(request.tokens)
    if word in ("resume", "pause", "evict"):
        step.setdefault(word, []).append(name)
        return
    if request.state == "waiting":
        trial.admit(name)
        step.setdefault("admit", []).append(name)
    row: Json = {"request": name}
    if word == "piece":
        row["to"] = request.done + int(action[1])
        count = int(row["to"] == request.prompt)
    else:
        row["drafts"] = {(): [], ("right",): [text[known]], ("wrong",): [0]}[action[1:]]
        count = 1 + (action[1:] == ("right",))
    chosen = [*text[known : known + count], *[0] * (known + count - len(text))]
    step.setdefault("prefill" if word == "piece" else "decode", []).append(row | ({"chosen": chosen} if count else {}))
    if known + count >= len(text):
        step.setdefault("finish", []).append(name)


# ---------------------------------------------------------------------------------------------------------------------
# Smaller ones
# ---------------------------------------------------------------------------------------------------------------------


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The smallest schedule to be had by leaving things out one at a time, that is right and of which `fails` holds."""
    smaller = True
    while smaller:
        smaller = False
        for less in _less(schedule):
            if try_engine(run_program, *less) == PASS and fails(less):
                schedule, smaller = less, True
                break
    return schedule


def _less(schedule: Schedule) -> Iterator[Schedule]:
    """The schedule without one thing, large things first: a request, a step, a word, a row, a token, a size."""
    sizes, requests, program = schedule
    for name in requests:
        yield Schedule(sizes, {n: text for n, text in requests.items() if n != name},
                       [step for old in program if (step := _without(old, name))])  # fmt: skip
    for n in range(len(program)):
        yield schedule._replace(program=program[:n] + program[n + 1 :])
    for n, step in enumerate(program):
        for changed in _lesser_steps(step):
            yield schedule._replace(program=[*program[:n], *([changed] if changed else []), *program[n + 1 :]])
    for name, text in requests.items():
        for i in range(len(text)):
            moved = [_moved(step, name, i) for step in program]
            yield Schedule(sizes, {**requests, name: text[:i] + text[i + 1 :]}, moved)
    for word, least in SMALLEST.items():
        value = sizes.get(word, least)
        for lower in [None] if least is None else range(least, value if isinstance(value, int) else least):
            if value != lower:
                yield schedule._replace(sizes={**sizes, word: lower})


SMALLEST: dict[str, int | None] = {
    "slots": 1, "max_drafts": 0, "snapshots": None, "block_size": 0, "blocks": 0, "places": 0, "alignment": 1,
    "least_tokens": 1, "num_householder": 1, "chunk_size": 1, "d_conv": 2,
}  # fmt: skip


def _lesser_steps(step: Json) -> Iterator[Json]:
    """A step without one word, one row or its drafts."""
    for word, value in step.items():
        yield {other: own for other, own in step.items() if other != word}
        for i, row in enumerate(value if isinstance(value, list) else ()):
            if len(value) > 1:
                yield {**step, word: value[:i] + value[i + 1 :]}
            if isinstance(row, dict) and row.get("drafts"):
                less = row | {"drafts": row["drafts"][:-1], "chosen": row["chosen"][: len(row["drafts"])]}
                yield {**step, word: [*value[:i], less, *value[i + 1 :]]}
            if isinstance(row, dict) and "slot" in row:
                yield {**step, word: [*value[:i], row["request"], *value[i + 1 :]]}


def _without(step: Json, name: str) -> Json:
    """A step without a request."""
    def kept(rows: Any) -> Any:
        if not isinstance(rows, list):
            return rows
        return [row for row in rows if (row if isinstance(row, str) else row["request"]) != name]

    return {word: rows for word, value in step.items() if (rows := kept(value)) or not isinstance(value, list)}


def _moved(step: Json, name: str, i: int) -> Json:
    """A step when token i of a prompt is gone: pieces that end behind it end one earlier."""
    if "prefill" not in step:
        return step
    rows = [row | {"to": row["to"] - (row["request"] == name and row["to"] > i)} for row in step["prefill"]]
    return {**step, "prefill": rows}


# ---------------------------------------------------------------------------------------------------------------------
# Many
# ---------------------------------------------------------------------------------------------------------------------

Engine = Callable[..., Any]


def check_many(first: int, count: int, run: Engine = run_program, kind: str = "gdp") -> dict[str, Any]:
    """Random schedules on an engine: how many passed, and which failed and why."""
    return _counted(first, count, lambda schedule: try_engine(run, *schedule), kind)


def run_some(name: str, kind: str, first: int, count: int) -> dict[str, Any]:
    """Random schedules on an implementation by the name of its adapter; the reference runs in this process."""
    if name == "reference":
        return _counted(first, count, lambda schedule: try_engine(run_program, *schedule), kind)
    from statescan.conformance.replay_random import client_of  # another process is needed here alone

    client = client_of(name)
    if not any(claim["op"] == "engine.run" for claim in client.capabilities):
        return {"passed": 0, "not_applicable": {"engine.run": count}, "failed": []}

    def check(schedule: Schedule) -> Verdict:
        reply = client.run(Call("engine.run", schedule._asdict(), {}), vector="random schedule")
        return judge_reply(reply) or judge(*schedule, reply.value)

    return _counted(first, count, check, kind)


def _counted(first: int, count: int, check: Callable[[Schedule], Verdict], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"passed": 0, "not_applicable": {}, "failed": []}
    for seed in range(first, first + count):
        verdict = check(random_schedule(seed, kind))
        if verdict == PASS:
            found["passed"] += 1
        else:
            one = {"seed": seed, "status": verdict.status, "message": verdict.message[:500]}
            found["failed"].append(one if found["failed"] else one | {"smallest": smallest(seed, kind, check)})
    return found


def smallest(seed: int, kind: str, check: Callable[[Schedule], Verdict]) -> Json:
    """A failing schedule made small, as the `args` of an `engine.run` vector, ready to be kept."""
    schedule = random_schedule(seed, kind)
    wanted = check(schedule)

    def fails(less: Schedule) -> bool:
        told = check(less)
        return (told.status, told.tensor) == (wanted.status, wanted.tensor)

    return dict(shrink(schedule, fails)._asdict())


def check_small(run: Engine = run_program, disturbances: int = 1) -> int:
    """Every small program on an engine: how many there are; raises AssertionError at the first that fails."""
    count = 0
    for schedule in small_schedules(disturbances):
        count += 1
        verdict = try_engine(run, *schedule)
        if verdict != PASS:
            raise AssertionError(f"{verdict.message}: {schedule}")
    return count


if __name__ == "__main__":
    print(f"all {check_small()} programs of two requests, with a pause or an eviction: as alone")
