"""What a released GPU package needs before it runs on a CPU: Triton's interpreter, put right where it is wrong.

Everything here holds for the whole process, so the worker of one adapter calls `prepare` and nothing else does. No line
of a peer is changed, and where there is a GPU none of Triton is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

Handle = Any
"""A value of the interpreter: `data`, a NumPy array, and `dtype`, Triton's type; bfloat16 is kept as uint16."""


def missing(package: str, *modules: str) -> str:
    """Why `package` cannot be run: it, or a module it stands on, is not installed; empty if all are there."""
    absent = next((name for name in modules if find_spec(name) is None), "")
    return f"{package if absent == modules[0] else absent} is not installed: run `make peers`" if absent else ""


@cache
def prepare() -> str:
    """Make the process ready for a Triton package, once; the device to run it on. Before anything imports triton."""
    import torch

    show_unwritten_memory()
    if torch.cuda.is_available():
        return "cuda"
    # Triton looks at this when it is imported: its own library's functions, once made for a GPU, cannot run here.
    os.environ["TRITON_INTERPRET"] = "1"
    _try_one_configuration()
    _compute_bfloat16()
    _count_as_triton()
    look_once()
    return "cpu"


def show_unwritten_memory() -> None:
    """Let fresh memory of PyTorch hold NaN, so that an element nobody writes is seen every time and not by chance."""
    import torch

    # With this, `fill_uninitialized_memory` (on unless switched off) takes effect. use_deterministic_algorithms(True,
    # warn_only=True) is the same, and imports a compiler first, which takes seconds.
    torch.set_deterministic_debug_mode("warn")


def look_once() -> None:
    """Let a device function search the language for what to interpret in its first call only.

    The kernel that calls it has searched already, and most of a run's time would go into doing so again.
    """
    from triton.runtime.interpreter import InterpretedFunction

    original: Callable[..., Any] = InterpretedFunction.__call__
    seen: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in seen:
            return self.rewrite()(*args, **kwargs)
        seen.add(id(self))
        return original(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def _try_one_configuration() -> None:
    """The autotuner times its configurations on an active GPU driver, and fails without one; a single one is not timed.

    Configurations differ in tile sizes and warps, which no result may depend on. The last one tends to have the largest
    tiles, which an interpreter is through with soonest: it pays by the operation.
    """
    from triton.runtime.autotuner import Autotuner

    original: Callable[..., None] = Autotuner.__init__

    def keep_last(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **more: Any) -> None:
        original(self, fn, arg_names, list(configs)[-1:], *rest, **more)

    Autotuner.__init__ = keep_last


class Counter(int):
    """A loop's counter as a compiled kernel sees it: a number that can be asked for another integer type."""

    def to(self, *_: Any, **__: Any) -> Counter:
        """Itself: Python's integers have no width."""
        return self


def _count_as_triton() -> None:
    """Loops of kernels count in bare integers, which have no `to`; let them count in `Counter`s.

    A kernel's module gets whatever names of the interpreter's own module it has not, so the name is given there.
    """
    from triton.runtime import interpreter

    def counters(*bounds: Any) -> list[Counter]:
        return [Counter(i) for i in range(*(bound.__index__() for bound in bounds))]

    interpreter.__dict__["range"] = counters


def _compute_bfloat16() -> None:
    """The interpreter calculates with the bit patterns of bfloat16 as if they were integers, and casts by cutting off.

    The one builder object that all kernels share gets a class that computes in float32 and rounds to nearest even, as
    a GPU does; so do sums along an axis, which go past the builder.
    """
    from triton.runtime import interpreter

    interpreter.interpreter_builder.__class__ = _builder(interpreter)
    _add_up_bfloat16(interpreter.ReduceOps)


def _add_up_bfloat16(reductions: Any) -> None:
    """Give sums of bfloat16 a method that widens, adds, and rounds once, where a GPU rounds after each addition or less
    often."""
    import triton.language as tl

    original: Callable[..., Any] = reductions.sum

    def add_up(self: Any, given: Any) -> Any:
        if given.dtype.scalar != tl.bfloat16:
            return original(self, given)
        total = np.sum(widen(given.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(round_off(total), given.dtype)

    reductions.sum = add_up


def _builder(interpreter: Any) -> type:
    import triton.language as tl

    base, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def is_narrow(value: Handle) -> bool:
        return bool(value.dtype.scalar == tl.bfloat16)

    def wide(value: Handle) -> Handle:
        return handle(widen(value.data), tl.float32) if is_narrow(value) else value

    def narrow(value: Handle) -> Handle:
        # a comparison gives truth values, and stays as it is but for its name
        data = value.data if value.data.dtype == np.bool_ else round_off(value.data)
        return handle(data, tl.bfloat16)

    class Builder(base):  # type: ignore[misc, valid-type]
        """The interpreter's operations, bfloat16 included."""

        def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
            # otherwise: float32 -> bfloat16 drops 16 bits, integers and float16 are not converted at all
            if dst_type.scalar != tl.bfloat16:
                return super().cast_impl(wide(src), dst_type)
            return src if is_narrow(src) else handle(round_off(src.data.astype(np.float32)), tl.bfloat16)

        def create_fp_to_fp(self, src: Handle, dst_type: Any, rounding_mode: Any) -> Handle:
            # otherwise: a half is rounded up, and a carry out of the significand is lost
            if is_narrow(src) or dst_type.scalar == tl.bfloat16:
                return self.cast_impl(src, dst_type)
            return super().create_fp_to_fp(src, dst_type, rounding_mode)

        def binary_op(self, lhs: Handle, rhs: Handle, op: Any) -> Handle:
            # otherwise: 1.0 + 1.0 adds 0x3f80 to itself; comparisons order negative numbers above positive ones
            if not is_narrow(lhs):
                return super().binary_op(lhs, rhs, op)
            return narrow(super().binary_op(wide(lhs), wide(rhs), op))

        def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
            done = super().create_fma(wide(x), wide(y), wide(z))
            return narrow(done) if is_narrow(z) else done

        def create_dot(self, a: Handle, b: Handle, d: Handle, *rest: Any) -> Handle:
            # otherwise: a product of bit patterns, wrong by ten orders of magnitude and silent
            return super().create_dot(wide(a), wide(b), d, *rest)

        def get_bf16(self, value: float) -> Handle:
            # otherwise: no constant of this type, and a negation, which subtracts from 0, fails
            return handle(round_off(np.array([value], np.float32)), tl.bfloat16)

    return Builder


def widen(patterns: Any) -> Any:
    """Bit patterns of bfloat16 as float32."""
    return (np.asarray(patterns, np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_off(values: Any) -> Any:
    """float32 as bit patterns of bfloat16, rounded to nearest even; every NaN becomes one."""
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(np.shape(values))
    with np.errstate(over="ignore"):  # only NaN patterns can wrap around
        rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
