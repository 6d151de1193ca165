"""Pictures of serving: a step that is split and merged, slots over time, drafts that are rolled back.

Each is a few lines of cells, one below the other, with the same content as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from statescan.spec.figures import CELL, COLOURS, LEFT, Figure, _cell, _hatch, _word

EMPTY = -1
"""No owner: a cell that is drawn without a fill, hatched."""


class Line(NamedTuple):
    """A line of cells: its name, the column it starts in, words, and the owner of each cell (its colour)."""

    name: str
    at: int
    words: Sequence[str]
    owners: Sequence[int]


def split_and_merge(rows: Sequence[str], decode_rows: int, real_decode: int, prefill_rows: int) -> Figure:
    """A step's rows, what each hook is given of them, and the merged outputs.

    `rows` are words, `decode_rows` the padded decode partition, `real_decode` its real tokens.

    >>> split_and_merge(["d", "p", "q", ""], 2, 1, 2)
    A step of 4 rows: 1 real decode token, 2 of a prompt
    rows      d p q .
    decode    d p
    prefill     p q .
    merged    D P Q 0
    The merge is at row 1: the padded decode rows behind it are dropped.
    """
    owners = [0 if t < real_decode else 1 if t < real_decode + prefill_rows else EMPTY for t in range(len(rows))]
    merged = [word.upper() if owner != EMPTY else "0" for word, owner in zip(rows, owners, strict=True)]
    lines = [
        Line("rows", 0, rows, owners), Line("decode", 0, rows[:decode_rows], [0] * decode_rows),
        Line("prefill", real_decode, rows[real_decode:], owners[real_decode:]), Line("merged", 0, merged, owners),
    ]  # fmt: skip
    tokens = f"{real_decode} real decode token{'s' * (real_decode != 1)}"
    said = f"The merge is at row {real_decode}: the padded decode rows behind it are dropped."
    return draw(f"A step of {len(rows)} rows: {tokens}, {prefill_rows} of a prompt", lines, said)


def slots_over_time(steps: Sequence[Sequence[str]]) -> Figure:
    """Who holds which slot in each step; `steps[i][slot]` is a request's name, small where it waits, "" where free.

    >>> slots_over_time([["", "A"], ["B", "A"], ["B", ""]])
    Slots over 3 steps
    step      0 1 2
    slot 0    . B B
    slot 1    A A .
    A free slot keeps what its last request left; it is zeroed for the next one.
    """
    names = sorted({name.upper() for step in steps for name in step if name})
    lines = [Line("step", 0, [str(n) for n in range(len(steps))], [EMPTY - 1] * len(steps))]
    for slot in range(len(steps[0]) if steps else 0):
        held = [step[slot] for step in steps]
        owners = [names.index(name.upper()) if name else EMPTY for name in held]
        lines.append(Line(f"slot {slot}", 0, held, owners))
    said = "A free slot keeps what its last request left; it is zeroed for the next one."
    return draw(f"Slots over {len(steps)} step{'s' * (len(steps) != 1)}", lines, said)


def drafts_and_rollback(tokens: Sequence[str], states: Sequence[str], accepted: int) -> Figure:
    """The tokens of a verify row, the entry after each, and the one that becomes the slot's state.

    >>> drafts_and_rollback(["6", "7", "8"], ["20", "30", "39"], 1)
    3 tokens, 1 draft accepted
    tokens     6  7  8
    entries   20 30 39
    slot         30
    Entry 1 is copied into the slot, window and state together; the entries behind it are of rejected drafts.
    """
    owners = [0 if j <= accepted else 1 for j in range(len(tokens))]
    lines = [Line("tokens", 0, tokens, owners), Line("entries", 0, states, owners),
             Line("slot", accepted, [states[accepted]], [0])]  # fmt: skip
    said = f"Entry {accepted} is copied into the slot, window and state together"
    behind = "; the entries behind it are of rejected drafts." if accepted < len(tokens) - 1 else "."
    title = f"{len(tokens)} tokens, {accepted} draft{'s' * (accepted != 1)} accepted"
    return draw(title, lines, said + behind)


def shards_of_tokens(ids: Sequence[Sequence[int]], entering: Sequence[int]) -> Figure:
    """The ids of each rank's rows, and the segment that crosses from the rank before.

    >>> shards_of_tokens([[0, 1, 1], [1, 2, 2]], [-1, 1])
    6 rows on 2 ranks
    rank 0    0 1 1
    rank 1          1 2 2
    Segment 1 enters rank 1 with the window and the state that it left rank 0 with.
    """
    each = len(ids[0]) if ids else 0
    lines = [Line(f"rank {rank}", rank * each, [str(n) for n in own], list(own)) for rank, own in enumerate(ids)]
    crossing = [f"Segment {row} enters rank {rank} with the window and the state that it left rank {rank - 1} with."
                for rank, row in enumerate(entering) if row >= 0]  # fmt: skip
    said = " ".join(crossing) or "No segment crosses an edge."
    return draw(f"{each * len(ids)} rows on {len(ids)} rank{'s' * (len(ids) != 1)}", lines, said)


def draw(title: str, lines: Sequence[Line], said: str) -> Figure:
    """Lines of cells as a figure and as text."""
    wide = max((len(word) for line in lines for word in line.words), default=1)
    columns = max((line.at + len(line.words) for line in lines), default=1)
    room = 8 * max(wide - 3, 0)
    elements, text = [*_hatch()], []
    for n, line in enumerate(lines):
        y = 6 + n * (CELL + 8)
        elements.append(_word(0, y + CELL / 2 + 5, line.name))
        for i, (word, owner) in enumerate(zip(line.words, line.owners, strict=True), start=line.at):
            colour = COLOURS[owner % len(COLOURS)] if owner >= 0 else "none"
            x = LEFT + i * (CELL + room)
            if owner < EMPTY:
                elements.append(_word(x + (CELL + room) / 2, y + CELL / 2 + 5, word, anchor="middle", faint=True))
            else:
                elements += _cell(x, y, word, colour, hatched=owner == EMPTY, wide=room)
        cells = [""] * line.at + [word or "." for word in line.words]
        text.append((f"{line.name:<10}" + " ".join(cell.rjust(wide) for cell in cells)).rstrip())
    height = 6 + len(lines) * (CELL + 8)
    return Figure(title, "\n".join([*text, said]), LEFT + columns * (CELL + room) + 16, height, tuple(elements))
