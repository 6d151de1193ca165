"""The recurrences of fla-core for its adapter: delta rules, gates and norms in Triton, interpreted on a CPU.

Packed calls and prefill go to the chunked kernels, updates to the recurrent ones; the delta product has no recurrent
one, so its updates are chunked too. There are no pools: states are gathered and scattered around the call. Rows past
the last offset go in as they are, and what a kernel leaves unwritten there stays so.
"""

from __future__ import annotations

import sys
from builtins import range as count
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

from statescan.conformance.adapter import Adapter, Unsupported
from statescan.conformance.adapters.slots import Tensor, entering, padding, silence, store

Function = Callable[..., Any]


def function(module: str, name: str) -> Function:
    """A function of the package, looked up at each call: where the package is missing there is nothing to look up."""

    def call(*given: Any, **named: Any) -> Any:
        return getattr(import_module(f"fla.{module}"), name)(*given, **named)

    return call


MODULES = (
    "ops.gated_delta_rule", "ops.kda", "ops.gated_delta_product", "ops.gated_delta_rule.gate", "ops.kda.gate",
    "ops.common.gate", "modules.norm.l2norm", "modules.norm.fused_norm_gate", "modules.norm.layernorm_gated",
)  # fmt: skip
FUNCTIONS = (
    "chunk_gated_delta_rule, chunk_kda, chunk_gated_delta_product, fused_recurrent_gated_delta_rule, "
    "fused_recurrent_kda, fused_gdn_gate, fused_kda_gate, fused_beta_sigmoid, l2norm, rms_norm_gated, rmsnorm_fn"
)
"""What the adapter calls, for its `info`."""

chunk_rule = function("ops.gated_delta_rule", "chunk_gated_delta_rule")
recurrent_rule = function("ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
chunk_kda = function("ops.kda", "chunk_kda")
recurrent_kda = function("ops.kda", "fused_recurrent_kda")
chunk_product = partial(function("ops.gated_delta_product", "chunk_gated_delta_product"), num_householder=1)
fused_rule_gate = function("ops.gated_delta_rule.gate", "fused_gdn_gate")
fused_kda_gate = function("ops.kda.gate", "fused_kda_gate")
fused_sigmoid = function("ops.common.gate", "fused_beta_sigmoid")
l2norm = function("modules.norm.l2norm", "l2norm")
norm_then_gate = function("modules.norm.fused_norm_gate", "rms_norm_gated")
norm_of_groups = function("modules.norm.layernorm_gated", "rmsnorm_fn")

# Functions of their arguments alone, without atomics; every argument is made contiguous first.
PROMISES = ["repeatable", "strided"]
# One program a row and head, which forms no matrix product and is not tuned: rows and calls may be cut anywhere.
STEPPED = [*PROMISES, "batch.invariant", "causal.bitwise", "carry.f32"]
RULES = ["heads.gva", "beta.double", "decay.zero", "l2norm.inside"]
# The product has as many value heads as others.
PRODUCT = ["beta.double", "decay.zero", "l2norm.inside", "householder:2", "householder:3", "householder:4"]
PACKED = ["packed.cu", "padded_rows", "empty_segments"]
SLOTS = ["slot.pool", "slot.negative", "slot.split"]
# Matrix products are formed in the type of q, k and v; a GPU forms those of float32 from tf32 unless told otherwise.
OPERANDS = {"f32": "tf32", "bf16": "bf16", "f16": "f16"}
SIXTEEN_BITS = ("bf16", "f16")
WIDTH = {"K": {"min": 1, "max": 256}}
# The chunked Kimi delta attention runs a program a token and head, which takes an interpreter some 50 ms.
INTERPRETED = {"T": {"max": 96}}
BOTH_LAYOUTS = ("KV", "VK")


def register(adapter: Adapter) -> None:
    """Add every recurrence, gate and norm of the package to its adapter, which has prepared this process."""
    if not adapter.missing:
        _load(adapter.device)
    for name, chunked, stepped in (
        ("gated_delta_rule", chunk_rule, recurrent_rule), ("kimi_delta_attention", chunk_kda, recurrent_kda),
    ):  # fmt: skip
        slow = adapter.device == "cpu" and chunked is chunk_kda
        for kind, operand in OPERANDS.items():
            _claim_chunked(adapter, name, chunked, kind, operand, RULES, BOTH_LAYOUTS, INTERPRETED if slow else {})
        adapter.op(
            f"{name}_update", dtypes=[_types(kind, state_pool="f32") for kind in OPERANDS], state_layout=BOTH_LAYOUTS,
            features=[*SLOTS, "tokens.many", *RULES, *STEPPED],
        )(update(stepped))  # fmt: skip
    for kind in SIXTEEN_BITS:
        _claim_chunked(adapter, "gated_delta_product", chunk_product, kind, OPERANDS[kind], PRODUCT)
        adapter.op(
            "gated_delta_product_update", operand=OPERANDS[kind], dtypes=[_types(kind, state_pool="f32")],
            features=[*SLOTS, "tokens.many", *PRODUCT, *PROMISES], limits=WIDTH,
        )(update(chunk_product))  # fmt: skip
    _claim_gates(adapter)
    _claim_norms(adapter)


def _claim_chunked(
    adapter: Adapter, name: str, kernel: Function, kind: str, operand: str, rules: list[str],
    layouts: tuple[str, ...] = ("KV",), limits: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    packed = _types(kind, initial_state="f32", final_state="f32")
    adapter.op(
        name, operand=operand, dtypes=[packed], limits={**WIDTH, **(limits or {})},
        features=[*PACKED, "batch", "state.in", "state.out", "grad", *rules, *PROMISES],
    )(pack(kernel))  # fmt: skip
    adapter.op(
        f"{name}_prefill", operand=operand, dtypes=[_types(kind, state_pool="f32")], state_layout=layouts,
        features=[*PACKED, *SLOTS, *rules, *PROMISES], limits={**WIDTH, **(limits or {})},
    )(prefill(kernel))  # fmt: skip


def _types(kind: str, **states: str) -> dict[str, str]:
    """States are float32, as every function returns them, so that no rounding of ours comes in between."""
    return {"q": kind, "g": "f32", "beta": "f32", "out": kind, **states}


# ---------------------------------------------------------------------------------------------------------------------
# The package
# ---------------------------------------------------------------------------------------------------------------------


def _load(device: str) -> None:
    """Import now: a worker's greeting may take longer than a call."""
    for module in MODULES:
        import_module(f"fla.{module}")
    if device == "cpu":
        _count_as_triton()


class Counter(int):
    """A loop's counter as a compiled kernel sees it: a number that can be asked for another integer type."""

    def to(self, *_: Any, **__: Any) -> Counter:
        """Itself: Python's integers have no width."""
        return self


def _count_as_triton() -> None:
    """Let loops of kernels count in `Counter`s: under the interpreter they count in bare integers without `to`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            module.__dict__.setdefault("range", _counters)


def _counters(*bounds: Any) -> list[Counter]:
    return [Counter(i) for i in count(*(bound.__index__() for bound in bounds))]


# ---------------------------------------------------------------------------------------------------------------------
# The three ways to call a recurrence
# ---------------------------------------------------------------------------------------------------------------------


def pack(kernel: Function) -> Function:
    """The packed operation: one call, with the package's names for the arguments."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None,
        initial_state: Tensor | None = None, *, use_qk_l2norm: bool = False, **settings: Any,
    ) -> Any:  # fmt: skip
        return kernel(
            q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, initial_state=initial_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm, **settings,
        )  # fmt: skip

    return call


def prefill(kernel: Function) -> Function:
    """All rows in one packed call, the gathered states as its entering ones."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, state_pool: Tensor,
        read_slots: Tensor, write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
        snapshot_states: Tensor | None = None, *, use_qk_l2norm: bool = False, state_layout: str = "KV",
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        if snapshot_positions is not None or snapshot_states is not None:
            raise Unsupported("snapshots.any")
        write = read_slots if write_slots is None else write_slots
        o, states = kernel(
            q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, initial_state=entering(state_pool, read_slots),
            output_final_state=True, use_qk_l2norm_in_kernel=use_qk_l2norm, **layout(state_layout), **settings,
        )  # fmt: skip
        store(state_pool, write, states)
        return silence(o, cu_seqlens, padding(read_slots, write))

    return call


def by_row(kernel: Function) -> Function:
    """A function that takes no offsets, called for each row of a pack; rows past the last offset are no row's."""

    def call(*, cu_seqlens: Tensor, initial_state: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        import torch

        if int(cu_seqlens[-1]) < given["q"].shape[1]:
            raise Unsupported("padded_rows")
        tokens = {name: value for name, value in given.items() if name in ("q", "k", "v", "g", "beta")}
        settings = {name: value for name, value in given.items() if name not in tokens}
        done = [
            kernel(**{name: value[:, start:end] for name, value in tokens.items()}, **settings,
                   initial_state=initial_state[n : n + 1])
            for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist()))
        ]  # fmt: skip
        return torch.cat([o for o, _ in done], dim=1), torch.cat([state for _, state in done])

    return call


def update(kernel: Function) -> Function:
    """The rows of a decode call are the batch of one call without offsets."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state_pool: Tensor, read_slots: Tensor,
        write_slots: Tensor | None = None, intermediate_states: Tensor | None = None,
        num_accepted: Tensor | None = None, num_tokens: Tensor | None = None, *, use_qk_l2norm: bool = False,
        state_layout: str = "KV", **settings: Any,
    ) -> Tensor:  # fmt: skip
        for need, given in (("intermediates", intermediate_states), ("num_accepted", num_accepted),
                            ("num_tokens", num_tokens)):  # fmt: skip
            if given is not None:
                raise Unsupported(need)
        write = read_slots if write_slots is None else write_slots
        o, states = kernel(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=entering(state_pool, read_slots), output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm, **layout(state_layout), **settings,
        )  # fmt: skip
        store(state_pool, write, states)
        o[padding(read_slots, write)] = 0
        return o

    return call


def layout(state_layout: str) -> dict[str, bool]:
    """The package's word for values first; the product does not know it, and is not asked."""
    return {"state_v_first": True} if state_layout == "VK" else {}


# ---------------------------------------------------------------------------------------------------------------------
# Gates and norms
# ---------------------------------------------------------------------------------------------------------------------


def _claim_gates(adapter: Adapter) -> None:
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


def _claim_norms(adapter: Adapter) -> None:
    adapter.op("l2norm", features=["grad", *PROMISES], dtypes=[{"x": x, "out": x} for x in OPERANDS])(l2norm)
    adapter.op(
        "rmsnorm_gated", features=["grad", *PROMISES],
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
        return norm_of_groups(
            x, weights, None, z, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate
        )
    if not norm_before_gate or group_size not in (None, channels):
        raise Unsupported(f"gate_activation={gate_activation}")
    return norm_then_gate(x, z, weights, None, activation=gate_activation, eps=eps)
