"""The crosswalk: what the operations of this project are called elsewhere, and the functions that carry tensors over.

`CONVERTERS` change one convention each, there and back, and carry a small pair of numbers that shows it. `LINES`, from
`crosswalk.json`, say for each package and subject what it does, which converter bridges the difference, and where that
can be read. Pages and tests read both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

LEAST_DECAY = -1024.0
"""The least log-decay of the domain (NUM-3): its factor is 0 in every type."""


@dataclass(frozen=True)
class Converter:
    """One convention: `to` carries tensors from here to there, `back` from there to here.

    `example` is carried to `converted` and back again; what does not survive is named in `loses`, and then the pair is
    chosen so that only the named part differs.
    """

    name: str
    says: str
    to: Callable[[Tensors], dict[str, Array]]
    back: Callable[[Tensors], dict[str, Array]]
    example: dict[str, Any]
    converted: dict[str, Any]
    loses: str = ""


@dataclass(frozen=True)
class Line:
    """What one package does about one subject. `how` is "same", names of CONVERTERS, or why there is no way."""

    package: str
    subject: str
    there: str
    how: tuple[str, ...] | str
    source: str


def _each(change: Callable[[Array], Array], *names: str) -> Callable[[Tensors], dict[str, Array]]:
    return lambda tensors: {name: change(x) if not names or name in names else x for name, x in tensors.items()}


def _factor(g: Array) -> Array:
    return np.asarray(np.exp(g))


def _log(alpha: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.maximum(np.log(alpha), LEAST_DECAY))


def _grown(window: Array) -> Array:
    return np.concatenate([np.zeros_like(window[..., :1]), window], axis=-1)


def _null_first(slots: Array) -> Array:
    return np.where(slots < 0, 0, slots + 1).astype(slots.dtype)


def _no_null(slots: Array) -> Array:
    return (slots - 1).astype(slots.dtype)


def _flags(tensors: Tensors) -> dict[str, Array]:
    read, write = tensors["read_slots"], tensors["write_slots"]
    if ((read >= 0) & (read != write)).any():
        raise ValueError("a row that reads one slot and writes another cannot be said with a flag (SLOT-2)")
    return {"cache_indices": write, "has_initial_state": read >= 0}


def _slots(tensors: Tensors) -> dict[str, Array]:
    slots, resumes = tensors["cache_indices"], tensors["has_initial_state"]
    return {"read_slots": np.where(resumes, slots, -1).astype(slots.dtype), "write_slots": slots}


def _ids(tensors: Tensors) -> dict[str, Array]:
    lengths = np.diff(tensors["cu_seqlens"])
    return {"seq_idx": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]}


def _offsets(tensors: Tensors) -> dict[str, Array]:
    ids = tensors["seq_idx"][0]
    counts = np.bincount(ids[ids >= 0], minlength=0)
    return {"cu_seqlens": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)}


def _flat(tensors: Tensors) -> dict[str, Array]:
    return {name: x.reshape(*x.shape[:2], -1) for name, x in tensors.items()}


def _split(heads: int) -> Callable[[Tensors], dict[str, Array]]:
    return lambda tensors: {name: x.reshape(*x.shape[:2], heads, -1) for name, x in tensors.items()}


def product_as_rule(tensors: Tensors, copies: int) -> dict[str, Array]:
    """A delta product as a delta rule over `T*M` tokens: the decay stands at copy 0, the query at the last copy.

    Of the outputs of that rule, rows `M-1::M` are those of the product; its state is the product's.
    """
    g, q = tensors["g"], tensors["q"]
    wide_g = np.zeros((1, g.shape[1] * copies, *g.shape[2:]), g.dtype)
    wide_q = np.zeros((1, q.shape[1] * copies, *q.shape[2:]), q.dtype)
    wide_g[:, ::copies], wide_q[:, copies - 1 :: copies] = g, q
    return {**tensors, "g": wide_g, "q": wide_q}


def rule_as_product(tensors: Tensors, copies: int) -> dict[str, Array]:
    """The way back of `product_as_rule`."""
    return {**tensors, "g": tensors["g"][:, ::copies], "q": tensors["q"][:, copies - 1 :: copies]}


def ssd_as_attention(x: Array, dt: Array, A: Array, B: Array, C: Array) -> dict[str, Array]:
    """Mamba2 as gated linear attention without a correction: q = C, k = B, v = dt x, log-decay dt A, scale 1.

    x `[1, T, H, P]`, dt `[1, T, H]` after softplus and limits, A `[H]`, B and C `[1, T, G, R]`. The state of the
    attention is `[R, P]`, that of Mamba2 `[P, R]`; D x and the gate z come after. Source: https://arxiv.org/abs/2405.21060
    """
    groups = x.shape[2] // B.shape[2]
    return {
        "q": np.repeat(C, groups, axis=2), "k": np.repeat(B, groups, axis=2), "v": x * dt[..., None], "g": dt * A,
    }  # fmt: skip


CONVERTERS: dict[str, Converter] = {
    converter.name: converter
    for converter in (
        Converter(
            "values before keys", "a state `[..., K, V]` is held as `[..., V, K]`",
            _each(lambda s: np.swapaxes(s, -1, -2)), _each(lambda s: np.swapaxes(s, -1, -2)),
            {"state": [[[1, 2, 3], [4, 5, 6]]]}, {"state": [[[1, 4], [2, 5], [3, 6]]]},
        ),
        Converter(
            "window of W-1", "column 0 of a window `[..., C, W]` is not kept",
            _each(lambda w: w[..., 1:]), _each(_grown),
            {"window": [[0, 2, 3, 4]]}, {"window": [[2, 3, 4]]},
            loses="column 0, which leaves with the next token and is read by none",
        ),
        Converter(
            "window by token", "a window `[..., C, W]` lies as `[..., W, C]`",
            _each(lambda w: np.swapaxes(w, -1, -2)), _each(lambda w: np.swapaxes(w, -1, -2)),
            {"window": [[1, 2, 3], [4, 5, 6]]}, {"window": [[1, 4], [2, 5], [3, 6]]},
        ),
        Converter(
            "channels first", "tokens `[batch, T, C]` lie as `[batch, C, T]`",
            _each(lambda x: np.swapaxes(x, 1, 2)), _each(lambda x: np.swapaxes(x, 1, 2)),
            {"x": [[[1, 2], [3, 4], [5, 6]]]}, {"x": [[[1, 3, 5], [2, 4, 6]]]},
        ),
        Converter(
            "no leading axis", "packed tensors `[1, T, ...]` are `[T, ...]`",
            _each(lambda x: x[0]), _each(lambda x: x[None]),
            {"x": [[[1, 2], [3, 4]]]}, {"x": [[1, 2], [3, 4]]},
        ),
        Converter(
            "heads in the last axis", "tensors `[batch, T, H, K]` are `[batch, T, H*K]`",
            _flat, _split(2),
            {"k": [[[[1, 2], [3, 4]], [[5, 6], [7, 8]]]]}, {"k": [[[1, 2, 3, 4], [5, 6, 7, 8]]]},
        ),
        Converter(
            "a key head for each value head", "query and key heads `[.., H, K]` are repeated to `[.., HV, K]`",
            _each(lambda x: np.repeat(x, 2, axis=-2), "q", "k"), _each(lambda x: x[..., ::2, :], "q", "k"),
            {"k": [[[[1, 2], [3, 4]]]]}, {"k": [[[[1, 2], [1, 2], [3, 4], [3, 4]]]]},
        ),
        Converter(
            "decay as a factor", "the factor exp(g) is given, not its logarithm",
            _each(_factor, "g"), _each(_log, "g"), {"g": [0.0, LEAST_DECAY]}, {"g": [1.0, 0.0]},
            loses="nothing at 0 and at -1024; between them one rounding of exp and one of log",
        ),
        Converter(
            "decay in base 2", "g is multiplied by log2(e), and 2 is raised to it",
            _each(lambda g: g / np.log(2), "g"), _each(lambda g: g * np.log(2), "g"), {"g": [0.0]}, {"g": [0.0]},
            loses="one rounding each way",
        ),
        Converter(
            "rate as A", "A = -exp(A_log) is given, not A_log",
            lambda tensors: {"A": -np.exp(tensors["A_log"])}, lambda tensors: {"A_log": np.log(-tensors["A"])},
            {"A_log": [0.0]}, {"A": [-1.0]}, loses="one rounding each way",
        ),
        Converter(
            "null slot first", "slot 0 of the pool takes what padding rows write, so real slots are one higher",
            _each(_null_first), _each(_no_null), {"slots": [2, -1, 0]}, {"slots": [3, 0, 1]},
            loses="which negative number stood there",
        ),
        Converter(
            "fresh by a flag", "a row has one slot, and a flag whether it resumes from it",
            _flags, _slots,
            {"read_slots": [2, -1, -1], "write_slots": [2, 0, -1]},
            {"cache_indices": [2, 0, -1], "has_initial_state": [True, False, False]},
            loses="rows that read one slot and write another, and rows that are scored only: they cannot be said",
        ),
        Converter(
            "accepted tokens with the base", "num_accepted counts the base token as well",
            _each(lambda n: n + 1), _each(lambda n: n - 1), {"num_accepted": [0, 2]}, {"num_accepted": [1, 3]},
        ),
        Converter(
            "ids for offsets", "boundaries are ids `[1, T]`, one for each row",
            _ids, _offsets, {"cu_seqlens": [0, 2, 3]}, {"seq_idx": [[0, 0, 1]]},
            loses="empty segments at the end, and rows past the last offset: there are no ids for them",
        ),
        Converter(
            "a weight with a middle axis", "taps `[C, W]` are `[C, 1, W]`",
            _each(lambda w: w[:, None, :], "weight"), _each(lambda w: w[:, 0, :], "weight"),
            {"weight": [[1, 2], [3, 4]]}, {"weight": [[[1, 2]], [[3, 4]]]},
        ),
        Converter(
            "copies as tokens", "a product of M copies is a rule over T*M tokens (M = 2 in the example)",
            lambda tensors: product_as_rule(tensors, 2), lambda tensors: rule_as_product(tensors, 2),
            {"g": [[[-1.0], [-2.0]]], "q": [[[[1.0]], [[2.0]]]]},
            {"g": [[[-1.0], [0.0], [-2.0], [0.0]]], "q": [[[[0.0]], [[1.0]], [[0.0]], [[2.0]]]]},
        ),
    )
}  # fmt: skip

SUBJECTS = (
    "names", "axes", "state", "window", "gates", "scale and epsilon", "boundaries", "slots and padding", "drafts"
)  # fmt: skip


def _line(row: Mapping[str, Any]) -> Line:
    how = row["how"] if isinstance(row["how"], str) else tuple(row["how"])
    return Line(row["package"], row["subject"], row["there"], how, row["source"])


LINES: tuple[Line, ...] = tuple(
    _line(row) for row in json.loads(files("statescan.spec").joinpath("crosswalk.json").read_text("utf-8"))
)


def packages() -> tuple[str, ...]:
    """The packages in the order of the table."""
    return tuple(dict.fromkeys(line.package for line in LINES))
