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
# Elements
# ---------------------------------------------------------------------------------------------------------------------


def _word(x: float, y: float, word: str, *, anchor: str = "start", faint: bool = False) -> str:
    opacity = ' opacity="0.75"' if faint else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{opacity}>{escape(word)}</text>' if word else ""


def _cell(x: float, y: float, word: str, colour: str, *, hatched: bool = False, wide: int = 0) -> Iterator[str]:
    box = f'x="{x:g}" y="{y:g}" width="{CELL + wide}" height="{CELL}"'
    dashes = ' stroke-dasharray="3 3"' if hatched else ""
    if colour != "none":
        yield f'<rect {box} fill="{colour}" fill-opacity="0.38"/>'
    if hatched:
        yield f'<rect {box} fill="url(#@KEY-h)"/>'
    yield f'<rect {box} fill="none" stroke="currentColor"{dashes}/>'
    yield _word(x + (CELL + wide) / 2, y + CELL / 2 + 5, word, anchor="middle")


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
