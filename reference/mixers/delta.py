"""The delta family: GDN, GDP and KDA differ in the order of a row, in copies a token, and in what has a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from statescan.reference.arrays import Float64
from statescan.reference.gates import beta_gate, kda_gate, softplus_gate
from statescan.reference.host.mixer_config import MixerConfig
from statescan.reference.mixers.arrays import to_float64
from statescan.reference.mixers.base import Inputs, Parts, RecurrentMixer


class DeltaMixer(RecurrentMixer):
    """What the three share: A_log `[HV]`, dt_bias by gate, scale and l2norm by configuration."""

    def __init__(self, config: MixerConfig, d_model: int = 0, **more: Any) -> None:
        super().__init__(config, d_model, **more)
        gate = (config.hv, config.key_dim) if config.kind == "kda" else (config.hv,)
        self.A_log: nn.Parameter | None = nn.Parameter(torch.zeros(config.hv))
        self.dt_bias: nn.Parameter | None = nn.Parameter(torch.zeros(gate))

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"scale": self.config.scale, "use_qk_l2norm": self.l2norm}
        return {**found, "num_householder": self.config.num_householder} if self.config.kind == "gdp" else found

    @property
    def l2norm(self) -> bool:
        """Whether queries and keys are normalised."""
        return self.config.use_qk_l2norm and not self.config.bare

    def decay(self, a: Float64) -> Float64:
        """Log-decay from the row: as it is (bare), or through the softplus gate (GATE-1)."""
        if self.config.bare:
            return a
        assert self.A_log is not None
        bias = None if self.dt_bias is None else to_float64(self.dt_bias)
        return softplus_gate(a, to_float64(self.A_log), bias)

    def strength(self, b: Float64) -> Float64:
        """Beta from the row: as it is (bare), or its sigmoid (GATE-5)."""
        return b if self.config.bare else beta_gate(b, allow_neg_eigval=self.config.allow_neg_eigval)


class GatedDeltaNet(DeltaMixer):
    """Gated Delta Net: rows q, k, v, z, beta, alpha; norm before its silu gate. https://arxiv.org/abs/2412.06464"""

    def inputs(self, mixed: Parts, rest: Parts) -> Inputs:
        c, lead = self.config, rest["beta"].shape[:-1]
        keys, values = (*lead, c.heads, c.key_dim), (*lead, c.hv, c.value_dim)
        return (mixed["q"].reshape(keys), mixed["k"].reshape(keys), mixed["v"].reshape(values),
                self.decay(rest["alpha"]), self.strength(rest["beta"]))  # fmt: skip


class GatedDeltaProduct(DeltaMixer):
    """Gated Delta Product: rows z, V, K, Q, b, a, copies one after another inside a token; gate before the norm.

    Copy m of token t becomes row t*M + m of the operation (GDP-5). https://arxiv.org/abs/2502.10297
    """

    def inputs(self, mixed: Parts, rest: Parts) -> Inputs:
        c, (*lead, tokens, _) = self.config, rest["a"].shape
        rows = (*lead, tokens * c.num_householder)
        return (mixed["Q"].reshape(*lead, tokens, c.heads, c.key_dim), mixed["K"].reshape(*rows, c.heads, c.key_dim),
                mixed["V"].reshape(*rows, c.hv, c.value_dim), self.decay(rest["a"]),
                self.strength(rest["b"].reshape(*rows, c.hv)))  # fmt: skip


class KimiDeltaAttention(DeltaMixer):
    """Kimi Delta Attention: rows q, k, v, z, b, f with f one number a key channel; norm before its sigmoid gate.

    https://arxiv.org/abs/2510.26692
    """

    def inputs(self, mixed: Parts, rest: Parts) -> Inputs:
        c, lead = self.config, rest["b"].shape[:-1]
        keys, values = (*lead, c.heads, c.key_dim), (*lead, c.hv, c.value_dim)
        return (mixed["q"].reshape(keys), mixed["k"].reshape(keys), mixed["v"].reshape(values),
                self.channel_decay(rest["f"].reshape(*lead, c.hv, c.key_dim)), self.strength(rest["b"]))  # fmt: skip

    def channel_decay(self, f: Float64) -> Float64:
        """Log-decay of each key channel: as it is (bare), or through the gate (GATE-3, GATE-4)."""
        if self.config.bare:
            return f
        rate, bias = (None if p is None else to_float64(p) for p in (self.A_log, self.dt_bias))
        return kda_gate(f, rate, bias, lower_bound=self.config.lower_bound)
