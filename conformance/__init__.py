"""The conformance suite: golden vectors run against anyone's kernels, in their own process, judged place by place."""

from statescan.conformance.adapter import Adapter, Unsupported
from statescan.conformance.record import record

__all__ = ["Adapter", "Unsupported", "record"]
