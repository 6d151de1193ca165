"""The rules of serving, each broken once at the hooks of every mixer, and what is legal at their edges."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from statescan.reference.host.metadata import PREFILL_NAMES, prefill_metadata
from statescan.reference.host.slots import SlotPool
from statescan.reference.host.stack import ssm_chunking
from statescan.reference.mixers import MIXERS, RecurrentMixer, build_mixer
from statescan.spec.contract import (
    CapacityError,
    ContractError,
    EmptyBatchError,
    HeterogeneousStackError,
    PackingError,
    ShapeError,
    SlotError,
    UnsupportedError,
)

SLOTS, TOKENS, CHUNK = 4, 9, 3
every_mixer = pytest.mark.parametrize("kind", MIXERS)
Pools = list[torch.Tensor]


def mixer_of(kind: str) -> RecurrentMixer:
    """Keys wider than values or the other way round, more than one group, every gate and norm in place."""
    torch.manual_seed(3)
    sizes = {"heads": 4, "groups": 2, "headdim": 3, "d_state": 5} if kind == "mamba2" else {
        "heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5}  # fmt: skip
    return build_mixer({"kind": kind, "chunk": CHUNK, **sizes, **({"householder": 2} if kind == "gdp" else {})})


def rows_of(mixer: RecurrentMixer, count: int = TOKENS) -> torch.Tensor:
    numbers = np.random.default_rng(5).normal(size=(count, 1, mixer.config.d_proj)) / 2
    return torch.tensor(numbers, dtype=torch.float32)


def pools_of(mixer: RecurrentMixer, fill: float = 0.0, slots: int = SLOTS) -> Pools:
    return [torch.full((slots, *shape), fill) for shape in mixer.ssm_state_shapes()]


def entries_of(mixer: RecurrentMixer, count: int) -> Pools:
    return [torch.full((SLOTS, count, *shape), -7.0) for shape in mixer.ssm_state_shapes()]


def context_of(lengths: list[int], slots: list[int], requests: int, tokens: int, **more: Any) -> Any:
    """The context of a prefill step; `more` replaces arrays."""
    arrays = prefill_metadata(lengths, slots, None, None, requests, tokens, CHUNK)
    named = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in zip(PREFILL_NAMES, arrays, strict=True)}
    given = {name: torch.tensor(value, dtype=torch.int32) for name, value in more.items()}
    return SimpleNamespace(mamba_metadata=SimpleNamespace(**{**named, **given}))


def raw_context(offsets: list[int], slots: list[int]) -> Any:
    return SimpleNamespace(mamba_metadata=SimpleNamespace(
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32), batch_indices_prefill=torch.tensor(slots)))  # fmt: skip


def with_snapshots(mixer: RecurrentMixer, context: Any, at: list[int], count: int, room: int) -> Any:
    """The context with buffers of `room` rows and these positions, `count` of them real."""
    context.mamba_metadata.intermediate_abs_positions = torch.tensor(at, dtype=torch.int32)
    context.mamba_metadata.intermediate_real_count = torch.tensor([count], dtype=torch.int32)
    conv, state = pools_of(mixer, -7.0, room)
    context.mamba_slot_allocator = SimpleNamespace(intermediate_conv_out=conv, intermediate_ssm_out=state)
    return context


def alone(mixer: RecurrentMixer, rows: torch.Tensor) -> tuple[torch.Tensor, Pools]:
    """Outputs of a request by itself, and what it leaves."""
    pools = pools_of(mixer, slots=1)
    return mixer.ssm_prefill(rows, *pools, context_of([len(rows)], [0], 1, len(rows))), pools


def near(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal but for the rounding of the pools in float32 between two calls."""
    return torch.allclose(one, two, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Each rule broken once
# ---------------------------------------------------------------------------------------------------------------------

Call = Callable[[RecurrentMixer, torch.Tensor, Pools], Any]
BROKEN: dict[str, tuple[Call, type[ContractError], str]] = {
    "duplicate slot, decode": (
        lambda m, x, p: m.ssm_decode(x[:2], *p, torch.tensor([1, 1])), SlotError, r"=1 is also.*SLOT-4"),
    "duplicate slot, prefill": (
        lambda m, x, p: m.ssm_prefill(x, *p, raw_context([0, 4, 9], [2, 2])), SlotError, r"=2 is also.*SLOT-4"),
    "slot out of range, decode": (
        lambda m, x, p: m.ssm_decode(x[:2], *p, torch.tensor([1, 4])), SlotError, r"\[1\]=4 is outside 0\.\.3.*SLOT-5"),
    "slot out of range, prefill": (
        lambda m, x, p: m.ssm_prefill(x, *p, raw_context([0, 4, 9], [1, 7])), SlotError,
        r"\[1\]=7 is outside 0\.\.3.*SLOT-5"),
    "slots that are no integers": (
        lambda m, x, p: m.ssm_decode(x[:2], *p, torch.tensor([1.0, 0.0])), SlotError, r"f32.*SLOT-5"),
    "more tokens than buffers": (
        lambda m, x, p: m.ssm_decode(x[:3].reshape(1, 3, -1), *p, torch.tensor([1]), *entries_of(m, 2)),
        UnsupportedError, r"3 tokens a row and 2 intermediate entries.*SPEC-1"),
    "entries of windows alone": (
        lambda m, x, p: m.ssm_decode(x[:3].reshape(1, 3, -1), *p, torch.tensor([1]), entries_of(m, 3)[0]),
        UnsupportedError, r"intermediate_ssm_state is None.*SPEC-1"),
    "more snapshots than buffers": (
        lambda m, x, p: m.ssm_prefill(x, *p, with_snapshots(m, raw_context([0, 9], [1]), [1, 2, 3], 3, 2)),
        CapacityError, r"3 snapshots and 2 buffer rows.*META-9"),
    "snapshot at 0": (
        lambda m, x, p: m.ssm_prefill(x, *p, with_snapshots(m, raw_context([0, 9], [1]), [0], 1, 1)), PackingError,
        r"\[0\]=0 is outside 1\.\.9.*SNAP-3"),
    "snapshot past the end": (
        lambda m, x, p: m.ssm_prefill(x, *p, with_snapshots(m, raw_context([0, 8], [1]), [9], 1, 1)), PackingError,
        r"\[0\]=9 is outside 1\.\.8.*SNAP-3"),
    "unequal lists": (
        lambda m, x, p: m.ssm_prefill(x, *p, raw_context([0, 4, 9], [1])), ShapeError, r"\[1\].*N=2"),
    "slots for other rows": (
        lambda m, x, p: m.ssm_decode(x[:2], *p, torch.tensor([1, 0, 2])), ShapeError, r"batch_indices \[3\].*STEP-10"),
    "offsets past the rows": (
        lambda m, x, p: m.ssm_prefill(x, *p, raw_context([0, 4, 10], [1, 0])), PackingError, r"=10 > 9.*PACK-4"),
    "offsets that decrease": (
        lambda m, x, p: m.ssm_prefill(x, *p, raw_context([0, 5, 4], [1, 0])), PackingError, r"=4 < .*=5.*PACK-4"),
    "rows of another width": (
        lambda m, x, p: m.ssm_decode(x[:2, :, 1:], *p, torch.tensor([1, 0])), ShapeError, "STEP-10"),
    "decode rows of rank 2": (
        lambda m, x, p: m.ssm_decode(x[:2, 0], *p, torch.tensor([1, 0])), ShapeError, "STEP-10"),
    "prefill rows of two tokens": (
        lambda m, x, p: m.ssm_prefill(x.expand(9, 2, -1), *p, raw_context([0, 9], [1])), ShapeError, "STEP-10"),
    "a window too narrow": (
        lambda m, x, p: m.ssm_decode(x[:2], p[0][..., 1:], p[1], torch.tensor([1, 0])), ShapeError, r"conv_pool.*W=4"),
    "a state of another size": (
        lambda m, x, p: m.ssm_decode(x[:2], p[0], p[1][..., 1:], torch.tensor([1, 0])), ShapeError, r"state_pool.*=5"),
    "pools of unequal slots": (
        lambda m, x, p: m.ssm_decode(x[:2], p[0], p[1][:2], torch.tensor([1, 2])), SlotError, r"\[1\]=2 .*SLOT-5"),
}  # fmt: skip


@every_mixer
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_has_its_own_class_and_changes_nothing(rule: str, kind: str) -> None:
    call, error, words = BROKEN[rule]
    mixer = mixer_of(kind)
    pools, rows = pools_of(mixer, torch.nan), rows_of(mixer)
    before = [pool.view(torch.int32).clone() for pool in pools]
    kept = rows.clone()
    with pytest.raises(error, match=words) as caught:
        call(mixer, rows, pools)
    assert type(caught.value) is error
    assert all(torch.equal(pool.view(torch.int32), old) for pool, old in zip(pools, before, strict=True))
    assert torch.equal(rows, kept)


@every_mixer
def test_a_mixin_refuses_a_step_of_nobody_and_too_few_rows(kind: str) -> None:
    mixer = mixer_of(kind)
    pools = pools_of(mixer, torch.nan)
    before = [pool.view(torch.int32).clone() for pool in pools]

    def context(decode: int, prefill: int) -> Any:
        dims = SimpleNamespace(token_count=2, decode_req_count=decode, prefill_req_count=prefill)
        return SimpleNamespace(
            mamba_metadata=SimpleNamespace(batch_indices_decode=torch.arange(decode)), padding_slice=slice(2, 2),
            padded_batch_dimensions=dims, num_speculative_tokens=0, mamba_states_cache=lambda *_, **__: tuple(pools),
        )  # fmt: skip

    with pytest.raises(EmptyBatchError, match="STEP-11"):
        mixer.ssm_dynamic_inference(rows_of(mixer, 2), context(0, 0))
    with pytest.raises(ShapeError, match=r"2 rows for 3 decode requests.*STEP-2"):
        mixer.ssm_dynamic_inference(rows_of(mixer, 2), context(3, 0))
    assert all(torch.equal(pool.view(torch.int32), old) for pool, old in zip(pools, before, strict=True))


def test_the_engines_rules_have_their_own_classes_too() -> None:
    pool = SlotPool(2)
    slot = pool.allocate_many(2)[0]
    with pytest.raises(CapacityError, match=r"count=1 .* 0 free.*LIFE-1"):
        pool.allocate()
    pool.release(slot)
    for wrong, words in ((slot, "LIFE-6"), (2, "SLOT-5"), (-1, "SLOT-5")):
        with pytest.raises(SlotError, match=rf"slot={wrong} .*{words}"):
            pool.release(wrong)
    one, other = (SimpleNamespace(mixer=SimpleNamespace(chunk_size=n)) for n in (64, 128))
    with pytest.raises(HeterogeneousStackError, match=r"layer 0 has M.*but layer 1 has M.*STACK-3"):
        ssm_chunking(["M", "M"], [one, other])
    with pytest.raises(ShapeError, match=r"1 symbols and layers 2.*STACK-4"):
        ssm_chunking(["M"], [one, one])


# ---------------------------------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------------------------------


@every_mixer
@pytest.mark.parametrize("cuts", [range(1, TOKENS), (1, 3), (4,), (2, 3, 8)])
def test_pieces_of_any_length_are_the_whole(kind: str, cuts: Any) -> None:
    mixer = mixer_of(kind)
    rows, pools = rows_of(mixer), pools_of(mixer)
    want, left = alone(mixer, rows)
    out = [mixer.ssm_prefill(rows[a:b], *pools, context_of([b - a], [2], 1, b - a))
           for a, b in pairwise([0, *cuts, TOKENS])]  # fmt: skip
    assert near(torch.cat(out), want)
    assert torch.equal(pools[0][2], left[0][0])
    assert near(pools[1][2], left[1][0])


@every_mixer
@pytest.mark.parametrize(("lengths", "slots"), [([0, 9, 0], [1, 0, 3]), ([9, 0], [0, 1]), ([0, 0, 9], [3, 2, 0])])
def test_an_empty_piece_changes_nothing_wherever_it_stands(kind: str, lengths: list[int], slots: list[int]) -> None:
    mixer = mixer_of(kind)
    rows, pools = rows_of(mixer), pools_of(mixer, 3.0)
    for pool in pools:
        pool[0] = 0
    before = [pool.clone() for pool in pools]
    want, left = alone(mixer, rows)
    assert near(mixer.ssm_prefill(rows, *pools, context_of(lengths, slots, 5, TOKENS)), want)
    for pool, old, own in zip(pools, before, left, strict=True):
        assert torch.equal(pool[0], own[0])
        assert torch.equal(pool[1:], old[1:])


@every_mixer
def test_steps_of_padding_alone_are_inert(kind: str) -> None:
    """No requests, no rows, rows of NaN, any negative slot."""
    mixer = mixer_of(kind)
    pools, rows = pools_of(mixer, 3.0), torch.full((4, 1, mixer.config.d_proj), torch.nan)
    for requests, tokens in ((0, 4), (3, 4), (0, 0), (3, 0)):
        y = mixer.ssm_prefill(rows[:tokens], *pools, context_of([], [], requests, tokens))
        assert y.tolist() == np.zeros((tokens, 1, mixer.config.d_inner)).tolist()
    for slots in ([-1, -5, -1, -(2**31)], []):
        y = mixer.ssm_decode(rows[: len(slots)], *pools, torch.tensor(slots, dtype=torch.int64))
        assert y.tolist() == np.zeros((len(slots), 1, mixer.config.d_inner)).tolist()
    assert all((pool == 3).all() for pool in pools)


@every_mixer
def test_snapshots_at_any_token_the_last_one_and_the_same_twice(kind: str) -> None:
    mixer = mixer_of(kind)
    rows, pools = rows_of(mixer), pools_of(mixer)
    context = with_snapshots(mixer, context_of([9], [2], 2, 12), [1, 5, 5, 9, 4], 4, 5)
    padded = torch.cat([rows, torch.full((3, 1, mixer.config.d_proj), torch.nan)])
    y = mixer.ssm_prefill(padded, *pools, context)
    assert bool((y[9:] == 0).all())
    buffers = context.mamba_slot_allocator
    for i, count in enumerate((1, 5, 5, 9)):
        _, (window, state) = alone(mixer, rows[:count])
        assert torch.equal(buffers.intermediate_conv_out[i], window[0])
        assert near(buffers.intermediate_ssm_out[i], state[0])
    assert bool((buffers.intermediate_ssm_out[4] == -7).all())


@every_mixer
def test_a_verify_step_of_one_token_is_a_decode_step_that_leaves_an_entry(kind: str) -> None:
    mixer = mixer_of(kind)
    rows, pools, entries = rows_of(mixer), pools_of(mixer), entries_of(mixer, 1)
    want, _ = alone(mixer, rows)
    out = [mixer.ssm_decode(row[None], *pools, torch.tensor([1]), *entries) for row in rows]
    assert near(torch.cat(out), want)
    for pool, entry in zip(pools, entries, strict=True):
        assert torch.equal(entry[1, 0], pool[1])
        assert bool((entry[[0, 2, 3]] == -7).all())


@every_mixer
def test_memory_in_any_order_serves(kind: str) -> None:
    """Rows between other rows, pools with gaps, states whose last axes lie the other way round."""
    mixer = mixer_of(kind)
    rows = rows_of(mixer)
    want, left = alone(mixer, rows)
    wide = torch.full((TOKENS, 2, 2 * mixer.config.d_proj), torch.nan)
    apart = wide[:, :1, ::2]
    apart.copy_(rows)
    window, state = mixer.ssm_state_shapes()
    bases = [torch.full((2 * SLOTS, *(2 * n for n in shape)), 3.0) for shape in (window, state)]
    gaps = [base[(slice(None, None, 2), *(slice(0, n) for n in shape))]
            for base, shape in zip(bases, (window, state), strict=True)]  # fmt: skip
    turned = [torch.zeros(SLOTS, *shape[:-2], shape[-1], shape[-2]).transpose(-1, -2) for shape in (window, state)]
    for pools in (gaps, turned):
        for pool in pools:
            pool[1] = 0
        assert near(mixer.ssm_prefill(apart, *pools, context_of([9], [1], 1, TOKENS)), want)
        assert near(pools[1][1], left[1][0])
    assert all(bool((base[1::2] == 3).all()) for base in bases)
