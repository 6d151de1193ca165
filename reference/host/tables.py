"""The index tables of a batch, one for each group of layers: slots for recurrent layers, blocks for others (LAYER-3).

A request has a row in the batch, and each group of layers finds its memory under that row, in a table of its own. Rows
move when a request ends or joins, so they move in all tables at once. What a row holds (a slot, a list of blocks) is
the group's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statescan.spec.contract import ShapeError, UnsupportedError

Tables = dict[str, list[Any]]


def edit_tables(
    tables: Mapping[str, Sequence[Any]], events: Sequence[Sequence[Any]], *, check: bool | None = None
) -> Tables:
    """The tables by group after edits of rows, in order; what was given stays as it is (LAYER-3).

    Events are ("swap", n, m), ("drop", n), after which the last row is row n, and ("add", entries), an entry for each
    group, which become the last row. Raises ShapeError for tables of unequal length, a group without an entry or a
    row that is not there, UnsupportedError for another word.

    >>> edit_tables({"recurrent": [2, 0, 1], "attention": [[5], [6, 7], [8]]}, [("drop", 0)])
    {'recurrent': [1, 0], 'attention': [[8], [6, 7]]}
    """
    found = {group: list(rows) for group, rows in tables.items()}
    if len({len(rows) for rows in found.values()}) > 1:
        lengths = ", ".join(f"{group} {len(rows)}" for group, rows in found.items())
        raise ShapeError(f"tables have rows {lengths}: as many in every group (LAYER-3)")
    for word, *given in events:
        if word == "add":
            add_row(found, *given)
        elif word in ("swap", "drop"):
            for rows in found.values():
                check_rows(rows, given)
            for rows in found.values():
                move_row(rows, given[0], given[1] if word == "swap" else len(rows) - 1)
                del rows[len(rows) - (word == "drop") :]
        else:
            raise UnsupportedError(f"{word!r}: swap, drop or add (ERR-5)")
    return found


def move_row(rows: list[Any], n: int, m: int) -> None:
    """Swap two rows."""
    rows[n], rows[m] = rows[m], rows[n]


def add_row(tables: Tables, entries: Mapping[str, Any]) -> None:
    """One row more in every table."""
    if set(entries) != set(tables):
        odd = sorted(set(entries) ^ set(tables))[0]
        raise ShapeError(f"a new row and group {odd!r}: an entry for every group, and no other (LAYER-3)")
    for group, rows in tables.items():
        rows.append(entries[group])


def check_rows(rows: Sequence[Any], numbers: Sequence[int]) -> None:
    """The rows of an edit are there."""
    for n in numbers:
        if not 0 <= n < len(rows):
            raise ShapeError(f"row {n} of {len(rows)} is not there (LAYER-3)")
