"""A wrongly wired adapter is told what is wrong in one sentence, recognised by the values it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import Call
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.smoke import check_wiring
from statescan.reference import delta, ssd
from statescan.spec.contract import OPERATIONS

MIXERS = ("gated_delta_rule", "gated_delta_product", "kimi_delta_attention", "ssd")
Change = Callable[[dict[str, Any]], dict[str, Any]]


class InProcess:
    """What the smoke test needs of a client, without a child process."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.capabilities = adapter, adapter.capabilities

    def run(self, call: Call, *, vector: str, name: str) -> Any:
        return invoke(self.adapter, isolated(call))


def adapter_of(change: Change, only: str = "", **claims: Any) -> InProcess:
    """The reference with its arguments changed before every call of a matrix-state operation."""
    adapter = Adapter("wired")
    for name, op in OPERATIONS.items():
        if op.family in ("delta", "ssd") and name.startswith(MIXERS) and only in name:
            function = getattr(ssd if op.family == "ssd" else delta, name)
            adapter.op(name, operand="f64", **claims)(lambda _f=function, **given: _f(**change(given)))
    return InProcess(adapter)


def turned(given: dict[str, Any]) -> dict[str, Any]:
    """States read with their last two axes changed over."""
    name = "initial_state" if "initial_state" in given else "state_pool"
    return {**given, name: np.swapaxes(given[name], -1, -2)}


def changed(name: str, function: Callable[[Any], Any]) -> Change:
    return lambda given: {**given, name: function(given[name])} if name in given else given


def tiled(few: tuple[str, ...], many: str, axis: int = 2) -> Change:
    """Key heads repeated to the value heads by tiling."""
    def change(given: dict[str, Any]) -> dict[str, Any]:
        times = given[many].shape[axis] // given[few[0]].shape[axis]
        return {**given, **{name: np.concatenate([given[name]] * times, axis=axis) for name in few}}

    return change


def copy_major(given: dict[str, Any]) -> dict[str, Any]:
    """Rows read as if all first copies stood before all second ones."""
    copies = given.get("num_householder", 1)
    def moved(array: Any) -> Any:
        rows = array.reshape(array.shape[0], copies, -1, *array.shape[2:])
        return np.swapaxes(rows, 1, 2).reshape(array.shape)

    return {**given, **{name: moved(given[name]) for name in ("k", "v", "beta")}}


def as_factor(given: dict[str, Any]) -> dict[str, Any]:
    """g taken as the factor itself: its logarithm goes in."""
    with np.errstate(divide="ignore"):
        return {**given, "g": np.maximum(np.log(np.maximum(given["g"], 0)), -1024).astype(given["g"].dtype)}


def batch_rows(given: dict[str, Any]) -> dict[str, Any]:
    if "read_slots" not in given:
        return given
    return {**given, "read_slots": np.arange(len(given["read_slots"]), dtype=np.int32)}


def test_a_right_adapter_is_told_nothing() -> None:
    assert check_wiring(adapter_of(lambda given: given)) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [{"K": [64], "V": [32], "H": {"multiple": 2}, "HV": {"multiple": 8}},
                                    {"R": [16], "P": [64], "H": {"multiple": 8}}])  # fmt: skip
def test_a_right_adapter_with_its_own_sizes_is_told_nothing(limits: dict[str, Any]) -> None:
    assert check_wiring(adapter_of(lambda given: given, limits=limits)) == ""  # type: ignore[arg-type]


def test_an_adapter_of_values_by_keys_is_served() -> None:
    assert check_wiring(adapter_of(lambda given: given, "rule", state_layout=["VK"])) == ""  # type: ignore[arg-type]


DELTA = ("gated_delta_rule", "gated_delta_rule_prefill", "gated_delta_rule_update", "gated_delta_product_update",
         "kimi_delta_attention_prefill")  # fmt: skip
WRONG = [
    *((op, turned, "[V, K]") for op in DELTA), *((op, as_factor, "factor") for op in DELTA),
    *((op, changed("beta", lambda b: 1 / (1 + np.exp(-b))), "sigmoid") for op in DELTA),
    *((op, changed("scale", lambda s: None), "default") for op in DELTA),
    *((op, changed("scale", lambda s: s * s), "twice") for op in DELTA),
    *((op, changed("scale", lambda s: 1), "not applied") for op in DELTA),
    *((op, tiled(("q", "k"), "v"), "tiled") for op in MIXERS[:3]), ("gated_delta_product", copy_major, "copy-major"),
    *((op, batch_rows, "batch rows") for op in ("gated_delta_rule_update", "kimi_delta_attention_prefill",
                                                "ssd_update")),
    *((op, turned, "[R, P]") for op in ("ssd", "ssd_prefill", "ssd_update")),
    *((op, changed("A", lambda a: -np.exp(a)), "logarithm") for op in ("ssd", "ssd_update")),
    *((op, changed("dt_softplus", lambda s: True), "softplus") for op in ("ssd", "ssd_prefill")),
    ("ssd", tiled(("B", "C"), "x"), "tiled"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "word"), WRONG)
def test_a_wrong_answer_is_recognised_by_its_value(op: str, change: Change, word: str) -> None:
    said = check_wiring(adapter_of(change, op))  # type: ignore[arg-type]
    assert word in said, said
    assert said.startswith("your ")


@pytest.mark.parametrize(("op", "change", "word"), [WRONG[0], WRONG[10], WRONG[15], WRONG[35]])
def test_and_at_the_sizes_of_the_adapter(op: str, change: Change, word: str) -> None:
    limits = {"K": [64], "V": [64], "R": [32], "P": [32]}
    adapter = adapter_of(change, op, limits=limits)
    assert word in check_wiring(adapter)  # type: ignore[arg-type]
