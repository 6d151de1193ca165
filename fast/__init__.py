"""The production path: the operations of the contract on CUDA tensors, in Triton, under the reference's names.

    from statescan.fast import causal_conv1d_update

Serving is in modules of its own: `mixers` (Mamba2, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention), `inference`
(the mixin for mixers of one's own), `metadata` (the arrays of a step, at places that a CUDA graph can keep).

CPU tensors run only with TRITON_INTERPRET=1 set before triton is imported, for tests. An operation's module is
imported when its name is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from statescan.spec.contract import OPERATIONS

MODULES: dict[str, str] = {
    "packed": "packed", "versions": "packed", "conv": "conv", "gates": "gates", "norms": "norms", "delta": "delta",
    "ssd": "ssd",
}  # fmt: skip
"""The module of each family of the operation table."""


def __getattr__(name: str) -> Any:
    operation = OPERATIONS.get(name)
    if operation is None or operation.family not in MODULES:
        raise AttributeError(f"statescan.fast has no {name!r}")
    return getattr(import_module(f"statescan.fast.{MODULES[operation.family]}"), name)


def __dir__() -> list[str]:
    return [name for name, operation in OPERATIONS.items() if operation.family in MODULES]
