"""The recurrences, gates and norms of the reference: worked numbers, second definitions, slots, gradients."""

from __future__ import annotations

import ast
import doctest
import itertools
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as fn

import statescan.reference
from statescan.reference import conv, delta, delta_grad, gates, norms, packed, ssd, ssd_grad
from statescan.reference.arrays import DTYPES, Array, round_to
from statescan.reference.second import conv as second_conv
from statescan.reference.second import delta as second_delta
from statescan.reference.second import gates as second_gates
from statescan.reference.second import norms as second_norms
from statescan.reference.second import packed as second_packed
from statescan.reference.second import ssd as second_ssd
from statescan.reference.sites import perturbing
from statescan.spec.contract import DtypeError, PackedSeqParams, ShapeError, SlotError, UnsupportedError

CHUNKS = (1, 3, 4, 16, 64)
SIBLINGS = [("gated_delta_rule", 1), ("gated_delta_product", 1), ("gated_delta_product", 2),
            ("gated_delta_product", 3), ("kimi_delta_attention", 1)]  # fmt: skip
F = -1024.0
HV, H, K, V = 4, 2, 6, 5
CU = np.array([0, 33, 33, 70, 71])

Tensors = dict[str, Array]
every_sibling = pytest.mark.parametrize(("name", "copies"), SIBLINGS)


def copies_of(name: str, copies: int) -> dict[str, int]:
    return {"num_householder": copies} if name.startswith("gated_delta_product") else {}


def drawn(name: str, copies: int, lead: int, steps: int, seed: int = 1) -> Tensors:
    """Random token tensors: slow and fast heads, keys of length about 1/2."""
    rng = np.random.default_rng(seed)
    gate = (HV, K) if name.startswith("kimi") else (HV,)
    speed = np.array([2.0**-8, 2.0**-4, 1, 4]).reshape(HV, *[1] * (len(gate) - 1))
    return {
        "q": rng.normal(size=(lead, steps, H, K)), "k": rng.normal(size=(lead, steps * copies, H, K)) / K**0.5 / 2,
        "v": rng.normal(size=(lead, steps * copies, HV, V)), "g": -rng.random((lead, steps, *gate)) * speed,
        "beta": rng.random((lead, steps * copies, HV)),
    }  # fmt: skip


def drawn_ssd(lead: int, steps: int, seed: int = 1, heads: int = 4, groups: int = 2) -> Tensors:
    rng = np.random.default_rng(seed)
    token = (lead, steps)
    return {
        "x": rng.normal(size=(*token, heads, 5)), "dt": rng.normal(size=(*token, heads)),
        "A": -np.array([0.01, 0.1, 1, 8])[:heads], "B": rng.normal(size=(*token, groups, 6)),
        "C": rng.normal(size=(*token, groups, 6)), "D": rng.normal(size=(heads, 5)),
        "z": rng.normal(size=(*token, heads, 5)), "dt_bias": rng.normal(size=heads),
    }  # fmt: skip


def agree(first: Array, second: Array, bits: int = 46) -> None:
    """Within 2^-bits of the largest number, which for these inputs is far below the noise gain."""
    assert np.abs(first - second).max(initial=0) <= 2.0**-bits * np.abs(second).max(initial=0)


def same_bits(first: Array, second: Array) -> None:
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("module", ["delta", "delta_grad", "ssd", "ssd_grad", "gates", "norms", "packed", "arrays",
    "pools", "second.delta", "second.ssd", "second.conv", "second.gates", "second.norms", "second.packed"])  # fmt: skip
def test_examples_in_the_docstrings(module: str) -> None:
    assert doctest.testmod(import_module(f"statescan.reference.{module}")).failed == 0


@pytest.mark.parametrize("name", ["delta", "delta_grad", "ssd", "ssd_grad", "gates", "norms"])
def test_golden_path_names_no_library_sum_or_exponential(name: str) -> None:
    refused = {"sum", "mean", "dot", "matmul", "einsum", "inner", "outer", "prod", "linalg", "exp", "exp2", "log",
               "log1p", "expm1", "tanh", "power", "random", "cumsum", "tensordot", "add_reduce", "reduce"}  # fmt: skip
    for node in ast.walk(ast.parse(Path(*statescan.reference.__path__, f"{name}.py").read_text("utf-8"))):
        assert not (isinstance(node, ast.Attribute) and node.attr in refused), node.attr
        assert not (isinstance(node, ast.Name) and node.id in refused - {"exp"}), node.id
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.MatMult, ast.Pow)))


# ---------------------------------------------------------------------------------------------------------------------
# Worked numbers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "values", "betas", "o", "state"), [
    ([[1, 0]], [2], [0.5], 1.0960154, [1.25, 1.0]),
    ([[1, 0], [3, 4]], [2, -1], [0.5, 0.25], 0.6452349, [0.8675, 0.49]),
    ([[3, 4], [1, 0]], [-1, 2], [0.25, 0.5], 0.7916059, [1.0925, 0.58]),
])  # fmt: skip
def test_product_of_householders_worked(keys: Any, values: Any, betas: Any, o: float, state: list[float]) -> None:
    pool = np.array([[[[1.0], [2.0]]]])
    out = delta.gated_delta_product_update(
        np.array([[[[3.0, 4.0]]]]), np.array(keys, float)[None, :, None], np.array(values, float)[None, :, None, None],
        np.log(np.full((1, 1, 1), 0.5)), np.array(betas)[None, :, None], pool, np.array([0]),
        num_householder=len(keys), use_qk_l2norm=True,
    )  # fmt: skip
    assert out.item() == pytest.approx(o, abs=1e-7)
    assert pool.ravel() == pytest.approx(state, abs=1e-6)


@pytest.mark.parametrize("gated", [True, False])
def test_mamba2_worked(gated: bool) -> None:
    pool = np.full((3, 1, 1, 2), np.nan)
    pool[2] = [[1.0, 2.0]]
    entries = np.full((3, 2, 1, 1, 2), -7.0)
    row = [np.array([[[[2.0]], [[-1.0]]]]), np.array([[[0.3], [-0.2]]]), np.array([-1.5]),
           np.array([[[[1.0, 0.5]], [[0.25, -1.0]]]]), np.array([[[[2.0, -1.0]], [[1.0, 1.0]]]]), np.array([0.25]),
           np.array([[[[1.0]], [[-2.0]]]]), np.array([0.1])]  # fmt: skip
    x, dt, A, B, C, D, z, dt_bias = (t if t.ndim == 1 else np.concatenate([t, np.full(t.shape, np.nan)]) for t in row)
    y = ssd.ssd_update(x, dt, A, B, C, D, z if gated else None, dt_bias, pool, np.array([2, -1]), None, entries)
    assert y[0].ravel() == pytest.approx([2.3679322, -0.3731699] if gated else [3.2390457, 1.5652718], abs=1e-7)
    assert (y[1] == 0).all()
    assert entries[2].ravel() == pytest.approx([2.0802587, 1.4214717, 0.6301814, 1.1850905], abs=1e-7)
    assert pool[2].ravel() == pytest.approx([0.6301814, 1.1850905], abs=1e-7)
    assert np.isnan(pool[:2]).all()
    assert (entries[:2] == -7).all()


# ---------------------------------------------------------------------------------------------------------------------
# Exact stories: a one-hot memory that is read and written by eye
# ---------------------------------------------------------------------------------------------------------------------

STORY = {
    "cu": [0, 8, 11, 13],
    "key": [0, 1, 0, 1, 0, 2, 2, 0, 0, 1, 1, 2, 1], "query": [0, 1, 0, 1, 0, 2, 0, 0, 1, 1, 0, 2, 1],
    "v": [[1, 2], [3, -1], [4, 0], [-2, 2], [6, 2], [5, 5], [1, 1], [2, -2], [3, 1], [7, -7], [0, 4], [1, 3], [2, 3]],
    "g": [0, 0, 0, 0, F, 0, 0, 0, 0, 0, 0, 0, F], "beta": [1, 1, 0.5, 2, 1, 1, 0, 1, 1, 1, 0.5, 0.5, 1],
    "o": [[1, 2], [3, -1], [2.5, 1], [-7, 5], [6, 2], [5, 5], [6, 2], [2, -2], [64, 1], [7, -7], [3, 1], [3, 0],
          [2, 3]],
    "start": [[[8, -8], [16, 0], [-4, 2]], [[-2, 32], [64, 1], [0, -16]], [[12, 4], [-8, 8], [5, -3]]],
    "end": [[[2, -2], [0, 0], [5, 5]], [[3, 1], [3.5, -1.5], [0, -16]], [[0, 0], [2, 3], [0, 0]]],
}  # fmt: skip
VECTOR = {
    "cu": [0, 8, 11], "key": [0, 1, 0, 1, 0, 2, 2, 0, 0, 1, 1], "query": [0, 1, 0, 1, 0, 2, 1, 0, 1, 1, 0],
    "v": [[1, 2], [3, -1], [4, 0], [-2, 2], [6, 2], [5, 5], [1, 1], [2, -2], [3, 1], [7, -7], [0, 4]],
    "g": [0, 0, 0, 0, F, 0, 0, 0, 0, 0, 0], "beta": [1, 1, 0.5, 2, 1, 1, 0, 1, 1, 1, 0.5],
    "o": [[1, 2], [3, -1], [2.5, 1], [-7, 5], [6, 2], [5, 5], [0, 0], [2, -2], [0, 0], [7, -7], [3, 1]],
    "start": [[[0, 0], [0, 0], [0, 0]]] * 2,
    "end": [[[2, -2], [0, 0], [5, 5]], [[3, 1], [3.5, -1.5], [0, 0]]],
}  # fmt: skip


def told(story: Mapping[str, Any], after: int, before: int, per_channel: bool) -> tuple[Tensors, Array, Array]:
    """A story as tensors, stretched: identity tokens before each segment and after each token; and where it stands."""
    cu, places = [0], []
    for start, end in itertools.pairwise(story["cu"]):
        at = cu[-1] + before
        places += [at + (after + 1) * t for t in range(end - start)]
        cu.append(at + (after + 1) * (end - start))
    tensors = {"q": np.zeros((1, cu[-1], 1, 3)), "k": np.zeros((1, cu[-1], 1, 3)), "v": np.zeros((1, cu[-1], 1, 2)),
               "g": np.zeros((1, cu[-1], 1)), "beta": np.zeros((1, cu[-1], 1))}  # fmt: skip
    tensors["q"][0, places, 0] = np.eye(3)[story["query"]]
    tensors["k"][0, places, 0] = np.eye(3)[story["key"]]
    for name in ("v", "g", "beta"):
        tensors[name][0, places, 0] = story[name]
    if per_channel:
        tensors["g"] = np.repeat(tensors["g"][..., None], 3, axis=3)
    return tensors, np.array(cu), np.array(places)


def lifts(chunk: int) -> Iterator[tuple[int, int]]:
    yield from {(0, 0), (chunk - 1, 0), (chunk - 1, chunk - 1), (chunk // 3, 3)}


@pytest.mark.parametrize("story", [STORY, VECTOR], ids=["base", "worked"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_delta_product", "kimi_delta_attention"])
def test_story_token_by_token_and_in_chunks_bitwise(name: str, story: Mapping[str, Any]) -> None:
    expected = np.array(story["o"], float)
    start, end = np.array(story["start"], float)[:, None], np.array(story["end"], float)[:, None]
    for chunk, (after, before) in ((c, lift) for c in CHUNKS for lift in lifts(c)):
        tensors, cu, places = told(story, after, before, name.startswith("kimi"))
        settings: Any = {"scale": 1.0, "output_final_state": True}
        o, final = getattr(delta, name)(**tensors, cu_seqlens=cu, initial_state=start, **settings)
        assert (o[0, places, 0] == expected).all()
        assert (np.delete(o, places, axis=1) == 0).all()
        assert (final == end).all()
        in_chunks = getattr(second_delta, name)(
            **tensors, cu_seqlens=cu, initial_state=start, chunk=chunk, **settings
        )
        assert (o == in_chunks[0]).all()
        assert (final == in_chunks[1]).all()


def test_story_is_a_dictionary() -> None:
    for story in (STORY, VECTOR):
        outputs: list[list[float]] = []
        for n, (start, end) in enumerate(itertools.pairwise(story["cu"])):
            memory = {key: list(map(float, row)) for key, row in enumerate(story["start"][n])}
            for t in range(start, end):
                if story["g"][t] == F:
                    memory = {key: [0.0, 0.0] for key in memory}
                known, beta = memory[story["key"][t]], story["beta"][t]
                memory[story["key"][t]] = [old + beta * (v - old) for old, v in zip(known, story["v"][t], strict=True)]
                outputs.append(memory[story["query"][t]])
            assert list(memory.values()) == story["end"][n]
        assert outputs == story["o"]


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_delta_product", "kimi_delta_attention"])
def test_story_on_a_pool_in_narrow_types(name: str, layout: str) -> None:
    """bf16 inputs, f32 pool with NaN guards; slots renamed; as one prefill, and token by token."""
    tensors, cu, _ = told(STORY, 0, 0, name.startswith("kimi"))
    tensors = {key: round_to(t, "f32" if key == "g" else "bf16") for key, t in tensors.items()}
    slots = np.array([4, 1, 2])
    pool = np.full((6, 1, 3, 2), np.nan, np.float32)
    pool[slots] = np.array(STORY["start"], float)[:, None]
    end = pool.copy()
    end[slots] = np.array(STORY["end"], float)[:, None]
    turn = (lambda a: np.ascontiguousarray(a.swapaxes(2, 3))) if layout == "VK" else np.copy
    whole, pieces = turn(pool), turn(pool)
    o = getattr(delta, f"{name}_prefill")(
        **tensors, cu_seqlens=cu, state_pool=whole, read_slots=slots, scale=1.0, state_layout=layout
    )
    assert o.dtype == DTYPES["bf16"]
    assert (o[0, :, 0].astype(float) == STORY["o"]).all()
    same_bits(whole, turn(end))
    for t in range(13):
        row = [n for n in range(3) if cu[n] <= t < cu[n + 1]]
        one = {key: array[:, t : t + 1] for key, array in tensors.items()}
        out = getattr(delta, f"{name}_update")(
            **one, state_pool=pieces, read_slots=slots[row], scale=1.0, state_layout=layout
        )
        assert (out[0, 0, 0].astype(float) == STORY["o"][t]).all()
    same_bits(pieces, turn(end))


def test_state_is_carried_wider_than_a_narrow_output() -> None:
    """256, 257, 255.5 need nine bits; a state kept in bf16 would end at 255 (NUM-2)."""
    one = round_to(np.array([1.0, 0]), "bf16")
    q = np.tile(one, (1, 3, 1, 1))
    pool = np.array([[[[0.0], [7]]]], np.float32)
    o = delta.gated_delta_rule_prefill(
        q, q, round_to(np.array([256.0, 258, 254]), "bf16").reshape(1, 3, 1, 1), np.zeros((1, 3, 1)),
        np.array([1, 0.5, 0.5]).reshape(1, 3, 1), np.array([0, 3]), pool, np.array([0]), scale=1.0,
    )  # fmt: skip
    assert o.astype(float).ravel().tolist() == [256, 256, 256]
    assert pool.ravel().tolist() == [255.5, 7]


def test_mamba2_story_bitwise() -> None:
    """Head 0 adds up, head 1 forgets everything at each step; a step of 0 leaves the state alone (SSD-7)."""
    x = np.array([[1.0, 10], [2, 20], [3, 30], [4, 40], [5, 50]])[None, :, :, None]
    dt = np.array([1.0, 2, 0, 1, 1])[None, :, None] * np.ones(2)
    one = np.array([[1.0, 0], [0, 1], [1, 1], [1, 0], [0, 1]])[None, :, None]
    state = np.array([[[8.0, -4]], [[16, 2]]])[None].repeat(2, axis=0)
    sums = [[9, -4], [9, 0], [9, 0], [4, 0], [4, 5]]
    lasts = [[10, 0], [0, 40], [0, 40], [40, 0], [0, 50]]
    read = np.array([1.0, 100])[None, None, None] * np.ones((1, 5, 1, 1))
    expected = np.array([[[s[0] + 100 * s[1] for s in sums], [s[0] + 100 * s[1] for s in lasts]]]).transpose(0, 2, 1)
    expected[0, 3, 0], expected[0, 4, 0] = 8 + 4 + 100 * -4, 8 + 4 + 100 * (-4 + 5)  # the second segment starts afresh
    cu, A, skip = np.array([0, 3, 5]), np.array([0.0, F]), np.array([1.0, 0.5])
    y, final = ssd.ssd(x, dt, A, one, read, skip, None, None, None, cu, state, dt_softplus=False,
                       output_final_state=True)  # fmt: skip
    assert (y[..., 0] == expected + skip * x[..., 0]).all()
    assert final is not None
    assert final[:, :, 0].tolist() == [[[9, 0], [0, 40]], [[12, 1], [0, 50]]]
    for chunk in CHUNKS:
        other = second_ssd.ssd(x, dt, A, one, read, skip, None, None, None, cu, state, dt_softplus=False,
                               output_final_state=True, chunk=chunk)  # fmt: skip
        assert (other[0] == y).all()
        assert (other[1] == final).all()


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers: the recurrence against chunks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgetting", [False, True])
@every_sibling
def test_recurrence_and_chunks_agree(name: str, copies: int, forgetting: bool) -> None:
    tensors, state = drawn(name, copies, 1, 71), np.random.default_rng(2).normal(size=(4, HV, K, V))
    if forgetting:  # with decays of -1024 here and there, the later ones of a chunk lose nothing
        tensors["g"][np.random.default_rng(3).random(tensors["g"].shape) < 0.1] = F
    settings: Any = {"use_qk_l2norm": forgetting, "output_final_state": True, **copies_of(name, copies)}
    o, final = getattr(delta, name)(**tensors, cu_seqlens=CU, initial_state=state, **settings)
    for chunk in CHUNKS:
        other = getattr(second_delta, name)(**tensors, cu_seqlens=CU, initial_state=state, chunk=chunk, **settings)
        agree(o, other[0])
        agree(final, other[1])


@pytest.mark.parametrize("by", ["cu_seqlens", "seq_idx", "none"])
def test_mamba2_and_chunks_agree(by: str) -> None:
    tensors = drawn_ssd(1, 71)
    ids = np.array([[0] * 33 + [2] * 37 + [3]], np.int32)
    packing: Any = {"cu_seqlens": {"cu_seqlens": CU}, "seq_idx": {"seq_idx": ids}, "none": {}}[by]
    state = np.random.default_rng(2).normal(size=(4 if packing else 1, 4, 5, 6))
    limits: Any = {"dt_limit": (0.25, 1.5), "output_final_state": True}
    y, final = ssd.ssd(**tensors, **packing, initial_state=state, **limits)
    for chunk in CHUNKS:
        other, last = second_ssd.ssd(**tensors, **packing, initial_state=state, chunk=chunk, **limits)
        agree(y, other)
        assert final is not None
        assert last is not None
        agree(final, last)


# ---------------------------------------------------------------------------------------------------------------------
# Packing, pieces, slots: one harness for every mixer
# ---------------------------------------------------------------------------------------------------------------------

MIXERS = [*SIBLINGS, ("ssd", 1)]
TOKEN_WISE = {"x", "dt", "B", "C", "z", "q", "k", "v", "g", "beta"}
every_mixer = pytest.mark.parametrize(("name", "copies"), MIXERS)


def mixer_inputs(name: str, copies: int, lead: int, steps: int, seed: int = 1) -> Tensors:
    return drawn_ssd(lead, steps, seed) if name == "ssd" else drawn(name, copies, lead, steps, seed)


def mixer(name: str, copies: int, mode: str = "") -> Callable[..., Any]:
    module: Any = ssd if name == "ssd" else delta
    function, settings = getattr(module, name + mode), copies_of(name, copies)
    return lambda *args, **given: function(*args, **given, **settings)


def second_mixer(name: str, copies: int, mode: str = "") -> Callable[..., Any]:
    module: Any = second_ssd if name == "ssd" else second_delta
    function, settings = getattr(module, name + mode), copies_of(name, copies)
    return lambda *args, **given: function(*args, **given, **settings, chunk=3)


def state_shape(name: str) -> tuple[int, int, int]:
    return (4, 5, 6) if name == "ssd" else (HV, K, V)


def cut(tensors: Tensors, copies: int, start: int, end: int) -> Tensors:
    """The tokens start..end of every token-wise tensor."""
    wide = {"k", "v", "beta"} if copies > 1 else set()
    return {
        name: (a[:, start * copies : end * copies] if name in wide else a[:, start:end]) if name in TOKEN_WISE else a
        for name, a in tensors.items()
    }


def as_rows(tensors: Tensors, rows: int) -> Tensors:
    """`[1, N*J, ...]` as `[N, J, ...]`."""
    return {n: a.reshape(rows, -1, *a.shape[2:]) if n in TOKEN_WISE else a for n, a in tensors.items()}


@every_mixer
def test_pack_equals_its_segments_bitwise(name: str, copies: int) -> None:
    tensors, state = mixer_inputs(name, copies, 1, 12), np.random.default_rng(4).normal(size=(4, *state_shape(name)))
    cu = np.array([0, 5, 5, 9, 11])  # row 11 lies past the last offset
    for array in cut(tensors, copies, 11, 12).values():
        if array.shape[1:2] in ((1,), (copies,)) and array.ndim > 2:
            array[...] = np.nan
    before = {key: array.tobytes() for key, array in tensors.items()}
    y, final = mixer(name, copies)(**tensors, cu_seqlens=cu, initial_state=state, output_final_state=True)
    assert (y[0, 11] == 0).all()
    for n, (start, end) in enumerate(itertools.pairwise(cu.tolist())):
        alone, last = mixer(name, copies)(
            **cut(tensors, copies, start, end), initial_state=state[n : n + 1], output_final_state=True
        )
        same_bits(y[:, start:end], alone)
        same_bits(final[n : n + 1], last)
    same_bits(final[1], state[1])
    assert {key: array.tobytes() for key, array in tensors.items()} == before


@every_mixer
def test_no_entering_state_is_a_zero_one_and_types_follow(name: str, copies: int) -> None:
    tensors = mixer_inputs(name, copies, 1, 6)
    cu, zero = np.array([0, 2, 6]), np.zeros((2, *state_shape(name)), np.float32)
    run = mixer(name, copies)
    y, final = run(**tensors, cu_seqlens=cu, output_final_state=True)
    assert final.dtype == np.float64
    other, last = run(**tensors, cu_seqlens=cu, initial_state=zero, output_final_state=True)
    same_bits(y, other)
    same_bits(last, final.astype(np.float32))
    narrow = {key: round_to(a, "f16") for key, a in tensors.items()}
    y, final = run(**narrow, cu_seqlens=cu, output_final_state=True)
    assert (y.dtype, final.dtype) == (np.float16, np.float32)
    assert run(**narrow, cu_seqlens=cu)[1] is None


@every_mixer
def test_pieces_and_decode_equal_the_whole_bitwise(name: str, copies: int) -> None:
    tensors, steps = mixer_inputs(name, copies, 1, 9), 9
    slot, start = np.array([1]), np.random.default_rng(4).normal(size=(3, *state_shape(name)))
    whole_pool = start.copy()
    whole = mixer(name, copies, "_prefill")(
        **tensors, cu_seqlens=np.array([0, steps]), state_pool=whole_pool, read_slots=slot
    )
    as_pack, final = mixer(name, copies)(**tensors, initial_state=start[1:2], output_final_state=True)
    same_bits(whole, as_pack)
    same_bits(whole_pool[1:2], final)
    for cuts, mode in (([0, 1, 4, 4, 9], "_prefill"), ([0, 3, 9], "_update"), (list(range(10)), "_update")):
        pool = start.copy()
        for a, b in itertools.pairwise(cuts):
            offsets: Any = {"cu_seqlens": np.array([0, b - a])} if mode == "_prefill" else {}
            y = mixer(name, copies, mode)(**cut(tensors, copies, a, b), **offsets, state_pool=pool, read_slots=slot)
            same_bits(y, whole[:, a:b])
        same_bits(pool, whole_pool)


READS, WRITES = np.array([1, -1, 4, -5, 2]), np.array([1, 3, -1, -1, 6], np.int32)


def guarded(name: str, shape: tuple[int, ...], slots: list[int]) -> Array:
    """A pool of NaN with numbers in a few slots."""
    pool = np.full((*shape, *state_shape(name)), np.nan)
    pool[slots] = np.random.default_rng(4).normal(size=pool[slots].shape)
    return pool


@every_mixer
def test_prefill_slots_and_snapshots(name: str, copies: int) -> None:
    """In place, score only, fresh, padding and split rows; the second definition says the same of every byte kept."""
    tensors, cu = mixer_inputs(name, copies, 1, 14), np.array([0, 4, 7, 7, 10, 13])
    tensors = {key: a.copy() for key, a in tensors.items()}
    for start, end in ((7, 10), (13, 14)):  # a padding row, and a row past the last offset
        for key, part in cut(tensors, copies, start, end).items():
            if key in TOKEN_WISE:
                part[...] = np.nan
    positions = np.array([1, -1, 4, 7, 9, 12])
    pool, snapshots = guarded(name, (8,), [1, 2, 4]), guarded(name, (6,), [1])
    other_pool, other_snapshots, before = pool.copy(), snapshots.copy(), pool.copy()
    given: Any = {"cu_seqlens": cu, "read_slots": READS, "write_slots": WRITES, "snapshot_positions": positions}
    y = mixer(name, copies, "_prefill")(**tensors, **given, state_pool=pool, snapshot_states=snapshots)
    other = second_mixer(name, copies, "_prefill")(
        **tensors, **given, state_pool=other_pool, snapshot_states=other_snapshots
    )
    agree(y, other)
    assert (y[0, 7:10] == 0).all()
    assert (y[0, 13:] == 0).all()
    for slot in (0, 2, 4, 5, 7):
        same_bits(pool[slot], before[slot])
    for slot in (1, 3, 6):
        agree(pool[slot], other_pool[slot])
    same_bits(snapshots[1], other_snapshots[1])
    assert np.isnan(snapshots[4]).all()  # position 9 belongs to the padding row
    for i, (row, count) in {0: (0, 1), 2: (0, 4), 3: (1, 3), 5: (4, 2)}.items():
        agree(snapshots[i], other_snapshots[i])
        entering = np.zeros((1, *state_shape(name))) if READS[row] < 0 else before[READS[row]][None]
        _, state = mixer(name, copies)(
            **cut(tensors, copies, cu[row], cu[row] + count), initial_state=entering, output_final_state=True
        )
        same_bits(snapshots[i], state[0])


@every_mixer
def test_update_slots_drafts_and_short_rows(name: str, copies: int) -> None:
    """Rows resume from an accepted entry, are shorter than J, split, score only, fresh and padding."""
    tensors = {key: a.copy() for key, a in as_rows(mixer_inputs(name, copies, 1, 15), 5).items()}
    tokens, accepted = np.array([3, 1, 2, 3, 0]), np.array([1, 2, -1, 0, 0])
    for n, count in enumerate(tokens.tolist()):
        for key, part in cut(tensors, copies, 0 if n == 3 else count, 3).items():
            if key in TOKEN_WISE:
                part[n] = np.nan
    pool, entries = guarded(name, (8,), [1, 2, 4]), guarded(name, (8, 4), [1, 2])
    other_pool, other_entries, before, entries_before = pool.copy(), entries.copy(), pool.copy(), entries.copy()
    given: Any = {"read_slots": READS, "write_slots": WRITES, "num_accepted": accepted, "num_tokens": tokens}
    y = mixer(name, copies, "_update")(**tensors, **given, state_pool=pool, intermediate_states=entries)
    other = second_mixer(name, copies, "_update")(
        **tensors, **given, state_pool=other_pool, intermediate_states=other_entries
    )
    agree(y, other)
    assert all((y[n, count:] == 0).all() for n, count in enumerate(tokens.tolist()))
    assert (y[3] == 0).all()
    written = {(1, 0), (1, 1), (1, 2), (3, 0)}
    for slot, j in itertools.product(range(8), range(4)):
        if (slot, j) in written:
            agree(entries[slot, j], other_entries[slot, j])
        else:
            same_bits(entries[slot, j], entries_before[slot, j])
    for slot in (0, 2, 4, 5, 7):
        same_bits(pool[slot], before[slot])
    same_bits(pool[1], entries[1, 2])
    same_bits(pool[3], entries[3, 0])
    same_bits(pool[6], entries_before[2, 0])  # a row of no tokens stores what it read
    first = {key: a[:1] if key in TOKEN_WISE else a for key, a in tensors.items()}
    _, last = mixer(name, copies)(**first, initial_state=entries_before[1, 1][None], output_final_state=True)
    same_bits(pool[1], last[0])


@every_sibling
def test_layouts_are_views_of_one_pool(name: str, copies: int) -> None:
    """The same numbers under both declared orders, in place, through a strided view into a larger buffer."""
    tensors = drawn(name, copies, 1, 7)
    pool = guarded(name, (5,), [1, 2])
    snapshots, positions = guarded(name, (2,), []), np.array([2, 5])
    buffer = np.full((5, 2, HV, V + 1, K), np.nan)
    turned, turned_snapshots = buffer[:, 1, :, :V], snapshots.swapaxes(2, 3).copy()
    turned[...] = pool.swapaxes(2, 3)
    given: Any = {"cu_seqlens": np.array([0, 3, 7]), "read_slots": np.array([2, 1]), "snapshot_positions": positions}
    y = mixer(name, copies, "_prefill")(**tensors, **given, state_pool=pool, snapshot_states=snapshots)
    other = mixer(name, copies, "_prefill")(
        **tensors, **given, state_pool=turned, snapshot_states=turned_snapshots, state_layout="VK"
    )
    same_bits(y, other)
    same_bits(np.ascontiguousarray(turned.swapaxes(2, 3)), pool)
    same_bits(np.ascontiguousarray(turned_snapshots.swapaxes(2, 3)), snapshots)
    assert np.isnan(buffer[:, 0]).all()
    assert np.isnan(buffer[:, 1, :, V]).all()
    entries = np.full((5, 7, HV, V, K), np.nan)
    y = mixer(name, copies, "_update")(
        **tensors, state_pool=turned, read_slots=np.array([1]), intermediate_states=entries, state_layout="VK"
    )
    _, last = mixer(name, copies)(**tensors, initial_state=pool[1:2], output_final_state=True)
    same_bits(np.ascontiguousarray(entries[1, 6].swapaxes(1, 2)), last[0])
    assert np.isnan(entries[[0, 2, 3, 4]]).all()
    assert np.isfinite(entries[1]).all()
    assert y.shape == (1, 7, HV, V)


@every_sibling
def test_value_heads_share_neighbouring_heads(name: str, copies: int) -> None:
    tensors, state = drawn(name, copies, 1, 5), np.random.default_rng(4).normal(size=(1, HV, K, V))
    repeated = {key: np.repeat(a, HV // H, axis=2) if key in ("q", "k") else a for key, a in tensors.items()}
    y, final = mixer(name, copies)(**tensors, initial_state=state, output_final_state=True)
    other, last = mixer(name, copies)(**repeated, initial_state=state, output_final_state=True)
    same_bits(y, other)
    same_bits(final, last)


def test_siblings_meet() -> None:
    """One copy is the gated delta rule (GDP-4); equal channels are too (KDA-2). Bitwise."""
    tensors, state = drawn("gated_delta_rule", 1, 1, 9), np.random.default_rng(4).normal(size=(3, HV, K, V))
    given: Any = {"cu_seqlens": np.array([0, 4, 4, 9]), "initial_state": state, "output_final_state": True}
    o, final = delta.gated_delta_rule(**tensors, **given)
    product = delta.gated_delta_product(**tensors, **given, num_householder=1)
    channels = {**tensors, "g": np.repeat(tensors["g"][..., None], K, axis=3)}
    kimi = delta.kimi_delta_attention(**channels, **given)
    for other, last in (product, kimi):
        same_bits(o, other)
        assert final is not None
        assert last is not None
        same_bits(final, last)


def test_scale_and_l2norm_are_what_the_gates_and_norms_say() -> None:
    tensors = drawn("gated_delta_rule", 1, 1, 5)
    inside, _ = delta.gated_delta_rule(**tensors, use_qk_l2norm=True)
    outside = {key: norms.l2norm(a) if key in ("q", "k") else a for key, a in tensors.items()}
    same_bits(inside, delta.gated_delta_rule(**outside)[0])
    same_bits(inside, delta.gated_delta_rule(**outside, scale=float(1 / np.sqrt(K)))[0])
    doubled, _ = delta.gated_delta_rule(**outside, scale=float(2 / np.sqrt(K)))
    same_bits(doubled, 2 * inside)


def test_mamba2_parts() -> None:
    """D per head is D per channel repeated; z after D; groups are neighbours; the clamp holds in decode (SSD-3..6)."""
    tensors = drawn_ssd(1, 6)
    per_head = {**tensors, "D": np.array([1.0, -2, 0.5, 3])}
    per_channel = {**tensors, "D": np.repeat(per_head["D"][:, None], 5, axis=1)}
    y, _ = ssd.ssd(**per_head)
    same_bits(y, ssd.ssd(**per_channel)[0])
    plain, _ = ssd.ssd(**{**per_head, "z": None, "D": None})
    z = tensors["z"]
    np.testing.assert_allclose(y, (plain + per_channel["D"] * tensors["x"]) * z / (1 + np.exp(-z)), rtol=1e-13)
    repeated = {key: np.repeat(a, 2, axis=2) if key in ("B", "C") else a for key, a in per_head.items()}
    same_bits(y, ssd.ssd(**repeated)[0])
    pool = np.zeros((1, *state_shape("ssd")))
    step = np.log1p(np.exp(tensors["dt"] + tensors["dt_bias"])).clip(0.5, 0.75)
    clamped, _ = ssd.ssd(**{**per_head, "dt": step, "dt_bias": None}, dt_softplus=False)
    decoded = ssd.ssd_update(**per_head, state_pool=pool, read_slots=np.array([0]), dt_limit=(0.5, 0.75))
    np.testing.assert_allclose(decoded, clamped, rtol=1e-13)


# ---------------------------------------------------------------------------------------------------------------------
# The convolution and the ids against their second definitions
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_convolution_and_its_formula_agree(width: int, activation: str | None) -> None:
    """Small integers, so that only silu can round: a last bit at most, none without it."""
    rng, cu = np.random.default_rng(width), np.array([0, 1, 3, 3, 8, 9])

    def whole(*shape: int) -> Array:
        return rng.integers(-4, 5, shape).astype(np.float64)

    x, weight, bias, pool = whole(1, 11, 3), whole(3, width), whole(3), whole(7, 3, width)
    x[0, 9:] = np.nan
    reads, writes = np.array([1, -1, 4, -5, 2]), np.array([1, 3, -1, -1, 6])
    packed_given: Any = {"cu_seqlens": cu, "initial_windows": pool[:5], "activation": activation}
    for first, second in zip(conv.causal_conv1d(x, weight, bias, **packed_given),
                             second_conv.causal_conv1d(x, weight, bias, **packed_given), strict=True):  # fmt: skip
        agree(first, second, 52)
    slots: Any = {"read_slots": reads, "write_slots": writes, "activation": activation}
    windows, both = whole(3, 3, width), [(module, pool.copy()) for module in (conv, second_conv)]
    written = [windows.copy(), windows.copy()]
    outputs = [
        module.causal_conv1d_prefill(x, weight, None, cu, mine, **slots, snapshot_positions=np.array([9, -1, 3]),
                                     snapshot_windows=kept)
        for (module, mine), kept in zip(both, written, strict=True)
    ]  # fmt: skip
    agree(outputs[0], outputs[1], 52)
    same_bits(both[0][1], both[1][1])
    same_bits(written[0], written[1])
    entries, token = whole(7, 4, 3, width), whole(5, 3, 3)
    written = [entries.copy(), entries.copy()]
    outputs = [
        module.causal_conv1d_update(
            token, weight, bias, mine, **slots, intermediate_windows=kept, num_accepted=np.array([3, 0, -1, 0, 0]),
            num_tokens=np.array([3, 2, 1, 3, 0]),
        )
        for (module, mine), kept in zip(both, written, strict=True)
    ]  # fmt: skip
    agree(outputs[0], outputs[1], 52)
    same_bits(both[0][1], both[1][1])
    same_bits(written[0], written[1])


def test_ids_by_counting() -> None:
    for total, bounds in itertools.product(range(5), itertools.product(range(5), repeat=3)):
        offsets = [0, *bounds]
        if offsets == sorted(offsets) and offsets[-1] <= total:
            params = PackedSeqParams(cu_seqlens_q=offsets)
            ids = packed.build_packed_seq_idx(params, total)
            same_bits(ids, second_packed.build_packed_seq_idx(params, total))
            for given in ({"seq_idx": ids, "cu_seqlens": None}, {"seq_idx": None, "cu_seqlens": np.array(offsets)}):
                runs = packed.unpack_segments((1, total), **given, entering=None)
                lists = second_packed.segments((1, total), **given, entering=None)
                assert [(row, list(range(total))[tokens]) for row, tokens in runs] == lists


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.5, -1024.5, -np.inf, np.nan])
@every_sibling
def test_log_decay_outside_its_domain_is_refused_and_changes_nothing(name: str, copies: int, value: float) -> None:
    tensors = drawn(name, copies, 1, 6)
    tensors["g"][0, 4, 2] = value
    pool, entries = guarded(name, (3,), [0, 1]), guarded(name, (3, 6), [])
    before, place = pool.tobytes(), r"g\[0, 4, 2(, 0)?\]=.*\(NUM-3\)"
    slots: Any = {"state_pool": pool, "read_slots": np.array([0])}
    with pytest.raises(UnsupportedError, match=place):
        mixer(name, copies)(**tensors)
    with pytest.raises(UnsupportedError, match=place):
        mixer(name, copies, "_prefill")(**tensors, **slots, cu_seqlens=np.array([0, 6]))
    with pytest.raises(UnsupportedError, match=place):
        mixer(name, copies, "_update")(**tensors, **slots, intermediate_states=entries)
    assert pool.tobytes() == before
    assert np.isnan(entries).all()
    mixer(name, copies)(**tensors, cu_seqlens=np.array([0, 4]))  # past the last offset it reaches nothing
    mixer(name, copies, "_update")(**tensors, **slots, num_tokens=np.array([4]))
    mixer(name, copies, "_prefill")(
        **tensors, state_pool=pool, read_slots=np.array([0, -1]), cu_seqlens=np.array([0, 4, 6])
    )


@pytest.mark.parametrize("limit", [(1.0, 0.5), (0.0, np.nan), 3.0, None])
def test_limits_that_are_none_are_refused(limit: Any) -> None:
    with pytest.raises(UnsupportedError, match="SSD-6"):
        ssd.ssd(**drawn_ssd(1, 2), dt_limit=limit)


def test_commit_accepted() -> None:
    window, state = np.zeros((4, 2)), np.full((4, 2, 2), np.nan)
    windows, states = np.arange(24.0).reshape(4, 3, 2), np.arange(48.0).reshape(4, 3, 2, 2)
    index = np.array([2, -1, 0, 3]), np.array([1, 0, 2, -1])
    delta.commit_accepted([window, state], [windows, states], *index)
    others = [np.zeros((4, 2)), np.full((4, 2, 2), np.nan)]
    second_delta.commit_accepted(others, [windows, states], *index)
    same_bits(window, others[0])
    same_bits(state, others[1])
    same_bits(window[2], windows[2, 1])
    same_bits(state[0], states[0, 2])
    assert np.isnan(state[[1, 3]]).all()
    one, zero = np.array([1]), np.array([0])
    refused: list[tuple[type[Exception], str, Any]] = [
        (SlotError, "SLOT-5", ([window], [windows], np.array([4]), zero)),
        (SlotError, "SLOT-4", ([window], [windows], np.array([1, 1]), np.array([0, 0]))),
        (SlotError, "SPEC-3", ([window], [windows], one, np.array([3]))),
        (SlotError, "SLOT-5", ([window], [windows], one * 1.0, zero)),
        (ShapeError, "ERR-1", ([window], [states], one, zero)),
        (ShapeError, "ERR-1", ([window, state], [windows], one, zero)),
        (ShapeError, "ERR-1", ([window], [windows], one, np.array([0, 0]))),
        (DtypeError, "ERR-1", ([window], [windows.astype(np.float32)], one, zero)),
    ]
    before = window.copy()
    for error, label, arguments in refused:
        with pytest.raises(error, match=label):
            delta.commit_accepted(*arguments)
    same_bits(window, before)


# ---------------------------------------------------------------------------------------------------------------------
# Gates and norms
# ---------------------------------------------------------------------------------------------------------------------

ENDS = np.array([-1000.0, -745, -60, -18, -1, 0, 0.5, 19.99, 20, 20.001, 500])


@pytest.mark.parametrize("name", ["f64", "f32", "bf16"])
def test_gates_against_decimals(name: str) -> None:
    rng = np.random.default_rng(5)
    a = round_to(np.concatenate([ENDS, rng.normal(size=29) * 4]).reshape(5, 2, 4), name)
    A_log, bias = round_to(np.array([-np.inf, 0.0, 1.0, 2.5]), name), round_to(rng.normal(size=4), name)
    f, rates, biases = a[:, :, :, None], A_log[:, None][1:].ravel(), bias[:, None]
    kind = DTYPES["f64" if name == "f64" else "f32"]
    pairs = [
        (gates.softplus_gate(a, A_log, bias), second_gates.softplus_gate(a, A_log, bias)),
        (gates.softplus_gate(a, A_log), second_gates.softplus_gate(a, A_log)),
        (gates.kda_gate(f, A_log, biases), second_gates.kda_gate(f, A_log, biases)),
        (gates.kda_gate(f), second_gates.kda_gate(f)),
        (gates.kda_gate(f[:, :, 1:], rates, lower_bound=-5.0),
         second_gates.kda_gate(f[:, :, 1:], rates, lower_bound=-5.0)),
        (gates.beta_gate(a), second_gates.beta_gate(a)),
        (gates.beta_gate(a, allow_neg_eigval=True), second_gates.beta_gate(a, allow_neg_eigval=True)),
    ]  # fmt: skip
    for first, second in pairs:
        assert first.dtype == second.dtype == kind
        np.testing.assert_allclose(first, second, rtol=2.0**-42 if name == "f64" else 2.0**-23, atol=1e-310)
    assert (gates.softplus_gate(round_to(np.full((1, 4), 30.0), name), A_log)[0, :2] == [0, -30]).all()


@pytest.mark.parametrize("bound", [0.5, -2000.0, np.nan])
def test_lower_bound_is_a_log_decay(bound: float) -> None:
    with pytest.raises(UnsupportedError, match="GATE-4"):
        gates.kda_gate(np.zeros((1, 1, 2)), lower_bound=bound)


@pytest.mark.parametrize("settings", [
    {}, {"norm_before_gate": True}, {"gate_activation": "sigmoid", "norm_before_gate": True}, {"group_size": 4},
    {"group_size": 2, "gate_activation": "sigmoid"}, {"eps": 0.5},
])  # fmt: skip
@pytest.mark.parametrize("gated", [True, False])
def test_norms_against_decimals_and_autograd(settings: Any, gated: bool) -> None:
    rng = np.random.default_rng(6)
    x, z = rng.normal(size=(2, 3, 8)), rng.normal(size=(2, 3, 8)) if gated else None
    for size in {8, settings.get("group_size", 8)}:
        weight, cotangent = rng.normal(size=size), rng.normal(size=x.shape)
        y = norms.rmsnorm_gated(x, z, weight, **settings)
        np.testing.assert_allclose(y, second_norms.rmsnorm_gated(x, z, weight, **settings), rtol=2.0**-50)
        grads = norms.rmsnorm_gated_grad({"y": cotangent}, x, z, weight, **settings)
        compare_autograd(lambda given: {"y": torch_norm(**given, **settings)}, {"x": x, "z": z, "weight": weight},
                         {"y": cotangent}, {"y": y}, grads)  # fmt: skip
    y = norms.l2norm(x)
    np.testing.assert_allclose(y, second_norms.l2norm(x), rtol=2.0**-50)
    compare_autograd(lambda given: {"y": given["x"] / (given["x"].pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()},
                     {"x": x}, {"y": z if z is not None else x}, {"y": y},
                     norms.l2norm_grad({"y": z if z is not None else x}, x))  # fmt: skip


def torch_norm(
    x: Any, weight: Any, z: Any = None, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, gate_activation: str = "silu",
) -> Any:  # fmt: skip
    act = {"silu": fn.silu, "sigmoid": torch.sigmoid}[gate_activation]
    inner = x if z is None or norm_before_gate else x * act(z)
    grouped = inner.unflatten(-1, (-1, group_size or x.shape[-1]))
    y = (grouped / (grouped.pow(2).mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    y = y * weight.repeat(x.shape[-1] // weight.shape[0])
    return y * act(z) if z is not None and norm_before_gate else y


def test_norm_groups_must_fit() -> None:
    x = np.ones((1, 8))
    for size, weight in ((3, np.ones(8)), (0, np.ones(8)), (4, np.ones(2)), (None, np.ones(4))):
        with pytest.raises(ShapeError, match="NORM-3"):
            norms.rmsnorm_gated(x, None, weight, group_size=size)


@pytest.mark.parametrize(("name", "settings"), [
    ("softplus_gate", {}), ("kda_gate", {}), ("kda_gate", {"lower_bound": -5.0}), ("beta_gate", {}),
    ("beta_gate", {"allow_neg_eigval": True}),
])  # fmt: skip
def test_gradients_of_gates(name: str, settings: Any) -> None:
    rng = np.random.default_rng(7)
    shape = (3, 2, 4, 5) if name == "kda_gate" else (3, 2, 4)
    token = rng.normal(size=shape) * 8
    rates, bias = rng.normal(size=4), rng.normal(size=shape[2:])
    choices: list[Tensors] = [{"b": token}] if name == "beta_gate" else [
        {"f" if name == "kda_gate" else "a": token, "A_log": rates, "dt_bias": bias},
        {"f" if name == "kda_gate" else "a": token, **({} if name == "kda_gate" else {"A_log": rates})},
    ]  # fmt: skip
    result = "beta" if name == "beta_gate" else "g"

    def formula(given: dict[str, Any]) -> dict[str, Any]:
        if name == "beta_gate":
            return {"beta": torch.sigmoid(given["b"]) * (2 if settings.get("allow_neg_eigval") else 1)}
        inner = given.get("f", given.get("a")) + given.get("dt_bias", 0)
        rate = given["A_log"].exp().reshape(4, *[1] * (len(shape) - 3)) if "A_log" in given else 1
        if "lower_bound" in settings:
            return {"g": settings["lower_bound"] * torch.sigmoid(rate * inner)}
        return {"g": -rate * fn.softplus(inner, threshold=20.0)}

    for given in choices:
        cotangent = {result: rng.normal(size=shape)}
        value = {result: getattr(gates, name)(**given, **settings)}
        grads = getattr(gates, f"{name}_grad")(cotangent, **given, **settings)
        compare_autograd(formula, given, cotangent, value, grads)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of the recurrences
# ---------------------------------------------------------------------------------------------------------------------


def compare_autograd(
    formula: Callable[[dict[str, Any]], dict[str, Any]], given: Mapping[str, Array | None],
    cotangents: Mapping[str, Array], values: Mapping[str, Array], grads: Mapping[str, Array],
) -> None:  # fmt: skip
    """Values and gradients against torch in float64."""
    leaves = {name: torch.tensor(a, requires_grad=True) for name, a in given.items() if a is not None}
    results = formula(leaves)
    for name, value in values.items():
        np.testing.assert_allclose(value, results[name].detach().numpy(), rtol=1e-10, atol=1e-12)
    loss = sum((results[name] * torch.from_numpy(c)).sum() for name, c in cotangents.items())
    assert set(grads) == set(leaves)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        wanted = np.zeros(leaf.shape) if gradient is None else gradient.numpy()
        np.testing.assert_allclose(grads[name], wanted, rtol=1e-9, atol=1e-11, err_msg=name)


def torch_delta(given: dict[str, Any], cu: list[int], copies: int, norm: bool) -> dict[str, Any]:
    """The delta family, written with outer products of whole matrices."""
    q, k, v, g, beta = (given[name][0] for name in ("q", "k", "v", "g", "beta"))
    if norm:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    repeat, scale = v.shape[1] // q.shape[1], q.shape[-1] ** -0.5
    q, k = q.repeat_interleave(repeat, 1) * scale, k.repeat_interleave(repeat, 1)
    o, final = [torch.zeros(v.shape[1:], dtype=v.dtype) for _ in range(q.shape[0])], []
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        state = given["initial_state"][n]
        for t in range(start, end):
            state = state * g[t].exp().reshape(v.shape[1], -1, 1)
            for row in range(t * copies, t * copies + copies):
                rest = v[row] - torch.einsum("hkv,hk->hv", state, k[row])
                state = state + torch.einsum("hk,hv->hkv", k[row], beta[row][:, None] * rest)
            o[t] = torch.einsum("hkv,hk->hv", state, q[t])
        final.append(state)
    return {"o": torch.stack(o)[None], "final_state": torch.stack(final)}


@pytest.mark.parametrize("norm", [False, True])
@every_sibling
def test_gradients_of_the_delta_family(name: str, copies: int, norm: bool) -> None:
    rng, cu = np.random.default_rng(8), [0, 3, 3, 7, 8]
    tensors = {**drawn(name, copies, 1, 9), "initial_state": rng.normal(size=(4, HV, K, V))}
    tensors["g"][0, 5] = F
    cotangents = {"o": rng.normal(size=(1, 9, HV, V)), "final_state": rng.normal(size=(4, HV, K, V))}
    settings: Any = {"use_qk_l2norm": norm, **copies_of(name, copies)}
    grads = getattr(delta_grad, f"{name}_grad")(cotangents, **tensors, cu_seqlens=np.array(cu), **settings)
    o, final = getattr(delta, name)(**tensors, cu_seqlens=np.array(cu), output_final_state=True, **settings)
    compare_autograd(lambda given: torch_delta(given, cu, copies, norm), tensors, cotangents,
                     {"o": o, "final_state": final}, grads)  # fmt: skip
    same_bits(grads["initial_state"][1], cotangents["final_state"][1])
    only = getattr(delta_grad, f"{name}_grad")({"o": cotangents["o"]}, **cut(
        {key: a for key, a in tensors.items() if key != "initial_state"}, copies, 0, 3), **settings)  # fmt: skip
    assert set(only) == {"q", "k", "v", "g", "beta"}


def torch_ssd(given: dict[str, Any], cu: list[int], limit: tuple[float, float]) -> dict[str, Any]:
    x, raw, A, B, C = given["x"][0], given["dt"][0], given["A"], given["B"][0], given["C"][0]
    dt = fn.softplus(raw + given.get("dt_bias", 0), threshold=20.0).clamp(*limit)
    B, C = (a.repeat_interleave(x.shape[1] // a.shape[1], 1) for a in (B, C))
    y, final = [torch.zeros(x.shape[1:], dtype=x.dtype) for _ in range(x.shape[0])], []
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        state = given["initial_state"][n] if "initial_state" in given else x.new_zeros(*x.shape[1:], B.shape[2])
        for t in range(start, end):
            state = state * (dt[t] * A).exp()[:, None, None]
            state = state + torch.einsum("hp,hr->hpr", dt[t][:, None] * x[t], B[t])
            y[t] = torch.einsum("hpr,hr->hp", state, C[t])
            if "D" in given:
                y[t] = y[t] + x[t] * given["D"].reshape(x.shape[1], -1)
            if "z" in given:
                y[t] = y[t] * fn.silu(given["z"][0, t])
        final.append(state)
    return {"y": torch.stack(y)[None], "final_state": torch.stack(final)}


@pytest.mark.parametrize("absent", [(), ("D",), ("z",), ("dt_bias", "initial_state"), ("D", "z")])
def test_gradients_of_mamba2(absent: tuple[str, ...]) -> None:
    rng, cu, limit = np.random.default_rng(8), [0, 3, 3, 7, 8], (0.2, 1.4)
    tensors = {**drawn_ssd(1, 9), "initial_state": rng.normal(size=(4, 4, 5, 6))}
    if absent == ("z",):
        tensors["D"] = rng.normal(size=4)
    tensors = {name: a for name, a in tensors.items() if name not in absent}
    cotangents = {"y": rng.normal(size=(1, 9, 4, 5)), "final_state": rng.normal(size=(4, 4, 5, 6))}
    grads = ssd_grad.ssd_grad(cotangents, **tensors, cu_seqlens=np.array(cu), dt_limit=limit)
    y, final = ssd.ssd(**tensors, cu_seqlens=np.array(cu), dt_limit=limit, output_final_state=True)
    assert final is not None
    compare_autograd(lambda given: torch_ssd(given, cu, limit), tensors, cotangents,
                     {"y": y, "final_state": final}, grads)  # fmt: skip
    ids = np.array([[0, 0, 0, 2, 2, 2, 2, 3, -1]])
    by_ids = ssd_grad.ssd_grad(cotangents, **tensors, seq_idx=ids, dt_limit=limit)
    for name, gradient in grads.items():
        same_bits(by_ids[name], gradient)


@every_mixer
def test_gradients_against_finite_differences(name: str, copies: int) -> None:
    """Central differences in one random direction a tensor."""
    rng, cu = np.random.default_rng(9), np.array([0, 2, 5])
    tensors = {**mixer_inputs(name, copies, 1, 5), "initial_state": rng.normal(size=(2, *state_shape(name)))}
    if "g" in tensors:
        tensors["g"] = tensors["g"] - 0.25
    run, result = mixer(name, copies), "y" if name == "ssd" else "o"
    y, final = run(**tensors, cu_seqlens=cu, output_final_state=True)
    cotangents = {result: rng.normal(size=y.shape), "final_state": rng.normal(size=final.shape)}

    def loss(moved: Tensors) -> float:
        y, final = run(**moved, cu_seqlens=cu, output_final_state=True)
        return float((y * cotangents[result]).sum() + (final * cotangents["final_state"]).sum())

    module: Any = ssd_grad if name == "ssd" else delta_grad
    grads = getattr(module, f"{name}_grad")(cotangents, **tensors, cu_seqlens=cu, **copies_of(name, copies))
    assert set(grads) == set(tensors)
    for key, tensor in tensors.items():
        way, small = rng.normal(size=tensor.shape), 1e-5
        rise = loss({**tensors, key: tensor + small * way}) - loss({**tensors, key: tensor - small * way})
        assert rise / (2 * small) == pytest.approx(float((grads[key] * way).sum()), rel=1e-6, abs=1e-7), key


@every_mixer
def test_gradients_do_not_see_padding_or_other_segments(name: str, copies: int) -> None:
    """NaN past the last offset, in inputs and cotangents, reaches nothing (PACK-8, GRAD-4); segments do not meet."""
    cu = np.array([0, 3, 5])
    tensors = {key: a.copy() for key, a in mixer_inputs(name, copies, 1, 7).items()}
    result, module = ("y", ssd_grad) if name == "ssd" else ("o", delta_grad)
    shape = (1, 7, *state_shape(name)[:1], state_shape(name)[1] if name == "ssd" else V)
    cotangent = np.random.default_rng(9).normal(size=shape)
    grad: Any = getattr(module, f"{name}_grad")

    def grads() -> dict[str, Array]:
        found: dict[str, Array] = grad({result: cotangent}, **tensors, cu_seqlens=cu, **copies_of(name, copies))
        return found

    clean = grads()
    for key, part in cut(tensors, copies, 5, 7).items():
        if key in TOKEN_WISE:
            part[...] = np.nan
    cotangent[:, 5:] = np.nan
    for key, gradient in grads().items():
        same_bits(gradient, clean[key])
        if key in TOKEN_WISE:
            assert (cut({key: gradient}, copies, 5, 7)[key] == 0).all()
    cotangent[:, :3] = 0
    for key, gradient in grads().items():
        if key in TOKEN_WISE:
            assert (cut({key: gradient}, copies, 0, 3)[key] == 0).all()
            same_bits(cut({key: gradient}, copies, 3, 5)[key], cut(clean, copies, 3, 5)[key])


# ---------------------------------------------------------------------------------------------------------------------
# Rounding sites
# ---------------------------------------------------------------------------------------------------------------------

SITES = {
    "gated_delta_rule": ["entering", "g", "decay", "k_correct", "state_correct", "v", "correction", "k_write", "state",
                         "q", "state_read"],
    "ssd": ["entering", "softplus", "g", "decay", "x_dt", "B", "state", "state_read", "C", "gate"],
}  # fmt: skip


@every_mixer
def test_sites_are_named_and_each_one_matters(name: str, copies: int) -> None:
    tensors, state = mixer_inputs(name, copies, 1, 3), np.random.default_rng(4).normal(size=(1, *state_shape(name)))
    run, met = mixer(name, copies), []
    exact, last = run(**tensors, initial_state=state, output_final_state=True)

    def note(site: str, value: Array) -> Array:
        met.append(site)
        return value

    with perturbing(note):
        same_bits(run(**tensors, initial_state=state)[0], exact)
    expected = SITES["ssd" if name == "ssd" else "gated_delta_rule"]
    assert list(dict.fromkeys(met)) == expected
    assert met.count("entering") == 1
    assert met.count("decay") == 3
    assert met.count("state") == 3 * copies
    for site in expected:
        with perturbing(lambda at, value, site=site: value * (1 + 2.0**-20) if at == site else value):
            moved, moved_last = run(**tensors, initial_state=state, output_final_state=True)
        assert (moved != exact).any() or (moved_last != last).any(), site
