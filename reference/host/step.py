"""What a mixin reads of one step, and the rules of it that need no tensor's contents (STEP).

Reference and fast path have a mixin each; the context, its buffers and what is refused on sight stand here once.
Tensors are told by their shapes alone, so any kind of them serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from statescan.spec.contract import CapacityError, EmptyBatchError, ShapeError, UnsupportedError

Shape = tuple[int, ...]


@dataclass
class BatchDimensions:
    """Padded sizes of a step: rows in all, decode requests, prefill requests."""

    token_count: int
    decode_req_count: int
    prefill_req_count: int


@dataclass
class SlotAllocator:
    """Where prefill leaves snapshots: window and state buffers `[n, ...]`, or `[layers, n, ...]`."""

    intermediate_conv_out: Any
    intermediate_ssm_out: Any


@dataclass
class StepContext:
    """All that the mixin and the hooks read, and nothing else (STEP-7, STEP-8).

    `mamba_metadata` holds the arrays of the operation table as attributes (`prefill_metadata`, `decode_metadata`), and
    where a verify step resumes from entries `num_accepted` (SPEC-3). `pools` and `intermediates` have one pair (window,
    state) for each recurrent layer; `layer_map[n - 1]` is the pair of layer number n, counted from 1 within the stage.
    Rows of `padding_slice` are no tokens.
    """

    mamba_metadata: Any
    padded_batch_dimensions: BatchDimensions
    padding_slice: slice
    pools: Sequence[tuple[Any, Any]]
    intermediates: Sequence[tuple[Any, Any]] = ()
    num_speculative_tokens: int = 0
    mamba_slot_allocator: SlotAllocator | None = None
    layer_map: Sequence[int | None] = field(default_factory=lambda: (0,))

    def mamba_states_cache(self, layer_number: int, intermediate: bool = False) -> tuple[Any, Any]:
        """The pair (window, state) of a layer: its pools, or its intermediates (LAYER-1, LAYER-2)."""
        slab = self.layer_map[layer_number - 1] if 1 <= layer_number <= len(self.layer_map) else None
        if slab is None:
            raise ShapeError(f"layer_number={layer_number} is no recurrent layer of {len(self.layer_map)} (LAYER-2)")
        return (self.intermediates if intermediate else self.pools)[slab]


def read_partitions(context: Any) -> tuple[int, int]:
    """Padded requests of decode and of prefill; a step of nobody is refused (STEP-11)."""
    dims = context.padded_batch_dimensions
    if dims.decode_req_count == 0 and dims.prefill_req_count == 0:
        raise EmptyBatchError("Dynamic inference called with 0 decode and 0 prefill requests (STEP-11)")
    return dims.decode_req_count, dims.prefill_req_count


def drafts_accepted(metadata: Any) -> dict[str, Any]:
    """The word for a decode hook that resumes from entries; nothing where the context has none (SPEC-3)."""
    accepted = getattr(metadata, "num_accepted", None)
    return {} if accepted is None else {"num_accepted": accepted}


def layer_snapshots(context: Any, layer_number: int, ranks: tuple[int, int]) -> tuple[Any, Any] | None:
    """The snapshot buffers (window, state) of a layer, `[n, ...]` with these ranks; None where nothing is kept.

    Buffers with one axis more have the layer's slab on their first (LAYER-1).
    """
    allocator = getattr(context, "mamba_slot_allocator", None)
    if allocator is None or getattr(context.mamba_metadata, "intermediate_abs_positions", None) is None:
        return None
    first, second = (
        buffer[context.layer_map[layer_number - 1]] if buffer.ndim > rank else buffer
        for buffer, rank in zip((allocator.intermediate_conv_out, allocator.intermediate_ssm_out), ranks, strict=True)
    )
    return first, second


def apply_projection(projection: Any, rows: Any) -> tuple[Any, Any]:
    """(output, bias or None) of a projection that returns a tensor, or such a pair."""
    found = projection(rows)
    return found if isinstance(found, tuple) else (found, None)


def check_decode_tokens(rows: int, requests: int, tokens: int) -> None:
    """A step has the rows of its decode requests at least (STEP-2)."""
    if rows < requests * tokens:
        raise ShapeError(f"{rows} rows for {requests} decode requests of {tokens} tokens (STEP-2)")


def check_decode_shape(rows: Shape, slots: Shape, width: int) -> None:
    """What a decode hook is given: `[n, J, d_proj]` and n slots (STEP-10)."""
    if len(rows) != 3 or rows[2] != width or tuple(slots) != (rows[0],):
        raise ShapeError(f"zxBCdt {list(rows)} and batch_indices {list(slots)}: [n, J, {width}] and [n] (STEP-10)")


def check_entry_pair(conv_entries: Any, state_entries: Any) -> None:
    """Entries of windows and of states are given together: half of one could not be resumed from (SPEC-1, ERR-5)."""
    if (conv_entries is None) != (state_entries is None):
        lacking = "intermediate_conv_state" if conv_entries is None else "intermediate_ssm_state"
        raise UnsupportedError(f"{lacking} is None beside the other: both are given or neither (SPEC-1)")


def check_prefill_shape(rows: Shape, width: int) -> None:
    """What a prefill hook is given: `[t, 1, d_proj]` (STEP-10)."""
    if len(rows) != 3 or tuple(rows[1:]) != (1, width):
        raise ShapeError(f"zxBCdt {list(rows)}: [t, 1, {width}] is needed (STEP-10)")


def check_snapshot_room(count: int, room: int) -> None:
    """Every real snapshot has a row in the layer's buffers (META-9)."""
    if count > room:
        raise CapacityError(f"{count} snapshots and {room} buffer rows: no room (META-9)")


def check_single_token(zxBCdt: Any) -> None:
    """For mixers without speculation: one token a request, or a refusal before anything is written (SPEC-7)."""
    if zxBCdt.shape[1] != 1:
        raise UnsupportedError(f"zxBCdt has {zxBCdt.shape[1]} tokens a request: this mixer takes 1 (SPEC-7)")
