"""A sample of the fuzzing, what it stored of the whole, and the rules it rests on, one by one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from statescan.conformance import fuzz
from statescan.conformance.claims import check_claims
from statescan.conformance.recorded import safetensors_parts
from statescan.conformance.untrusted import MAX_HEADER, parse_tensors, printable, read_file, write_file
from statescan.goldens.store import FormatError, parse_json

ROOT = Path(__file__).parents[1]


def test_a_sample(tmp_path, monkeypatch):
    (tmp_path / "seeds").mkdir()
    made = fuzz.targets(tmp_path / "seeds")
    corpus = fuzz.load_corpus()
    for module in (fuzz.ci, fuzz.report):
        monkeypatch.setattr(module, "load_corpus", lambda: corpus)
    for name, share in fuzz.SHARES.items():
        room = tmp_path / name
        room.mkdir()
        tally = fuzz.fuzz(name, made[name], int(300 * share), room, seed=1)
        assert tally["refused"] > 0, name


def test_a_reader_that_fails_otherwise_is_caught(tmp_path):
    def careless(place, rng):
        json.loads(fuzz.text_of(fuzz.edited({"a": [1]}, rng), rng))["a"][0] + 1

    with pytest.raises((TypeError, KeyError, ValueError, IndexError, Exception)):
        fuzz.fuzz("careless", careless, 60, tmp_path)

    def outside(place, rng):
        (place.parent / "x").write_text("")

    with pytest.raises(AssertionError, match="beside the folder"):
        fuzz.fuzz("outside", outside, 3, tmp_path)


def test_the_recorded_run_is_large_and_clean():
    made = json.loads((ROOT / "conformance" / "fuzz.json").read_text("utf-8"))
    assert made["inputs"] == sum(row["refused"] + row["read"] for row in made["targets"].values()) >= 100_000
    assert set(made["targets"]) == set(fuzz.SHARES)
    assert made["crashes"] == made["files written outside"] == 0
    assert made["most memory in MiB"] < made["memory limit in MiB"]


def header(**entries) -> bytearray:
    text = json.dumps(entries).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + bytes(16))


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def test_tensors_are_read_as_they_were_written():
    tensors = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "i": np.arange(3), "e": np.zeros((0, 4), np.float16)}
    back = parse_tensors(bytearray(b"".join(safetensors_parts(tensors))), "f")
    assert {key: array.tolist() for key, array in back.items()} == {k: a.tolist() for k, a in tensors.items()}
    assert all(array.flags.writeable for array in back.values())
    assert parse_tensors(header(x=ENTRY, __metadata__={"a": "b"}), "f")["x"].shape == (2, 2)


@pytest.mark.parametrize(("data", "told"), [
    (bytearray(b"\x00" * 4), "a header"), (bytearray((2**40).to_bytes(8, "little")), "a header"),
    (bytearray((MAX_HEADER + 1).to_bytes(8, "little") + bytes(MAX_HEADER + 9)), "a header"),
    (header(x={**ENTRY, "shape": [2, 3]}), "bytes for"), (header(x={**ENTRY, "data_offsets": [0, 32]}), "bytes for"),
    (header(x={**ENTRY, "data_offsets": [8, 24]}), "lies at"), (header(x={**ENTRY, "dtype": "F8"}), "dtype"),
    (header(x={**ENTRY, "shape": [-2, -2]}), "no sizes"), (header(x={**ENTRY, "shape": [1] * 9}), "axes at most"),
    (header(x={**ENTRY, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}), "shape"),
    (header(x={**ENTRY, "more": 1}), "are needed"), (header(), "behind the last tensor"),
    (header(**{str(i): ENTRY for i in range(5000)}), "4096 at most"), (header(x=ENTRY, y=ENTRY), "lies at"),
])  # fmt: skip
def test_a_tensor_file_that_says_otherwise_than_it_holds_is_refused(data, told):
    with pytest.raises(FormatError, match=told):
        parse_tensors(data, "f")


@pytest.mark.parametrize("text", [
    b'{"a": 1, "a": 2}', b"[1e999]", b"NaN", b"[-Infinity]", b"[" * 100_000, b"[" * 40 + b"]" * 40, b"\xff", b"",
    b'"' + b"x" * 70_000 + b'"', b"9" * 5000, str(2**70).encode(), b'"\\ud800"',
    b'{"' + b"k" * 70_000 + b'": 1}',
])  # fmt: skip
def test_json_past_its_limits_is_refused(text):
    with pytest.raises(FormatError):
        parse_json(text, "f")


def test_only_regular_files_of_the_right_size_are_read(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    assert read_file(tmp_path, "f") == b"12345"
    os.symlink(tmp_path / "f", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ".", "..", "../f", "", "none", "a\0b", str(tmp_path / "f")):
        with pytest.raises(FormatError):
            read_file(tmp_path, name)
    for limits in ({"most": 4}, {"size": 4}, {"size": 6}):
        with pytest.raises(FormatError, match="5 bytes"):
            read_file(tmp_path, "f", **limits)
    write_file(tmp_path, "link", [b"new"])
    assert (tmp_path / "f").read_bytes() == b"12345"
    assert (tmp_path / "link").read_bytes() == b"new"


@pytest.mark.parametrize("limits", [
    {"K": "4"}, {"K": [4.5]}, {"K": ["x"]}, {"K": {"max": "x"}}, {"K": {"most": 4}}, {"K": {"multiple": 0}},
    {"chunk": [64]}, {"chunk": 0}, {"K": [2**40]}, {"K": [True]}, {"kind": [[]]}, {"kind": {"max": 4}},
])  # fmt: skip
def test_limits_that_are_none_are_refused(limits):
    with pytest.raises(FormatError, match="limits"):
        check_claims([{"op": "l2norm", "limits": limits}], "f")
    check_claims([{"op": "l2norm", "limits": {"K": [4], "V": {"max": 8}, "chunk": 64, "kind": ["gdn"]}}], "f")


def test_control_characters_are_shown():
    assert printable("a\x1b[31m\u202eb\n") == "a\\x1b[31m\\x202eb\n"
