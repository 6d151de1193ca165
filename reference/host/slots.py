"""The slots of a pool as an engine hands them out: a stack of free ones, each taken and given back once (LIFE).

A slot is a row of every per-slot array of every layer; who holds it is the engine's book, what it contains is not
looked at here. Freeing clears nothing: the next owner's slot is zeroed before its first use (LIFE-2).
Source of the order: https://github.com/NVIDIA/Megatron-LM (core/inference/contexts), a last-in first-out stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statescan.spec.contract import CapacityError, SlotError, UnsupportedError


class SlotPool:
    """Free and taken slots of a pool of `slots` slots; the highest free one is handed out first.

    Raises SlotError for a slot outside the pool (SLOT-5) and for one that is free already (LIFE-6), CapacityError
    where no slot is left (LIFE-1); nothing has changed then.

    >>> pool = SlotPool(3)
    >>> pool.allocate(), pool.allocate(), pool.free
    (2, 1, (0,))
    >>> pool.release(2)
    >>> pool.allocate()
    2
    """

    def __init__(self, slots: int) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 0:
            raise SlotError(f"slots={slots!r}: a whole number of at least 0 (LIFE-1)")
        self.slots = slots
        self._free = list(range(slots))

    @property
    def free(self) -> tuple[int, ...]:
        """The free slots, the next to be handed out last."""
        return tuple(self._free)

    def is_taken(self, slot: int) -> bool:
        """Whether a request holds the slot; raises SlotError outside the pool."""
        self.check_slot(slot)
        return slot not in self._free

    def check_slot(self, slot: int) -> None:
        """A slot number lies in the pool (SLOT-5)."""
        if not 0 <= slot < self.slots:
            raise SlotError(f"slot={slot} is outside 0..{self.slots - 1} (SLOT-5)")

    def allocate(self) -> int:
        """Take one slot (LIFE-1)."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """Take `count` slots or none: those on top of the stack, in the order in which they lie (LIFE-1)."""
        if count > len(self._free):
            raise CapacityError(f"count={count} slots asked of {self.slots}, {len(self._free)} free (LIFE-1)")
        kept = len(self._free) - count
        taken, self._free = self._free[kept:], self._free[:kept]
        return taken

    def take(self, slot: int) -> int:
        """Take one particular slot, for an engine that has reasons (LIFE-1)."""
        if self.is_taken(slot):
            raise CapacityError(f"slot={slot} is taken by another request (LIFE-1)")
        self._free.remove(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back, once (LIFE-6)."""
        if not self.is_taken(slot):
            raise SlotError(f"slot={slot} is free already: freed once (LIFE-6)")
        self._free.append(slot)

    def reset(self) -> None:
        """Every slot free, as at the start."""
        self._free = list(range(self.slots))


def run_slots(slots: int, events: Sequence[Sequence[Any]], *, check: bool | None = None) -> list[list[int]]:
    """A pool's life in one call: the slots of each allocation in order, then what is free at the end (LIFE-1, LIFE-6).

    Events are ("allocate", count) and ("release", slot). Raises as SlotPool, UnsupportedError for another word.

    >>> run_slots(3, [("allocate", 2), ("release", 2)])
    [[1, 2], [0, 2]]
    """
    pool, log = SlotPool(slots), []
    for word, value in events:
        if word not in ("allocate", "release"):
            raise UnsupportedError(f"{word!r}: allocate or release (ERR-5)")
        if word == "allocate":
            log.append(pool.allocate_many(value))
        else:
            pool.release(value)
    return [*log, list(pool.free)]
