"""Mixers of public models in ours: configuration and weights of a transformers module, read by the class's name.

    mixer = load_mixer(model.model.layers[0].linear_attn, MIXERS)      # MIXERS of reference.mixers or of fast.mixers

Served: Mamba2 (mamba2, bamba, nemotron_h, granitemoehybrid), GDN (qwen3_next, qwen3_5, olmo_hybrid), KDA (kimi_linear).
What a module does and ours does not raises UnsupportedError. Parameters are copied; projections are copies too, or the
model's own modules where it has a chain of them.
Sources: https://github.com/huggingface/transformers (src/transformers/models/NAME/modeling_NAME.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from statescan.reference.host.mixer_config import MixerConfig
from statescan.spec.contract import UnsupportedError


class Reading(NamedTuple):
    """What a module becomes: configuration, the parameters by our names, and the two projections."""

    config: MixerConfig
    parameters: dict[str, Tensor]
    in_proj: nn.Module
    out_proj: nn.Module


class SideBySide(nn.Module):
    """Projections of the same rows, their results beside each other in the last axis."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([part(rows) for part in self.parts], -1)


def read_mamba2(module: Any) -> Reading:
    """Rows z, x, B, C, dt, as ours are; a gate before a norm over each group's channels."""
    config = MixerConfig(
        "mamba2", heads=module.num_heads, headdim=module.head_dim, d_state=module.ssm_state_size,
        groups=module.n_groups, d_conv=module.conv_kernel_size, chunk_size=module.chunk_size,
        activation=module.activation, conv_bias=module.conv1d.bias is not None,
        bias=module.in_proj.bias is not None, dt_limit=(float(module.time_step_limit[0]),
                                                        float(module.time_step_limit[1])),
        norm_eps=module.norm.variance_epsilon,
    )  # fmt: skip
    return Reading(config, {**shared(module, module.norm), "D": module.D}, module.in_proj, module.out_proj)


def read_qwen3_next(module: Any) -> Reading:
    """Rows lie by key head, `q k v z` and `b a` of each: they are put in order once, in the weights."""
    K, V, heads = module.head_k_dim, module.head_v_dim, module.num_k_heads
    each = module.num_v_heads // heads
    qkvz = module.in_proj_qkvz.weight.detach().unflatten(0, (heads, -1))
    ba = module.in_proj_ba.weight.detach().unflatten(0, (heads, -1))
    parts = [*qkvz.split([K, K, each * V, each * V], 1), *ba.split([each, each], 1)]
    weight = torch.cat([part.flatten(0, 1) for part in parts])
    return Reading(delta_config("gdn", module, module.norm, key_dim=K), shared(module, module.norm),
                   linear(weight), module.out_proj)  # fmt: skip


def read_qwen3_5(module: Any) -> Reading:
    """Four projections beside each other."""
    rows = SideBySide([module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a])
    return Reading(delta_config("gdn", module, module.norm, key_dim=module.head_k_dim), shared(module, module.norm),
                   rows, module.out_proj)  # fmt: skip


def read_olmo_hybrid(module: Any) -> Reading:
    """Six projections beside each other; beta up to 2 where negative eigenvalues are allowed."""
    rows = SideBySide([getattr(module, f"{name}_proj") for name in "qkvgba"])
    config = delta_config("gdn", module, module.o_norm, key_dim=module.head_k_dim,
                          allow_neg_eigval=module.allow_neg_eigval)  # fmt: skip
    return Reading(config, shared(module, module.o_norm), rows, module.o_proj)


def read_kimi_linear(module: Any) -> Reading:
    """Gate and decay come through two projections each, one after the other."""
    gate = module.forget_gate
    rows = SideBySide([
        module.q_proj, module.k_proj, module.v_proj, nn.Sequential(module.g_a_proj, module.g_b_proj), module.b_proj,
        nn.Sequential(gate.f_a_proj, gate.f_b_proj),
    ])  # fmt: skip
    config = delta_config("kda", module, module.o_norm, key_dim=module.head_dim)
    found = shared(module, module.o_norm, gate)
    found["dt_bias"] = found["dt_bias"].reshape(module.num_heads, module.head_dim)
    return Reading(config, found, rows, module.o_proj)


READERS: dict[str, Callable[[Any], Reading]] = {
    "Mamba2Mixer": read_mamba2, "BambaMixer": read_mamba2, "NemotronHMamba2Mixer": read_mamba2,
    "GraniteMoeHybridMambaLayer": read_mamba2, "Qwen3NextGatedDeltaNet": read_qwen3_next,
    "Qwen3_5GatedDeltaNet": read_qwen3_5, "OlmoHybridGatedDeltaNet": read_olmo_hybrid,
    "KimiLinearDeltaAttention": read_kimi_linear,
}  # fmt: skip
"""By the name of the module's class."""


def load_mixer(module: nn.Module, mixers: Mapping[str, Any], **more: Any) -> Any:
    """Our mixer with the configuration and the weights of a transformers module; `more` goes to its class.

    Raises UnsupportedError (ERR-5) for a class that is not served or a setting that ours does not have.
    """
    name = type(module).__name__
    if name not in READERS:
        raise UnsupportedError(f"{name}: one of {', '.join(READERS)} is read (ERR-5)")
    config, parameters, rows, out = READERS[name](module)
    mixer = mixers[config.kind](config, in_proj=rows, out_proj=out, **more)
    for key, value in parameters.items():
        mine = getattr(mixer, key)
        if mine is None or mine.shape != value.shape:
            raise UnsupportedError(f"{name}: {key} is {tuple(value.shape)}, ours {mine and tuple(mine.shape)} (ERR-5)")
        setattr(mixer, key, nn.Parameter(value.detach().clone()))
    return mixer


def delta_config(kind: str, module: Any, norm: Any, **more: Any) -> MixerConfig:
    """Sizes that modules of the delta family name alike; one head count and width where there is one."""
    heads = getattr(module, "num_k_heads", None) or module.num_heads
    return MixerConfig(
        kind, heads=heads, value_heads=getattr(module, "num_v_heads", heads),
        value_dim=getattr(module, "head_v_dim", None) or module.head_dim, d_conv=module.conv_kernel_size,
        activation=module.activation, conv_bias=module.conv1d.bias is not None, norm_eps=norm.variance_epsilon, **more,
    )  # fmt: skip


def shared(module: Any, norm: Any, gate: Any = None) -> dict[str, Tensor]:
    """Parameters that every module has; those of the decay from `gate` where it is a module of its own."""
    gate = module if gate is None else gate
    found = {"conv_weight": module.conv1d.weight.squeeze(1), "norm_weight": norm.weight,
             "A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias}  # fmt: skip
    return found if module.conv1d.bias is None else {**found, "conv_bias": module.conv1d.bias}


def linear(weight: Tensor) -> nn.Linear:
    """A projection with this weight `[out, in]` and no bias."""
    found = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        found.weight.copy_(weight)
    return found
