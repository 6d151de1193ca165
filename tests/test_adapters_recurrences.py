"""Released peers behind their adapters: one small call of each operation and form that they claim, in a worker.

Recurrences tell stories in small whole numbers, which every claimed type holds: results and gradients must equal the
reference's. Gates and norms are compared within the precision of the type they come back in.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from statescan.conformance.adapters import SHIPPED
from statescan.conformance.calls import Array, Call, Gradient, plan_results
from statescan.conformance.client import Client, python_command
from statescan.goldens.tensors import NAMES, narrow
from statescan.spec.contract import FLOAT_TYPES, OPERATIONS

PEERS = ("fla", "fla_delta", "fla_kda", "fla_naive", "transformers", "mamba_ssm")
OFFSETS = np.array([0, 2, 5], np.int32)
T, N, J, K, V, P, R, D = 5, 2, 2, 4, 2, 2, 3, 6
NEVER = -1024.0
MODULES = {"conv": "conv", "gates": "gates", "norms": "norms", "delta": "delta", "ssd": "ssd"}

Tensors = dict[str, Array]
Claim = Mapping[str, Any]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_agrees_with_the_reference_on_small_calls(name):
    with Client(python_command(f"{SHIPPED[name]}:adapter")) as client:
        if not client.hello["ok"]:
            pytest.skip(client.hello["message"])
        wrong = [f"{claim['op']} {claim['dtypes'][0]}: {said}" for claim in forms(client.capabilities)
                 for said in [disagreement(client, claim)] if said]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def forms(claims: list[dict[str, Any]]) -> list[Claim]:
    """Claims that differ in more than types, the last of each; convolutions have tests of their own."""
    last = {(claim["op"], *claim["features"]): claim for claim in claims if OPERATIONS[claim["op"]].family != "conv"}
    assert last
    return list(last.values())


def disagreement(client: Client, claim: Claim) -> str:
    """What is wrong with one call within a claim, or nothing."""
    op, types = OPERATIONS[claim["op"]], claim["dtypes"][0]
    tensors, args = STORIES[op.family](claim)
    tensors = {name: retyped(claim["op"], name, array, types) for name, array in tensors.items()}
    wanted = expected(claim["op"], tensors, args)
    grad = cotangents(claim, tensors, args, wanted, types)
    if grad is not None:
        wanted |= gradients(claim["op"], tensors, args, grad)
    plans = tuple(p for p in plan_results(op.name, tensors, args, types, grad) if p.name in wanted)
    reply = client.run(Call(op.name, args, tensors, plans, grad))
    if reply.status != "ok":
        return f"{reply.status} {reply.error} {reply.message[:300]}"
    for name, want in wanted.items():
        got = reply.outputs[name if any(p.name == name for p in plans) else f"after.{name}"]
        off = np.abs(got.astype(np.float64) - want) > tolerance(op.family, NAMES[got.dtype]) * np.maximum(1, abs(want))
        if off.any() or not np.isfinite(got.astype(np.float64)).all():
            return f"{name} {got.ravel().tolist()}, expected {want.ravel().tolist()}"
    return ""


def tolerance(family: str, dtype: str) -> float:
    return 0.0 if family in ("delta", "ssd") else 64 * 2.0 ** -FLOAT_TYPES[dtype].bits


def retyped(op: str, name: str, array: Array, types: Mapping[str, str]) -> Array:
    if array.dtype.kind in "iu":
        return array
    group = next(a.group for a in OPERATIONS[op].tensors if a.name == name)
    return narrow(array, types.get(name) or types.get(group) or "f32")


def wide(tensors: Tensors) -> Tensors:
    return {name: array if array.dtype.kind in "iu" else array.astype(np.float64) for name, array in tensors.items()}


def given(op: str, tensors: Tensors) -> dict[str, Any]:
    """Every tensor argument up to the last required one, absent ones as None."""
    arguments = OPERATIONS[op].tensors
    last = max(i for i, argument in enumerate(arguments) if not argument.optional)
    return {**{argument.name: None for argument in arguments[: last + 1]}, **tensors}


def expected(op: str, tensors: Tensors, args: Mapping[str, Any]) -> Tensors:
    """Results of the reference by name, pools included, in float64."""
    module = import_module(f"statescan.reference.{MODULES[OPERATIONS[op].family]}")
    inputs = wide(tensors)
    returned = getattr(module, op)(**given(op, inputs), **args)
    parts = returned if isinstance(returned, tuple) else (returned,)
    named = {r.name: part for r, part in zip(OPERATIONS[op].results, parts, strict=False) if part is not None}
    return {**named, **{a.name: inputs[a.name] for a in OPERATIONS[op].inout if a.name in inputs}}


def cotangents(
    claim: Claim, tensors: Tensors, args: Mapping[str, Any], wanted: Tensors, types: Mapping[str, str]
) -> Gradient | None:
    """Small cotangents of every result, where gradients are claimed; bfloat16 would not hold what they lead to."""
    if "grad" not in claim["features"] or "bf16" in types.values():
        return None
    floats = tuple(name for name, array in tensors.items() if array.dtype.kind not in "iu")
    rng = np.random.default_rng(7)
    return Gradient(floats, {name: rng.integers(-1, 2, part.shape).astype(np.float64) for name, part in wanted.items()})


def gradients(op: str, tensors: Tensors, args: Mapping[str, Any], grad: Gradient) -> Tensors:
    family = MODULES[OPERATIONS[op].family]
    module = import_module(f"statescan.reference.{family + '_grad' if family in ('delta', 'ssd') else family}")
    found = getattr(module, f"{op}_grad")(grad.cotangents, **given(op, wide(tensors)), **args)
    return {f"grad.{name}": found[name] for name in grad.of}


# ---------------------------------------------------------------------------------------------------------------------
# Stories
# ---------------------------------------------------------------------------------------------------------------------


def whole(rng: Any, *shape: int, low: int = -1, high: int = 1) -> Array:
    return np.asarray(rng.integers(low, high + 1, shape), np.float64)


def layout(claim: Claim) -> tuple[str, int, int, Tensors]:
    """The form of a call, its leading axis and tokens a row, and the tensors that say where its rows are."""
    op, features = claim["op"], claim["features"]
    if op.endswith("_update"):
        many = J if "tokens.many" in features else 1
        # in place; where rows may not be split, both slots of a row are one
        return "update", N + 1, many, {"read_slots": np.array([2, -1, 0], np.int32)}
    if op.endswith("_prefill"):
        slots = {"read_slots": np.array([2, -1], np.int32), "write_slots": np.array([1, 0], np.int32)}
        return "prefill", 1, T, {"cu_seqlens": OFFSETS, **slots}
    return "packed", 1, T, {"cu_seqlens": OFFSETS} if "packed.cu" in features else {}


def states(claim: Claim, form: str, rng: Any, rows: Tensors, shape: tuple[int, ...]) -> tuple[Tensors, dict[str, Any]]:
    """Entering states or a pool, and the setting that asks for a final state."""
    if form != "packed":
        return {"state_pool": whole(rng, 3, *shape, low=-2, high=2)}, {}
    count = len(OFFSETS) - 1 if "cu_seqlens" in rows else 1
    entering = {"initial_state": whole(rng, count, *shape)} if "state.in" in claim["features"] else {}
    return entering, {"output_final_state": True} if "state.out" in claim["features"] else {}


def tell_delta(claim: Claim) -> tuple[Tensors, dict[str, Any]]:
    """Keys are unit vectors, so that states stay whole and small; one head forgets everything at one token."""
    rng, op = np.random.default_rng(3), claim["op"]
    copies = 2 if op.startswith("gated_delta_product") else 1
    heads, values = (1, 2) if "heads.gva" in claim["features"] else (2, 2)
    form, lead, tokens, rows = layout(claim)
    keys = np.eye(K)[rng.integers(0, K, (lead, tokens * copies, heads))]
    gates = (values, K) if op.startswith("kimi") else (values,)
    g = np.zeros((lead, tokens, *gates))
    g[:, tokens // 2, 0] = NEVER
    held, settings = states(claim, form, rng, rows, (values, K, V))
    tensors = {
        "q": whole(rng, lead, tokens, heads, K), "k": keys, "v": whole(rng, lead, tokens * copies, values, V), "g": g,
        "beta": whole(rng, lead, tokens * copies, values, low=0, high=2), **rows, **held,
    }  # fmt: skip
    householder = {"num_householder": copies} if copies > 1 else {}
    return tensors, {"scale": 1.0, **householder, **settings}


def tell_ssd(claim: Claim) -> tuple[Tensors, dict[str, Any]]:
    """Four heads in two groups; A of one head forgets wherever its step is not 0."""
    rng = np.random.default_rng(4)
    form, lead, tokens, rows = layout(claim)
    held, settings = states(claim, form, rng, rows, (4, P, R))
    tensors = {
        "x": whole(rng, lead, tokens, 4, P), "dt": whole(rng, lead, tokens, 4, low=0, high=2),
        "A": np.array([0, NEVER, 0, 0]), "B": whole(rng, lead, tokens, 2, R), "C": whole(rng, lead, tokens, 2, R),
        "D": whole(rng, *((4, P) if "D.channel" in claim["features"] else (4,))), "dt_bias": np.zeros(4), **rows,
        **held,
    }  # fmt: skip
    return tensors, {"dt_softplus": False, **settings}


def eighths(*shape: int, seed: int) -> Array:
    """Numbers that every type holds."""
    return whole(np.random.default_rng(seed), *shape, low=-16, high=16) / 8


def tell_gate(claim: Claim) -> tuple[Tensors, dict[str, Any]]:
    raw = eighths(1, T, 2, K, seed=5)
    if claim["op"] == "beta_gate":
        return {"b": raw[..., 0]}, {"allow_neg_eigval": True}
    if claim["op"] == "softplus_gate":
        return {"a": 4 * raw[..., 0], "A_log": eighths(2, seed=6), "dt_bias": eighths(2, seed=7)}, {}
    return {"f": raw, "A_log": eighths(2, seed=6), "dt_bias": eighths(2, K, seed=7)}, {"lower_bound": -5.0}


def tell_norm(claim: Claim) -> tuple[Tensors, dict[str, Any]]:
    x, z = eighths(1, T, D, seed=8), eighths(1, T, D, seed=9)
    if claim["op"] == "l2norm":
        return {"x": x}, {}
    return {"x": x, "z": z, "weight": eighths(3, seed=10)}, {"group_size": 3}


STORIES = {"delta": tell_delta, "ssd": tell_ssd, "gates": tell_gate, "norms": tell_norm}
