"""Fused decode against the reference: exact stories bit for bit, random ones within rounding, and every index rule."""

from __future__ import annotations

import ast
import doctest
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from statescan.fast import delta, relaunch, ssd, tiling
from statescan.reference import delta as reference_delta
from statescan.reference import ssd as reference_ssd
from statescan.reference.arrays import DTYPES, Array
from statescan.spec.contract import DtypeError, ShapeError, SlotError, UnsupportedError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROUNDOFF = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
NAN = float("nan")
SIBLINGS = [("gated_delta_rule", 1), ("gated_delta_product", 2), ("gated_delta_product", 3),
            ("kimi_delta_attention", 1)]  # fmt: skip
every_sibling = pytest.mark.parametrize(("name", "copies"), SIBLINGS)
TYPES = [pytest.param("VK", F32, BF16, id="VK-f32-bf16"), pytest.param("KV", BF16, F32, id="KV-bf16-f32"),
         pytest.param("VK", F16, F16, id="VK-f16-f16")]  # fmt: skip
"""Layout, type of the pool, type of the tokens."""


@dataclass
class Call:
    """One call: the operation, its token tensors, the pool and the row tensors, and settings."""

    name: str
    tokens: dict[str, Tensor | None]
    pool: Tensor
    rows: dict[str, Tensor | None]
    settings: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.tokens, "state_pool": self.pool, **self.rows, **self.settings}


def copied(call: Call) -> Call:
    """The same call on memory of its own."""
    fresh = {k: None if t is None else t.clone() for k, t in call.rows.items()}
    return replace(call, pool=call.pool.clone(), rows=fresh)


def run(call: Call) -> Tensor:
    return getattr(delta if call.name != "ssd" else ssd, f"{call.name}_update")(**call.arguments)


def to_numpy(t: Any) -> Any:
    """The same numbers, and for bfloat16 the same bits, in the reference's arrays."""
    if not isinstance(t, Tensor):
        return t
    t = t.detach().cpu().contiguous()
    return t.view(torch.int16).numpy().view(DTYPES["bf16"]).copy() if t.dtype == BF16 else t.numpy().copy()


def expected(call: Call, exact: bool = True) -> tuple[Array, Array, Array | None]:
    """Output, pool and entries by the reference: in the call's own types, or in float64 from the same numbers."""
    given = {k: to_numpy(t) for k, t in call.arguments.items()}
    if not exact:
        given = {k: a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype.kind not in "iu" else a
                 for k, a in given.items()}  # fmt: skip
    module = reference_ssd if call.name == "ssd" else reference_delta
    with np.errstate(all="ignore"):
        o = getattr(module, f"{call.name}_update")(**given)
    return o, given["state_pool"], given["intermediate_states"]


def bits(t: Any) -> Array:
    """Bytes of a tensor or an array, +0 and -0 alike: a sum of products may end in either."""
    a = np.array(to_numpy(t))
    a[a == 0] = 0
    return np.ascontiguousarray(a).view(np.uint8)


def same_bits(got: Any, wanted: Any) -> None:
    assert got is not None
    assert np.array_equal(bits(got), bits(wanted))


def near(got: Tensor, wanted: Array) -> None:
    """One rounding of the result's type, and of what is summed up a few of float32; NaN where NaN is expected."""
    y = to_numpy(got).astype(np.float64)
    assert np.array_equal(np.isnan(y), np.isnan(wanted))
    real = ~np.isnan(wanted)
    allowed = 1.01 * ROUNDOFF[got.dtype] * np.abs(wanted[real]) + 2.0**-20 * np.abs(wanted[real]).max(initial=0)
    assert np.all(np.abs(y[real] - wanted[real]) <= allowed + 2.0**-25)


def check_exact(call: Call) -> None:
    """Bit for bit: output, the whole pool and all entries, NaN guards included."""
    o, pool, entries = expected(call)
    out = run(call)
    same_bits(out, o)
    same_bits(call.pool, pool)
    if entries is not None:
        same_bits(call.rows["intermediate_states"], entries)


def check_near(call: Call) -> None:
    """Within rounding; what the reference leaves alone, bit for bit."""
    before = copied(call)
    o, pool, entries = expected(call, exact=False)
    out = run(call)
    pairs = [(call.pool, before.pool, pool)]
    if entries is not None:
        pairs.append((call.rows["intermediate_states"], before.rows["intermediate_states"], entries))
    near(out, o)
    for now, then, wanted in pairs:
        near(now, wanted)
        kept = np.array([np.array_equal(a.astype(np.float64), b, equal_nan=True)
                         for a, b in zip(to_numpy(then), wanted, strict=True)])  # fmt: skip
        same_bits(now[torch.from_numpy(kept)], then[torch.from_numpy(kept)])


# ---------------------------------------------------------------------------------------------------------------------
# Stories
# ---------------------------------------------------------------------------------------------------------------------

READ = [2, -1, -3, 5, 0, 6, 7]
WRITE = [2, -2, 4, -1, 1, 3, 7]
ACCEPTED = [-1, 1, 1, 2, 0, -1, -5]
"""Rows: in place, padding, fresh, score only, split; split without a token, in place with two."""
SLOTS, ENTRIES = 9, 4


def on(t: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(t).to(DEVICE, dtype)


def row_tensors(steps: int, entries: bool, counts: bool, index: torch.dtype = torch.int32) -> dict[str, Any]:
    """Slots, and with `entries` the entry to resume from, with `counts` tokens of every row."""
    tokens = [steps, steps, steps - 1, steps, steps, 0, min(2, steps)]
    return {
        "read_slots": on(READ, index), "write_slots": on(WRITE, index),
        "num_accepted": on(ACCEPTED, index) if entries else None, "num_tokens": on(tokens, index) if counts else None,
    }  # fmt: skip


def poison(call: Call) -> Call:
    """NaN wherever nobody may look: slots no row reads, entries no row resumes from, tokens behind the last."""
    tokens = call.rows["num_tokens"]
    read, accepted = READ, ACCEPTED if call.rows["num_accepted"] is not None else [-1] * len(READ)
    live = {r for r, a in zip(read, accepted, strict=True) if r >= 0 and a < 0}
    call.pool[[s for s in range(SLOTS) if s not in live]] = NAN
    entries = call.rows["intermediate_states"]
    if entries is not None:
        keep = {(r, a) for r, a in zip(read, accepted, strict=True) if r >= 0 and a >= 0}
        for s in range(SLOTS):
            for i in range(ENTRIES):
                if (s, i) not in keep:
                    entries[s, i] = NAN
    steps = next(iter(call.tokens.values())).shape[1]
    counts = [steps] * len(READ) if tokens is None else tokens.tolist()
    for key in ("q", "k", "v", "g", "beta", "x", "dt", "B", "C", "z"):
        t = call.tokens.get(key)
        for n, count in enumerate(counts):
            if t is not None:
                t[n, (0 if max(READ[n], WRITE[n]) < 0 else count * (t.shape[1] // steps)) :] = NAN
    return call


def one_hot(rng: Any, shape: tuple[int, ...]) -> Array:
    return np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]


def delta_call(
    name: str, copies: int = 1, *, steps: int = 3, exact: bool = True, pool_type: torch.dtype = F32,
    tokens_type: torch.dtype = F32, layout: str = "VK", heads: int = 1, value_heads: int = 2, keys: int = 8,
    values: int = 5, entries: bool = True, counts: bool = True, seed: int = 1, **settings: Any,
) -> Call:  # fmt: skip
    """A call over all kinds of rows: one-hot keys and dyadic numbers, or random ones."""
    rng, n = np.random.default_rng(seed), len(READ)
    gate = (n, steps, value_heads, *([keys] if name.startswith("kimi") else []))
    wide = (n, steps * copies)
    slot = (value_heads, keys, values) if layout == "KV" else (value_heads, values, keys)
    if exact:
        numbers = {
            "q": rng.integers(-2, 3, (n, steps, heads, keys)), "k": one_hot(rng, (*wide, heads, keys)),
            "v": rng.integers(-8, 9, (*wide, value_heads, values)), "g": rng.choice([0, 0, 0, -1024], gate),
            "beta": rng.choice([0, 0.5, 1, 2], (*wide, value_heads)),
        }  # fmt: skip
        state = rng.integers(-16, 17, (SLOTS, 1 + ENTRIES, *slot)) / 4
    else:
        numbers = {
            "q": rng.normal(size=(n, steps, heads, keys)), "k": rng.normal(size=(*wide, heads, keys)) / keys**0.5,
            "v": rng.normal(size=(*wide, value_heads, values)), "g": -rng.random(gate) * rng.choice([0.01, 4], gate),
            "beta": rng.random((*wide, value_heads)),
        }  # fmt: skip
        state = rng.normal(size=(SLOTS, 1 + ENTRIES, *slot))
    tokens = {k: on(t, F32 if k == "g" else tokens_type) for k, t in numbers.items()}
    rows = {**row_tensors(steps, entries, counts), "intermediate_states": None}
    if entries:
        rows["intermediate_states"] = on(state[:, 1:], pool_type)
    if exact:
        settings.setdefault("scale", 0.5)
    if name == "gated_delta_product":
        settings["num_householder"] = copies
    return poison(Call(name, tokens, on(state[:, 0], pool_type), rows, {**settings, "state_layout": layout}))


# ---------------------------------------------------------------------------------------------------------------------
# Delta family
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "pool_type", "tokens_type"), TYPES)
@every_sibling
def test_exact_stories_bit_for_bit(
    name: str, copies: int, layout: str, pool_type: torch.dtype, tokens_type: torch.dtype
) -> None:
    check_exact(delta_call(name, copies, layout=layout, pool_type=pool_type, tokens_type=tokens_type))


@pytest.mark.parametrize(("entries", "counts"), [(False, False), (True, False), (False, True)])
@every_sibling
def test_one_token_a_row(name: str, copies: int, entries: bool, counts: bool) -> None:
    check_exact(delta_call(name, copies, steps=1, entries=entries, counts=counts))


@pytest.mark.parametrize(("name", "copies", "keys", "values", "layout"), [
    ("gated_delta_rule", 1, 24, 20, "KV"), ("gated_delta_rule", 1, 128, 18, "VK"),
    ("gated_delta_product", 2, 17, 33, "VK"), ("gated_delta_product", 3, 24, 20, "VK"),
    ("kimi_delta_attention", 1, 100, 9, "VK"), ("kimi_delta_attention", 1, 17, 33, "KV"),
])  # fmt: skip
def test_random_tokens_within_rounding(name: str, copies: int, keys: int, values: int, layout: str) -> None:
    """Odd sizes, several value tiles, three value heads a key head, keys normalised in the kernel or not."""
    check_near(delta_call(name, copies, steps=2, exact=False, keys=keys, values=values, value_heads=3, layout=layout,
                          use_qk_l2norm=keys != 17))  # fmt: skip


@pytest.mark.parametrize(("layout", "pool_type", "tokens_type"), [
    ("VK", BF16, BF16), ("KV", F16, BF16), ("VK", F32, F16), ("KV", BF16, F16),
])  # fmt: skip
def test_random_tokens_in_narrow_types(layout: str, pool_type: torch.dtype, tokens_type: torch.dtype) -> None:
    check_near(delta_call("gated_delta_rule", steps=2, exact=False, keys=16, values=16, layout=layout,
                          pool_type=pool_type, tokens_type=tokens_type, use_qk_l2norm=True))  # fmt: skip


@pytest.mark.parametrize("name", ["gated_delta_rule", "ssd"])
def test_the_same_call_with_other_rows_and_numbers(name: str) -> None:
    """Nothing of a call may stay behind: on a device the second one is a launch that was remembered."""
    for seed in (1, 2, 3):
        call = ssd_call(seed=seed, steps=1) if name == "ssd" else delta_call(name, seed=seed, steps=1)
        order = np.random.default_rng(seed).permutation(len(READ))
        for rows in (call.tokens, call.rows):
            for key, t in rows.items():
                if t is not None and t.shape[0] == len(READ) and key != "intermediate_states":
                    rows[key] = t[on(order)]
        check_exact(call)


def test_scale_is_the_inverse_root_of_the_keys() -> None:
    check_exact(delta_call("gated_delta_rule", keys=16, scale=None))


def test_num_accepted_without_a_row_that_resumes_reads_the_pool() -> None:
    call = delta_call("gated_delta_rule")
    call.rows["num_accepted"] = on([-1] * len(READ), torch.int64)
    other = delta_call("gated_delta_rule", entries=False)
    call.pool.copy_(other.pool)
    same_bits(run(call), run(other))
    same_bits(call.pool, other.pool)


def test_a_row_in_a_batch_has_the_bits_it_has_alone() -> None:
    """Whatever tile the size of a batch selects: the order of a sum depends on the layout only (DET-3)."""
    for layout in ("VK", "KV"):
        call = delta_call("kimi_delta_attention", exact=False, steps=2, keys=32, values=16, layout=layout,
                          entries=False, counts=False)  # fmt: skip
        lone = copied(call)
        out, row = run(call), 4
        lone.tokens = {k: t[row : row + 1] for k, t in call.tokens.items()}
        lone.rows = {k: None if t is None else t[row : row + 1] for k, t in call.rows.items()}
        q = lone.tokens["q"]
        alone = torch.empty_like(out[row : row + 1])
        small = tiling.Tile(4, 1, 32, 1) if layout == "VK" else None
        delta.launch_update(tuple(lone.tokens.values()), alone, lone.pool, lone.rows["read_slots"],
                            lone.rows["write_slots"], None, None, None, state_layout=layout, tile=small)  # fmt: skip
        assert q.shape[0] == 1
        same_bits(alone, out[row : row + 1])
        same_bits(lone.pool[WRITE[row]], call.pool[WRITE[row]])


@pytest.mark.parametrize(("name", "copies"), SIBLINGS[1::2])
def test_cuts_of_a_row_carry_float32(name: str, copies: int) -> None:
    """Three tokens in one call and in three: the same bits, with a float32 pool (CONT-1)."""
    whole = delta_call(name, copies, exact=False, keys=16, values=8, entries=False, counts=False)
    cut = copied(whole)
    out, parts = run(whole), []
    for j in range(3):
        tokens = {k: t[:, j * (t.shape[1] // 3) : (j + 1) * (t.shape[1] // 3)] for k, t in cut.tokens.items()}
        rows = dict(cut.rows)
        if j:  # a fresh row goes on from where it was stored, a split one too; a score-only row ends
            rows["read_slots"] = on([w if w >= 0 else -1 for w in WRITE], torch.int32)
            rows["write_slots"] = None
        parts.append(run(replace(cut, tokens=tokens, rows=rows)))
    stored = on(WRITE) >= 0
    same_bits(torch.cat(parts, 1)[stored], out[stored])
    same_bits(cut.pool, whole.pool)


@pytest.mark.parametrize(("name", "copies", "layout"), [
    ("gated_delta_rule", 1, "KV"), ("gated_delta_product", 2, "VK"), ("kimi_delta_attention", 1, "VK"),
])  # fmt: skip
def test_strides_of_every_tensor_are_honoured(name: str, copies: int, layout: str) -> None:
    plain = delta_call(name, copies, steps=2, exact=False, keys=12, values=6, layout=layout)
    spread = copied(plain)
    spread.tokens = {k: gaps(t) for k, t in plain.tokens.items()}
    spread.pool = gaps(spread.pool)
    spread.rows = {k: None if t is None else gaps(t) for k, t in spread.rows.items()}
    same_bits(run(spread), run(plain))
    same_bits(spread.pool, plain.pool)
    same_bits(spread.rows["intermediate_states"], plain.rows["intermediate_states"])


def gaps(t: Tensor) -> Tensor:
    """The same numbers with the last axis first in memory and a gap after every element."""
    base = torch.zeros((t.shape[-1], *t.shape[:-1], 2), dtype=t.dtype, device=t.device)
    view = base[..., 0].movedim(0, -1)
    return view.copy_(t)


def test_slots_beyond_two_to_the_31_elements() -> None:
    """Byte and element offsets pass 2^31; the memory in between is never touched."""
    call = delta_call("gated_delta_rule", entries=False, counts=False, steps=1, pool_type=BF16, keys=4, values=4)
    slots = on([1], torch.int32)
    call = replace(call, tokens={k: t[4:5] for k, t in call.tokens.items()},
                   rows={"read_slots": slots, "write_slots": None}, pool=call.pool[:2].clone())  # fmt: skip
    call.pool[1] = 3.0
    step = 2**31 + 16
    far = copied(call)
    far.pool = torch.empty(step + 64, dtype=BF16, device=DEVICE).as_strided((2, 2, 4, 4), (step, 16, 4, 1))
    far.pool[1] = call.pool[1]
    same_bits(run(far), run(call))
    same_bits(far.pool[1], call.pool[1])


def test_offsets_inside_a_tile_beyond_two_to_the_31() -> None:
    call = delta_call("gated_delta_rule", entries=False, counts=False, steps=1, pool_type=BF16, keys=4, values=2)
    call = replace(call, tokens={k: t[4:5] for k, t in call.tokens.items()},
                   rows={"read_slots": on([0], torch.int32), "write_slots": None}, pool=call.pool[:1])  # fmt: skip
    far = copied(call)
    step = 2**30
    memory = torch.empty(3 * step + 64, dtype=BF16, device=DEVICE)
    far.pool = memory.as_strided((1, 2, 2, 4), (32, 16, 4, step)).copy_(call.pool)
    same_bits(run(far), run(call))
    same_bits(far.pool, call.pool)


def test_indices_out_of_range_are_padding_without_a_check() -> None:
    """What `check=False` promises on a device: nothing is read or written outside, the row's output is 0."""
    call = delta_call("gated_delta_rule", entries=True, counts=True)
    read, write = [SLOTS, 2, 2**30, 1, 0], [0, SLOTS + 5, 4, 1, 0]
    accepted, counts = [-1, -1, -1, ENTRIES, -1], [3, 3, 3, 3, 4]
    tokens = {k: torch.ones_like(t[:5]) for k, t in call.tokens.items()}
    pool, entries = call.pool.clone(), call.rows["intermediate_states"].clone()
    out = torch.full((5, 3, 2, 5), NAN, device=DEVICE)
    delta.launch_update(
        tuple(tokens.values()), out, pool, on(read, torch.int64), on(write, torch.int64), entries,
        on(accepted, torch.int32), on(counts, torch.int32), state_layout="VK",
    )  # fmt: skip
    assert torch.all(out == 0)
    same_bits(pool, call.pool)
    same_bits(entries, call.rows["intermediate_states"])


@pytest.mark.parametrize("steps", [1, 3])
def test_no_rows_at_all(steps: int) -> None:
    call = delta_call("gated_delta_rule", steps=steps, entries=False, counts=False)
    before = call.pool.clone()
    call.tokens = {k: t[:0] for k, t in call.tokens.items()}
    call.rows = {k: None if t is None else t[:0] for k, t in call.rows.items()}
    assert run(call).shape == (0, steps, 2, 5)
    same_bits(call.pool, before)


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("slot past the pool", {"read_slots": [SLOTS, 0], "write_slots": None}, SlotError, "SLOT-5"),
    ("two rows store to one slot", {"read_slots": [1, 1], "write_slots": None}, SlotError, "SLOT-4"),
    ("slots swapped in place", {"read_slots": [0, 1], "write_slots": [1, 0]}, SlotError, "SLOT-4"),
    ("float slots", {"read_slots": [0.0, 1.0], "write_slots": None}, SlotError, "SLOT-5"),
    ("an entry that is not there", {"num_accepted": [0, ENTRIES]}, SlotError, "SPEC-3"),
    ("more tokens than the call has", {"num_tokens": [4, 0]}, UnsupportedError, "SPEC-6"),
    ("entries for fewer tokens", {"intermediate_states": slice(2)}, UnsupportedError, "SPEC-1"),
    ("a word", {"state_layout": "vk"}, UnsupportedError, "ERR-5"),
    ("a gate above 0", {"g": 0.5}, UnsupportedError, "NUM-3"),
    ("a gate that is no number", {"g": NAN}, UnsupportedError, "NUM-3"),
    ("float64", {"v": torch.float64}, DtypeError, "ERR-1"),
    ("another shape", {"beta": None}, ShapeError, "ERR-1"),
]


@pytest.mark.parametrize(("change", "error", "label"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_refused_call_changes_nothing(change: dict[str, Any], error: type[Exception], label: str) -> None:
    call = delta_call("gated_delta_rule", counts=False)
    given = call.arguments
    rows = {"read_slots": [2, 0], "write_slots": [2, 1], "num_accepted": [-1, -1], **change}
    for key in ("q", "k", "v", "g", "beta"):
        given[key] = torch.ones_like(given[key][:2]) if key != "g" else torch.zeros_like(given[key][:2])
    for key, value in rows.items():
        if isinstance(value, list):
            given[key] = on(value) if isinstance(value[0], float) else on(value, torch.int32)
        elif key in ("write_slots", "state_layout"):
            given[key] = value
    if "g" in change:
        given["g"][1, 2, 1] = change["g"]
    if "v" in change:
        given["v"] = given["v"].double()
    if "beta" in change:
        given["beta"] = given["beta"][:, :2]
    if "intermediate_states" in change:
        given["intermediate_states"] = given["intermediate_states"][:, :2]
    pool, entries = call.pool.clone(), call.rows["intermediate_states"].clone()
    with pytest.raises(error, match=label):
        delta.gated_delta_rule_update(**given, check=True)
    same_bits(call.pool, pool)
    same_bits(call.rows["intermediate_states"], entries)


def test_a_call_without_tokens_is_refused() -> None:
    call = delta_call("gated_delta_rule", entries=False, counts=False)
    call.tokens = {k: t[:, :0] for k, t in call.tokens.items()}
    with pytest.raises(UnsupportedError, match="SPEC-1"):
        run(call)


# ---------------------------------------------------------------------------------------------------------------------
# Mamba2
# ---------------------------------------------------------------------------------------------------------------------


def ssd_call(
    *, steps: int = 3, exact: bool = True, pool_type: torch.dtype = F32, tokens_type: torch.dtype = F32,
    heads: int = 2, groups: int = 1, channels: int = 5, columns: int = 8, skip: str = "channel", gated: bool = True,
    bias: bool = True, entries: bool = True, counts: bool = True, seed: int = 1, **settings: Any,
) -> Call:  # fmt: skip
    """A call over all kinds of rows. Exact: steps of 0, 1/2, 1 and a rate of 0 or -2048 keep everything dyadic."""
    rng, n = np.random.default_rng(seed), len(READ)
    token = (n, steps)
    if exact:
        numbers = {
            "x": rng.integers(-4, 5, (*token, heads, channels)), "dt": rng.choice([0, 0.5, 1], (*token, heads)),
            "A": np.resize([0, -2048], heads), "B": rng.integers(-2, 3, (*token, groups, columns)),
            "C": rng.integers(-2, 3, (*token, groups, columns)),
            "D": rng.integers(-2, 3, (heads, channels) if skip == "channel" else heads),
            "z": np.zeros((*token, heads, channels)), "dt_bias": np.full(heads, 0.5),
        }  # fmt: skip
        state = rng.integers(-16, 17, (SLOTS, 1 + ENTRIES, heads, channels, columns)) / 4
        settings = {"dt_softplus": False, "dt_limit": (0.0, 1.0), **settings}
    else:
        numbers = {
            "x": rng.normal(size=(*token, heads, channels)), "dt": 4 * rng.normal(size=(*token, heads)) - 2,
            "A": -np.resize([0.01, 1, 8], heads), "B": rng.normal(size=(*token, groups, columns)),
            "C": rng.normal(size=(*token, groups, columns)) / columns**0.5,
            "D": rng.normal(size=(heads, channels) if skip == "channel" else heads),
            "z": rng.normal(size=(*token, heads, channels)), "dt_bias": rng.normal(size=heads),
        }  # fmt: skip
        state = rng.normal(size=(SLOTS, 1 + ENTRIES, heads, channels, columns))
    absent = {"D": skip == "none", "z": not gated, "dt_bias": not bias}
    wide = ("dt", "A", "D", "dt_bias")
    tokens = {k: None if absent.get(k) else on(t, F32 if k in wide else tokens_type) for k, t in numbers.items()}
    rows = {**row_tensors(steps, entries, counts), "intermediate_states": None}
    if entries:
        rows["intermediate_states"] = on(state[:, 1:], pool_type)
    return poison(Call("ssd", tokens, on(state[:, 0], pool_type), rows, settings))


@pytest.mark.parametrize(("skip", "pool_type", "tokens_type"), [
    ("none", F32, BF16), ("head", BF16, F32), ("channel", F16, F16), ("channel", F32, F32),
])  # fmt: skip
def test_mamba2_exact_stories_bit_for_bit(skip: str, pool_type: torch.dtype, tokens_type: torch.dtype) -> None:
    check_exact(ssd_call(skip=skip, pool_type=pool_type, tokens_type=tokens_type, gated=skip == "head",
                         bias=skip != "none"))  # fmt: skip


@pytest.mark.parametrize(("entries", "counts"), [(False, False), (True, False), (False, True)])
def test_mamba2_one_token_a_row(entries: bool, counts: bool) -> None:
    check_exact(ssd_call(steps=1, entries=entries, counts=counts, gated=False))


@pytest.mark.parametrize(("channels", "columns", "gated"), [(18, 24, True), (9, 128, True), (33, 17, False)])
def test_mamba2_random_tokens_within_rounding(channels: int, columns: int, gated: bool) -> None:
    """Odd sizes, several channel tiles, heads that share a group; softplus of steps down to e^-14."""
    check_near(ssd_call(steps=2, exact=False, heads=3, channels=channels, columns=columns, gated=gated,
                        skip="head" if gated else "channel"))  # fmt: skip


def test_mamba2_limits_and_groups() -> None:
    check_near(ssd_call(steps=2, exact=False, heads=4, groups=2, channels=4, columns=8, bias=False, skip="none",
                        dt_limit=(0.01, 0.5)))  # fmt: skip


@pytest.mark.parametrize(("pool_type", "tokens_type"), [(BF16, BF16), (F16, BF16), (F32, F16)])
def test_mamba2_random_tokens_in_narrow_types(pool_type: torch.dtype, tokens_type: torch.dtype) -> None:
    check_near(ssd_call(steps=2, exact=False, channels=16, columns=16, pool_type=pool_type, tokens_type=tokens_type))


def test_mamba2_softplus_keeps_small_steps() -> None:
    """ln(1 + e^dt) to a few units in the last place, more where the exponent is large; dt itself above 20 (GATE-2)."""
    dt = np.array([-80, -40, -20, -17, -12, -3, -0.5, 0, 2, 15, 20, 20.5, 30], np.float32)
    n = len(dt)
    one = torch.ones((n, 1, 1, 1), device=DEVICE)
    pool = torch.zeros((n, 1, 1, 1), device=DEVICE)
    y = ssd.ssd_update(one, on(dt)[:, None, None], on([0.0], F32), one, one, None, None, None, pool,
                       on(range(n), torch.int64))  # fmt: skip
    exact = dt.astype(np.float64)
    exact = np.where(exact > 20, exact, np.log1p(np.exp(np.minimum(exact, 20))))
    assert np.all(np.abs(to_numpy(y).ravel() / exact - 1) <= (8 + np.abs(dt)) * 2.0**-24)


def test_mamba2_strides_of_every_tensor_are_honoured() -> None:
    plain = ssd_call(exact=False, groups=2, columns=12)
    spread = copied(plain)
    spread.tokens = {k: None if t is None else gaps(t) for k, t in plain.tokens.items()}
    spread.pool = gaps(spread.pool)
    spread.rows = {k: None if t is None else gaps(t) for k, t in spread.rows.items()}
    same_bits(run(spread), run(plain))
    same_bits(spread.pool, plain.pool)
    same_bits(spread.rows["intermediate_states"], plain.rows["intermediate_states"])


def test_mamba2_cuts_of_a_row_carry_float32() -> None:
    whole = ssd_call(exact=False, entries=False, counts=False, columns=16)
    cut = copied(whole)
    out, parts = run(whole), []
    for j in range(3):
        tokens = {k: t if k in ("A", "D", "dt_bias") else t[:, j : j + 1] for k, t in cut.tokens.items()}
        rows = dict(cut.rows)
        if j:
            rows["read_slots"] = on([w if w >= 0 else -1 for w in WRITE], torch.int32)
            rows["write_slots"] = None
        parts.append(run(replace(cut, tokens=tokens, rows=rows)))
    stored = on(WRITE) >= 0
    same_bits(torch.cat(parts, 1)[stored], out[stored])
    same_bits(cut.pool, whole.pool)


@pytest.mark.parametrize("limit", [(1.0,), (2.0, 1.0), None, (0.0, NAN)])
def test_mamba2_limits_are_a_pair_in_order(limit: Any) -> None:
    with pytest.raises(UnsupportedError, match="SSD-6"):
        run(ssd_call(dt_limit=limit))


# ---------------------------------------------------------------------------------------------------------------------
# Rollback, tracing, tiles, generated code
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [False, True])
def test_commit_copies_windows_and_states_together(spread: bool) -> None:
    rng = np.random.default_rng(3)
    pools = [on(rng.normal(size=(4, 3, 4)), BF16), on(rng.normal(size=(4, 2, 4, 5)), F32)]
    entries = [on(rng.normal(size=(4, 3, 3, 4)), BF16), on(rng.normal(size=(4, 3, 2, 4, 5)), F32)]
    entries[0][1, 2, 0, 0] = NAN
    slots, accepted = on([1, -1, 3, 0], torch.int32), on([2, 1, 0, -1], torch.int64)
    wanted, given = [to_numpy(p) for p in pools], [to_numpy(e) for e in entries]
    reference_delta.commit_accepted(wanted, given, to_numpy(slots), to_numpy(accepted))
    if spread:
        pools, entries = [gaps(p) for p in pools], [gaps(e) for e in entries]
    delta.commit_accepted(pools, entries, slots, accepted)
    for pool, kept, array in zip(pools, entries, wanted, strict=True):
        same_bits(pool, array)
        same_bits(kept, given.pop(0))


def test_commit_resumes_what_num_accepted_resumes() -> None:
    """Rollback by a copy and rollback by resuming: the same step (SPEC-3)."""
    call = delta_call("gated_delta_rule", exact=False, counts=False)
    call.pool[:], call.rows["intermediate_states"][:] = 1.0, on(np.arange(4.0), F32)[:, None, None, None]
    copy = copied(call)
    accepted = call.rows["num_accepted"]
    delta.commit_accepted([copy.pool], [copy.rows["intermediate_states"]], copy.rows["read_slots"], accepted)
    copy.rows["num_accepted"] = None
    same_bits(run(copy), run(call))
    same_bits(copy.rows["intermediate_states"], call.rows["intermediate_states"])


@pytest.mark.parametrize(("slots", "accepted", "error", "label"), [
    ([0, 4], [0, 0], SlotError, "SLOT-5"), ([0, 0], [0, 1], SlotError, "SLOT-4"),
    ([0, 1], [0, 2], SlotError, "SPEC-3"), ([0.0, 1.0], [0, 1], SlotError, "SLOT-5"),
    ([0], [0, 1], ShapeError, "ERR-1"),
])  # fmt: skip
def test_commit_refuses_before_it_copies(slots: Any, accepted: Any, error: type[Exception], label: str) -> None:
    pool, entries = torch.zeros(4, 2, device=DEVICE), torch.ones(4, 2, 2, device=DEVICE)
    with pytest.raises(error, match=label):
        delta.commit_accepted([pool], [entries], on(slots), on(accepted), check=True)
    with pytest.raises(ShapeError, match="ERR-1"):
        delta.commit_accepted([pool, pool], [entries], on([0]), on([0]))
    with pytest.raises(DtypeError, match="ERR-1"):
        delta.commit_accepted([pool], [entries.half()], on([0]), on([0]))
    assert torch.all(pool == 0)


def test_commit_without_a_check_skips_what_is_out_of_range() -> None:
    pool, entries = torch.zeros(4, 2, device=DEVICE), torch.ones(4, 2, 2, device=DEVICE)
    delta._commit(pool, entries, on([4, 1, 2**40]), on([0, 2, 0]))
    assert torch.all(pool == 0)


@pytest.mark.parametrize("name", ["gated_delta_product", "ssd"])
def test_the_registered_operation_is_the_same_call(name: str) -> None:
    """Through torch.ops, as a traced call goes: same bits, and shapes without data."""
    call = ssd_call(exact=False) if name == "ssd" else delta_call(name, 2, exact=False)
    other = copied(call)
    op = ssd._update_op if name == "ssd" else delta._gdp_op
    out = run(call)
    given = other.arguments
    order = list(ssd_order() if name == "ssd" else delta_order())
    same_bits(op(*[given.get(key, DEFAULTS.get(key)) for key in order], None), out)
    same_bits(other.pool, call.pool)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(t) if isinstance(t, Tensor) else t for k, t in given.items()}
        function = ssd.ssd_update if name == "ssd" else delta.gated_delta_product_update
        shape = function(**fakes)
    assert (shape.shape, shape.dtype) == (out.shape, out.dtype)


DEFAULTS = {"dt_softplus": True, "dt_limit": [0.0, float("inf")], "scale": None, "use_qk_l2norm": False}


def delta_order() -> Iterator[str]:
    yield from ("q", "k", "v", "g", "beta", "state_pool", "read_slots", "write_slots", "intermediate_states")
    yield from ("num_accepted", "num_tokens", "num_householder", "scale", "use_qk_l2norm", "state_layout")


def ssd_order() -> Iterator[str]:
    yield from ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_pool", "read_slots", "write_slots")
    yield from ("intermediate_states", "num_accepted", "num_tokens", "dt_softplus", "dt_limit")


SIZES = [(16, 16), (16, 256), (20, 24), (64, 128), (128, 128), (256, 16), (256, 256), (200, 130), (1, 1)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_tiles_hold_all_columns_and_fit_in_registers(rows: int, columns: int, itemsize: int) -> None:
    for strides in ((columns, 1), (1, rows), (7, 5)):
        tiles = {tiling.state_tile(m, rows, columns, itemsize, *strides) for m in (1, 32, 1024, 8192, 1 << 20)}
        for tile in tiles:
            assert tile.chunks * tile.inner >= columns
            assert tile.chunks * tile.inner < 2 * columns or columns == 1
            assert tile.rows * tile.chunks * tile.inner <= 128 * 32 * tile.warps
        assert len({tile[1:] for tile in tiles}) == 1, "the order of a sum may not depend on the batch (DET-3)"


@pytest.mark.parametrize("module", [delta, ssd, tiling])
def test_examples_in_the_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def test_a_launch_is_made_again_with_other_pointers() -> None:
    """What is kept of a launch: everything but the pointers; what makes a key: everything but the contents."""

    class Compiled:
        calls: ClassVar[list[Any]] = []

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments: self.calls.append((grid, arguments))

    x, y, o = torch.zeros(3, 4), None, torch.zeros(5)
    key, pointers = relaunch.key_of((x, y), "name", 0.5)
    relaunch.remember(key, Compiled(), (7, 1, 1), (x, 4, y, o, x, True), (x, y, o))
    other = torch.ones(3, 4)
    same, moved = relaunch.key_of((other, y), "name", 0.5)
    relaunch.remembered.pop(same).again([*moved, 99])
    assert Compiled.calls == [((7, 1, 1), (other.data_ptr(), 4, None, 99, other.data_ptr(), True))]
    assert pointers == [x.data_ptr(), 0]
    for changed in (x[:, :3], x.T, x.half(), x[1:].T, torch.zeros(13)[1:].view(3, 4)):
        assert relaunch.key_of((changed, y), "name", 0.5)[0] != key
    for other_key in (relaunch.key_of((x, o), "name", 0.5), relaunch.key_of((x, y), "name", 1.0)):
        assert other_key[0] != key
    relaunch.remember(key, Compiled(), (1, 1, 1), (x, x.clone()), (x, y, o))
    assert key not in relaunch.remembered, "a copy made on the way is gone at the next call"


COMPILE = """
from statescan.fast.bench.generated import delta_launch, describe, recording, ssd_launch
with recording() as kernels:
    delta_launch()(), ssd_launch()()
print(*(describe(kernel)._asdict() for kernel in kernels), sep="\\n")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="triton brings its assembler for Linux")
def test_generated_code_has_wide_accesses_short_sums_and_no_spills() -> None:
    """Compiled for Hopper without one; guards what `kernels.tiles` assumes about the order of a tile's lanes."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert len(codes) == 2
    for code in codes:
        assert code["lanes"] in ("[4,1,8]", "[1,4,8]")
        assert (code["wide_loads"], code["wide_stores"]) == (8, 8)
        assert code["shuffles"] <= 40
        assert code["registers"] <= 96
        assert code["stack"] == 0
