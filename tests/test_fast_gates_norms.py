"""Gates, norms and packing of the fast path against the reference; one signature for both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import statescan.fast
from statescan.conformance.adapters import interpreter
from statescan.fast import gates, launch, norms, packed
from statescan.reference import gates as reference_gates
from statescan.reference import norms as reference_norms
from statescan.reference import packed as reference_packed
from statescan.spec.contract import OPERATIONS, PackedSeqParams, PackingError, ShapeError, UnsupportedError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    interpreter.look_once()
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
UNIT = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
every_type = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)


def wide(t: Any) -> Any:
    return t.detach().double().cpu().numpy() if isinstance(t, Tensor) else t


def near(got: Tensor, want: Any, ulps: float = 8.0) -> None:
    """Within one rounding of the result's type and a few of float32."""
    allowed = (UNIT[got.dtype] + ulps * 2.0**-24) * np.abs(want) + 2.0**-40
    np.testing.assert_array_less(np.abs(wide(got) - want), allowed + 1e-300)


def compare(name: str, tensors: list[Tensor | None], ulps: float = 8.0, **settings: Any) -> None:
    """Values and gradients of an operation against the reference on the same numbers."""
    module = {"gates": reference_gates, "norms": reference_norms}[OPERATIONS[name].family]
    function: Callable[..., Tensor] = getattr(statescan.fast, name)
    arrays = [wide(t) for t in tensors]
    near(function(*tensors, **settings), getattr(module, name)(*arrays, **settings), ulps)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    result = function(*leaves, **settings)
    cotangent = normal(*result.shape, dtype=result.dtype, seed=9)
    given = {a.name: leaf for a, leaf in zip(OPERATIONS[name].tensors, leaves, strict=True) if leaf is not None}
    found = torch.autograd.grad(result, list(given.values()), cotangent)
    want = getattr(module, f"{name}_grad")({OPERATIONS[name].results[0].name: wide(cotangent)}, *arrays, **settings)
    for key, got in zip(given, found, strict=True):
        scale = np.abs(want[key]).max() + 1e-30
        np.testing.assert_array_less(np.abs(wide(got) - want[key]) / scale, 2 * UNIT[got.dtype] + 2.0**-17)


# ---------------------------------------------------------------------------------------------------------------------
# Gates
# ---------------------------------------------------------------------------------------------------------------------


@every_type
def test_softplus_gate(dtype: torch.dtype) -> None:
    a = normal(2, 5, 6, dtype=dtype, scale=8.0)
    compare("softplus_gate", [a, normal(6, seed=1), normal(6, seed=2, dtype=dtype)], 40)
    compare("softplus_gate", [a.mT[..., ::2].mT, normal(6, dtype=F16), None], 40)


def test_softplus_keeps_small_results_and_is_linear_above_20() -> None:
    a = torch.tensor([-90.0, -40.0, -17.0, -1e-3, 0.0, 1e-3, 19.9, 20.0, 20.1, 1e30], device=DEVICE)
    got = gates.softplus_gate(a[:, None], torch.zeros(1, device=DEVICE))
    near(got, reference_gates.softplus_gate(wide(a)[:, None], np.zeros(1)), 200)
    assert got[-1].item() == -torch.tensor(1e30).item()


@every_type
@pytest.mark.parametrize("lower_bound", [None, -5.0, 0.0])
def test_kda_gate(dtype: torch.dtype, lower_bound: float | None) -> None:
    f = normal(3, 2, 7, dtype=dtype)
    compare("kda_gate", [f, normal(2), normal(2, 7, dtype=dtype)], 40, lower_bound=lower_bound)
    compare("kda_gate", [f[..., ::3], None, None], 40, lower_bound=lower_bound)


@every_type
@pytest.mark.parametrize("doubled", [False, True])
def test_beta_gate(dtype: torch.dtype, doubled: bool) -> None:
    compare("beta_gate", [normal(3, 5, dtype=dtype, scale=4.0)], 40, allow_neg_eigval=doubled)


def test_gates_at_the_ends_are_numbers() -> None:
    b = torch.tensor([[-3e38, -200.0, 0.0, 200.0, 3e38]], device=DEVICE)
    assert gates.beta_gate(b, allow_neg_eigval=True).tolist() == [[0.0, 0.0, 1.0, 2.0, 2.0]]
    assert gates.kda_gate(b[..., None], lower_bound=-8.0).ravel().tolist() == [0.0, 0.0, -4.0, -8.0, -8.0]


def test_a_bound_that_is_no_decay_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="lower_bound=1"):
        gates.kda_gate(normal(1, 1, 2), lower_bound=1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("size", [3, 7, 64])
def test_l2norm(dtype: torch.dtype, size: int) -> None:
    compare("l2norm", [normal(3, 5, size, dtype=dtype)])


def test_norms_are_exact_where_the_numbers_are() -> None:
    x = torch.tensor([[3.0, 4, 0, 0], [0, 0, 0, 0], [-1, 1, 1, -1]], device=DEVICE)
    assert norms.l2norm(x, eps=0.0)[0].tolist() == [np.float32(0.6), np.float32(0.8), 0, 0]
    assert norms.l2norm(x)[1].tolist() == [0, 0, 0, 0]
    weight = torch.tensor([1.0, 10], device=DEVICE)
    got = norms.rmsnorm_gated(x[2:], None, weight, eps=3.0, group_size=2)
    assert got.tolist() == [[-0.5, 5.0, 0.5, -5.0]]


def test_a_group_longer_than_a_block_is_read_twice() -> None:
    size = norms.MOST_CHANNELS + 100
    compare("l2norm", [normal(2, size)], 64)
    compare("rmsnorm_gated", [normal(1, size), normal(1, size, seed=1), normal(size)], 64)


@every_type
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(dtype: torch.dtype, norm_first: bool, activation: str) -> None:
    x, z = normal(3, 2, 12, dtype=dtype), normal(3, 2, 12, dtype=dtype, seed=1)
    settings: dict[str, Any] = {"norm_before_gate": norm_first, "gate_activation": activation}
    compare("rmsnorm_gated", [x, z, normal(12)], 40, **settings)
    compare("rmsnorm_gated", [x, z, normal(4, dtype=dtype)], 40, group_size=4, **settings)
    compare("rmsnorm_gated", [x[..., ::2], z[..., 1::2], normal(6)], 40, group_size=3, **settings)
    compare("rmsnorm_gated", [x, None, normal(12)], 40, **settings)


def test_groups_fill_the_channels() -> None:
    with pytest.raises(ShapeError, match="group_size=5 does not divide"):
        norms.rmsnorm_gated(normal(1, 12), None, normal(12), group_size=5)
    with pytest.raises(ShapeError, match=r"weight has shape \[3\]"):
        norms.rmsnorm_gated(normal(1, 12), None, normal(3), group_size=4)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_nothing_in_is_nothing_out(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, device=DEVICE)
    assert norms.l2norm(x).shape == gates.beta_gate(x).shape == shape
    assert norms.rmsnorm_gated(x, x, normal(4)).shape == gates.softplus_gate(x, normal(4)).shape == shape


# ---------------------------------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 2, 2, 3], [0, 5], [0, 0, 4, 4]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_those_of_the_reference(offsets: list[int], dtype: torch.dtype) -> None:
    params = PackedSeqParams(cu_seqlens_q=torch.tensor(offsets, dtype=dtype, device=DEVICE))
    ids = packed.build_packed_seq_idx(params, 5, check=True)
    want = reference_packed.build_packed_seq_idx(PackedSeqParams(cu_seqlens_q=np.array(offsets)), 5)
    assert ids.dtype == torch.int32
    np.testing.assert_array_equal(wide(ids), want)
    if offsets[-1] == 5:
        assert packed.ids_to_offsets(ids, len(offsets) - 1).tolist() == offsets


@pytest.mark.parametrize("params", [
    PackedSeqParams(), PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 2])), PackedSeqParams(cu_seqlens_q=[0.0, 1.0]),
    PackedSeqParams(cu_seqlens_q=torch.tensor([[0, 1]])), PackedSeqParams(cu_seqlens_q=torch.tensor([0, 9])),
])  # fmt: skip
def test_offsets_that_describe_no_pack_are_refused(params: PackedSeqParams) -> None:
    with pytest.raises(PackingError, match="PACK-"):
        packed.build_packed_seq_idx(params, 5)


@pytest.mark.parametrize("total", [-1, 2.0, True])
def test_a_length_is_a_whole_number(total: Any) -> None:
    with pytest.raises(PackingError, match="PACK-5"):
        packed.build_packed_seq_idx(PackedSeqParams(cu_seqlens_q=[0]), total)


# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------


def built() -> list[str]:
    """The operations that the fast path has."""
    names = []
    for name, op in OPERATIONS.items():
        if op.family in statescan.fast.MODULES:
            module = import_module(f"statescan.fast.{statescan.fast.MODULES[op.family]}")
            names += [name] if hasattr(module, name) else []
    return names


@pytest.mark.parametrize("name", built())
def test_the_fast_path_is_called_as_the_reference_is(name: str) -> None:
    family = statescan.fast.MODULES[OPERATIONS[name].family]
    fast = inspect.signature(getattr(import_module(f"statescan.fast.{family}"), name)).parameters
    slow = inspect.signature(getattr(import_module(f"statescan.reference.{family}"), name)).parameters
    assert [(p.name, p.kind, p.default) for p in fast.values()] == [(p.name, p.kind, p.default) for p in slow.values()]


def test_names_are_found_in_the_package() -> None:
    assert statescan.fast.l2norm is norms.l2norm
    assert {"causal_conv1d", "l2norm"} <= set(dir(statescan.fast))
    with pytest.raises(AttributeError, match="no_such"):
        statescan.fast.no_such  # noqa: B018


def test_schemas_mark_what_is_changed() -> None:
    assert launch.schema_of("l2norm") == "(Tensor x, float eps, bool? check)"
    assert "Tensor(a!) conv_pool" in launch.schema_of("causal_conv1d_update")
    assert "Tensor(b!)? intermediate_windows" in launch.schema_of("causal_conv1d_update")


def test_a_compiled_norm_is_one_graph_and_the_same() -> None:
    x = normal(3, 12).requires_grad_()
    compiled: Any = torch.compile(lambda x: norms.l2norm(2 * x).sum(), backend="aot_eager", fullgraph=True)
    got, want = compiled(x), norms.l2norm(2 * x).sum()
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(result, x)[0] for result in (got, want)))


def test_operations_are_registered_rightly() -> None:
    f, log = normal(2, 3, 4).requires_grad_(), normal(3).requires_grad_()
    opcheck(gates._kda_op.traced, (f, log, None, -5.0, None))
    x, weight = normal(2, 12).requires_grad_(), normal(12).requires_grad_()
    opcheck(norms._rmsnorm_op.traced, (x, normal(2, 12), weight, 1e-5, None, False, "silu", None))
