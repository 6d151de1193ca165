"""mamba_ssm (https://github.com/state-spaces/mamba): its Triton kernels for Mamba2, interpreted on a CPU.

The chunked scan takes segment ids and gives a state of each segment, or takes one entering state a batch row: a pack
with entering states is a call a row. The update works on a pool by slots, a negative one being padding; it takes one
token and no limit of the step, so several tokens go to the scan. Chunks have 64 tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from statescan.conformance.adapter import Adapter, Unsupported
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

Limit = tuple[float, float]

MISSING = interpreter.missing("mamba_ssm", "mamba_ssm", "torch", "triton", "einops")
DEVICE = "cpu" if MISSING else interpreter.prepare()
CHUNK = 64


def _load() -> tuple[Any, Any, Any]:
    """The modules of the scan, the update and the gated norm, without what the package imports first.

    Its `__init__` imports a compiled extension, which these modules do not use and which is not built here.
    """
    found = PathFinder.find_spec("mamba_ssm")
    assert found is not None
    sys.modules["mamba_ssm"] = module_from_spec(found)  # with its path, and nothing of it run
    if DEVICE == "cpu":
        _stand_in_for_a_gpu()
    scan, step, norm = (import_module(f"mamba_ssm.ops.triton.{name}")
                        for name in ("ssd_combined", "selective_state_update", "layernorm_gated"))  # fmt: skip
    return scan, step, norm


def _stand_in_for_a_gpu() -> None:
    """Launches select a device and gradients ask for its size: neither means anything to an interpreter."""
    import torch

    def selected(index: Any) -> Any:
        return contextlib.nullcontext()

    def properties(device: Any) -> Any:
        return SimpleNamespace(multi_processor_count=1)

    cuda: Any = torch.cuda
    cuda.device, cuda.get_device_properties = selected, properties


_LOADED: tuple[Any, Any, Any] = (None, None, None) if MISSING else _load()
SCAN, STEP, NORM = _LOADED

adapter = Adapter(
    "mamba_ssm", "" if MISSING else metadata.version("mamba-ssm"), arrays="torch", device=DEVICE, missing=MISSING,
    source="https://github.com/state-spaces/mamba",
    info={"functions": "mamba_chunk_scan_combined (deterministic), selective_state_update, rmsnorm_fn",
          "chunk_size": CHUNK},
)  # fmt: skip

# In its deterministic mode, which PyTorch's switch turns on, no sum depends on an order of arrival.
PROMISES = ["repeatable", "strided"]
RULES = ["groups", "z.inside", "D.head", "D.channel", "decay.zero"]
SLOTS = ["slot.pool", "slot.negative", "slot.split"]
PACKED = ["packed.cu", "packed.seq_idx", "packed.trailing", "empty_segments"]
# Matrix products take the type of x, B and C; those of float32 go through tf32 on a GPU.
OPERANDS = {"f32": "tf32", "bf16": "bf16", "f16": "f16"}


# ---------------------------------------------------------------------------------------------------------------------
# The scan
# ---------------------------------------------------------------------------------------------------------------------


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None, *, dt_softplus: bool = True, dt_limit: Limit = (0.0, float("inf")),
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One call; a pack by its ids, and by its offsets too where states are asked for."""
    more = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit)}
    if seq_idx is None and cu_seqlens is None:
        return _scan(x, dt, A, B, C, initial_state, output_final_state, more)
    refuse(**{"state.in": initial_state})  # one a batch row, for the first segment
    ids = ids_of(cu_seqlens, x.shape[1]) if seq_idx is None else seq_idx
    if int(ids.min()) < 0:
        raise Unsupported("padded_rows")
    if not output_final_state:
        return SCAN.mamba_chunk_scan_combined(x, dt, A, B, C, CHUNK, seq_idx=ids, **more), None
    offsets = offsets_of(ids) if cu_seqlens is None else cu_seqlens
    y, final = SCAN.mamba_chunk_scan_combined(
        x, dt, A, B, C, CHUNK, seq_idx=ids, cu_seqlens=offsets, return_varlen_states=True, **more
    )
    return y, final


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, final: bool, more: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Batch rows, each one segment."""
    found = SCAN.mamba_chunk_scan_combined(
        x, dt, A, B, C, CHUNK, initial_states=state, return_final_states=final, **more
    )
    return found if final else (found, None)


def ssd_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, cu_seqlens: Tensor, state_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
    snapshot_states: Tensor | None = None, *, dt_softplus: bool = True, dt_limit: Limit = (0.0, float("inf")),
) -> Tensor:  # fmt: skip
    """A call a row, its state the entering one."""
    refuse(**{"snapshots.any": snapshot_positions})
    # a scan of no tokens writes to memory that is not its own (see the findings)
    refuse_rows(cu_seqlens, x.shape[1], empty=False)
    write = read_slots if write_slots is None else write_slots
    states, y = entering(state_pool, read_slots), x.new_zeros(x.shape)
    fixed = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit)}
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        row = slice(start, end)
        more = {**fixed, "z": None if z is None else z[:, row]}
        y[:, row], states[n] = _scan(x[:, row], dt[:, row], A, B[:, row], C[:, row], states[n, None], True, more)
    store(state_pool, write, states)
    return silence(y, cu_seqlens, padding(read_slots, write))


# ---------------------------------------------------------------------------------------------------------------------
# The update
# ---------------------------------------------------------------------------------------------------------------------


def ssd_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, state_pool: Tensor, read_slots: Tensor, write_slots: Tensor | None = None,
    intermediate_states: Tensor | None = None, num_accepted: Tensor | None = None, num_tokens: Tensor | None = None,
    *, dt_softplus: bool = True, dt_limit: Limit = (0.0, float("inf")),
) -> Tensor:  # fmt: skip
    """One token by the function for it, on the pool itself where a row writes what it reads; several by the scan."""
    refuse(intermediates=intermediate_states, num_accepted=num_accepted, num_tokens=num_tokens)
    write = read_slots if write_slots is None else write_slots
    if x.shape[1] > 1:
        more = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit)}
        y, states = _scan(x, dt, A, B, C, entering(state_pool, read_slots), True, more)
        store(state_pool, write, states)
        y[padding(read_slots, write)] = 0
        return y
    if tuple(dt_limit) != (0.0, float("inf")):
        raise Unsupported("dt.limit")
    tokens = [None if part is None else part[:, 0] for part in (x, dt, B, C, z)]
    if bool((write == read_slots).all()):
        return _step(state_pool, tokens, A, D, dt_bias, dt_softplus, read_slots)[:, None]
    states = entering(state_pool, read_slots)
    y = _step(states, tokens, A, D, dt_bias, dt_softplus, None)[:, None]
    store(state_pool, write, states)
    y[padding(read_slots, write)] = 0
    return y


def _step(
    states: Tensor, tokens: list[Any], A: Tensor, D: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool,
    slots: Tensor | None,
) -> Tensor:  # fmt: skip
    """What is one number a head is spread over its channels, without copies, as the package's own layer does.

    D and the bias may be None by its documentation, and fail when they are: zeros stand for them.
    """
    x, dt, B, C, z = tokens
    heads, channels, columns = states.shape[1:]
    given = [A.new_zeros(heads) if part is None else part for part in (D, dt_bias)]
    spread = [part[:, None].expand(heads, channels) if part.dim() == 1 else part for part in given]
    return STEP.selective_state_update(
        states, x, dt[..., None].expand(*dt.shape, channels), A[:, None, None].expand(heads, channels, columns), B, C,
        spread[0], z=z, dt_bias=spread[1], dt_softplus=dt_softplus, state_batch_indices=slots,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The norm, and what is claimed
# ---------------------------------------------------------------------------------------------------------------------


@adapter.op("rmsnorm_gated", dtypes=[{"x": x, "out": x} for x in OPERANDS], features=["grad", *PROMISES])
def rmsnorm_gated(
    x: Tensor, z: Tensor | None, weight: Tensor, *, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, gate_activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Gated by silu alone; weights are one a channel."""
    if gate_activation != "silu" and z is not None:
        raise Unsupported(f"gate_activation={gate_activation}")
    weights = weight.repeat(x.shape[-1] // weight.shape[0])
    return NORM.rmsnorm_fn(x, weights, None, z=z, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)


def _claim(kind: str, operand: str) -> None:
    def claim(name: str, function: Callable[..., Any], features: list[str], **more: Any) -> None:
        types = {"x": kind, "dt": "f32", "A": "f32", "D": "f32", "dt_bias": "f32", "out": kind, **more.pop("states")}
        adapter.op(name, features=[*features, *RULES, *PROMISES], dtypes=[types], **more)(function)

    scan = {"operand": operand, "limits": {"T": {"min": 1}}}
    claim("ssd", ssd, [*PACKED, "batch", "dt.limit", "grad"], states={}, **scan)
    # States of segments come in the type of C, and their function has no gradient.
    claim("ssd", ssd, [*PACKED, "dt.limit", "state.out"], states={"final_state": kind}, **scan)
    claim("ssd", ssd, ["batch", "dt.limit", "state.in", "state.out", "grad"],
          states={"initial_state": "f32", "final_state": "f32"}, **scan)  # fmt: skip
    claim("ssd_prefill", ssd_prefill, ["packed.cu", "dt.limit", *SLOTS], states={"state_pool": "f32"}, **scan)
    claim("ssd_update", ssd_update, ["batch.invariant", "offsets.64", *SLOTS], states={"state_pool": "f32"})
    claim("ssd_update", ssd_update, ["tokens.many", "dt.limit", *SLOTS], states={"state_pool": "f32"}, operand=operand)


for _kind, _operand in OPERANDS.items():
    _claim(_kind, _operand)
