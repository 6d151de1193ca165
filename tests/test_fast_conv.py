"""The convolution's kernels against the reference: exact stories bit for bit, random ones within a rounding or two."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from statescan.conformance.adapters import interpreter
from statescan.fast import checks, conv, conv_launch
from statescan.fast.conv_launch import Tile
from statescan.fast.kernels import common
from statescan.reference import conv as reference
from statescan.reference.arrays import DTYPES
from statescan.spec.contract import DtypeError, SlotError, UnsupportedError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    interpreter.look_once()
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAN = float("nan")
LENGTHS = [5, 0, 3, 2, 1, 9, 4]
READ = [0, 1, -1, 3, -2, 5, 6]
WRITE = [0, 8, 2, -1, -3, 9, 6]
"""In place, split and empty, fresh, score only, padding, split, in place."""
C = 6
every_width = pytest.mark.parametrize("width", [2, 3, 4])


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    """Small whole numbers: sums of their products are exact."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(DEVICE, dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def index(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def pool_of(make: Callable[..., Tensor], slots: int, width: int, layout: str, dtype: torch.dtype = F32) -> Tensor:
    """A pool `[slots, C, W]`: columns apart (WC), those of a channel together (CW), or gaps; slot 7 is NaN."""
    pool = make(slots, C, width, seed=7, dtype=dtype)
    pool[7] = NAN
    if layout == "WC":
        return pool.mT.contiguous().mT
    if layout == "gaps":
        base = torch.full((2 * slots, 2 * C, 2 * width), NAN, device=DEVICE, dtype=dtype)
        base[::2, ::2, ::2] = pool
        return base[::2, ::2, ::2]
    return pool


def numpy(t: Tensor | None, wide: bool = True) -> Any:
    if t is None:
        return None
    if not t.is_floating_point():
        return t.cpu().numpy()
    return t.detach().double().cpu().numpy() if wide else to_numpy(t)


def to_numpy(t: Tensor) -> Any:
    """The same element type; bfloat16 as ml_dtypes has it."""
    t = t.detach().cpu().contiguous()
    return t.view(torch.int16).numpy().view(DTYPES["bf16"]) if t.dtype == BF16 else t.numpy()


def equal(got: Tensor, want: Any) -> None:
    np.testing.assert_array_equal(numpy(got), np.asarray(want, np.float64))


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({4: torch.int32, 2: torch.int16}[t.element_size()])


def pack(make: Callable[..., Tensor], width: int, tail: int = 3, dtype: torch.dtype = F32) -> dict[str, Any]:
    """Tensors of a pack with NaN in its padding row and behind its last offset."""
    total = sum(LENGTHS)
    x = make(1, total + tail, C, dtype=dtype)
    x[:, total:] = NAN
    x[:, sum(LENGTHS[:4]) : sum(LENGTHS[:5])] = NAN
    offsets = index([0, *accumulate(LENGTHS)])
    return {"x": x, "weight": make(C, width, seed=1, dtype=dtype), "bias": make(C, seed=2, dtype=dtype),
            "cu_seqlens": offsets}  # fmt: skip


def run_prefill(
    call: dict[str, Any], pool: Tensor, read: list[int], write: list[int], activation: str | None = None,
    positions: list[int] | None = None, wide: bool = True,
) -> tuple[list[Tensor], list[Any]]:  # fmt: skip
    """y, the pool and the snapshots of the kernel and of the reference."""
    at = None if positions is None else index(positions)
    kept = None if at is None else torch.full((len(at), *pool.shape[1:]), NAN, device=DEVICE, dtype=pool.dtype)
    pools = [pool.clone(memory_format=torch.preserve_format), kept]
    expected = [numpy(pool, wide).copy(), None if kept is None else numpy(kept, wide).copy()]
    tensors = (call["x"], call["weight"], call["bias"], call["cu_seqlens"])
    y = conv.causal_conv1d_prefill(*tensors, pool, index(read), index(write), at, kept, activation=activation)
    want = reference.causal_conv1d_prefill(
        *(numpy(t, wide) for t in tensors), expected[0], np.array(read), np.array(write),
        None if positions is None else np.array(positions), expected[1], activation=activation,
    )  # fmt: skip
    untouched = [s for s in range(len(pool)) if s not in write]
    assert torch.equal(bits(pool[untouched]), bits(pools[0][untouched]))  # type: ignore[index]
    return [t for t in (y, pool, kept) if t is not None], [a for a in (want, *expected) if a is not None]


# ---------------------------------------------------------------------------------------------------------------------
# Prefill
# ---------------------------------------------------------------------------------------------------------------------


@every_width
@pytest.mark.parametrize("layout", ["WC", "CW", "gaps"])
def test_prefill_of_every_kind_of_row_is_exact(width: int, layout: str) -> None:
    got, want = run_prefill(pack(whole, width), pool_of(whole, 10, width, layout), READ, WRITE)
    for a, b in zip(got, want, strict=True):
        equal(a, b)


@every_width
def test_snapshots_at_every_position(width: int) -> None:
    positions = [*range(sum(LENGTHS), 0, -1), -1]
    got, want = run_prefill(pack(whole, width), pool_of(whole, 10, width, "WC"), READ, WRITE, positions=positions)
    for a, b in zip(got, want, strict=True):
        equal(a, b)


@pytest.mark.parametrize(
    ("dtype", "pool"), [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16), (F16, F32)]
)
def test_prefill_with_silu_is_rounded_once(dtype: torch.dtype, pool: torch.dtype) -> None:
    call = pack(normal, 4, dtype=dtype)
    got, want = run_prefill(call, pool_of(normal, 10, 4, "CW", pool), READ, WRITE, "silu", wide=False)
    unit, y = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}[dtype], np.asarray(want[0], np.float64)
    assert (np.abs(numpy(got[0]) - y) <= unit * np.abs(y) + 2.0**-20).all()
    equal(got[1], want[1])  # a window is no sum: it is rounded as the reference rounds it


def test_tokens_longer_than_a_tile_and_rows_in_one_tile() -> None:
    lengths = [70, 1, 2, 0, 37, 3, 1, 1, 30]
    x = whole(1, sum(lengths) + 2, C)
    call = {"x": x, "weight": whole(C, 4), "bias": None, "cu_seqlens": index([0, *accumulate(lengths)])}
    slots = list(range(9))
    got, want = run_prefill(call, pool_of(whole, 9, 4, "WC"), slots, slots)
    equal(got[0], want[0])
    equal(got[1], want[1])


def test_no_tile_changes_a_bit() -> None:
    call = pack(normal, 4)
    outputs = []
    for tile in (Tile(16, 8, 1), Tile(64, 4, 1), Tile(4, 2, 1)):
        pool, y = pool_of(normal, 10, 4, "WC"), torch.empty_like(call["x"])
        conv_launch.launch_prefill(call["x"], y, call["weight"], call["bias"], call["cu_seqlens"], pool, pool,
                                   index(READ), index(WRITE), None, None, len(READ), "silu", tile)  # fmt: skip
        outputs.append((bits(y), bits(pool)))
    for y, pool in outputs[1:]:
        assert torch.equal(y, outputs[0][0])
        assert torch.equal(pool, outputs[0][1])


def test_prefill_and_update_give_the_same_bits() -> None:
    steps, rows = 5, 4
    x, weight, bias, pool = normal(rows, steps, C), normal(C, 4), normal(C), normal(rows, C, 4)
    slots, offsets = index(list(range(rows))), index([n * steps for n in range(rows + 1)])
    packed, updated = pool.clone(), pool.clone()
    y = conv.causal_conv1d_prefill(x.view(1, -1, C), weight, bias, offsets, packed, slots, activation="silu")
    again = conv.causal_conv1d_update(x, weight, bias, updated, slots, activation="silu")
    assert torch.equal(y.view(rows, steps, C), again)
    assert torch.equal(packed, updated)


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_pack_of_no_rows_and_one_of_no_tokens(tokens: int) -> None:
    x, pool = torch.full((1, tokens, C), NAN, device=DEVICE), whole(3, C, 4)
    none = index([])
    y = conv.causal_conv1d_prefill(x, whole(C, 4), None, index([0]), pool, none)
    equal(y, np.zeros((1, tokens, C)))
    before = pool.clone()
    conv.causal_conv1d_prefill(x[:, :0], whole(C, 4), None, index([0, 0]), pool, index([2]), index([0]))
    equal(pool[0], numpy(before[2]))


# ---------------------------------------------------------------------------------------------------------------------
# Strides
# ---------------------------------------------------------------------------------------------------------------------


def spread(t: Tensor) -> Tensor:
    """The same numbers behind gaps on every axis."""
    fill = NAN if t.is_floating_point() else -(1 << 30)
    base = torch.full([2 * n + 1 for n in t.shape], fill, device=DEVICE, dtype=t.dtype)
    view = base[tuple(slice(0, 2 * n, 2) for n in t.shape)]
    view.copy_(t)
    return view


def test_strides_are_honoured_everywhere() -> None:
    call, pool = pack(whole, 4), pool_of(whole, 10, 4, "CW")
    plain = conv.causal_conv1d_prefill(*call.values(), pool.clone(), index(READ), index(WRITE))
    wide = torch.full((1, call["x"].shape[1], 3 * C), NAN, device=DEVICE)
    wide[:, :, 5 : 5 + C] = call["x"]
    for x in (wide[:, :, 5 : 5 + C], spread(call["x"]), call["x"].mT.contiguous().mT):
        given = [x, *(spread(t) for t in list(call.values())[1:])]
        slots = spread(index(READ, torch.int64)), spread(index(WRITE, torch.int64))
        y = conv.causal_conv1d_prefill(*given, spread(pool), *slots)
        assert torch.equal(bits(y), bits(plain))


# ---------------------------------------------------------------------------------------------------------------------
# Update
# ---------------------------------------------------------------------------------------------------------------------


@every_width
@pytest.mark.parametrize("layout", ["WC", "CW", "gaps"])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_update_is_exact(width: int, layout: str, steps: int) -> None:
    rows, entries = len(READ), steps + 1
    x, weight, bias = whole(rows, steps, C), whole(C, width, seed=1), whole(C, seed=2)
    x[4] = NAN  # the padding row
    pool = pool_of(whole, 10, width, layout)
    kept = torch.stack([pool_of(whole, 10, width, "CW") + j for j in range(entries)], 1)
    if layout == "gaps":
        kept = spread(kept)
    accepted = index([-1, 0, 1, entries - 1, 2 % entries, -5, 1])
    counts = index([steps, 0, 1, steps, steps, min(2, steps), 0])
    for more in ({}, {"num_tokens": counts}, {"num_accepted": accepted, "num_tokens": counts}):
        ours = [pool.clone(), kept.clone()]
        theirs = [numpy(pool).copy(), numpy(kept).copy()]
        if layout == "gaps":
            ours = [spread(pool), spread(kept)]
        y = conv.causal_conv1d_update(x, weight, bias, ours[0], index(READ), index(WRITE), ours[1], **more)
        want = reference.causal_conv1d_update(
            numpy(x), numpy(weight), numpy(bias), theirs[0], np.array(READ), np.array(WRITE), theirs[1],
            **{key: numpy(t) for key, t in more.items()},
        )  # fmt: skip
        equal(y, want)
        equal(ours[0], theirs[0])
        equal(ours[1], theirs[1])


def test_a_row_of_many_is_the_row_alone() -> None:
    """More rows than one program holds, two blocks of channels, some rows padding."""
    rows, channels = 40, 300
    x, weight, pool = normal(rows, 1, channels, dtype=BF16), normal(channels, 4, dtype=BF16), normal(60, channels, 4)
    slots = index([-1 if n % 7 == 3 else 59 - n for n in range(rows)])
    twin = pool.clone()
    y = conv.causal_conv1d_update(x, weight, None, pool, slots, activation="silu")
    for n in (0, 3, 17, 39):
        alone = conv.causal_conv1d_update(x[n : n + 1], weight, None, twin, slots[n : n + 1], activation="silu")
        assert torch.equal(bits(y[n]), bits(alone[0]))
        assert torch.equal(bits(pool[slots[n]]), bits(twin[slots[n]]))


def test_words_hold_windows_that_lie_together() -> None:
    assert conv_launch.word_type(torch.empty(3, 8, 4, dtype=BF16)) is not None
    assert conv_launch.word_type(torch.empty(3, 8, 2)) is not None
    assert conv_launch.word_type(torch.empty(3, 8, 3, dtype=BF16)) is None
    assert conv_launch.word_type(torch.empty(3, 8, 4)) is None
    assert conv_launch.word_type(torch.empty(3, 4, 8, dtype=BF16).mT) is None
    assert conv_launch.word_type(torch.empty(3, 9, 4, dtype=BF16)[:, 1:]) is not None
    assert conv_launch.word_type(torch.empty(100, dtype=BF16)[1:97].view(3, 8, 4)) is None


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


@every_width
@pytest.mark.parametrize("boundaries", ["offsets", "ids", "batch"])
@pytest.mark.parametrize("entered", [True, False])
def test_gradients_are_exact(width: int, boundaries: str, entered: bool) -> None:
    lengths = [4, 0, 2, 7, 1]
    rows, total = len(lengths), sum(lengths)
    ids = index([n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * 2, torch.int64)[None]
    x = whole(rows if boundaries == "batch" else 1, 5 if boundaries == "batch" else total + 2, C)
    given: dict[str, Any] = {
        "x": x, "weight": whole(C, width, seed=1), "bias": whole(C, seed=2),
        "seq_idx": ids if boundaries == "ids" else None,
        "cu_seqlens": index([0, *accumulate(lengths)]) if boundaries == "offsets" else None,
        "initial_windows": whole(rows, C, width, seed=3) if entered else None,
    }  # fmt: skip
    cotangents = {"y": whole(*x.shape, seed=4), "final_windows": whole(rows, C, width, seed=5)}
    if boundaries != "batch":
        x[:, total:] = NAN
        cotangents["y"][:, total:] = NAN
    names = [name for name in ("x", "weight", "bias", "initial_windows") if given[name] is not None]
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    results = conv.causal_conv1d(**{**given, **leaves})
    found = torch.autograd.grad(results, list(leaves.values()), list(cotangents.values()))
    arrays = {name: numpy(t) for name, t in given.items()}
    for got, want in zip(results, reference.causal_conv1d(**arrays), strict=True):
        equal(got, want)
    wanted = reference.causal_conv1d_grad({name: numpy(t) for name, t in cotangents.items()}, **arrays)
    for name, got in zip(names, found, strict=True):
        equal(got, wanted[name])


@pytest.mark.parametrize("of", [0, 1])
def test_one_result_alone_has_gradients(of: int) -> None:
    x, weight = whole(1, 6, C).requires_grad_(), whole(C, 4).requires_grad_()
    result = conv.causal_conv1d(x, weight, cu_seqlens=index([0, 2, 6]))[of]
    cotangent = whole(*result.shape, seed=9)
    found = torch.autograd.grad(result, [x, weight], cotangent, allow_unused=True)
    name = ("y", "final_windows")[of]
    want = reference.causal_conv1d_grad(
        {name: numpy(cotangent)}, numpy(x), numpy(weight), cu_seqlens=np.array([0, 2, 6])
    )
    equal(found[0], want["x"])
    equal(found[1], want["weight"])


def test_silu_gradients_over_several_tiles() -> None:
    lengths = [150, 3, 2, 75]
    x, weight, bias = (t.requires_grad_() for t in (normal(1, 240, 4), normal(4, 4), normal(4)))
    y, _ = conv.causal_conv1d(x, weight, bias, None, index([0, *accumulate(lengths)]), activation="silu")
    cotangent = normal(1, 240, 4, seed=3)
    found = torch.autograd.grad(y, [x, weight, bias], cotangent)
    want = reference.causal_conv1d_grad(
        {"y": numpy(cotangent)}, numpy(x), numpy(weight), numpy(bias), None, np.array([0, *accumulate(lengths)]),
        activation="silu",
    )  # fmt: skip
    for got, name in zip(found, ("x", "weight", "bias"), strict=True):
        np.testing.assert_allclose(numpy(got), want[name], rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA tensor without check=True: no value is looked at."""
    monkeypatch.setattr(checks, "check_rules", lambda *_: {})


@pytest.mark.parametrize("field", ["read", "write"])
@pytest.mark.usefixtures("unchecked")
def test_a_slot_past_the_pool_makes_a_padding_row(field: str) -> None:
    call, pool = pack(whole, 4), pool_of(whole, 10, 4, "WC")
    slots = {"read": index(READ, torch.int64), "write": index(WRITE, torch.int64)}
    padded = {key: t.clone() for key, t in slots.items()}
    for place, slot in ((0, 10), (6, 1 << 40)):
        slots[field][place] = slot
        padded["read"][place] = padded["write"][place] = -1
    results = []
    for given in (slots, padded):
        own = pool.clone()
        results.append((conv.causal_conv1d_prefill(*call.values(), own, *given.values()), own))
        steps = whole(7, 2, C)
        results[-1] += (conv.causal_conv1d_update(steps, call["weight"], None, own, *given.values()), own.clone())
    for got, want in zip(*results, strict=True):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("offsets", [
    [0, 5, 5, 8, 10, 11, 20, 99], [0, 5, 3, 8, 10, 11, 20, 24], [4, 5, 5, 8, 9, 9, 9, 9], [-9, 5, 5, 8, 10, 11, 20, 24],
])  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_wrong_offsets_reach_no_foreign_memory(offsets: list[int]) -> None:
    call, pool = pack(whole, 4), pool_of(whole, 10, 4, "WC")
    call["cu_seqlens"] = index(offsets)
    before = pool.clone()
    y = conv.causal_conv1d_prefill(*call.values(), pool, index(READ), index(WRITE))
    assert torch.equal(bits(pool[[1, 3, 4, 5, 7]]), bits(before[[1, 3, 4, 5, 7]]))
    assert not y[0, offsets[-1] if offsets[-1] < 24 else 24 :].any()


@pytest.mark.usefixtures("unchecked")
def test_wrong_counts_make_padding_rows() -> None:
    x, pool, kept = whole(4, 2, C), whole(5, C, 4), whole(5, 2, C, 4)
    before = pool.clone(), kept.clone()
    counts = index([2, 0, 1 << 30, -1]), index([2, 3, 1, -4])
    y = conv.causal_conv1d_update(x, whole(C, 4), None, pool, index([0, 1, 2, 3]), None, kept, *counts)
    assert not y.any()
    assert torch.equal(pool, before[0])
    assert torch.equal(kept, before[1])


def test_what_is_refused_changes_nothing() -> None:
    call, pool = pack(whole, 4), pool_of(whole, 10, 4, "WC")
    before = pool.clone()
    with pytest.raises(SlotError, match=r"write_slots\[1\]=0 is also write_slots\[0\]"):
        conv.causal_conv1d_prefill(*call.values(), pool, index(READ), index([0, 0, 2, -1, -3, 9, 6]))
    with pytest.raises(DtypeError, match="x has type f64"):
        conv.causal_conv1d_prefill(call["x"].double(), *list(call.values())[1:], pool, index(READ))
    with pytest.raises(UnsupportedError, match="read_slots is on meta"):
        conv.causal_conv1d_prefill(*call.values(), pool, index(READ).to("meta"))
    assert torch.equal(bits(pool), bits(before))


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU tensor is meant")
def test_a_cpu_tensor_without_the_interpreter_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    monkeypatch.setattr(checks, "_passed", set())
    with pytest.raises(UnsupportedError, match="x is a tensor on cpu: the fast path runs on CUDA tensors"):
        conv.causal_conv1d(whole(1, 3, C), whole(C, 4))


# ---------------------------------------------------------------------------------------------------------------------
# Tracers
# ---------------------------------------------------------------------------------------------------------------------


def test_operations_are_registered_rightly() -> None:
    x, weight, offsets = normal(1, 5, C).requires_grad_(), normal(C, 4).requires_grad_(), index([0, 2, 5])
    windows, pool, slots = normal(2, C, 4).requires_grad_(), normal(4, C, 4), index([0, 2])
    opcheck(conv._packed_op, (x, weight, None, None, offsets, windows, "silu", None))
    fixed = (weight.detach(), None)
    opcheck(conv._prefill_op, (x.detach(), *fixed, offsets, pool, slots, None, None, None, "silu", None))
    opcheck(conv._update_op, (normal(2, 3, C), *fixed, pool, slots, None, normal(4, 3, C, 4), None, None, None, None))


def test_a_compiled_step_is_one_graph_and_the_same() -> None:
    weight, slots = normal(C, 4), index([0, 2])

    def step(x: Tensor, pool: Tensor) -> Tensor:
        return conv.causal_conv1d_update(2 * x, weight, None, pool, slots, activation="silu") + 1

    x, pool = normal(2, 1, C), normal(4, C, 4)
    twin = pool.clone()
    compiled: Any = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, pool), step(x, twin))
    assert torch.equal(pool, twin)
