"""What an implementation shows the suite: callables in the terms of the operation table, and what it claims.

    from statescan.conformance import Adapter

    adapter = Adapter("mykernels", version="1.4", arrays="torch")

    @adapter.op("causal_conv1d_update", features=["slot.pool", "act.silu", "bias", "width:4", "window.W"])
    def update(x, weight, bias, conv_pool, read_slots, *, activation): ...

Tensors arrive by name in the contract's shapes; pools are changed in place. A mixer for a serving engine is shown by
its two hooks (`Adapter.mixer`). Run it with `statescan run --impl my_module:adapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from statescan.conformance.hooks import HOOKS, KINDS, MIXIN, TOY
from statescan.spec.contract import FEATURES, OPERATIONS

Function = Callable[..., Any]
Capability = dict[str, Any]

ALL_FEATURES: tuple[str, ...] = tuple(word for group in FEATURES.values() for word in group)


class Unsupported(Exception):  # noqa: N818  a statement, not a fault
    """Raised by an adapter for a call its implementation does not offer; `need` is the missing word."""

    def __init__(self, need: str) -> None:
        super().__init__(need)
        self.need = need


class Adapter:
    """Operations by name, gradients by name, and the capabilities that go with them.

    `arrays` is "numpy" (bfloat16 through ml_dtypes) or "torch". `missing` says why the implementation cannot run here.
    """

    def __init__(
        self, name: str, version: str = "", *, arrays: str = "numpy", device: str = "cpu", source: str = "",
        info: Mapping[str, Any] | None = None, missing: str = "",
    ) -> None:  # fmt: skip
        if arrays not in ("numpy", "torch"):
            raise ValueError(f"arrays={arrays!r}: numpy or torch")
        self.name, self.version, self.arrays, self.device, self.source = name, version, arrays, device, source
        self.info, self.missing = dict(info or {}), missing
        self.operations: dict[str, Function] = {}
        self.gradients: dict[str, Function] = {}
        self.capabilities: list[Capability] = []
        self.makers: dict[str, Function] = {}
        self.built: Any = None
        self.hook_arrays = arrays

    def op(
        self, name: str, *, features: Sequence[str] = ALL_FEATURES, dtypes: Sequence[Mapping[str, str]] = (),
        operand: str = "f32", limits: Mapping[str, Any] | None = None, state_layout: Sequence[str] = ("KV",),
    ) -> Callable[[Function], Function]:  # fmt: skip
        """Register a callable for operation `name` with what it claims.

        `dtypes` are the combinations of element types it takes and returns (argument name -> type; `out` is the first
        result; a name left out follows its group's first tensor, or may be anything); none: any type.
        """
        if name not in OPERATIONS:
            raise ValueError(f"{name!r} is no operation: {', '.join(OPERATIONS)}")
        self.capabilities.append({
            "op": name, "features": list(features), "dtypes": [dict(d) for d in dtypes], "operand": operand,
            "state_layout": list(state_layout), "limits": dict(limits or {}),
        })  # fmt: skip

        def register(function: Function) -> Function:
            self.operations[name] = function
            return function

        return register

    def mixer(
        self, *, kinds: Sequence[str] = KINDS, offers: Sequence[str] = HOOKS, features: Sequence[str] = ALL_FEATURES,
        lacks: Sequence[str] = (), dtypes: Sequence[Mapping[str, str]] = (), operand: str = "f32",
        limits: Mapping[str, Any] | None = None, arrays: str = "",
    ) -> Callable[[Function], Function]:  # fmt: skip
        """Register a class or function that makes a mixer of one of `kinds` from its description.

        The object has the hooks that it `offers`, with the arguments of the operation table by place; with
        `ssm_dynamic_inference` among them it is a whole mixer, and where a description gives no projection its rows
        come in projected and leave as they are. `lacks` are features that it does not claim; `limits` bound numbers of
        the description ({"heads": [1]}, {"key_dim": {"max": 128}}); `dtypes` name `zxBCdt`, `conv_state`, `ssm_state`;
        `arrays` are those of the hooks, where they are not those of the operations.
        """
        unknown = [name for name in (*kinds, *offers, *lacks) if name not in (*KINDS, *HOOKS, MIXIN, *ALL_FEATURES)]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no kind of mixer ({', '.join(KINDS)}), no hook and no feature")
        for name in offers:
            served = [*kinds, TOY] if name == MIXIN else list(kinds)
            self.capabilities.append({
                "op": name, "features": [word for word in features if word not in lacks],
                "dtypes": [dict(d) for d in dtypes], "operand": operand, "state_layout": ["KV"],
                "limits": {"kind": served, **(limits or {})},
            })  # fmt: skip

        self.hook_arrays = arrays or self.arrays

        def register(make: Function) -> Function:
            self.makers.update(dict.fromkeys(kinds, make))
            return make

        return register

    def setup(self, described: Mapping[str, Any]) -> None:
        """Make the mixer whose hooks are called from here on."""
        if described["kind"] not in self.makers:
            raise Unsupported(f"kind={described['kind']}")
        self.built = self.makers[described["kind"]](described)

    def grad(self, name: str) -> Callable[[Function], Function]:
        """Register `function(cotangents, **tensors and settings) -> {input: gradient}` for a NumPy implementation."""

        def register(function: Function) -> Function:
            self.gradients[name] = function
            return function

        return register


def as_adapter(thing: Any, name: str) -> Adapter:
    """An Adapter as it is; a plain mapping from operation names to callables with every feature claimed."""
    if isinstance(thing, Adapter):
        return thing
    if not isinstance(thing, Mapping):
        kind = type(thing).__name__
        raise TypeError(f"{name} is a {kind}: an Adapter, or a mapping from operation names to callables")
    adapter = Adapter(name)
    for op, function in thing.items():
        adapter.op(op)(function)
    return adapter
