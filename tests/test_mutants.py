"""The models behind the mutants: right without a fault, wrong with each, and all of them in the catalogue."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.resources import files
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from statescan.conformance.mutants import FAULTS, faults_of, models, mutant
from statescan.reference import conv, packed
from statescan.reference.arrays import DTYPES, Array
from statescan.spec.contract import CLAUSES, ContractError, PackedSeqParams

REFERENCE: dict[str, Callable[..., Any]] = {
    **{name: getattr(conv, name) for name in (
        "causal_conv1d", "causal_conv1d_prefill", "causal_conv1d_update", "causal_conv1d_grad")},
    **{name: getattr(packed, name) for name in (
        "get_cu_seqlens", "build_packed_seq_idx", "check_fla_sequence_packing_support",
        "check_mamba_sequence_packing_support")},
}  # fmt: skip
MOST_CASES = 900


class Case(NamedTuple):
    """One call: the operation, its arguments, the package versions it finds."""

    op: str
    given: dict[str, Any]
    installed: Mapping[str, str | None] = {}


# ---------------------------------------------------------------------------------------------------------------------
# Random calls: small integers, so that every sum is exact
# ---------------------------------------------------------------------------------------------------------------------


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

    def integers(self, *shape: int, dtype: str) -> Array:
        """Integers in -4..4, in C order, in another order or with gaps between them."""
        values = self.rng.integers(-4, 5, shape).astype(np.float64).astype(DTYPES[dtype])
        layout = self.below(4)
        if layout == 0:
            wide = np.full([2 * n + 1 for n in shape], np.nan).astype(DTYPES[dtype])
            view = wide[tuple(slice(1, None, 2) for _ in shape)]
            view[...] = values
            return view
        return np.asfortranarray(values) if layout == 1 else values


def _conv_parts(draw: Draw) -> tuple[int, int, str, dict[str, Any]]:
    """Channels, width, type of x, and the arguments every convolution has."""
    channels, width, dtype = 1 + draw.below(3), 2 + draw.below(3), draw.one_of("f32", "bf16", "f64", "f16")
    wdtype = draw.one_of("f32", "bf16")
    bias = draw.integers(channels, dtype=wdtype) if draw.chance(0.5) else None
    activation = draw.one_of("silu", "swish") if draw.chance(0.3) else None
    weight = draw.integers(channels, width, dtype=wdtype)
    return channels, width, dtype, {"weight": weight, "bias": bias, "activation": activation}


def _offsets(draw: Draw, rows: int) -> list[int]:
    return np.cumsum([0, *(draw.one_of(0, 1, 2, 3, 5, 6) for _ in range(rows))]).tolist()


def _packed(draw: Draw) -> Case:
    channels, width, dtype, given = _conv_parts(draw)
    rows, form = draw.below(5), draw.one_of("offsets", "ids", "both", "batch")
    offsets = _offsets(draw, rows)
    tail = draw.one_of(0, 0, 1, 4)
    total = offsets[-1] + tail
    batch = 1 + draw.below(3) if form == "batch" else 1
    x = draw.integers(batch, total, channels, dtype=dtype)
    ids = np.repeat(np.arange(rows), np.diff(offsets))
    extra = form == "ids" and draw.chance(0.5)
    ids = np.concatenate([ids, np.full(tail, rows if extra or (form == "both" and draw.chance(0.5)) else -1)])
    if not extra and form != "batch" and draw.chance(0.7):
        x[:, offsets[-1] :] = np.nan
    if draw.chance(0.2) and total:
        x[:, max(offsets[-1] - 1, 0)] = 0
    given |= {"x": x, "cu_seqlens": draw.index(offsets) if form in ("offsets", "both") else None,
              "seq_idx": draw.index(ids[None]) if form in ("ids", "both") else None}  # fmt: skip
    if draw.chance(0.5):
        segments = batch if form == "batch" else rows + extra
        given["initial_windows"] = draw.integers(segments, channels, width, dtype=dtype)
    return Case("causal_conv1d", given)


def _gradient(draw: Draw) -> Case:
    case = _packed(draw)
    x, weight = case.given["x"], case.given["weight"]
    _, final = conv.causal_conv1d(**case.given)
    cotangents = {}
    if draw.chance(0.8):
        cotangents["y"] = draw.integers(*x.shape, dtype="f32")
    if draw.chance(0.6):
        cotangents["final_windows"] = draw.integers(len(final), *weight.shape, dtype="f32")
    return Case("causal_conv1d_grad", {"cotangents": cotangents, **case.given})


def _slots(draw: Draw, rows: int) -> tuple[list[int], list[int], int]:
    """Legal read and write slots of every kind, and the size of the pool."""
    slots = rows + 2 + draw.below(2)
    free = draw.rng.permutation(slots - 2).tolist()
    shared = [slots - 1, slots - 2] if draw.chance(0.5) else [slots - 2]  # only ever read, maybe by two rows
    read, write = [], []
    for _ in range(rows):
        kind, slot, none = draw.one_of("same", "same", "split", "fresh", "score", "padding"), free.pop(), -1
        none = draw.one_of(-1, -1, -2, -9)
        read.append({"same": slot, "split": draw.one_of(*shared), "score": draw.one_of(*shared)}.get(kind, none))
        write.append(slot if kind in ("same", "split", "fresh") else draw.one_of(-1, -1, -3))
    return read, write, slots


def _on_pool(draw: Draw, rows: int, channels: int, width: int) -> dict[str, Any]:
    read, write, slots = _slots(draw, rows)
    pool = draw.integers(slots, channels, width, dtype=draw.one_of("f32", "bf16", "f64"))
    for slot in range(slots):
        if slot not in read and draw.chance(0.7):
            pool[slot] = np.nan
    if pool.dtype != DTYPES["bf16"] and draw.chance(0.2):
        pool += 256  # more bits than a weight of type bf16 has
    same = all(r == w or max(r, w) < 0 for r, w in zip(read, write, strict=True))
    return {"conv_pool": pool, "read_slots": draw.index(read),
            "write_slots": None if same and draw.chance(0.5) else draw.index(write)}  # fmt: skip


def _prefill(draw: Draw) -> Case:
    channels, width, dtype, given = _conv_parts(draw)
    rows = draw.below(5)
    offsets = _offsets(draw, rows)
    x = draw.integers(1, offsets[-1] + draw.one_of(0, 0, 1, 4), channels, dtype=dtype)
    x[:, offsets[-1] :] = np.nan
    given |= {"x": x, "cu_seqlens": draw.index(offsets), **_on_pool(draw, rows, channels, width)}
    if draw.chance(0.6):
        places = [draw.one_of(-1, 1 + draw.below(offsets[-1])) if offsets[-1] else -1 for _ in range(draw.below(4))]
        snapshots = draw.integers(len(places), channels, width, dtype=draw.one_of("f32", "bf16"))
        given |= {"snapshot_positions": draw.index(places), "snapshot_windows": snapshots}
    return Case("causal_conv1d_prefill", given)


def _update(draw: Draw) -> Case:
    channels, width, dtype, given = _conv_parts(draw)
    rows, steps = draw.below(5), 1 + draw.below(4)
    given |= {"x": draw.integers(rows, steps, channels, dtype=dtype), **_on_pool(draw, rows, channels, width)}
    slots = len(given["conv_pool"])
    if draw.chance(0.6):
        entries = steps + draw.below(2)
        given["intermediate_windows"] = draw.integers(slots, entries, channels, width, dtype="f32")
        if draw.chance(0.6):
            given["num_accepted"] = draw.index([draw.below(entries + 1) - 1 for _ in range(rows)])
    if draw.chance(0.4):
        given["num_tokens"] = draw.index([draw.below(steps + 1) for _ in range(rows)])
        for row, length in enumerate(given["num_tokens"].tolist()):
            given["x"][row, length:] = np.nan
    return Case("causal_conv1d_update", given)


def _ids(draw: Draw) -> Case:
    actual, total = _offsets(draw, draw.below(4)), draw.below(3)
    padded = np.cumsum([0, *(n + draw.below(2) for n in np.diff(actual))]).tolist()
    given: dict[str, Any] = {"cu_seqlens_q": draw.one_of(actual, draw.index(actual))}
    total += padded[-1]
    if draw.chance(0.5):
        given["cu_seqlens_q_padded"] = draw.index(padded)
    given["total_tokens"] = draw.one_of(None, total)
    given["seq_idx"] = draw.one_of(None, np.zeros((1, total), np.int32))
    if draw.chance(0.3):
        return Case("get_cu_seqlens", {"packed_seq_params": PackedSeqParams(**given)})
    return Case("build_packed_seq_idx", {"packed_seq_params": PackedSeqParams(**given), "total_tokens": total})


def _gate(draw: Draw) -> Case:
    installed = {
        "causal_conv1d": draw.one_of(None, "1.3.9", "1.4.0", "1.5.2", "1.5.3.post1", "1.10.0"),
        "mamba_ssm": draw.one_of(None, "1.9.0", "2.0.0", "2.2.6.post3", "2.10.0"),
    }
    if draw.chance(0.4):
        return Case("check_fla_sequence_packing_support", {}, installed)
    settings = {} if draw.chance(0.4) else {"for_inference_not_training": draw.chance(0.5)}
    return Case("check_mamba_sequence_packing_support", settings, installed)


KINDS = (_packed, _prefill, _update, _gradient, _packed, _prefill, _update, _ids, _prefill, _update, _gate)

# ---------------------------------------------------------------------------------------------------------------------
# Calls that must be refused
# ---------------------------------------------------------------------------------------------------------------------


def _bad_packed(tokens: int = 6, width: int = 3, batch: int = 1, **change: Any) -> Case:
    x = np.arange(1.0, 1 + batch * tokens).reshape(batch, tokens, 1)
    return Case("causal_conv1d", {"x": x, "weight": np.ones((1, width)), **change})


def _bad_prefill(**change: Any) -> Case:
    x, pool = np.arange(1.0, 7.0).reshape(1, 6, 1), np.full((3, 1, 3), 5.0)
    given = {"x": x, "weight": np.ones((1, 3)), "bias": None, "cu_seqlens": np.array([0, 2, 6]), "conv_pool": pool,
             "read_slots": np.array([0, 2])}  # fmt: skip
    return Case("causal_conv1d_prefill", {**given, **change})


def _bad_update(**change: Any) -> Case:
    x, pool = np.arange(1.0, 7.0).reshape(2, 3, 1), np.full((3, 1, 3), 5.0)
    given = {"x": x, "weight": np.ones((1, 3)), "bias": None, "conv_pool": pool, "read_slots": np.array([0, 2])}
    return Case("causal_conv1d_update", {**given, **change})


def _params(total: int, **fields: Any) -> Case:
    return Case("build_packed_seq_idx", {"packed_seq_params": PackedSeqParams(**fields), "total_tokens": total})


BAD: tuple[Callable[[], Case], ...] = (
    lambda: _params(8, cu_seqlens_q=[0, 5, 7, 6]),
    lambda: _params(9, cu_seqlens_q=[0, 5, 7, 11]),
    lambda: _params(8, cu_seqlens_q=np.array([0.0, 5.0])),
    lambda: _params(8),
    lambda: _params(-1, cu_seqlens_q=[0]),
    lambda: _bad_packed(cu_seqlens=np.array([0, 5, 4])),
    lambda: _bad_packed(cu_seqlens=np.array([0, 7])),
    lambda: _bad_packed(cu_seqlens=np.array([0.0, 6.0])),
    lambda: _bad_packed(cu_seqlens=np.array([0, 3, 6]), seq_idx=np.array([[0, 0, 1, 1, 1, 1]])),
    lambda: _bad_packed(seq_idx=np.array([[0, 1, 2, 0, 1, 2]])),
    lambda: _bad_packed(seq_idx=np.array([[0, 0, -1, 1, 1, 1]])),
    lambda: _bad_packed(batch=2, cu_seqlens=np.array([0, 4, 12])),
    lambda: _bad_packed(activation="gelu"),
    lambda: _bad_packed(width=5),
    lambda: _bad_packed(width=1),
    lambda: _bad_packed(initial_windows=np.ones((2, 1, 3))),
    lambda: _bad_prefill(read_slots=np.array([1, 1])),
    lambda: _bad_prefill(read_slots=np.array([0, 1]), write_slots=np.array([2, 0])),
    lambda: _bad_prefill(read_slots=np.array([0, -1]), write_slots=np.array([1, 0])),
    lambda: _bad_prefill(read_slots=np.array([0, 3])),
    lambda: _bad_prefill(snapshot_positions=np.array([1])),
    lambda: _bad_prefill(snapshot_positions=np.array([7]), snapshot_windows=np.zeros((1, 1, 3))),
    lambda: _bad_update(intermediate_windows=np.zeros((3, 2, 1, 3))),
    lambda: _bad_update(intermediate_windows=np.zeros((3, 4, 1, 3)), num_accepted=np.array([4, 0])),
    lambda: _bad_update(num_accepted=np.array([0, 0])),
    lambda: _bad_update(num_tokens=np.array([4, 0])),
    lambda: _bad_update(weight=np.ones((1, 5)), conv_pool=np.full((3, 1, 5), 5.0)),
)


def case(number: int) -> Case:
    """Case `number`: the refused ones first, then one of every kind by turns."""
    if number < len(BAD):
        return BAD[number]()
    return KINDS[number % len(KINDS)](Draw(number))


# ---------------------------------------------------------------------------------------------------------------------
# What a call does
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _versions(installed: Mapping[str, str | None]) -> Iterator[None]:
    def version(name: str) -> str:
        found = installed.get(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    with mock.patch.object(metadata, "version", version):
        yield


def _bits(value: Any) -> Any:
    """Something that is equal where type, shape and every bit are."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (tuple, list)):
        return tuple(_bits(part) for part in value)
    if isinstance(value, Mapping):
        return {name: _bits(part) for name, part in value.items()}
    if isinstance(value, PackedSeqParams):
        return _bits(vars(value))
    return value


def outcome(operations: Mapping[str, Callable[..., Any]], number: int) -> Any:
    """What call `number` returns or raises, and what it leaves in its arguments."""
    op, given, installed = case(number)
    try:
        with _versions(installed):
            result = _bits(operations[op](**given))
    except ContractError as error:
        result = (type(error).__name__, str(error))
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        result = ("ValueError", str(error))
    return result, _bits(given)


@cache
def right(number: int) -> Any:
    """What the unmutated model makes of call `number`."""
    return outcome(models()["kernel-like"], number)


# ---------------------------------------------------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", models())
def test_a_model_has_the_signatures_of_the_reference(structure: str) -> None:
    for name, function in REFERENCE.items():
        assert inspect.signature(models()[structure][name]) == inspect.signature(function), name


@pytest.mark.parametrize("part", range(6))
def test_the_unmutated_model_is_the_reference_bit_for_bit(part: int) -> None:
    for number in range(part, MOST_CASES, 6):
        assert right(number) == outcome(REFERENCE, number), (number, case(number))


def test_refused_calls_are_refused() -> None:
    for number in range(len(BAD)):
        result, _ = right(number)
        assert str(result[0]).endswith("Error"), case(number)


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(KeyError, match="no-such-fault"):
        mutant("no-such-fault")


@pytest.mark.parametrize("fault", list(dict.fromkeys([*faults_of("causal_conv1d"), *faults_of("get_cu_seqlens")])))
def test_a_fault_shows(fault: str) -> None:
    """Some call tells the mutant from the model, and no call breaks it in a way that is not the fault."""
    operations = mutant(fault)
    assert set(REFERENCE) <= set(operations)
    shown = [outcome(operations, number) != right(number) for number in range(60)]
    numbers = range(60, MOST_CASES)
    assert any(shown) or any(outcome(operations, number) != right(number) for number in numbers)


def test_the_catalogue_names_every_mutant_and_no_other() -> None:
    catalogue = json.loads(files("statescan.goldens").joinpath("faults.json").read_text("utf-8"))
    assert catalogue["format"] == "statescan.faults/1"
    named = [fault["id"] for fault in catalogue["faults"]]
    assert len(named) == len(set(named))
    assert {fault["id"] for fault in catalogue["faults"] if fault["expressible"]} == set(FAULTS)
    for fault in catalogue["faults"]:
        if fault["expressible"]:  # what no mutant can show may wait for a clause that is planned
            assert CLAUSES[fault["clauses"][0]].state == "active", fault["id"]
        assert fault["exact"] is True or fault["exact"].strip(), fault["id"]
