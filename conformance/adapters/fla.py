"""fla-core (https://github.com/fla-org/flash-linear-attention): its convolution, gates and norms, interpreted on a CPU.

Windows have W columns, newest last, as here. There are no pools and no split slots: rows are gathered and scattered
around the call. There are no snapshots, intermediates or row lengths either, so these are not claimed. Offsets and
entering windows go in as they come; what the kernels leave out or unwritten stays so.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from statescan.conformance.adapters import fla_gates
from statescan.conformance.adapters.fla_kernels import MISSING, interpreted
from statescan.conformance.adapters.slots import Tensor, entering, padding, refuse, silence, store

adapter = interpreted(
    "fla", ["modules.causal_conv1d", *fla_gates.MODULES],
    f"causal_conv1d, causal_conv1d_update, {fla_gates.FUNCTIONS}",
)  # fmt: skip
CONV: Any = None if MISSING else import_module("fla.modules.causal_conv1d")

RULES = ["act.none", "act.silu", "bias", "width:2", "width:3", "width:4", "window.W"]
# Functions of their arguments alone, without atomics; x is read by its strides and everything else made contiguous.
PROMISES = ["repeatable", "strided"]
SLOTS = ["slot.pool", "slot.negative", "slot.split"]
# Kernels compute in float32 whatever they are given; float64 is not among their types.
TYPES = [{"x": x, "weight": weight, "out": x} for x, weight in
         (("f32", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32"))]  # fmt: skip
# A final window has the type of x, so a pool is fed back without a rounding of ours only if it has it too.
POOL_TYPES = [{**types, "conv_pool": types["x"]} for types in TYPES]


@adapter.op(
    "causal_conv1d", dtypes=TYPES,
    features=["packed.cu", "padded_rows", "empty_segments", "batch", "state.in", "state.out", "grad", *RULES,
              *PROMISES],
)  # fmt: skip
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, initial_windows: Tensor | None = None, *, activation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One call. `seq_idx` is not claimed, and handed over all the same: the function takes it among its keywords."""
    more = {} if seq_idx is None else {"seq_idx": seq_idx}
    y, windows = CONV.causal_conv1d(
        x, weight, bias, initial_state=initial_windows, output_final_state=True, activation=activation,
        cu_seqlens=cu_seqlens, **more,
    )  # fmt: skip
    return y, windows


@adapter.op(
    "causal_conv1d_prefill", dtypes=POOL_TYPES,
    features=["packed.cu", "padded_rows", "empty_segments", *SLOTS, *RULES, *PROMISES],
)  # fmt: skip
def causal_conv1d_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
    snapshot_windows: Tensor | None = None, *, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """All rows in one packed call, the gathered windows as its entering ones."""
    refuse(**{"snapshots.any": snapshot_positions})
    write = read_slots if write_slots is None else write_slots
    y, windows = causal_conv1d(x, weight, bias, None, cu_seqlens, entering(conv_pool, read_slots),
                               activation=activation)  # fmt: skip
    store(conv_pool, write, windows)
    return silence(y, cu_seqlens, padding(read_slots, write))


def update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, intermediate_windows: Tensor | None = None, num_accepted: Tensor | None = None,
    num_tokens: Tensor | None = None, *, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """One token a row by the function for it; several as its module does it, by the packed one with a cache."""
    refuse(intermediates=intermediate_windows, num_accepted=num_accepted, num_tokens=num_tokens)
    write = read_slots if write_slots is None else write_slots
    windows = entering(conv_pool, read_slots)
    if x.shape[1] == 1:
        y, windows = CONV.causal_conv1d_update(x, windows, weight=weight, bias=bias, activation=activation)
    else:
        y, windows = causal_conv1d(x, weight, bias, initial_windows=windows, activation=activation)
    store(conv_pool, write, windows)
    y[padding(read_slots, write)] = 0
    return y


# The packed call returns a window in the type of x; the one-token kernel keeps it in its own, whatever x has.
adapter.op("causal_conv1d_update", dtypes=POOL_TYPES, features=["tokens.many", *SLOTS, *RULES, *PROMISES])(update)
adapter.op(
    "causal_conv1d_update", dtypes=[{"x": "bf16", "weight": "bf16", "conv_pool": "f32", "out": "bf16"}],
    features=[*SLOTS, *RULES, *PROMISES],
)(update)  # fmt: skip

fla_gates.claim_gates(adapter)
fla_gates.claim_norms(adapter)
