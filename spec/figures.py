"""Pictures of the chapters: small SVG with a title, a description and the same content as text.

A figure shows itself in a notebook, prints as text in a console, and is written to a file for the README by
`python -m statescan.spec.figures docs`. Lines and letters take the colour of the text around them, fills are
translucent, so a light and a dark page both work; a segment is told by its number and its outline, never by colour
alone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from math import exp
from pathlib import Path

CELL = 38
"""Width and height of one cell, in SVG units."""
LEFT = 92
"""Room for the words in front of a line of cells."""
COLOURS = ("#4f8fd6", "#e39a2d", "#3fae86", "#d9678f", "#8d79d9", "#8c9a3c")
"""Fills of segments 0, 1, 2, ... in turn; told apart in the common kinds of colour blindness as well."""
_FILE_STYLE = "<style>svg{color:#1f2328}@media (prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


@dataclass(frozen=True)
class Figure:
    """A picture: SVG elements in a box of `width` by `height`, and `text` that says the same without it."""

    title: str
    text: str
    width: int
    height: int
    elements: tuple[str, ...]

    @property
    def key(self) -> str:
        """A name that no other figure of a page shares."""
        return "f" + sha256("".join(self.elements).encode()).hexdigest()[:8]

    def svg(self, style: str = "") -> str:
        """The SVG element; `style` goes in front of what is drawn."""
        body = "\n".join(self.elements).replace("@KEY", self.key)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'role="img" aria-labelledby="{self.key}-t {self.key}-d" fill="currentColor" '
            'font-family="ui-sans-serif, system-ui, sans-serif" font-size="14">\n'
            f'{style}<title id="{self.key}-t">{escape(self.title)}</title>\n'
            f'<desc id="{self.key}-d">{escape(self.text)}</desc>\n{body}\n</svg>\n'
        )

    def _repr_svg_(self) -> str:
        return self.svg(_FILE_STYLE)

    def _repr_html_(self) -> str:
        return (
            f'<figure class="statescan">\n{self.svg()}<figcaption>{escape(self.title)}</figcaption>\n'
            f"<details><summary>The same as text</summary><pre>{escape(self.text)}</pre></details>\n</figure>"
        )

    def __repr__(self) -> str:
        return f"{self.title}\n{self.text}"


# ---------------------------------------------------------------------------------------------------------------------
# Segments of a pack
# ---------------------------------------------------------------------------------------------------------------------


def segment_strip(cu_seqlens: Sequence[int], total_tokens: int) -> Figure:
    """The rows of a pack, coloured by segment with the id in each; rows past the last offset are hatched.

    >>> segment_strip([0, 2, 2, 3], 5)
    Offsets 0, 2, 2, 3 in 5 rows
    row      0 1 | 2 | 3 4
    segment  0 0 | 2 | 3 3
    Segment 1 is empty and still uses its number. Rows 3 to 4 stand past the last offset: segment 3.
    """
    offsets = [int(offset) for offset in cu_seqlens]
    empty = [n for n, (start, end) in enumerate(itertools.pairwise(offsets)) if start == end]
    ids = [n for n, (start, end) in enumerate(itertools.pairwise([*offsets, total_tokens])) for _ in range(start, end)]
    trailing = len(offsets) - 1
    elements = list(_hatch())
    elements += [_word(0, 20, "row", faint=True), _word(0, 26 + CELL / 2 + 5, "segment")]
    for row, n in enumerate(ids):
        x = LEFT + row * CELL
        elements.append(_word(x + CELL / 2, 20, str(row), anchor="middle", faint=True))
        elements += _cell(x, 26, str(n), COLOURS[n % len(COLOURS)], hatched=n == trailing)
    below = 26 + CELL
    elements.append(_word(0, below + 28, "offsets"))
    for offset in dict.fromkeys(offsets):
        x = LEFT + offset * CELL
        names = ", ".join(f"{n}" for n in empty if offsets[n] == offset)
        elements.append(f'<path d="M{x} {below + 2}v10" stroke="currentColor" stroke-width="2"/>')
        elements.append(_word(x, below + 28, str(offset), anchor="middle"))
        if names:
            elements.append(_word(x, below + 46, f"{names} empty", anchor="middle", faint=True))
    lines = below + 28 + (18 if empty else 0)
    if trailing in ids:
        lines += 18
        elements.append(_word(LEFT + total_tokens * CELL, lines, "past the last offset", anchor="end", faint=True))
    return Figure(
        f"Offsets {', '.join(map(str, offsets))} in {total_tokens} rows", _strip_text(ids, empty, trailing),
        LEFT + max(total_tokens, 1) * CELL + 16, lines + 10, tuple(elements),
    )  # fmt: skip


def _strip_text(ids: Sequence[int], empty: Sequence[int], trailing: int) -> str:
    lines: dict[str, list[str]] = {"row": [], "segment": []}
    for n, group in itertools.groupby(enumerate(ids), key=lambda pair: pair[1]):
        rows = [str(row) for row, _ in group]
        width = max(len(rows[-1]), len(str(n)))
        lines["row"].append(" ".join(row.rjust(width) for row in rows))
        lines["segment"].append(" ".join(str(n).rjust(width) for _ in rows))
    text = [f"{name:<9}" + " | ".join(parts) for name, parts in lines.items()]
    said = [f"Segment {n} is empty and still uses its number." for n in empty]
    if trailing in ids:
        first = ids.index(trailing)
        stand = f"Rows {first} to {len(ids) - 1} stand" if first < len(ids) - 1 else f"Row {first} stands"
        said.append(f"{stand} past the last offset: segment {trailing}.")
    return "\n".join([*text, " ".join(said)]).rstrip()


# ---------------------------------------------------------------------------------------------------------------------
# The window of a convolution
# ---------------------------------------------------------------------------------------------------------------------


def conv_window(
    entering: Sequence[float], tokens: Sequence[float], weight: Sequence[float], bias: float = 0
) -> Figure:
    """What a short convolution reads: the entering window and the piece, the taps of each output, the final window.

    >>> conv_window([5, 6, 7, 8], [1, 2], [1000, 100, 10, 1])
    Window 5, 6, 7, 8 and the piece 1, 2
    inputs          5     6     7     8 |     1     2
    y[0] taps          1000   100    10       1        sum 6781
    y[1] taps                1000   100      10     1  sum 7812
    final window                7     8       1     2
    """
    inputs, width = [*entering, *tokens], len(weight)
    shown = [f"{x:g}" for x in inputs]
    steps = [(t + 1, _sum(inputs[t + 1 : t + 1 + width], weight, bias)) for t in range(len(tokens))]
    lines = [("inputs", 0, shown, "")]
    lines += [(f"y[{t}] taps", at, [f"{w:g}" for w in weight], f"sum {total:g}") for t, (at, total) in enumerate(steps)]
    lines.append(("final window", len(tokens), shown[len(tokens) :], ""))
    elements: list[str] = []
    for n, (name, at, cells, result) in enumerate(lines):
        y = 6 + n * (CELL + 10)
        whole = n in (0, len(lines) - 1)
        elements.append(_word(0, y + CELL / 2 + 5, name))
        for i, value in enumerate(cells, start=at):
            colour = COLOURS[0] if i < len(entering) else COLOURS[1]
            elements += _cell(LEFT + 8 + i * (CELL + 10), y, value, colour if whole else "none", wide=10)
        elements.append(_word(LEFT + 20 + len(inputs) * (CELL + 10), y + CELL / 2 + 5, result))
    x = LEFT + 8 + len(entering) * (CELL + 10)
    bottom = 6 + len(lines) * (CELL + 10) - 10
    elements.append(f'<path d="M{x} 0V{bottom + 6}" stroke="currentColor" stroke-width="2" stroke-dasharray="5 4"/>')
    return Figure(
        f"Window {', '.join(shown[: len(entering)])} and the piece {', '.join(shown[len(entering) :])}",
        _window_text(lines, len(entering)), LEFT + 110 + len(inputs) * (CELL + 10), bottom + 8, tuple(elements),
    )  # fmt: skip


def _sum(window: Sequence[float], weight: Sequence[float], bias: float) -> float:
    return bias + sum(w * x for w, x in zip(weight, window, strict=True))


def _window_text(lines: Sequence[tuple[str, int, list[str], str]], boundary: int) -> str:
    columns = len(lines[0][2])
    text = []
    for name, at, cells, result in lines:
        padded = [""] * at + cells + [""] * (columns - at - len(cells))
        left = " ".join(cell.rjust(5) for cell in padded[:boundary])
        right = " ".join(cell.rjust(5) for cell in padded[boundary:])
        text.append(f"{name:<12}{left} {'|' if at == 0 else ' '} {right}  {result}".rstrip())
    return "\n".join(text)


# ---------------------------------------------------------------------------------------------------------------------
# The dictionary picture of the delta rule
# ---------------------------------------------------------------------------------------------------------------------

Token = tuple[int, float, float, float]
"""Key (the number of its drawer), value, beta, log-decay."""


def dictionary_lens(drawers: Sequence[float], tokens: Sequence[Token]) -> Figure:
    """What every drawer holds after each token, the drawer of the token's key marked; each token reads its own key.

    >>> dictionary_lens([8, 16], [(0, 4, 1, 0), (0, 6, 0.5, 0)])
    Drawers that hold 8, 16, and what each token does
    drawer                  0     1
    start                   8    16
    write 4 to 0          [4]   16   reads 4
    half-write 6 to 0     [5]   16   reads 5
    """
    held = [float(number) for number in drawers]
    lines = [("start", list(held), -1)]
    for key, value, beta, log_decay in tokens:
        held = [exp(log_decay) * number for number in held]
        held[key] += beta * (value - held[key])
        lines.append((_deed(key, value, beta, log_decay), list(held), key))
    left, step = 200, CELL + 14
    elements = [_word(0, 16, "drawer", faint=True)]
    elements += [_word(left + n * step + CELL / 2, 16, str(n), anchor="middle", faint=True) for n in range(len(held))]
    for row, (name, contents, key) in enumerate(lines):
        y = 26 + row * (CELL + 8)
        elements.append(_word(0, y + CELL / 2 + 5, name, faint=row == 0))
        for n, number in enumerate(contents):
            elements += _cell(left + n * step, y, _short(number), COLOURS[1] if n == key else COLOURS[0])
            if n == key:
                elements.append(_outline(left + n * step, y, CELL, CELL))
        if key >= 0:
            said = f"reads {_short(contents[key])}"
            elements.append(_word(left + len(held) * step + 6, y + CELL / 2 + 5, said))
    return Figure(
        f"Drawers that hold {', '.join(f'{x:g}' for x in drawers)}, and what each token does", _lens_text(lines),
        left + len(held) * step + 90, 26 + len(lines) * (CELL + 8), tuple(elements),
    )  # fmt: skip


def _deed(key: int, value: float, beta: float, log_decay: float) -> str:
    """What a token does to its drawer, in words."""
    whole = {0.0: f"leave {key}", 0.5: f"half-write {value:g} to {key}", 1.0: f"write {value:g} to {key}"}
    part = f"write {beta:.2g} of {value:g} to {key}" if beta < 1 else f"overshoot {value:g} in {key}"
    word = whole.get(beta, part)
    if log_decay == 0:
        return word
    left = exp(log_decay)
    return f"forget, {word}" if left == 0 else f"fade to {left:.2g}, {word}"


def _short(number: float) -> str:
    return f"{number:g}" if number == int(number) else f"{number:.3g}"


def _lens_text(lines: Sequence[tuple[str, list[float], int]]) -> str:
    wide = max(16, *(len(name) for name, _, _ in lines)) + 2
    text = [f"{'drawer':<{wide}}" + "".join(f"{n:>6}" for n in range(len(lines[0][1])))]
    for name, contents, key in lines:
        cells = "".join(f"{f'[{_short(x)}]' if n == key else f'{_short(x)} ' if key >= 0 else _short(x):>6}"
                        for n, x in enumerate(contents))  # fmt: skip
        text.append(f"{name:<{wide}}{cells}{f'  reads {_short(contents[key])}' if key >= 0 else ''}")
    return "\n".join(text)


# ---------------------------------------------------------------------------------------------------------------------
# Decay
# ---------------------------------------------------------------------------------------------------------------------


def decay_map(log_decays: Sequence[float], cu_seqlens: Sequence[int]) -> Figure:
    """How much of what token j wrote is left in the state after token t, and how much of the entering state.

    >>> decay_map([0, -0.6931472, -0.6931472, 0], [0, 3, 4])
    What is left after each token, segments of 3, 1 tokens
    after  entering     0     1     2     3
        0         1     1     .     .     .
        1       0.5   0.5     1     .     .
        2      0.25  0.25   0.5     1     .
        3         1     .     .     .     1
    """
    offsets = [int(offset) for offset in cu_seqlens]
    owner = [n for n, (start, end) in enumerate(itertools.pairwise(offsets)) for _ in range(start, end)]
    kept: list[list[float | None]] = []
    for t, n in enumerate(owner):
        later = [None if owner[j] != n or j > t else exp(sum(log_decays[j + 1 : t + 1])) for j in range(len(owner))]
        kept.append([exp(sum(log_decays[offsets[n] : t + 1])), *later])
    elements = [_word(0, 18, "after", faint=True), _word(LEFT + 18, 18, "entering", anchor="middle", faint=True)]
    for j in range(len(owner)):
        elements.append(_word(LEFT + 66 + (j + 0.5) * CELL, 18, str(j), anchor="middle", faint=True))
    for t, (n, weights) in enumerate(zip(owner, kept, strict=True)):
        y = 26 + t * CELL
        elements.append(_word(60, y + CELL / 2 + 5, str(t), anchor="end"))
        for column, weight in enumerate(weights):
            x = LEFT if column == 0 else LEFT + 66 + (column - 1) * CELL
            word = "" if weight is None else f"{weight:.2g}"
            shade = 0.0 if weight is None else 0.08 + 0.6 * weight
            elements += _cell(x, y, word, COLOURS[n % len(COLOURS)], shade=shade, faint=weight is None)
    for offset in offsets[1:-1]:
        elements.append(_rule(f"M{LEFT - 8} {26 + offset * CELL}H{LEFT + 66 + len(owner) * CELL}"))
        elements.append(_rule(f"M{LEFT + 66 + offset * CELL} 22V{26 + len(owner) * CELL}"))
    lengths = [str(end - start) for start, end in itertools.pairwise(offsets)]
    return Figure(
        f"What is left after each token, segments of {', '.join(lengths)} tokens", _decay_text(kept),
        LEFT + 66 + len(owner) * CELL + 4, 30 + len(owner) * CELL, tuple(elements),
    )  # fmt: skip


def _decay_text(kept: Sequence[Sequence[float | None]]) -> str:
    head = "after  entering" + "".join(f"{j:>6}" for j in range(len(kept)))
    words = [["." if weight is None else f"{weight:.2g}" for weight in weights] for weights in kept]
    rows = [f"{t:>5}  {row[0]:>8}" + "".join(f"{word:>6}" for word in row[1:]) for t, row in enumerate(words)]
    return "\n".join([head, *rows])


# ---------------------------------------------------------------------------------------------------------------------
# Chunks
# ---------------------------------------------------------------------------------------------------------------------


def chunk_grid(cu_seqlens: Sequence[int], chunk: int) -> Figure:
    """The chunks of every segment: the grid starts anew at each, and an empty segment has one empty chunk.

    >>> chunk_grid([0, 6, 6, 9], 4)
    Segments 0 to 6, 6 to 6, 6 to 9 in chunks of 4
    segment 0  [0 1 2 3] [4 5 . .]  chunks 0, 1
    segment 1  [. . . .]            chunk 2
    segment 2  [6 7 8 .]            chunk 3
    """
    bounds = [(int(start), int(end)) for start, end in itertools.pairwise(cu_seqlens)]
    rows = [[list(range(low, min(low + chunk, end))) for low in range(start, max(end, start + 1), chunk)]
            for start, end in bounds]  # fmt: skip
    elements, number = list(_hatch()), 0
    wide = chunk * CELL + 18
    for n, chunks in enumerate(rows):
        y = 4 + n * (CELL + 34)
        elements.append(_word(0, y + 18 + CELL / 2 + 5, f"segment {n}"))
        for c, tokens in enumerate(chunks):
            x = LEFT + c * wide
            elements.append(_word(x, y + 13, f"chunk {number}: ({n}, {c})", faint=True))
            for i in range(chunk):
                word = str(tokens[i]) if i < len(tokens) else ""
                elements += _cell(x + i * CELL, y + 18, word, COLOURS[n % len(COLOURS)] if word else "none",
                                  hatched=not word)  # fmt: skip
            elements.append(_outline(x, y + 18, chunk * CELL, CELL))
            number += 1
    most = max((len(chunks) for chunks in rows), default=1)
    said = ", ".join(f"{start} to {end}" for start, end in bounds)
    return Figure(
        f"Segments {said} in chunks of {chunk}", _grid_text(rows, chunk),
        LEFT + most * wide, 4 + len(rows) * (CELL + 34), tuple(elements),
    )  # fmt: skip


def _grid_text(rows: Sequence[Sequence[Sequence[int]]], chunk: int) -> str:
    digits = max((len(str(t)) for chunks in rows for tokens in chunks for t in tokens), default=1)
    drawn = [" ".join("[" + " ".join([f"{t:>{digits}}" for t in tokens] + ["."] * (chunk - len(tokens))) + "]"
                      for tokens in chunks) for chunks in rows]  # fmt: skip
    wide, text, number = max((len(line) for line in drawn), default=0), [], 0
    for n, (line, chunks) in enumerate(zip(drawn, rows, strict=True)):
        names = ", ".join(str(number + c) for c in range(len(chunks)))
        text.append(f"segment {n}  {line:<{wide}}  chunk{'s' if len(chunks) > 1 else ''} {names}")
        number += len(chunks)
    return "\n".join(text)


# ---------------------------------------------------------------------------------------------------------------------
# Elements
# ---------------------------------------------------------------------------------------------------------------------


def _word(x: float, y: float, word: str, *, anchor: str = "start", faint: bool = False) -> str:
    opacity = ' opacity="0.75"' if faint else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{opacity}>{escape(word)}</text>' if word else ""


def _cell(
    x: float, y: float, word: str, colour: str, *, hatched: bool = False, wide: int = 0, shade: float = 0.38,
    faint: bool = False,
) -> Iterator[str]:  # fmt: skip
    box = f'x="{x:g}" y="{y:g}" width="{CELL + wide}" height="{CELL}"'
    dashes = ' stroke-dasharray="3 3"' if hatched else ""
    lines = ' stroke-opacity="0.25"' if faint else ""
    if colour != "none" and shade:
        yield f'<rect {box} fill="{colour}" fill-opacity="{shade:.3g}"/>'
    if hatched:
        yield f'<rect {box} fill="url(#@KEY-h)"/>'
    yield f'<rect {box} fill="none" stroke="currentColor"{dashes}{lines}/>'
    yield _word(x + (CELL + wide) / 2, y + CELL / 2 + 5, word, anchor="middle")


def _outline(x: float, y: float, wide: float, high: float) -> str:
    box = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}"'
    return f'<rect {box} fill="none" stroke="currentColor" stroke-width="2.5"/>'


def _rule(path: str) -> str:
    return f'<path d="{path}" stroke="currentColor" stroke-width="2" stroke-dasharray="5 4"/>'


def _hatch() -> Iterator[str]:
    yield (
        '<defs><pattern id="@KEY-h" width="8" height="8" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V8" stroke="currentColor" stroke-opacity="0.35"/></pattern></defs>'
    )


# ---------------------------------------------------------------------------------------------------------------------
# Pictures kept as files
# ---------------------------------------------------------------------------------------------------------------------


def committed() -> dict[str, Figure]:
    """File name -> figure of every SVG that stands in `docs/`."""
    return {"segment-strip.svg": segment_strip([0, 5, 7, 11], 16)}


def main(arguments: Sequence[str]) -> None:
    """Write every committed figure into the folder that is named."""
    if len(arguments) != 1:
        raise SystemExit("usage: python -m statescan.spec.figures FOLDER")
    for name, figure in committed().items():
        Path(arguments[0], name).write_text(figure._repr_svg_(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
