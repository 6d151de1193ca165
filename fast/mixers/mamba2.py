"""Mamba2: rows of z, x, B, C, dt; a gate before the norm, or inside the scan where there is no norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from statescan.fast.mixers.base import Inputs, Parts, RecurrentMixer, heads_of
from statescan.reference.host.mixer_config import MixerConfig


class Mamba2(RecurrentMixer):
    """The Mamba2 mixer (SSD). Parameters A_log, dt_bias `[H]`, D `[H]` or `[H, P]`; A = -exp(A_log).

    `A` given as a tensor takes the place of A_log, for a decay that no logarithm reaches (A = 0).
    Source: https://arxiv.org/abs/2405.21060
    """

    A: Tensor | None

    def __init__(self, config: MixerConfig, d_model: int = 0, *, A: Tensor | None = None, **more: Any) -> None:
        super().__init__(config, d_model, **more)
        self.A_log = nn.Parameter(torch.zeros(config.heads))
        self.dt_bias: nn.Parameter | None = nn.Parameter(torch.zeros(config.heads))
        self.D: nn.Parameter | None = nn.Parameter(torch.ones(config.heads))
        self.register_buffer("A", A, persistent=False)

    def gates(self, rest: Parts) -> Inputs:
        """A of this call: computed each time, so that a captured graph follows a change of A_log."""
        return (-self.A_log.float().exp() if self.A is None else self.A,)

    def inputs(self, mixed: Parts, rest: Parts, gates: Inputs) -> Inputs:
        c = self.config
        # without a norm the gate belongs to the scan: y * silu(z), after D (SSD-4)
        z = heads_of(rest["z"], c.heads, c.headdim) if "z" in rest and self.norm_weight is None else None
        return (heads_of(mixed["x"], c.heads, c.headdim), rest["dt"], *gates, heads_of(mixed["B"], c.groups, c.d_state),
                heads_of(mixed["C"], c.groups, c.d_state), self.D, z, self.dt_bias)  # fmt: skip

    def settings(self) -> dict[str, Any]:
        return {"dt_softplus": self.config.dt_softplus, "dt_limit": self.config.dt_limit}
