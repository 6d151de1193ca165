"""The gates and norms of fla-core for its adapter, in Triton, interpreted on a CPU."""

from __future__ import annotations

from statescan.conformance.adapter import Adapter, Unsupported
from statescan.conformance.adapters.fla_kernels import OPERANDS, PROMISES, function
from statescan.conformance.adapters.slots import Tensor

MODULES = (
    "ops.gated_delta_rule.gate", "ops.kda.gate", "ops.common.gate", "modules.norm.l2norm",
    "modules.norm.fused_norm_gate", "modules.norm.layernorm_gated",
)  # fmt: skip
FUNCTIONS = "fused_gdn_gate, fused_kda_gate, fused_beta_sigmoid, l2norm, rms_norm_gated, rmsnorm_fn"

fused_rule_gate = function("ops.gated_delta_rule.gate", "fused_gdn_gate")
fused_kda_gate = function("ops.kda.gate", "fused_kda_gate")
fused_sigmoid = function("ops.common.gate", "fused_beta_sigmoid")
l2norm = function("modules.norm.l2norm", "l2norm")
norm_then_gate = function("modules.norm.fused_norm_gate", "rms_norm_gated")
norm_of_groups = function("modules.norm.layernorm_gated", "rmsnorm_fn")


def claim_gates(adapter: Adapter) -> None:
    """The three gates, for parameters in float32 or bfloat16."""
    parameters = ("f32", "bf16")
    adapter.op(
        "softplus_gate", features=["grad", *PROMISES],
        dtypes=[{"a": a, "A_log": p, "dt_bias": p, "out": "f32"} for a in OPERANDS for p in parameters],
    )(softplus_gate)  # fmt: skip
    adapter.op(
        "kda_gate", features=["decay.floor", "grad", *PROMISES],
        dtypes=[{"f": f, "A_log": p, "dt_bias": p, "out": "f32"} for f in OPERANDS for p in parameters],
    )(kda_gate)  # fmt: skip
    adapter.op(
        "beta_gate", features=["beta.double", "grad", *PROMISES], dtypes=[{"b": b, "out": "f32"} for b in OPERANDS]
    )(beta_gate)


def softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """The gate of a value head."""
    return fused_rule_gate(a, A_log, dt_bias)


def kda_gate(
    f: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *, lower_bound: float | None = None
) -> Tensor:
    """The gate of a channel; the bias is one vector there, and only a bounded gate may go without A_log."""
    bias = None if dt_bias is None else dt_bias.flatten()
    rate = f.new_zeros(f.shape[-2]) if A_log is None and lower_bound is None else A_log
    return fused_kda_gate(f, rate, bias, lower_bound=lower_bound)


def beta_gate(b: Tensor, *, allow_neg_eigval: bool = False) -> Tensor:
    """A sigmoid and its factor."""
    return fused_sigmoid(b, scale=2.0 if allow_neg_eigval else 1.0)


def claim_norms(adapter: Adapter) -> None:
    """The norm of keys, and the gated norm but for a sigmoid before it."""
    adapter.op("l2norm", features=["grad", *PROMISES], dtypes=[{"x": x, "out": x} for x in OPERANDS])(l2norm)
    adapter.op(
        "rmsnorm_gated", features=["gate.sigmoid", "grad", *PROMISES],
        dtypes=[{"x": x, "weight": weight, "out": x} for x in OPERANDS for weight in dict.fromkeys(("f32", x))],
    )(rmsnorm_gated)  # fmt: skip


def rmsnorm_gated(
    x: Tensor, z: Tensor | None, weight: Tensor, *, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, gate_activation: str = "silu",
) -> Tensor:  # fmt: skip
    """One function has groups and both orders and gates by silu; the other gates a whole norm, by a sigmoid too."""
    channels = x.shape[-1]
    weights = weight.repeat(channels // weight.shape[0])  # one a channel there
    if gate_activation == "silu" or z is None:
        return norm_of_groups(x, weights, None, z, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)
    if not norm_before_gate or group_size not in (None, channels):
        raise Unsupported(f"gate_activation={gate_activation}")
    return norm_then_gate(x, z, weights, None, activation=gate_activation, eps=eps)
