"""The delta family: GDN, GDP and KDA differ in the order of a row, in copies a token, and in what has a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from statescan.fast.gates import beta_gate, kda_gate, softplus_gate
from statescan.fast.mixers.base import Inputs, Parts, RecurrentMixer, heads_of
from statescan.fast.prefill import chunk_tokens
from statescan.reference.host.mixer_config import MixerConfig


class DeltaMixer(RecurrentMixer):
    """What the three share: A_log `[HV]`, dt_bias by gate, scale and l2norm by configuration."""

    def __init__(self, config: MixerConfig, d_model: int = 0, **more: Any) -> None:
        chunk_tokens(config.num_householder)  # more copies than a chunk holds are refused here, not at a prefill
        super().__init__(config, d_model, **more)
        gate = (config.hv, config.key_dim) if config.kind == "kda" else (config.hv,)
        self.A_log: nn.Parameter | None = nn.Parameter(torch.zeros(config.hv))
        self.dt_bias: nn.Parameter | None = nn.Parameter(torch.zeros(gate))

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"scale": self.config.scale, "use_qk_l2norm": self.l2norm}
        return {**found, "num_householder": self.config.num_householder} if self.config.kind == "gdp" else found

    @property
    def l2norm(self) -> bool:
        """Whether queries and keys are normalised, inside the kernels."""
        return self.config.use_qk_l2norm and not self.config.bare

    def decay(self, a: Tensor) -> Tensor:
        """Log-decay from the row: as it is (bare), or through the softplus gate (GATE-1)."""
        if self.config.bare:
            return a
        assert self.A_log is not None
        return softplus_gate(a, self.A_log, self.dt_bias)

    def strength(self, b: Tensor) -> Tensor:
        """Beta from the row: as it is (bare), or its sigmoid (GATE-5)."""
        return b if self.config.bare else beta_gate(b, allow_neg_eigval=self.config.allow_neg_eigval)

    def heads(self, q: Tensor, k: Tensor, v: Tensor, gates: Inputs) -> Inputs:
        """Heads of keys and of values apart, and the gates behind them."""
        c = self.config
        return (heads_of(q, c.heads, c.key_dim), heads_of(k, c.heads, c.key_dim), heads_of(v, c.hv, c.value_dim),
                *gates)  # fmt: skip


class GatedDeltaNet(DeltaMixer):
    """Gated Delta Net: rows q, k, v, z, beta, alpha; norm before its silu gate. https://arxiv.org/abs/2412.06464"""

    def gates(self, rest: Parts) -> Inputs:
        return self.decay(rest["alpha"]), self.strength(rest["beta"])

    def inputs(self, mixed: Parts, rest: Parts, gates: Inputs) -> Inputs:
        return self.heads(mixed["q"], mixed["k"], mixed["v"], gates)


class GatedDeltaProduct(DeltaMixer):
    """Gated Delta Product: rows z, V, K, Q, b, a, copies one after another inside a token; gate before the norm.

    Copy m of token t becomes row t*M + m of the operation (GDP-5). https://arxiv.org/abs/2502.10297
    """

    def gates(self, rest: Parts) -> Inputs:
        return self.decay(rest["a"]), self.strength(self.copies(rest["b"]))

    def inputs(self, mixed: Parts, rest: Parts, gates: Inputs) -> Inputs:
        return self.heads(mixed["Q"], self.copies(mixed["K"]), self.copies(mixed["V"]), gates)

    def copies(self, part: Tensor) -> Tensor:
        """Tokens `[N, J, M * width]` as rows `[N, J * M, width]`; a copy where they do not lie one after another."""
        rows, tokens, width = part.shape
        return part.reshape(rows, tokens * self.config.num_householder, width // self.config.num_householder)


class KimiDeltaAttention(DeltaMixer):
    """Kimi Delta Attention: rows q, k, v, z, b, f with f one number a key channel; norm before its sigmoid gate.

    https://arxiv.org/abs/2510.26692
    """

    def gates(self, rest: Parts) -> Inputs:
        f = heads_of(rest["f"], self.config.hv, self.config.key_dim)
        return self.channel_decay(f), self.strength(rest["b"])

    def inputs(self, mixed: Parts, rest: Parts, gates: Inputs) -> Inputs:
        return self.heads(mixed["q"], mixed["k"], mixed["v"], gates)

    def channel_decay(self, f: Tensor) -> Tensor:
        """Log-decay of each key channel: as it is (bare), or through the gate (GATE-3, GATE-4)."""
        if self.config.bare:
            return f
        return kda_gate(f, self.A_log, self.dt_bias, lower_bound=self.config.lower_bound)
