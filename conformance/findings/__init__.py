"""Faults of released packages that were found with this suite; one script shows one fault in a few numbers.

    python conformance/findings/fla_pack_tail_uninitialised.py

A script prints what is expected and what comes out. It exits with 1 while the fault is there, with 0 where it is gone,
with 3 where the package is not installed, and with 2 where the script itself fails. `spec/findings.md` explains each.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from statescan.conformance.adapters import interpreter

CURED, FAULTY, BROKEN, ABSENT = 0, 1, 2, 3
PINNED = {"fla-core": "0.6.0", "causal-conv1d": "1.7.0", "mamba-ssm": "2.3.2.post1", "transformers": "5.24.0"}
"""The releases the findings are about."""

LARGE = ("fla_entering_window_offset_32_bit", "causal_conv1d_varlen_states_offset_32_bit")
"""Scripts that need 9 GB of memory."""

_EXTENSION = "causal_conv1d_cuda"
_MODULES = {
    "fla-core": "fla",
    "causal-conv1d": "causal_conv1d",
    "mamba-ssm": "mamba_ssm",
    "transformers": "transformers",
}
_PREPARED_BY_ADAPTER = ("mamba-ssm", "transformers")
"""The one is imported past its compiled extension, the other apart from the kernel packages it would use."""

Reproduction = Callable[[], tuple[Any, Any]]
"""Returns what is expected and what came out, as plain numbers."""


def main(
    package: str, reproduce: Reproduction, *, also: str = "", or_refused: bool = False, compiled: bool = False
) -> NoReturn:
    """Run a reproduction on the GPU, or interpreted where there is none; print both sides, and exit as said above.

    `also`: a second package the reproduction calls. `or_refused`: a call that raises is right as well. `compiled`:
    causal-conv1d's own extension is needed.
    """
    absent = interpreter.missing(package, _MODULES[package], "torch", "triton")
    if also and not absent:
        absent = interpreter.missing(also, _MODULES[also])
    if compiled and not absent and not _has_extension():
        absent = f"{package} is installed without its compiled extension"
    if absent:
        print(absent)
        raise SystemExit(ABSENT)
    _prepare(package)
    print(f"{package} {metadata.version(package)}")
    try:
        expected, got = reproduce()
    except Exception as error:
        if not or_refused:
            traceback.print_exc()
        print("refused:", error)
        raise SystemExit(CURED if or_refused else BROKEN) from error
    print(f"expected: {expected}{' or a refusal' if or_refused else ''}\ngot:      {got}")
    # by their text, because nan is not equal to itself
    raise SystemExit(CURED if repr(expected) == repr(got) else FAULTY)


def _prepare(package: str) -> None:
    import torch

    torch.set_default_device(interpreter.prepare())
    if package in _PREPARED_BY_ADAPTER:
        import_module(f"statescan.conformance.adapters.{_MODULES[package]}")
    if not _has_extension():  # causal-conv1d imports it first of all, also where nothing calls it
        sys.modules.setdefault(_EXTENSION, ModuleType(_EXTENSION))


def _has_extension() -> bool:
    stand_in = sys.modules.get(_EXTENSION)
    return find_spec(_EXTENSION) is not None if stand_in is None else hasattr(stand_in, "causal_conv1d_fwd")
