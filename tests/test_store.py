"""Tensors and files of the corpus: nothing is rounded on the way, and nothing from outside is trusted."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statescan.goldens import store, tensors


@given(st.lists(st.floats(width=32), max_size=12))
def test_encode_and_decode_are_inverse(numbers):
    array = np.array(numbers, np.float32)
    back = tensors.decode(json.loads(json.dumps(tensors.encode(array), allow_nan=False)))
    assert np.array_equal(back, array, equal_nan=True)
    assert (np.signbit(back) == np.signbit(array))[~np.isnan(array)].all()


@pytest.mark.parametrize(("dtype", "value"), [("bf16", 257), ("f16", 70000), ("f32", 2**24 + 1), ("i32", 0.5)])
def test_a_number_the_type_cannot_hold_is_refused(dtype, value):
    with pytest.raises(ValueError, match="cannot be held"):
        tensors.decode({"dtype": dtype, "shape": [1], "data": [value]})


@pytest.mark.parametrize(("dtype", "bits"), [("f32", 0x7FC00000), ("bf16", 0x7FC0), ("f16", 0x7E00)])
def test_nan_stands_for_one_pattern(dtype, bits):
    assert int(tensors.bits(tensors.decode({"dtype": dtype, "shape": [1], "data": ["nan"]}))[0]) == bits


@pytest.mark.parametrize("spec", [
    {"dtype": "f31", "shape": [1], "data": [1]}, {"dtype": "f32", "shape": [2], "data": [1]},
    {"dtype": "f32", "shape": [-1], "data": []}, {"dtype": "f32", "shape": [1 << 30], "data": 0},
    {"dtype": "f32", "shape": [1], "data": ["one"]}, {"dtype": "f32", "shape": [1], "data": [True]},
    {"dtype": "f32", "shape": [1], "blob": "sha256:../../x"},
])  # fmt: skip
def test_a_wrong_tensor_is_refused(spec):
    with pytest.raises(ValueError):  # noqa: PT011  each says something else
        tensors.decode(spec)


def test_a_blob_is_named_by_what_it_holds(tmp_path):
    reference = tensors.save_blob("y", np.arange(3.0), tmp_path)
    assert tensors.load_blob(reference, tmp_path).tolist() == [0, 1, 2]
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"\x41")
    with pytest.raises(ValueError, match="does not hold"):
        tensors.load_blob(reference, tmp_path)


@pytest.mark.parametrize("text", [
    '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 40 + "]" * 40, '{"a": "' + "x" * 70000 + '"}', "{", '{"a": Infinity}',
])  # fmt: skip
def test_strict_json(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(store.FormatError, match=r"x\.json"):
        store.read_json(path)


def test_an_unknown_key_or_a_changed_number_is_refused(tmp_path):
    vector = dict(next(iter(store.load_vectors().values())))
    path = tmp_path / f"{vector['id']}.json"
    path.write_text(json.dumps({**vector, "extra": 1}))
    with pytest.raises(store.FormatError, match="extra"):
        store.load_vector(path)
    path.write_text(json.dumps({**vector, "why": "Another sentence altogether."}))
    with pytest.raises(store.FormatError, match="digest"):
        store.load_vector(path)


def test_every_stored_file_is_canonical():
    for path in sorted(store.VECTORS.glob("*/trace-*.json")):
        assert path.read_text("utf-8") == store.vector_text(store.load_trace(path), "trace"), path.name
    for path in store.vector_paths():
        vector = store.load_vector(path)
        assert path.read_text("utf-8") == store.vector_text(vector), path.name
        assert path.parent.name == store.family(vector), path.name


def test_the_corpus_stays_small():
    size = sum(path.stat().st_size for path in store.GOLDENS.rglob("*") if path.is_file())
    assert size < 20e6
