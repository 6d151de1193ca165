"""Segment boundaries of a pack: which offsets count, the id of every row, and what a kernel needs installed.

Public source of names and behaviour: Megatron-Core, core.ssm.packed_seq_helpers,
https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.ssm.packed_seq_helpers.html
"""

from __future__ import annotations

import itertools
from importlib import metadata

import numpy as np
from packaging.version import Version

from statescan.reference.arrays import Array, dtype_name
from statescan.reference.host.rules import check_offsets
from statescan.spec.contract import INDEX_TYPES, PackedSeqParams, PackingError

Support = tuple[bool, "str | None"]


def get_cu_seqlens(packed_seq_params: PackedSeqParams, *, check: bool | None = None) -> Array:
    """The offsets that count: the padded ones where given, else the actual ones (PACK-1).

    Returns integer offsets `[N+1]`. Raises PackingError where neither is given or they break PACK-4.

    >>> get_cu_seqlens(PackedSeqParams(cu_seqlens_q=[0, 5, 7], cu_seqlens_q_padded=[0, 8, 12])).tolist()
    [0, 8, 12]
    """
    padded = packed_seq_params.cu_seqlens_q_padded
    chosen = packed_seq_params.cu_seqlens_q if padded is None else padded
    if chosen is None:
        raise PackingError("cu_seqlens_q=None and cu_seqlens_q_padded=None: offsets are needed (PACK-12)")
    offsets = np.asarray(chosen)
    if offsets.ndim != 1:
        raise PackingError(f"cu_seqlens has shape {list(offsets.shape)}: [N+1] is needed (PACK-4)")
    if dtype_name(offsets) not in INDEX_TYPES:
        raise PackingError(f"cu_seqlens has type {dtype_name(offsets)}: integers (i32 or i64) are needed (PACK-4)")
    check_offsets([int(offset) for offset in offsets])
    return offsets


def build_packed_seq_idx(
    packed_seq_params: PackedSeqParams, total_tokens: int, *, check: bool | None = None
) -> Array:
    """The ordinal of each row's segment, int32 `[1, total_tokens]` (PACK-2); rows past the last offset get the next
    free ordinal (PACK-3), and an empty segment uses its ordinal up (PACK-11).

    `total_tokens` is the length the kernel consumes, after any parallel gather (PACK-5). Raises PackingError (PACK-4).

    >>> build_packed_seq_idx(PackedSeqParams(cu_seqlens_q=[0, 2, 2, 3]), 5).tolist()
    [[0, 0, 2, 3, 3]]
    """
    offsets = [int(offset) for offset in get_cu_seqlens(packed_seq_params)]
    if isinstance(total_tokens, bool) or not isinstance(total_tokens, (int, np.integer)) or total_tokens < 0:
        raise PackingError(f"total_tokens={total_tokens!r}: a whole number of at least 0 (PACK-5)")
    check_offsets(offsets, int(total_tokens))
    ids = np.full((1, total_tokens), len(offsets) - 1, np.int32)
    for segment, (start, end) in enumerate(itertools.pairwise(offsets)):
        ids[0, start:end] = segment
    return ids


def unpack_segments(
    shape: tuple[int, ...], seq_idx: Array | None, cu_seqlens: Array | None, entering: Array | None
) -> list[tuple[int, slice]]:
    """Each segment of a checked call as its batch row and its tokens, empty segments included (PACK-11).

    `shape` starts with (batch, tokens). Offsets decide where given; under ids `[1, T]` there are as many segments as
    rows of `entering`, else up to the largest id (PACK-14); with neither each batch row is one segment.

    >>> unpack_segments((1, 5), np.array([[0, 0, 2, 2, -1]]), None, None)
    [(0, slice(0, 2, None)), (0, slice(2, 2, None)), (0, slice(2, 4, None))]
    """
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
    elif seq_idx is not None:
        ids = seq_idx[0].tolist()
        count = max(ids, default=-1) + 1 if entering is None else entering.shape[0]
        # ids do not decrease: a segment is the run of its id, found between the ids below it and the ids up to it
        bounds = [len([i for i in ids if 0 <= i < n]) for n in range(count + 1)]
    else:
        return [(row, slice(0, shape[1])) for row in range(shape[0])]
    return [(0, slice(start, end)) for start, end in itertools.pairwise(bounds)]


def check_fla_sequence_packing_support(*, check: bool | None = None) -> Support:
    """Whether packed sequences can run through the FLA-backed mixers: (True, None) or (False, reason) (CAP-1, CAP-2).

    The one shared need is a convolution that resets at boundaries; the scan package plays no part.
    """
    return _at_least("causal_conv1d", "1.4.0", " for packed sequences")


def check_mamba_sequence_packing_support(
    *, for_inference_not_training: bool = True, check: bool | None = None
) -> Support:
    """The stricter pair of minimums that Mamba2 needs, convolution first (CAP-3)."""
    conv, scan = ("1.5.3.post1", "2.2.6.post3") if for_inference_not_training else ("1.4.0", "2.0.0")
    ok, reason = _at_least("causal_conv1d", conv)
    return (ok, reason) if not ok else _at_least("mamba_ssm", scan)


def _at_least(package: str, minimum: str, purpose: str = "") -> Support:
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = "0"
    if Version(installed) >= Version(minimum):
        return True, None
    return False, f"{package} >= {minimum} is required{purpose}"
