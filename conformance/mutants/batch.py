"""What an engine does to a batch between steps, with at most one fault: drafts stand, rows move (SPEC, LAYER)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from statescan.conformance.mutants.packed import refusals
from statescan.reference.arrays import Array
from statescan.spec.contract import ShapeError, UnsupportedError

FAULTS: tuple[str, ...] = (
    "matches-counted-behind-a-mismatch", "base-token-counted-as-draft", "placeholder-tokens-accepted",
    "rows-moved-in-the-first-group-only", "one-class-for-all", "message-without-label",
)  # fmt: skip


def build(fault: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """The operations of this module, right or with one fault."""
    model = BatchModel(fault)
    return {"accept_drafts": model.accept_drafts, "edit_tables": model.edit_tables}


class BatchModel:
    """Both with at most one fault."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault

    def accept_drafts(
        self, tokens: Any, chosen: Any, num_tokens: Any = None, *, check: bool | None = None
    ) -> tuple[Array, Array]:
        """Drafts that stand, by a mask: agreement so far (SPEC-8)."""
        with refusals(self.fault):
            given, model = np.asarray(tokens), np.asarray(chosen)
            if given.ndim != 2 or given.shape != model.shape:
                raise ShapeError(
                    f"tokens have shape {list(given.shape)} and chosen {list(model.shape)}: [N, J] both (SPEC-8)"
                )
            n, most = given.shape
            counts = np.full(n, most) if num_tokens is None else np.asarray(num_tokens)
            for row, count in enumerate(counts.tolist()):
                if not 0 <= count <= most:
                    raise UnsupportedError(f"num_tokens[{row}]={count}: 0 to {most} (SPEC-6)")
            agree = given[:, 1:] == model[:, :-1]
            if self.fault != "placeholder-tokens-accepted":
                agree &= np.arange(1, most)[None] < counts[:, None]
            if self.fault != "matches-counted-behind-a-mismatch":
                agree = np.logical_and.accumulate(agree, axis=1)
            accepted = agree.sum(1)
            behind = model[np.arange(n), accepted]
            if self.fault == "base-token-counted-as-draft":
                accepted = accepted + 1
            real = counts > 0
            return np.where(real, accepted, -1).astype(np.int32), np.where(real, behind, -1).astype(np.int64)

    def edit_tables(
        self, tables: Mapping[str, Sequence[Any]], events: Sequence[Sequence[Any]], *, check: bool | None = None
    ) -> dict[str, list[Any]]:
        """Rows as tuples of all groups' entries: what moves is a tuple (LAYER-3)."""
        with refusals(self.fault):
            lengths = {group: len(rows) for group, rows in tables.items()}
            if len(set(lengths.values())) > 1:
                words = ", ".join(f"{group} {length}" for group, length in lengths.items())
                raise ShapeError(f"tables have rows {words}: as many in every group (LAYER-3)")
            groups = list(tables)
            rows = [dict(zip(groups, entries, strict=True)) for entries in zip(*tables.values(), strict=True)]
            moving = groups[:1] if self.fault == "rows-moved-in-the-first-group-only" else groups
            for word, *given in events:
                self.edit(rows, moving, word, given)
            return {group: [row[group] for row in rows] for group in groups}

    def edit(self, rows: list[dict[str, Any]], moving: Sequence[str], word: str, given: Sequence[Any]) -> None:
        """One edit of rows."""
        if word == "add":
            if rows and set(given[0]) != set(rows[0]):
                odd = sorted(set(given[0]) ^ set(rows[0]))[0]
                raise ShapeError(f"a new row and group {odd!r}: an entry for every group, and no other (LAYER-3)")
            rows.append(dict(given[0]))
            return
        if word not in ("swap", "drop"):
            raise UnsupportedError(f"{word!r}: swap, drop or add (ERR-5)")
        for n in given:
            if not 0 <= n < len(rows):
                raise ShapeError(f"row {n} of {len(rows)} is not there (LAYER-3)")
        n, m = given[0], given[1] if word == "swap" else len(rows) - 1
        for group in moving:
            rows[n][group], rows[m][group] = rows[m][group], rows[n][group]
        if word == "drop":
            rows.pop()
