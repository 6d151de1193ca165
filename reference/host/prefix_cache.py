"""States kept under prompt blocks: what is recorded, where it is kept, what a later request may skip with it (SNAP).

    prompt      | block 0 | block 1 | block 2 | rest
    attention   |  known  |  known  |  known  |          any of them may be left out
    states                1                   3          a state stands for the one position it was taken at
    skipped     -------------------------------          only up to a position whose state is restored

An attention cache can be cut anywhere, a state cannot: it is a value at one position. So the blocks that match say
where one might start, and the states that are kept say where one can.
Source: https://github.com/NVIDIA/Megatron-LM (core/inference/contexts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statescan.reference.host.blocks import Blocks, BlockTable, check_count
from statescan.reference.host.slots import SlotPool
from statescan.spec.contract import CapacityError, PackingError, UnsupportedError

Event = Sequence[Any]


def plan_skip(
    prompt_tokens: int, finished: int, matched: int, states: Sequence[int], block_size: int,
    limit: int | None = None, least_tokens: int | None = None, *, check: bool | None = None,
) -> int:  # fmt: skip
    """Tokens of a prompt that need not be computed, because the state behind them is restored (SNAP-1, SNAP-2).

    `finished` tokens are behind the request, `matched` blocks from the first on are known, `states` says behind how
    many blocks a state is kept. `limit` is where the first piece ends at most (the prompt's end where None), and
    `least_tokens` (1) are left to compute, because the last token's output is needed. A later piece skips nothing.
    Raises ShapeError.

    >>> plan_skip(768, 0, 3, [1, 2, 3], 256), plan_skip(768, 0, 3, [1, 3], 256), plan_skip(1024, 512, 4, [3], 256)
    (512, 256, 0)
    """
    least = 1 if least_tokens is None else least_tokens
    for name, value, low in (("prompt_tokens", prompt_tokens, 0), ("finished", finished, 0), ("matched", matched, 0),
                             ("block_size", block_size, 1), ("least_tokens", least, 1)):  # fmt: skip
        check_count(name, value, low)
    if finished:
        return 0
    end = prompt_tokens if limit is None else min(limit, prompt_tokens)
    served = [n * block_size for n in states if 0 < n <= matched and n * block_size <= end - least]
    return max(served, default=0)


def plan_snapshots(
    prompt_tokens: int, finished: int, piece: int, skip: int, matched: int, block_size: int, alignment: int,
    *, check: bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The positions of a piece whose states are kept, and the block that each one ends (SNAP-9, SNAP-5).

    A piece of `piece` tokens behind `finished` ones, of which the first `skip` are not computed. Kept are the ends of
    the last block that matched, of the prompt's last whole block and of the piece's last whole block, where they lie
    inside the piece and on the grid of `alignment` tokens that starts with it (the chunks of a kernel that can leave
    states nowhere else, or 1). `end` is the block that ends with the prompt, -1 where none does: its state is the one
    in the slot. Raises PackingError for a piece that passes the prompt or is skipped altogether, ShapeError.

    >>> plan_snapshots(800, 0, 800, 256, 2, 256, 128)
    {'snapshots': [[256, 1], [512, 2]], 'end': -1}
    """
    check_count("block_size", block_size, 1)
    check_count("alignment", alignment, 1)
    end, start = finished + piece, finished + skip
    if not 0 <= finished <= start < end <= prompt_tokens:
        raise PackingError(f"piece {finished}..{end}, {skip} skipped, of a prompt of {prompt_tokens} tokens (SNAP-9)")
    ends = {matched, prompt_tokens // block_size, -(-end // block_size) - 1}
    offsets = sorted(n * block_size - start for n in ends)
    kept = [[offset, (start + offset) // block_size - 1] for offset in offsets
            if 0 < offset < end - start and offset % alignment == 0]  # fmt: skip
    whole = end == prompt_tokens and prompt_tokens % block_size == 0
    return {"snapshots": kept, "end": prompt_tokens // block_size - 1 if whole else -1}


class StateCache:
    """`places` states, each kept under a block; the block is what is matched, restored and forgotten (SNAP-8).

    >>> table = BlockTable(3)
    >>> cache = StateCache(1, table)
    >>> held = table.acquire([11, 12])
    >>> table.fill(0, 11), table.fill(1, 12), cache.commit([0, 1])
    (None, None, [0, -1])
    >>> cache.states(table.match([11, 12])), cache.restore(0), cache.restore(1)
    ([1], 0, -1)
    """

    def __init__(self, places: int, table: Blocks) -> None:
        check_count("places", places, 0)
        self.table, self.pool = table, SlotPool(places)
        self._place: dict[int, int] = {}
        table.on_forget.append(self.invalidate)

    @property
    def places(self) -> dict[int, int]:
        """The place of every block that has a state, by block."""
        return dict(sorted(self._place.items()))

    def allocate(self, blocks: Sequence[int]) -> list[int]:
        """A place for each block, those it has already reused; all or none (SNAP-6).

        Room is made by dropping states of blocks that nobody holds and that are not named here, the one unused longest
        first. Raises CapacityError.
        """
        new = [block for block in dict.fromkeys(blocks) if block not in self._place]
        free, idle = len(self.pool.free), self._idle(blocks)
        if len(new) > free + len(idle):
            raise CapacityError(f"{len(new)} places asked of {self.pool.slots}, {free + len(idle)} free or unheld "
                                "(SNAP-6)")  # fmt: skip
        taken = self.pool.allocate_many(min(len(new), free))
        for block in idle[: len(new) - len(taken)]:
            taken.append(self._place.pop(block))
        self._place |= dict(zip(new, taken, strict=True))
        return [self._place[block] for block in blocks]

    def commit(self, blocks: Sequence[int]) -> list[int]:
        """The place that each block's state goes to, -1 where it is not kept (SNAP-4, SNAP-7).

        A block without a name is never found, so nothing is kept under it; of the others the first ones for which there
        is room are kept.
        """
        wanted = [block for block in blocks if self.table.name(block) is not None]
        new = [block for block in dict.fromkeys(wanted) if block not in self._place]
        room = len(self.pool.free) + len(self._idle(wanted))
        kept = [block for block in wanted if block not in new[room:]]
        places = dict(zip(kept, self.allocate(kept), strict=True))
        return [places.get(block, -1) for block in blocks]

    def states(self, blocks: Sequence[int]) -> list[int]:
        """Behind how many of a prompt's blocks a state is kept."""
        return [n for n, block in enumerate(blocks, start=1) if block in self._place]

    def restore(self, block: int) -> int:
        """The place of a block's state, -1 where there is none."""
        return self._place.get(block, -1)

    def invalidate(self, block: int) -> None:
        """Forget a block's state, if it has one; its place is free."""
        place = self._place.pop(block, None)
        if place is not None:
            self.pool.release(place)

    def _idle(self, named: Sequence[int]) -> list[int]:
        """Blocks whose states may be dropped, the one unused longest first."""
        idle = [block for block in self._place if block not in named and not self.table.references(block)]
        return sorted(idle, key=lambda block: (self.table.last_used(block), block))


def run_state_cache(
    blocks: int, places: int, events: Sequence[Event], policy: str | None = None, *, check: bool | None = None
) -> list[Any]:
    """A block table and a state cache in one call: what each event gives, then what is free and kept (SNAP-6, 7, 8).

    Events: ("acquire", names) gives blocks, ("fill", block, name), ("release", blocks), ("allocate", blocks) and
    ("commit", blocks) give places, ("match", names) gives the blocks and behind how many of them there is a state,
    ("restore", block) gives a place or -1, ("invalidate", block), ("forget", block). Last comes the list of free places
    and the pairs (block, place). Raises as the two classes do, UnsupportedError for another word.

    >>> run_state_cache(2, 1, [("acquire", [11]), ("fill", 0, 11), ("commit", [0]), ("match", [11])])
    [[0], [0], [[0], [1]], [[], [[0, 0]]]]
    """
    table = BlockTable(blocks, "lru" if policy is None else policy)
    cache = StateCache(places, table)
    log: list[Any] = []
    for word, *given in events:
        if word in ("acquire", "allocate", "commit", "restore"):
            log.append(getattr(table if word == "acquire" else cache, word)(*given))
        elif word == "match":
            found = table.match(*given)
            log.append([found, cache.states(found)])
        elif word in ("fill", "release", "forget", "invalidate"):
            getattr(cache if word == "invalidate" else table, word)(*given)
        else:
            raise UnsupportedError(f"{word!r}: acquire, fill, release, allocate, commit, match, restore, invalidate "
                                   "or forget (ERR-5)")  # fmt: skip
    return [*log, [list(cache.pool.free), [list(pair) for pair in cache.places.items()]]]
