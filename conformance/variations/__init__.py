"""Right implementations, hundreds of them: what measures whether the suite ever cries wolf.

A kernel author may choose the chunk length, the order of a sum, how a triangular system is solved, where beta and the
scale go, how far an exponential is off. Each choice is an axis; a variation is one value of each, drawn so that nearly
every two values of two axes meet. All are float32 or wider but for operands that are declared narrower. None
is among those that calibrated the score (token by token and chunks of 8 to 128, sums permuted, e^x (1 +- 2^-22)), nor
among the models that are mutated. An alarm is a vector that fails one of them: then either the vector asks for more
than the formula does, or the variation is not right after all.

    python -m statescan.conformance.variations [--sample] [--only FAMILY] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from typing import Any

from numpy.lib.stride_tricks import as_strided

from statescan.conformance.adapter import ALL_FEATURES, Adapter
from statescan.conformance.calls import Array, Call, span
from statescan.conformance.cases import Missing, Vector, execute, prepare
from statescan.conformance.compare import Verdict
from statescan.conformance.invoke import invoke
from statescan.conformance.variations import arithmetic, conv, decays, delta, gates, rows, ssd
from statescan.goldens.generator import word

Style = delta.Delta | ssd.Ssd | conv.Conv | gates.Gates
Axes = Mapping[str, Sequence[Any]]

TYPES = ("own", "f32")
"""Element types in which a variation takes a vector: its own, or everything that goes in and comes out in float32."""
WIDE: dict[str, dict[str, str]] = {
    "delta": {name: "f32" for name in ("q", "g", "beta")},
    "ssd": {name: "f32" for name in ("x", "dt", "A", "D", "dt_bias")},
    "conv": {name: "f32" for name in ("x", "weight")},
    "gates": {name: "f32" for name in ("a", "f", "b", "x", "z", "A_log", "dt_bias", "weight")},
}

_SHARED: dict[str, Sequence[Any]] = {"types": TYPES, "total": arithmetic.TOTALS,
                                     "exponential": arithmetic.EXPONENTIALS}  # fmt: skip
_SCANNED = {**_SHARED, "product": arithmetic.PRODUCTS, "operand": ("f32", "tf32", "f32", "bf16", "f32", "f16"),
            "order": rows.ORDERS}  # fmt: skip
AXES: dict[str, Axes] = {
    "delta tokens": {**_SCANNED, "chunk": (0,), "root": arithmetic.ROOTS, "scale": delta.SCALES,
                     "state": delta.STATES, "write": delta.WRITES, "read": delta.READS, "fade": delta.FADES},
    "delta chunks": {**_SCANNED, "chunk": (48, 5, 7, 32, 96), "root": arithmetic.ROOTS, "scan": decays.SCANS,
                     "solve": delta.SOLVES, "beta": delta.BETAS, "scale": delta.SCALES, "pairs": delta.PAIRS,
                     "state": delta.STATES, "final": delta.FINALS},
    "ssd tokens": {**_SCANNED, "form": ("tokens",), "softplus": arithmetic.SOFTPLUSES, "sigmoid": arithmetic.SIGMOIDS,
                   "step": ssd.STEPS[:2], "skip": ssd.SKIPS, "state": ssd.STATES},
    "ssd chunks": {**_SCANNED, "form": ("chunks", "passed"), "chunk": (48, 5, 7, 32, 96), "scan": decays.SCANS,
                   "softplus": arithmetic.SOFTPLUSES, "sigmoid": arithmetic.SIGMOIDS, "step": ssd.STEPS,
                   "skip": ssd.SKIPS, "state": ssd.STATES},
    "ssd quadratic": {**_SCANNED, "form": ("quadratic",), "scan": decays.SCANS, "softplus": arithmetic.SOFTPLUSES,
                      "sigmoid": arithmetic.SIGMOIDS, "step": ssd.STEPS, "skip": ssd.SKIPS, "state": ssd.STATES},
    "conv": {**_SHARED, "operand": conv.NARROW, "taps": conv.TAPS, "bias": conv.BIASES, "order": rows.ORDERS,
             "sigmoid": arithmetic.SIGMOIDS},
    "gates": {**_SHARED, "operand": ("f32", "f32", "tf32", "bf16"), "softplus": arithmetic.SOFTPLUSES,
              "sigmoid": arithmetic.SIGMOIDS, "root": arithmetic.ROOTS, "mean": gates.MEANS,
              "weight": gates.WEIGHTS, "sign": gates.SIGNS},
}  # fmt: skip
"""The choices of each kind of implementation; a value that is listed twice is drawn twice as often."""
COUNTS = {"delta tokens": 36, "delta chunks": 64, "ssd tokens": 30, "ssd chunks": 44, "ssd quadratic": 32, "conv": 34,
          "gates": 36}  # fmt: skip
"""How many of each are made."""
_STYLES: dict[str, type[Any]] = {"delta": delta.Delta, "ssd": ssd.Ssd, "conv": conv.Conv, "gates": gates.Gates}
_ARITHMETIC = tuple(field.name for field in fields(arithmetic.Arithmetic))
SEED = 48
CANDIDATES = 24


@dataclass(frozen=True)
class Variation:
    """One implementation: its name says every choice; `family` the operations it has."""

    name: str
    family: str
    choices: Mapping[str, Any]
    style: Style

    @property
    def operand(self) -> str:
        """The class of its matrix operands."""
        return self.style.arithmetic.operand

    def adapter(self) -> Adapter:
        """As the runner would be shown it: what it computes and what it claims."""
        made = Adapter(self.name, arrays="torch")
        wide = self.choices.get("types") == "f32"
        for name, function in self.style.operations().items():
            made.op(
                name, features=ALL_FEATURES, operand=self._operand_of(name), dtypes=[WIDE[self.family]] if wide else [],
                limits={"chunk": self.choices["chunk"]} if self.choices.get("chunk") else {},
                state_layout=("KV", "VK"),
            )(function)  # fmt: skip
        return made

    def _operand_of(self, operation: str) -> str:
        """Gates have no matrix operands: they are float32 whatever the norms beside them are."""
        return "f32" if operation.endswith("_gate") or operation == "commit_accepted" else self.operand


def build(family: str, choices: Mapping[str, Any]) -> Variation:
    """The variation with these choices; an axis that is left out has its first value."""
    how = arithmetic.Arithmetic(**{key: value for key, value in choices.items() if key in _ARITHMETIC})
    own = {key: value for key, value in choices.items() if key not in (*_ARITHMETIC, "types")}
    said = ", ".join(f"{key} {value}" for key, value in choices.items())
    return Variation(f"{family}: {said}", family, dict(choices), _STYLES[family](arithmetic=how, **own))


@cache
def variations() -> tuple[Variation, ...]:
    """All variations, the same ones in the same order every time."""
    return tuple(build(kind.split()[0], choices) for kind in AXES for choices in drawn(kind))


def drawn(kind: str) -> Iterator[dict[str, Any]]:
    """Of some candidates at a time the one that lets most pairs of values meet that have not met."""
    axes, number = AXES[kind], list(AXES).index(kind)
    met: set[tuple[Any, ...]] = set()
    for n in range(COUNTS[kind]):
        candidates = [
            {axis: values[int(word(SEED, number, (n * CANDIDATES + c) * len(axes) + i)) % len(values)]
             for i, (axis, values) in enumerate(axes.items())}
            for c in range(CANDIDATES)
        ]  # fmt: skip
        best = max(candidates, key=lambda choices: len(pairs(choices) - met))
        met |= pairs(best)
        yield best


def pairs(choices: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """Every two choices."""
    return set(combinations(choices.items(), 2))


UNLAWFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "zero times what the formula does not read": ("conv", {"taps": "band"}),
    "a sigmoid without relative precision": ("gates", {"sigmoid": "tanh"}),
    "a softplus whose small values cancel": ("gates", {"softplus": "logarithm"}),
    "decays added up in bfloat16": ("delta", {"chunk": 48, "scan": "bfloat16"}),
    "sums that are kept in bfloat16": ("ssd", {"total": "bfloat16", "product": "summed"}),
    "decays as quotients": ("delta", {"chunk": 32, "scan": "quotients"}),
}
"""Close neighbours that look as right and are not: the suite must not be silent about any of them."""


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def applicable(variation: Variation, corpus: Mapping[str, Vector]) -> list[Vector]:
    """The vectors of its operations; rejections say nothing of arithmetic."""
    own = variation.style.operations()
    return [vector for vector in corpus.values() if vector["op"] in own and vector["class"] != "reject"]


def sample(corpus: Mapping[str, Vector]) -> Iterator[tuple[Variation, list[Vector]]]:
    """Every variation with vectors of every class it could trip, in turn, so that each vector meets several."""
    for family in _STYLES:
        own = [variation for variation in variations() if variation.family == family]
        classes: dict[tuple[str, str], list[Vector]] = {}
        for vector in applicable(own[0], corpus):
            classes.setdefault(class_of(vector), []).append(vector)
        for n, variation in enumerate(own):
            picked = []
            for members in classes.values():
                meetings = max(len(own), SEVERAL * len(members))
                turns = range(n * meetings // len(own), (n + 1) * meetings // len(own))
                picked += [members[turn % len(members)] for turn in turns]
            yield variation, picked


SEVERAL = 2
"""How many variations a vector meets in the sample at least."""


def class_of(vector: Vector) -> tuple[str, str]:
    """What sort of vector it is: how the operation is called, and how it is judged or that it asks for gradients."""
    form = next((end for end in ("prefill", "update") if vector["op"].endswith(end)), "packed")
    graded = "grad" in vector or "grad" in vector["needs"]["features"]
    return form, "gradient" if graded else vector["class"]


def try_one(adapter: Adapter, vector: Vector, corpus: Mapping[str, Vector]) -> Verdict | Missing:
    """The verdict of the runner's own comparison, every call on a copy; or why the vector does not apply."""
    case = prepare(vector, corpus, adapter.capabilities)
    if isinstance(case, Missing):
        return case
    return execute(case, lambda call, name: invoke(adapter, _copied(call)))


def _copied(call: Call) -> Call:
    """The call on copies of its tensors with the same strides."""
    return replace(call, tensors={name: _copy(array) for name, array in call.tensors.items()})


def _copy(array: Array) -> Array:
    whole = span(array).copy()
    return as_strided(whole, array.shape, array.strides) if array.size else array.copy()
