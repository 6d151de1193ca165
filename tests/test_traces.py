"""Traces: stored as computed, passed by the reference, failed by each fault at the place one would look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from statescan.conformance.compare import Verdict
from statescan.conformance.mutants import step as models
from statescan.conformance.replay import Arrays, Memory, Replay, Types, edit, on_object, replay
from statescan.conformance.replay_program import derive_trace, replay_model, trace_kills
from statescan.conformance.replay_random import check, random_trace
from statescan.conformance.replay_toy import derive_toy, replay_toy
from statescan.goldens.store import VECTORS, load_traces
from statescan.goldens.tensors import from_nested
from statescan.reference.host.mixer_config import KINDS
from statescan.reference.inference import SSMDynamicInferenceMixin
from statescan.reference.mixers import build_mixer
from statescan.spec.clauses import parse_chapters

TRACES = load_traces()
TOYS = {key: trace for key, trace in TRACES.items() if trace["mixer"]["kind"] == "toy"}
STORIES = {key: trace for key, trace in TRACES.items() if key not in TOYS}
LIVES = {trace["mixer"]["kind"]: trace for key, trace in STORIES.items() if "life-of-four-requests" in key}
ANY_MIXER: dict[str, Any] = {"kind": "gdn", "bare": True, "d_conv": 2, "conv_weight": [[0, 1]] * 3}
HOOKS = ("ssm_decode", "ssm_prefill")


# ---------------------------------------------------------------------------------------------------------------------
# Stored traces
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", STORIES.values(), ids=STORIES)
def test_a_story_is_as_computed(trace: Mapping[str, Any]) -> None:
    made = derive_trace({k: v for k, v in trace.items() if k not in ("steps", "alone", "kills", "digest")})
    assert made["steps"] == trace["steps"]
    assert made["alone"] == trace["alone"]


@pytest.mark.parametrize("trace", TOYS.values(), ids=TOYS)
def test_a_toy_is_as_computed(trace: Mapping[str, Any]) -> None:
    assert derive_toy(trace)["steps"] == trace["steps"]


@pytest.mark.parametrize("trace", LIVES.values(), ids=LIVES)
def test_kills_are_those_that_are_stored(trace: Mapping[str, Any]) -> None:
    assert trace_kills(trace) == trace["kills"]


def test_every_fault_is_killed_by_a_trace() -> None:
    assert {fault for trace in TRACES.values() for fault in trace["kills"]} == set(models.FAULTS)


def test_what_a_clause_says_of_hooks_is_told_for_every_mixer() -> None:
    for label, text in parse_chapters().items():
        named = {op for op in HOOKS if op in text.options["applies"]}
        if not named:
            continue
        found = {trace["mixer"]["kind"] for trace in STORIES.values() if label in trace["clauses"]}
        assert found == set(KINDS), label
        for hook in named:
            part = hook.removeprefix("ssm_")
            assert any(part in step for trace in STORIES.values() if label in trace["clauses"]
                       for step in trace["steps"]), (label, hook)  # fmt: skip


def test_what_a_clause_says_of_the_mixin_has_a_trace() -> None:
    for label, text in parse_chapters().items():
        if "ssm_dynamic_inference" in text.options["applies"]:
            assert any(trace["clauses"][0] == label for trace in TRACES.values()), label


def test_the_worked_example_is_the_one_in_the_text() -> None:
    """Ten rows through the mixin: merged at six real decode tokens, not at nine."""
    trace = LIVES["mamba2"]
    one = Replay(trace, on_object(None, Arrays("numpy")))
    hidden, wanted = one.packed_rows(trace["steps"][2])
    assert hidden[:7, 0, 0].tolist() == [6, 7, 8, 8, 9, 1, 5]
    assert np.isnan(hidden[7:]).all()
    assert wanted.ravel().tolist() == [2260, 3025, 3901, 1903, 2890, 3088, 500, 0, 0, 0]
    assert one.real_tokens(trace["steps"][2]) == (6, 7)
    merged = replay_model(trace, "merged-at-the-padded-count")
    assert merged is not None
    assert merged.tensor == "mixin.out, layer 1"
    assert merged.place == {"step": 2, "request": "C", "row": 0, "token": 0, "offset": 0, "channel": 0}
    assert trace["alone"]["A"]["y"] == [100, 310, 631, 1063, 1606, 2260, 3025, 4001]


# ---------------------------------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["hooks", "mixin", "stack"])
@pytest.mark.parametrize("trace", STORIES.values(), ids=STORIES)
def test_the_reference_passes(trace: Mapping[str, Any], through: str) -> None:
    told = replay(trace, build_mixer(trace["mixer"]), through=through)
    assert told.passed, told.message


@pytest.mark.parametrize("trace", LIVES.values(), ids=LIVES)
def test_the_derived_arrays_are_not_needed(trace: Mapping[str, Any]) -> None:
    assert replay(trace, build_mixer(trace["mixer"]), derived=False).passed


@pytest.mark.parametrize("dtype", ["bf16", "f64"])
@pytest.mark.parametrize("trace", LIVES.values(), ids=LIVES)
def test_rows_of_another_type(trace: Mapping[str, Any], dtype: str) -> None:
    """Digits fit into bfloat16 rows; outputs that do not are left out."""
    if dtype == "f64":
        assert replay(trace, build_mixer(trace["mixer"]), types=Types(dtype, dtype)).passed
        return
    mixer, step = build_mixer(trace["mixer"]), trace["steps"][0]["prefill"]
    pools = [torch.zeros(3, *shape) for shape in mixer.ssm_state_shapes()]
    rows = torch.from_numpy(from_nested(step["zxBCdt"], "f32")).bfloat16()
    context = SimpleNamespace(mamba_metadata=SimpleNamespace(
        **{name: torch.tensor(values) for name, values in step["context"].items()}))
    y = mixer.ssm_prefill(rows, *pools, context)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, torch.tensor(step["expect"]["y"]).bfloat16())
    assert torch.equal(pools[1][2].float().ravel(), torch.tensor(trace["steps"][0]["pools_after_hooks"]["ssm_state"][2])
                       .float().ravel())  # fmt: skip


@pytest.mark.parametrize("trace", TOYS.values(), ids=TOYS)
def test_the_references_mixin_passes(trace: Mapping[str, Any]) -> None:
    told = replay_toy(trace, on_object(build_mixer(ANY_MIXER), Arrays()))
    assert told.passed, told.message


# ---------------------------------------------------------------------------------------------------------------------
# Faults, each at the place that tells
# ---------------------------------------------------------------------------------------------------------------------

ELEVEN = {
    "hook-slot-clamped": (2, "decode.y"),
    "hook-padding-left-nan": (0, "prefill.y"),
    "hook-entries-by-row": (2, "decode.intermediate_conv_state"),
    "piece-starts-fresh": (1, "prefill.y"),
    "only-the-first-row-resumes": (1, "prefill.y"),
    "hook-snapshot-one-late": (0, "prefill.intermediate_conv_out"),
    "hook-snapshot-without-window": (0, "prefill.intermediate_conv_out"),
    "short-piece-forgets-the-window": (1, "pools_after_hooks.conv_state"),
    "slot-not-zeroed": (0, "prefill.y"),
    "rollback-state-only": (2, "pools_after_step.conv_state"),
    "rollback-one-too-far": (2, "pools_after_step.conv_state"),
}  # fmt: skip
"""Step and field where each of the eleven faulty variants is caught first in the life of four requests."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ELEVEN)
def test_a_faulty_variant_is_caught_at_the_telling_field(fault: str, kind: str) -> None:
    told = replay_model(LIVES[kind], fault)
    assert told is not None
    assert told.status.startswith("fail.")
    step, field = ELEVEN[fault]
    assert (told.place["step"], told.tensor) == (step, field), told.message
    assert f"step {step}: {field}" in told.message


def test_there_are_eleven_of_them() -> None:
    assert len(ELEVEN) == 11


@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_slot_shows_at_its_next_owner(kind: str) -> None:
    """With pools of zeros at the start the fault waits for slot 1's second request."""
    trace = {**LIVES[kind], "sizes": {**LIVES[kind]["sizes"], "pool_fill": 0}}
    trace = derive_trace({k: v for k, v in trace.items() if k not in ("steps", "alone", "kills", "digest")})
    told = replay_model(trace, "slot-not-zeroed")
    assert told is not None
    assert (told.place["step"], told.place["request"], told.tensor) == (3, "D", "prefill.y")


# ---------------------------------------------------------------------------------------------------------------------
# The replayer itself
# ---------------------------------------------------------------------------------------------------------------------


class Meddler:
    """A right mixer that also does something that it must not."""

    def __init__(self, described: Mapping[str, Any], deed: str) -> None:
        self.mixer, self.deed = build_mixer(described), deed

    def ssm_decode(self, rows: Any, *given: Any) -> Any:
        return self.mixer.ssm_decode(rows, *given)

    def ssm_prefill(self, rows: Any, conv_state: Any, ssm_state: Any, context: Any) -> Any:
        y = self.mixer.ssm_prefill(rows, conv_state, ssm_state, context)
        if self.deed == "input":
            rows[0] += 1
        if self.deed == "payload":
            ssm_state[0].view(torch.int32).fill_(0x7FC00123)
        if self.deed == "shape":
            return y[:, 0]
        if self.deed == "raise":
            raise RuntimeError("no kernel for this")
        if self.deed == "buffer":
            context.mamba_slot_allocator.intermediate_ssm_out += 1
        return y


@pytest.mark.parametrize(
    ("deed", "status", "field"),
    [("input", "fail.touched", "prefill.zxBCdt"), ("payload", "fail.touched", "pools_after_hooks.ssm_state"),
     ("shape", "fail.shape", "prefill"), ("raise", "error", "prefill"),
     ("buffer", "fail.value", "prefill.intermediate_ssm_out")],
)  # fmt: skip
def test_a_replayer_sees_what_must_not_be_done(deed: str, status: str, field: str) -> None:
    told = replay(LIVES["gdn"], Meddler(LIVES["gdn"]["mixer"], deed))
    assert (told.status, told.place["step"], told.tensor) == (status, 0, field), told.message


def test_every_number_of_a_trace_is_looked_at() -> None:
    """With any single expected number changed, the reference fails."""
    trace, mixer = LIVES["kda"], build_mixer(LIVES["kda"]["mixer"])
    for n, step in enumerate(trace["steps"]):
        fields: list[tuple[str, ...]] = [(hook, "expect", name) for hook in ("decode", "prefill")
                                         for name in step.get(hook, {}).get("expect", {})]  # fmt: skip
        fields += [(when, name) for when in ("pools_after_hooks", "pools_after_step") for name in step[when]]
        for path in fields:
            changed = json.loads(json.dumps(trace))
            place = changed["steps"][n]
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = _bumped(place[path[-1]])
            assert not replay(changed, mixer).passed, (n, path)


def _bumped(values: Any) -> Any:
    """The nested lists with their last number changed."""
    if isinstance(values, list):
        return [*values[:-1], _bumped(values[-1])]
    return 12345 if isinstance(values, str) else values + 1


def test_an_unknown_event_is_refused() -> None:
    memory = Memory.of(LIVES["gdn"])
    with pytest.raises(ValueError, match="'melt' is no event word"):
        edit(memory, {"op": "melt", "slot": 0})


def test_a_restore_of_nothing_is_a_zeroing() -> None:
    memory = Memory.of(LIVES["gdn"])
    edit(memory, {"op": "restore", "slot": 1, "block": "gone"})
    assert all((pool[1] == 0).all() for pool in memory.pools)


def test_a_program_that_skips_tokens_is_refused() -> None:
    trace = json.loads(json.dumps(LIVES["gdn"]))
    trace["program"][1]["prefill"][0]["tokens"] = [4, 5]
    with pytest.raises(ValueError, match="A is at 3, the program says 4"):
        derive_trace({k: v for k, v in trace.items() if k not in ("steps", "alone", "kills", "digest")})


# ---------------------------------------------------------------------------------------------------------------------
# Strangers
# ---------------------------------------------------------------------------------------------------------------------


class Stranger(SSMDynamicInferenceMixin):
    """A mixer of somebody else: two hooks in torch, a class of their own, nothing of the reference but the mixin.

    It is the gated delta rule of one head, written for this file: S <- (2 v - S) where beta is 2 and the key is 1.
    """

    def __init__(self) -> None:
        self.layer_number = 1
        self.in_proj = self.out_proj = lambda rows: rows

    def token(self, window: torch.Tensor, state: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        window.copy_(torch.cat([window[:, 1:], row[:3, None]], dim=1))
        q, k, v = window[0, -1], window[1, -1], (window[2] * torch.tensor([1.0, 10, 100])).sum()
        state += k * row[3] * (v - k * state)
        return q * state.reshape(1)

    def ssm_decode(self, zxBCdt: Any, conv_state: Any, ssm_state: Any, batch_indices: Any,
                   intermediate_conv_state: Any = None, intermediate_ssm_state: Any = None) -> Any:  # fmt: skip
        y = zxBCdt.new_zeros(*zxBCdt.shape[:2], 1)
        for n, slot in enumerate(batch_indices.tolist()):
            for j in range(zxBCdt.shape[1] if slot >= 0 else 0):
                y[n, j] = self.token(conv_state[slot], ssm_state[slot], zxBCdt[n, j])
                if intermediate_conv_state is not None:
                    intermediate_conv_state[slot, j] = conv_state[slot]
                    intermediate_ssm_state[slot, j] = ssm_state[slot]
        return y

    def ssm_prefill(self, zxBCdt: Any, conv_state: Any, ssm_state: Any, context: Any) -> Any:
        metadata, kept = context.mamba_metadata, context.mamba_slot_allocator
        y = zxBCdt.new_zeros(zxBCdt.shape[0], 1, 1)
        wanted = metadata.intermediate_abs_positions[: int(metadata.intermediate_real_count)].tolist()
        for n, slot in enumerate(metadata.batch_indices_prefill.tolist()):
            for t in range(int(metadata.cu_seqlens[n]), int(metadata.cu_seqlens[n + 1]) if slot >= 0 else 0):
                y[t, 0] = self.token(conv_state[slot], ssm_state[slot], zxBCdt[t, 0])
                if t + 1 in wanted:
                    i = wanted.index(t + 1)
                    kept.intermediate_conv_out[i], kept.intermediate_ssm_out[i] = conv_state[slot], ssm_state[slot]
        return y


@pytest.mark.parametrize("through", ["hooks", "mixin", "stack"])
def test_a_strangers_mixer_runs_under_mixin_and_replayer(through: str) -> None:
    told = replay(LIVES["gdn"], Stranger(), through=through)
    assert told.passed, told.message


def test_a_context_in_upstreams_style_serves() -> None:
    """Properties, a class per part, layer slabs in one tensor, buffers with a layer axis, arrays that are None."""
    class Metadata:
        batch_indices_decode = torch.tensor([0, -1])
        batch_indices_prefill = torch.tensor([2], dtype=torch.int32)
        cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
        seq_idx = conv_seq_idx = None
        intermediate_abs_positions = torch.tensor([1, 3], dtype=torch.int32)
        intermediate_real_count = torch.tensor([1], dtype=torch.int32)
        device_decode_prefill = torch.tensor([1, 2], dtype=torch.int32)

    class Context:
        def __init__(self) -> None:
            self.num_speculative_tokens = 0
            self.layer_map = {0: 0, 2: 1}
            self.conv_states, self.ssm_states = torch.zeros(2, 3, 3, 3), torch.zeros(2, 3, 1, 1, 1)
            self.mamba_metadata = Metadata()
            self.mamba_slot_allocator = SimpleNamespace(
                intermediate_conv_out=torch.zeros(2, 4, 3, 3), intermediate_ssm_out=torch.zeros(2, 4, 1, 1, 1))
            self.padded_batch_dimensions = SimpleNamespace(token_count=6, decode_req_count=2, prefill_req_count=1)

        @property
        def padding_slice(self) -> slice:
            return slice(3, 6)

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


# ---------------------------------------------------------------------------------------------------------------------
# Random schedules
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_are_as_alone(kind: str) -> None:
    """A sample of 200 in all; `statescan schedules` runs as many as are wanted."""
    for seed in range(50):
        told = check(kind, seed)
        assert told.passed, f"{kind} {seed}: {told.message}"


@pytest.mark.parametrize("fault", models.HOOK_FAULTS)
def test_random_schedules_catch_faulty_hooks(fault: str) -> None:
    def caught(seed: int) -> Verdict | None:
        return replay_model(random_trace("gdn", seed), fault)

    assert any(caught(seed) is not None for seed in range(20))


def test_schedules_have_everything_in_them() -> None:
    """Each event word, drafts of every count, padding, and pieces of every short length."""
    words, drafts, pieces, rows = set(), set(), set(), set()
    for seed in range(40):
        for step in random_trace("gdn", seed)["steps"]:
            words |= {event["op"] for event in [*step["before"], *step["after"]]}
            drafts |= {len(step["decode"]["zxBCdt"][0])} if "decode" in step else set()
            offsets = step["prefill"]["context"]["cu_seqlens"] if "prefill" in step else []
            pieces |= set(np.diff(offsets).tolist()) if offsets else set()
            rows |= {len(step["prefill"]["zxBCdt"])} if "prefill" in step else set()
    assert words == {"zero", "restore", "rollback", "commit", "free", "save", "load", "poison"}
    assert {1, 2, 3, 4} <= drafts
    assert {0, 1, 2, 3, 4} <= pieces
    assert 0 in rows, "a partition of padding requests without a single row"


def test_files_are_where_their_family_says() -> None:
    for key, trace in TRACES.items():
        assert (VECTORS / trace["clauses"][0].rpartition("-")[0].lower() / f"{key}.json").exists()
