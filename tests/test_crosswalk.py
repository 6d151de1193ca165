"""The crosswalk: every converter goes there and back on its pair, and what a package is said to do it does."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import unwrap
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from statescan.reference.conv import causal_conv1d
from statescan.reference.delta import gated_delta_product, gated_delta_rule
from statescan.reference.ssd import ssd
from statescan.spec.crosswalk import (
    CONVERTERS,
    LINES,
    SUBJECTS,
    Converter,
    packages,
    product_as_rule,
    ssd_as_attention,
)

RNG = np.random.default_rng(7)


def arrays(values):
    return {name: np.asarray(value) for name, value in values.items()}


@pytest.mark.parametrize("converter", CONVERTERS.values(), ids=CONVERTERS)
def test_a_converter_goes_there_and_back(converter: Converter) -> None:
    here, there = arrays(converter.example), arrays(converter.converted)
    carried, back = converter.to(here), converter.back(there)
    assert carried.keys() == there.keys()
    assert back.keys() == here.keys()
    for name, wanted in there.items():
        np.testing.assert_array_equal(carried[name], wanted)
    for name, wanted in here.items():
        np.testing.assert_array_equal(back[name], wanted)
    for name, wanted in converter.to(back).items():
        np.testing.assert_array_equal(wanted, there[name])


def test_every_converter_is_used_and_every_line_is_about_a_subject() -> None:
    used = {name for line in LINES if not isinstance(line.how, str) for name in line.how}
    assert used | {"copies as tokens"} == set(CONVERTERS)
    assert {line.subject for line in LINES} == set(SUBJECTS)
    assert len({(line.package, line.subject) for line in LINES}) == len(LINES)
    assert all(line.source.startswith("https://") for line in LINES)
    wanted = ("FLA", "causal-conv1d", "mamba_ssm", "Megatron-Core", "vLLM", "SGLang", "FlashInfer", "transformers",
              "ONNX opset 27")  # fmt: skip
    assert packages() == wanted


def delta_inputs(tokens: int = 6, heads: int = 2, keys: int = 4, values: int = 3) -> dict[str, np.ndarray]:
    shapes = {"q": (heads, keys), "k": (heads, keys), "v": (heads, values)}
    made = {name: RNG.standard_normal((1, tokens, *shape)) / 2 for name, shape in shapes.items()}
    return {**made, "g": -RNG.random((1, tokens, heads)), "beta": RNG.random((1, tokens, heads))}


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_product_is_a_rule_over_its_copies(copies: int) -> None:
    many = delta_inputs(6 * copies)
    inputs = {**many, "q": many["q"][:, :6], "g": many["g"][:, :6]}
    o, state = gated_delta_product(**inputs, num_householder=copies, output_final_state=True)
    wide, wide_state = gated_delta_rule(**product_as_rule(inputs, copies), output_final_state=True)
    np.testing.assert_array_equal(wide[:, copies - 1 :: copies], o)
    np.testing.assert_array_equal(wide_state, state)


def test_mamba2_is_gated_attention_without_a_correction() -> None:
    x, dt, A = RNG.standard_normal((1, 5, 4, 3)), RNG.random((1, 5, 4)), -RNG.random(4)
    B, C = RNG.standard_normal((1, 5, 2, 2)), RNG.standard_normal((1, 5, 2, 2))
    y, state = ssd(x, dt, A, B, C, dt_softplus=False, output_final_state=True)
    one = ssd_as_attention(x, dt, A, B, C)
    S = np.zeros((4, 2, 3))
    for t in range(5):
        S = np.exp(one["g"][0, t])[:, None, None] * S + one["k"][0, t][:, :, None] * one["v"][0, t][:, None, :]
        np.testing.assert_allclose(np.einsum("hr,hrp->hp", one["q"][0, t], S), y[0, t], atol=1e-12)
    np.testing.assert_allclose(CONVERTERS["values before keys"].back({"state": S})["state"], state[0], atol=1e-12)


def test_a_split_slot_cannot_be_said_with_a_flag() -> None:
    with pytest.raises(ValueError, match="SLOT-2"):
        CONVERTERS["fresh by a flag"].to(arrays({"read_slots": [1], "write_slots": [2]}))


# What installed packages do, with the converters of their lines and nothing else.


def module_of_file(package: str, path: str) -> ModuleType:
    """One module of a package by its file: importing all of flash-linear-attention takes longer than its use here."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    spec = spec_from_file_location("one_module", Path(found.submodule_search_locations[0], path))
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fla_takes_a_state_of_keys_by_values_and_a_logarithm() -> None:
    torch = pytest.importorskip("torch")
    naive = module_of_file("fla", "ops/gated_delta_rule/naive.py")
    inputs, entering = delta_inputs(), RNG.standard_normal((1, 2, 4, 3))
    o, state = gated_delta_rule(**inputs, initial_state=entering, output_final_state=True)
    given = {name: torch.tensor(value, dtype=torch.float32) for name, value in inputs.items()}
    theirs, left = naive.naive_recurrent_gated_delta_rule(
        **given, initial_state=torch.tensor(entering, dtype=torch.float32), output_final_state=True)  # fmt: skip
    np.testing.assert_allclose(theirs.numpy(), o, atol=2e-6)
    np.testing.assert_allclose(left.numpy(), state, atol=2e-6)


def test_causal_conv1d_has_channels_first_and_a_window_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "causal_conv1d_cuda", ModuleType("causal_conv1d_cuda"))  # not for the reference
    theirs = pytest.importorskip("causal_conv1d.causal_conv1d_interface")
    x, weight, window = RNG.standard_normal((1, 5, 3)), RNG.standard_normal((3, 4)), RNG.standard_normal((1, 3, 4))
    y, final = causal_conv1d(x, weight, initial_windows=window, activation="silu")
    carried = {
        "x": CONVERTERS["channels first"].to({"x": x})["x"],
        "initial_states": CONVERTERS["window of W-1"].to({"window": window})["window"],
    }
    got, left = theirs.causal_conv1d_ref(
        **{name: torch.tensor(value) for name, value in carried.items()}, weight=torch.tensor(weight),
        return_final_states=True, activation="silu")  # fmt: skip
    np.testing.assert_allclose(CONVERTERS["channels first"].back({"x": got.numpy()})["x"], y, atol=1e-12)
    np.testing.assert_allclose(CONVERTERS["window of W-1"].back({"window": left.numpy()})["window"][..., 1:],
                               final[..., 1:], atol=1e-12)  # fmt: skip


def test_transformers_shares_key_heads_and_needs_names() -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = delta_inputs(heads=2)
    inputs["v"], inputs["g"], inputs["beta"] = (np.repeat(inputs[n], 2, axis=2) for n in ("v", "g", "beta"))
    o, state = gated_delta_rule(**inputs, output_final_state=True)
    q, k, v, g, beta = (torch.tensor(inputs[name], dtype=torch.float32) for name in ("q", "k", "v", "g", "beta"))
    got, left = unwrap(theirs.torch_recurrent_gated_delta_rule)(q, k, v, g=g, beta=beta, output_final_state=True)
    np.testing.assert_allclose(got.numpy(), o, atol=2e-6)
    np.testing.assert_allclose(left.numpy(), state, atol=2e-6)
