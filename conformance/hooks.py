"""One call of a mixer's hook, on the side of the implementation: tensors by name become arguments and a context.

A hook call is an ordinary call whose operation is `ssm_decode`, `ssm_prefill` or `ssm_dynamic_inference`: pools,
buffers and the arrays of the context are tensors under their names, sizes of the step are settings. Nothing here knows
what must come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

HOOKS: tuple[str, ...] = ("ssm_decode", "ssm_prefill")
MIXIN = "ssm_dynamic_inference"
KINDS: tuple[str, ...] = ("mamba2", "gdn", "gdp", "kda")
"""Kinds of mixers that a description may name."""
TOY = "toy"
"""The kind of a trace that is about the mixin alone: its hooks are the suite's own."""

POOLS: tuple[str, ...] = ("conv_state", "ssm_state")
ENTRIES: tuple[str, ...] = ("intermediate_conv_state", "intermediate_ssm_state")
SNAPSHOTS: tuple[str, ...] = ("intermediate_conv_out", "intermediate_ssm_out")
"""Window and state: the pools, the entries of a step with drafts, the snapshots of prefill."""

_TENSORS = (*POOLS, *ENTRIES, *SNAPSHOTS)


def hook_arguments(op: str, tensors: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a hook, by place: implementations name them as they like."""
    if op == "ssm_decode":
        names = ("zxBCdt", *POOLS, "batch_indices", *ENTRIES)
        return tuple(tensors[name] for name in names if name in tensors)
    if op == "ssm_prefill":
        layer = [tensors[name] for name in POOLS]
        return (tensors["zxBCdt"], *layer, make_context(tensors, args, [layer]))
    layers = [[tensors[f"{name}.{i}"] for name in POOLS] for i in range(args["layers"])]
    entries = [[tensors[f"{name}.{i}"] for name in ENTRIES] for i in range(args["layers"])]
    return tensors["hidden_states"], make_context(tensors, args, layers, entries)


def make_context(
    tensors: Mapping[str, Any], args: Mapping[str, Any], layers: list[list[Any]], entries: list[list[Any]] | None = None
) -> Any:
    """A context with the attributes that hooks and mixins read, and no others; no class of ours."""
    arrays = {name: tensor for name, tensor in tensors.items()
              if name.partition(".")[0] not in _TENSORS and name not in ("zxBCdt", "hidden_states")}  # fmt: skip

    def states(number: int, intermediate: bool = False) -> Any:
        slab = args["layer_map"][number - 1]
        return tuple((entries or [] if intermediate else layers)[slab])

    return SimpleNamespace(
        mamba_metadata=SimpleNamespace(**arrays), num_speculative_tokens=args["num_speculative_tokens"],
        mamba_slot_allocator=SimpleNamespace(**{name: tensors[name] for name in SNAPSHOTS}),
        padded_batch_dimensions=SimpleNamespace(
            **{name: args[name] for name in ("token_count", "decode_req_count", "prefill_req_count")}),
        padding_slice=slice(*args["padding"]), mamba_states_cache=states, layer_map=tuple(args["layer_map"]),
    )  # fmt: skip
