"""Tensors and arrays over the same memory: the reference's operations are NumPy, a mixer's hooks speak torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from statescan.reference.arrays import DTYPES, Array, Float64, round_to, widen

TORCH_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
}  # fmt: skip


def to_array(tensor: Any) -> Array:
    """A NumPy view of a CPU tensor, strides kept; anything else as an array."""
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(DTYPES["bf16"]))
    return np.asarray(tensor.numpy())


def to_float64(tensor: Any) -> Float64:
    """The numbers of a tensor in float64, on their own."""
    return widen(to_array(tensor))


def to_tensor(values: Float64, like: torch.Tensor) -> torch.Tensor:
    """Float64 numbers as a tensor, rounded once to the element type of `like` (NUM-2)."""
    rounded = round_to(values, TORCH_NAMES[like.dtype])
    if like.dtype == torch.bfloat16:
        return torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rounded)
