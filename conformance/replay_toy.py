"""Traces of the mixin alone: two toy hooks under someone's `ssm_dynamic_inference`, and a log of what it did.

A row is one number. The toy decode hook gives 10 times a row, the prefill hook 100 times, rows of padding come back as
NaN, and each leaves the last row of a request in its slot. The log says which projection and hook was called, in order,
and with what shape; so the steps of the mixin can be told from each other without any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from statescan.conformance.calls import Call, Plan, Reply
from statescan.conformance.compare import Verdict, judge_reject, judge_reply
from statescan.conformance.hooks import MIXIN
from statescan.goldens.tensors import Array, filled, nested
from statescan.spec.contract import UnsupportedError

BIAS = 7.0
"""What the toy output projection returns beside its rows."""
Take = Callable[[Any], Array]


# ---------------------------------------------------------------------------------------------------------------------
# On the side of the implementation
# ---------------------------------------------------------------------------------------------------------------------


class Toy:
    """Hooks and projections of one step; it keeps the log."""

    def __init__(self, step: Mapping[str, Any], take: Take, context: Any) -> None:
        self.step, self.take, self.context = step, take, context
        self.log: list[str] = []

    def in_proj(self, rows: Any) -> Any:
        self.log.append(f"in_proj of {rows.shape[0]} rows")
        return rows

    def out_proj(self, rows: Any) -> tuple[Any, Any]:
        self.log.append(f"out_proj of {rows.shape[0]} rows")
        return rows, rows[:1, 0, 0] * 0 + BIAS

    def ssm_decode(self, rows: Any, conv_state: Any, ssm_state: Any, batch_indices: Any, *entries: Any) -> Any:
        if "decode" not in self.step.get("hooks", ("decode", "prefill")):
            raise NotImplementedError("ssm_decode is the mixer's own (STEP-6)")
        self.log.append(f"decode of {'x'.join(map(str, rows.shape))}")
        if self.step.get("single") and rows.shape[1] != 1:
            raise UnsupportedError(f"zxBCdt has {rows.shape[1]} tokens a request: this mixer takes 1 (SPEC-7)")
        y = rows * 10
        for n, slot in enumerate(self.take(batch_indices).tolist()):
            if slot < 0:
                y[n] = float("nan")
            else:
                ssm_state[slot] = rows[n, -1, 0]
        return y

    def ssm_prefill(self, rows: Any, conv_state: Any, ssm_state: Any, context: Any) -> Any:
        if "prefill" not in self.step.get("hooks", ("decode", "prefill")):
            raise NotImplementedError("ssm_prefill is the mixer's own (STEP-6)")
        self.log.append("prefill" if context is self.context else "prefill with another context")
        offsets = self.take(context.mamba_metadata.cu_seqlens).tolist()
        slots = self.take(context.mamba_metadata.batch_indices_prefill).tolist()
        y = rows * 100
        y[offsets[-1] :] = float("nan")
        for n in range(len(offsets) - 1):
            if slots[n] >= 0 and offsets[n + 1] > offsets[n]:
                ssm_state[slots[n]] = rows[offsets[n + 1] - 1, 0, 0]
        return y


def run_toy(mixer: Any, step: Mapping[str, Any], tensors: Mapping[str, Any], take: Take) -> tuple[Any, dict[str, Any]]:
    """One step of a mixer whose hooks and projections are the toy's: the output, and the log and bias beside it."""
    context = toy_context(step, tensors)
    toy = Toy(step, take, context)
    for name in ("in_proj", "out_proj", "ssm_decode", "ssm_prefill"):
        object.__setattr__(mixer, name, getattr(toy, name))  # past torch's registry of modules
    out, bias = mixer.ssm_dynamic_inference(tensors["hidden_states"], context)
    return out, {"log": toy.log, "bias": None if bias is None else nested(take(bias))}


def toy_context(step: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """A context with what a step has; what it `lacks` is not there."""
    decode, prefill = step.get("decode", {}), step.get("prefill", {})
    real, end = _real_tokens(step), prefill.get("cu_seqlens", [0])[-1]
    pools = (tensors["conv_state"], tensors["ssm_state"])
    names = ("cu_seqlens", "batch_indices_prefill", "batch_indices_decode", "device_decode_prefill")
    context = SimpleNamespace(
        mamba_metadata=SimpleNamespace(**{name: tensors[name] for name in names}),
        num_speculative_tokens=decode.get("tokens", 1) - 1,
        mamba_slot_allocator=SimpleNamespace(intermediate_conv_out=None, intermediate_ssm_out=None),
        padded_batch_dimensions=SimpleNamespace(
            token_count=len(step["hidden"]), decode_req_count=len(decode.get("slots", [])),
            prefill_req_count=len(prefill.get("slots", [])),
        ),
        padding_slice=slice(real + end, len(step["hidden"])),
        mamba_states_cache=lambda number, intermediate=False: (None, None) if intermediate else pools,
    )  # fmt: skip
    for name in step.get("lacks", []):
        delattr(context, name)
    return context


def _real_tokens(step: Mapping[str, Any]) -> int:
    decode = step.get("decode", {})
    return int(decode.get("tokens", 1) * sum(slot >= 0 for slot in decode.get("slots", [])))


# ---------------------------------------------------------------------------------------------------------------------
# On the side of the runner
# ---------------------------------------------------------------------------------------------------------------------


def replay_toy(trace: Mapping[str, Any], run: Callable[[Call, str], Reply]) -> Verdict:
    """Every step of a toy trace, each call through `run`; the first failure, or `pass`."""
    for step in trace["steps"]:
        call = toy_call(step, trace["sizes"]["slots"])
        verdict = _judge(step, call, run(call, f"step {step['step']}, mixin"))
        if not verdict.passed:
            place = {"step": step["step"]}
            return Verdict(verdict.status, f"step {step['step']}: {verdict.message}", verdict.tensor, place)
    return Verdict("pass")


def toy_call(step: Mapping[str, Any], slots: int) -> Call:
    """The call of one step; what must come out of it stays here."""
    decode, prefill = step.get("decode", {}), step.get("prefill", {})
    offsets = np.array(prefill.get("cu_seqlens", [0]), np.int32)
    hidden = np.array(step["hidden"], np.float32)[:, None, None]
    tensors = {
        "hidden_states": hidden, "conv_state": filled((slots, 1, 2), "nan", "f32"),
        "ssm_state": filled((slots, 1, 1), "nan", "f32"), "cu_seqlens": offsets,
        "batch_indices_prefill": np.array(prefill.get("slots", []), np.int32),
        "batch_indices_decode": np.array(decode.get("slots", []), np.int64),
        "device_decode_prefill": np.array([_real_tokens(step), offsets[-1]], np.int32),
    }  # fmt: skip
    shown = {name: value for name, value in step.items() if name != "expect"}
    return Call(MIXIN, {"toy": shown}, tensors, (Plan("out", "f32", hidden.shape),))


def _judge(step: Mapping[str, Any], call: Call, reply: Reply) -> Verdict:
    want = step["expect"]
    if "reject" in want:
        return judge_reject(call, reply, want["reject"]["error"], want["reject"]["mentions"])
    early = judge_reply(reply)
    if early is not None:
        return early
    found = {
        "log": reply.value["log"], "out": nested(reply.outputs["out"][:, 0, 0]), "bias": reply.value["bias"],
        "ssm_state": nested(reply.outputs["after.ssm_state"][:, 0, 0]),
    }  # fmt: skip
    for name, got in found.items():
        if got != want[name]:
            return Verdict("fail.value", f"{name} is {got}, {want[name]} expected", name)
    return Verdict("pass")


def derive_toy(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The toy trace with what each step must give: every row asks to which request it belongs."""
    made = {"format": "statescan.trace/1", "rules": 1, **trace, "class": "exact"}
    made["steps"] = [{**step, "expect": _expected(step, trace["sizes"]["slots"])} for step in trace["steps"]]
    made["provenance"] = {"second": "closed form", "generator": 1}
    return made


def _expected(step: Mapping[str, Any], slots: int) -> dict[str, Any]:
    if "reject" in step.get("expect", {}):
        return dict(step["expect"])
    hidden, decode, offsets = step["hidden"], step.get("decode", {}), step.get("prefill", {}).get("cu_seqlens", [0])
    tokens = decode.get("tokens", 1)
    decoded = _real_tokens(step)
    factor = [10 if t < decoded else 100 if t < decoded + offsets[-1] else 0 for t in range(len(hidden))]
    log = [f"decode of {len(decode['slots'])}x{tokens}x1"] if decode else []
    log += ["prefill"] if "prefill" in step else []
    last = {slot: n * tokens + tokens - 1 for n, slot in enumerate(decode.get("slots", []))}
    last |= {slot: decoded + offsets[n + 1] - 1 for n, slot in enumerate(step.get("prefill", {}).get("slots", []))
             if offsets[n + 1] > offsets[n]}  # fmt: skip
    return {
        "log": [f"in_proj of {len(hidden)} rows", *log, f"out_proj of {len(hidden)} rows"],
        "out": [0 if f == 0 else f * row for f, row in zip(factor, hidden, strict=True)], "bias": [int(BIAS)],
        "ssm_state": [hidden[last[slot]] if slot in last else "nan" for slot in range(slots)],
    }  # fmt: skip
