"""fla-core's naive references in PyTorch: the recurrences as loops over tokens, the gates and the gated norm.

The delta rule and its product want as many query heads as value heads, and none normalises q and k. Only the product
takes offsets: elsewhere a row of a pack is a call of its own. All compute in float32.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from statescan.conformance.adapter import Adapter, Unsupported
from statescan.conformance.adapters import interpreter
from statescan.conformance.adapters.delta import Function, by_row, pack, prefill, update
from statescan.conformance.adapters.fla_kernels import MISSING, SOURCE, function
from statescan.conformance.adapters.slots import Tensor

MODULES = ("ops.gated_delta_rule.naive", "ops.kda.naive", "ops.gated_delta_product.naive", "ops.gated_delta_rule.gate",
           "ops.kda.gate", "modules.norm.layernorm_gated")  # fmt: skip
if not MISSING:
    interpreter.show_unwritten_memory()
    for module in MODULES:
        import_module(f"fla.{module}")

adapter = Adapter(
    "fla_naive", "" if MISSING else metadata.version("fla-core"), arrays="torch", missing=MISSING,
    source=SOURCE,
    info={"functions": "naive_recurrent_gated_delta_rule, naive_recurrent_kda, naive_recurrent_gated_delta_product, "
                       "naive_gdn_gate, naive_kda_gate, naive_kda_lowerbound_gate, rms_norm_ref"},
)  # fmt: skip

naive_rule = function("ops.gated_delta_rule.naive", "naive_recurrent_gated_delta_rule")
naive_kda = function("ops.kda.naive", "naive_recurrent_kda")
naive_product = function("ops.gated_delta_product.naive", "naive_recurrent_gated_delta_product")
naive_rule_gate = function("ops.gated_delta_rule.gate", "naive_gdn_gate")
naive_kda_gate = function("ops.kda.gate", "naive_kda_gate")
naive_bounded_gate = function("ops.kda.gate", "naive_kda_lowerbound_gate")
norm_reference = function("modules.norm.layernorm_gated", "rms_norm_ref")

# Functions of their arguments alone, made of PyTorch's operations, which take any strides.
PROMISES = ["repeatable", "strided"]
RULES = ["beta.double", "decay.zero"]
SLOTS = ["slot.pool", "slot.negative", "slot.split"]
KINDS = ("f32", "bf16", "f16")


def without_norm(kernel: Function, *, packs: bool = False) -> Function:
    """A naive function under the names of the packed ones; `packs` says that it takes offsets."""

    def call(*, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **given: Any) -> Any:
        if use_qk_l2norm_in_kernel:
            raise Unsupported("l2norm.inside")
        if cu_seqlens is not None and not packs:
            raise Unsupported("packed.cu")
        return kernel(**given, **({"cu_seqlens": cu_seqlens} if packs else {}))

    return call


def product(*, scale: float | None = None, num_householder: int = 1, output_final_state: bool = False,
            **given: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The product, which has no default scale and returns a final state always."""
    scale = given["q"].shape[-1] ** -0.5 if scale is None else scale
    o, final = naive_product(scale=scale, num_householder=num_householder, output_final_state=True, **given)
    return o, final if output_final_state else None


def _claim(name: str, kernel: Function, out: str, rules: list[str], packs: bool) -> None:
    """The three forms of a recurrence; `out` is the type of its output, that of v where empty."""
    offsets = ["packed.cu", "empty_segments"] if packs else []
    types = [{"q": kind, "g": "f32", "beta": "f32", "out": out or kind} for kind in KINDS]
    rows = kernel if packs else by_row(kernel)
    adapter.op(
        name, features=[*offsets, "batch", "state.in", "state.out", "grad", *rules, *PROMISES],
        dtypes=[{**entry, "initial_state": "f32", "final_state": "f32"} for entry in types],
    )(pack(kernel))  # fmt: skip
    pools = [{**entry, "state_pool": "f32"} for entry in types]
    features = [*SLOTS, *rules, *PROMISES]
    adapter.op(f"{name}_prefill", features=["packed.cu", "empty_segments", *features], dtypes=pools)(prefill(rows))
    adapter.op(f"{name}_update", features=["tokens.many", "carry.f32", *features], dtypes=pools)(update(kernel))


_claim("gated_delta_rule", without_norm(naive_rule), "f32", RULES, packs=False)
_claim("kimi_delta_attention", without_norm(naive_kda), "", ["heads.gva", *RULES], packs=False)
_claim("gated_delta_product", without_norm(product, packs=True), "",
       [*RULES, "householder:2", "householder:3", "householder:4"], packs=True)  # fmt: skip


@adapter.op("softplus_gate", dtypes=[{"a": a, "out": "f32"} for a in KINDS], features=["grad", *PROMISES])
def softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """The gate of a value head."""
    return naive_rule_gate(a, A_log, dt_bias)


@adapter.op("kda_gate", dtypes=[{"f": f, "out": "f32"} for f in KINDS], features=["decay.floor", "grad", *PROMISES])
def kda_gate(
    f: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *, lower_bound: float | None = None
) -> Tensor:
    """The gate of a channel, by one function without and one with a bound, of which only this may go without A_log."""
    bias = None if dt_bias is None else dt_bias.flatten()  # one vector there
    if lower_bound is not None:
        return naive_bounded_gate(f, A_log, bias, lower_bound=lower_bound)
    return naive_kda_gate(f, f.new_zeros(f.shape[-2]) if A_log is None else A_log, bias)


@adapter.op("rmsnorm_gated", dtypes=[{"x": x, "out": x} for x in KINDS], features=["grad", "repeatable"])
def rmsnorm_gated(
    x: Tensor, z: Tensor | None, weight: Tensor, *, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False, gate_activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Gated by silu alone; weights are one a channel."""
    if gate_activation != "silu" and z is not None:
        raise Unsupported(f"gate_activation={gate_activation}")
    weights = weight.repeat(x.shape[-1] // weight.shape[0])
    return norm_reference(x, weights, None, z=z, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)
