"""Are the hooks of a mixer wired rightly? One token of one request, whose wrong answers are recognised by their value.

A bare mixer of size 1 reads digits: its window 1 2 3 and the token 4 make 2 + 30 + 400. Slot 0 holds another request.
Only what is recognised stops the suite; any other wrong number is for the traces to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from statescan.conformance.calls import Call, Plan, Reply
from statescan.conformance.hooks import HOOKS, KINDS
from statescan.conformance.traces import outside_limits
from statescan.goldens.tensors import Array, narrow

STATE, OTHER_STATE = 1000.0, 2000.0
WINDOW, OTHER_WINDOW, TOKEN = (1.0, 2, 3), (5.0, 6, 7), 4.0
ROWS: dict[str, tuple[tuple[str, ...], str]] = {
    "mamba2": (("x", "B", "C", "dt"), "x"), "gdn": (("q", "k", "v", "beta", "alpha"), "v"),
    "gdp": (("V", "K", "Q", "b", "a"), "V"), "kda": (("q", "k", "v", "b", "f"), "v"),
}  # fmt: skip
"""What a row of each kind holds, and which of it the digits are."""
TAPS = [1, 10, 100]


def check_hooks(client: Any) -> str:
    """A sentence that says what is wired wrongly in the hooks that are claimed, or nothing."""
    for claim in client.capabilities:
        limits = claim.get("limits", {})
        kinds = [kind for kind in KINDS if not outside_limits(describe(kind), limits)]
        if claim["op"] not in HOOKS or not kinds:
            continue
        if client.setup(describe(kinds[0]), vector="smoke").status != "ok":
            continue
        reply = client.run(one_token(kinds[0], claim), vector="smoke", name=claim["op"])
        said = recognise(kinds[0], reply)
        if said:
            return f"{claim['op']}: {said}"
    return ""


def describe(kind: str) -> dict[str, Any]:
    """A bare mixer of size 1 with taps for digits."""
    names, digits = ROWS[kind]
    convolved = [name for name in names[:4] if name not in ("dt", "beta", "b")]
    found: dict[str, Any] = {
        "kind": kind, "bare": True, "heads": 1, "d_conv": 3, "chunk": 2, "activation": None, "conv_bias": None,
        "conv_weight": [TAPS if name == digits else [0, 0, 1] for name in convolved],
    }  # fmt: skip
    if kind == "mamba2":
        return found | {"headdim": 1, "d_state": 1, "groups": 1, "A": [0], "D": [0], "dt_bias": None,
                        "dt_softplus": False}  # fmt: skip
    return found | {"value_heads": 1, "key_dim": 1, "value_dim": 1, "scale": 1,
                    **({"householder": 1} if kind == "gdp" else {})}  # fmt: skip


def one_token(kind: str, claim: Mapping[str, Any]) -> Call:
    """The call: slot 1 of three, in the first element types that are claimed."""
    types = {"zxBCdt": "f32", "conv_state": "f32", "ssm_state": "f32", **(claim.get("dtypes") or [{}])[0]}
    names, digits = ROWS[kind]
    numbers = {digits: TOKEN, "beta": 2.0, "b": 2.0, "alpha": 0.0, "a": 0.0, "f": 0.0}
    channels = [name for name in names[:4] if name not in ("dt", "beta", "b")]
    windows = [[window if name == digits else (1.0, 1, 1) for name in channels]
               for window in (OTHER_WINDOW, WINDOW, OTHER_WINDOW)]  # fmt: skip

    def tensor(name: str, values: Any) -> Array:
        return narrow(np.array(values, np.float64), types[name])

    tensors = {
        "zxBCdt": tensor("zxBCdt", [[[numbers.get(name, 1.0) for name in names]]]),
        "conv_state": tensor("conv_state", windows),
        "ssm_state": tensor("ssm_state", np.reshape([OTHER_STATE, STATE, OTHER_STATE], (3, 1, 1, 1))),
    }  # fmt: skip
    results = (Plan("y", types.get("out", types["zxBCdt"]), (1, 1, 1)),)
    if claim["op"] == "ssm_decode":
        return Call("ssm_decode", {}, {**tensors, "batch_indices": np.array([1], np.int64)}, results)
    arrays = {
        "cu_seqlens": [0, 1], "batch_indices_prefill": [1], "seq_idx": [[0]], "cu_chunk_seqlens": [0, 1],
        "last_chunk_indices": [0], "seq_idx_for_varlen": [0], "conv_seq_idx": [0], "conv_seq_start": [0],
        "device_decode_prefill": [0, 1], "intermediate_abs_positions": [], "intermediate_real_count": [0],
        "chunk_indices": [[0, 0]], "chunk_indices_dp": [[0, 0]], "chunk_offsets": [0, 1],
    }  # fmt: skip
    tensors |= {name: np.array(values, np.int32) for name, values in arrays.items()}
    for name, pool in (("intermediate_conv_out", "conv_state"), ("intermediate_ssm_out", "ssm_state")):
        tensors[name] = tensors[pool][:0].copy()
    args = {"token_count": 1, "decode_req_count": 0, "prefill_req_count": 1, "num_speculative_tokens": 0,
            "padding": [1, 1], "layers": 1, "layer_map": [0, None, 1]}  # fmt: skip
    return Call("ssm_prefill", args, tensors, results)


def recognise(kind: str, reply: Reply) -> str:
    """The sentence for a wrong answer, or nothing."""
    if reply.status != "ok":
        return ""

    def reader(value: float, state: float) -> float:
        return state + value if kind == "mamba2" else 2 * value - state  # beta 2, key 1: S + 2 (v - S)

    def read(window: tuple[float, ...]) -> float:
        return sum(tap * digit for tap, digit in zip(TAPS, window, strict=True))

    got = float(reply.outputs["y"].ravel()[0])
    answers = {
        "": reader(read((2, 3, TOKEN)), STATE),
        "your slots look like batch rows: row n uses slot batch_indices[n] (SLOT-2)":
            reader(read((6, 7, TOKEN)), OTHER_STATE),
        "your windows look newest first: the newest input stands in column W-1 (SLOT-1)":
            reader(read((2, 1, TOKEN)), STATE),
        "your windows look one column off: of W columns the oldest is the one to drop (CONV-4)":
            reader(read((1, 2, TOKEN)), STATE),
        "your taps look reversed: weight[:, W-1] multiplies the current token (CONV-1)":
            reader(read((TOKEN, 3, 2)), STATE),
        "your hook looks as if it started from zeros: a piece starts from what its slot holds (SLOT-8)":
            reader(read((0, 0, TOKEN)), 0.0),
        "your state looks as if it started from zeros: it starts from what its slot holds (SLOT-8)":
            reader(read((2, 3, TOKEN)), 0.0),
    }  # fmt: skip
    return next((said for said, value in answers.items() if abs(got - value) <= 2.0**-8 * abs(value)), "")
