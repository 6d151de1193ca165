"""Tiny implementations that behave badly, each in one way: what the runner is tested with."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from statescan.conformance.adapter import Adapter, Unsupported
from statescan.reference import conv

FEATURES = ["act.none", "act.silu", "bias", "width:4", "window.W", "slot.pool", "slot.negative", "slot.split",
            "tokens.many", "packed.cu", "checks.values", "checks.shape", "padded_rows", "state.in", "state.out",
            "empty_segments", "strided", "repeatable"]  # fmt: skip


def _adapter(name: str, update) -> Adapter:
    adapter = Adapter(name, "0")
    adapter.op("causal_conv1d_update", features=FEATURES, operand="f64")(update)
    return adapter


def _right(**given):
    return conv.causal_conv1d_update(**given)


def _crashes(x, **given):
    if x.shape[0] == 3:
        os._exit(7)
    return _right(x=x, **given)


def _aborts(x, **given):
    if x.shape[0] == 3:
        os.abort()
    return _right(x=x, **given)


def _hangs(x, **given):
    if x.shape[0] == 3:
        time.sleep(60)
    return _right(x=x, **given)


def _prints(**given):
    print("a library that talks")
    os.write(1, b"and one that does not ask Python\n")
    sys.stderr.write("and complains\n")
    return _right(**given)


def _wrong_shape(x, **given):
    return _right(x=x, **given)[:, :, :1]


def _wrong_type(x, **given):
    return _right(x=x, **given).astype(np.float64)


def _unwritten(x, **given):
    y = _right(x=x, **given)
    if y.shape[0] > 1:
        from statescan.conformance.transport import SENTINEL_BITS
        from statescan.goldens.tensors import NAMES

        last = y[-1:]
        last.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[y.itemsize])[...] = SENTINEL_BITS[NAMES[y.dtype]]
    return y


def _writes_input(x, **given):
    y = _right(x=x, **given)
    x[...] = 0
    return y


def _writes_guard(x, conv_pool, **given):
    y = _right(x=x, conv_pool=conv_pool, **given)
    conv_pool[0] = 0
    return y


def _reversed_taps(weight, **given):
    return _right(weight=weight[:, ::-1], **given)


def _claims_then_refuses(**given):
    raise Unsupported("bias")


def _escapes(**given):
    raise RuntimeError("\x1b[31mred\x1b[0m <b>bold</b>")


def _ignores_tokens(num_tokens=None, intermediate_windows=None, num_accepted=None, **given):
    return _right(**given)


right = _adapter("right", _right)
crashes = _adapter("crashes", _crashes)
aborts = _adapter("aborts", _aborts)
hangs = _adapter("hangs", _hangs)
prints = _adapter("prints", _prints)
wrong_shape = _adapter("wrong_shape", _wrong_shape)
wrong_type = _adapter("wrong_type", _wrong_type)
unwritten = _adapter("unwritten", _unwritten)
writes_input = _adapter("writes_input", _writes_input)
writes_guard = _adapter("writes_guard", _writes_guard)
reversed_taps = _adapter("reversed_taps", _reversed_taps)
claims_then_refuses = _adapter("claims_then_refuses", _claims_then_refuses)
escapes = _adapter("escapes", _escapes)
ignores_tokens = _adapter("ignores_tokens", _ignores_tokens)
absent = Adapter("absent", missing="its package is not installed")
plain = {"causal_conv1d_update": conv.causal_conv1d_update}


def _without_windows(name: str, features: list[str]) -> Adapter:
    """A packed convolution that returns None for its final windows."""
    adapter = Adapter(name, "0")

    @adapter.op("causal_conv1d", features=features, operand="f64")
    def convolve(**given):
        return conv.causal_conv1d(**given)[0], None

    return adapter


windowless = _without_windows("windowless", [word for word in FEATURES if word != "state.out"])
forgets_windows = _without_windows("forgets_windows", FEATURES)
