"""Boundaries of a pack as a kernel finds them: every row counts for itself how many segments ended before it.

Each fault is one comparison with its id, at the place where its mechanism sits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
from packaging.version import Version

from statescan.reference import packed
from statescan.reference.arrays import Array
from statescan.reference.host.rules import check_offsets
from statescan.reference.packed import Support
from statescan.spec.contract import ContractError, PackedSeqParams, PackingError

FAULTS: tuple[str, ...] = (
    "actual-offsets-win", "ids-count-from-one", "ids-of-64-bits", "tail-joins-last-segment",
    "tail-id-added-when-full", "decreasing-offsets-clamped", "offsets-past-the-pack-accepted",
    "float-offsets-truncated", "length-from-last-offset", "length-from-longest-segment",
    "empty-segment-loses-its-id", "stale-ids-of-params-win", "pack-needs-total-tokens",
    "gate-off-by-one-version", "gate-message-differs", "version-compared-as-text", "scan-package-asked-too",
    "scan-checked-first", "training-minimums-for-inference", "one-class-for-all", "message-without-label",
)  # fmt: skip


def build(fault: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """The operations of this module, right or with one fault."""
    model = PackedModel(fault)
    return {
        "get_cu_seqlens": model.get_cu_seqlens,
        "build_packed_seq_idx": model.build_packed_seq_idx,
        "check_fla_sequence_packing_support": model.check_fla_sequence_packing_support,
        "check_mamba_sequence_packing_support": model.check_mamba_sequence_packing_support,
    }


@contextmanager
def refusals(fault: str | None) -> Iterator[None]:
    """Let refusals pass as they are, or as a faulty interface shows them."""
    try:
        yield
    except ContractError as error:
        if fault == "one-class-for-all":
            raise ValueError(str(error)) from None
        if fault == "message-without-label":
            raise type(error)(re.sub(r" \([A-Z]+-\d+\)$", "", str(error))) from None
        raise


def lenient_offsets(fault: str | None, offsets: Any, total: int | None = None) -> Any:
    """Offsets as a host that repairs what it should refuse hands them on; unchanged under every other fault."""
    if offsets is None:
        return None
    array = np.asarray(offsets)
    if fault == "decreasing-offsets-clamped" and array.ndim == 1:
        return np.maximum.accumulate(array)
    if fault == "offsets-past-the-pack-accepted" and total is not None:
        return np.minimum(array, total)
    if fault == "float-offsets-truncated" and array.dtype.kind == "f":
        return array.astype(np.int64)
    return array


class PackedModel:
    """The packing helpers with at most one fault."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault

    def get_cu_seqlens(self, packed_seq_params: PackedSeqParams, *, check: bool | None = None) -> Array:
        """The offsets that count (PACK-1)."""
        with refusals(self.fault):
            return self._offsets(packed_seq_params)

    def build_packed_seq_idx(
        self, packed_seq_params: PackedSeqParams, total_tokens: int, *, check: bool | None = None
    ) -> Array:
        """The segment id of every row: the number of segments that ended at or before it (PACK-2, PACK-3)."""
        with refusals(self.fault):
            offsets = self._offsets(packed_seq_params)
            if isinstance(total_tokens, bool) or not isinstance(total_tokens, (int, np.integer)) or total_tokens < 0:
                raise PackingError(f"total_tokens={total_tokens!r}: a whole number of at least 0 (PACK-5)")
            offsets = np.asarray(lenient_offsets(self.fault, offsets, int(total_tokens)))
            check_offsets([int(offset) for offset in offsets], int(total_tokens))
        if self.fault == "stale-ids-of-params-win" and packed_seq_params.seq_idx is not None:
            return np.asarray(packed_seq_params.seq_idx)
        if self.fault == "pack-needs-total-tokens" and packed_seq_params.total_tokens is None:
            return np.zeros((1, total_tokens), np.int32)
        ids = self._ids(offsets, self._length(offsets, int(total_tokens)))
        return ids[None].astype(np.int64 if self.fault == "ids-of-64-bits" else np.int32)

    def _offsets(self, params: PackedSeqParams) -> Array:
        """The chosen offsets, checked by the reference's own rules."""
        first, second = params.cu_seqlens_q_padded, params.cu_seqlens_q
        if self.fault == "actual-offsets-win":
            first, second = second, first
        chosen = lenient_offsets(self.fault, second if first is None else first)
        return packed.get_cu_seqlens(PackedSeqParams(cu_seqlens_q=chosen))

    def _length(self, offsets: Array, total: int) -> int:
        if self.fault == "length-from-last-offset":
            return int(offsets[-1])
        if self.fault == "length-from-longest-segment":
            return int(np.diff(offsets).max(initial=0))
        return total

    def _ids(self, offsets: Array, total: int) -> Array:
        ends = offsets[1:]
        if self.fault == "empty-segment-loses-its-id":
            ends = ends[np.diff(offsets) > 0]
        ids: Array = np.asarray(np.count_nonzero(np.arange(total)[:, None] >= ends, axis=1))
        if self.fault == "ids-count-from-one":
            return np.add(ids, 1)
        if self.fault == "tail-joins-last-segment":
            return np.asarray(np.minimum(ids, max(len(ends) - 1, 0)))
        if self.fault == "tail-id-added-when-full":
            ids[max(total - 1, 0) :] = len(ends)
        return ids

    def check_fla_sequence_packing_support(self, *, check: bool | None = None) -> Support:
        """(True, None), or (False, reason): causal_conv1d >= 1.4.0 and nothing else (CAP-1, CAP-2)."""
        purpose = "" if self.fault == "gate-message-differs" else " for packed sequences"
        found = self._at_least("causal_conv1d", "1.4.0", purpose)
        if self.fault == "scan-package-asked-too" and found[0]:
            return self._at_least("mamba_ssm", "2.0.0")
        return found

    def check_mamba_sequence_packing_support(
        self, *, for_inference_not_training: bool = True, check: bool | None = None
    ) -> Support:
        """The stricter pair, convolution first (CAP-3)."""
        if self.fault == "training-minimums-for-inference":
            for_inference_not_training = False
        minimums = [("causal_conv1d", "1.5.3.post1" if for_inference_not_training else "1.4.0"),
                    ("mamba_ssm", "2.2.6.post3" if for_inference_not_training else "2.0.0")]  # fmt: skip
        if self.fault == "scan-checked-first":
            minimums.reverse()
        missing = [found for found in (self._at_least(*minimum) for minimum in minimums) if not found[0]]
        return missing[0] if missing else (True, None)

    def _at_least(self, package: str, minimum: str, purpose: str = "") -> Support:
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = "0"
        enough = Version(installed) >= Version(minimum)
        if self.fault == "gate-off-by-one-version":
            enough = Version(installed) > Version(minimum)
        if self.fault == "version-compared-as-text":
            enough = installed >= minimum
        return (True, None) if enough else (False, f"{package} >= {minimum} is required{purpose}")
