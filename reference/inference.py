"""One step of a recurrent layer under a dynamic-batching engine: the control flow that every mixer shares (STEP).

    in_proj over all padded rows
    decode rows first, J tokens a request -> ssm_decode     prefill rows after them -> ssm_prefill
    merge at the real number of decode tokens, padding rows 0, out_proj

A mixer brings `in_proj`, `out_proj`, `layer_number` and the two hooks. What the hooks and the mixin read of a context
is what `StepContext` has; any object with these attributes serves.
Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.ssm.ssm_inference.html
"""

from __future__ import annotations

from typing import Any

import torch

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

Tensor = torch.Tensor
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
        starts from what its slot holds. Rows past the last offset are 0.
        """
        raise NotImplementedError("ssm_prefill is the mixer's own (STEP-6)")

    def ssm_dynamic_inference(self, hidden_states: Tensor, context: Any) -> Output:
        """One step: hidden_states `[T, 1, d_model]` in packed order -> (output `[T, 1, d_model]`, bias or None).

        Raises EmptyBatchError where neither partition has a padded request (STEP-11), ShapeError where the rows are
        fewer than the decode tokens; whatever a hook refuses, the pools are as before.
        """
        metadata, (decode, prefill) = context.mamba_metadata, read_partitions(context)
        number, tokens = self.layer_number - self.pp_layer_offset, 1 + context.num_speculative_tokens
        conv_state, ssm_state = context.mamba_states_cache(number)
        zxBCdt, _ = apply_projection(self.in_proj, hidden_states)
        check_decode_tokens(zxBCdt.shape[0], decode, tokens)
        y_decode = y_prefill = None
        if decode:
            rows = zxBCdt[: decode * tokens].reshape(decode, tokens, zxBCdt.shape[-1])
            drafts = tokens > 1  # a step without them hands on no entries (SPEC-4)
            entries = context.mamba_states_cache(number, intermediate=True) if drafts else (None, None)
            more = drafts_accepted(metadata) if drafts else {}
            y_decode = self.ssm_decode(rows, conv_state, ssm_state, metadata.batch_indices_decode, *entries, **more)
        # the real number of decode tokens, not the padded one: prefill rows start right behind them
        first = int(metadata.device_decode_prefill[0]) if decode and prefill else decode * tokens
        if prefill:
            y_prefill = self.ssm_prefill(zxBCdt[first:], conv_state, ssm_state, context)
        y = merge(y_decode, y_prefill, first, zxBCdt.shape[0])
        y[context.padding_slice] = 0  # assigned, not multiplied: a norm of NaN rows is NaN (PAD-2)
        return apply_projection(self.out_proj, y)


def merge(y_decode: Tensor | None, y_prefill: Tensor | None, first: int, rows: int) -> Tensor:
    """Rows in packed order: decode rows up to `first`, prefill rows behind them, zeros where neither has one (STEP-4).

    >>> merge(torch.tensor([[[1.0], [2.0]], [[0.0], [0.0]]]), torch.tensor([[[5.0]]]), 2, 5).ravel().tolist()
    [1.0, 2.0, 5.0, 0.0, 0.0]
    """
    one = y_decode if y_decode is not None else y_prefill
    assert one is not None
    y = one.new_zeros(rows, 1, one.shape[-1])
    if y_decode is not None:
        y[:first] = y_decode.reshape(-1, 1, one.shape[-1])[:first]
    if y_prefill is not None:
        y[first : first + y_prefill.shape[0]] = y_prefill[: rows - first]
    return y


__all__ = [
    "BatchDimensions", "SSMDynamicInferenceMixin", "SlotAllocator", "StepContext", "apply_projection",
    "check_single_token", "merge",
]  # fmt: skip
