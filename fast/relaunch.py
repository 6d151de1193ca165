"""Launch again what was launched before: the host side of a decode step without binding and specialising anew.

Triton binds some sixty arguments and looks at each, every time; a decode step makes the same call thousands of times
with other pointers. A call whose tensors have the same types, shapes, strides and alignment, and whose settings are the
same, needs the same checks, the same compiled kernel and the same numbers. So all of that is kept under these facts,
and only the pointers are put in. What depends on the contents of tensors is not kept, and nothing is kept for CPU
tensors, whose contents are checked at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

MOST_REMEMBERED = 1 << 12
ALIGNMENT = 16
"""Triton compiles two kinds of kernels: for pointers divisible by this, and for others."""

Key = tuple[Any, ...]


class Launch(NamedTuple):
    """One launch of a compiled kernel: its arguments, and which of them are pointers of which tensors."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]

    def again(self, pointers: Sequence[int]) -> None:
        """The same launch with other pointers, in the order of the tensors it was remembered with."""
        arguments = list(self.arguments)
        for place, tensor in self.places:
            arguments[place] = pointers[tensor]
        self.run(*arguments)


remembered: dict[Key, Launch] = {}


def key_of(tensors: Sequence[Tensor | None], *settings: Any) -> tuple[Key, list[int]]:
    """All that a launch depends on besides contents, and the pointers: one for each tensor, 0 where there is none."""
    facts: list[Any] = [*settings]
    pointers: list[int] = []
    for t in tensors:
        pointer = 0 if t is None else t.data_ptr()
        pointers.append(pointer)
        facts += (None,) if t is None else (t.dtype, t.get_device(), t.shape, t.stride(), pointer % ALIGNMENT)
    return tuple(facts), pointers


def remember(
    key: Key, compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], tensors: Sequence[Tensor | None]
) -> None:
    """Keep a launch that has been made: `arguments` in the kernel's order, constants included.

    A launch on a tensor that is none of `tensors`, a copy made on the way, is not kept.
    """
    numbers = {id(t): i for i, t in enumerate(tensors) if t is not None}
    places = [(place, numbers.get(id(a))) for place, a in enumerate(arguments) if isinstance(a, Tensor)]
    known = tuple((place, tensor) for place, tensor in places if tensor is not None)
    if len(known) == len(places) and len(remembered) < MOST_REMEMBERED:
        still = tuple(None if isinstance(a, Tensor) else a for a in arguments)
        remembered[key] = Launch(compiled[grid], still, known)
