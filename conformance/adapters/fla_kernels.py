"""What the adapters of fla-core's recurrences share: its functions and what they claim.

Packed calls and prefill go to the chunked kernels, updates to the recurrent ones. There are no pools: states are
gathered and scattered around the call. Rows past the last offset go in as they are, and what a kernel leaves unwritten
there stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any

from statescan.conformance.adapter import Adapter
from statescan.conformance.adapters import interpreter
from statescan.conformance.adapters.delta import Function, pack, prefill, update

MISSING = interpreter.missing("fla-core", "fla", "torch", "triton")
SOURCE = "https://github.com/fla-org/flash-linear-attention"

# Functions of their arguments alone, without atomics; every argument is made contiguous first.
PROMISES = ["repeatable", "strided"]
# One program a row and head, which forms no matrix product and is not tuned: rows and calls may be cut anywhere.
STEPPED = [*PROMISES, "batch.invariant", "causal.bitwise", "carry.f32"]
PACKED = ["packed.cu", "padded_rows", "empty_segments"]
SLOTS = ["slot.pool", "slot.negative", "slot.split"]
# Matrix products are formed in the type of q, k and v; a GPU forms those of float32 from tf32 unless told otherwise.
OPERANDS = {"f32": "tf32", "bf16": "bf16", "f16": "f16"}
KEYS = {"K": {"min": 1, "max": 256}}
BOTH_LAYOUTS = ("KV", "VK")


def function(module: str, name: str) -> Function:
    """A function of the package, looked up at each call: where the package is missing there is nothing to look up."""

    def call(*given: Any, **named: Any) -> Any:
        return getattr(import_module(f"fla.{module}"), name)(*given, **named)

    return call


def interpreted(name: str, modules: Sequence[str], functions: str) -> Adapter:
    """An adapter of the package in a process made ready for it, its modules imported.

    They are imported now because a worker's greeting may take longer than a call.
    """
    device = "cpu" if MISSING else interpreter.prepare()
    if not MISSING:
        for module in modules:
            import_module(f"fla.{module}")
    return Adapter(
        name, "" if MISSING else metadata.version("fla-core"), arrays="torch", device=device, missing=MISSING,
        source=SOURCE, info={"functions": functions},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Claims
# ---------------------------------------------------------------------------------------------------------------------


def claim_chunked(
    adapter: Adapter, name: str, kernel: Function, kind: str, rules: list[str], *, layouts: Sequence[str] = ("KV",),
    limits: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """The packed operation and its prefill, for q, k and v of one `kind`."""
    sizes = {**KEYS, **(limits or {})}
    adapter.op(
        name, operand=OPERANDS[kind], dtypes=[types(kind, initial_state="f32", final_state="f32")], limits=sizes,
        features=[*PACKED, "batch", "state.in", "state.out", "grad", *rules, *PROMISES],
    )(pack(kernel))  # fmt: skip
    adapter.op(
        f"{name}_prefill", operand=OPERANDS[kind], dtypes=[types(kind, state_pool="f32")], limits=sizes,
        state_layout=layouts, features=[*PACKED, *SLOTS, *rules, *PROMISES],
    )(prefill(kernel))  # fmt: skip


def claim_stepped(adapter: Adapter, name: str, kernel: Function, rules: list[str]) -> None:
    """The update, by a kernel that goes token by token."""
    adapter.op(
        f"{name}_update", dtypes=[types(kind, state_pool="f32") for kind in OPERANDS], state_layout=BOTH_LAYOUTS,
        features=[*SLOTS, "tokens.many", *rules, *STEPPED],
    )(update(kernel))  # fmt: skip


def types(kind: str, **states: str) -> dict[str, str]:
    """States are float32, as every function returns them, so that no rounding of ours comes in between."""
    return {"q": kind, "g": "f32", "beta": "f32", "out": kind, **states}
