"""transformers (https://github.com/huggingface/transformers): the PyTorch functions that its layers fall back to.

They keep no packs apart and scale q by K^-1/2 always: a row of a pack is a call of its own, and another scale is a
factor on the output, which is exact where the root of K is a power of two. Kernel packages that are installed would
take the place of these functions, and are hidden from this process. Gates and norms are layers there: one is made for
each call, with the given parameters, and what it projects is left as it is.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from statescan.conformance.adapter import Adapter, Unsupported
from statescan.conformance.adapters import interpreter
from statescan.conformance.adapters.delta import Function, by_row, pack, prefill, update
from statescan.conformance.adapters.slots import Tensor, entering, padding, refuse, refuse_rows, silence, store

Limit = tuple[float, float]

MISSING = interpreter.missing("transformers", "transformers", "torch")
HIDDEN = ("fla", "causal_conv1d", "mamba_ssm", "kernels")
CHUNK = 64


def _load(model: str) -> Any:
    return None if MISSING else import_module(f"transformers.models.{model}.modeling_{model}")


if not MISSING:
    interpreter.show_unwritten_memory()
    sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]
QWEN, KIMI, GLM = _load("qwen3_next"), _load("kimi_linear"), _load("glm5_next")
MAMBA, FALCON = _load("mamba2"), _load("falcon_h1")

adapter = Adapter(
    "transformers", "" if MISSING else metadata.version("transformers"), arrays="torch", missing=MISSING,
    source="https://github.com/huggingface/transformers",
    info={"qwen3_next": "torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule, causal_conv1d_fn, "
                        "causal_conv1d_update, l2norm, Qwen3NextRMSNormGated",
          "kimi_linear": "chunk_kimi_delta_attention, recurrent_kimi_delta_attention, KimiLinearRMSNormGated",
          "mamba2": "mamba2_chunk_scan, mamba2_selective_state_update, MambaRMSNormGated",
          "others": "Glm5NextTextForgetGate, FalconH1RMSNormGated"},
)  # fmt: skip

# Functions of their arguments alone, made of PyTorch's operations, which take any strides.
PROMISES = ["repeatable", "strided"]
SLOTS = ["slot.pool", "slot.negative", "slot.split"]
KINDS = ("f32", "bf16", "f16")


# ---------------------------------------------------------------------------------------------------------------------
# Convolution
# ---------------------------------------------------------------------------------------------------------------------

CONV = ["act.none", "act.silu", "bias", "width:2", "width:3", "width:4", *PROMISES]


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, initial_windows: Tensor | None = None, *, activation: str | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """Batch rows without windows."""
    refuse(**{"packed.seq_idx": seq_idx, "packed.cu": cu_seqlens, "state.in": initial_windows})
    return QWEN.causal_conv1d_fn(x.mT, weight, bias, activation=activation).mT, None


def causal_conv1d_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
    snapshot_windows: Tensor | None = None, *, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """A call a row of the function that takes a window; it takes any number of tokens but none."""
    refuse(**{"snapshots.any": snapshot_positions})
    refuse_rows(cu_seqlens, x.shape[1], empty=False)
    write = read_slots if write_slots is None else write_slots
    windows, y = entering(conv_pool, read_slots), x.new_zeros(x.shape)
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        row = x[:, start:end].mT
        y[:, start:end] = QWEN.causal_conv1d_update(row, windows[n, None], weight, bias, activation).mT
    store(conv_pool, write, windows)
    return silence(y, cu_seqlens, padding(read_slots, write))


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, intermediate_windows: Tensor | None = None, num_accepted: Tensor | None = None,
    num_tokens: Tensor | None = None, *, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """One call for all rows and tokens; its window may be longer than it needs, so it keeps all W columns."""
    refuse(intermediates=intermediate_windows, num_accepted=num_accepted, num_tokens=num_tokens)
    write = read_slots if write_slots is None else write_slots
    windows = entering(conv_pool, read_slots)
    y = QWEN.causal_conv1d_update(x.mT, windows, weight, bias, activation).mT
    store(conv_pool, write, windows)
    y[padding(read_slots, write)] = 0
    return y


def _claim_convolution() -> None:
    for kind in KINDS:  # sums are formed in the type of the weights, which is that of x
        types = {"x": kind, "weight": kind, "out": kind}
        pools = [{**types, "conv_pool": kind}]
        adapter.op("causal_conv1d", operand=kind, dtypes=[types], limits={"T": {"min": 1}},
                   features=["batch", "grad", *CONV])(causal_conv1d)  # fmt: skip
        adapter.op("causal_conv1d_prefill", operand=kind, dtypes=pools,
                   features=["packed.cu", "window.W", *SLOTS, *CONV])(causal_conv1d_prefill)  # fmt: skip
        adapter.op("causal_conv1d_update", operand=kind, dtypes=pools,
                   features=["tokens.many", "window.W", *SLOTS, *CONV])(causal_conv1d_update)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Delta rules
# ---------------------------------------------------------------------------------------------------------------------

DELTA = ["beta.double", "decay.zero", "l2norm.inside", *PROMISES]
EXACT_ROOTS = {"K": [4, 16, 64, 256]}


def scaled(kernel: Function) -> Function:
    """A function of the package under the names of the packed ones, and with a scale."""

    def call(
        *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        scale: float | None = None, cu_seqlens: Tensor | None = None, **settings: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        refuse(**{"packed.cu": cu_seqlens})
        o, final = kernel(q, k, v, g=g, beta=beta, initial_state=initial_state, **settings)
        factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
        return (o if factor == 1 else o * factor), final

    return call


def _claim_delta(name: str, chunked: Function, recurrent: Function, rules: list[str]) -> None:
    types = [{"q": kind, "g": "f32", "beta": "f32", "out": kind} for kind in KINDS]  # computed in float32
    pools = [{**entry, "state_pool": "f32"} for entry in types]
    rules = [*rules, *DELTA]
    adapter.op(
        name, features=["batch", "state.in", "state.out", "grad", *rules], limits=EXACT_ROOTS,
        dtypes=[{**entry, "initial_state": "f32", "final_state": "f32"} for entry in types],
    )(pack(scaled(chunked)))  # fmt: skip
    adapter.op(
        f"{name}_prefill", features=["packed.cu", "empty_segments", *SLOTS, *rules], dtypes=pools, limits=EXACT_ROOTS
    )(prefill(by_row(scaled(chunked))))
    adapter.op(
        f"{name}_update", features=["tokens.many", "carry.f32", *SLOTS, *rules], dtypes=pools, limits=EXACT_ROOTS
    )(update(scaled(recurrent)))


# ---------------------------------------------------------------------------------------------------------------------
# Mamba2
# ---------------------------------------------------------------------------------------------------------------------

SSD = ["groups", "D.head", "decay.zero", *PROMISES]


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None, *, dt_softplus: bool = True, dt_limit: Limit = (0.0, float("inf")),
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Batch rows, each one segment; no gate, and one D a head."""
    refuse(**{"packed.seq_idx": seq_idx, "packed.cu": cu_seqlens, "z.inside": z})
    if D is not None and D.dim() == 2:
        raise Unsupported("D.channel")
    found = MAMBA.mamba2_chunk_scan(
        x, dt, A, B, C, CHUNK, D=D, dt_bias=dt_bias, initial_states=initial_state, dt_softplus=dt_softplus,
        dt_limit=tuple(dt_limit), return_final_states=output_final_state,
    )  # fmt: skip
    return found if output_final_state else (found, None)


def ssd_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, cu_seqlens: Tensor, state_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
    snapshot_states: Tensor | None = None, **settings: Any,
) -> Tensor:  # fmt: skip
    """A call a row, its state the entering one."""
    refuse(**{"snapshots.any": snapshot_positions, "z.inside": z})
    refuse_rows(cu_seqlens, x.shape[1])
    write = read_slots if write_slots is None else write_slots
    states, y = entering(state_pool, read_slots), x.new_zeros(x.shape, dtype=dt.dtype)
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        tokens = [part[:, start:end] for part in (x, dt, B, C)]
        y[:, start:end], states[n, None] = ssd(
            tokens[0], tokens[1], A, tokens[2], tokens[3], D, None, dt_bias, None, None, states[n, None],
            output_final_state=True, **settings,
        )  # fmt: skip
    store(state_pool, write, states)
    return silence(y, cu_seqlens, padding(read_slots, write))


def ssd_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, state_pool: Tensor, read_slots: Tensor, write_slots: Tensor | None = None,
    intermediate_states: Tensor | None = None, num_accepted: Tensor | None = None, num_tokens: Tensor | None = None,
    *, dt_softplus: bool = True, dt_limit: Limit = (0.0, float("inf")),
) -> Tensor:  # fmt: skip
    """One token a row; what is one number a head is spread over its channels, as the layer does."""
    refuse(intermediates=intermediate_states, num_accepted=num_accepted, num_tokens=num_tokens)
    if x.shape[1] > 1 or tuple(dt_limit) != (0.0, float("inf")):
        raise Unsupported("tokens.many" if x.shape[1] > 1 else "dt.limit")
    write, states = read_slots if write_slots is None else write_slots, entering(state_pool, read_slots)
    heads, channels, columns = states.shape[1:]
    skip, bias = (part[:, None].expand(heads, channels) if part is not None and part.dim() == 1 else part
                  for part in (D, dt_bias))  # fmt: skip
    y = MAMBA.mamba2_selective_state_update(
        states, x[:, 0], dt[:, 0, :, None].expand(-1, -1, channels), A[:, None, None].expand(-1, channels, columns),
        B[:, 0], C[:, 0], skip, z=None if z is None else z[:, 0], dt_bias=bias, dt_softplus=dt_softplus,
    )[:, None]  # fmt: skip
    store(state_pool, write, states)
    y[padding(read_slots, write)] = 0
    return y


def _claim_mamba() -> None:
    fixed = {"dt": "f32", "A": "f32", "D": "f32", "dt_bias": "f32"}
    scans = [{"x": kind, "out": "f32", **fixed} for kind in KINDS]  # computed, and returned, in float32
    adapter.op(
        "ssd", features=["batch", "state.in", "state.out", "dt.limit", "grad", *SSD],
        dtypes=[{**entry, "initial_state": "f32", "final_state": "f32"} for entry in scans],
    )(ssd)  # fmt: skip
    adapter.op(
        "ssd_prefill", features=["packed.cu", "empty_segments", "dt.limit", *SLOTS, *SSD],
        dtypes=[{**entry, "state_pool": "f32"} for entry in scans],
    )(ssd_prefill)  # fmt: skip
    for kind in KINDS:  # the state is read in the type of C
        adapter.op(
            "ssd_update", operand=kind, features=["z.inside", "D.channel", *SLOTS, *SSD],
            dtypes=[{"x": kind, "out": kind, "state_pool": "f32", **fixed}],
        )(ssd_update)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Gates and norms
# ---------------------------------------------------------------------------------------------------------------------


def kda_gate(
    f: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *, lower_bound: float | None = None
) -> Tensor:
    """The forget gate of a layer, its two projections left out; its rate and bias are parameters that are there."""
    import torch

    heads, keys = f.shape[-2:]
    rate = f.new_zeros(heads) if A_log is None else A_log
    layer = GLM.Glm5NextTextForgetGate(
        SimpleNamespace(linear_head_dim=keys, linear_num_heads=heads, hidden_size=1, linear_lower_bound=lower_bound)
    )
    layer.f_a_proj = layer.f_b_proj = torch.nn.Identity()
    bias = f.new_zeros(heads * keys) if dt_bias is None else dt_bias.flatten()
    rows = f.reshape(1, -1, heads * keys)
    return torch.func.functional_call(layer, {"A_log": rate, "dt_bias": bias}, (rows,)).view(f.shape)


def l2norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Computed in the type of x."""
    return QWEN.l2norm(x, dim=-1, eps=eps)


def rmsnorm_gated(
    x: Tensor, z: Tensor | None, weight: Tensor, *, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, gate_activation: str = "silu",
) -> Tensor:  # fmt: skip
    """The layer of the model that norms and gates in this order, by this activation, in these groups."""
    import torch

    channels = x.shape[-1]
    size = channels if group_size is None else group_size
    if z is None or (not norm_before_gate and gate_activation == "silu"):
        layer = MAMBA.MambaRMSNormGated(channels, size, eps)
    elif gate_activation == "silu" and size == channels:
        layer = QWEN.Qwen3NextRMSNormGated(channels, eps)
    elif gate_activation == "silu":
        layer = FALCON.FalconH1RMSNormGated(channels, eps, channels // size, norm_before_gate=True)
    elif norm_before_gate and size == channels:
        layer = KIMI.KimiLinearRMSNormGated(channels, eps)
    else:
        raise Unsupported(f"gate_activation={gate_activation}")
    weights = {"weight": weight.repeat(channels // weight.shape[0])}
    rows = [part if part is None else part.reshape(-1, channels) for part in (x, z)]
    return torch.func.functional_call(layer, weights, tuple(rows)).view(x.shape)


def _claim_gates() -> None:
    adapter.op("kda_gate", features=["decay.floor", "grad", *PROMISES],
               dtypes=[{"f": kind, "out": "f32"} for kind in KINDS])(kda_gate)  # fmt: skip
    # PyTorch sums in another order where channels lie apart. Two of the layers round to the type of x before weights.
    for kind in KINDS:
        adapter.op("l2norm", operand=kind, features=["grad", "repeatable"], dtypes=[{"x": kind, "out": kind}])(l2norm)
        adapter.op("rmsnorm_gated", operand=kind, features=["gate.sigmoid", "grad", "repeatable"],
                   dtypes=[{"x": kind, "weight": kind, "out": kind}])(rmsnorm_gated)  # fmt: skip


_claim_convolution()
if not MISSING:
    _claim_delta("gated_delta_rule", QWEN.torch_chunk_gated_delta_rule, QWEN.torch_recurrent_gated_delta_rule,
                 ["heads.gva"])  # fmt: skip
    _claim_delta("kimi_delta_attention", KIMI.chunk_kimi_delta_attention, KIMI.recurrent_kimi_delta_attention, [])
_claim_mamba()
_claim_gates()
