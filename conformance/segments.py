"""Packed vectors cut into dense calls: what formats without offsets and slots can hold of them.

ONNX and FlashInfer-Bench know no pool, no segment ids and no exact comparison beside a reference. A packed vector with
exact expectations becomes one call for each of its segments, each with its entering and its final state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from statescan.goldens.tensors import Array, decode

RULES = ("gated_delta_rule", "kimi_delta_attention", "gated_delta_product")
CONVOLUTION = "causal_conv1d"
_ENTERING = {
    CONVOLUTION: ("initial_windows", "final_windows"), **dict.fromkeys(RULES, ("initial_state", "final_state"))
}  # fmt: skip


@dataclass(frozen=True)
class Dense:
    """One segment of a vector as a call of its own: batch 1, every tensor in float32 or as an index.

    `entering` and `final` are the state `[1, HV, K, V]` or the window `[1, C, W]`; `final` is None where the vector
    does not ask for it.
    """

    name: str
    op: str
    args: Mapping[str, Any]
    inputs: Mapping[str, Array]
    entering: Array | None
    out: Array
    final: Array | None


def why_not(vector: Mapping[str, Any]) -> str:
    """Why a vector has no dense form; "" where it has one."""
    if vector["format"] != "statescan.vector/1":
        return "a trace: pools, slots and steps have no word there"
    if vector["op"].rsplit("_", 1)[-1] in ("prefill", "update"):
        return "slots of a pool"
    if vector["op"] not in _ENTERING:
        return "an operation of another kind"
    if vector["class"] != "exact" or "grad" in vector:
        return "no exact numbers of a forward call"
    if "seq_idx" in vector["inputs"]:
        return "segment ids"
    if vector["args"].get("use_qk_l2norm"):
        return "normalised keys"
    if "dtypes" in vector["needs"]:
        return "a rounding, which float32 tensors do not show"
    wide = [spec for spec in vector["inputs"].values() if isinstance(spec, dict) and "blob" in spec]
    return "tensors in files" if wide else ""


def dense_calls(vector: Mapping[str, Any]) -> Iterator[Dense]:
    """The segments of a vector with at least one token, each as a dense call."""
    tensors = {name: decode(spec, vector.get("seed", 0)) for name, spec in vector["inputs"].items() if "shape" in spec}
    expect = {name: decode(spec) for name, spec in vector["expect"].items() if "data" in spec}
    entering, final = _ENTERING[vector["op"]]
    per_token = [name for name in tensors if name not in (entering, "cu_seqlens", "weight", "bias")]
    out = "y" if vector["op"] == CONVOLUTION else "o"
    copies = int(vector["args"].get("num_householder") or 1)
    for n, (batch, start, end) in enumerate(_segments(tensors, out)):
        if start == end:
            continue
        cut = {}
        for name in per_token:
            times = copies if name in ("k", "v", "beta") else 1
            cut[name] = tensors[name][batch : batch + 1, start * times : end * times]
        cut.update({name: tensors[name] for name in ("weight", "bias") if name in tensors})
        yield Dense(
            f"{vector['id']}-{n}", vector["op"], vector["args"], cut,
            tensors[entering][n : n + 1] if entering in tensors else None,
            expect[out][batch : batch + 1, start:end], expect[final][n : n + 1] if final in expect else None,
        )  # fmt: skip


def _segments(tensors: Mapping[str, Array], out: str) -> Iterator[tuple[int, int, int]]:
    tokens = tensors["x" if out == "y" else "q"]
    if "cu_seqlens" not in tensors:
        yield from ((n, 0, tokens.shape[1]) for n in range(tokens.shape[0]))
        return
    offsets = [int(n) for n in tensors["cu_seqlens"]]
    yield from ((0, start, end) for start, end in pairwise(offsets))
