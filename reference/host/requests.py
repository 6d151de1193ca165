"""The life of requests between admission and end: slots, pieces, drafts, pauses, prefixes, the arrays of each step.

                     piece             last piece
    waiting --admit--> prompt --plan--> ... --plan--> decode --plan--> ... --finish--> finished
       ^                  |  pause / resume: slot and state stay        |
       +------evict-------+---------------------------------------------+

A step has two halves: `plan` says which edits come first and what the hooks are given, `close` takes what the model
chose and says which edits follow. In between nothing of the book changes: rows, slots and blocks of a step stand until
its snapshots are kept and its drafts rolled back (SNAP-4). A request that has no row in a step is hidden: it keeps its
slot, and no array names it.
Source: https://github.com/NVIDIA/Megatron-LM (core/inference/contexts, core/inference/engines).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statescan.reference.host.blocks import BlockTable, check_count, hash_blocks
from statescan.reference.host.drafts import count_agreeing
from statescan.reference.host.metadata import PREFILL_NAMES, decode_metadata, prefill_metadata
from statescan.reference.host.prefix_cache import StateCache, plan_skip, plan_snapshots
from statescan.reference.host.slots import SlotPool
from statescan.spec.contract import CapacityError, PackingError, ShapeError, SlotError, UnsupportedError

Edit = dict[str, Any]
"""One engine edit, a word and its places: zero, restore, load before the hooks; commit, rollback, save, free after."""

MOVES: dict[str, tuple[str, ...]] = {
    "admit": ("waiting",), "resume": ("paused",), "pause": ("running",), "run": ("running",),
    "evict": ("running", "paused"), "finish": ("running", "paused"), "save": ("running", "paused"), "load": ("away",),
}  # fmt: skip
"""The states from which each move starts (LIFE-7)."""


class Sizes(NamedTuple):
    """Sizes of an engine that stay. `snapshots` are the rows of the prefill hook's buffers, unbounded where None.

    `block_size` 0 means that no prefix is kept; `places` are the states that the cache has room for. `alignment` is the
    grid of positions on which the hook can leave snapshots, counted from the start of a piece.
    """

    slots: int
    max_drafts: int = 0
    snapshots: int | None = None
    chunk_size: int = 64
    d_conv: int = 4
    block_size: int = 0
    blocks: int = 0
    places: int = 0
    policy: str = "lru"
    alignment: int = 1
    least_tokens: int = 1
    num_householder: int = 1


@dataclass
class Request:
    """One request: the tokens known of it, how many of them its state has seen, where it is."""

    name: str
    tokens: list[int]
    prompt: int
    state: str = "waiting"
    done: int = 0
    slot: int | None = None
    matched: int = 0
    skipped: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)


@dataclass
class Row:
    """A request's tokens in a step: those before it, what the hook is given, how many of it are drafts."""

    request: Request
    at: int
    tokens: list[int]
    drafts: int = 0


@dataclass
class Step:
    """A step under way: edits before it, rows of both partitions, their arrays, and what is to be kept of it."""

    before: list[Edit]
    decode: list[Row]
    prefill: list[Row]
    batch_indices_decode: Any
    arrays: dict[str, Any]
    snapshots: list[tuple[int, int, int]]
    """Row, offset in its piece, block."""
    ends: list[tuple[int, int]]
    """Row, block."""
    tokens_a_row: int = 1
    after: list[Edit] = field(default_factory=list)


class Book:
    """All requests of an engine, and what belongs to each; every wrong move is refused before anything changes.

    Raises SlotError for a move that a request's state does not allow (LIFE-7) and for what has no slot, CapacityError
    where there is no room (LIFE-1), PackingError for a piece that is none, UnsupportedError for drafts.

    >>> book = Book(Sizes(slots=2, chunk_size=2))
    >>> book.add("A", [1, 2, 3])
    >>> book.admit("A")
    >>> step = book.plan(prefill={"A": 2})
    >>> step.before, step.arrays["cu_seqlens"].tolist()
    ([{'op': 'zero', 'slot': 1}], [0, 2])
    >>> book.close({})
    []
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.pool = SlotPool(sizes.slots)
        self.requests: dict[str, Request] = {}
        self.table = BlockTable(sizes.blocks, sizes.policy)
        self.cache = StateCache(sizes.places, self.table)
        self.step: Step | None = None
        self._before: list[Edit] = []

    # Between steps ----------------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: Sequence[int]) -> None:
        """A new request waits, with its prompt."""
        if name in self.requests:
            raise SlotError(f"request {name!r} is there already: a name is used once (LIFE-7)")
        if not prompt:
            raise PackingError(f"request {name!r} has no tokens: a prompt has at least 1 (META-1)")
        self.requests[name] = Request(name, list(prompt), len(prompt))

    def admit(self, name: str, slot: int | None = None) -> None:
        """Give a waiting request a slot, blocks and the longest prefix that can be restored (LIFE-1, SNAP-2).

        Its slot is zeroed or restored before the hooks of the next step, and before anything can be dropped: blocks
        that are held keep their states.
        """
        request = self._check(name, "admit")
        self._check_free(slot)
        if self.sizes.block_size:
            names = hash_blocks(request.tokens[: request.prompt], self.sizes.block_size)
            matched = len(self.table.match(names))
            request.blocks = self.table.acquire(names)
            request.names, request.matched = names, matched
        request.slot = self.pool.allocate() if slot is None else self.pool.take(slot)
        request.state = "running"
        states = self.cache.states(request.blocks[: request.matched])
        request.skipped = request.done = 0
        if states:
            request.skipped = request.done = plan_skip(
                request.prompt, 0, request.matched, states, self.sizes.block_size, None, self.sizes.least_tokens
            )
        edit: Edit = {"op": "zero", "slot": request.slot}
        if request.done:
            block = request.blocks[request.done // self.sizes.block_size - 1]
            edit = {"op": "restore", "slot": request.slot, "block": block, "place": self.cache.restore(block)}
        self._before.append(edit)

    def pause(self, name: str) -> None:
        """A running request waits with its slot, its state and its blocks (LIFE-3)."""
        self._check(name, "pause").state = "paused"

    def resume(self, name: str) -> None:
        """A paused request goes on where it was (LIFE-3)."""
        self._check(name, "resume").state = "running"

    def evict(self, name: str) -> Edit:
        """Take a request's slot; it waits again, with all tokens known so far as its prompt (LIFE-3)."""
        request = self._check(name, "evict")
        request.prompt = len(request.tokens)
        return self._leave(request, "waiting")

    def finish(self, name: str) -> Edit:
        """A request ends and gives back slot and blocks, once (LIFE-3, LIFE-6)."""
        return self._leave(self._check(name, "finish"), "finished")

    def save(self, name: str) -> list[Edit]:
        """Off-load a request: all per-slot arrays are saved under its name, its slot is free (LIFE-4)."""
        request = self._check(name, "save")
        if any(edit["slot"] == request.slot for edit in self._before):
            raise SlotError(f"request {name!r}: slot {request.slot} is not zeroed or restored before the next step: "
                            "no save until then (LIFE-2)")  # fmt: skip
        done = request.done
        edits = [{"op": "save", "slot": request.slot, "name": name}, self._leave(request, "away")]
        request.done = done
        return edits

    def load(self, name: str, slot: int | None = None) -> None:
        """Bring an off-loaded request back, into any slot (LIFE-4)."""
        request = self._check(name, "load")
        self._check_free(slot)
        request.slot = self.pool.allocate() if slot is None else self.pool.take(slot)
        request.state = "running"
        self._before.append({"op": "load", "slot": request.slot, "name": name})

    # A step -----------------------------------------------------------------------------------------------------------

    def plan(
        self, decode: Mapping[str, Sequence[int]] | None = None, prefill: Mapping[str, int] | None = None, *,
        decode_pad_to: int | None = None, prefill_pad_to: int | None = None, token_pad_to: int | None = None,
    ) -> Step:  # fmt: skip
        """Open a step: `decode` has the drafts of each request, `prefill` the length of its piece, in batch order.

        Padded sizes are those of a captured graph, the real ones where None. Rows with fewer drafts than another carry
        placeholders 0 and are rolled back with the rest (SPEC-6).
        """
        if self.step is not None:
            raise SlotError("a step is open: it is closed before the next one is planned (LIFE-7)")
        decode, prefill = dict(decode or {}), dict(prefill or {})
        for name in decode.keys() & prefill.keys():
            raise SlotError(f"request {name!r} has a row in both partitions (STEP-2)")
        rows = [self._decode_row(name, drafts) for name, drafts in decode.items()]
        pieces = [self._piece(name, length) for name, length in prefill.items()]
        most = 1 + max((row.drafts for row in rows), default=0)
        for row in rows:
            row.tokens += [0] * (most - len(row.tokens))
        snapshots, ends = self._recorded(pieces)
        slots = decode_metadata([row.request.slot for row in rows],
                                len(rows) if decode_pad_to is None else decode_pad_to)  # fmt: skip
        arrays = prefill_metadata(
            [len(row.tokens) for row in pieces], [row.request.slot for row in pieces],
            [row for row, _, _ in snapshots], [offset for _, offset, _ in snapshots],
            len(pieces) if prefill_pad_to is None else prefill_pad_to,
            sum(len(row.tokens) for row in pieces) if token_pad_to is None else token_pad_to,
            self.sizes.chunk_size, sum(len(row.tokens) for row in rows), self.sizes.snapshots, self.sizes.d_conv,
            self.sizes.num_householder,
        )  # fmt: skip
        before, self._before = self._before, []
        self.step = Step(before, rows, pieces, slots, dict(zip(PREFILL_NAMES, arrays, strict=True)), snapshots, ends,
                         most)  # fmt: skip
        return self.step

    def close(self, chosen: Mapping[str, Sequence[int]]) -> list[Edit]:
        """Close the step with the tokens that each row gave: accepted drafts, then the next one (SPEC-8).

        A piece that ends a prompt gives one, another piece none. States are kept first, then drafts rolled back: both
        while the rows and slots are those of the step.
        """
        if self.step is None:
            raise SlotError("no step is open (LIFE-7)")
        step = self.step
        for row in step.decode:
            self._check_chosen(row, chosen.get(row.request.name, ()))
        for row in step.prefill:
            given, wanted = chosen.get(row.request.name, ()), int(row.at + len(row.tokens) == row.request.prompt)
            if len(given) != wanted:
                raise ShapeError(f"chosen[{row.request.name!r}] has {len(given)} tokens: {wanted} behind this piece "
                                 "(SPEC-5)")  # fmt: skip
        for name in chosen.keys() - {row.request.name for row in (*step.decode, *step.prefill)}:
            raise ShapeError(f"chosen[{name!r}]: it has no row in this step (LIFE-7)")
        step.after = self._keep(step)
        for row in step.decode:
            given = chosen[row.request.name]
            if step.tokens_a_row > 1:
                step.after.append({"op": "rollback", "slot": row.request.slot, "entry": len(given) - 1})
            row.request.done += len(given)
            row.request.tokens += given
        for row in step.prefill:
            row.request.done += len(row.tokens)
            row.request.tokens += chosen.get(row.request.name, ())
        self.step = None
        return step.after

    # What a step is made of -------------------------------------------------------------------------------------------

    def _decode_row(self, name: str, drafts: Sequence[int]) -> Row:
        request = self._check(name, "run")
        if request.done < request.prompt:
            raise SlotError(f"request {name!r} is at {request.done} of a prompt of {request.prompt} tokens: "
                            "the rest of it is prefill (CONT-4)")  # fmt: skip
        if len(drafts) > self.sizes.max_drafts:
            raise UnsupportedError(f"request {name!r} has {len(drafts)} drafts and the buffers {self.sizes.max_drafts} "
                                   "(SPEC-1)")  # fmt: skip
        return Row(request, request.done, [request.tokens[request.done], *drafts], len(drafts))

    def _piece(self, name: str, length: int) -> Row:
        request = self._check(name, "run")
        check_count(f"the piece of {name!r}", length, 1)
        if request.done + length > request.prompt:
            raise PackingError(f"request {name!r} is at {request.done} of a prompt of {request.prompt} tokens: "
                               f"a piece of {length} passes it (CONT-1)")  # fmt: skip
        return Row(request, request.done, request.tokens[request.done : request.done + length])

    def _recorded(self, pieces: Sequence[Row]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """What is kept of each piece, as far as buffers go: (row, offset, block), and (row, block) of ends."""
        found: list[tuple[int, int, int]] = []
        ends: list[tuple[int, int]] = []
        for n, row in enumerate(pieces):
            request = row.request
            if not request.blocks:
                continue
            first = row.at == request.skipped
            made = plan_snapshots(request.prompt, 0 if first else row.at, len(row.tokens) + (row.at if first else 0),
                                  row.at if first else 0, request.matched, self.sizes.block_size,
                                  self.sizes.alignment)  # fmt: skip
            found += [(n, offset, request.blocks[block]) for offset, block in made["snapshots"]]
            if made["end"] >= 0:
                ends.append((n, request.blocks[made["end"]]))
        return found[: self.sizes.snapshots], ends

    def _keep(self, step: Step) -> list[Edit]:
        """Blocks whose tokens are all computed get their names; then the states of the step are kept under them."""
        for row in step.prefill:
            request = row.request
            for n in range(len(request.blocks)):
                if row.at < (n + 1) * self.sizes.block_size <= row.at + len(row.tokens):
                    self.table.fill(request.blocks[n], request.names[n])
        sources = [{"from": i, "block": block} for i, (_, _, block) in enumerate(step.snapshots)]
        sources += [{"slot": self._slot(step.prefill[n].request), "block": block} for n, block in step.ends]
        places = self.cache.commit([source["block"] for source in sources])
        return [{"op": "commit", **source, **({"place": place} if place >= 0 else {"kept": False})}
                for source, place in zip(sources, places, strict=True)]  # fmt: skip

    def _leave(self, request: Request, state: str) -> Edit:
        """Give back slot and blocks; an edit that waited for the slot is no longer needed."""
        slot = self._slot(request)
        self.pool.release(slot)
        self.table.release(request.blocks)
        self._before = [edit for edit in self._before if edit["slot"] != slot]
        request.slot, request.blocks, request.state = None, [], state
        request.done = request.matched = request.skipped = 0
        return {"op": "free", "slot": slot}

    # Rules ------------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Request:
        """The request of this name (LIFE-7)."""
        if name not in self.requests:
            raise SlotError(f"request {name!r} is unknown (LIFE-7)")
        return self.requests[name]

    def _check(self, name: str, move: str) -> Request:
        """The request, if its state allows the move (LIFE-7)."""
        request = self.find(name)
        if self.step is not None:
            raise SlotError(f"request {name!r}: no {move} while a step is open (LIFE-7)")
        if request.state not in MOVES[move]:
            raise SlotError(f"request {name!r} is {request.state}: {move} needs {' or '.join(MOVES[move])} (LIFE-7)")
        return request

    def _check_free(self, slot: int | None) -> None:
        """There is a slot, or this one is free (LIFE-1)."""
        if slot is not None and self.pool.is_taken(slot):
            raise CapacityError(f"slot={slot} is taken by another request (LIFE-1)")
        if not self.pool.free:
            raise CapacityError(f"count=1 slots asked of {self.sizes.slots}, 0 free (LIFE-1)")

    @staticmethod
    def _slot(request: Request) -> int:
        assert request.slot is not None
        return request.slot

    @staticmethod
    def _check_chosen(row: Row, chosen: Sequence[int]) -> None:
        """A decode row gives as many drafts as agree from the first on, and the token behind them (SPEC-8)."""
        drafts = row.tokens[1 : 1 + row.drafts]
        accepted = len(chosen) - 1
        if not 0 <= accepted <= row.drafts or count_agreeing(drafts[:accepted], list(chosen)) < accepted:
            raise UnsupportedError(f"chosen[{row.request.name!r}]={list(chosen)} behind drafts {drafts}: "
                                   "those that stand, and one more (SPEC-8)")  # fmt: skip


def run_program(
    sizes: Mapping[str, Any], requests: Mapping[str, Sequence[int]], program: Sequence[Mapping[str, Any]],
    *, check: bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A whole program: what each step gives the hooks and edits before and after them, and what is left at its end.

    `sizes` are those of `Sizes`, `requests` the prompts. A program step may have, in the order in which they are done:
    resume, load, admit (names, or {"request", "slot"}); decode ([{"request", "drafts", "chosen"}]), prefill
    ([{"request", "to", "chosen"}], `to` being where the piece ends) and the padded sizes decode_pad_to, prefill_pad_to,
    token_pad_to; then save, pause, evict, finish (names). Raises as `Book` does, UnsupportedError for another word.

    >>> done = run_program({"slots": 1, "chunk_size": 2}, {"A": [7]}, [
    ...     {"admit": ["A"], "prefill": [{"request": "A", "to": 1, "chosen": [8]}], "finish": ["A"]}])
    >>> done["steps"][0]["after"], done["end"]["free_slots"]
    ([{'op': 'free', 'slot': 0}], [0])
    """
    unknown = [name for name in sizes if name not in Sizes._fields]
    if unknown:
        raise UnsupportedError(f"sizes name {unknown[0]!r}: one of {', '.join(Sizes._fields)} (ERR-5)")
    book = Book(Sizes(**sizes))
    for name, prompt in requests.items():
        book.add(name, prompt)
    return {"steps": [run_step(book, step) for step in program], "end": describe_end(book)}


WORDS = ("resume", "load", "admit", "decode", "prefill", "decode_pad_to", "prefill_pad_to", "token_pad_to", "save",
         "pause", "evict", "finish")  # fmt: skip


def run_step(book: Book, given: Mapping[str, Any]) -> dict[str, Any]:
    """One step of a program on a book; the step as numbers."""
    for word in given:
        if word not in WORDS:
            raise UnsupportedError(f"a program step has {word!r}: one of {', '.join(WORDS)} (ERR-5)")
    for name in given.get("resume", ()):
        book.resume(name)
    come = []
    for word, move in (("load", book.load), ("admit", book.admit)):
        for one in given.get(word, ()):
            name, slot = (one, None) if isinstance(one, str) else (one["request"], one.get("slot"))
            move(name, slot)
            request = book.requests[name]
            come.append({"request": name, "slot": request.slot, "blocks": list(request.blocks)})
    for partition in ("decode", "prefill"):
        names = [row["request"] for row in given.get(partition, ())]
        for n, name in enumerate(names):
            if name in names[:n]:
                raise SlotError(f"{partition}[{n}]: request {name!r} has a row already (STEP-2)")
    step = book.plan({row["request"]: row.get("drafts", ()) for row in given.get("decode", ())},
                     {row["request"]: row["to"] - book.find(row["request"]).done for row in given.get("prefill", ())},
                     **{word: given[word] for word in WORDS if word in given and word.endswith("_pad_to")})  # fmt: skip
    told = describe_step(step)
    rows = [*given.get("decode", ()), *given.get("prefill", ())]
    after = book.close({row["request"]: row["chosen"] for row in rows if "chosen" in row})
    for name in given.get("save", ()):
        after = after + book.save(name)
    for name in given.get("pause", ()):
        book.pause(name)
    for word, leave in (("evict", book.evict), ("finish", book.finish)):
        after = after + [leave(name) for name in given.get(word, ())]
    return {"come": come, **told, "after": after}


def describe_step(step: Step) -> dict[str, Any]:
    """What a planned step gives the hooks, as numbers."""
    def rows(partition: Sequence[Row]) -> list[dict[str, Any]]:
        return [{"request": row.request.name, "slot": row.request.slot, "at": row.at, "tokens": list(row.tokens)}
                for row in partition]  # fmt: skip

    read = ("cu_seqlens", "batch_indices_prefill", "intermediate_abs_positions", "intermediate_real_count")
    return {
        "before": list(step.before),
        "decode": {"rows": rows(step.decode), "batch_indices": step.batch_indices_decode.tolist()},
        "prefill": {"rows": rows(step.prefill), **{name: step.arrays[name].tolist() for name in read}},
    }  # fmt: skip


def describe_end(book: Book) -> dict[str, Any]:
    """What is free, held and kept, and where each request is."""
    return {
        "free_slots": list(book.pool.free), "free_blocks": sorted(book.table.free),
        "held": [list(pair) for pair in book.table.held().items()], "free_places": sorted(book.cache.pool.free),
        "kept": [list(pair) for pair in book.cache.places.items()],
        "requests": {name: [r.state, r.done] for name, r in book.requests.items()},
    }  # fmt: skip
