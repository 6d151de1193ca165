"""The reference under its own suite: every operation and every mixer it has, in every element type."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from statescan import __version__
from statescan.conformance.adapter import Adapter
from statescan.conformance.hooks import HOOKS, MIXIN
from statescan.spec.contract import OPERATIONS

adapter = Adapter("reference", __version__, source="statescan.reference")

_MODULES = {"packed": "packed", "versions": "packed", "conv": "conv", "gates": "gates", "norms": "norms",
            "delta": "delta", "ssd": "ssd"}  # fmt: skip
_HOST = {"ssm_chunking": "stack", "layer_map": "stack", "run_slots": "slots", "prefill_metadata": "metadata",
         "decode_metadata": "metadata", "accept_drafts": "drafts",
         "edit_tables": "tables", "head_shards": "shards", "token_shards": "shards", "hash_blocks": "blocks",
         "plan_skip": "prefix_cache", "plan_snapshots": "prefix_cache", "run_state_cache": "prefix_cache"}  # fmt: skip
_GRADIENTS = {**_MODULES, "delta": "delta_grad", "ssd": "ssd_grad"}


def _register() -> None:
    for op in OPERATIONS.values():
        if op.family in _MODULES:
            adapter.op(op.name, operand="f64", state_layout=("KV", "VK"))(_found(_MODULES[op.family], op.name))
            if op.differentiable:
                adapter.grad(op.name)(_gradient(_found(_GRADIENTS[op.family], f"{op.name}_grad")))
        elif op.name in _HOST:
            adapter.op(op.name, operand="f64")(_found(f"host.{_HOST[op.name]}", op.name))
    adapter.op("engine.run", operand="f64")(_found("host.requests", "run_program"))
    adapter.mixer(offers=(*HOOKS, MIXIN), operand="f64", arrays="torch")(_mixer)


def _mixer(described: Mapping[str, Any]) -> Any:
    return import_module("statescan.reference.mixers").build_mixer(described)  # torch is needed from here on


def _found(module: str, name: str) -> Any:
    return getattr(import_module(f"statescan.reference.{module}"), name)


def _gradient(function: Any) -> Any:
    def gradient(cotangents: Any, **given: Any) -> Any:
        return function(cotangents, **{name: value for name, value in given.items() if name != "check"})

    return gradient


_register()
