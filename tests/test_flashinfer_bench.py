"""The export to FlashInfer-Bench: references give exactly what vectors expect, and its own models accept the files."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.numpy import load_file

from statescan.conformance.export_flashinfer_bench import SHAPES, definition, dense_corpus, write
from statescan.goldens.store import VECTORS, read_json

CALLS = dense_corpus({path.stem: read_json(path) for path in sorted(VECTORS.glob("*/*.json"))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("traces")
    write(CALLS, made)
    return made


@pytest.mark.parametrize("op", SHAPES)
def test_a_reference_gives_what_the_vectors_expect(op, folder) -> None:
    calls = {call.name: call for call in CALLS if call.op == op}
    lines = (folder / "workloads" / f"statescan_{op}.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["workload"]["uuid"] for line in lines] == list(calls)
    space: dict[str, object] = {}
    exec(definition(op)["reference"], space)  # the text of our own definition, as that package runs it
    for line in map(json.loads, lines):
        inputs, call = line["workload"]["inputs"], calls[line["workload"]["uuid"]]
        given = {
            name: spec["value"] if spec["type"] == "scalar" else
            torch.from_numpy(load_file(folder / spec["path"])[spec["tensor_key"]])
            for name, spec in inputs.items()
        }  # fmt: skip
        out, final = space["run"](**given)  # type: ignore[operator]
        np.testing.assert_array_equal(out.numpy(), call.out[0].astype(np.float32), err_msg=call.name)
        if call.final is not None:
            np.testing.assert_array_equal(final.numpy(), call.final[0].astype(np.float32), err_msg=call.name)


def test_its_own_models_accept_the_folder(folder) -> None:
    data = pytest.importorskip("flashinfer_bench.data")
    read = data.TraceSet.from_path(str(folder))
    assert sorted(read.definitions) == sorted(f"statescan_{op}" for op in SHAPES)
    assert sum(map(len, read.workloads.values())) == len(CALLS)
    for name, traces in read.workloads.items():
        for trace in traces:
            shapes = read.definitions[name].get_input_shapes(trace.workload.axes)
            kept = [spec.path for spec in trace.workload.inputs.values() if spec.type == "safetensors"]
            sizes = [list(x.shape) for _, x in sorted(load_file(folder / kept[0]).items())]
            assert sorted(sizes) == sorted(shape for shape in shapes if shape is not None)
