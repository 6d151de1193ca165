"""What an implementation must claim for a vector: features read off its fields, and element types that it pins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from statescan.goldens.tensors import Array
from statescan.spec.contract import OPERATIONS

WINDOW_TENSORS = ("initial_windows", "final_windows", "conv_pool", "snapshot_windows", "intermediate_windows")
STATE_TENSORS = ("initial_state", "initial_windows")
LEAST_GATE = -1024.0
ANY_STEP = (0.0, "inf")


def features(
    op: str, args: Mapping[str, Any], tensors: Mapping[str, Array], wanted: set[str], axes: Mapping[str, int], *,
    grad: bool,
) -> list[str]:  # fmt: skip
    """Feature words of one call, in the contract's order; `wanted` are the results that are compared."""
    words = _packing(tensors, axes) + _state(tensors, wanted, axes) + _conv(op, args, tensors, wanted, axes)
    words += _delta(op, args, tensors, axes) + _ssd(op, args, tensors, axes) + _gates(op, args, tensors)
    return list(dict.fromkeys([*words, *(["grad"] if grad else [])]))


def state_layout(op: str, args: Mapping[str, Any]) -> str | None:
    """The order of a pool's last two axes, where the operation has such a pool and lets it be chosen (SLOT-6)."""
    if not any(argument.name == "state_layout" for argument in OPERATIONS[op].settings):
        return None
    return str(args.get("state_layout", "KV"))


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
    if any(name.startswith("intermediate") for name in tensors):
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


def _delta(op: str, args: Mapping[str, Any], tensors: Mapping[str, Array], axes: Mapping[str, int]) -> list[str]:
    if OPERATIONS[op].family != "delta" or "q" not in tensors:
        return []
    words = ["heads.gva"] if axes["HV"] != axes["H"] else []
    words += ["beta.double"] if (tensors["beta"].astype(np.float64) > 1).any() else []
    words += ["decay.zero"] if (tensors["g"].astype(np.float64) <= LEAST_GATE).any() else []
    words += ["l2norm.inside"] if args.get("use_qk_l2norm") else []
    copies = int(args.get("num_householder", 1))
    return words + ([f"householder:{copies}"] if copies > 1 else [])


def _ssd(op: str, args: Mapping[str, Any], tensors: Mapping[str, Array], axes: Mapping[str, int]) -> list[str]:
    if OPERATIONS[op].family != "ssd":
        return []
    words = ["groups"] if axes["G"] > 1 else []
    words += ["decay.zero"] if (_log_decay(args, tensors) <= LEAST_GATE).any() else []
    if "D" in tensors:
        words.append("D.head" if tensors["D"].ndim == 1 else "D.channel")
    words += ["z.inside"] if "z" in tensors else []
    limit = tuple(args.get("dt_limit", ANY_STEP))
    return words + (["dt.limit"] if limit not in (ANY_STEP, (0.0, float("inf"))) else [])


def _log_decay(args: Mapping[str, Any], tensors: Mapping[str, Array]) -> Array:
    """dt A of every token, softplus taken as its linear part: where a decay is 0 the difference is none."""
    dt = tensors["dt"].astype(np.float64)
    if "dt_bias" in tensors:
        dt = dt + tensors["dt_bias"].astype(np.float64)
    least, most = (float(bound) for bound in args.get("dt_limit", ANY_STEP))
    found: Array = np.minimum(np.maximum(dt, least), most) * tensors["A"].astype(np.float64)
    return found


def _gates(op: str, args: Mapping[str, Any], tensors: Mapping[str, Array]) -> list[str]:
    words = ["beta.double"] if args.get("allow_neg_eigval") else []
    words += ["decay.floor"] if args.get("lower_bound") is not None else []
    if op == "rmsnorm_gated" and "z" in tensors and args.get("gate_activation") == "sigmoid":
        words.append("gate.sigmoid" if args.get("norm_before_gate") else "gate.sigmoid.first")
    return words
