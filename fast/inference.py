"""One step of a recurrent layer under a dynamic-batching engine, on the device throughout (STEP).

The mixin of `statescan.reference.inference` with the same hooks, names and meaning. What a step does follows from host
counts of the context, padded ones; what depends on its requests is read on the device. So nothing waits, and a step can
be captured in one CUDA graph and replayed with other requests. `padding_slice` is not read for that reason: a graph
would keep the slice of the step it was captured with. Rows are padding where their request has no slot, or past the
last offset.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from statescan.fast.rows import merge, rows_behind
from statescan.reference.host.step import (
    BatchDimensions,
    SlotAllocator,
    StepContext,
    apply_projection,
    check_decode_tokens,
    check_single_token,
    drafts_accepted,
    read_partitions,
)

Output = tuple[Tensor, "Tensor | None"]


class SSMDynamicInferenceMixin:
    """Decode and prefill of one layer, merged; a mixer implements the two hooks and nothing else (STEP-6)."""

    in_proj: Any
    out_proj: Any
    layer_number: int
    pp_layer_offset: int = 0

    def ssm_decode(
        self, zxBCdt: Tensor, conv_state: Tensor, ssm_state: Tensor, batch_indices: Tensor,
        intermediate_conv_state: Tensor | None = None, intermediate_ssm_state: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """J tokens of every decode request: zxBCdt `[n, J, d_proj]` -> y `[n, J, d_inner]`, pools in place.

        conv_state `[slots, C, W]`, ssm_state `[slots, ...]`, batch_indices `[n]` (negative: padding, outputs 0);
        entry j of a slot's intermediates `[slots, J, ...]` becomes window and state after token j. A hook that is to
        resume from entries also takes `num_accepted [n]`, which a step hands on where its metadata has it (SPEC-3).
        """
        raise NotImplementedError("ssm_decode is the mixer's own (STEP-6)")

    def ssm_prefill(self, zxBCdt: Tensor, conv_state: Tensor, ssm_state: Tensor, context: Any) -> Tensor:
        """All prefill pieces in one call: zxBCdt `[t, 1, d_proj]` -> y `[t, 1, d_inner]`, pools in place.

        Offsets, slots and snapshots come from `context.mamba_metadata` and `context.mamba_slot_allocator`; a piece
        starts from what its slot holds. There are rows past the last offset; theirs are 0.
        """
        raise NotImplementedError("ssm_prefill is the mixer's own (STEP-6)")

    def ssm_dynamic_inference(self, hidden_states: Tensor, context: Any) -> Output:
        """One step: hidden_states `[T, 1, d_model]` in packed order -> (output `[T, 1, d_model]`, bias or None).

        Raises EmptyBatchError where neither partition has a padded request (STEP-11), ShapeError where the rows are
        fewer than the decode tokens, or a step of both partitions has no `device_decode_prefill`.
        """
        metadata, (decode, prefill) = context.mamba_metadata, read_partitions(context)
        number, tokens = self.layer_number - self.pp_layer_offset, 1 + context.num_speculative_tokens
        conv_state, ssm_state = context.mamba_states_cache(number)
        zxBCdt, _ = apply_projection(self.in_proj, hidden_states)
        check_decode_tokens(zxBCdt.shape[0], decode, tokens)
        counts = getattr(metadata, "device_decode_prefill", None)
        slots = cu_seqlens = y_decode = y_prefill = None
        # behind the real decode tokens, not the padded ones (STEP-4); before decode, which writes
        pieces = rows_behind(zxBCdt, counts) if decode and prefill else zxBCdt
        if decode:
            rows = zxBCdt[: decode * tokens].reshape(decode, tokens, zxBCdt.shape[-1])
            drafts, slots = tokens > 1, metadata.batch_indices_decode  # none: no entries are handed on (SPEC-4)
            entries = context.mamba_states_cache(number, intermediate=True) if drafts else (None, None)
            more = drafts_accepted(metadata) if drafts else {}
            y_decode = self.ssm_decode(rows, conv_state, ssm_state, slots, *entries, **more)
        if prefill:
            cu_seqlens = metadata.cu_seqlens
            y_prefill = self.ssm_prefill(pieces, conv_state, ssm_state, context)
        return apply_projection(self.out_proj, merge(y_decode, slots, y_prefill, cu_seqlens, counts, zxBCdt.shape[0]))


__all__ = [
    "BatchDimensions", "SSMDynamicInferenceMixin", "SlotAllocator", "StepContext", "apply_projection",
    "check_single_token", "merge",
]  # fmt: skip
