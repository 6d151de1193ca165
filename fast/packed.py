"""Segment boundaries of a pack on the device: which offsets count, the id of every row, and what must be installed.

Names, arguments and meaning are those of `statescan.reference.packed`. Offsets stay where they are: on CUDA nothing is
copied to the host unless `check=True` asks for it.
"""

from __future__ import annotations

from importlib import metadata
from numbers import Integral

import torch
from packaging.version import Version
from torch import Tensor

from statescan.fast.checks import NAMES
from statescan.reference.host.rules import check_offsets
from statescan.spec.contract import INDEX_TYPES, PackedSeqParams, PackingError

Support = tuple[bool, "str | None"]


def get_cu_seqlens(packed_seq_params: PackedSeqParams, *, check: bool | None = None) -> Tensor:
    """The offsets that count: the padded ones where given, else the actual ones (PACK-1).

    Returns integer offsets `[N+1]`. Raises PackingError where neither is given or they break PACK-4.

    >>> get_cu_seqlens(PackedSeqParams(cu_seqlens_q=[0, 5, 7], cu_seqlens_q_padded=[0, 8, 12])).tolist()
    [0, 8, 12]
    """
    return _offsets(packed_seq_params, None, check)


def build_packed_seq_idx(
    packed_seq_params: PackedSeqParams, total_tokens: int, *, check: bool | None = None
) -> Tensor:
    """The ordinal of each row's segment, int32 `[1, total_tokens]` (PACK-2); rows past the last offset get the next
    free ordinal (PACK-3), and an empty segment uses its ordinal up (PACK-11).

    `total_tokens` is the length the kernel consumes, after any parallel gather (PACK-5). Raises PackingError (PACK-4).

    >>> build_packed_seq_idx(PackedSeqParams(cu_seqlens_q=[0, 2, 2, 3]), 5).tolist()
    [[0, 0, 2, 3, 3]]
    """
    whole = isinstance(total_tokens, (Integral, torch.SymInt)) and not isinstance(total_tokens, bool)
    if not whole or total_tokens < 0:
        _offsets(packed_seq_params, None, check)  # offsets are the first thing that can be wrong
        raise PackingError(f"total_tokens={total_tokens!r}: a whole number of at least 0 (PACK-5)")
    offsets = _offsets(packed_seq_params, total_tokens, check).contiguous()
    tokens = torch.arange(total_tokens, dtype=offsets.dtype, device=offsets.device)
    # a row's ordinal counts the offsets up to it, less the 0 at their start
    return (torch.searchsorted(offsets, tokens, right=True, out_int32=True) - 1)[None]


def _offsets(packed_seq_params: PackedSeqParams, total: int | None, check: bool | None) -> Tensor:
    padded = packed_seq_params.cu_seqlens_q_padded
    chosen = packed_seq_params.cu_seqlens_q if padded is None else padded
    if chosen is None:
        raise PackingError("cu_seqlens_q=None and cu_seqlens_q_padded=None: offsets are needed (PACK-12)")
    offsets = torch.as_tensor(chosen)
    if offsets.ndim != 1:
        raise PackingError(f"cu_seqlens has shape {list(offsets.shape)}: [N+1] is needed (PACK-4)")
    name = NAMES.get(offsets.dtype, str(offsets.dtype).removeprefix("torch."))
    if name not in INDEX_TYPES and offsets.numel():
        raise PackingError(f"cu_seqlens has type {name}: integers (i32 or i64) are needed (PACK-4)")
    if check or not offsets.is_cuda or not offsets.numel():
        check_offsets(offsets.tolist(), total)
    return offsets


def ids_to_offsets(seq_idx: Tensor, segments: int) -> Tensor:
    """Offsets `[segments + 1]` of the runs of ids `[1, T]`, which do not decrease before the -1 at their end.

    >>> ids_to_offsets(torch.tensor([[0, 0, 2, 2, -1]]), 3).tolist()
    [0, 2, 2, 4]
    """
    ids = seq_idx[0]
    ids = torch.where(ids < 0, torch.iinfo(ids.dtype).max, ids)
    return torch.searchsorted(ids, torch.arange(segments + 1, dtype=ids.dtype, device=ids.device), out_int32=True)


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
