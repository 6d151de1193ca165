"""What the four mixers share: projections, the convolution, the two hooks on slots, all on the device.

The mixers of `statescan.reference.mixers` with the same configuration, parameters and hooks. A hook is a chain of fast
operations on the pools in place: gates, convolution, recurrence, gated norm. Everything that can be refused is refused
before the first of them writes (ERR-3); checks of values as everywhere in the fast path, `check` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from statescan.fast.checks import check_call, check_decay, live_pack, live_tokens
from statescan.fast.conv import causal_conv1d_prefill, causal_conv1d_update
from statescan.fast.delta import check_steps
from statescan.fast.inference import Output, SSMDynamicInferenceMixin
from statescan.fast.norms import check_groups, rmsnorm_gated
from statescan.fast.rows import real_positions, zero_padding
from statescan.reference.host.mixer_config import MixerConfig
from statescan.reference.host.step import (
    check_decode_shape,
    check_entry_pair,
    check_prefill_shape,
    check_snapshot_room,
    layer_snapshots,
)
from statescan.spec.contract import OPERATIONS, UnsupportedError

Parts = Mapping[str, Tensor]
Inputs = tuple["Tensor | None", ...]
"""Token tensors and parameters of the recurrence, in the order of its operation."""
MOST_REMEMBERED = 1 << 12


def heads_of(part: Tensor, heads: int, size: int) -> Tensor:
    """Channels `[..., heads * size]` as `[..., heads, size]`, a view."""
    return part.view(*part.shape[:-1], heads, size)


class RecurrentMixer(SSMDynamicInferenceMixin, nn.Module):
    """A mixer of one layer; `in_proj` and `out_proj` may be any modules that return a tensor or (tensor, bias).

    Plain Linear layers from and to `d_model` where none are given. Parameters: conv_weight `[C, W]`, conv_bias `[C]`
    or None, norm_weight or None, and those of the subclass; any served type. `check=True` looks at index values and
    gates on a GPU too, and waits for it.
    """

    check: bool | None = None

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
        self._passed: set[Any] = set()

    # What a mixer adds -----------------------------------------------------------------------------------------------

    def gates(self, rest: Parts) -> Inputs:
        """What the operation takes that does not come out of the convolution and has to be computed."""
        raise NotImplementedError

    def inputs(self, mixed: Parts, rest: Parts, gates: Inputs) -> Inputs:
        """Inputs of the operation from convolved parts and the others, leading axes as in the call; views alone."""
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

    def new_pools(self, *lead: int, dtype: torch.dtype = torch.float32, device: Any = None) -> tuple[Tensor, Tensor]:
        """Zeroed window and state pools `[*lead, ...]` in the order of memory that decode is fastest on.

        Pools: `new_pools(slots)`; intermediates: `new_pools(slots, 1 + drafts)`; snapshots: `new_pools(n)`.
        """
        window, state = self.ssm_state_shapes()
        windows = torch.zeros(*lead, *window, dtype=dtype, device=device)
        if self.config.kind == "mamba2":
            return windows, torch.zeros(*lead, *state, dtype=dtype, device=device)
        return windows, torch.zeros(*lead, state[0], state[2], state[1], dtype=dtype, device=device).mT

    # Serving ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def ssm_decode(
        self, zxBCdt: Tensor, conv_state: Tensor, ssm_state: Tensor, batch_indices: Tensor,
        intermediate_conv_state: Tensor | None = None, intermediate_ssm_state: Tensor | None = None, *,
        num_accepted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The hook of the mixin: J tokens of every request, from its slot or an entry of it, and to its slot."""
        slots, accepted = batch_indices, num_accepted
        check_decode_shape(zxBCdt.shape, slots.shape, self.config.d_proj)
        check_entry_pair(intermediate_conv_state, intermediate_ssm_state)
        check_steps(zxBCdt.shape[1])
        y = self.mix(
            zxBCdt, "_update", causal_conv1d_update, (conv_state, slots, None, intermediate_conv_state, accepted),
            (ssm_state, slots, None, intermediate_ssm_state, accepted),
        )  # fmt: skip
        return y if self.norm_weight is None else zero_padding(y, slots, conv_state.shape[0])

    @torch.no_grad()
    def ssm_prefill(self, zxBCdt: Tensor, conv_state: Tensor, ssm_state: Tensor, context: Any) -> Tensor:
        """The hook of the mixin: all pieces of the step in one call, each from and to its slot."""
        cu, slots = context.mamba_metadata.cu_seqlens, context.mamba_metadata.batch_indices_prefill
        check_prefill_shape(zxBCdt.shape, self.config.d_proj)
        at, windows, states = self.snapshot_buffers(context, conv_state.ndim)
        y = self.mix(
            zxBCdt.transpose(0, 1), "_prefill", causal_conv1d_prefill, (cu, conv_state, slots, None, at, windows),
            (cu, ssm_state, slots, None, at, states),
        )  # fmt: skip
        return (y if self.norm_weight is None else zero_padding(y, slots, conv_state.shape[0], cu)).transpose(0, 1)

    def snapshot_buffers(self, context: Any, rank: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Positions (negative past the real count) and the two buffers of this layer; three None without them."""
        ranks = rank, len(self.config.state_shape) + 1
        buffers = layer_snapshots(context, self.layer_number - self.pp_layer_offset, ranks)
        if buffers is None:
            return None, None, None
        at, count = context.mamba_metadata.intermediate_abs_positions, context.mamba_metadata.intermediate_real_count
        room = len(buffers[0])
        if self.check or not at.is_cuda:
            check_snapshot_room(int(count[0]), room)
        return real_positions(at[:room], count), buffers[0][: len(at)], buffers[1][: len(at)]

    def forward(self, hidden_states: Tensor, inference_context: Any = None, **more: Any) -> Output:
        """One step under an inference context."""
        if inference_context is None or more:
            raise UnsupportedError("forward without an inference context is not served on the fast path (ERR-5)")
        return self.ssm_dynamic_inference(hidden_states, inference_context)

    # The shared middle -----------------------------------------------------------------------------------------------

    def mix(
        self, rows: Tensor, form: str, convolve: Callable[..., Tensor], windows: Sequence[Tensor | None],
        states: Sequence[Tensor | None],
    ) -> Tensor:  # fmt: skip
        """Projected rows `[..., d_proj]` to outputs `[..., d_inner]`, contiguous.

        `windows` and `states` are the arguments of the convolution and of the operation that belong to slots.
        """
        rest = self.config.split(rows)
        gates = self.gates(rest)
        self.check_ahead(rows, rest, gates, form, windows, states)
        mixed = convolve(rest["conv"], self.conv_weight, self.conv_bias, *windows, activation=self.activation,
                         check=self.check)  # fmt: skip
        inputs = self.inputs(self.config_parts(mixed), rest, gates)
        o = self.operation(form)(*inputs, *states, **self.settings(), check=self.check)
        y: Tensor = o.flatten(-2)
        if self.norm_weight is None:
            return y
        first, word = self.config.norm_words
        return rmsnorm_gated(y, rest["z"], self.norm_weight, eps=self.config.norm_eps,
                             group_size=self.config.norm_group, norm_before_gate=first,
                             gate_activation=word)  # fmt: skip

    def check_ahead(
        self, rows: Tensor, rest: Parts, gates: Inputs, form: str, windows: Sequence[Tensor | None],
        states: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        """Every rule of what follows the convolution, while nothing is written; once for each set of shapes on CUDA.

        The convolution keeps shapes and types, so that its inputs stand for its outputs.
        """
        facts = [None if t is None else (t.shape, t.dtype) for t in (rows, *windows, *states)]
        key = (form, *facts)
        if rows.is_cuda and not self.check and key in self._passed:
            return
        name = self.config.operation + form
        inputs = self.inputs({part: rest[part] for part in self.config.conv_parts}, rest, gates)
        names = [argument.name for argument in OPERATIONS[name].tensors]
        given = [*inputs, *states]
        tensors = dict(zip(names, [*given, *[None] * (len(names) - len(given))], strict=True))
        copies = {"num_householder": self.config.num_householder, "state_layout": "KV"}
        values = check_call(name, tensors, {} if self.config.kind == "mamba2" else copies, self.check)
        if values is not None and self.config.kind != "mamba2":
            g = inputs[3]
            assert g is not None
            check_decay(g, live_pack(values) if form == "_prefill" else live_tokens(values, *rows.shape[:2]))
        if self.norm_weight is not None:
            check_groups(self.config.d_inner, len(self.norm_weight), self.config.norm_group)
        if len(self._passed) < MOST_REMEMBERED:
            self._passed.add(key)

    def config_parts(self, mixed: Tensor) -> Parts:
        """The convolved stretch `[..., C]` as views of its parts."""
        found, start = {}, 0
        for name, width in (part for part in self.config.parts if part[0] in self.config.conv_parts):
            found[name] = mixed[..., start : start + width]
            start += width
        return found

    @property
    def activation(self) -> str | None:
        """Activation of the convolution; none for a bare mixer."""
        return None if self.config.bare else self.config.activation

    def operation(self, form: str) -> Callable[..., Tensor]:
        """The fast operation in one of its forms on slots: "_prefill", "_update"."""
        module = import_module(f"statescan.fast.{'ssd' if self.config.kind == 'mamba2' else 'delta'}")
        found: Callable[..., Tensor] = getattr(module, self.config.operation + form)
        return found
