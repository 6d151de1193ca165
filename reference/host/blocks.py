"""Names of prompt blocks, and the table of blocks that stands in for an attention cache (SNAP).

A prompt is cut into blocks of `block_size` tokens; a whole block is named by its tokens and everything before them, so
that equal names mean equal prefixes. The table knows who holds a block and under which name it can be found; the state
cache asks it through `Blocks`, which is all that a real attention cache has to offer in its place.
Source: https://github.com/NVIDIA/Megatron-LM (core/inference), names chained by SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from statescan.spec.contract import CapacityError, ShapeError, SlotError, UnsupportedError

POLICIES = ("lru", "ref_zero")
"""What becomes of a named block that nobody holds: kept until its room is needed, or forgotten at once."""


def hash_blocks(
    tokens: Sequence[int], block_size: int, salt: str | None = None, *, check: bool | None = None
) -> list[int]:
    """The name of every whole block, a number from 1 to 2^63 - 1 (SNAP-8).

    Block i is SHA-256 over the digest of block i - 1 and its tokens as int64, little endian; of the digest the first
    8 bytes count. `salt` sets apart what equal tokens do not say: an image behind a placeholder, an adapter.
    Raises ShapeError for a block size below 1.

    >>> first, second = hash_blocks([1, 2, 1, 2, 9], 2)
    >>> first == hash_blocks([1, 2], 2)[0], first == second, hash_blocks([1], 2)
    (True, False, [])
    """
    check_count("block_size", block_size, 1)
    digest = bytes(32) if salt is None else hashlib.sha256(b"megatron-prefix-cache-salt-v1\0" + salt.encode()).digest()
    names = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = b"".join(int(t).to_bytes(8, "little", signed=True) for t in tokens[start : start + block_size])
        digest = hashlib.sha256(digest + content).digest()
        names.append(int.from_bytes(digest[:8], "little") % (2**63 - 1) + 1)
    return names


class Blocks(Protocol):
    """What a state cache asks of an attention cache: the hooks for a real one.

    Whoever forgets a block also calls every function in `on_forget` with its number, before the number is used again.
    """

    on_forget: list[Callable[[int], None]]

    def references(self, block: int) -> int:
        """How many requests hold the block."""

    def name(self, block: int) -> int | None:
        """The name under which the block is found, None where it has none."""

    def last_used(self, block: int) -> int:
        """When the block was last held or given back; larger is later."""


class BlockTable:
    """A table of `blocks` blocks: who holds them, and under which names they are found.

    Raises CapacityError where too few blocks can be had, SlotError for a block that is given back once too often;
    nothing has changed then.

    >>> table = BlockTable(3)
    >>> held = table.acquire([11, 12])
    >>> table.fill(0, 11)
    >>> table.release(held)
    >>> table.match([11, 12]), table.acquire([11, 13, 14])
    ([0], [0, 1, 2])
    """

    def __init__(self, blocks: int, policy: str = "lru") -> None:
        check_count("blocks", blocks, 0)
        if policy not in POLICIES:
            raise UnsupportedError(f"policy={policy!r}: one of {', '.join(POLICIES)} (ERR-5)")
        self.blocks, self.policy = blocks, policy
        self.on_forget: list[Callable[[int], None]] = []
        self._free = list(range(blocks))[::-1]
        self._references = [0] * blocks
        self._used = [0] * blocks
        self._name: dict[int, int] = {}
        self._found: dict[int, int] = {}
        self._clock = 0

    # What the state cache asks ----------------------------------------------------------------------------------------

    def references(self, block: int) -> int:
        """How many requests hold the block."""
        return self._references[self.check_block(block)]

    def name(self, block: int) -> int | None:
        """The name of a block, None where it is not found by any."""
        return self._name.get(self.check_block(block))

    def last_used(self, block: int) -> int:
        """When the block was last held or given back."""
        return self._used[self.check_block(block)]

    # What requests ask ------------------------------------------------------------------------------------------------

    @property
    def free(self) -> tuple[int, ...]:
        """Blocks without content, the next to be handed out last."""
        return tuple(self._free)

    def held(self) -> dict[int, int]:
        """Every block that is held, and by how many."""
        return {block: count for block, count in enumerate(self._references) if count}

    def match(self, names: Sequence[int]) -> list[int]:
        """The blocks of the longest run of names from the first on (SNAP-8)."""
        found: list[int] = []
        for name in names:
            if name not in self._found:
                break
            found.append(self._found[name])
        return found

    def acquire(self, names: Sequence[int]) -> list[int]:
        """A block for each name, those that match shared, all held once more; or a CapacityError and no change."""
        shared = self.match(names)
        missing = len(names) - len(shared)
        idle = sorted((b for b in self._name if not self._references[b] and b not in shared), key=self._order)
        if missing > len(self._free) + len(idle):
            room = len(self._free) + len(idle)
            raise CapacityError(f"{missing} blocks asked of {self.blocks}, {room} free or unheld (LIFE-1)")
        for block in idle[: max(missing - len(self._free), 0)]:
            self._drop(block)
        blocks = shared + [self._free.pop() for _ in range(missing)]
        for block in blocks:
            self._references[block] += 1
            self._touch(block)
        return blocks

    def fill(self, block: int, name: int) -> None:
        """The block's tokens are all computed: from here on it is found by its name, unless another one is."""
        self.check_block(block)
        if name not in self._found:
            self._name[block], self._found[name] = name, block

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, the last one first; what nobody can find is free, the rest by policy."""
        for block in blocks:
            if self._references[self.check_block(block)] < 1:
                raise SlotError(f"block={block} is held by nobody: given back once (LIFE-6)")
        for block in reversed(blocks):
            self._references[block] -= 1
            self._touch(block)
            if not self._references[block] and (block not in self._name or self.policy == "ref_zero"):
                self._drop(block)

    def forget(self, block: int) -> None:
        """Drop the content of a block that nobody holds, and its name (SNAP-6)."""
        if self._references[self.check_block(block)]:
            raise SlotError(f"block={block} is held by {self._references[block]}: kept while in use (SNAP-6)")
        if block in self._free:
            raise SlotError(f"block={block} is free already: forgotten once (LIFE-6)")
        self._drop(block)

    def _drop(self, block: int) -> None:
        """A block without content or name; whoever keeps something under it hears of it first (SNAP-8)."""
        for hear in self.on_forget:
            hear(block)
        name = self._name.pop(block, None)
        if name is not None:
            del self._found[name]
        self._free.append(block)

    def check_block(self, block: int) -> int:
        """A block number lies in the table (SLOT-5)."""
        if not 0 <= block < self.blocks:
            raise SlotError(f"block={block} is outside 0..{self.blocks - 1} (SLOT-5)")
        return block

    def _order(self, block: int) -> tuple[int, int]:
        return self._used[block], block

    def _touch(self, block: int) -> None:
        self._clock += 1
        self._used[block] = self._clock


def check_count(name: str, value: object, least: int) -> None:
    """A whole number of at least `least` (ERR-1)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ShapeError(f"{name}={value!r}: a whole number of at least {least} (ERR-1)")
