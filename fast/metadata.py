"""The arrays of a step in device memory that stays: what a captured graph reads, filled for each step (META).

The arrays are made by `statescan.reference.host.metadata`; here is their one buffer on the device. Sizes are
the padded ones of a graph, so that every array keeps its place for good.

    arrays = StepArrays(decode_requests=64, prefill_requests=4, tokens=2048, chunk_size=64)
    arrays.fill(decode_slots=[7, 2], lengths=[300, 5], slots=[0, 9])
    graph.replay()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from statescan.reference.host.metadata import (
    PREFILL_NAMES,
    check_room,
    decode_metadata,
    pad,
    prefill_metadata,
)
from statescan.spec.contract import ShapeError

ALIGNMENT = 16
"""Bytes: kernels are compiled for pointers that are divisible by it."""
Arrays = dict[str, npt.NDArray[Any]]


class StepArrays:
    """Serves as `context.mamba_metadata`: every array of a step as an attribute, a view of one device buffer.

    Padded sizes: decode_requests and prefill_requests, `tokens` of prefill, `snapshots` kept. chunk_size and
    num_householder as the mixers state them (`ssm_chunking`), d_conv as theirs. With `resume` there is also
    `num_accepted` int32 `[decode_requests]`: the entry that each request of a verify step resumes from, -1 for its
    slot (SPEC-3). An attribute is a tensor of the same name, type, shape and values as the host's.
    """

    cu_seqlens: Tensor
    batch_indices_prefill: Tensor
    seq_idx: Tensor
    cu_chunk_seqlens: Tensor
    last_chunk_indices: Tensor
    seq_idx_for_varlen: Tensor
    conv_seq_idx: Tensor
    conv_seq_start: Tensor
    device_decode_prefill: Tensor
    intermediate_chunk_indices: Tensor
    intermediate_abs_positions: Tensor
    intermediate_real_count: Tensor
    chunk_indices: Tensor
    chunk_indices_dp: Tensor
    chunk_offsets: Tensor
    batch_indices_decode: Tensor
    num_accepted: Tensor | None = None

    def __init__(
        self, *, decode_requests: int = 0, prefill_requests: int = 0, tokens: int = 0, chunk_size: int = 64,
        num_householder: int = 1, d_conv: int = 4, snapshots: int = 0, resume: bool = False, device: Any = "cuda",
    ) -> None:  # fmt: skip
        self.decode_requests, self.resume = decode_requests, resume
        self.sizes: dict[str, Any] = {
            "padded_requests": prefill_requests, "padded_tokens": tokens, "chunk_size": chunk_size,
            "snapshot_capacity": snapshots, "d_conv": d_conv, "num_householder": max(1, num_householder),
        }  # fmt: skip
        empty = self.on_host()
        self.places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, array in empty.items():
            self.places[name] = (end, end + array.nbytes)
            end = -(-(end + array.nbytes) // ALIGNMENT) * ALIGNMENT
        self.buffer = torch.empty(end, dtype=torch.uint8, device=device)
        for name, array in empty.items():
            first, last = self.places[name]
            kind = torch.int64 if array.dtype == np.int64 else torch.int32
            setattr(self, name, self.buffer[first:last].view(kind).view(array.shape))
        self.fill()

    def on_host(
        self, decode_slots: Sequence[int] = (), lengths: Sequence[int] = (), slots: Sequence[int] = (),
        snapshot_rows: Sequence[int] = (), snapshot_offsets: Sequence[int] = (), drafts: int = 0,
        num_accepted: Sequence[int] | None = None,
    ) -> Arrays:  # fmt: skip
        """The arrays of a step by name, on the host."""
        made = prefill_metadata(lengths, slots, snapshot_rows, snapshot_offsets, **self.sizes,
                                decode_tokens=len(decode_slots) * (1 + drafts))  # fmt: skip
        found = dict(zip(PREFILL_NAMES, made, strict=True))
        found["batch_indices_decode"] = decode_metadata(decode_slots, self.decode_requests)
        if self.resume:
            found["num_accepted"] = pad(np.array([] if num_accepted is None else num_accepted, np.int32),
                                        self.decode_requests, -1)  # fmt: skip
        return found

    def fill(
        self, decode_slots: Sequence[int] = (), lengths: Sequence[int] = (), slots: Sequence[int] = (),
        snapshot_rows: Sequence[int] = (), snapshot_offsets: Sequence[int] = (), drafts: int = 0,
        num_accepted: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Put a step into the device's arrays, behind whatever the current stream has to do, without waiting for it.

        Slots of the real decode requests, with 1 + drafts tokens each; lengths and slots of the real pieces; the piece
        and the offset in it of each snapshot, ascending; num_accepted of the real decode requests. Raises SlotError,
        PackingError, ShapeError and CapacityError as the host's functions do; nothing is changed then.
        """
        if num_accepted is not None:
            if not self.resume or len(num_accepted) != len(decode_slots):
                raise ShapeError(f"{len(num_accepted)} num_accepted for {len(decode_slots)} decode requests (SPEC-3)")
            check_room("decode requests", len(decode_slots), "decode_requests", self.decode_requests)
        found = self.on_host(decode_slots, lengths, slots, snapshot_rows, snapshot_offsets, drafts, num_accepted)
        # a block of its own each time: PyTorch keeps pinned memory from reuse until a copy on a stream has read it
        host = torch.zeros(len(self.buffer), dtype=torch.uint8, pin_memory=self.buffer.is_cuda)
        array = host.numpy()
        for name, (first, last) in self.places.items():
            array[first:last] = found[name].reshape(-1).view(np.uint8)
        self.buffer.copy_(host, non_blocking=True)
