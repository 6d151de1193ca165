"""The four mixers under the mixin on CUDA tensors: the reference's configuration and parameters, fast operations."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from statescan.fast.mixers.base import RecurrentMixer
from statescan.fast.mixers.delta import GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention
from statescan.fast.mixers.mamba2 import Mamba2
from statescan.reference.host.mixer_config import PARAMETERS, read_config

MIXERS: dict[str, type[RecurrentMixer]] = {
    "mamba2": Mamba2, "gdn": GatedDeltaNet, "gdp": GatedDeltaProduct, "kda": KimiDeltaAttention,
}  # fmt: skip
"""The class of each kind of MixerConfig."""


def build_mixer(described: Mapping[str, Any], **more: Any) -> RecurrentMixer:
    """A mixer from its description: configuration words, and parameters as nested lists (None: absent).

    Without `in_proj` and `out_proj` rows come in projected and leave as they are, which is how traces are replayed.
    Parameters are float32, on the CPU until the module is moved.

    >>> mixer = build_mixer({"kind": "gdn", "bare": True, "d_conv": 2, "conv_weight": [[0, 1]] * 3})
    >>> type(mixer).__name__, mixer.config.d_proj
    ('GatedDeltaNet', 5)
    """
    config = read_config(described)
    mixer = MIXERS[config.kind](config, **{"in_proj": nn.Identity(), "out_proj": nn.Identity(), **more})
    for name in (name for name in PARAMETERS if name in described):
        value = None if described[name] is None else torch.tensor(described[name], dtype=torch.float32)
        if name.endswith("_proj"):
            setattr(mixer, name, linear(described[name]))
        else:
            setattr(mixer, name, value if value is None or name == "A" else nn.Parameter(value))
    return mixer


def linear(weight: Any) -> nn.Linear:
    """A projection with this weight `[out, in]` and no bias."""
    matrix = torch.tensor(weight, dtype=torch.float32)
    found = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    found.weight = nn.Parameter(matrix)
    return found


__all__ = [
    "MIXERS", "GatedDeltaNet", "GatedDeltaProduct", "KimiDeltaAttention", "Mamba2", "RecurrentMixer", "build_mixer",
]  # fmt: skip
