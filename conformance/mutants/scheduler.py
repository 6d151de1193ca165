"""A bookkeeper with at most one fault: blocks of prompts and states under them, and the life of requests (SNAP, LIFE).

Written apart from the reference: one table holds what is known of a block (its name, who holds it, the place of its
state), slots are handed out from the lowest up, and a request's arrays are read off its own entry. Each fault is one
comparison with its id, at the place where its mechanism sits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from statescan.conformance.mutants.packed import refusals
from statescan.spec.contract import CapacityError, PackingError, ShapeError, SlotError, UnsupportedError

CACHE_FAULTS: tuple[str, ...] = (
    "skip-on-a-later-piece", "skip-by-matched-blocks", "state-cut-back", "whole-prompt-skipped",
    "snapshot-one-block-late", "snapshot-off-the-grid", "end-state-of-any-piece", "end-state-of-an-open-block",
    "names-without-what-is-before", "salt-left-out", "victim-among-the-named", "victim-in-use", "victim-used-last",
    "places-handed-out-in-part", "full-cache-fails-the-request", "name-outlives-its-block", "state-outlives-its-block",
    "block-given-back-twice", "place-of-an-unnamed-block-leaks",
)  # fmt: skip
LIFE_FAULTS: tuple[str, ...] = (
    "slot-not-zeroed", "restart-keeps-its-position", "slot-leaked-at-eviction", "slot-freed-twice",
    "pause-gives-the-slot-away", "blocks-held-for-ever", "second-owner-of-a-slot", "restore-into-the-row",
    "zeroed-behind-its-load", "saved-when-it-is-free", "rows-in-order-of-admission", "padding-requests-on-slot-zero",
    "piece-of-one-token-decoded", "prompt-begins-anew-with-each-piece", "positions-within-the-piece",
    "snapshots-past-the-buffer", "commit-after-the-request-moved-on", "commit-behind-the-end",
    "snapshots-of-the-step-before", "rollback-state-only", "rollback-one-too-far", "nothing-rolled-back-without-drafts",
    "rejected-drafts-stay", "paused-request-run",
)  # fmt: skip
FAULTS: tuple[str, ...] = (*CACHE_FAULTS, *LIFE_FAULTS, "one-class-for-all", "message-without-label")


def build(fault: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """The operations of this module, right or with one fault."""
    model = Rules(fault)
    return {
        "hash_blocks": model.hash_blocks, "plan_skip": model.plan_skip, "plan_snapshots": model.plan_snapshots,
        "run_state_cache": model.run_state_cache, "engine.run": model.run,
    }  # fmt: skip


class Rules:
    """Names, skips and snapshots, and the two things that are run."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault

    def hash_blocks(
        self, tokens: Sequence[int], block_size: int, salt: str | None = None, *, check: bool | None = None
    ) -> list[int]:
        """The name of every whole block (SNAP-8)."""
        with refusals(self.fault):
            check_least("block_size", block_size, 1)
        salted = salt is not None and self.fault != "salt-left-out"
        before = hashlib.sha256(f"megatron-prefix-cache-salt-v1\0{salt}".encode()).digest() if salted else bytes(32)
        names, start = [], before
        for block in np.array(tokens, "<i8")[: len(tokens) // block_size * block_size].reshape(-1, block_size):
            before = hashlib.sha256(before + block.tobytes()).digest()
            names.append(1 + sum(byte << 8 * i for i, byte in enumerate(before[:8])) % (2**63 - 1))
            before = start if self.fault == "names-without-what-is-before" else before
        return names

    def plan_skip(
        self, prompt_tokens: int, finished: int, matched: int, states: Sequence[int], block_size: int,
        limit: int | None = None, least_tokens: int | None = None, *, check: bool | None = None,
    ) -> int:  # fmt: skip
        """Tokens that a restored state stands for (SNAP-1, SNAP-2, SNAP-10)."""
        fault, least = self.fault, 1 if least_tokens is None else least_tokens
        with refusals(fault):
            for name, value, low in (("prompt_tokens", prompt_tokens, 0), ("finished", finished, 0),
                                     ("matched", matched, 0), ("block_size", block_size, 1),
                                     ("least_tokens", least, 1)):  # fmt: skip
                check_least(name, value, low)
        end = min(prompt_tokens if limit is None else limit, prompt_tokens)
        room = end // block_size if fault == "whole-prompt-skipped" else (end - least) // block_size
        if finished:
            late = max(min(matched, room) * block_size - finished, 0)
            return late if fault == "skip-on-a-later-piece" else 0
        for n in range(min(matched, room), 0, -1):
            cut = fault == "state-cut-back" and any(n < state <= matched for state in states)
            if n in states or fault == "skip-by-matched-blocks" or cut:
                return n * block_size
        return 0

    def plan_snapshots(
        self, prompt_tokens: int, finished: int, piece: int, skip: int, matched: int, block_size: int, alignment: int,
        *, check: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Blocks that end inside a piece and are worth a snapshot; the block that ends with the prompt (SNAP-9, 5)."""
        fault, start, end = self.fault, finished + skip, finished + piece
        with refusals(fault):
            check_least("block_size", block_size, 1)
            check_least("alignment", alignment, 1)
            if not 0 <= finished <= start < end <= prompt_tokens:
                raise PackingError(f"piece {finished}..{end} of {prompt_tokens}, {skip} skipped (SNAP-9)")
        grid = 1 if fault == "snapshot-off-the-grid" else alignment
        worth = (matched, prompt_tokens // block_size, (end - 1) // block_size)
        found = []
        for block in range(prompt_tokens // block_size):
            at = (block + 1) * block_size - start
            if block + 1 in worth and 0 < at < end - start and at % grid == 0:
                late = fault == "snapshot-one-block-late" and at + block_size < end - start
                found.append([at + block_size * late, block])
        last = end == prompt_tokens or fault == "end-state-of-any-piece"
        whole = prompt_tokens % block_size == 0 or fault == "end-state-of-an-open-block"
        return {"snapshots": found, "end": prompt_tokens // block_size - 1 if last and whole else -1}

    def run_state_cache(
        self, blocks: int, places: int, events: Sequence[Sequence[Any]], policy: str | None = None,
        *, check: bool | None = None,
    ) -> list[Any]:  # fmt: skip
        """A table of blocks with states under them, event by event (SNAP-6, 7, 8)."""
        with refusals(self.fault):
            shelf, log = Shelf(blocks, places, policy or "lru", self.fault), []
            for word, *given in events:
                if word == "match":
                    found = shelf.match(*given)
                    log.append([found, [n + 1 for n, block in enumerate(found) if shelf.rows[block].place >= 0]])
                elif word == "restore":
                    log.append(shelf.rows[given[0]].place)
                elif word in ("acquire", "allocate", "commit"):
                    log.append(getattr(shelf, word)(*given))
                elif word in ("fill", "release", "forget", "invalidate"):
                    getattr(shelf, word)(*given)
                else:
                    raise UnsupportedError(f"{word!r} is no event (ERR-5)")
            return [*log, [shelf.spare, shelf.kept()]]

    def run(
        self, sizes: Mapping[str, Any], requests: Mapping[str, Sequence[int]], program: Sequence[Mapping[str, Any]],
        *, check: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A whole program (LIFE, SNAP)."""
        with refusals(self.fault):
            engine = Engine(self, sizes, requests)
            return {"steps": [engine.step(step) for step in program], "end": engine.end()}


# ---------------------------------------------------------------------------------------------------------------------
# Blocks and states
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A block: its name, how many hold it, when it was used, the place of its state; -1 and 0 for none."""

    name: int = 0
    holders: int = 0
    used: int = 0
    place: int = -1


class Shelf:
    """All blocks, and the places for states under them."""

    def __init__(self, blocks: int, places: int, policy: str, fault: str | None) -> None:
        if policy not in ("lru", "ref_zero"):
            raise UnsupportedError(f"policy={policy!r} (ERR-5)")
        self.rows = [Row() for _ in range(blocks)]
        self.empty, self.spare = list(range(blocks))[::-1], list(range(places))
        self.policy, self.fault, self.clock = policy, fault, 0

    def kept(self) -> list[list[int]]:
        """Blocks with a state, and where it is."""
        return [[block, row.place] for block, row in enumerate(self.rows) if row.place >= 0]

    def match(self, names: Sequence[int]) -> list[int]:
        """Blocks of the longest run of names that are known."""
        known = {row.name: block for block, row in enumerate(self.rows) if row.name}
        run = next((n for n, name in enumerate(names) if name not in known), len(names))
        return [known[name] for name in names[:run]]

    def acquire(self, names: Sequence[int]) -> list[int]:
        """A block for every name, or a CapacityError and no change."""
        held = self.match(names)
        wanted = len(names) - len(held)
        idle = [block for block in self.by_age(lambda row: bool(row.name)) if block not in held]
        if wanted > len(self.empty) + len(idle):
            raise CapacityError(f"{wanted} blocks, {len(self.empty) + len(idle)} free or unheld (LIFE-1)")
        for block in idle[: max(wanted - len(self.empty), 0)]:
            self.drop(block)
        held += [self.empty.pop() for _ in range(wanted)]
        for block in held:
            self.rows[block].holders += 1
            self.touch(block)
        return held

    def by_age(self, which: Callable[[Row], bool]) -> list[int]:
        """Blocks that nobody holds, the one unused longest first."""
        found = [block for block, row in enumerate(self.rows) if which(row)
                 and (not row.holders or self.fault == "victim-in-use")]  # fmt: skip
        return sorted(found, key=lambda block: (self.rows[block].used, block), reverse=self.fault == "victim-used-last")

    def fill(self, block: int, name: int) -> None:
        """The block is found by its name from here on, unless another one is."""
        if name not in (row.name for row in self.rows):
            self.rows[block].name = name

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            if self.rows[block].holders < 1 and self.fault != "block-given-back-twice":
                raise SlotError(f"block={block} is held by nobody (LIFE-6)")
        for block in blocks[::-1]:
            row = self.rows[block]
            row.holders -= 1
            self.touch(block)
            if row.holders < 1 and (not row.name or self.policy == "ref_zero"):
                self.drop(block)

    def forget(self, block: int) -> None:
        """Drop what nobody holds."""
        if self.rows[block].holders:
            raise SlotError(f"block={block} is in use (SNAP-6)")
        if block in self.empty:
            raise SlotError(f"block={block} is free already (LIFE-6)")
        self.drop(block)

    def drop(self, block: int) -> None:
        """A block without name and state."""
        named = bool(self.rows[block].name)
        if self.fault != "name-outlives-its-block":
            self.rows[block].name = 0
        if self.fault != "state-outlives-its-block" and (named or self.fault != "place-of-an-unnamed-block-leaks"):
            self.invalidate(block)
        self.empty.append(block)

    def invalidate(self, block: int) -> None:
        """A block without a state."""
        row = self.rows[block]
        if row.place >= 0:
            self.spare.append(row.place)
        row.place = -1

    def allocate(self, blocks: Sequence[int]) -> list[int]:
        """Places for all of these blocks, or a CapacityError and no change."""
        new = [block for block in dict.fromkeys(blocks) if self.rows[block].place < 0]
        idle = self.idle(blocks)
        if len(new) > len(self.spare) + len(idle):
            if self.fault != "places-handed-out-in-part":
                raise CapacityError(f"{len(new)} places, {len(self.spare) + len(idle)} free or unheld (SNAP-6)")
            new = new[: len(self.spare) + len(idle)]
        taken = self.spare[max(len(self.spare) - len(new), 0) :]
        del self.spare[len(self.spare) - len(taken) :]
        named = self.fault == "victim-among-the-named"
        for block in idle[: len(new) - len(taken)]:
            taken.append(self.rows[block].place)
            self.rows[block].place = self.rows[block].place if named and block in blocks else -1
        for block, place in zip(new, taken, strict=True):
            self.rows[block].place = place
        return [self.rows[block].place for block in blocks]

    def idle(self, named: Sequence[int]) -> list[int]:
        """Blocks whose states may go."""
        blind = self.fault == "victim-among-the-named"
        return [block for block in self.by_age(lambda row: row.place >= 0) if blind or block not in named]

    def commit(self, blocks: Sequence[int]) -> list[int]:
        """A place for each block's state as far as there is room, -1 for the others."""
        wanted = [block for block in blocks if self.rows[block].name]
        new = [block for block in dict.fromkeys(wanted) if self.rows[block].place < 0]
        without = new[len(self.spare) + len(self.idle(wanted)) :]
        if without and self.fault == "full-cache-fails-the-request":
            raise CapacityError(f"no place for the states of {len(without)} blocks (SNAP-6)")
        kept = [block for block in wanted if block not in without]
        found = dict(zip(kept, self.allocate(kept), strict=True))
        return [found.get(block, -1) for block in blocks]

    def touch(self, block: int) -> None:
        self.clock += 1
        self.rows[block].used = self.clock


def check_least(name: str, value: object, least: int) -> None:
    """A whole number of at least this."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ShapeError(f"{name}={value!r}: a whole number of at least {least} (ERR-1)")


# ---------------------------------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """All that is known of a request."""

    text: list[int]
    prompt: int
    state: str = "waiting"
    at: int = 0
    slot: int = -1
    skipped: int = 0
    matched: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)


Edit = dict[str, Any]


class Engine:
    """Requests, slots and blocks of a program under way."""

    def __init__(self, rules: Rules, sizes: Mapping[str, Any], requests: Mapping[str, Sequence[int]]) -> None:
        self.rules, self.fault, self.sizes = rules, rules.fault, sizes
        self.book = {name: Entry(list(prompt), len(prompt)) for name, prompt in requests.items()}
        self.free = list(range(sizes["slots"]))
        self.shelf = Shelf(sizes.get("blocks", 0), sizes.get("places", 0), sizes.get("policy", "lru"), self.fault)
        self.size = sizes.get("block_size", 0)
        self.queue: list[Edit] = []
        self.late: list[Edit] = []
        self.stale: list[Edit] = []

    def step(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """One step: who comes, the rows and arrays, what is kept and rolled back, who leaves."""
        for name in given.get("resume", ()):
            self.allowed(name, "paused").state = "running"
        come = [self.come(word, one) for word in ("load", "admit") for one in given.get(word, ())]
        before, self.queue = self.queue, []
        decode, prefill = list(given.get("decode", ())), list(given.get("prefill", ()))
        if len({row["request"] for row in (*decode, *prefill)}) < len(decode) + len(prefill):
            raise SlotError("a request has two rows (STEP-2)")
        told = {"come": come, "before": before, **self.rows(given, decode, prefill)}
        after = self.keep(prefill, told["prefill"])
        after += self.advance(decode, prefill, max((len(row["tokens"]) for row in told["decode"]["rows"]), default=1))
        for name in given.get("save", ()):
            slot = self.allowed(name, "running", "paused").slot
            at, edit = self.book[name].at, {"op": "save", "slot": slot, "name": name}
            frees = self.leave(name, "away")
            after += [*frees, edit] if self.fault == "saved-when-it-is-free" else [edit, *frees]
            self.book[name].at = at
        for name in given.get("pause", ()):
            self.allowed(name, "running").state = "paused"
            if self.fault == "pause-gives-the-slot-away":
                self.free.append(self.book[name].slot)
                after.append({"op": "free", "slot": self.book[name].slot})
        for word, state in (("evict", "waiting"), ("finish", "finished")):
            for name in given.get(word, ()):
                self.allowed(name, "running", "paused")
                after += self.leave(name, state)
        return {**told, "after": after}

    def allowed(self, name: str, *states: str) -> Entry:
        """The request, in one of these states (LIFE-7)."""
        if name not in self.book or self.book[name].state not in states:
            raise SlotError(f"request {name!r} is not {' or '.join(states)} (LIFE-7)")
        return self.book[name]

    def come(self, word: str, one: Any) -> dict[str, Any]:
        """A request gets its slot, its blocks, and what fills the slot."""
        name, slot = (one, None) if isinstance(one, str) else (one["request"], one.get("slot"))
        request = self.allowed(name, "away" if word == "load" else "waiting")
        if not self.free or (slot is not None and slot not in self.free):
            raise CapacityError(f"no slot for {name!r} (LIFE-1)")
        states: list[int] = []
        if word == "admit" and self.size:
            names = self.rules.hash_blocks(request.text[: request.prompt], self.size)
            known = self.shelf.match(names)
            request.blocks, request.names, request.matched = self.shelf.acquire(names), names, len(known)
            states = [n + 1 for n, block in enumerate(known) if self.shelf.rows[block].place >= 0]
        request.slot = self.free[0] if slot is None else slot
        if self.fault != "second-owner-of-a-slot":
            self.free.remove(request.slot)
        request.state = "running"
        if word == "load":
            edits: list[Edit] = [{"op": "load", "slot": request.slot, "name": name}]
            edits += [{"op": "zero", "slot": request.slot}] if self.fault == "zeroed-behind-its-load" else []
        else:
            edits = self.begin(request, states)
        self.queue += edits
        return {"request": name, "slot": request.slot, "blocks": list(request.blocks)}

    def begin(self, request: Entry, states: Sequence[int]) -> list[Edit]:
        """Where an admitted request begins: behind a restored state, or at its first token in a zeroed slot."""
        zero = [{"op": "zero", "slot": request.slot}] if self.fault != "slot-not-zeroed" else []
        skip = self.rules.plan_skip(request.prompt, 0, request.matched, states, self.size,
                                    None, self.sizes.get("least_tokens", 1)) if self.size else 0  # fmt: skip
        if self.fault == "restart-keeps-its-position" and request.at:
            return zero
        request.at = request.skipped = skip
        if not skip:
            return zero
        block = request.blocks[skip // self.size - 1]
        if self.fault == "state-cut-back":
            block = request.blocks[min(state for state in states if state * self.size >= skip) - 1]
        place = self.shelf.rows[block].place
        if place < 0:
            return zero
        row = len([other for other in self.book.values() if other.state == "running"]) - 1
        slot = row if self.fault == "restore-into-the-row" else request.slot
        return [{"op": "restore", "slot": slot, "block": block, "place": place}]

    def rows(
        self, given: Mapping[str, Any], decode: list[dict[str, Any]], prefill: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Rows and arrays of both partitions."""
        pieces = [self.piece(row["request"], row["to"]) for row in prefill]
        tokens = [self.tokens(row) for row in decode]
        most = max(map(len, tokens), default=1)
        decoded = [self.row(row["request"], text + [0] * (most - len(text)))
                   for row, text in zip(decode, tokens, strict=True)]  # fmt: skip
        if self.fault == "piece-of-one-token-decoded":
            decoded += [piece for piece in pieces if len(piece["tokens"]) == 1]
            pieces = [piece for piece in pieces if len(piece["tokens"]) > 1]
        cu = [sum(len(piece["tokens"]) for piece in pieces[:n]) for n in range(len(pieces) + 1)]
        taken = self.worth(pieces)
        positions = [at + (0 if self.fault == "positions-within-the-piece" else cu[n]) for n, at, _ in taken]
        padding = 0 if self.fault == "padding-requests-on-slot-zero" else -1
        return {
            "decode": {"rows": decoded, "batch_indices": self.indices(decoded, given.get("decode_pad_to"), padding)},
            "prefill": {
                "rows": pieces, "cu_seqlens": cu, "intermediate_abs_positions": positions,
                "batch_indices_prefill": self.indices(pieces, given.get("prefill_pad_to"), padding),
                "intermediate_real_count": [len(taken)],
            },
        }  # fmt: skip

    def indices(self, rows: Sequence[dict[str, Any]], padded: int | None, padding: int) -> list[int]:
        """The slots of rows, then padding."""
        slots = [row["slot"] for row in rows]
        if self.fault == "rows-in-order-of-admission":
            slots.sort()
        return slots + [padding] * ((padded or 0) - len(slots))

    def row(self, name: str, tokens: list[int]) -> dict[str, Any]:
        return {"request": name, "slot": self.book[name].slot, "at": self.book[name].at, "tokens": tokens}

    def piece(self, name: str, to: int) -> dict[str, Any]:
        """A request's next tokens up to a position of its prompt."""
        request = self.running(name)
        if self.fault == "prompt-begins-anew-with-each-piece":
            request.at = request.skipped
        if request.at and self.size and request.at != request.skipped:
            request.at += self.rules.plan_skip(request.prompt, request.at, request.matched, (), self.size, to)
        if not request.at <= to <= request.prompt or (to == request.at and self.fault is None):
            raise PackingError(f"{name!r} has no piece {request.at}..{to} (CONT-1)")
        return self.row(name, request.text[request.at : to])

    def running(self, name: str) -> Entry:
        """A request that may have a row."""
        if self.fault == "paused-request-run":
            return self.allowed(name, "running", "paused")
        return self.allowed(name, "running")

    def tokens(self, row: Mapping[str, Any]) -> list[int]:
        """A decode row: the newest token and its drafts."""
        request, drafts = self.running(row["request"]), list(row.get("drafts", ()))
        if request.at < request.prompt:
            raise SlotError(f"{row['request']!r} is in its prompt (CONT-4)")
        if len(drafts) > self.sizes.get("max_drafts", 0):
            raise UnsupportedError(f"{len(drafts)} drafts (SPEC-1)")
        return [request.text[request.at], *drafts]

    def worth(self, pieces: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
        """Snapshots of a step, as far as the buffers go: row, offset in its piece, block."""
        found = []
        for n, piece in enumerate(pieces):
            request = self.book[piece["request"]]
            for at, block in self.planned(request, piece)["snapshots"] if request.blocks and piece["tokens"] else ():
                found.append((n, at, request.blocks[block]))
        room = None if self.fault == "snapshots-past-the-buffer" else self.sizes.get("snapshots")
        return found[:room]

    def planned(self, request: Entry, piece: Mapping[str, Any]) -> dict[str, Any]:
        """What is worth keeping of a piece."""
        return self.rules.plan_snapshots(request.prompt, piece["at"], len(piece["tokens"]), 0, request.matched,
                                         self.size, self.sizes.get("alignment", 1))  # fmt: skip

    def keep(self, prefill: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> list[Edit]:
        """Blocks that are complete get their names, and states are kept under them; late ones of the step before."""
        sources: list[Edit] = []
        for row in told["rows"]:
            request, end = self.book[row["request"]], row["at"] + len(row["tokens"])
            for n, block in enumerate(request.blocks):
                if row["at"] < (n + 1) * self.size <= end:
                    self.shelf.fill(block, request.names[n])
        for i, (_, _, block) in enumerate(self.worth(told["rows"])):
            sources.append({"from": i, "block": block})
        for row in told["rows"]:
            request = self.book[row["request"]]
            end = self.planned(request, row)["end"] if request.blocks and row["tokens"] else -1
            if end >= 0:
                sources.append({"slot": request.slot, "block": request.blocks[end]})
        if self.fault == "snapshots-of-the-step-before" and told["rows"]:
            now = [source for source in sources if "from" in source]
            sources = [*self.stale, *(source for source in sources if "slot" in source)]
            self.stale = now
        places = self.shelf.commit([source["block"] for source in sources])
        edits = [{"op": "commit", **source, **({"place": place} if place >= 0 else {"kept": False})}
                 for source, place in zip(sources, places, strict=True)]  # fmt: skip
        if self.fault == "commit-after-the-request-moved-on":
            edits, self.late = [*self.late, *(e for e in edits if "from" in e)], [e for e in edits if "slot" in e]
        if self.fault == "commit-behind-the-end":
            edits, self.late = [e for e in edits if "from" in e], [e for e in edits if "slot" in e]
        return edits

    def advance(
        self, decode: Sequence[Mapping[str, Any]], prefill: Sequence[Mapping[str, Any]], most: int
    ) -> list[Edit]:
        """What the model chose enters the texts; drafts that do not stand are rolled back."""
        edits: list[Edit] = []
        for row in decode:
            request, accepted = self.book[row["request"]], len(row["chosen"]) - 1
            entry = min(accepted + (self.fault == "rollback-one-too-far"), most - 1)
            none = self.fault == "nothing-rolled-back-without-drafts" and not row.get("drafts")
            if most > 1 and not none:
                only = {"only": "state"} if self.fault == "rollback-state-only" else {}
                edits.append({"op": "rollback", "slot": request.slot, "entry": entry, **only})
            new = list(row["chosen"])
            if self.fault == "rejected-drafts-stay":
                new = [*row.get("drafts", ()), new[-1]][: len(new) + 1]
            request.text += new
            request.at += len(row["chosen"])
        for row in prefill:
            request = self.book[row["request"]]
            request.at = row["to"]
            request.text += row.get("chosen", ())
        return edits

    def leave(self, name: str, state: str) -> list[Edit]:
        """A request gives back its slot and its blocks."""
        request = self.book[name]
        self.queue = [edit for edit in self.queue if edit["slot"] != request.slot]
        edits: list[Edit] = [{"op": "free", "slot": request.slot}]
        if self.fault == "slot-leaked-at-eviction" and state == "waiting":
            edits = []
        if self.fault == "slot-freed-twice" and request.state == "paused":
            edits *= 2
        self.free = sorted([*self.free, *(edit["slot"] for edit in edits)])
        if self.fault == "second-owner-of-a-slot":
            self.free = sorted(set(self.free))
        if self.fault == "commit-behind-the-end":
            edits += [edit for edit in self.late if edit["slot"] == request.slot]
        if self.fault != "blocks-held-for-ever":
            self.shelf.release(request.blocks)
        if state == "waiting":
            request.prompt = len(request.text)
        keeps = self.fault == "restart-keeps-its-position"
        request.at, request.skipped, request.matched = request.at if keeps else 0, 0, 0
        request.slot, request.blocks, request.state = -1, [], state
        return edits

    def end(self) -> dict[str, Any]:
        """What is free, held and kept."""
        held = [[block, row.holders] for block, row in enumerate(self.shelf.rows) if row.holders]
        return {"free_slots": self.free, "free_blocks": sorted(self.shelf.empty), "held": held,
                "free_places": sorted(self.shelf.spare), "kept": self.shelf.kept()}  # fmt: skip
