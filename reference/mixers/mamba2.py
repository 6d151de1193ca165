"""Mamba2: rows of z, x, B, C, dt; a gate before the norm, or inside the scan where there is no norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from statescan.reference.arrays import Array, Float64
from statescan.reference.functions import exp
from statescan.reference.host.mixer_config import MixerConfig
from statescan.reference.mixers.arrays import to_float64
from statescan.reference.mixers.base import Inputs, Parts, RecurrentMixer


class Mamba2(RecurrentMixer):
    """The Mamba2 mixer (SSD). Parameters A_log, dt_bias `[H]`, D `[H]` or `[H, P]`; A = -exp(A_log).

    `A` given as a tensor takes the place of A_log, for a decay that no logarithm reaches (A = 0).
    Source: https://arxiv.org/abs/2405.21060
    """

    def __init__(self, config: MixerConfig, d_model: int = 0, *, A: torch.Tensor | None = None, **more: Any) -> None:
        super().__init__(config, d_model, **more)
        self.A_log = nn.Parameter(torch.zeros(config.heads))
        self.dt_bias: nn.Parameter | None = nn.Parameter(torch.zeros(config.heads))
        self.D: nn.Parameter | None = nn.Parameter(torch.ones(config.heads))
        self.A = A

    def inputs(self, mixed: Parts, rest: Parts) -> Inputs:
        c, lead = self.config, rest["dt"].shape[:-1]
        A = -exp(to_float64(self.A_log)) if self.A is None else to_float64(self.A)
        heads, shared = (*lead, c.heads, c.headdim), (*lead, c.groups, c.d_state)
        # without a norm the gate belongs to the scan: y * silu(z), after D (SSD-4)
        z = rest["z"].reshape(heads) if "z" in rest and self.norm_weight is None else None
        D, bias = (None if p is None else to_float64(p) for p in (self.D, self.dt_bias))
        return (mixed["x"].reshape(heads), rest["dt"], A, mixed["B"].reshape(shared), mixed["C"].reshape(shared), D, z,
                bias)  # fmt: skip

    def settings(self) -> dict[str, Any]:
        return {"dt_softplus": self.config.dt_softplus, "dt_limit": self.config.dt_limit}

    def packed(self, inputs: Inputs, ids: Array | None, cu: Array | None) -> Float64:
        """By the ids of the convolution: rows past the last offset are a segment of their own (PACK-3)."""
        found: Float64 = self.operation("")(*inputs, ids, **self.settings())[0]
        return found
