"""flash-linear-attention's chunked kernels for training, with a guard for each thing that they get wrong or lack.

Used on a GPU for bfloat16 tokens, and for float32 ones where PyTorch's own matrix products may use TF32, which is what
those kernels then do. Not for float16: a state over 65504 becomes NaN there, and the gate's gradient is summed in it.
Everything else runs in `statescan.fast.chunked`. Findings are those of spec/findings.md.

- Rows past the last offset are never written, as outputs and as gradients: they are set to 0 here.
- A chunk table is remembered by the identity of its offsets, whatever happened to their content since: offsets go in
  as a copy, one for each content.
- The product takes no fewer key heads than value heads, no states but float32, and no float32 tokens.

Source: https://github.com/fla-org/flash-linear-attention
"""

from __future__ import annotations

import weakref
from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from statescan.fast.rows import zero_padding

LEAST_VERSION = Version("0.6")
MOST_KEYS = 256
FUNCTIONS = {
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "gated_delta_product": ("fla.ops.gated_delta_product", "chunk_gated_delta_product"),
    "kimi_delta_attention": ("fla.ops.kda", "chunk_kda"),
}


@cache
def is_installed() -> bool:
    """Whether a version is there that the guards were written for."""
    try:
        return Version(metadata.version("fla-core")) >= LEAST_VERSION
    except metadata.PackageNotFoundError:
        return False


def on_gpu(x: Tensor) -> bool:
    """Whether x is where the kernels run."""
    return x.is_cuda


def is_served(name: str, q: Tensor, k: Tensor, v: Tensor, segments: int) -> bool:
    """Whether a call goes to the package: by device, types and sizes alone, never by what a tensor holds."""
    kinds = {q.dtype, k.dtype, v.dtype}
    narrow = kinds == {torch.bfloat16}
    wide = kinds == {torch.float32} and torch.get_float32_matmul_precision() != "highest"
    sizes = 0 < q.shape[-1] <= MOST_KEYS and q.shape[1] > 0 and segments > 0
    return on_gpu(q) and (narrow or (wide and name != "gated_delta_product")) and sizes and is_installed()


def run(
    name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None,
    initial_state: Tensor | None, copies: int, scale: float, use_qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The packed operation `name` through the package: o and the final state, both with the package's gradient."""
    module, function = FUNCTIONS[name]
    more: dict[str, Any] = {}
    if name == "gated_delta_product":
        more["num_householder"] = copies
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    if cu_seqlens is not None:
        more["cu_seqlens"] = offsets = same_offsets(cu_seqlens)
        wide = offsets * copies
        q, g = Inert.apply(q, offsets), Inert.apply(g, offsets)  # type: ignore[no-untyped-call]
        k, v, beta = (Inert.apply(x, wide) for x in (k, v, beta))  # type: ignore[no-untyped-call]
    entering = None if initial_state is None else initial_state.float()
    o, final = getattr(import_module(module), function)(
        q, k, v, g, beta, scale=scale, initial_state=entering, output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm, **more,
    )  # fmt: skip
    if cu_seqlens is not None:
        o = Silent.apply(o, offsets)  # type: ignore[no-untyped-call]
    return o, final


class Inert(torch.autograd.Function):
    """x itself; of its gradient, rows past the last offset are 0, whatever the kernel left there (GRAD-4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        # in place: the kernel has just made this gradient, for the one reader that this edge has
        return silence(grads[0].contiguous(), ctx.saved_tensors[0]), None


class Silent(torch.autograd.Function):
    """The kernel's output with rows past the last offset set to 0 in place (PACK-8)."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, offsets: Tensor) -> Tensor:
        ctx.mark_dirty(o)
        return silence(o, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


def silence(rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows `[1, T, ...]`, contiguous, with those past the last offset set to 0; one launch, no copy."""
    segments = offsets.shape[0] - 1
    zero_padding(rows.view(1, rows.shape[1], -1), offsets.new_zeros(segments), 1, offsets)
    return rows


_copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}


def same_offsets(cu_seqlens: Tensor) -> Tensor:
    """A copy of offsets in int64, the same object for as long as they are not written to.

    The package remembers its tables by object and waits for the device to make one; layers share them through this.
    """
    key, version = id(cu_seqlens), cu_seqlens._version
    known = _copies.get(key)
    if known is not None and known[0]() is cu_seqlens and known[1] == version:
        return known[2]
    copy = cu_seqlens.detach().to(torch.int64, copy=True)
    _copies[key] = weakref.ref(cu_seqlens, lambda _: _copies.pop(key, None)), version, copy
    return copy
