"""Exact vectors as definitions and workloads of FlashInfer-Bench, with references written in plain PyTorch.

    python -m statescan.conformance.export_flashinfer_bench FOLDER

The folder is a TraceSet: `definitions/`, `workloads/` (a line for each segment of a vector) and `blobs/`, the inputs as
safetensors. That format keeps no expected numbers: the reference of a definition makes them, so the tests here run each
reference on each workload and compare with the vector, exactly. Source: https://bench.flashinfer.ai/docs
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from statescan.conformance.segments import CONVOLUTION, Dense, dense_calls, why_not
from statescan.goldens.store import load_corpus
from statescan.goldens.tensors import Array

Pair = tuple[Tensor, Tensor]


def run_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Pair:
    """q `[T, H, K]`; k, v, beta `[T*M, ...]`, M copies a token; g `[T, HV]` or `[T, HV, K]`; state `[HV, K, V]`."""
    share, copies = v.shape[1] // k.shape[1], k.shape[0] // max(q.shape[0], 1)
    q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
    state, out = state.clone(), []
    for t in range(q.shape[0]):
        state = state * g[t].exp().reshape(g.shape[1], -1, 1)
        for row in range(t * copies, (t + 1) * copies):
            held = (k[row][:, :, None] * state).sum(1)
            state = state + k[row][:, :, None] * (beta[row][:, None] * (v[row] - held))[:, None, :]
        out.append((scale * q[t][:, :, None] * state).sum(1))
    return torch.stack(out), state


def run_convolution(x: Tensor, weight: Tensor, bias: Tensor, window: Tensor, silu: bool) -> Pair:
    """x `[T, C]`, weight `[C, W]`, bias `[C]`, window `[C, W]`, newest last."""
    out = []
    for t in range(x.shape[0]):
        window = torch.cat([window[:, 1:], x[t][:, None]], 1)
        y = bias + (weight * window).sum(1)
        out.append(y * torch.sigmoid(y) if silu else y)
    return torch.stack(out), window


_DELTA = {"q": "T H K", "k": "TM H K", "v": "TM HV V", "g": "T HV", "beta": "TM HV", "state": "HV K V"}
_WORDS = {"T": "tokens", "TM": "tokens times copies", "H": "query and key heads", "HV": "value heads", "K": "key dim",
          "V": "value dim", "C": "channels", "W": "convolution width"}  # fmt: skip
SHAPES: dict[str, tuple[Callable[..., Pair], dict[str, str], dict[str, str]]] = {
    "gated_delta_rule": (run_delta, _DELTA, {"o": "T HV V", "final_state": "HV K V"}),
    "gated_delta_product": (run_delta, _DELTA, {"o": "T HV V", "final_state": "HV K V"}),
    "kimi_delta_attention": (run_delta, {**_DELTA, "g": "T HV K"}, {"o": "T HV V", "final_state": "HV K V"}),
    CONVOLUTION: (run_convolution, {"x": "T C", "weight": "C W", "bias": "C", "window": "C W"},
                  {"y": "T C", "final_window": "C W"}),
}  # fmt: skip
_SCALARS = {CONVOLUTION: {"silu": "bool"}}


def definition(op: str) -> dict[str, Any]:
    """The definition of one operation, every axis free."""
    run, inputs, outputs = SHAPES[op]
    letters = dict.fromkeys(" ".join([*inputs.values(), *outputs.values()]).split())
    source = inspect.getsource(run).replace(f"def {run.__name__}(", "def run(", 1)

    def spec(axes: str) -> dict[str, Any]:
        return {"shape": axes.split(), "dtype": "float32"}

    scalars = _SCALARS.get(op, {"scale": "float32"})
    return {
        "name": f"statescan_{op}", "op_type": "gdn" if op != CONVOLUTION else "causal_conv1d",
        "description": f"{op} of one segment, as the clauses of statescan have it.",
        "axes": {letter: {"type": "var", "description": _WORDS[letter]} for letter in letters},
        "inputs": {**{name: spec(axes) for name, axes in inputs.items()},
                   **{name: {"shape": None, "dtype": dtype} for name, dtype in scalars.items()}},
        "outputs": {name: spec(axes) for name, axes in outputs.items()},
        "constraints": [] if op == CONVOLUTION else ["HV % H == 0", "TM % T == 0"],
        "reference": f"import torch\nfrom torch import Tensor\n\nPair = tuple[Tensor, Tensor]\n\n\n{source}",
    }  # fmt: skip


def tensors_of(call: Dense) -> dict[str, Array]:
    """The inputs of a dense call without its leading axis; an entering state or bias that is absent is zero."""
    given = {name: x[0] if name not in ("weight", "bias") else x for name, x in call.inputs.items()}
    if call.op == CONVOLUTION:
        channels, width = given["weight"].shape
        given.setdefault("bias", np.zeros(channels))
        given["window"] = np.zeros((channels, width)) if call.entering is None else call.entering[0]
    else:
        shape = (*given["v"].shape[1:2], given["k"].shape[2], given["v"].shape[2])
        given["state"] = np.zeros(shape) if call.entering is None else call.entering[0]
    return {name: np.ascontiguousarray(given[name].astype(np.float32)) for name in SHAPES[call.op][1]}


def scalars_of(call: Dense) -> dict[str, float | bool]:
    """The settings of a dense call by the names of its definition."""
    if call.op == CONVOLUTION:
        return {"silu": call.args.get("activation") is not None}
    scale = call.args.get("scale")
    return {"scale": float(call.inputs["k"].shape[-1] ** -0.5 if scale is None else scale)}


def workload(call: Dense, blob: str) -> dict[str, Any]:
    """The line of one dense call, whose tensors lie in `blob`, a path inside the folder."""
    tensors = tensors_of(call)
    axes = {
        letter: size
        for name, letters in SHAPES[call.op][1].items()
        for letter, size in zip(letters.split(), tensors[name].shape, strict=True)
    }
    inputs: dict[str, Any] = {name: {"type": "safetensors", "path": blob, "tensor_key": name} for name in tensors}
    inputs |= {name: {"type": "scalar", "value": value} for name, value in scalars_of(call).items()}
    return {"definition": f"statescan_{call.op}", "workload": {"uuid": call.name, "axes": axes, "inputs": inputs}}


def dense_corpus(corpus: Mapping[str, Mapping[str, Any]]) -> list[Dense]:
    """Every call that the format can hold; a product of no copies has no rows there."""
    told = (vector for vector in corpus.values() if not why_not(vector))
    return [call for vector in told if vector["args"].get("num_householder", 1) for call in dense_calls(vector)]


def write(calls: list[Dense], folder: Path) -> None:
    """Definitions, workloads and blobs under `folder`."""
    for name in ("definitions", "workloads", "blobs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for op in SHAPES:
        made = definition(op)
        (folder / "definitions" / f"{made['name']}.json").write_text(json.dumps(made, indent=1) + "\n", "utf-8")
        lines = []
        for call in (call for call in calls if call.op == op):
            save_file(tensors_of(call), folder / "blobs" / f"{call.name}.safetensors")
            lines.append(json.dumps(workload(call, f"blobs/{call.name}.safetensors")) + "\n")
        (folder / "workloads" / f"{made['name']}.jsonl").write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    found = dense_corpus(load_corpus())
    write(found, Path(sys.argv[1]))
    print(f"{len(SHAPES)} definitions, {len(found)} workloads in {sys.argv[1]}")
