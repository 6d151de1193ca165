"""Comparison words and messages, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from statescan.conformance.calls import Call, Plan, Reply, span, strided
from statescan.conformance.compare import Expected, Precision, gain_of, judge, mismatch, scores
from statescan.goldens.gains import encode

NAN = np.nan


def table(got, want, how, **more):
    return mismatch(np.array(got, np.float32), Expected(np.array(want, np.float32), how, **more)).tolist()


def test_equal_compares_numbers_and_nan_with_nan():
    assert table([0.0, NAN, 1, NAN, np.inf], [-0.0, NAN, 2, 1, np.inf], "equal") == [False, False, True, True, False]


def test_bits_compares_bytes():
    assert table([0.0, 1], [-0.0, 1], "bits") == [True, False]
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert mismatch(payload, Expected(np.array([NAN], np.float32), "bits")).all()
    assert not mismatch(payload, Expected(np.array([NAN], np.float32), "equal")).any()


def test_either_is_one_of_the_alternatives_as_a_whole():
    other = np.array([3, 4], np.float32)
    assert table([3, 4], [1, 2], "equal", either=(other,)) == [False, False]
    assert any(table([1, 4], [1, 2], "equal", either=(other,)))


def test_finite_needs_no_expectation():
    assert mismatch(np.array([1, np.inf, NAN]), Expected(None, "finite")).tolist() == [False, True, True]


GAIN = {part: encode(np.full((1, 4, 2), 1.0)) for part in ("op", "acc", "exp")}
WANT = np.arange(8.0).reshape(1, 4, 2)


@pytest.mark.parametrize(("operand", "off", "passes"), [
    ("f32", 2.0**-22, True), ("f32", 2.0**-18, False), ("bf16", 2.0**-7, True), ("bf16", 2.0**-2, False),
    ("tf32", 2.0**-10, True), ("tf32", 2.0**-5, False),
])  # fmt: skip
def test_the_score_follows_the_declared_operands(operand, off, passes):
    got = (WANT + off).astype(np.float32)
    element, token = scores(got, WANT, GAIN, Precision(operand), (2,))
    assert (max(element.max(), token.max()) <= 1) == passes


def test_one_bad_token_is_not_averaged_away():
    got = WANT.copy()
    got[0, 2] += 2.0**-18
    _, token = scores(got.astype(np.float32), WANT, GAIN, Precision("f32"), (2,))
    assert token[0, 2, 0] > 1
    assert token[0, 0, 0] == 0


def test_no_gain_allows_one_rounding_and_no_more():
    none = {part: encode(np.zeros((1, 4, 2))) for part in ("op", "acc", "exp")}
    exact = WANT.astype(np.float32)
    assert scores(exact, WANT, none, Precision(), (2,))[0].max() == 0
    assert scores(np.nextafter(exact, np.float32(99)), WANT, none, Precision(), (2,))[0].max() > 1
    assert gain_of(np.array([-128, 0, 2], np.int8)).tolist() == [0, 1, 2]


def _call(x) -> Call:
    pool = np.zeros((2, 1, 4), np.float32)
    tensors = {"x": x, "weight": np.ones((1, 4), np.float32), "conv_pool": pool, "read_slots": np.array([1])}
    return Call("causal_conv1d_update", {"activation": None}, tensors, (Plan("y", "f32", (1, 1, 1)),))


def test_memory_between_strides_counts_as_touched():
    wide = strided(np.ones((1, 1, 2), np.float32))
    call = _call(wide)
    untouched = {f"after.{name}": array for name, array in call.tensors.items()}
    expected = {"y": Expected(np.ones((1, 1, 1)), "equal"), "conv_pool": Expected(None, "differs")}
    assert judge(call, Reply("ok", {"y": np.ones((1, 1, 1), np.float32), **untouched}), expected, Precision()).passed
    after = strided(np.ones((1, 1, 2), np.float32))
    span(after)[1] = 7  # the gap between the two elements
    reply = Reply("ok", {"y": np.ones((1, 1, 1), np.float32), **untouched, "after.x": after})
    verdict = judge(call, reply, expected, Precision())
    assert verdict.status == "fail.touched"
    assert "between its strides" in verdict.message


def test_statuses_come_in_order():
    call = _call(np.ones((1, 1, 1), np.float32))
    after = {f"after.{name}": array for name, array in call.tensors.items()}
    expected = {"y": Expected(np.ones((1, 1, 1)), "equal"), "conv_pool": Expected(None, "differs")}

    def status(y, **more):
        reply = Reply("ok", {"y": np.array([[[y]]], np.float32), **after, **more})
        return judge(call, reply, expected, Precision()).status

    assert status(1) == "pass"
    assert status(2) == "fail.value"
    assert status(NAN) == "fail.nonfinite"
    assert status(2, **{"after.weight": np.zeros((1, 4), np.float32)}) == "fail.touched"
    assert judge(call, Reply("timeout"), expected, Precision()).status == "timeout"
    assert judge(call, Reply("unsupported", message="bias"), expected, Precision()).status == "error"
