"""The exported node tests are well formed, and the onnx package's own evaluator gives exactly what they expect."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from statescan.conformance import export_onnx
from statescan.conformance.export_onnx import NodeTest, left_out, node_tests
from statescan.goldens.store import VECTORS, read_json
from statescan.reference.conv import causal_conv1d
from statescan.reference.delta import gated_delta_rule, kimi_delta_attention

CORPUS = {path.stem: read_json(path) for path in sorted(VECTORS.glob("*/*.json"))}
TESTS = list(node_tests(CORPUS))


def evaluate(test: NodeTest) -> dict[str, np.ndarray[Any, Any]]:
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(export_onnx.model_of(test))
    given = {name: x for name, x in test.inputs.items() if x is not None}
    return dict(zip([o for o, x in test.outputs.items() if x is not None], session.run(None, given), strict=True))


def test_every_operation_that_has_a_node_is_there() -> None:
    vectors = {test.name.rsplit("-", 1)[0] for test in TESTS}
    assert {CORPUS[name]["op"] for name in vectors} == {
        "causal_conv1d", "gated_delta_rule", "gated_delta_product", "kimi_delta_attention"}  # fmt: skip
    assert len(vectors) > 50
    reasons = Counter(filter(None, map(left_out, CORPUS.values())))
    assert len(vectors) <= len(CORPUS) - sum(reasons.values())


def test_onnx_gives_what_the_vectors_expect() -> None:
    """Exactly: no tolerance."""
    pytest.importorskip("onnx", "1.23")
    wrong = {}
    for test in TESTS:
        got = evaluate(test)
        for name, wanted in test.outputs.items():
            if wanted is not None and not np.array_equal(got[name], wanted, equal_nan=True):
                wrong[f"{test.name} {name}"] = float(np.nanmax(np.abs(got[name] - wanted)))
    assert not wrong, json.dumps(wrong, indent=1)


def test_a_wrong_expectation_is_seen() -> None:
    pytest.importorskip("onnx", "1.23")
    test = TESTS[0]
    name, wanted = next((name, x) for name, x in test.outputs.items() if x is not None)
    assert not np.array_equal(evaluate(test)[name], wanted + 1)


def test_a_written_test_is_read_by_onnx(tmp_path) -> None:
    onnx = pytest.importorskip("onnx", "1.23")
    from onnx import numpy_helper

    test = next(test for test in TESTS if test.op == "LinearAttention" and test.inputs["past_state"] is not None)
    export_onnx.write(test, tmp_path)
    (folder,) = tmp_path.iterdir()
    onnx.checker.check_model(onnx.load(folder / "model.onnx"), full_check=True)
    data = folder / "test_data_set_0"
    names = [name for name, x in test.inputs.items() if x is not None]
    for n, name in enumerate(names):
        tensor = onnx.TensorProto.FromString((data / f"input_{n}.pb").read_bytes())
        assert tensor.name == name
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), test.inputs[name])
    assert len(list(data.iterdir())) == len(names) + len([x for x in test.outputs.values() if x is not None])


# ---------------------------------------------------------------------------------------------------------------------
# The other way: the onnx package's own node tests on the reference
# ---------------------------------------------------------------------------------------------------------------------


def own_node_tests() -> list[Any]:
    """Those of the two operators; collecting all of the package's tests takes longer than everything here."""
    from onnx.backend.test.case import node
    from onnx.backend.test.case.node import causal_conv_with_state, linear_attention  # noqa: F401  importing collects

    named = ("test_linear_attention_", "test_causal_conv_with_state_")
    found = [case for case in node._NodeTestCases if case.name.startswith(named)]
    return [case for case in found if len(case.model.graph.node) == 1]  # not those with the function's body in place


def run_on_the_reference(case: Any) -> list[np.ndarray[Any, Any]] | str:
    """Outputs of one node test by the reference; a word where it has no such rule."""
    from onnx.helper import get_attribute_value

    node = case.model.graph.node[0]
    settings = {a.name: get_attribute_value(a) for a in node.attribute}
    given = iter(case.data_sets[0][0])
    inputs = {name: next(given) for name in node.input if name}
    x = [inputs.get(name) for name in node.input] + [None] * 6
    if node.op_type == "CausalConvWithState":
        word = settings.get("activation", b"none").decode()
        width = x[1].shape[2]
        if width not in (2, 3, 4):
            return f"width {width}"
        window = None if x[3] is None else np.concatenate([np.zeros_like(x[3][..., :1]), x[3]], axis=-1)
        y, final = causal_conv1d(np.swapaxes(x[0], 1, 2), x[1][:, 0], x[2], initial_windows=window,
                                 activation=None if word == "none" else word)  # fmt: skip
        return [np.swapaxes(y, 1, 2), final[..., 1:]]
    rule = settings.get("update_rule", b"gated_delta").decode()
    heads, queries = settings["kv_num_heads"], settings["q_num_heads"]
    if "delta" not in rule:
        return f"rule {rule}"
    if heads != queries:
        return "query heads that share a state"
    batch, tokens, _ = x[0].shape
    q, k, v = (part.reshape(batch, tokens, heads, -1) for part in x[:3])
    g = np.zeros((batch, tokens, heads), np.float32) if x[4] is None else x[4].reshape(batch, tokens, heads, -1)
    beta = np.broadcast_to(x[5].reshape(batch, tokens, -1), (batch, tokens, heads)).copy()
    by_channel = g.ndim == 4 and g.shape[-1] > 1
    call = kimi_delta_attention if by_channel else gated_delta_rule
    given = (q, k, v, (g if by_channel or g.ndim == 3 else g[..., 0]).astype(np.float32), beta.astype(np.float32))
    pairs = [
        call(*(part[n : n + 1] for part in given), initial_state=None if x[3] is None else x[3][n : n + 1],
             scale=settings.get("scale") or None, output_final_state=True)
        for n in range(batch)
    ]  # fmt: skip
    o, final = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return [o.reshape(batch, tokens, -1), final]


def test_the_packages_own_node_tests_agree_with_the_reference() -> None:
    pytest.importorskip("onnx", "1.23")
    cases = own_node_tests()
    left, agreed = Counter[str](), 0
    for case in cases:
        got = run_on_the_reference(case)
        if isinstance(got, str):
            left[got] += 1
            continue
        for ours, theirs in zip(got, case.data_sets[0][1], strict=False):
            np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64),
                                       rtol=case.rtol, atol=case.atol, err_msg=case.name)  # fmt: skip
        agreed += 1
    assert agreed >= 18
    assert set(left) <= {"rule linear", "rule gated", "query heads that share a state", "width 1", "width 5"}
    assert agreed + sum(left.values()) == len(cases)
