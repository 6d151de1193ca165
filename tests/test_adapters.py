"""The adapters of released packages: right conversions, honest claims, and faults of a peer left as they are.

Each runs in a worker of its own, as in the suite: what an adapter sets is for its whole process. Its answers are
compared with the reference's.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from statescan.conformance.adapters import NULLS, SHIPPED, interpreter, null
from statescan.conformance.adapters.reference import adapter as reference
from statescan.conformance.calls import Array, Call, Gradient, Reply, plan_results
from statescan.conformance.client import Client, python_command
from statescan.conformance.invoke import invoke
from statescan.goldens.tensors import DTYPES
from statescan.spec.contract import OPERATIONS

C, NAN = 5, float("nan")
TOLERANCE = {"f32": 1e-5, "f16": 2.0**-10, "bf16": 2.0**-7}
CONVOLUTIONS = ("causal_conv1d", "causal_conv1d_prefill", "causal_conv1d_update")
MIXED = {"read_slots": [0, -1, 2, -7], "write_slots": [1, 5, -1, -1]}
"""Four rows: from slot 0 to 1, fresh to 5, score only, padding."""


class Peer(NamedTuple):
    """A running worker and the adapter's name."""

    name: str
    client: Client


@pytest.fixture(scope="module", params=["fla", "causal_conv1d"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    with Client(python_command(f"{SHIPPED[request.param]}:adapter"), run_seconds=60) as client:
        if not client.hello["ok"]:
            pytest.skip(client.hello["message"])
        yield Peer(request.param, client)


def numbers(seed: int, dtype: str, *shape: int) -> Array:
    """Small integers: their sums are exact in every type, so only an activation rounds."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(DTYPES[dtype])


def index(*values: int) -> Array:
    return np.array(values, np.int32)


def filters(W: int = 4, dtype: str = "f32", bias: bool = True) -> dict[str, Array]:
    return {"weight": numbers(1, dtype, C, W), **({"bias": numbers(2, dtype, C)} if bias else {})}


def pool(W: int = 4, dtype: str = "f32") -> Array:
    """Six windows; nobody reads slots 4 and 5, which hold NaN."""
    windows = numbers(3, dtype, 6, C, W)
    windows[4:] = NAN
    return windows


def call(
    op: str, tensors: Mapping[str, Array], args: Mapping[str, Any] | None = None, grad: Gradient | None = None,
    results: tuple[str, ...] | None = None,
) -> Call:  # fmt: skip
    plans = plan_results(op, tensors, args or {}, {}, grad)
    kept = tuple(plan for plan in plans if results is None or plan.name in results or plan.name.startswith("grad."))
    return Call(op, args or {}, {name: array.copy() for name, array in tensors.items()}, kept, grad)


def outcome(peer: Peer, wanted: Call) -> str:
    """`right`, the status of a call that gave nothing, or the first tensor that is not the reference's."""
    right = invoke(reference, call(wanted.op, wanted.tensors, wanted.args, wanted.grad))
    reply = peer.client.run(wanted)
    assert right.status == "ok", right
    if reply.status != "ok":
        return f"{reply.status} {reply.message}"
    names = [plan.name for plan in wanted.results] + [a for a in right.outputs if a.startswith("after.")]
    wrong = [name for name in names if not close(peer, name, reply.outputs[name], right.outputs[name])]
    return f"wrong {wrong[0]}" if wrong else "right"


def close(peer: Peer, name: str, got: Array, want: Array) -> bool:
    a, b = got.astype(np.float64), want.astype(np.float64)
    if keeps_short_windows(peer.name, name):
        a, b = a[..., 1:], b[..., 1:]
    kind = next((key for key, dtype in DTYPES.items() if dtype == want.dtype), "f32")
    near = np.abs(a - b) <= TOLERANCE.get(kind, 0.0) * np.abs(b)
    return a.shape == b.shape and bool((near | (a == b) | (np.isnan(a) & np.isnan(b))).all())


def keeps_short_windows(name: str, tensor: str) -> bool:
    """Where the adapter says window.W-1: the oldest column is not kept."""
    return name == "causal_conv1d" and tensor in ("final_windows", "after.conv_pool")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_pack(peer: Peer, dtype: str, activation: str | None) -> None:
    for W in (2, 3, 4):
        tensors = {"x": numbers(0, dtype, 1, 9, C), **filters(W, dtype), "cu_seqlens": index(0, 2, 6, 9)}
        assert outcome(peer, call("causal_conv1d", tensors, {"activation": activation})) == "right"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_pack_with_empty_segments_and_windows(peer: Peer, dtype: str) -> None:
    tensors = {"x": numbers(0, dtype, 1, 9, C), **filters(dtype=dtype), "cu_seqlens": index(0, 0, 1, 6, 6, 9, 9),
               "initial_windows": numbers(4, dtype, 6, C, 4)}  # fmt: skip
    expected = {"fla": "right", "causal_conv1d": "unsupported state.in"}
    assert outcome(peer, call("causal_conv1d", tensors)) == expected[peer.name]
    del tensors["initial_windows"]
    assert outcome(peer, call("causal_conv1d", tensors, results=("y",))) == "right"


def test_a_pack_given_by_ids(peer: Peer) -> None:
    tensors = {"x": numbers(0, "f32", 1, 6, C), **filters(), "seq_idx": index(0, 0, 1, 1, 2, -1)[None]}
    expected = {"fla": "wrong y", "causal_conv1d": "right"}  # fla takes the keyword and does not use it
    assert outcome(peer, call("causal_conv1d", tensors, results=("y",))) == expected[peer.name]


def test_batch_rows_with_windows(peer: Peer) -> None:
    tensors = {"x": numbers(0, "bf16", 3, 5, C), **filters(dtype="bf16", bias=False),
               "initial_windows": numbers(4, "bf16", 3, C, 4)}  # fmt: skip
    assert outcome(peer, call("causal_conv1d", tensors, {"activation": "swish"})) == "right"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_prefill_on_slots_of_every_kind(peer: Peer, dtype: str) -> None:
    slots = {name: index(*values) for name, values in MIXED.items()}
    tensors = {"x": numbers(0, dtype, 1, 9, C), **filters(dtype=dtype), "cu_seqlens": index(0, 2, 3, 6, 9),
               "conv_pool": pool(dtype=dtype), **slots}  # fmt: skip
    tensors["x"][0, 6:] = NAN  # the padding row's
    assert outcome(peer, call("causal_conv1d_prefill", tensors, {"activation": "silu"})) == "right"


def test_prefill_of_rows_without_tokens(peer: Peer) -> None:
    tensors = {"x": numbers(0, "f32", 1, 2, C), **filters(), "cu_seqlens": index(0, 0, 2, 2), "conv_pool": pool(),
               "read_slots": index(0, 1, -1), "write_slots": index(4, 1, 5)}  # fmt: skip
    expected = {"fla": "right", "causal_conv1d": "unsupported empty_segments"}
    assert outcome(peer, call("causal_conv1d_prefill", tensors)) == expected[peer.name]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_update_on_slots_of_every_kind(peer: Peer, dtype: str, tokens: int) -> None:
    slots = {name: index(*values) for name, values in MIXED.items()}
    x = numbers(0, dtype, 4, tokens, C)
    x[3] = NAN  # the padding row's
    tensors = {"x": x, **filters(dtype=dtype), "conv_pool": pool(dtype=dtype), **slots}
    assert outcome(peer, call("causal_conv1d_update", tensors, {"activation": "silu"})) == "right"


def test_a_window_stays_wider_than_the_tokens(peer: Peer) -> None:
    """The one-token kernel of fla keeps a float32 window beside bfloat16 tokens, and claims it."""
    tensors = {"x": numbers(0, "bf16", 1, 1, C), **filters(dtype="bf16"), "conv_pool": pool() + np.float32(256.5),
               "read_slots": index(0)}  # fmt: skip
    claims = [claim for claim in peer.client.capabilities if claim["op"] == "causal_conv1d_update"]
    claimed = any(types["x"] == "bf16" and types["conv_pool"] == "f32" for claim in claims for types in claim["dtypes"])
    assert claimed == (peer.name == "fla")
    if claimed:
        assert outcome(peer, call("causal_conv1d_update", tensors)) == "right"


def test_gradients(peer: Peer) -> None:
    tensors = {"x": numbers(0, "bf16", 1, 8, C), **filters(dtype="bf16"), "cu_seqlens": index(0, 3, 3, 8)}
    grad = Gradient(("x", "weight", "bias"), {"y": numbers(5, "bf16", 1, 8, C)})
    assert outcome(peer, call("causal_conv1d", tensors, grad=grad, results=("y",))) == "right"


@pytest.mark.parametrize("need", ["snapshots.any", "intermediates", "num_accepted", "num_tokens"])
def test_what_is_not_offered_is_named(peer: Peer, need: str) -> None:
    prefill = {"x": numbers(0, "f32", 1, 2, C), **filters(), "cu_seqlens": index(0, 2), "conv_pool": pool(),
               "read_slots": index(0)}  # fmt: skip
    update = {"x": numbers(0, "f32", 1, 2, C), **filters(), "conv_pool": pool(), "read_slots": index(0)}
    entries = {"intermediate_windows": np.zeros((6, 2, C, 4), np.float32)}
    given = {
        "snapshots.any": ("causal_conv1d_prefill", {
            **prefill, "snapshot_positions": index(1), "snapshot_windows": np.zeros((1, C, 4), np.float32)}),
        "intermediates": ("causal_conv1d_update", {**update, **entries}),
        "num_accepted": ("causal_conv1d_update", {**update, "num_accepted": index(-1)}),
        "num_tokens": ("causal_conv1d_update", {**update, "num_tokens": index(1)}),
    }  # fmt: skip
    reply = peer.client.run(call(*given[need]))
    assert (reply.status, reply.message) == ("unsupported", need)
    claims = [claim for claim in peer.client.capabilities if claim["op"] in CONVOLUTIONS]
    assert not any(need in claim["features"] for claim in claims)


def test_rows_past_the_last_offset_are_left_to_the_peer(peer: Peer) -> None:
    """fla does not write them and the adapter does not either; the references of causal-conv1d give 0."""
    tensors = {"x": numbers(0, "f32", 1, 6, C), **filters(), "cu_seqlens": index(0, 4)}
    y = peer.client.run(call("causal_conv1d", tensors)).outputs["y"]
    assert np.isnan(y[0, 4:]).all() == (peer.name == "fla")
    assert (y[0, 4:] == 0).all() == (peer.name == "causal_conv1d")


def test_a_repeated_call_is_the_same_call(peer: Peer) -> None:
    tensors = {"x": numbers(0, "f32", 1, 6, C), **filters(), "cu_seqlens": index(0, 6)}
    first, second = (peer.client.run(call("causal_conv1d", tensors)).outputs["y"] for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_every_claim_is_of_an_operation_it_has(peer: Peer) -> None:
    named = {claim["op"] for claim in peer.client.capabilities}
    assert set(CONVOLUTIONS) <= named <= set(OPERATIONS)
    assert peer.client.hello["version"]


# ---------------------------------------------------------------------------------------------------------------------
# What is shared
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "module", "package"), [
    ("fla", "fla", "fla-core"), ("fla_delta", "fla", "fla-core"), ("fla_kda", "fla", "fla-core"),
    ("fla_naive", "fla", "fla-core"), ("causal_conv1d", "causal_conv1d", "causal_conv1d"),
    ("mamba_ssm", "mamba_ssm", "mamba_ssm"), ("transformers", "transformers", "transformers"),
])  # fmt: skip
def test_a_package_that_is_not_there_is_said(name: str, module: str, package: str) -> None:
    hidden = f"""
import importlib.util as util
real = util.find_spec
util.find_spec = lambda name, *rest: None if name == {module!r} else real(name, *rest)
from statescan.conformance.adapters.{name} import adapter
print(adapter.missing, adapter.capabilities == [] or "claims", sep="|")
"""
    said = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"{package} is not installed: run `make peers`|")


def test_a_module_that_a_package_stands_on_is_named() -> None:
    assert interpreter.missing("peer", "json", "no_such_module") == "no_such_module is not installed: run `make peers`"
    assert interpreter.missing("peer", "json", "math") == ""


def test_bfloat16_is_rounded_as_it_should_be() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    edges = np.array([0.0, -0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, np.inf, -np.inf, 2.0**-133, NAN], np.float32)
    for array in (values, edges):
        with np.errstate(all="ignore"):
            right = array.astype(DTYPES["bf16"])
        got = interpreter.round_off(array).view(DTYPES["bf16"])
        assert np.array_equal(got.astype(np.float32), right.astype(np.float32), equal_nan=True)
        assert np.array_equal(interpreter.widen(right.view(np.uint16)), right.astype(np.float32), equal_nan=True)


KERNEL = """
from statescan.conformance.adapters import interpreter
device = interpreter.prepare()
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({}, num_warps=n) for n in (1, 2)], key=[])
@triton.jit
def kernel(x, out, n: tl.constexpr):
    a = tl.load(x + tl.arange(0, n))
    tl.store(out + tl.arange(0, n), a + a)
    tl.store(out + n + tl.arange(0, n), -a)
    tl.store(out + 2 * n + tl.arange(0, n), tl.where(a < 0, a, 1.0))
    tl.store(out + 3 * n + tl.arange(0, n), (a.to(tl.float32) * 1.01).to(tl.bfloat16))
    square = tl.dot(a[:, None] + tl.zeros((n, n), tl.bfloat16), a[None, :] + tl.zeros((n, n), tl.bfloat16))
    tl.store(out + 4 * n + tl.arange(0, n), tl.sum(square, 1).to(tl.bfloat16))
    tl.store(out + 5 * n + tl.arange(0, n), tl.arange(0, n).to(tl.bfloat16) * a)
    tl.store(out + 6 * n + tl.arange(0, n), tl.sum(a + tl.zeros((n, n), tl.bfloat16), 1))  # 16 sums of a row of a
    tl.store(out + 7 * n + tl.arange(0, n), a * 0 + tl.sum(a))
    for i in range(n):  # a counter that is asked for its type
        tl.store(out + 8 * n + i.to(tl.int64), a.dtype == tl.bfloat16)

n = 16
x = torch.linspace(-3, 3, n, dtype=torch.bfloat16, device=device)
x[0] = -4
out = torch.empty(9, n, dtype=torch.bfloat16, device=device)
kernel[(1,)](x, out, n)
f = x.float()
count = torch.arange(n, device=device)
total = f.sum().expand(n)
right = [2 * f, -f, torch.where(f < 0, f, 1.0), f * 1.01, n * f * f.sum(), count * f, total, total, f * 0 + 1]
right = torch.stack(right)
assert torch.allclose(out.float(), right.bfloat16().float(), atol=2e-2), (out.float() - right).abs().max(1)
assert torch.equal(out[:4], right[:4].bfloat16())
"""


def test_bfloat16_kernels_compute_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "kernel.py"  # Triton reads the source of a kernel
    script.write_text(KERNEL, "utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# ---------------------------------------------------------------------------------------------------------------------
# Null implementations
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NULLS)
def test_a_null_implementation_claims_everything(name: str) -> None:
    adapter = getattr(null, name)
    assert {claim["op"] for claim in adapter.capabilities} == set(OPERATIONS) == set(adapter.operations)
    assert set(adapter.gradients) == {op.name for op in OPERATIONS.values() if op.differentiable}


def test_null_results_have_their_shapes_and_the_pool_stands() -> None:
    tensors = {"x": numbers(0, "bf16", 2, 3, C), **filters(dtype="bf16"), "conv_pool": pool(),
               "read_slots": index(0, 1)}  # fmt: skip
    replies: dict[str, Reply] = {}
    for name in NULLS:
        replies[name] = invoke(getattr(null, name), call("causal_conv1d_update", tensors))
    assert (replies["refuses"].status, replies["refuses"].error) == ("rejected", "SlotError")
    for name in ("zeros", "echo", "nothing"):
        assert replies[name].status == "ok"
        assert replies[name].outputs["after.conv_pool"].tobytes() == tensors["conv_pool"].tobytes()
    assert (replies["zeros"].outputs["y"] == 0).all()
    assert replies["echo"].outputs["y"].tobytes() == tensors["x"].tobytes()
