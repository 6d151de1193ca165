"""Pictures of prompts, blocks and the states that are kept of them: what is recorded, who holds what, what is skipped.

Each is a few lines of cells, one below the other, with the same content as text.
"""

from __future__ import annotations

from collections.abc import Sequence

from statescan.reference.host.prefix_cache import plan_skip, plan_snapshots
from statescan.spec.figures import Figure
from statescan.spec.serving_figures import EMPTY, Line, draw


def snapshot_timeline(prompt_tokens: int, pieces: Sequence[int], block_size: int) -> Figure:
    """A prompt in pieces, its blocks, and the tokens behind which a state is kept: s inside a piece, e at the end.

    >>> snapshot_timeline(8, [3, 5], 2)
    A prompt of 8 tokens in 2 pieces, blocks of 2
    token     0 1 2 3 4 5 6 7
    piece     0 0 0 1 1 1 1 1
    block     0 0 1 1 2 2 3 3
    kept      . s . . . s . e
    s is a snapshot inside its piece, e the state in the slot when the prompt has ended.
    """
    kept, at = [""] * prompt_tokens, 0
    for length in pieces:
        made = plan_snapshots(prompt_tokens, at, length, 0, 0, block_size, 1)
        for offset, _ in made["snapshots"]:
            kept[at + offset - 1] = "s"
        at += length
        if made["end"] >= 0:
            kept[at - 1] = "e"
    piece = [n for n, length in enumerate(pieces) for _ in range(length)]
    whole = prompt_tokens // block_size
    block = [t // block_size if t // block_size < whole else EMPTY for t in range(prompt_tokens)]
    lines = [
        Line("token", 0, [str(t) for t in range(prompt_tokens)], [EMPTY - 1] * prompt_tokens),
        Line("piece", 0, [str(n) for n in piece], piece),
        Line("block", 0, [str(n) if n != EMPTY else "" for n in block], block),
        Line("kept", 0, kept, [block[t] if word else EMPTY for t, word in enumerate(kept)]),
    ]  # fmt: skip
    said = "s is a snapshot inside its piece, e the state in the slot when the prompt has ended."
    return draw(f"A prompt of {prompt_tokens} tokens in {len(pieces)} pieces, blocks of {block_size}", lines, said)


def block_table(contents: Sequence[str], holders: Sequence[int], places: Sequence[int]) -> Figure:
    """A block table: what each block holds ("" where free), how many requests hold it, the place of its state or -1.

    >>> block_table(["1 2", "3 4", "", "3 9"], [2, 0, 0, 1], [0, 1, -1, -1])
    4 blocks, 2 of them with a state
    block       0   1   2   3
    tokens    1 2 3 4   . 3 9
    held by     2   0   .   1
    state at    0   1   .   .
    A block that nobody holds may go, and its name and its state with it.
    """
    count = len(contents)
    free = [not words for words in contents]
    owners = [EMPTY if gone else n for n, gone in enumerate(free)]
    lines = [
        Line("block", 0, [str(n) for n in range(count)], [EMPTY - 1] * count),
        Line("tokens", 0, list(contents), owners),
        Line("held by", 0, ["" if gone else str(n) for n, gone in zip(holders, free, strict=True)], owners),
        Line("state at", 0, ["" if place < 0 else str(place) for place in places],
             [owner if place >= 0 else EMPTY for owner, place in zip(owners, places, strict=True)]),
    ]  # fmt: skip
    said = "A block that nobody holds may go, and its name and its state with it."
    return draw(f"{count} blocks, {sum(place >= 0 for place in places)} of them with a state", lines, said)


def what_may_be_skipped(prompt_tokens: int, block_size: int, matched: int, states: Sequence[int]) -> Figure:
    """A prompt whose first blocks match, the tokens behind which a state is kept, and what need not be computed.

    >>> what_may_be_skipped(7, 2, 3, [1])
    3 blocks of 7 tokens match, 2 tokens are skipped
    token     0 1 2 3 4 5 6
    matched   m m m m m m .
    state     . s . . . . .
    computed  . . c c c c c
    Tokens are skipped up to a position whose state is restored, and not to the end of what matches.
    """
    skip = plan_skip(prompt_tokens, 0, matched, states, block_size)
    tokens = range(prompt_tokens)
    lines = [
        Line("token", 0, [str(t) for t in tokens], [EMPTY - 1] * prompt_tokens),
        Line("matched", 0, ["m" if t < matched * block_size else "" for t in tokens],
             [0 if t < matched * block_size else EMPTY for t in tokens]),
        Line("state", 0, ["s" if t + 1 in [n * block_size for n in states] else "" for t in tokens],
             [1 if t + 1 in [n * block_size for n in states] else EMPTY for t in tokens]),
        Line("computed", 0, ["c" if t >= skip else "" for t in tokens], [2 if t >= skip else EMPTY for t in tokens]),
    ]  # fmt: skip
    said = "Tokens are skipped up to a position whose state is restored, and not to the end of what matches."
    return draw(f"{matched} blocks of {prompt_tokens} tokens match, {skip} tokens are skipped", lines, said)
