"""fla-core's naive references in PyTorch: the recurrences as loops over tokens, and the gates.

The delta rule and its product want as many query heads as value heads. Only the product takes offsets: elsewhere a row
of a pack is a call of its own. All compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from statescan.conformance.adapter import Adapter, Unsupported
from statescan.conformance.adapters import interpreter
from statescan.conformance.adapters.fla_delta import function
from statescan.conformance.adapters.slots import Tensor, entering, padding, silence, store

Function = Callable[..., Any]

MISSING = interpreter.missing("fla-core", "fla", "torch", "triton")
VERSION = "" if MISSING else interpreter.metadata_version("fla-core")
