"""causal-conv1d (https://github.com/Dao-AILab/causal-conv1d): the references in PyTorch that it ships, on a CPU.

Channels come before tokens there and an entering window has W - 1 columns. A pack is given by segment ids, -1 at rows
to ignore, and then neither takes windows nor returns them; windows of a fresh pack come from a function of their own.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from itertools import pairwise
from types import ModuleType
from typing import Any

from statescan.conformance.adapter import Adapter
from statescan.conformance.adapters import interpreter
from statescan.conformance.adapters.slots import (
    Tensor,
    entering,
    ids_of,
    offsets_of,
    padding,
    refuse,
    refuse_rows,
    silence,
    store,
)

MISSING = interpreter.missing("causal_conv1d", "causal_conv1d", "torch", "triton")
if not MISSING:
    # The package imports its compiled extension first of all. The references do not use it, and it is not built here.
    sys.modules.setdefault("causal_conv1d_cuda", ModuleType("causal_conv1d_cuda"))
    interpreter.show_unwritten_memory()
REFERENCE: Any = None if MISSING else import_module("causal_conv1d.causal_conv1d_interface")
VARLEN: Any = None if MISSING else import_module("causal_conv1d.causal_conv1d_varlen")

adapter = Adapter(
    "causal_conv1d", "" if MISSING else metadata.version("causal-conv1d"), arrays="torch", missing=MISSING,
    source="https://github.com/Dao-AILab/causal-conv1d",
    info={"functions": "causal_conv1d_ref, causal_conv1d_update_ref, causal_conv1d_varlen_states_ref"},
)  # fmt: skip

RULES = ["act.none", "act.silu", "bias", "width:2", "width:3", "width:4"]
# Functions of their arguments alone, made of PyTorch's operations, which take any strides.
PROMISES = ["repeatable", "strided"]
SLOTS = ["slot.pool", "slot.negative", "slot.split"]
PACKED = ["packed.cu", "packed.seq_idx", "padded_rows"]
# Sums are formed in the type of the weights, so that is the operand class. An x wider than the weights is not claimed:
# windows would be rounded to the type of the weights (see the findings), or refused beside them.
TYPES = {
    "bf16": [{"x": "bf16", "weight": "bf16", "out": "bf16"}],
    "f32": [{"x": "f32", "weight": "f32", "out": "f32"}, {"x": "bf16", "weight": "f32", "out": "bf16"}],
    "f16": [{"x": "f16", "weight": "f16", "out": "f16"}],
}
# A window and the tokens that enter it have one type.
POOL_TYPES = {operand: [{**types, "conv_pool": types["x"]} for types in several] for operand, several in TYPES.items()}


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, initial_windows: Tensor | None = None, *, activation: str | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A pack by its ids; batch rows by a call that takes and returns windows."""
    if seq_idx is None and cu_seqlens is None:
        return _batch(x, weight, bias, initial_windows, activation)
    refuse(**{"state.in": initial_windows})  # with ids the function reads one window, for the first segment
    offsets = offsets_of(seq_idx) if cu_seqlens is None else cu_seqlens
    ids = seq_idx if cu_seqlens is None else ids_of(cu_seqlens, x.shape[1])
    y = REFERENCE.causal_conv1d_ref(x.mT, weight, bias, activation=activation, seq_idx=ids)
    # The function of windows has an error for a row of no tokens (see the findings), so the claims keep the two apart.
    empty = bool((offsets.diff() == 0).any())
    windows = None if empty else VARLEN.causal_conv1d_varlen_states_ref(x[0], offsets, weight.shape[1]).contiguous()
    return y.mT.contiguous(), windows


def _batch(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Each batch row one segment; the oldest column of a window is left out going in, and 0 coming out."""
    before = None if windows is None else windows[..., 1:]
    y, final = REFERENCE.causal_conv1d_ref(
        x.mT, weight, bias, initial_states=before, return_final_states=True, activation=activation
    )
    wide = final.new_zeros(*final.shape[:2], weight.shape[1])
    wide[..., 1:] = final
    return y.mT.contiguous(), wide


def causal_conv1d_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
    snapshot_windows: Tensor | None = None, *, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """A call a row: the function takes windows only where it takes no ids."""
    refuse(**{"snapshots.any": snapshot_positions})
    refuse_rows(cu_seqlens, x.shape[1], empty=False)
    write = read_slots if write_slots is None else write_slots
    windows, y = entering(conv_pool, read_slots), x.new_zeros(x.shape)
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        y[:, start:end], windows[n] = _batch(x[:, start:end], weight, bias, windows[n, None], activation)
    store(conv_pool, write, windows)
    return silence(y, cu_seqlens, padding(read_slots, write))


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, intermediate_windows: Tensor | None = None, num_accepted: Tensor | None = None,
    num_tokens: Tensor | None = None, *, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """One call for all rows and tokens; its state may be longer than it needs, so it keeps all W columns."""
    refuse(intermediates=intermediate_windows, num_accepted=num_accepted, num_tokens=num_tokens)
    write = read_slots if write_slots is None else write_slots
    windows = entering(conv_pool, read_slots)
    y = REFERENCE.causal_conv1d_update_ref(x.mT, windows, weight, bias, activation).mT.contiguous()
    store(conv_pool, write, windows)
    y[padding(read_slots, write)] = 0
    return y


CLAIMS = (
    (causal_conv1d, TYPES, ["empty_segments", "grad", *PACKED]),
    (causal_conv1d, TYPES, ["state.out", "window.W-1", "grad", *PACKED]),
    (causal_conv1d, TYPES, ["batch", "state.in", "state.out", "window.W-1", "grad"]),
    (causal_conv1d_prefill, POOL_TYPES, ["packed.cu", "window.W-1", *SLOTS]),
    (causal_conv1d_update, POOL_TYPES, ["tokens.many", "window.W", *SLOTS]),
)
"""Functions with what they take: a pack without windows, a fresh pack, batch rows; and on pools."""

for operand in TYPES:
    for function, types, features in CLAIMS:
        adapter.op(function.__name__, operand=operand, dtypes=types[operand], features=[*features, *RULES, *PROMISES])(
            function
        )
