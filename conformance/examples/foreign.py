"""An adapter for an environment without statescan: one file, NumPy alone, the decode step of the gated delta rule.

    statescan run --impl "run:python foreign.py"           # answers calls while the suite runs
    statescan export calls --claims foreign.json --only GDN
    python foreign.py calls                                 # or fills an exported folder, on any machine
    statescan verify calls

What is yours is `step` and `CLAIMS`; the rest is the protocol.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

CLAIMS = [{
    "op": "gated_delta_rule_update",
    "features": ["slot.pool", "slot.negative", "slot.split", "tokens.many", "heads.gva", "beta.double", "decay.zero"],
    "dtypes": [{"q": "f32", "g": "f32", "beta": "f32", "state_pool": "f32"}], "operand": "f32", "state_layout": ["KV"],
}]  # fmt: skip
DTYPES = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "i32": "<i4", "i64": "<i8"}
SETTINGS = {"scale": None, "use_qk_l2norm": False, "state_layout": "KV"}


def step(q: Any, k: Any, v: Any, g: Any, beta: Any, state_pool: Any, read_slots: Any, write_slots: Any = None, *,
         scale: float | None = None) -> Any:  # fmt: skip
    """q, k [N, J, H, K], v [N, J, HV, V], g, beta [N, J, HV]; state_pool [slots, HV, K, V] is changed in place."""
    write_slots = read_slots if write_slots is None else write_slots
    o = np.zeros_like(v)
    shared = v.shape[2] // q.shape[2]
    for n, (read, write) in enumerate(zip(read_slots, write_slots, strict=True)):
        if read < 0 and write < 0:
            continue  # padding
        state = state_pool[read].astype(np.float64) if read >= 0 else np.zeros(state_pool.shape[1:])
        for j in range(q.shape[1]):
            queries, keys = (np.repeat(x[n, j].astype(np.float64), shared, axis=0) for x in (q, k))
            state = state * np.exp(g[n, j].astype(np.float64))[:, None, None]
            known = np.einsum("hk,hkv->hv", keys, state)
            state = state + keys[:, :, None] * (beta[n, j][:, None] * (v[n, j] - known))[:, None, :]
            o[n, j] = np.einsum("hk,hkv->hv", queries * (q.shape[3] ** -0.5 if scale is None else scale), state)
        if write >= 0:
            state_pool[write] = state
    return o


def answer(message: dict[str, Any], folder: str) -> dict[str, Any]:
    """Make one call, and fill in the blanks: results, and every input as the call left it."""
    inputs = message["inputs"]["tensors"]
    settings = {name: value for name, value in message["args"].items() if value != SETTINGS.get(name, ...)}
    unknown = [row["name"] for row in inputs if row["name"] not in step.__code__.co_varnames[:9]]
    unknown += [name for name in settings if name != "scale"]
    unknown += [row["dtype"] for row in inputs if row["dtype"] not in DTYPES]
    if message["op"] != "gated_delta_rule_update" or unknown:
        return {"ok": False, "status": "unsupported", "need": (unknown or [message["op"]])[0]}
    given = open_file(folder, message["inputs"], "r")
    tensors = {name: array.copy() for name, array in given.items()}  # packed: the claims say nothing of strides
    try:
        o = step(**tensors, **settings)
    except Exception as error:  # whatever happens is an answer
        return {"ok": False, "status": "error", "error": type(error).__name__, "message": str(error)}
    blanks = open_file(folder, message["outputs"], "r+")
    for name, blank in blanks.items():
        blank[...] = o if name == "o" else tensors[name.removeprefix("after.")]
    return {"ok": True}


def open_file(folder: str, described: dict[str, Any], mode: Any) -> dict[str, Any]:
    """Map the tensors of a file; the message says where each lies."""
    found = {}
    raw = np.memmap(os.path.join(folder, described["file"]), np.uint8, mode)
    for row in described["tensors"]:
        dtype = np.dtype(DTYPES[row["dtype"]])
        flat = raw[row["offset"] : row["offset"] + row["nbytes"]].view(dtype)
        strides = [s * dtype.itemsize for s in row["strides"]]
        found[row["name"]] = np.lib.stride_tricks.as_strided(flat, row["shape"], strides)
    return found


def fill(folder: str) -> None:
    """Answer every call of an exported folder."""
    with open(os.path.join(folder, "calls.jsonl")) as calls, open(os.path.join(folder, "done.jsonl"), "w") as done:
        for line in calls:
            message = json.loads(line)
            done.write(json.dumps({"id": message["id"], **answer(message, folder)}) + "\n")


def serve() -> None:
    """Answer the suite line by line; what anything prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder = ""
    for line in sys.stdin:
        message = json.loads(line)
        if message["cmd"] == "hello":
            folder = message["scratch"]
            said = {"ok": True, "protocol": "statescan/1", "name": "foreign", "version": "1", "language": "python",
                    "device": "cpu"}  # fmt: skip
        elif message["cmd"] == "capabilities":
            said = {"ok": True, "capabilities": CLAIMS}
        else:
            said = answer(message, folder) if message["cmd"] == "run" else {"ok": True}
        out.write(json.dumps({"id": message["id"], **said}) + "\n")
        if message["cmd"] == "bye":
            return


if __name__ == "__main__":
    fill(sys.argv[1]) if len(sys.argv) > 1 else serve()
