"""A whole schedule judged: every edit and array of its steps tried on a toy whose state is the tokens it has seen.

A slot of the toy holds the last three tokens (its window) and all tokens (its state), so that a wrong one says by
itself whose it is and from when. What a request reads must be its own text up to there, whatever pieces, prefixes,
drafts, pauses and evictions came before: each request as if it ran alone. Free slots are poisoned, and at the end what
is free, held and kept is counted.

A whole engine tells its edits and arrays (the form of `run_program`); a scheduler tells what it decides, and
`carry_out` makes the edits that this means. Nothing of the reference is needed for either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statescan.conformance.compare import Verdict

Json = Mapping[str, Any]
WINDOW = 3
Point = tuple[tuple[int, ...], tuple[int, ...]]
"""Window and state: the last tokens, zeros before the first, and all tokens."""

EMPTY: Point = ((0,) * WINDOW, ())
PASS = Verdict("pass")


class Fault(Exception):  # noqa: N818  a finding, not an error of ours
    """What a schedule does wrong: the clause, and what happened."""

    def __init__(self, clause: str, message: str) -> None:
        super().__init__(f"{message} ({clause})")
        self.clause = clause


class Kept(NamedTuple):
    """A state in the cache: the block it is kept under, the point, the step it was kept in."""

    block: int
    point: Point
    step: int


def advance(point: Point, token: int) -> Point:
    """The toy's recurrence."""
    return (*point[0][1:], token), (*point[1], token)


def point_of(tokens: Sequence[int]) -> Point:
    """What stands after these tokens."""
    return ((0,) * WINDOW + tuple(tokens))[len(tokens) :], tuple(tokens)


def spell(tokens: Sequence[int]) -> str:
    """Tokens in a message."""
    return " ".join(map(str, tokens)) or "nothing"


@dataclass
class Life:
    """What the judge knows of a request: its text, how far it is, where it is."""

    text: list[int]
    prompt: int
    state: str = "waiting"
    reached: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    came: str = ""
    """`admit` or `load` until a row of it has been seen, then empty."""
    pushed_out: int = 0
    """Tokens that it had done when it was last evicted."""

    @property
    def lives(self) -> bool:
        return self.state in ("running", "paused")


class Judge:
    """One schedule under way."""

    def __init__(self, sizes: Json, requests: Mapping[str, Sequence[int]]) -> None:
        self.sizes, self.number = sizes, 0
        self.lives = {name: Life(list(prompt), len(prompt)) for name, prompt in requests.items()}
        self.slots: list[Point | None] = [None] * sizes["slots"]
        self.entries: dict[tuple[int, int], Point] = {}
        self.snapshots: list[Point | None] = []
        self.kept: dict[int, Kept] = {}
        self.saved: dict[str, Point | None] = {}
        self.restored: dict[int, Point] = {}
        """Slots that were restored and not yet run."""

    # One step ---------------------------------------------------------------------------------------------------------

    def step(self, decided: Json, told: Json) -> None:
        """One step: who comes, what is done before the hooks, the hooks, what is done after them, who leaves."""
        self.come(decided, told["come"])
        for event in told["before"]:
            self.check_begun(event)
            self.edit(event)
        decode, prefill = told["decode"], told["prefill"]
        self.same_rows(decided, decode["rows"], prefill["rows"])
        self.run_decode(decode, {row["request"]: row for row in decided.get("decode", ())})
        self.run_prefill(prefill, decided.get("prefill", ()))
        rows = {row["request"]: row for row in (*decided.get("decode", ()), *decided.get("prefill", ()))}
        freed = self.finish_step(told["after"], rows, [*decided.get("evict", ()), *decided.get("finish", ())])
        self.leave(decided, freed)
        self.number += 1

    def come(self, decided: Json, told: Sequence[Json]) -> None:
        """Resumptions, loads and admissions, as the program has them; slots and blocks, as the engine has them."""
        for name in decided.get("resume", ()):
            self.lives[name].state = "running"
        wanted = {}
        for word in ("load", "admit"):
            for one in decided.get(word, ()):
                wanted[one if isinstance(one, str) else one["request"]] = (word, one)
        if list(wanted) != [one["request"] for one in told]:
            raise Fault("LIFE-1", f"{', '.join(one['request'] for one in told) or 'nobody'} came in, "
                                  f"{', '.join(wanted) or 'nobody'} decided")  # fmt: skip
        for one in told:
            name, slot = one["request"], one["slot"]
            word, asked = wanted[name]
            self.check_slot(slot)
            if isinstance(asked, Mapping) and asked["slot"] != slot:
                raise Fault("LIFE-1", f"{name} gets slot {slot}, slot {asked['slot']} decided")
            owner = next((other for other, life in self.lives.items() if life.lives and life.slot == slot), None)
            if owner is not None:
                raise Fault("LIFE-6", f"{name} gets slot {slot}, which {owner} holds")
            life = self.lives[name]
            life.state, life.slot, life.came, life.blocks = "running", slot, word, list(one.get("blocks", ()))
            self.check_blocks(name)

    def check_blocks(self, name: str) -> None:
        """A block is in two tables at once only where both requests have the same tokens up to its end."""
        life, size = self.lives[name], self.sizes.get("block_size") or 1
        for n, block in enumerate(life.blocks):
            if block in life.blocks[:n]:
                raise Fault("SNAP-8", f"block {block} is {name}'s twice: found by a name and handed out as free")
            for other, held in self.lives.items():
                if other != name and held.lives and block in held.blocks:
                    m = held.blocks.index(block)
                    if held.text[: (m + 1) * size] != life.text[: (n + 1) * size]:
                        raise Fault("SNAP-6", f"block {block} is given to {name} and {other} holds it for other tokens")

    def check_slot(self, slot: int) -> None:
        """A slot lies in the pool."""
        if not 0 <= slot < len(self.slots):
            raise Fault("SLOT-5", f"slot {slot} is outside 0..{len(self.slots) - 1}")

    def check_begun(self, event: Json) -> None:
        """What is zeroed, restored or loaded belongs to a request that has not begun."""
        for name, life in self.lives.items():
            if life.lives and life.slot == event.get("slot") and not life.came:
                raise Fault("LIFE-5", f"{event['op']} of slot {life.slot}, which {name} is running in")

    def edit(self, event: Json) -> None:
        """One engine edit, on window and state together."""
        word, slot = event["op"], event.get("slot", 0)
        self.check_slot(slot)
        if word == "zero":
            self.slots[slot] = EMPTY
            self.restored.pop(slot, None)
        elif word == "restore":
            self.restore(slot, event)
        elif word == "load":
            self.slots[slot] = self.saved[event["name"]]
        elif word == "save":
            self.saved[event["name"]] = self.slots[slot]
        elif word == "rollback":
            self.roll_back(slot, event)
        elif word == "commit":
            if event.get("kept", True):
                self.commit(event)
        elif word != "free":
            raise Fault("ERR-5", f"{word!r} is no event word")

    def restore(self, slot: int, event: Json) -> None:
        """A kept state becomes a slot's; it must be the one that is kept under this block."""
        found = self.kept.get(event["place"])
        if found is None or found.block != event["block"]:
            holds = "nothing" if found is None else f"the state of block {found.block}"
            said = f"slot {slot} is restored from block {event['block']}, and place {event['place']} holds {holds}"
            raise Fault("SNAP-8", said)
        self.slots[slot] = self.restored[slot] = found.point

    def roll_back(self, slot: int, event: Json) -> None:
        """An entry becomes the slot's point; `only` names the one array of two that a faulty engine copies."""
        entry = self.entries.get((slot, event["entry"]))
        if entry is None:
            raise Fault("SPEC-3", f"slot {slot} is rolled back to entry {event['entry']}, which nobody wrote")
        now = self.slots[slot]
        self.slots[slot] = (now[0], entry[1]) if event.get("only") == "state" and now is not None else entry

    def commit(self, event: Json) -> None:
        """A snapshot, or what a slot holds, is kept under a block."""
        block, place, places = event["block"], event["place"], self.sizes.get("places", 0)
        if not 0 <= place < places:
            raise Fault("SNAP-7", f"a state is kept at place {place} of {places}")
        if "from" in event and not 0 <= event["from"] < len(self.snapshots):
            raise Fault("SNAP-4", f"block {block} is kept with snapshot {event['from']} of {len(self.snapshots)}")
        point = self.snapshots[event["from"]] if "from" in event else self.slots[event["slot"]]
        now = self.kept.get(place)
        if now is not None and now.block != block and now.step == self.number:
            raise Fault("SNAP-6", f"block {block} takes place {place} of block {now.block}, which is named beside it")
        self.check_kept(event, block, point)
        assert point is not None
        self.kept = {at: one for at, one in self.kept.items() if one.block != block}
        self.kept[place] = Kept(block, point, self.number)

    def check_kept(self, event: Json, block: int, point: Point | None) -> None:
        """What is kept under a block is the state of its request behind the block's last token."""
        size = self.sizes.get("block_size") or 1
        holders = [(name, life) for name, life in self.lives.items() if life.lives and block in life.blocks]
        if not holders:
            raise Fault("SNAP-4", f"block {block} is kept with a state, and nobody holds it")
        wants = [life.text[: (life.blocks.index(block) + 1) * size] for _, life in holders]
        if point is not None and list(point[1]) in wants:
            return
        name, life = holders[0]
        has = "nothing" if point is None else spell(point[1])
        said = f"block {block} of {name} ends behind {spell(wants[0])}, and is kept with the state of {has}"
        own = point is not None and list(point[1]) == [*life.text, *self.newest.get(name, ())][: len(point[1])]
        if "slot" in event:
            raise Fault("SNAP-4" if name in self.decoded else "SNAP-5", said)
        raise Fault("SNAP-9" if own else "SNAP-4", said)

    # The hooks --------------------------------------------------------------------------------------------------------

    def same_rows(self, decided: Json, decode: Sequence[Json], prefill: Sequence[Json]) -> None:
        """The rows are those that were decided, and their slots those of their requests alone."""
        pieces = {row["request"] for row in decided.get("prefill", ())}
        for row in decode:
            if row["request"] in pieces:
                raise Fault("CONT-4", f"{row['request']} has a piece of its prompt, and a row in decode")
        for word, rows in (("decode", decode), ("prefill", prefill)):
            wanted, got = [row["request"] for row in decided.get(word, ())], [row["request"] for row in rows]
            if wanted != got:
                raise Fault("META-2", f"{word} rows of {', '.join(got) or 'nobody'}: {', '.join(wanted) or 'nobody'} "
                                      "decided")  # fmt: skip
        self.decoded = {row["request"] for row in decode}
        for row in (*decode, *prefill):
            name, slot, life = row["request"], row["slot"], self.lives[row["request"]]
            if life.state != "running":
                raise Fault("LIFE-7", f"{name} is {life.state} and has a row")
            if life.slot != slot:
                raise Fault("LIFE-5", f"{name} runs in slot {slot} and is in slot {life.slot}")
            self.start(name, row)

    def start(self, name: str, row: Json) -> None:
        """A row starts where the request is; the first one may start where a state was restored, and nowhere else."""
        life, at = self.lives[name], row["at"]
        if life.came != "admit":
            if at != life.reached:
                ahead = at > life.reached
                raise Fault("SNAP-2" if ahead else "CONT-1", f"{name} starts at {at} and is at {life.reached}: tokens "
                                                             f"are {'skipped' if ahead else 'run twice'}")  # fmt: skip
            return
        restored = self.restored.pop(row["slot"], EMPTY)[1]
        if at != len(restored):
            if at == life.pushed_out and not restored:
                raise Fault("LIFE-3", f"{name} was evicted, and goes on at {at}")
            seen = f"restored at {len(restored)}" if restored else "not restored"
            raise Fault("SNAP-1" if len(restored) > at else "SNAP-2", f"{name} starts at {at}, and its slot was {seen}")
        if list(restored) != life.text[:at]:
            raise Fault("SNAP-8", f"{name} starts from the state of {spell(restored)}, and has {spell(life.text[:at])}")
        if at >= life.prompt:
            raise Fault("SNAP-10", f"{name} starts at {at} of a prompt of {life.prompt}: nothing is left to compute")
        life.reached = at

    def run_row(self, row: Json, slot: int, tokens: Sequence[int]) -> list[Point]:
        """One row through the toy: what it reads must be the request's own text; the point behind each token."""
        name, point = row["request"], self.slots[slot]
        life = self.lives[name]
        own = life.text[: life.reached]
        if point != point_of(own):
            self.explain(name, point, own, "reads", "LIFE-4" if life.came == "load" else "")
        life.came = ""
        points = [point_of(own)]
        for token in tokens:
            points.append(advance(points[-1], token))
        return points

    def explain(self, name: str, point: Point | None, own: Sequence[int], does: str, clause: str = "") -> None:
        """Raise what is wrong with a point of a request, as precisely as the two arrays tell."""
        want = point_of(own)
        if point is None:
            raise Fault(clause or "LIFE-2", f"{name} {does} a slot that nobody has written since it was free")
        if point[1] == want[1]:
            said = f"{name} {does} the state of {spell(own)} with the window {spell(point[0])}"
            raise Fault(clause or "LIFE-4", said)
        if not own:
            raise Fault(clause or "LIFE-2", f"{name} {does} the state of {spell(point[1])} before its first token")
        mine = list(point[1]) == self.lives[name].text[: len(point[1])]
        said = f"{name} {does} the state of {spell(point[1])}, and has {spell(own)}"
        raise Fault(clause or ("SNAP-1" if mine else "LIFE-5"), said)

    def run_decode(self, decode: Json, decided: Mapping[str, Json]) -> None:
        """The decode hook on the slots it is given; entries where rows have more than one token."""
        slots, rows = decode["batch_indices"], decode["rows"]
        self.check_slots(slots, [row["slot"] for row in rows], "decode")
        many = max((len(row["tokens"]) for row in rows), default=1) > 1
        for row, slot in zip(rows, slots, strict=False):
            life, drafts = self.lives[row["request"]], decided[row["request"]].get("drafts", ())
            if life.reached < life.prompt:
                raise Fault("CONT-4", f"{row['request']} is at {life.reached} of its prompt and decodes")
            wanted = [*life.text[life.reached : life.reached + 1], *drafts]
            if list(row["tokens"][: len(wanted)]) != wanted:
                raise Fault("SPEC-8", f"{row['request']} is given {spell(row['tokens'])} at {life.reached}, its base "
                                      f"token and drafts are {spell(wanted)}")  # fmt: skip
            points = self.run_row(row, slot, row["tokens"])
            if many:
                for j, point in enumerate(points[1:]):
                    self.entries[slot, j] = point
            self.slots[slot] = points[-1]

    def run_prefill(self, prefill: Json, decided: Sequence[Json]) -> None:
        """The prefill hook on its arrays; snapshots where they say."""
        slots, cu, rows = prefill["batch_indices_prefill"], prefill["cu_seqlens"], prefill["rows"]
        self.check_slots(slots, [row["slot"] for row in rows], "prefill")
        pack = [token for row in rows for token in row["tokens"]]
        moments: dict[int, Point] = {}
        grid = self.sizes.get("alignment", 1)
        for n, row in enumerate(rows):
            tokens, life = pack[cu[n] : cu[n + 1]], self.lives[row["request"]]
            wanted = life.text[life.reached : decided[n]["to"]]
            if tokens != wanted:
                raise Fault("META-1", f"{row['request']} is given {spell(tokens)} at {life.reached}, its piece is "
                                      f"{spell(wanted)}")  # fmt: skip
            points = self.run_row(row, slots[n], tokens)
            moments |= {cu[n] + i: point for i, point in enumerate(points) if i and (i % grid == 0 or i == len(tokens))}
            self.slots[slots[n]] = points[-1]
        count, room = prefill["intermediate_real_count"][0], self.sizes.get("snapshots")
        if room is not None and count > room:
            raise Fault("META-9", f"{count} snapshots are asked for, and the buffers have {room} rows")
        positions = prefill["intermediate_abs_positions"][:count]
        bad = next((position for position in positions if position not in moments), None)
        if bad is not None:
            raise Fault("SNAP-9", f"a snapshot at {bad} of a pack cut at {list(cu)}, on a grid of {grid}")
        self.snapshots = [moments[position] for position in positions]

    def check_slots(self, given: Sequence[int], wanted: Sequence[int], what: str) -> None:
        """An index array names the slots of the real rows, each once, and nothing behind them."""
        if list(given[: len(wanted)]) != list(wanted) or any(slot >= 0 for slot in given[len(wanted) :]):
            raise Fault("META-2", f"{what} slots {list(given)} for rows in {list(wanted)}")

    # After the hooks --------------------------------------------------------------------------------------------------

    def finish_step(self, after: Sequence[Json], rows: Mapping[str, Json], ending: Sequence[str]) -> list[int]:
        """Edits in their order; then every request that goes on must hold its own text. The slots that were freed."""
        freed: list[int] = []
        self.newest = {name: row.get("chosen", ()) for name, row in rows.items()}
        behind = {"rollback": "SPEC-3", "commit": "SNAP-4", "save": "LIFE-4"}
        for event in after:
            if event["op"] == "free":
                if event["slot"] in freed:
                    raise Fault("LIFE-6", f"slot {event['slot']} is freed twice")
                freed.append(event["slot"])
            elif event.get("slot") in freed and event["op"] in behind:
                raise Fault(behind[event["op"]], f"{event['op']} of slot {event['slot']} when it is free")
            else:
                self.edit(event)
        for name, row in rows.items():
            life = self.lives[name]
            life.reached = row["to"] if "to" in row else life.reached + len(row["chosen"])
            life.text += row.get("chosen", ())
            own = life.text[: life.reached]
            assert life.slot is not None
            if name not in ending and self.slots[life.slot] != point_of(own):
                self.explain(name, self.slots[life.slot], own, "is left with", "SPEC-3" if name in self.decoded else "")
        for slot in freed:
            self.slots[slot] = None
        return freed

    def leave(self, decided: Json, freed: Sequence[int]) -> None:
        """Who leaves gives its slot back, and nobody else does."""
        for word, state in (("save", "away"), ("evict", "waiting"), ("finish", "finished")):
            for name in decided.get(word, ()):
                life = self.lives[name]
                if life.slot not in freed:
                    raise Fault("LIFE-3", f"{name} leaves ({word}) and slot {life.slot} is not freed")
                life.state, life.slot, life.blocks = state, None, []
                if word == "evict":
                    life.pushed_out, life.reached, life.prompt = life.reached, 0, len(life.text)
        for name in decided.get("pause", ()):
            self.lives[name].state = "paused"
        for slot in freed:
            holder = next((name for name, life in self.lives.items() if life.slot == slot), None)
            if holder is not None:
                raise Fault("LIFE-3", f"slot {slot} is freed, and {holder} holds it")

    # At the end -------------------------------------------------------------------------------------------------------

    def count(self, end: Json) -> None:
        """Nothing is lost and nothing held twice: slots, blocks and places are counted."""
        taken = {life.slot for life in self.lives.values() if life.lives and life.slot is not None}
        if sorted(end["free_slots"]) != [slot for slot in range(self.sizes["slots"]) if slot not in taken]:
            raise Fault("LIFE-3", f"slots {sorted(end['free_slots'])} are free of {self.sizes['slots']}, and "
                                  f"{sorted(taken)} are held")  # fmt: skip
        tables = [block for life in self.lives.values() if life.lives for block in life.blocks]
        for block, held in {**dict.fromkeys(tables, 0), **dict(end["held"])}.items():
            if held != tables.count(block):
                raise Fault("LIFE-3", f"block {block} is held {held} times, and in {tables.count(block)} tables")
        places = [place for _, place in end["kept"]]
        if sorted([*places, *end["free_places"]]) != list(range(self.sizes.get("places", 0))):
            raise Fault("SNAP-8", f"places {sorted(places)} are kept and {end['free_places']} free, of "
                                  f"{self.sizes.get('places', 0)}")  # fmt: skip
        empty = set(end["free_blocks"]) & {block for block, _ in end["kept"]}
        if empty:
            raise Fault("SNAP-8", f"block {min(empty)} is free, and a state is kept under it")


def judge(sizes: Json, requests: Mapping[str, Sequence[int]], program: Sequence[Json], log: Json) -> Verdict:
    """Judge what an engine, or a scheduler, made of a program. The first failure with its step, or `pass`.

    An engine's log has the form of `run_program`; a scheduler's has `steps` of decisions (`carry_out`) and no `end`.
    """
    one = Judge(sizes, requests)
    try:
        if len(log["steps"]) != len(program):
            raise Fault("STEP-3", f"{len(log['steps'])} steps for a program of {len(program)}")
        for decided, told in zip(program, log["steps"], strict=True):
            one.step(decided, told if "before" in told else carry_out(one, told))
        if "end" in log:
            one.count(log["end"])
    except Fault as fault:
        return Verdict("fail.value", f"step {one.number}: {fault}", fault.clause, {"step": one.number})
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:  # a log from outside is data
        return Verdict("fail.shape", f"step {one.number}: the log is not in the form: {error!r}", "ERR-5")
    return PASS


Run = Callable[..., Any]
"""An engine: `run_program` of the reference, of a model, or of a stranger."""


def try_engine(run: Run, sizes: Json, requests: Mapping[str, Sequence[int]], program: Sequence[Json]) -> Verdict:
    """Run a program on an engine and judge it; a refusal of a program that is right is a failure too."""
    try:
        log = run(sizes, requests, program)
    except ValueError as error:
        return Verdict("error", f"{type(error).__name__}: {error}")
    return judge(sizes, requests, program, log)


# ---------------------------------------------------------------------------------------------------------------------
# A scheduler's decisions
# ---------------------------------------------------------------------------------------------------------------------


def carry_out(judge: Judge, step: Json) -> dict[str, Any]:
    """The edits and arrays that a scheduler's decisions mean: what an engine without a mistake of its own would do.

    A step has the words of a trace's program: admit [{"request", "slot", "restore_block", "position", "load"}], decode
    [{"request", "tokens": [from, to], "drafts", "accept"}], prefill [{"request", "tokens"}], snapshot [{"request",
    "position"}], commit [{"request", "position", "block"}], drop [blocks], save, evict and finish [names].
    """
    slots = {name: life.slot for name, life in judge.lives.items()}
    come, before = [], []
    for one in step.get("admit", ()):
        name, slot, block = one["request"], one["slot"], one.get("restore_block")
        slots[name] = slot
        come.append({"request": name, "slot": slot, "blocks": one.get("blocks", [])})
        place = next((place for place, kept in judge.kept.items() if kept.block == block), -1)
        before.append({"op": "load", "slot": slot, "name": name} if "load" in one else
                      {"op": "zero", "slot": slot} if block is None else
                      {"op": "restore", "slot": slot, "block": block, "place": place})  # fmt: skip
    decode = [_row(judge, slots, row) for row in step.get("decode", ())]
    prefill = [_row(judge, slots, row) for row in step.get("prefill", ())]
    cu = [0]
    for row in prefill:
        cu.append(cu[-1] + len(row["tokens"]))
    positions = [_place(prefill, cu, one) for one in step.get("snapshot", ())]
    after = list(_after(judge, step, slots, positions, prefill, cu))
    return {
        "come": come, "before": before,
        "decode": {"rows": decode, "batch_indices": [row["slot"] for row in decode]},
        "prefill": {"rows": prefill, "cu_seqlens": cu, "batch_indices_prefill": [row["slot"] for row in prefill],
                    "intermediate_abs_positions": positions, "intermediate_real_count": [len(positions)]},
        "after": after,
    }  # fmt: skip


def _row(judge: Judge, slots: Mapping[str, Any], row: Json) -> dict[str, Any]:
    """A row's request, slot, start and tokens; drafts behind its base token."""
    (first, last), name = row["tokens"], row["request"]
    tokens = [*judge.lives[name].text[first:last], *row.get("drafts", ())]
    return {"request": name, "slot": slots[name], "at": first, "tokens": tokens}


def _place(rows: Sequence[Json], cu: Sequence[int], one: Json) -> int:
    """A position of a request's text as an offset in the pack."""
    n = next((n for n, row in enumerate(rows) if row["request"] == one["request"]), None)
    if n is None:
        raise Fault("SNAP-9", f"a snapshot of {one['request']}, which has no piece in this step")
    offset = int(one["position"]) - int(rows[n]["at"])
    if not 0 < offset <= len(rows[n]["tokens"]):
        raise Fault("SNAP-9", f"a snapshot of {one['request']} at {one['position']}, outside its piece "
                              f"{rows[n]['at']}..{rows[n]['at'] + len(rows[n]['tokens'])}")  # fmt: skip
    return cu[n] + offset


def _after(
    judge: Judge, step: Json, slots: Mapping[str, Any], positions: Sequence[int], prefill: Sequence[Json],
    cu: Sequence[int],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Edits behind the hooks: states dropped and kept, drafts rolled back, requests off-loaded, slots freed."""
    dropped = set(step.get("drop", ()))
    taken = {kept.block: place for place, kept in judge.kept.items() if kept.block not in dropped}
    for one in step.get("commit", ()):
        room = [place for place in range(judge.sizes.get("places", 0)) if place not in taken.values()]
        if one["block"] not in taken and not room:
            raise Fault("SNAP-7", f"block {one['block']} is kept, and all {len(taken)} places are taken")
        place = taken.setdefault(one["block"], room[0] if room else -1)
        at = _place(prefill, cu, one)
        if at not in positions:
            raise Fault("SNAP-4", f"block {one['block']} is kept from {one['request']} at {one['position']}, where no "
                                  "snapshot is taken")  # fmt: skip
        yield {"op": "commit", "from": positions.index(at), "block": one["block"], "place": place}
    many = any(row.get("drafts") for row in step.get("decode", ()))
    for row in step.get("decode", ()) if many else ():
        yield {"op": "rollback", "slot": slots[row["request"]], "entry": row.get("accept", 0)}
    for name in step.get("save", ()):
        yield from ({"op": "save", "slot": slots[name], "name": name}, {"op": "free", "slot": slots[name]})
    for name in (*step.get("evict", ()), *step.get("finish", ())):
        yield {"op": "free", "slot": slots[name]}
