"""Traces of the mixin alone: two toy hooks under someone's `ssm_dynamic_inference`, and a log of what it did.

A row is one number. The toy decode hook gives 10 times a row, the prefill hook 100 times, rows of padding come back as
NaN, and each leaves the last row of a request in its slot. The log says which projection and hook was called, in order,
and with what shape; so the steps of the mixin can be told from each other without any kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from statescan.conformance.replay import Arrays, Told, filled, nested
from statescan.goldens.tensors import Array, bits
from statescan.spec.contract import UnsupportedError

BIAS = 7.0
"""What the toy output projection returns beside its rows."""


class Toy:
    """Hooks and projections of one step; it keeps the log."""

    def __init__(self, step: Mapping[str, Any], arrays: Arrays, context: Any) -> None:
        self.step, self.arrays, self.context = step, arrays, context
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
        for n, slot in enumerate(self.arrays.take(batch_indices).tolist()):
            if slot < 0:
                y[n] = float("nan")
            else:
                ssm_state[slot] = rows[n, -1, 0]
        return y

    def ssm_prefill(self, rows: Any, conv_state: Any, ssm_state: Any, context: Any) -> Any:
        if "prefill" not in self.step.get("hooks", ("decode", "prefill")):
            raise NotImplementedError("ssm_prefill is the mixer's own (STEP-6)")
        self.log.append("prefill" if context is self.context else "prefill with another context")
        offsets = self.arrays.take(context.mamba_metadata.cu_seqlens).tolist()
        slots = self.arrays.take(context.mamba_metadata.batch_indices_prefill).tolist()
        y = rows * 100
        y[offsets[-1] :] = float("nan")
        for n in range(len(offsets) - 1):
            if slots[n] >= 0 and offsets[n + 1] > offsets[n]:
                ssm_state[slots[n]] = rows[offsets[n + 1] - 1, 0, 0]
        return y


def replay_toy(trace: Mapping[str, Any], mixer: Any, *, arrays: Arrays | None = None) -> Told:
    """Every step of a toy trace through a mixer's `ssm_dynamic_inference`, whose hooks and projections are replaced."""
    kind = arrays or Arrays()
    for step in trace["steps"]:
        told = _replay_step(trace, step, mixer, kind)
        if not told.passed:
            return told
    return Told("pass")


def _replay_step(trace: Mapping[str, Any], step: Mapping[str, Any], mixer: Any, arrays: Arrays) -> Told:
    slots = trace["sizes"]["slots"]
    windows, states = filled((slots, 1, 2), "nan", "f32"), filled((slots, 1, 1), "nan", "f32")
    given = [arrays.give(windows), arrays.give(states)]
    context = toy_context(step, arrays, given)
    toy = Toy(step, arrays, context)
    for name in ("in_proj", "out_proj", "ssm_decode", "ssm_prefill"):
        object.__setattr__(mixer, name, getattr(toy, name))  # past torch's registry of modules
    rows = np.array(step["hidden"], np.float32)[:, None, None]
    at, want = step["step"], step["expect"]
    try:
        out, bias = mixer.ssm_dynamic_inference(arrays.give(rows.copy()), context)
    except Exception as error:  # whatever an implementation raises is a result
        return _refused(step, error, arrays.take(given[1]))
    if "reject" in want:
        return Told("fail.accepted", f"step {at}: it took what {want['reject']['error']} should refuse", at, "reject")
    if toy.log != want["log"]:
        return Told("fail.value", f"step {at}: it did {toy.log}, {want['log']} expected", at, "log")
    found = nested(arrays.take(out)[:, 0, 0])
    if found != want["out"]:
        return Told("fail.value", f"step {at}: out is {found}, expected {want['out']}", at, "out")
    if bias is None or nested(arrays.take(bias)) != want["bias"]:
        return Told("fail.value", f"step {at}: the bias is {bias}, expected {want['bias']}", at, "bias")
    left = nested(arrays.take(given[1])[:, 0, 0])
    if left != want["ssm_state"]:
        return Told("fail.value", f"step {at}: slots hold {left}, expected {want['ssm_state']}", at, "ssm_state")
    return Told("pass")


def _refused(step: Mapping[str, Any], error: Exception, states: Array) -> Told:
    at, want = step["step"], step["expect"].get("reject")
    if want is None:
        return Told("error", f"{type(error).__name__}: {error}", at, "mixin")
    if (bits(states) != bits(filled(states.shape, "nan", "f32"))).any():
        return Told("fail.partial", f"step {at}: refused, and ssm_state was changed before", at, "ssm_state")
    lacking = [words for words in want["mentions"] if words not in str(error)]
    if type(error).__name__ != want["error"] or lacking:
        said = f"step {at}: {want['error']} naming {', '.join(want['mentions'])} expected, got {error!r}"
        return Told("fail.wrong_error", said, at, "reject")
    return Told("pass")


def toy_context(step: Mapping[str, Any], arrays: Arrays, pools: list[Any]) -> Any:
    """A context with what a step has; what it `lacks` is not there."""
    decode, prefill = step.get("decode", {}), step.get("prefill", {})
    tokens, real = decode.get("tokens", 1), sum(slot >= 0 for slot in decode.get("slots", []))
    offsets = np.array(prefill.get("cu_seqlens", [0]), np.int32)
    metadata = SimpleNamespace(
        cu_seqlens=arrays.give(offsets),
        batch_indices_prefill=arrays.give(np.array(prefill.get("slots", []), np.int32)),
        batch_indices_decode=arrays.give(np.array(decode.get("slots", []), np.int64)),
        device_decode_prefill=arrays.give(np.array([real * tokens, offsets[-1]], np.int32)),
    )
    context = SimpleNamespace(
        mamba_metadata=metadata, num_speculative_tokens=tokens - 1, mamba_slot_allocator=SimpleNamespace(
            intermediate_conv_out=None, intermediate_ssm_out=None),
        padded_batch_dimensions=SimpleNamespace(
            token_count=len(step["hidden"]), decode_req_count=len(decode.get("slots", [])),
            prefill_req_count=len(prefill.get("slots", [])),
        ),
        padding_slice=slice(real * tokens + int(offsets[-1]), len(step["hidden"])),
        mamba_states_cache=lambda number, intermediate=False: (None, None) if intermediate else tuple(pools),
    )  # fmt: skip
    for name in step.get("lacks", []):
        delattr(context, name)
    return context


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
    decoded = tokens * sum(slot >= 0 for slot in decode.get("slots", []))
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
