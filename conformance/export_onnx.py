"""Exact vectors in the form of ONNX node tests, for `LinearAttention` and `CausalConvWithState` of opset 27.

    python -m statescan.conformance.export_onnx FOLDER

A node test is a folder with `model.onnx` and `test_data_set_0/{input,output}_N.pb`, as those of the onnx package are,
which checks every model before it is written. Sources: https://onnx.ai/onnx/operators/ and
https://github.com/onnx/onnx/blob/main/docs/OnnxBackendTest.md
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statescan.conformance.segments import CONVOLUTION, Dense, dense_calls, why_not
from statescan.goldens.store import load_corpus
from statescan.goldens.tensors import Array

OPSET = 27


@dataclass(frozen=True)
class NodeTest:
    """One node with named inputs and outputs; an input that is left out is None."""

    name: str
    op: str
    attributes: Mapping[str, Any]
    inputs: Mapping[str, Array | None]
    outputs: Mapping[str, Array | None]


def node_test(call: Dense) -> NodeTest:
    """A dense call as one node, all numbers in float32."""
    return _convolution(call) if call.op == CONVOLUTION else _attention(call)


def _narrow(tensors: Mapping[str, Array | None]) -> dict[str, Array | None]:
    return {name: None if x is None else np.ascontiguousarray(x.astype(np.float32)) for name, x in tensors.items()}


def _convolution(call: Dense) -> NodeTest:
    turned = {name: np.swapaxes(x, 1, 2) for name, x in (("x", call.inputs["x"]), ("y", call.out))}
    inputs = {
        "input": turned["x"], "weight": call.inputs["weight"][:, None, :], "bias": call.inputs.get("bias"),
        "past_state": None if call.entering is None else call.entering[..., 1:],
    }  # fmt: skip
    final = None if call.final is None else call.final[..., 1:]
    outputs = {"output": turned["y"], "present_state": final}
    attributes = {"activation": call.args.get("activation") or "none"}
    return NodeTest(call.name, "CausalConvWithState", attributes, _narrow(inputs), _narrow(outputs))


def _attention(call: Dense) -> NodeTest:
    """Each value head gets a copy of its key head; copies of a product become tokens, of which the last one reads."""
    given = {name: x.astype(np.float64) for name, x in call.inputs.items()}
    heads, copies = given["v"].shape[2], int(call.args.get("num_householder") or 1)
    tokens = given["q"].shape[1]
    wide = {"q": np.zeros((1, tokens * copies, *given["q"].shape[2:])),
            "g": np.zeros((1, tokens * copies, *given["g"].shape[2:]))}  # fmt: skip
    wide["q"][:, copies - 1 :: copies], wide["g"][:, ::copies] = given["q"], given["g"]
    q, k = (np.repeat(x, heads // x.shape[2], axis=2) for x in (wide["q"], given["k"]))
    flat = [x.reshape(1, tokens * copies, -1) for x in (q, k, given["v"], wide["g"], given["beta"])]
    names = ("query", "key", "value", "past_state", "decay", "beta")
    inputs = dict(zip(names, [*flat[:3], call.entering, *flat[3:]], strict=True))
    out = np.zeros((1, tokens * copies, heads, call.out.shape[-1]))
    out[:, copies - 1 :: copies] = call.out.astype(np.float64)
    scale = call.args.get("scale")
    attributes = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta",
                  "scale": float(k.shape[-1] ** -0.5 if scale is None else scale)}  # fmt: skip
    outputs = {"output": out.reshape(1, tokens * copies, -1), "present_state": call.final}
    return NodeTest(call.name, "LinearAttention", attributes, _narrow(inputs), _narrow(outputs))


def node_tests(corpus: Mapping[str, Mapping[str, Any]]) -> Iterator[NodeTest]:
    """Every vector that those operators can express, a test for each segment."""
    for vector in corpus.values():
        if not left_out(vector):
            yield from map(node_test, dense_calls(vector))


def left_out(vector: Mapping[str, Any]) -> str:
    """Why a vector is not exported; "" where it is."""
    if vector.get("args", {}).get("scale", 1) == 0:
        return "a scale of 0, which means K^-1/2 there"
    if vector.get("args", {}).get("num_householder", 1) == 0:
        return "no copies"
    return why_not(vector)


def model_of(test: NodeTest) -> Any:
    """The ModelProto of one node, checked."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str, x: Array) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape)

    names = [name if x is not None else "" for name, x in test.inputs.items()]
    while names[-1] == "":
        names.pop()
    node = helper.make_node(test.op, names, list(test.outputs), **test.attributes)
    graph = helper.make_graph(
        [node], test.name, [value(n, x) for n, x in test.inputs.items() if x is not None],
        [value(n, x) for n, x in test.outputs.items() if x is not None],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="statescan")
    onnx.checker.check_model(model, full_check=True)
    return model


def write(test: NodeTest, folder: Path) -> None:
    """The node test as a folder under `folder`."""
    from onnx import numpy_helper

    data = folder / f"test_{test.name.replace('-', '_')}" / "test_data_set_0"
    data.mkdir(parents=True, exist_ok=True)
    (data.parent / "model.onnx").write_bytes(model_of(test).SerializeToString())
    for side, tensors in (("input", test.inputs), ("output", test.outputs)):
        given = [(name, x) for name, x in tensors.items() if x is not None]
        for n, (name, x) in enumerate(given):
            (data / f"{side}_{n}.pb").write_bytes(numpy_helper.from_array(x, name).SerializeToString())


def main(folder: str) -> None:
    corpus = load_corpus()
    tests = list(node_tests(corpus))
    for test in tests:
        write(test, Path(folder))
    print(f"{len(tests)} node tests of {len({t.name.rsplit('-', 1)[0] for t in tests})} vectors in {folder}")
    for reason, count in Counter(filter(None, map(left_out, corpus.values()))).most_common():
        print(f"left out, {reason}: {count}")


if __name__ == "__main__":
    main(sys.argv[1])
