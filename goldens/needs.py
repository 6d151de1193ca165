"""What an implementation must claim for a vector: features read off its fields, and element types that it pins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statescan.goldens.tensors import Array

WINDOW_TENSORS = ("initial_windows", "final_windows", "conv_pool", "snapshot_windows", "intermediate_windows")
STATE_TENSORS = ("initial_state", "initial_windows")


def features(
    op: str, args: Mapping[str, Any], tensors: Mapping[str, Array], wanted: set[str], axes: Mapping[str, int], *,
    grad: bool,
) -> list[str]:  # fmt: skip
    """Feature words of one call, in the contract's order; `wanted` are the results that are compared."""
    words = _packing(tensors, axes) + _state(tensors, wanted, axes) + _conv(op, args, tensors, wanted, axes)
    return list(dict.fromkeys([*words, *(["grad"] if grad else [])]))


def _packing(tensors: Mapping[str, Array], axes: Mapping[str, int]) -> list[str]:
    words = []
    offsets, ids = tensors.get("cu_seqlens"), tensors.get("seq_idx")
    if offsets is not None:
        words.append("packed.cu")
        if "T" in axes and offsets[-1] < axes["T"]:
            words.append("padded_rows")
        if (offsets[1:] == offsets[:-1]).any():
            words.append("empty_segments")
    if ids is not None:
        words.append("packed.seq_idx")
        present = set(ids.ravel().tolist())
        if -1 in present:
            words.append("padded_rows")
        if present - {-1} != set(range(axes["N"])):
            words.append("empty_segments")
    if axes.get("batch", 1) > 1:
        words.append("batch")
    return words


def _state(tensors: Mapping[str, Array], wanted: set[str], axes: Mapping[str, int]) -> list[str]:
    words = []
    if any(name in tensors for name in STATE_TENSORS):
        words.append("state.in")
    if wanted & {"final_windows", "final_state"}:
        words.append("state.out")
    read, write = tensors.get("read_slots"), tensors.get("write_slots")
    if read is not None:
        words.append("slot.pool")
        if (read < 0).any() or (write is not None and (write < 0).any()):
            words.append("slot.negative")
        if write is not None and (write != read).any():
            words.append("slot.split")
    if axes.get("J", 1) > 1:
        words.append("tokens.many")
    if any(name.startswith("intermediate_") for name in tensors):
        words.append("intermediates")
    if "snapshot_positions" in tensors:
        words.append("snapshots.any")
    return words + [name for name in ("num_accepted", "num_tokens") if name in tensors]


def _conv(
    op: str, args: Mapping[str, Any], tensors: Mapping[str, Array], wanted: set[str], axes: Mapping[str, int]
) -> list[str]:
    if not op.startswith("causal_conv1d"):
        return []
    words = ["act.none" if args.get("activation") is None else "act.silu", f"width:{axes.get('W', 0)}"]
    if "bias" in tensors:
        words.append("bias")
    if any(name in tensors or name in wanted for name in WINDOW_TENSORS):
        words.append("window.W")
    return words
