"""The fast path under the suite: every operation and mixer it has, on a GPU where there is one, else interpreted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from statescan import __version__
from statescan.conformance.adapter import ALL_FEATURES, Adapter
from statescan.conformance.adapters import interpreter
from statescan.conformance.hooks import HOOKS, MIXIN
from statescan.spec.contract import OPERATIONS, Operation

MISSING = next((f"{name} is not installed" for name in ("torch", "triton") if find_spec(name) is None), "")


def _device() -> str:
    """Where the kernels run. Triton looks at the switch when it is imported, so this comes before the fast path."""
    import torch

    interpreter.show_unwritten_memory()
    if torch.cuda.is_available():
        return "cuda"
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.look_once()
    return "cpu"


adapter = Adapter(
    "fast", __version__, arrays="torch", device="cpu" if MISSING else _device(), missing=MISSING,
    source="statescan.fast",
)  # fmt: skip

FEATURES = [word for word in ALL_FEATURES if word not in ("window.W-1", "bare")]
# Everything is computed in float32 from whatever is given, so any type may stand beside any other.
FLOATS = ("f32", "bf16", "f16")
POOLS = ("conv_pool", "state_pool")
LAYOUTS = ("KV", "VK")
OPERANDS = {"f32": "f32", "bf16": "bf16", "f16": "tf32"}
"""Operands of prefill's matrix products by the type of the tokens."""
CHUNK = 32
"""Rows of a chunk of prefill: its edges are where stories are stretched to."""


def types(op: Operation) -> list[dict[str, str]]:
    """The combinations of element types to claim: inputs of one type, parameters and pools of their own."""
    groups = list(dict.fromkeys(a.group for a in op.tensors if a.kind == "float"))
    if not groups:
        return []
    first = groups[0]
    pools = [group for group in groups if group in POOLS]
    rest = [group for group in groups if group not in (*pools, first)]
    claimed = []
    for x in FLOATS:
        for parameter in dict.fromkeys(("f32", x)):
            for pool in FLOATS if pools else ("",):
                entry = {first: x, **dict.fromkeys(rest, parameter), **dict.fromkeys(pools, pool)}
                claimed.append(entry)
    return claimed


def in_chunks(op: Operation) -> bool:
    """Whether the operation goes over a row in chunks, by matrix products."""
    return op.name.endswith("_prefill") and op.family != "conv"


def by_operand(op: Operation) -> list[tuple[str, list[dict[str, str]]]]:
    """The claims by precision of matrix operands: prefill multiplies in the type of its tokens (float16
    in TF32, which has its bits and more range), all else in float32."""
    claimed = types(op)
    if not in_chunks(op):
        return [("f32", claimed)]
    first = next(iter(claimed[0]))
    return [(OPERANDS[x], [entry for entry in claimed if entry[first] == x]) for x in FLOATS]


def _register() -> None:
    for op in OPERATIONS.values():
        function = _found(op)
        if function is not None:
            # on a GPU the rules of values are checked only where that is asked for
            called = partial(function, check=True) if adapter.device == "cuda" else function
            # interpreted, the stretched stories take longer than a peer's minute: tests/test_fast_vectors.py has some
            limits = {"chunk": CHUNK} if in_chunks(op) and adapter.device == "cuda" else {}
            for operand, dtypes in by_operand(op):
                adapter.op(op.name, features=FEATURES, dtypes=dtypes, operand=operand, limits=limits,
                           state_layout=LAYOUTS)(called)  # fmt: skip
    for x, operand in OPERANDS.items():
        dtypes = [{"zxBCdt": x, "conv_state": pool, "ssm_state": pool} for pool in FLOATS]
        adapter.mixer(offers=(*HOOKS, MIXIN), features=[*FEATURES, "bare"], dtypes=dtypes, operand=operand)(_mixer)


def _mixer(described: Mapping[str, Any]) -> Any:
    return import_module("statescan.fast.mixers").build_mixer(described).to(adapter.device)


def _found(op: Operation) -> Any:
    """The fast path's function for an operation, None where it has none yet."""
    fast = import_module("statescan.fast")
    module = fast.MODULES.get(op.family, "")
    if not module or find_spec(f"statescan.fast.{module}") is None:
        return None
    return getattr(import_module(f"statescan.fast.{module}"), op.name, None)


if not MISSING:
    _register()
