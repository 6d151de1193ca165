"""The models of the recurrences, gates and norms: right without a fault, wrong with each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from statescan.conformance.mutants import delta as delta_models
from statescan.conformance.mutants import gates as gate_models
from statescan.conformance.mutants import ssd as ssd_models
from statescan.reference import delta, delta_grad, gates, norms, ssd, ssd_grad
from statescan.reference.arrays import DTYPES, Array, widen
from statescan.spec.contract import ContractError

DELTA = ("gated_delta_rule", "gated_delta_product", "kimi_delta_attention")
GATES = ("softplus_gate", "kda_gate", "beta_gate", "l2norm", "rmsnorm_gated")
REFERENCE: dict[str, Callable[..., Any]] = {
    **{f"{name}{end}": getattr(delta, f"{name}{end}") for name in DELTA for end in ("", "_prefill", "_update")},
    **{f"{name}_grad": getattr(delta_grad, f"{name}_grad") for name in DELTA},
    **{name: getattr(ssd, name) for name in ("ssd", "ssd_prefill", "ssd_update")}, "ssd_grad": ssd_grad.ssd_grad,
    "commit_accepted": delta.commit_accepted,
    **{f"{name}{end}": getattr(gates if "gate" in name and name != "rmsnorm_gated" else norms, f"{name}{end}")
       for name in GATES for end in ("", "_grad")},
}  # fmt: skip
F = -1024.0
FINE = {"f64": (1 + 2.0**-8 + 2.0**-30, 1 + 2.0**-11 + 2.0**-30), "f32": (1 + 2.0**-8, 1 + 3 * 2.0**-9),
        "bf16": (1 + 2.0**-7, 1.0), "f16": (1 + 2.0**-10, 1.0)}  # fmt: skip
"""Numbers that a narrower type rounds, or rounds otherwise by way of float32."""
CLOSE = 2.0**-44


class Case(NamedTuple):
    """One call: the operation and its arguments; exact where no sum in it can round."""

    op: str
    given: dict[str, Any]
    exact: bool = True
    again: bool = False  # sent twice


class Draw:
    """Numbers of one seed; the same seed gives the same call, in fresh memory with the same strides."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one_of(self, *values: Any) -> Any:
        return values[self.below(len(values))]

    def index(self, values: Any) -> Array:
        return np.array(values, self.one_of(np.int32, np.int64))

    def laid_out(self, values: Array, dtype: str) -> Array:
        """The values in a type, in C order, in another order or with gaps between them."""
        narrow, layout = values.astype(DTYPES[dtype]), self.below(4)
        if layout == 0:
            wide = np.full([2 * n + 1 for n in narrow.shape], np.nan).astype(narrow.dtype)
            view = wide[tuple(slice(1, None, 2) for _ in narrow.shape)]
            view[...] = narrow
            return view
        return np.asfortranarray(narrow) if layout == 1 else narrow

    def among(self, values: tuple[float, ...], *shape: int) -> Array:
        return np.asarray(self.rng.choice(values, shape))

    def integers(self, *shape: int) -> Array:
        """Integers of either sign, never 0."""
        return self.among((-5.0, -4.0, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0, 4.0, 5.0), *shape)


# ---------------------------------------------------------------------------------------------------------------------
# Rows and slots
# ---------------------------------------------------------------------------------------------------------------------


def _offsets(draw: Draw, rows: int) -> list[int]:
    return np.cumsum([0, *(draw.one_of(0, 1, 2, 3, 4, 5, 9) for _ in range(rows))]).tolist()


def _slots(draw: Draw, rows: int) -> tuple[list[int], list[int], int]:
    """Legal read and write slots of every kind, and the size of the pool."""
    slots = rows + 2 + draw.below(2)
    free = draw.rng.permutation(slots - 2).tolist()
    shared = [slots - 1, slots - 2] if draw.chance(0.5) else [slots - 2]  # only ever read, maybe by two rows
    read, write = [], []
    for _ in range(rows):
        kind, slot = draw.one_of("same", "same", "split", "fresh", "score", "padding"), free.pop()
        none = draw.one_of(-1, -1, -2, -9)
        read.append({"same": slot, "split": draw.one_of(*shared), "score": draw.one_of(*shared)}.get(kind, none))
        write.append(slot if kind in ("same", "split", "fresh") else draw.one_of(-1, -1, -3))
    return read, write, slots


def _on_pool(draw: Draw, mixer: Mixer, rows: int) -> dict[str, Any]:
    read, write, slots = _slots(draw, rows)
    pool = mixer.states(draw, slots)
    for slot in range(slots):
        if slot not in read and draw.chance(0.7):
            pool[slot] = np.nan
    same = all(r == w or max(r, w) < 0 for r, w in zip(read, write, strict=True))
    return {"state_pool": pool, "read_slots": draw.index(read),
            "write_slots": None if same and draw.chance(0.5) else draw.index(write)}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Tokens of the two families
# ---------------------------------------------------------------------------------------------------------------------


class Mixer:
    """A family with sizes drawn: what its tokens, parameters and states look like."""

    copies = 1
    settings: Mapping[str, Any]
    layout = "KV"

    def __init__(self, draw: Draw, name: str, exact: bool) -> None:
        self.name, self.exact = name, exact
        self.dtype = draw.one_of("f32", "bf16", "f64", "f16") if exact else draw.one_of("f32", "f64")
        self.pool = draw.one_of("f32", "bf16", "f64") if exact else "f64"

    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def tokens(self, draw: Draw, lead: int, steps: int) -> dict[str, Array]:
        raise NotImplementedError

    def parameters(self, draw: Draw) -> dict[str, Any]:
        return {}

    def poison(self, tensors: Mapping[str, Array], row: int, tokens: slice) -> None:
        """Fill what belongs to some tokens with NaN."""
        for name, tensor in tensors.items():
            wide = self.copies if name in ("k", "v", "beta") else 1
            tensor[row, tokens.start * wide : tokens.stop * wide] = np.nan

    def states(self, draw: Draw, *lead: int) -> Array:
        values = draw.integers(*lead, *self.shape())
        if self.exact and self.copies == 1 and draw.chance(0.2):
            values = draw.among(FINE[self.pool], *values.shape)
        return draw.laid_out(values if self.exact else draw.rng.normal(size=values.shape), self.pool)


class Delta(Mixer):
    def __init__(self, draw: Draw, name: str, exact: bool) -> None:
        super().__init__(draw, name, exact)
        self.copies = 1 + draw.below(3) if name == "gated_delta_product" else 1
        self.H = 1 + draw.below(2)
        self.HV = self.H * draw.one_of(1, 2, 2)
        self.K, self.V = draw.one_of(1, 2, 3, 4), draw.one_of(1, 2, 3, 4)
        if draw.chance(0.3):
            self.V = self.K
        root = self.K in (1, 4) or not exact
        self.settings = {"scale": draw.one_of(1.0, 0.5, 2.0, *([None, None] if root else []))}
        if not exact and draw.chance(0.5):
            self.settings = {**self.settings, "use_qk_l2norm": True}
        if name == "gated_delta_product":
            self.settings = {**self.settings, "num_householder": self.copies}

    def shape(self) -> tuple[int, ...]:
        return (self.HV, self.V, self.K) if self.layout == "VK" else (self.HV, self.K, self.V)

    def keys(self, draw: Draw, *lead: int) -> Array:
        if not self.exact:
            keys = draw.rng.normal(size=(*lead, self.K)) / self.K**0.5
            return keys * draw.among((0.0, 1.0, 1.0, 1.0), *lead, 1)
        if self.copies == 1 and draw.chance(0.3):
            return draw.among((-1.0, 0.0, 1.0), *lead, self.K)
        return np.eye(self.K)[draw.rng.integers(self.K, size=lead)]

    def tokens(self, draw: Draw, lead: int, steps: int) -> dict[str, Array]:
        wide, channels = steps * self.copies, (self.K,) if self.name == "kimi_delta_attention" else ()
        g = draw.among((0.0, 0.0, 0.0, F), lead, steps, self.HV, *channels)
        beta = draw.among((0.0, 0.5, 1.0, 1.0, 2.0), lead, wide, self.HV)
        v = draw.integers(lead, wide, self.HV, self.V)
        v = draw.among(FINE[self.dtype], *v.shape) if self.copies == 1 and draw.chance(0.2) else v
        if not self.exact:
            speed = draw.among((2.0**-6, 1.0, 30.0), 1, 1, self.HV, *[1] * len(channels))
            g, beta, v = -draw.rng.random(g.shape) * speed, draw.rng.random(beta.shape), draw.rng.normal(size=v.shape)
        gdtype = draw.one_of("f32", "f64") if self.exact else "f64"
        return {
            "q": draw.laid_out(self.keys(draw, lead, steps, self.H), self.dtype),
            "k": draw.laid_out(self.keys(draw, lead, wide, self.H), self.dtype), "v": draw.laid_out(v, self.dtype),
            "g": draw.laid_out(g, gdtype), "beta": draw.laid_out(beta, gdtype),
        }  # fmt: skip


class Ssd(Mixer):
    def __init__(self, draw: Draw, name: str, exact: bool) -> None:
        super().__init__(draw, name, exact)
        self.G = 1 + draw.below(2)
        self.H = self.G * draw.one_of(1, 2, 2)
        self.P, self.R = draw.one_of(1, 2, 3), draw.one_of(1, 2, 3)
        limit = draw.one_of(*[(0.0, float("inf"))] * 3, (0.5, 1.0), (0.0, 0.25))
        self.settings = {"dt_softplus": not exact, "dt_limit": limit}

    def shape(self) -> tuple[int, ...]:
        return self.H, self.P, self.R

    def tokens(self, draw: Draw, lead: int, steps: int) -> dict[str, Array]:
        def numbers(*shape: int) -> Array:
            return draw.integers(lead, steps, *shape) if self.exact else draw.rng.normal(size=(lead, steps, *shape))

        dt = draw.among((0.0, 0.5, 1.0, 2.0), lead, steps, self.H)
        dt = dt if self.exact else draw.rng.normal(size=dt.shape) * draw.one_of(1.0, 1.0, 60.0)
        tokens = {"x": numbers(self.H, self.P), "dt": dt, "B": numbers(self.G, self.R), "C": numbers(self.G, self.R)}
        if not self.exact and draw.chance(0.6):
            tokens["z"] = numbers(self.H, self.P)
        return {name: draw.laid_out(values, self.dtype) for name, values in tokens.items()}

    def parameters(self, draw: Draw) -> dict[str, Any]:
        A = draw.among((0.0, 4 * F, 4 * F), self.H) if self.exact else -draw.rng.random(self.H) * 4
        skip = draw.integers(self.H, self.P)
        given: dict[str, Any] = {"A": A, "D": draw.one_of(None, skip, skip[:, 0].copy()), "dt_bias": None}
        if draw.chance(0.5):
            given["dt_bias"] = draw.among((-0.5, 0.0, 1.0), self.H) * (1.0 if self.exact else draw.one_of(1.0, 40.0))
        return given


def _mixer(draw: Draw, family: str, exact: bool) -> Mixer:
    return Ssd(draw, "ssd", exact) if family == "ssd" else Delta(draw, draw.one_of(*DELTA), exact)


# ---------------------------------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------------------------------


def _packed(draw: Draw, family: str, exact: bool) -> Case:
    mixer, rows = _mixer(draw, family, exact), draw.below(4)
    form = draw.one_of("offsets", "offsets", "none", *(["ids", "both"] if isinstance(mixer, Ssd) else []))
    offsets, tail = _offsets(draw, rows), draw.one_of(0, 0, 1, 3)
    if form == "none":
        rows, offsets, tail = 1, [0, draw.one_of(0, 1, 3, 9)], 0
    tokens = mixer.tokens(draw, 1, offsets[-1] + tail)
    extra = form == "ids" and draw.chance(0.5)
    if not extra and draw.chance(0.7):
        mixer.poison(tokens, 0, slice(offsets[-1], offsets[-1] + tail))
    if draw.chance(0.2) and offsets[-1]:
        for name in {"q", "k", "v", "x", "B", "C"} & set(tokens):
            wide = mixer.copies if name in ("k", "v") else 1
            tokens[name][:, (offsets[-1] - 1) * wide : offsets[-1] * wide] = 0
    given = {**tokens, **mixer.parameters(draw), **mixer.settings, "output_final_state": draw.chance(0.8)}
    given["cu_seqlens"] = draw.index(offsets) if form in ("offsets", "both") else None
    if form in ("ids", "both"):
        behind = rows if extra or (form == "both" and draw.chance(0.5)) else -1
        given["seq_idx"] = draw.index([[*np.repeat(np.arange(rows), np.diff(offsets)), *[behind] * tail]])
    if draw.chance(0.7):
        given["initial_state"] = mixer.states(draw, rows + extra)
    return Case(mixer.name, given, exact, draw.chance(0.2))


def _gradient(draw: Draw, family: str, exact: bool) -> Case:
    name, given, *_ = _packed(draw, family, exact)
    given = {**given, "output_final_state": True}
    result = "y" if name == "ssd" else "o"
    output, final = REFERENCE[name](**given)
    cotangents = {}
    if draw.chance(0.9):
        cotangents[result] = draw.laid_out(draw.integers(*output.shape), "f32")
    if draw.chance(0.7):
        cotangents["final_state"] = draw.laid_out(draw.integers(*final.shape), "f64")
    return Case(f"{name}_grad", {"cotangents": cotangents, **given}, exact)


def _prefill(draw: Draw, family: str, exact: bool) -> Case:
    mixer, rows = _mixer(draw, family, exact), draw.below(4)
    if isinstance(mixer, Delta):
        mixer.layout = draw.one_of("KV", "VK")
    offsets, tail = _offsets(draw, rows), draw.one_of(0, 0, 1, 3)
    tokens = mixer.tokens(draw, 1, offsets[-1] + tail)
    if draw.chance(0.7):
        mixer.poison(tokens, 0, slice(offsets[-1], offsets[-1] + tail))
    given = {**tokens, **mixer.parameters(draw), **mixer.settings, "cu_seqlens": draw.index(offsets)}
    given |= _on_pool(draw, mixer, rows)
    _poison_padding(mixer, tokens, given)
    if isinstance(mixer, Delta):
        given["state_layout"] = mixer.layout
    if draw.chance(0.6):
        places = [draw.one_of(-1, 1 + draw.below(offsets[-1])) if offsets[-1] else -1 for _ in range(draw.below(4))]
        given |= {"snapshot_positions": draw.index(places), "snapshot_states": mixer.states(draw, len(places))}
    return Case(f"{mixer.name}_prefill", _complete(mixer, given), exact)


def _update(draw: Draw, family: str, exact: bool) -> Case:
    mixer, rows, steps = _mixer(draw, family, exact), draw.below(4), 1 + draw.below(4)
    if isinstance(mixer, Delta):
        mixer.layout = draw.one_of("KV", "VK")
    tokens = mixer.tokens(draw, rows, steps)
    given = {**tokens, **mixer.parameters(draw), **mixer.settings, **_on_pool(draw, mixer, rows)}
    if isinstance(mixer, Delta):
        given["state_layout"] = mixer.layout
    if draw.chance(0.6):
        entries = steps + draw.below(2)
        given["intermediate_states"] = mixer.states(draw, len(given["state_pool"]), entries)
        if draw.chance(0.6):
            given["num_accepted"] = draw.index([draw.below(entries + 1) - 1 for _ in range(rows)])
    if draw.chance(0.4):
        given["num_tokens"] = draw.index([draw.below(steps + 1) for _ in range(rows)])
        for row, length in enumerate(given["num_tokens"].tolist()):
            mixer.poison(tokens, row, slice(length, steps))
    _poison_padding(mixer, tokens, given)
    return Case(f"{mixer.name}_update", _complete(mixer, given), exact)


def _poison_padding(mixer: Mixer, tokens: Mapping[str, Array], given: Mapping[str, Any]) -> None:
    """NaN in the tokens of padding rows."""
    read, write, offsets = given["read_slots"], given["write_slots"], given.get("cu_seqlens")
    for n in np.flatnonzero(np.maximum(read, read if write is None else write) < 0).tolist():
        if offsets is None:
            mixer.poison(tokens, n, slice(0, next(iter(tokens.values())).shape[1]))
        else:
            mixer.poison(tokens, 0, slice(int(offsets[n]), int(offsets[n + 1])))


def _complete(mixer: Mixer, given: dict[str, Any]) -> dict[str, Any]:
    """Mamba2's optional tensors stand before required ones: None where absent."""
    return {**{name: None for name in ("D", "z", "dt_bias") if isinstance(mixer, Ssd)}, **given}


def _long(draw: Draw, family: str, exact: bool) -> Case:
    """One row of 70 tokens whose state needs more bits than bfloat16 has."""
    tokens, one = 70, np.ones((1, 70, 1, 1))
    given: dict[str, Any] = {"cu_seqlens": draw.index([0, tokens]), "initial_state": np.full((1, 1, 1, 1), 257.0),
                             "output_final_state": True}  # fmt: skip
    if family == "delta":
        none = np.zeros((1, tokens, 1))
        return Case("gated_delta_rule", {"q": one, "k": one, "v": one, "g": none, "beta": none, "scale": 1.0, **given})
    given |= {"x": one, "dt": one[0], "A": np.zeros(1), "B": one, "C": one, "dt_softplus": False}
    given["dt"] = np.zeros((1, tokens, 1))
    return Case("ssd", given)


def _commit(draw: Draw, family: str, exact: bool) -> Case:
    rows = draw.below(3)
    slots = 1 + rows + draw.below(2)
    shapes, dtype, entries = ((2, 3), (1, 2, 2)), draw.one_of("f32", "bf16"), 1 + draw.below(3)
    named = draw.rng.permutation(slots)[:rows]
    given = {
        "pools": [draw.laid_out(draw.integers(slots, *shape), dtype) for shape in shapes],
        "intermediates": [draw.laid_out(draw.integers(slots, entries, *shape), dtype) for shape in shapes],
        "slots": draw.index([draw.one_of(slot, slot, slot, -1, -3) for slot in named]),
        "num_accepted": draw.index([draw.below(entries + 1) - 1 for _ in range(rows)]),
    }
    return Case("commit_accepted", given)


def _gate(draw: Draw, family: str, exact: bool) -> Case:
    """Gates and norms; of their functions none is exact."""
    name, lead = draw.one_of(*GATES), (draw.one_of(1, 3), 1 + draw.below(3))
    heads, keys, dtype = 1 + draw.below(3), draw.one_of(1, 2, 4), draw.one_of("bf16", "f32", "f64")
    pdtype = draw.one_of("bf16", "f32", "f64")

    def normal(*shape: int, kind: str = dtype) -> Array:
        size = draw.one_of(1.0, 1.0, 6.0, 50.0) if name.endswith("gate") else draw.one_of(1.0, 2.0**-10)
        return draw.laid_out(draw.rng.normal(size=shape) * size, kind)

    if name == "softplus_gate":
        given = {"a": normal(*lead, heads), "A_log": normal(heads, kind=pdtype) / 8}
        given["dt_bias"] = draw.one_of(None, normal(heads, kind=pdtype))
    elif name == "kda_gate":
        given = {"f": normal(*lead, heads, keys), "A_log": draw.one_of(None, normal(heads, kind=pdtype) / 8),
                 "dt_bias": draw.one_of(None, normal(heads, keys, kind=pdtype)),
                 "lower_bound": draw.one_of(None, -5.0)}  # fmt: skip
    elif name == "beta_gate":
        given = {"b": normal(*lead, heads), "allow_neg_eigval": draw.chance(0.5)}
    elif name == "l2norm":
        given = {"x": normal(*lead, keys), "eps": draw.one_of(1e-6, 7.0)}
        given["x"][0, 0] = 0
    elif draw.chance(0.2):
        wide = np.full(keys, 1 + 2.0**-8 + 2.0**-30)
        return Case(name, {"x": np.ones((*lead, keys), DTYPES[dtype]), "z": None, "weight": wide, "eps": 0.0})
    else:
        size = draw.one_of(None, keys)
        given = {"x": normal(*lead, 2 * keys), "z": draw.one_of(None, normal(*lead, 2 * keys)), "group_size": size,
                 "weight": normal(draw.one_of(2 * keys, size or 2 * keys), kind=pdtype),
                 "norm_before_gate": draw.chance(0.5), "gate_activation": draw.one_of("silu", "sigmoid")}  # fmt: skip
    if draw.chance(0.6):
        return Case(name, given, False)
    result = {"beta_gate": "beta", "softplus_gate": "g", "kda_gate": "g"}.get(name, "y")
    shape = next(iter(given.values())).shape
    return Case(f"{name}_grad", {"cotangents": {result: draw.integers(*shape)}, **given}, False)


KINDS: dict[str, tuple[Callable[[Draw, str, bool], Case], ...]] = {
    "delta": (_packed, _prefill, _update, _gradient, _prefill, _update, _packed, _commit, _prefill, _update, _long),
    "ssd": (_packed, _prefill, _update, _gradient, _prefill, _update, _packed, _long),
    "gates": (_gate,),
}

# ---------------------------------------------------------------------------------------------------------------------
# Calls that must be refused
# ---------------------------------------------------------------------------------------------------------------------


def _bad_delta(end: str, **change: Any) -> Case:
    """Two rows of two and four tokens, or of three, on three slots."""
    lead, steps = (2, 3) if end == "_update" else (1, 6)
    one = np.ones((lead, steps, 2, 1))
    given: dict[str, Any] = {"q": one, "k": one, "v": one, "g": 0 * one[..., 0], "beta": one[..., 0]}
    if end:
        given |= {"state_pool": np.full((3, 2, 1, 1), 5.0), "read_slots": np.array([0, 2])}
    if end != "_update":
        given["cu_seqlens"] = np.array([0, 2, 6])
    return Case(f"gated_delta_rule{end}", {**given, **change})


def _bad_ssd(end: str, **change: Any) -> Case:
    lead, steps = (2, 3) if end == "_update" else (1, 6)
    one = np.ones((lead, steps, 2, 1))
    given: dict[str, Any] = {"x": one, "dt": one[..., 0], "A": -np.ones(2), "B": one, "C": one, "D": None, "z": None,
                             "dt_bias": None}  # fmt: skip
    if end:
        given |= {"state_pool": np.full((3, 2, 1, 1), 5.0), "read_slots": np.array([0, 2])}
    if end != "_update":
        given["cu_seqlens"] = np.array([0, 2, 6])
    return Case(f"ssd{end}", {**given, **change})


def _bad_commit(**change: Any) -> Case:
    given = {"pools": [np.ones((2, 1))], "intermediates": [2 * np.ones((2, 3, 1))], "slots": np.array([0, 1]),
             "num_accepted": np.array([0, 2])}  # fmt: skip
    return Case("commit_accepted", {**given, **change})


def _refused(leading: str, bad: Callable[..., Case]) -> list[Callable[[], Case]]:
    """What both families refuse."""
    wide = {name: np.ones((2, 6, 2, 1)) if name not in ("dt", "g", "beta") else np.zeros((2, 6, 2))
            for name in (("q", "k", "v", "g", "beta") if leading == "q" else ("x", "dt", "B", "C"))}  # fmt: skip
    return [partial(bad, end, **change) for end, change in (
        ("", {"cu_seqlens": np.array([0, 5, 4])}), ("", {"cu_seqlens": np.array([0, 7])}),
        ("", {"cu_seqlens": np.array([0.0, 6.0])}), ("", {**wide, "cu_seqlens": np.array([0, 4, 12])}),
        ("", {"initial_state": np.ones((3, 2, 1, 1))}),
        ("_prefill", {"read_slots": np.array([1, 1])}), ("_prefill", {"read_slots": np.array([0, 3])}),
        ("_prefill", {"read_slots": np.array([0, 1]), "write_slots": np.array([2, 0])}),
        ("_prefill", {"snapshot_positions": np.array([1])}),
        ("_prefill", {"snapshot_positions": np.array([7]), "snapshot_states": np.zeros((1, 2, 1, 1))}),
        ("_update", {"intermediate_states": np.zeros((3, 2, 2, 1, 1))}),
        ("_update", {"intermediate_states": np.zeros((3, 4, 2, 1, 1)), "num_accepted": np.array([4, 0])}),
        ("_update", {"num_accepted": np.array([0, 0])}), ("_update", {"num_tokens": np.array([4, 0])}),
    )]  # fmt: skip


THREE = np.ones((1, 6, 3, 1))
BAD: dict[str, list[Callable[[], Case]]] = {
    "delta": [
        *_refused("q", _bad_delta),
        partial(_bad_delta, "", g=np.full((1, 6, 2), 0.5)), partial(_bad_delta, "", g=np.full((1, 6, 2), -2000.0)),
        partial(_bad_delta, "", v=THREE, g=0 * THREE[..., 0], beta=THREE[..., 0]),
        partial(_bad_delta, "_prefill", state_pool=np.full((3, 2, 2, 1), 5.0), v=np.ones((1, 6, 2, 2))),
        partial(_bad_delta, "_update", state_layout="KVH"), partial(_bad_commit, slots=np.array([1, 1])),
        partial(_bad_commit, slots=np.array([0, 2])), partial(_bad_commit, num_accepted=np.array([3, 0])),
        partial(_bad_commit, intermediates=[]),
    ],
    "ssd": [
        *_refused("x", _bad_ssd), partial(_bad_ssd, "", dt_limit=(1.0, 0.0)),
        partial(_bad_ssd, "", x=THREE, dt=THREE[..., 0], A=-np.ones(3)),
        partial(_bad_ssd, "", cu_seqlens=None, seq_idx=np.array([[0, 1, 2, 0, 1, 2]])),
        partial(_bad_ssd, "", cu_seqlens=np.array([0, 3, 6]), seq_idx=np.array([[0, 0, 1, 1, 1, 1]])),
    ],
    "gates": [
        lambda: Case("kda_gate", {"f": np.zeros((1, 1, 1)), "lower_bound": 1.0}, False),
        lambda: Case("rmsnorm_gated", {"x": np.ones((1, 4)), "z": None, "weight": np.ones(4), "group_size": 3}, False),
    ],
}  # fmt: skip
MOST_CASES = 1200


def case(family: str, number: int) -> Case:
    """Call `number` of a family: the refused ones first, then one of every kind by turns; one in three not exact."""
    if number < len(BAD[family]):
        return BAD[family][number]()
    kinds = KINDS[family]
    return kinds[number % len(kinds)](Draw(number), family, number % 3 != 0)


# ---------------------------------------------------------------------------------------------------------------------
# What a call does
# ---------------------------------------------------------------------------------------------------------------------


def outcome(operations: Mapping[str, Callable[..., Any]], family: str, number: int) -> list[Any]:
    """All that call `number` returns, or its refusal, and what it leaves in its arguments: arrays and words."""
    found: list[Any] = []
    for _ in range(1 + case(family, number).again):
        call = case(family, number)
        try:
            result = operations[call.op](**call.given)
        except ValueError as error:
            if not isinstance(error, ContractError) and type(error) is not ValueError:
                raise
            result = [type(error).__name__, str(error)]
        found += [*_parts(result), *_parts(call.given)]
    return found


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [part for name in sorted(value) for part in _parts(value[name])]
    return [part for one in value for part in _parts(one)] if isinstance(value, (tuple, list)) else [value]


def alike(first: list[Any], second: list[Any], within: float) -> bool:
    """Same types, shapes and words, and numbers that are apart by at most a part of the largest, or of 1 where that is
    smaller; 0: the same numbers, whatever 0's sign."""
    return len(first) == len(second) and all(_alike(a, b, within) for a, b in zip(first, second, strict=True))


def _alike(first: Any, second: Any, within: float) -> bool:
    if not isinstance(first, np.ndarray) or not isinstance(second, np.ndarray):
        return bool(type(first) is type(second) and first == second)
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    a, b = widen(first), widen(second)
    unit = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}.get(first.dtype.name, 0.0)
    bound = max(within, unit) * np.abs(b[np.isfinite(b)]).max(initial=1.0) if within else 0.0
    with np.errstate(invalid="ignore"):
        return bool(((np.abs(a - b) <= bound) | (a == b) | (np.isnan(a) & np.isnan(b))).all())


def within(family: str, number: int) -> float:
    """How far two right models may be apart in call `number`."""
    return 0.0 if case(family, number).exact else CLOSE


class Part(NamedTuple):
    """One model: which calls it serves, how it is built, the faults it knows."""

    family: str
    build: Callable[[str | None], Mapping[str, Callable[..., Any]]]
    faults: tuple[str, ...]


PARTS: dict[str, Part] = {
    "gates": Part("gates", gate_models.build, gate_models.FAULTS),
    "delta": Part("delta", delta_models.build, delta_models.FAULTS),
    "ssd": Part("ssd", ssd_models.build, ssd_models.FAULTS),
    "delta-chunked": Part("delta", delta_models.build_chunked, delta_models.CHUNKED_FAULTS),
    "ssd-chunked": Part("ssd", ssd_models.build_chunked, ssd_models.CHUNKED_FAULTS),
    "delta-long-chunks": Part("delta", partial(delta_models.build_chunked, chunk=64), ()),
    "ssd-long-chunks": Part("ssd", partial(ssd_models.build_chunked, chunk=64), ()),
}
MODELS = {name: part.build(None) for name, part in PARTS.items()}
COMPARED = {"delta": 400, "ssd": 300, "gates": 300}


@cache
def expected(family: str, number: int) -> list[Any]:
    """What the reference makes of a call."""
    return outcome(REFERENCE, family, number)


@cache
def right(part: str, number: int) -> list[Any]:
    """What a model without a fault makes of a call."""
    return outcome(MODELS[part], PARTS[part].family, number)


# ---------------------------------------------------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_model_has_the_signatures_of_the_reference(part: str) -> None:
    for name, function in MODELS[part].items():
        assert inspect.signature(function) == inspect.signature(REFERENCE[name]), name
    assert {name for name in MODELS[part] if not name.startswith("commit")} == {
        name for name in REFERENCE if PARTS[part].family == family_of(name)
    }


def family_of(name: str) -> str:
    """The family that an operation or gradient belongs to."""
    if name.startswith("ssd"):
        return "ssd"
    return "delta" if name.startswith(DELTA) else "gates" if name.startswith(GATES) else ""


@pytest.mark.parametrize("part", PARTS)
def test_the_model_is_the_reference(part: str) -> None:
    """The same numbers in exact calls, within 2^-44 in others; refusals word for word."""
    family = PARTS[part].family
    for number in range(COMPARED[family]):
        assert alike(right(part, number), expected(family, number), within(family, number)), (number, case(
            family, number))  # fmt: skip


@pytest.mark.parametrize("name", [*DELTA, "ssd"])
def test_long_rows_cross_chunks(name: str) -> None:
    """Rows around one and two chunks of 64; a decay of exp(-1024) here and there costs its neighbours nothing."""
    draw, offsets = Draw(1), np.array([0, 0, 1, 64, 128, 193, 323])
    mixer = (Ssd if name == "ssd" else Delta)(draw, name, False)
    tokens = mixer.tokens(draw, 1, 323)
    gate = tokens["dt" if name == "ssd" else "g"]
    gate[draw.rng.random(gate.shape) < 0.1] = 1024 if name == "ssd" else F
    given = {**tokens, **mixer.parameters(draw), **mixer.settings, "cu_seqlens": offsets}
    given |= {"initial_state": mixer.states(draw, 6), "output_final_state": True}
    wanted = _parts(REFERENCE[name](**given))
    for part in (part for part, model in MODELS.items() if name in model):
        assert alike(_parts(MODELS[part][name](**given)), wanted, CLOSE), part


@pytest.mark.parametrize("family", BAD)
def test_refused_calls_are_refused(family: str) -> None:
    for number in range(len(BAD[family])):
        assert str(expected(family, number)[0]).endswith("Error"), case(family, number)


@pytest.mark.parametrize(("part", "fault"), [(name, fault) for name, part in PARTS.items() for fault in part.faults])
def test_a_fault_shows(part: str, fault: str) -> None:
    """Some call tells the mutant from the model by more than a rounding."""
    family, operations = PARTS[part].family, PARTS[part].build(fault)
    assert any(
        not alike(outcome(operations, family, number), right(part, number), 2.0**10 * within(family, number))
        for number in range(MOST_CASES)
    )
