"""What the device can do, measured beside what is judged: `copy(x)` for streaming work, `update(x)` for decode.

    copy(x)     reads x/2 bytes and writes them to another array
    update(x)   reads x/2 bytes of randomly chosen slots and writes them back in place

Both go over several sets of memory in turn, larger together than three L2 caches, and each is the best of a few shapes.
"""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

Launches = list[Callable[[], Any]]
"""One launch for each set of memory; each may be captured in a graph."""
ROTATED = 192 << 20
"""Bytes that one pass over the sets touches at least: more than three L2 caches of 60 MB."""
MOST_SETS = 1536
SLOT = 1 << 16
"""Bytes of a slot of `update`: a head's state of 128 by 128 in float32, or a window of 8192 channels in 16 bits."""
SHAPES = ((512, 1), (1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))
"""(32-bit words a program, warps) to try."""


@triton.jit(do_not_specialize=["words"])
def copy_kernel(source_ptr, target_ptr, words, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < words), mask=at < words)


@triton.jit(do_not_specialize=["flip"])
def update_kernel(pool_ptr, slots_ptr, flip, SLOT_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """`flip` is 0: the compiler does not know, and would drop a store of what was just loaded."""
    parts: tl.constexpr = SLOT_WORDS // BLOCK
    slot = tl.load(slots_ptr + tl.program_id(0) // parts).to(tl.int64)
    at = slot * SLOT_WORDS + (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pool_ptr + at, tl.load(pool_ptr + at) ^ flip)


def count_sets(moved: int) -> int:
    """How many sets of `moved` bytes a pass needs."""
    return max(2, min(MOST_SETS, -(-ROTATED // max(moved, 1))))


def copies(moved: int, device: str = "cuda") -> Iterator[tuple[str, Launches]]:
    """`copy(moved)` in every shape."""
    words, sets = max(1, moved // 8), count_sets(moved)
    source = torch.randint(-(2**31), 2**31, (sets, -(-words // 4) * 4), dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def launch(i: int, block: int, warps: int) -> None:
        copy_kernel[(-(-words // block),)](source[i], target[i], words, BLOCK=block, num_warps=warps)

    for block, warps in SHAPES:
        yield f"copy {block}x{warps}", [
            lambda i=i, block=block, warps=warps: launch(i, block, warps) for i in range(sets)  # type: ignore[misc]
        ]


def updates(moved: int, device: str = "cuda") -> Iterator[tuple[str, Launches]]:
    """`update(moved)` in every shape; at least one slot."""
    count, sets = max(1, round(moved / 2 / SLOT)), count_sets(moved)
    pool = torch.randint(-(2**31), 2**31, (sets * count, SLOT // 4), dtype=torch.int32, device=device)
    slots = torch.randperm(sets * count, device=device).to(torch.int32).view(sets, count)

    def launch(i: int, block: int, warps: int) -> None:
        update_kernel[(count * (SLOT // 4 // block),)](
            pool, slots[i], 0, SLOT_WORDS=SLOT // 4, BLOCK=block, num_warps=warps
        )

    for block, warps in SHAPES:
        yield f"update {block}x{warps}", [
            lambda i=i, block=block, warps=warps: launch(i, block, warps) for i in range(sets)  # type: ignore[misc]
        ]


YARDSTICKS: dict[str, Callable[..., Iterator[tuple[str, Launches]]]] = {"copy": copies, "update": updates}
