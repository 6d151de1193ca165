"""Vectors drawn when the suite runs: the numbers come from a seed that nobody knew before, and what has to come out is
computed then and exists in the runner alone. A table of stored answers passes none of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from statescan.conformance.cases import Case, Missing, prepare

Vector = Mapping[str, Any]

MOST_NUMBERS = 20_000
"""Of larger vectors the gains take minutes."""


def drawn(corpus: Mapping[str, Vector], count: int) -> Iterator[Vector]:
    """`count` numeric vectors with a seed of their own, each operation once before any comes twice."""
    rounds: dict[str, list[Vector]] = {}
    for vector in corpus.values():
        if vector.get("class") == "numeric" and _redrawable(vector):
            rounds.setdefault(vector["op"], []).append(vector)
    order = [options[i] for i in range(max(map(len, rounds.values()), default=0))
             for options in rounds.values() if i < len(options)]  # fmt: skip
    for n in range(count if order else 0):
        base = order[n % len(order)]
        seed = secrets.randbelow(2**53)
        yield {**base, "id": f"fresh-{n}-{base['id']}"[:64].rstrip("-"), "seed": seed, "expect": {}}


def _redrawable(vector: Vector) -> bool:
    specs = vector.get("inputs", {}).values()
    numbers = sum(int(np.prod(spec["shape"])) for spec in specs)
    return any("gen" in spec for spec in specs) and numbers <= MOST_NUMBERS and not vector.get("grad")


def prepared(vector: Vector, corpus: Mapping[str, Vector], claims: Sequence[Mapping[str, Any]]) -> Case | Missing:
    """The vector under the claims, with its expectations computed."""
    from statescan.conformance import expect  # the reference, which the runner needs for this alone

    case = prepare(vector, corpus, claims)
    if isinstance(case, Missing):
        return case
    call = expect.call_of(case.story)
    right = expect.truth(call)
    wanted = expect.expected(call, right, exact=True, seed=int(vector["seed"]))
    return replace(case, story=replace(case.story, expect=wanted), variants=())
