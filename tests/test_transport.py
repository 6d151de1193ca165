"""Tensors on their way to an adapter and back: byte for byte, and nothing outside the folder."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from statescan.conformance import transport
from statescan.conformance.calls import Plan, span, strided
from statescan.goldens.tensors import DTYPES, bits

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["f64", "f32", "f16", "bf16", "i32", "i64"]), SHAPES, st.booleans()),
                min_size=1, max_size=5))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("t")
    rng = np.random.default_rng(len(rows))
    tensors = {}
    for i, (dtype, shape, gaps) in enumerate(rows):
        array = rng.integers(-9, 9, shape).astype(DTYPES[dtype])
        tensors[f"t{i}"] = strided(array) if gaps and array.ndim else array
    described = transport.write_inputs(folder, "000001.in", tensors)
    back = transport.open_tensors(folder, "000001.in", described)
    for name, array in tensors.items():
        assert (bits(back[name]) == bits(array)).all()
        assert transport.element_strides(back[name]) == transport.element_strides(array) or array.size <= 1
        assert (bits(span(back[name])) == bits(span(array))).all()
    for row in described:
        assert row["offset"] % DTYPES[row["dtype"]].itemsize == 0


def test_files_are_safetensors(tmp_path):
    transport.write_inputs(tmp_path, "000001.in", {"x": np.arange(3, dtype=np.float32), "i": np.arange(2)})
    read = load_file(tmp_path / "000001.in")
    assert read["x"].tolist() == [0, 1, 2]
    assert read["i"].tolist() == [0, 1]


def test_a_blank_is_all_sentinel_and_arithmetic_makes_none(tmp_path):
    for dtype in ("f64", "f32", "f16", "bf16", "i32"):
        blank = transport.blank(Plan("y", dtype, (3,)))
        assert transport.is_blank(blank).all()
        if dtype != "i32":
            assert np.isnan(blank.astype(np.float64)).all()
            nan = np.full(3, np.nan, DTYPES[dtype])
            assert not transport.is_blank(nan).any()
            assert not transport.is_blank(nan * nan - nan).any()


@pytest.mark.parametrize("name", ["../x.in", "000001.txt", "1.in", "000001.in/../x", "/etc/hosts", "000001.in\n"])
def test_only_names_of_the_pattern_are_opened(tmp_path, name):
    with pytest.raises(ValueError, match="six digits"):
        transport.open_tensors(tmp_path, name, [])


def test_links_and_folders_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"x" * 64)
    os.symlink(tmp_path / "secret", tmp_path / "000001.out")
    with pytest.raises(OSError, match="symbolic"):
        transport.open_tensors(tmp_path, "000001.out", [])
    (tmp_path / "000002.out").mkdir()
    with pytest.raises((OSError, ValueError)):
        transport.open_tensors(tmp_path, "000002.out", [])


@pytest.mark.parametrize("wrong", [
    {"offset": -8}, {"offset": 4000}, {"nbytes": 4000}, {"shape": [400]}, {"strides": [400]}, {"strides": [-1]},
])  # fmt: skip
def test_a_description_outside_its_file_is_refused(tmp_path, wrong):
    (row,) = transport.write_inputs(tmp_path, "000001.in", {"x": np.arange(3.0)})
    with pytest.raises(ValueError, match="inside its file"):
        transport.open_tensors(tmp_path, "000001.in", [{**row, **wrong}])
