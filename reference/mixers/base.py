"""What the four mixers share: projections, the convolution, the two hooks on slots, the packed forward.

A mixer adds three things: its parameters, how the parts of a row become the operation's inputs, and how outputs leave.
Everything is computed in float64 and rounded once, at the end or where a pool stores it (NUM-2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from statescan.reference.arrays import Array, Float64
from statescan.reference.conv import causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
from statescan.reference.host.mixer_config import MixerConfig
from statescan.reference.host.step import (
    check_decode_shape,
    check_entry_pair,
    check_prefill_shape,
    check_snapshot_room,
    layer_snapshots,
)
from statescan.reference.inference import SSMDynamicInferenceMixin, Tensor, apply_projection
from statescan.reference.mixers.arrays import to_array, to_float64, to_tensor
from statescan.reference.norms import rmsnorm_gated
from statescan.reference.packed import build_packed_seq_idx, get_cu_seqlens
from statescan.spec.contract import PackedSeqParams

Parts = dict[str, Float64]
Inputs = tuple[Any, ...]
"""Token tensors and parameters of the recurrence, in the order of its operation."""
Convolve = Callable[[Float64], Float64]
Recur = Callable[[Inputs], Float64]


class RecurrentMixer(SSMDynamicInferenceMixin, nn.Module):
    """A mixer of one layer; `in_proj` and `out_proj` may be any modules that return a tensor or (tensor, bias).

    Plain Linear layers from and to `d_model` where none are given. Parameters: conv_weight `[C, W]`, conv_bias `[C]`
    or None, norm_weight or None, and those of the subclass.
    """

    def __init__(
        self, config: MixerConfig, d_model: int = 0, *, in_proj: Any = None, out_proj: Any = None,
        layer_number: int = 1, pp_layer_offset: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.layer_number, self.pp_layer_offset = config, layer_number, pp_layer_offset
        self.in_proj = nn.Linear(d_model, config.d_proj, bias=config.bias) if in_proj is None else in_proj
        self.out_proj = nn.Linear(config.d_inner, d_model, bias=config.bias) if out_proj is None else out_proj
        self.conv_weight = nn.Parameter(torch.empty(config.conv_channels, config.d_conv).uniform_(-0.5, 0.5))
        self.conv_bias = nn.Parameter(torch.zeros(config.conv_channels)) if config.conv_bias else None
        normed = config.norm and not config.bare
        self.norm_weight = nn.Parameter(torch.ones(config.norm_weights)) if normed else None

    # What a mixer adds -----------------------------------------------------------------------------------------------

    def inputs(self, mixed: Parts, rest: Parts) -> Inputs:
        """Inputs of the operation from convolved parts and the others, leading axes as in the call."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Keyword settings of the operation."""
        raise NotImplementedError

    # What the context and `ssm_chunking` read ------------------------------------------------------------------------

    @property
    def chunk_size(self) -> int:
        """The configured chunk length (STACK-1)."""
        return self.config.chunk_size

    @property
    def ssm_inference_chunk_size(self) -> int:
        """The chunk length of prefill (STACK-1)."""
        return self.config.ssm_inference_chunk_size

    @property
    def num_householder(self) -> int:
        """Copies a token, 0 for mixers without (STACK-1)."""
        return self.config.num_householder if self.config.kind == "gdp" else 0

    def ssm_state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A slot of the window pool and of the state pool."""
        return self.config.conv_shape, self.config.state_shape

    # Serving ---------------------------------------------------------------------------------------------------------

    def ssm_decode(
        self, zxBCdt: Tensor, conv_state: Tensor, ssm_state: Tensor, batch_indices: Tensor,
        intermediate_conv_state: Tensor | None = None, intermediate_ssm_state: Tensor | None = None, *,
        num_accepted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The hook of the mixin: J tokens of every request, from its slot or an entry of it, and to its slot."""
        slots = to_array(batch_indices)
        check_decode_shape(zxBCdt.shape, slots.shape, self.config.d_proj)
        check_entry_pair(intermediate_conv_state, intermediate_ssm_state)
        accepted = None if num_accepted is None else to_array(num_accepted)

        def run(windows: Array, states: Array, window_entries: Any = None, state_entries: Any = None) -> Float64:
            return self.mix(
                to_float64(zxBCdt),
                lambda x: causal_conv1d_update(x, *self.conv_parameters(), windows, slots, None, window_entries,
                                               accepted, activation=self.activation),
                lambda inputs: self.operation("_update")(*inputs, states, slots, None, state_entries, accepted,
                                                         **self.settings()),
                slots >= 0,
            )  # fmt: skip

        y = on_copies(run, conv_state, ssm_state, intermediate_conv_state, intermediate_ssm_state)
        return to_tensor(y, zxBCdt)

    def ssm_prefill(self, zxBCdt: Tensor, conv_state: Tensor, ssm_state: Tensor, context: Any) -> Tensor:
        """The hook of the mixin: all pieces of the step in one call, each from and to its slot."""
        metadata = context.mamba_metadata
        check_prefill_shape(zxBCdt.shape, self.config.d_proj)
        cu, slots = to_array(metadata.cu_seqlens), to_array(metadata.batch_indices_prefill)
        rows = to_float64(zxBCdt)[:, 0][None]  # [1, T, d_proj]
        live = np.zeros(rows.shape[:2], bool)
        for slot, start, end in zip(slots, cu, cu[1:], strict=False):
            live[0, start:end] = slot >= 0
        at, *buffers = self.snapshot_buffers(context, conv_state.ndim)

        def run(windows: Array, states: Array, window_rows: Any = None, state_rows: Any = None) -> Float64:
            return self.mix(
                rows,
                lambda x: causal_conv1d_prefill(x, *self.conv_parameters(), cu, windows, slots, None, at, window_rows,
                                                activation=self.activation),
                lambda inputs: self.operation("_prefill")(*inputs, cu, states, slots, None, at, state_rows,
                                                          **self.settings()),
                live,
            )  # fmt: skip

        return to_tensor(on_copies(run, conv_state, ssm_state, *buffers)[0][:, None], zxBCdt)

    def snapshot_buffers(self, context: Any, rank: int) -> tuple[Array | None, Any, Any]:
        """Positions (negative past the real count) and the two buffers of this layer; three None without them."""
        ranks = rank, len(self.config.state_shape) + 1
        buffers = layer_snapshots(context, self.layer_number - self.pp_layer_offset, ranks)
        if buffers is None:
            return None, None, None
        at = to_array(context.mamba_metadata.intermediate_abs_positions).copy()
        count, room = int(context.mamba_metadata.intermediate_real_count[0]), len(buffers[0])
        check_snapshot_room(count, room)
        at[count:] = -1
        return at[:room], *(buffer[: len(at)] for buffer in buffers)

    # Training --------------------------------------------------------------------------------------------------------

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, *, packed_seq_params: PackedSeqParams | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A pack `[T, 1, d_model]` (without params one sequence), or one step under an inference context.

        Ids come from the length that the kernel consumes, after the projection has gathered it (PACK-5, PAR-1).
        """
        if inference_context is not None:
            return self.ssm_dynamic_inference(hidden_states, inference_context)
        zxBCdt, _ = apply_projection(self.in_proj, hidden_states)
        rows = to_float64(zxBCdt).swapaxes(0, 1)  # [batch, T, d_proj]
        ids = cu = None
        if packed_seq_params is not None:
            ids = build_packed_seq_idx(packed_seq_params, rows.shape[1])
            cu = get_cu_seqlens(packed_seq_params)
        y = self.mix(
            rows, lambda x: causal_conv1d(x, *self.conv_parameters(), ids, activation=self.activation)[0],
            lambda inputs: self.packed(inputs, ids, cu), np.ones(rows.shape[:2], bool),
        )  # fmt: skip
        return apply_projection(self.out_proj, to_tensor(y.swapaxes(0, 1), zxBCdt))

    def packed(self, inputs: Inputs, ids: Array | None, cu: Array | None) -> Float64:
        """The recurrence on a pack: by offsets, so that rows past the last one are 0 (PACK-8)."""
        found: Float64 = self.operation("")(*inputs, cu, **self.settings())[0]
        return found

    # The shared middle -----------------------------------------------------------------------------------------------

    def mix(self, rows: Float64, convolve: Convolve, recur: Recur, live: Array) -> Float64:
        """Projected rows `[..., d_proj]` to outputs `[..., d_inner]`; rows that are not live are 0 (PAD-1, PAD-2)."""
        rest = self.config.split(rows)
        mixed = self.config_parts(convolve(rest["conv"]))
        y = self.finish(recur(self.inputs(mixed, rest)), rest.get("z"))
        y[~live] = 0
        return y

    def config_parts(self, mixed: Float64) -> Parts:
        """The convolved stretch `[..., C]` as its parts."""
        widths = [width for name, width in self.config.parts if name in self.config.conv_parts]
        return dict(zip(self.config.conv_parts, np.split(mixed, np.cumsum(widths)[:-1], axis=-1), strict=True))

    def finish(self, o: Float64, z: Float64 | None) -> Float64:
        """Heads side by side, then the gated norm where the mixer has one."""
        y = o.reshape(*o.shape[:-2], self.config.d_inner)
        if self.norm_weight is None:
            return y
        first, word = self.config.norm_words
        return rmsnorm_gated(
            y, z, np.resize(to_float64(self.norm_weight), y.shape[-1]), eps=self.config.norm_eps,
            group_size=self.config.norm_group, norm_before_gate=first, gate_activation=word,
        )  # fmt: skip

    @property
    def activation(self) -> str | None:
        """Activation of the convolution; none for a bare mixer."""
        return None if self.config.bare else self.config.activation

    def conv_parameters(self) -> tuple[Float64, Float64 | None]:
        """Weight and bias of the convolution."""
        return to_float64(self.conv_weight), None if self.conv_bias is None else to_float64(self.conv_bias)

    def operation(self, form: str) -> Callable[..., Any]:
        """The reference's operation in one of its forms: "", "_prefill", "_update"."""
        module = "ssd" if self.config.kind == "mamba2" else "delta"
        found: Callable[..., Any] = getattr(
            import_module(f"statescan.reference.{module}"), self.config.operation + form
        )
        return found


def on_copies(run: Callable[..., Float64], *tensors: Tensor | None) -> Float64:
    """Run on copies of the pools and store them only when it has returned: a refusal changes nothing (ERR-3).

    Two operations of a hook share one fate: the second may refuse what the first has already written.
    """
    arrays: Sequence[Array | None] = [None if tensor is None else to_array(tensor) for tensor in tensors]
    copies = [None if array is None else array.copy() for array in arrays]
    y = run(*copies)
    for array, copy in zip(arrays, copies, strict=True):
        if array is not None:
            array[...] = copy
    return y
