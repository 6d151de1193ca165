"""Fast mixers, interpreted: the reference's numbers, every trace, strangers, refusals that change nothing.

Sizes are small and traces take one way each, because interpreted kernels are slow;
`statescan.fast.bench.check_serving` runs everything on a GPU.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_serving_rules as rules
import torch

from statescan.conformance.adapters import interpreter
from statescan.conformance.replay import Arrays, on_object, replay
from statescan.conformance.replay_random import check
from statescan.conformance.replay_toy import replay_toy
from statescan.fast import inference as fast
from statescan.fast import mixers
from statescan.fast.bench import check_serving
from statescan.fast.delta import commit_accepted
from statescan.fast.metadata import StepArrays
from statescan.fast.mixers import MIXERS, RecurrentMixer, build_mixer
from statescan.fast.rows import merge, real_positions, rows_behind, zero_padding
from statescan.goldens.store import load_traces
from statescan.reference import inference as plain
from statescan.reference import mixers as reference
from statescan.reference.host.metadata import PREFILL_NAMES, decode_metadata, prefill_metadata
from statescan.reference.host.mixer_config import KINDS, MixerConfig
from statescan.reference.host.stack import ssm_chunking
from statescan.reference.host.step import BatchDimensions, SlotAllocator, StepContext
from statescan.spec.contract import (
    CapacityError,
    ContractError,
    DtypeError,
    EmptyBatchError,
    ShapeError,
    SlotError,
    SSMChunking,
    UnsupportedError,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    interpreter.look_once()
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE == "cuda", reason="statescan.fast.bench.check_serving runs on a GPU"),
]

D_MODEL = 6
UNIT = 2.0**-16
"""Float32 against float64, chained: a few hundred roundings of numbers near 1."""
every_kind = pytest.mark.parametrize("kind", KINDS)
TRACES = load_traces()
TOYS = {key: trace for key, trace in TRACES.items() if trace["mixer"]["kind"] == "toy"}
STORIES = {key: trace for key, trace in TRACES.items() if key not in TOYS}
WAYS = ("hooks", "mixin")
LIVES = {trace["mixer"]["kind"]: trace for key, trace in STORIES.items() if "life-of-four-requests" in key}

MAMBA = {"heads": 4, "groups": 2, "headdim": 3, "d_state": 4}
DELTA = {"heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5}
CONFIGS = {
    "mamba2": MixerConfig("mamba2", **MAMBA, conv_bias=True, chunk_size=4),  # type: ignore[arg-type]
    "mamba2 without a norm": MixerConfig("mamba2", **MAMBA, norm=False, bias=True, dt_limit=(0.1, 0.5),  # type: ignore[arg-type]
                                         chunk_size=4),
    "gdn": MixerConfig("gdn", **DELTA, chunk_size=4),  # type: ignore[arg-type]
    "gdn with other words": MixerConfig("gdn", **DELTA, chunk_size=4, d_conv=2, norm_before_gate=False, scale=0.5,  # type: ignore[arg-type]
                                        gate_activation="sigmoid", allow_neg_eigval=True, use_qk_l2norm=False),
    "gdp": MixerConfig("gdp", **DELTA, num_householder=3, conv_bias=True, chunk_size=4),  # type: ignore[arg-type]
    "kda": MixerConfig("kda", **DELTA, chunk_size=4),  # type: ignore[arg-type]
    "kda with a bound": MixerConfig("kda", **DELTA, lower_bound=-5.0, norm=False, chunk_size=4),  # type: ignore[arg-type]
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The reference's numbers
# ---------------------------------------------------------------------------------------------------------------------


def pair_of(config: MixerConfig) -> tuple[RecurrentMixer, reference.RecurrentMixer]:
    """A fast mixer and one of the reference with the same parameters, none of them zero or one."""
    torch.manual_seed(3)
    one = MIXERS[config.kind](config, D_MODEL).requires_grad_(False)
    other = reference.MIXERS[config.kind](config, D_MODEL).requires_grad_(False)
    for parameter in one.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    other.load_state_dict(one.state_dict())
    return one, other


class Serving:
    """Pools, buffers and arrays of one mixer over a few steps; slots that nobody names hold NaN."""

    def __init__(self, mixer: Any, resume: bool = False, strided: bool = False) -> None:
        self.mixer = mixer
        shapes = mixer.ssm_state_shapes()
        self.arrays = StepArrays(decode_requests=3, prefill_requests=3, tokens=10, chunk_size=4, snapshots=2,
                                 num_householder=mixer.num_householder, d_conv=mixer.config.d_conv, resume=resume,
                                 device="cpu")  # fmt: skip
        lead = ((5,), (5, 2), (2,))
        made = [mixer.new_pools(*n) if strided else tuple(torch.zeros(*n, *shape) for shape in shapes) for n in lead]
        for pair in made:
            for tensor in pair:
                tensor.fill_(torch.nan)
        self.pools, self.entries, self.snapshots = made
        for tensor in self.pools:
            tensor[[0, 2, 3]] = 0
        self.drafts = 0

    def step(self, hidden: torch.Tensor, drafts: int = 0, **step: Any) -> torch.Tensor:
        """A step of some real rows; rows of padding hold NaN, partitions that nobody is in are left out."""
        self.arrays.fill(drafts=drafts, **step)
        decode, prefill = "decode_slots" in step, "lengths" in step
        rows = torch.full((15, 1, D_MODEL), torch.nan)
        rows[: len(hidden)] = hidden
        context = StepContext(
            self.arrays, BatchDimensions(15, 3 if decode else 0, 3 if prefill else 0), slice(len(hidden), 15),
            [self.pools], [tuple(entry[:, : 1 + drafts] for entry in self.entries)], drafts,  # type: ignore[list-item]
            SlotAllocator(*self.snapshots),
        )  # fmt: skip
        out, _ = self.mixer.ssm_dynamic_inference(rows, context)
        return out

    def tensors(self) -> list[torch.Tensor]:
        return [*self.pools, *self.entries, *self.snapshots]


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Within float32 of each other, NaN where and only where it is expected."""
    assert got.shape == want.shape, what
    assert torch.equal(got.isnan(), want.isnan()), what
    error = ((got - want).abs() / (1 + want.abs())).nan_to_num()
    assert float(error.max()) <= UNIT, f"{what}: {float(error.max())}"


STEPS: list[dict[str, Any]] = [
    {"lengths": [5, 2], "slots": [2, 0], "snapshot_rows": [0, 1], "snapshot_offsets": [3, 2]},
    {"lengths": [4], "slots": [3], "decode_slots": [0, 2], "drafts": 1, "snapshot_rows": [0], "snapshot_offsets": [4]},
    {"decode_slots": [3, 0]},
]  # fmt: skip
"""Pieces with snapshots; drafts beside a piece; a plain step."""


def rows_of(step: dict[str, Any], seed: int) -> torch.Tensor:
    count = sum(step.get("lengths", [])) + len(step.get("decode_slots", [])) * (1 + step.get("drafts", 0))
    return torch.randn(count, 1, D_MODEL, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_those_of_the_reference(name: str) -> None:
    """All steps for each kind; for other words of it two of them, on pools in the order that decode likes."""
    one, other = pair_of(CONFIGS[name])
    variant = name not in KINDS
    sides = Serving(one, strided=variant), Serving(other)
    for n, step in enumerate(STEPS[:2] if variant else STEPS):
        outs = [side.step(rows_of(step, n), **step) for side in sides]
        assert_close(outs[0], outs[1], f"out of step {n}")
        assert float(outs[0][: len(rows_of(step, n))].abs().max()) > 0
        for i, (got, want) in enumerate(zip(sides[0].tensors(), sides[1].tensors(), strict=True)):
            assert_close(got, want, f"tensor {i} after step {n}")
    assert bool(sides[0].pools[1][[1, 4]].isnan().all())


class Narrow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()


@pytest.mark.parametrize("kind", ["mamba2", "gdp"])
def test_bfloat16_rows_beside_float32_parameters_and_pools(kind: str) -> None:
    one, other = pair_of(CONFIGS[kind])
    sides = Serving(one), Serving(other)
    step = STEPS[0]
    rows = rows_of(step, 0)
    for side in sides:
        side.mixer.in_proj = torch.nn.Sequential(side.mixer.in_proj, Narrow())
        side.mixer.out_proj = torch.nn.Identity()
    got, want = (side.step(rows, **step) for side in sides)
    assert got.dtype == want.dtype == torch.bfloat16
    live = want[: len(rows)].float()
    assert float((got[: len(rows)].float() - live).abs().max()) <= 2.0**-5 * float(live.abs().max())
    assert bool((got[len(rows) :] == 0).all())


@pytest.mark.parametrize("kind", ["mamba2", "gdp"])
def test_a_rollback_without_a_copy_is_one_with(kind: str) -> None:
    """Entries resumed from by `num_accepted`, committed by the operation, and the reference: one story."""
    one, other = pair_of(CONFIGS[kind])
    sides = [Serving(one, resume=True), Serving(one), Serving(other, resume=True)]
    again: dict[str, Any] = {"decode_slots": [0, 2], "drafts": 1}
    accepted = [0, 1]
    outs = []
    for i, side in enumerate(sides):
        side.step(rows_of(again, 1), **again)
        if i == 1:
            commit_accepted(side.pools, side.entries, torch.tensor([0, 2]), torch.tensor(accepted))
            outs.append(side.step(rows_of(again, 2), **again))
        else:
            outs.append(side.step(rows_of(again, 2), **again, num_accepted=accepted))
    assert torch.equal(outs[0], outs[1])
    assert_close(outs[0], outs[2], "out")
    for copied, resumed in zip(sides[1].tensors(), sides[0].tensors(), strict=True):
        assert torch.equal(copied.nan_to_num(), resumed.nan_to_num())


def test_a_change_of_a_log_counts_at_the_next_call() -> None:
    one, other = pair_of(CONFIGS["mamba2"])
    for mixer in (one, other):
        mixer.A_log.data.fill_(2.0)
    got, want = (Serving(mixer).step(rows_of(STEPS[0], 0), **STEPS[0]) for mixer in (one, other))
    assert_close(got, want, "out")


# ---------------------------------------------------------------------------------------------------------------------
# Traces and schedules
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORIES)
def test_a_story_passes(name: str) -> None:
    """Through the hooks or the mixin, through a stack where layers are what it is about."""
    trace = STORIES[name]
    through = "stack" if trace["clauses"][0].startswith("LAYER") else WAYS[list(STORIES).index(name) * 5 // 4 % 2]
    told = replay(trace, build_mixer(trace["mixer"]), through=through)
    assert told.passed, told.message


def test_the_derived_arrays_are_not_needed() -> None:
    assert replay(LIVES["kda"], build_mixer(LIVES["kda"]["mixer"]), derived=False).passed


@pytest.mark.parametrize("trace", TOYS.values(), ids=TOYS)
def test_the_mixin_passes(trace: Any) -> None:
    told = replay_toy(trace, on_object(build_mixer(LIVES["gdn"]["mixer"]), Arrays()))
    assert told.passed, told.message


@pytest.mark.parametrize(("kind", "seed"), [("mamba2", 3), ("gdn", 27), ("kda", 22)])
def test_a_random_schedule_is_as_alone(kind: str, seed: int) -> None:
    """Short ones; check_serving runs fifty for each mixer."""
    told = check(kind, seed, build_mixer)
    assert told.passed, told.message


# ---------------------------------------------------------------------------------------------------------------------
# Strangers
# ---------------------------------------------------------------------------------------------------------------------


def test_a_context_in_upstreams_style_serves() -> None:
    """Properties, slabs of layers in one tensor, buffers with a layer axis, arrays that are None or not there."""
    class Metadata:
        batch_indices_decode = torch.tensor([0, -1])
        batch_indices_prefill = torch.tensor([2], dtype=torch.int32)
        cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
        seq_idx = conv_seq_idx = None
        intermediate_abs_positions = torch.tensor([1, 3], dtype=torch.int32)
        intermediate_real_count = torch.tensor([1], dtype=torch.int32)
        device_decode_prefill = torch.tensor([1, 2], dtype=torch.int32)

    class Context:
        num_speculative_tokens = 0
        mamba_metadata = Metadata()
        padded_batch_dimensions = SimpleNamespace(token_count=6, decode_req_count=2, prefill_req_count=1)

        def __init__(self) -> None:
            self.layer_map = {0: 0, 2: 1}
            self.conv_states, self.ssm_states = torch.zeros(2, 3, 3, 3), torch.zeros(2, 3, 1, 1, 1)
            self.mamba_slot_allocator = SimpleNamespace(
                intermediate_conv_out=torch.zeros(2, 4, 3, 3), intermediate_ssm_out=torch.zeros(2, 4, 1, 1, 1))

        def mamba_states_cache(self, layer_number: int, intermediate: bool = False) -> tuple[Any, Any]:
            assert not intermediate
            layer = self.layer_map[layer_number - 1]
            return self.conv_states[layer], self.ssm_states[layer]

    context, mixer = Context(), build_mixer(LIVES["mamba2"]["mixer"], layer_number=7, pp_layer_offset=4)
    hidden = torch.tensor([[5.0, 1, 1, 1], [1, 1, 1, 1], [2, 1, 1, 1], *[[torch.nan] * 4] * 3])[:, None]
    out, bias = mixer(hidden, context)
    assert bias is None
    assert out.ravel().tolist() == [500, 100, 310, 0, 0, 0]
    assert context.ssm_states.ravel().tolist() == [0, 0, 0, 500, 0, 310]
    assert context.mamba_slot_allocator.intermediate_ssm_out.ravel().tolist() == [0, 0, 0, 0, 100, 0, 0, 0]


class Stranger(fast.SSMDynamicInferenceMixin):
    """Somebody's mixer: a running sum in each slot, two hooks, and nothing else of ours."""

    layer_number = 1

    def in_proj(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def out_proj(self, rows: torch.Tensor) -> tuple[torch.Tensor, str]:
        return rows, "bias"

    def ssm_decode(self, zxBCdt: Any, conv_state: Any, ssm_state: Any, batch_indices: Any, *entries: Any) -> Any:
        assert not entries or entries == (None, None)
        y = torch.full_like(zxBCdt, torch.nan)
        for n, slot in enumerate(batch_indices.tolist()):
            if slot >= 0:
                ssm_state[slot] += zxBCdt[n].sum()
                y[n] = ssm_state[slot]
        return y

    def ssm_prefill(self, zxBCdt: Any, conv_state: Any, ssm_state: Any, context: Any) -> Any:
        y, cu = torch.full_like(zxBCdt, torch.nan), context.mamba_metadata.cu_seqlens.tolist()
        for n, slot in enumerate(context.mamba_metadata.batch_indices_prefill.tolist()):
            for t in range(cu[n], cu[n + 1]):
                ssm_state[slot] += zxBCdt[t].sum()
                y[t] = ssm_state[slot]
        return y


def test_a_strangers_mixer_runs_under_the_mixin() -> None:
    pools = torch.zeros(3, 1, 1), torch.zeros(3, 1, 1)
    metadata = SimpleNamespace(
        batch_indices_decode=torch.tensor([1, -1]), cu_seqlens=torch.tensor([0, 2, 2]),
        batch_indices_prefill=torch.tensor([2, -1]), device_decode_prefill=torch.tensor([1, 2]))
    context = SimpleNamespace(
        mamba_metadata=metadata, num_speculative_tokens=0, mamba_states_cache=lambda number: pools,
        padded_batch_dimensions=SimpleNamespace(decode_req_count=2, prefill_req_count=2))
    out, bias = Stranger().ssm_dynamic_inference(torch.tensor([5.0, 1, 2, 9, 9])[:, None, None], context)
    assert bias == "bias"
    assert out.ravel().tolist() == [5, 1, 3, 0, 0]
    assert pools[1].ravel().tolist() == [0, 5, 3]


def test_a_missing_hook_says_so() -> None:
    half = type("Half", (Stranger,), {"ssm_decode": fast.SSMDynamicInferenceMixin.ssm_decode})()
    context = StepContext(SimpleNamespace(batch_indices_decode=torch.tensor([0])), BatchDimensions(1, 1, 0),
                          slice(1, 1), [(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))])  # fmt: skip
    with pytest.raises(NotImplementedError, match="STEP-6"):
        half.ssm_dynamic_inference(torch.zeros(1, 1, 1), context)


def test_what_engines_import_is_in_both_places() -> None:
    assert set(fast.__all__) == set(plain.__all__)
    assert {type(mixer).__name__ for mixer in map(build_mixer, (life["mixer"] for life in LIVES.values()))} == {
        cls.__name__ for cls in reference.MIXERS.values()}  # fmt: skip
    assert doctest.testmod(mixers) == (0, 2)
    mixer = build_mixer({"kind": "gdp", "chunk": 32, "householder": 2})
    assert ssm_chunking(["G"], [SimpleNamespace(self_attention=mixer)]) == SSMChunking(32, 32, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Arrays and rows
# ---------------------------------------------------------------------------------------------------------------------


def test_arrays_are_those_of_the_host() -> None:
    """Random steps into one buffer: types, shapes and values of the host's functions, in the same memory each time."""
    rng = np.random.default_rng(0)
    sizes: dict[str, Any] = {"chunk_size": 4, "num_householder": 2, "d_conv": 3}
    arrays = StepArrays(decode_requests=4, prefill_requests=3, tokens=20, snapshots=3, device="cpu", **sizes)
    places = {name: getattr(arrays, name).data_ptr() for name in arrays.places}
    for _ in range(20):
        slots = rng.permutation(9)
        decode, real = int(rng.integers(5)), int(rng.integers(4))
        lengths = [int(rng.integers(7)) for _ in range(real)]
        rows = [n for n, length in enumerate(lengths) if length]
        offsets = [int(rng.integers(1, lengths[n] + 1)) for n in rows]
        drafts = int(rng.integers(3))
        given = (lengths, slots[decode : decode + real].tolist(), rows, offsets)
        arrays.fill(slots[:decode].tolist(), *given, drafts)
        wanted = dict(zip(PREFILL_NAMES, prefill_metadata(
            *given, padded_requests=3, padded_tokens=20, snapshot_capacity=3, decode_tokens=decode * (1 + drafts),
            **sizes), strict=True))  # fmt: skip
        wanted["batch_indices_decode"] = decode_metadata(slots[:decode].tolist(), 4)
        assert set(wanted) == set(arrays.places)
        for name, want in wanted.items():
            got = getattr(arrays, name)
            assert got.numpy().dtype == want.dtype
            assert got.tolist() == want.tolist(), name
            assert got.data_ptr() == places[name]
            assert got.data_ptr() % 16 == 0


def test_a_step_that_does_not_fit_leaves_the_arrays() -> None:
    arrays = StepArrays(decode_requests=1, prefill_requests=1, tokens=4, resume=True, device="cpu")
    arrays.fill([3], [2], [1], num_accepted=[0])
    before = arrays.buffer.clone()
    refused: list[tuple[type[ContractError], dict[str, Any]]] = [
        (CapacityError, {"decode_slots": [0, 1]}), (CapacityError, {"lengths": [5], "slots": [0]}),
        (SlotError, {"decode_slots": [-1]}), (ShapeError, {"decode_slots": [3], "num_accepted": [0, 1]}),
        (CapacityError, {"lengths": [2], "slots": [0], "snapshot_rows": [0], "snapshot_offsets": [1]}),
        (CapacityError, {"decode_slots": [0, 1], "num_accepted": [0, 1]}),
    ]  # fmt: skip
    for error, step in refused:
        with pytest.raises(error):
            arrays.fill(**step)
        assert torch.equal(arrays.buffer, before)
    with pytest.raises(ShapeError, match="SPEC-3"):
        StepArrays(decode_requests=1, device="cpu").fill([0], num_accepted=[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_taken_and_merged_by_counts_on_the_device(dtype: torch.dtype) -> None:
    hidden = torch.arange(1, 8).to(dtype)[:, None, None].expand(7, 1, 3)
    decode, prefill = hidden[:4].reshape(2, 2, 3) * 10, hidden * 100
    prefill[3:], decode[1] = torch.nan, torch.nan
    slots, cu, counts = torch.tensor([5, -1]), torch.tensor([0, 3, 3]), torch.tensor([2, 3], dtype=torch.int32)
    assert rows_behind(hidden, counts)[:, 0, 0].tolist() == [3, 4, 5, 6, 7, 0, 0]
    got = merge(decode, slots, prefill, cu, counts, 7)
    want = plain.merge(decode, prefill, 2, 7)
    want[5:] = 0
    assert torch.equal(got, want)
    assert got.dtype == dtype
    assert merge(decode, slots, None, None, None, 7)[:, 0, 2].tolist() == [10, 20, 0, 0, 0, 0, 0]
    assert merge(None, None, prefill, cu, None, 7)[:, 0, 2].tolist() == [100, 200, 300, 0, 0, 0, 0]


def test_rows_of_padding_are_zeroed_and_no_others() -> None:
    def ones(*shape: int) -> torch.Tensor:
        return torch.full((*shape, 3), torch.nan)

    def zeroed(y: torch.Tensor) -> list[int]:
        return [t for t, row in enumerate(y.reshape(-1, 3).tolist()) if row == [0, 0, 0]]

    assert zeroed(zero_padding(ones(3, 2), torch.tensor([1, -4, 9]), 5)) == [2, 3, 4, 5]
    cu, slots = torch.tensor([0, 2, 2, 5, 6]), torch.tensor([0, 1, -1, 2])
    assert zeroed(zero_padding(ones(1, 8), slots, 5, cu)) == [2, 3, 4, 6, 7]
    assert zeroed(zero_padding(ones(1, 2), torch.tensor([], dtype=torch.int64), 5, torch.tensor([0]))) == [0, 1]


def test_positions_behind_the_real_ones_are_padding() -> None:
    assert real_positions(torch.tensor([3, 7, 4, 4]), torch.tensor([2])).tolist() == [3, 7, -1, -1]
    assert real_positions(torch.tensor([], dtype=torch.int32), torch.tensor([0])).tolist() == []


# ---------------------------------------------------------------------------------------------------------------------
# Refusals, with the pools as before
# ---------------------------------------------------------------------------------------------------------------------


def decode_call(kind: str) -> tuple[RecurrentMixer, dict[str, Any]]:
    mixer = MIXERS[kind](CONFIGS[kind], D_MODEL)
    window, state = mixer.new_pools(3)
    return mixer, {"zxBCdt": torch.ones(2, 1, mixer.config.d_proj), "conv_state": window, "ssm_state": state,
                   "batch_indices": torch.tensor([2, -1])}  # fmt: skip


@every_kind
@pytest.mark.parametrize("rule", rules.BROKEN)
def test_a_broken_rule_is_refused_as_by_the_reference(rule: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "build_mixer", build_mixer)
    rules.test_a_broken_rule_has_its_own_class_and_changes_nothing(rule, kind)


EDGES = [rules.test_a_mixin_refuses_a_step_of_nobody_and_too_few_rows, rules.test_steps_of_padding_alone_are_inert,
         rules.test_memory_in_any_order_serves]  # fmt: skip


@every_kind
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__.removeprefix("test_"))
def test_an_edge_is_the_references(edge: Callable[[str], None], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "build_mixer", build_mixer)
    edge(kind)


@every_kind
def test_what_only_the_recurrence_refuses_is_refused_before_the_window_moves(kind: str) -> None:
    mixer, call = decode_call(kind)
    state = mixer.config.state_shape
    wrong: list[tuple[type[ContractError], dict[str, Any]]] = [
        (UnsupportedError, {"zxBCdt": torch.ones(2, 0, mixer.config.d_proj)}),
        (DtypeError, {"ssm_state": torch.zeros(3, *state, dtype=torch.float64)}),
        (SlotError, {"ssm_state": torch.zeros(2, *state)}),
        (ShapeError, {"intermediate_conv_state": torch.zeros(3, 1, *mixer.config.conv_shape),
                      "intermediate_ssm_state": torch.zeros(3, 1, 1, *state)}),
        (SlotError, {"num_accepted": torch.tensor([0, -1])}),
    ]  # fmt: skip
    for error, changed in wrong:
        given = {**call, **changed}
        before = {name: tensor.clone() for name, tensor in given.items()}
        with pytest.raises(error):
            mixer.ssm_decode(**given)
        assert all(torch.equal(tensor, before[name]) for name, tensor in given.items()), changed.keys()
    assert mixer.norm_weight is not None
    mixer.norm_weight = torch.nn.Parameter(torch.ones(1 + len(mixer.norm_weight)))
    with pytest.raises(ShapeError, match="NORM-3"):
        mixer.ssm_decode(**call)
    assert bool((call["conv_state"] == 0).all())


@pytest.mark.parametrize("kind", ["gdn", "gdp", "kda"])
def test_a_gate_out_of_its_domain_is_refused_before_the_window_moves(kind: str) -> None:
    mixer = MIXERS[kind](replace(CONFIGS[kind], bare=True), D_MODEL)
    window, state = mixer.new_pools(1)
    with pytest.raises(ContractError, match="NUM-3"):
        mixer.ssm_decode(torch.ones(1, 1, mixer.config.d_proj), window, state, torch.tensor([0]))
    assert bool((window == 0).all())


def test_a_step_that_cannot_be_told_apart_is_refused() -> None:
    mixer, call = decode_call("gdn")
    pools = call["conv_state"], call["ssm_state"]
    arrays = StepArrays(decode_requests=1, prefill_requests=1, tokens=2, device="cpu")
    hidden = torch.ones(3, 1, D_MODEL)

    def step(decode: int, prefill: int, **more: Any) -> Any:
        return mixer(hidden, StepContext(arrays, BatchDimensions(3, decode, prefill), slice(0, 0), [pools], **more))

    with pytest.raises(EmptyBatchError, match="STEP-11"):
        step(0, 0)
    with pytest.raises(ShapeError, match="STEP-2"):
        step(4, 0)
    arrays.device_decode_prefill = None  # type: ignore[assignment]
    with pytest.raises(ShapeError, match="META-8"):
        step(1, 1)
    with pytest.raises(UnsupportedError):
        mixer(hidden)
    with pytest.raises(UnsupportedError, match="copies"):
        build_mixer({"kind": "gdp", "householder": 65})
    assert all(bool((pool == 0).all()) for pool in pools)


# ---------------------------------------------------------------------------------------------------------------------
# The check for a GPU, as far as it goes without one
# ---------------------------------------------------------------------------------------------------------------------


def test_the_check_of_a_whole_step_runs() -> None:
    check_serving.whole_step("mamba2", torch.bfloat16, check_serving.TINY, [1])


def test_the_check_of_a_whole_step_sees_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged at the padded count: what a graph would keep if it read the host."""
    def padded(y_decode: Any, slots: Any, y_prefill: Any, cu_seqlens: Any, counts: Any, rows: int) -> torch.Tensor:
        return merge(y_decode, slots, y_prefill, cu_seqlens, torch.full_like(counts, 4), rows)

    monkeypatch.setattr(fast, "merge", padded)
    with pytest.raises(AssertionError, match="gdn step 2, layer 0"):
        check_serving.whole_step("gdn", torch.float32, check_serving.TINY, [2])


def test_the_check_of_traces_as_graphs_runs() -> None:
    check_serving.graphed_traces("mamba2", "slot-zeroed")
    check_serving.toys()


def test_the_check_of_schedules_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_serving.run_schedules(("gdp", [4])) == []
    monkeypatch.setattr(check_serving, "make", lambda described: SimpleNamespace(layer_number=1))
    with pytest.raises(AssertionError, match="2 of 2 schedules: random-gdn-0 through hooks"):
        check_serving.schedules("gdn", 2, 1)


def test_checks_have_names_of_their_own() -> None:
    for tiny in (True, False):
        names = [name for name, _ in check_serving.checks(tiny)]
        assert len(set(names)) == len(names)
        assert all(name.startswith("serving ") for name in names)
