"""From a trace and a claim to a replay: what is applicable, in which element types, through which of the hooks.

A trace runs on the two hooks of whoever offers those that it calls, and through the mixin and a stack of its layers
where `ssm_dynamic_inference` is offered too; a trace of the mixin alone needs that word and nothing else. Engine edits
and expectations stay with the runner, so that an implementation sees one hook call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from statescan.conformance.calls import Call, Reply
from statescan.conformance.cases import Capability, Missing, missing_feature
from statescan.conformance.compare import Verdict, judge_reply
from statescan.conformance.hooks import HOOKS, MIXIN, POOLS, TOY
from statescan.conformance.lift_traces import fit_sizes, lift_mixer, lift_trace
from statescan.conformance.replay import F32, Types, replay_calls, types_of
from statescan.conformance.replay_toy import replay_toy
from statescan.goldens.store import kind_of
from statescan.goldens.tensors import Array, from_nested, narrow
from statescan.spec.contract import FLOAT_TYPES, OPERAND_BITS

Trace = Mapping[str, Any]
Setup = Callable[[Mapping[str, Any]], Reply]

NOT_CHUNKED = 1


@dataclass(frozen=True)
class TraceCase:
    """A trace made ready for one implementation: ways through its hooks, the mixer to set up, element types, claim."""

    trace: Trace
    ways: tuple[str, ...]
    mixer: Mapping[str, Any]
    capability: Capability
    types: Types = F32
    derived: bool = True
    declared: Mapping[str, str] = field(default_factory=dict)
    lift: str = ""


def is_trace(one: Mapping[str, Any]) -> bool:
    """Whether a file of the corpus is a trace."""
    return kind_of(one) == "trace"


def hooks_of(trace: Trace) -> tuple[str, ...]:
    """The hooks that a trace calls."""
    if trace["mixer"]["kind"] == TOY:
        return (MIXIN,)
    return tuple(hook for hook in HOOKS if any(hook.removeprefix("ssm_") in step for step in trace["steps"]))


def operation(one: Mapping[str, Any]) -> str:
    """What a vector or a trace calls, in words."""
    return f"{' '.join(hooks_of(one))} ({one['mixer']['kind']})" if is_trace(one) else str(one["op"])


# ---------------------------------------------------------------------------------------------------------------------
# Applicable or not
# ---------------------------------------------------------------------------------------------------------------------


def prepare_trace(trace: Trace, corpus: Mapping[str, Trace], claims: Sequence[Capability]) -> TraceCase | Missing:
    """The trace under the first claims that cover it, carried to their sizes; else the first missing word."""
    trace, lift = carried(trace, claims)
    hooks = [covering(trace, hook, claims) for hook in hooks_of(trace)]
    whole = covering(trace, MIXIN, claims)
    mixer = described(trace, corpus, claims)
    missing = next((found for found in hooks if isinstance(found, Missing)), None)
    if trace["mixer"]["kind"] == TOY:
        if isinstance(whole, Missing) or mixer is None:
            return whole if isinstance(whole, Missing) else Missing("kind")
        return TraceCase(trace, ("mixin",), mixer, whole[0])
    if missing is not None and (isinstance(whole, Missing) or not missing.word.startswith("ssm_")):
        return missing
    ways: tuple[str, ...] = () if missing is not None else ("hooks",)
    ways += () if isinstance(whole, Missing) else ("stack",)  # its first layer is all that "mixin" shows
    claim, types, declared = next(found for found in (*hooks, whole) if not isinstance(found, Missing))
    return TraceCase(trace, ways, trace["mixer"], claim, types, declared=declared, lift=lift)


def carried(trace: Trace, claims: Sequence[Capability]) -> tuple[Trace, str]:
    """The trace at sizes that the first claim of its hooks serves, and what was changed."""
    own = (claim for claim in claims if claim["op"] in (*hooks_of(trace), MIXIN))
    sizes = fit_sizes(trace["mixer"], next(own, {}).get("limits", {}))
    return (lift_trace(trace, sizes), ", ".join(f"{name} {n}" for name, n in sizes.items())) if sizes else (trace, "")


def covering(
    trace: Trace, hook: str, claims: Sequence[Capability]
) -> tuple[Capability, Types, Mapping[str, str]] | Missing:
    """The first claim of a hook that covers a trace, and the element types to use; else the first missing word."""
    own = [claim for claim in claims if claim["op"] == hook]
    if not own:
        return Missing(hook)
    missing = Missing("")
    for claim in own:
        word = outside_limits(trace["mixer"], claim.get("limits", {}))
        word = word or missing_feature({"features": features(trace, hook)}, claim)
        typed = None if word or trace["mixer"]["kind"] == TOY else retype(trace, claim)
        if not word and (typed is not None or trace["mixer"]["kind"] == TOY):
            return claim, *(typed or (types_of(trace), {}))
        missing = missing if missing.word else Missing(word or "dtypes")
    return missing


def described(trace: Trace, corpus: Mapping[str, Trace], claims: Sequence[Capability]) -> Mapping[str, Any] | None:
    """The mixer to set up: the trace's own; for a trace of the mixin alone any that is served."""
    if trace["mixer"]["kind"] != TOY:
        return dict(trace["mixer"])
    limits: Mapping[str, Any] = next((claim.get("limits", {}) for claim in claims if claim["op"] == MIXIN), {})
    stories = (one["mixer"] for one in corpus.values() if is_trace(one) and one["mixer"]["kind"] != TOY)
    fitted = (lift_mixer(mixer, fit_sizes(mixer, limits)) for mixer in stories)
    return next((mixer for mixer in fitted if not outside_limits(mixer, limits)), None)


def outside_limits(mixer: Mapping[str, Any], limits: Mapping[str, Any]) -> str:
    """The first number or word of a description that a claim does not serve, as `name=value`."""
    for name, limit in limits.items():
        value = mixer.get(name)
        if value is None:
            continue
        listed = value in limit if isinstance(limit, (list, tuple)) else True
        bounds = limit if isinstance(limit, Mapping) else {}
        inside = bounds.get("min", value) <= value <= bounds.get("max", value)
        if not listed or not inside or (bounds and value % bounds.get("multiple", 1)):
            return f"{name}={value}"
    return ""


def features(trace: Trace, hook: str) -> list[str]:
    """What a hook must be able to do for a trace, in the contract's words."""
    if trace["mixer"]["kind"] == TOY:
        return []
    parts = [name.removeprefix("ssm_") for name in (HOOKS if hook == MIXIN else (hook,))]
    words = ["slot.pool", *_mixer_words(trace["mixer"])]
    for step in trace["steps"]:
        for part in (part for part in parts if part in step):
            words += _decode_words(step[part]) if part == "decode" else _prefill_words(step[part], trace["mixer"])
    return list(dict.fromkeys(words))


def _mixer_words(mixer: Mapping[str, Any]) -> Iterator[str]:
    yield f"width:{mixer['d_conv']}"
    yield "window.W"
    if mixer.get("bare"):
        yield "bare"
    if mixer.get("groups", 1) > 1:
        yield "groups"
    if mixer.get("value_heads", mixer.get("heads", 1)) != mixer.get("heads", 1):
        yield "heads.gva"
    if mixer.get("householder", 1) > 1:
        yield f"householder:{mixer['householder']}"


def _decode_words(given: Mapping[str, Any]) -> Iterator[str]:
    if any(slot < 0 for slot in given["batch_indices"]):
        yield "slot.negative"
    if given["zxBCdt"] and len(given["zxBCdt"][0]) > 1:
        yield "tokens.many"
    if given["intermediates"]:
        yield "intermediates"


def _prefill_words(given: Mapping[str, Any], mixer: Mapping[str, Any]) -> Iterator[str]:
    context, chunk = given["context"], mixer.get("chunk", NOT_CHUNKED)
    offsets, slots = context["cu_seqlens"], context["batch_indices_prefill"]
    yield "packed.cu"
    if any(slot < 0 for slot in slots):
        yield "slot.negative"
    if any(a == b for a, b in pairwise(offsets)):
        yield "empty_segments"
    if offsets[-1] < len(given["zxBCdt"]):
        yield "padded_rows"
    for position in context["intermediate_abs_positions"][: context["intermediate_real_count"][0]]:
        start = max(offset for offset in offsets if offset < position)
        yield "snapshots.any" if (position - start) % chunk else "snapshots.grid"


# ---------------------------------------------------------------------------------------------------------------------
# Element types
# ---------------------------------------------------------------------------------------------------------------------


def retype(trace: Trace, claim: Capability) -> tuple[Types, Mapping[str, str]] | None:
    """The first claimed combination of element types that holds every number of a trace, its own first."""
    own, numbers = types_of(trace), collect(trace)
    if OPERAND_BITS[claim.get("operand", "f32")] < max(map(significant_bits, numbers.values())):
        return None
    combinations = []
    for entry in claim.get("dtypes") or [{}]:
        rows = entry.get("zxBCdt", own.rows)
        combinations.append((Types(rows, entry.get("out", rows), entry.get("conv_state", own.conv),
                                   entry.get("ssm_state", own.state)), entry))  # fmt: skip
    for types, entry in sorted(combinations, key=lambda one: sum(a != b for a, b in zip(one[0], own, strict=True))):
        if all(holds(numbers[which], name) for which, name in types._asdict().items()):
            return types, entry
    return None


def collect(trace: Trace) -> dict[str, Array]:
    """Every number that rows, outputs, windows and states take in a trace, buffers and fills among them."""
    found: dict[str, list[Any]] = {name: [] for name in Types._fields}
    for step in trace["steps"]:
        for hook in ("decode", "prefill"):
            given = step.get(hook, {"zxBCdt": [], "expect": {"y": []}})
            found["rows"].append(given["zxBCdt"])
            for name, values in given["expect"].items():
                found["out" if name == "y" else "conv" if "_conv_" in name else "state"].append(values)
        for when in ("pools_after_hooks", "pools_after_step"):
            for name, which in zip(POOLS, ("conv", "state"), strict=True):
                found[which].append(step[when][name])
    for which in ("conv", "state"):
        found[which].append([trace["sizes"].get(name, "nan") for name in ("pool_fill", "scratch_fill")])
    return {name: np.concatenate([np.zeros(1), *(from_nested(v, "f64").ravel() for v in values)])
            for name, values in found.items()}  # fmt: skip


def holds(numbers: Array, name: str) -> bool:
    """Whether an element type holds each of these numbers."""
    try:
        narrow(numbers, name)
    except ValueError:
        return False
    return True


def significant_bits(numbers: Array) -> int:
    """Significand bits that the widest of these numbers needs.

    >>> significant_bits(np.array([4.0, 3025.0, np.nan]))
    12
    """
    fractions, _ = np.frexp(numbers[np.isfinite(numbers)])
    return next(b for b in range(1 + FLOAT_TYPES["f64"].bits) if (np.ldexp(fractions, b) % 1 == 0).all())


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def execute_trace(case: TraceCase, setup: Setup, run: Callable[[Call, str], Reply]) -> Verdict:
    """Replay a case every way that the implementation offers; the first failure counts."""
    verdict = Verdict("pass")
    for way in case.ways:
        refused = judge_reply(setup(case.mixer))
        if refused is not None:
            return replace(refused, message=f"making the mixer: {refused.message}")
        if case.trace["mixer"]["kind"] == TOY:
            verdict = replay_toy(case.trace, run)
        else:
            verdict = replay_calls(case.trace, run, through=way, types=case.types, derived=case.derived)
        if not verdict.passed:
            through = " (through a stack of layers)" if way == "stack" else ""
            return replace(verdict, message=verdict.message + through)
    return verdict
