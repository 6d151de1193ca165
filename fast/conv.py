"""The short causal convolution of every mixer on CUDA tensors: packed and differentiable, and on a slot pool (CONV).

Names, arguments and meaning are those of `statescan.reference.conv`. Pools are read and written in place through slot
indices, any strides are honoured, and no call waits for the device, except `causal_conv1d` with `seq_idx` alone: the
number of rows of its final windows is the largest id + 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statescan.fast.checks import check_call
from statescan.fast.conv_launch import launch_prefill, launch_update, pull_back
from statescan.fast.launch import device_of, is_traced, needs_grad, register
from statescan.fast.packed import ids_to_offsets
from statescan.fast.relaunch import Key, key_of, remembered


class _Conv(torch.autograd.Function):
    """The packed convolution and its cotangents."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, rows: int,
        initial_windows: Tensor | None, activation: str | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, cu_seqlens, initial_windows)
        ctx.rows, ctx.activation = rows, activation
        return convolve(x, weight, bias, cu_seqlens, rows, initial_windows, activation)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, cu_seqlens, initial_windows = ctx.saved_tensors
        grad_y, grad_final = cotangents
        dx, dw, db, enter = pull_back(
            grad_y, grad_final, x, weight, bias, cu_seqlens, ctx.rows, initial_windows, ctx.activation
        )
        return dx, dw, db, None, None, enter, None


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None, initial_windows: Tensor | None = None, *, activation: str | None = None,
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolve a pack, resetting at every boundary (CONV-3): returns (y, final_windows), both differentiable.

    x `[1, T, C]` with one of `seq_idx [1, T]`, `cu_seqlens [N+1]`, or `[batch, T, C]` where each batch row is a
    segment. weight `[C, W]`, bias `[C]`, initial_windows `[N, C, W]` (CONV-4; zeros where absent). y has x's shape and
    type, final_windows `[N, C, W]` x's type (CONV-5). Rows past the last offset, or with id -1, give 0 (PACK-8).
    With ids and no windows N is read from the device. Raises PackingError, ShapeError, DtypeError, UnsupportedError.
    """
    if is_traced(x):
        y, final = _packed_op(x, weight, bias, seq_idx, cu_seqlens, initial_windows, activation, check)
        return y, final
    cu_seqlens, rows = _boundaries(x, weight, bias, seq_idx, cu_seqlens, initial_windows, activation, check)
    if needs_grad(x, weight, bias, initial_windows):
        run: Any = _Conv.apply
        y, final = run(x, weight, bias, cu_seqlens, rows, initial_windows, activation)
        return y, final
    return convolve(x, weight, bias, cu_seqlens, rows, initial_windows, activation)


def _boundaries(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None,
    initial_windows: Tensor | None, activation: str | None, check: bool | None,
) -> tuple[Tensor | None, int]:  # fmt: skip
    """Check a packed call; its offsets, None where each batch row is a segment, and the number of segments."""
    tensors = {"x": x, "weight": weight, "bias": bias, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens,
               "initial_windows": initial_windows}  # fmt: skip
    check_call("causal_conv1d", tensors, {"activation": activation}, check)
    if cu_seqlens is not None:
        return cu_seqlens, cu_seqlens.shape[0] - 1
    if seq_idx is None:
        return None, x.shape[0]
    if initial_windows is not None:
        segments = initial_windows.shape[0]
    else:
        segments = int(seq_idx.max()) + 1 if seq_idx.numel() else 0
    return ids_to_offsets(seq_idx, segments), segments


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, rows: int,
    initial_windows: Tensor | None, activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and the final windows of a checked call."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final = x.new_zeros(rows, *weight.shape)
    launch_prefill(x, y, weight, bias, cu_seqlens, initial_windows, final, None, None, None, None, rows, activation)
    return y, final


def causal_conv1d_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None, snapshot_windows: Tensor | None = None,
    *, activation: str | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Convolve a pack whose rows resume from, and store to, slots of `conv_pool [slots, C, W]` (SLOT-2, SLOT-3).

    x `[1, T, C]`, cu_seqlens `[N+1]`, read_slots and write_slots `[N]`; snapshot_windows `[X, C, W]` receive the
    windows at snapshot_positions `[X]` (SNAP-3). Returns y `[1, T, C]`. Raises PackingError, ShapeError, DtypeError,
    UnsupportedError, SlotError.
    """
    run = _prefill_op if is_traced(x) else _prefill
    return run(x, weight, bias, cu_seqlens, conv_pool, read_slots, write_slots, snapshot_positions, snapshot_windows,
               activation, check)  # fmt: skip


def _prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, snapshot_positions: Tensor | None, snapshot_windows: Tensor | None,
    activation: str | None, check: bool | None,
) -> Tensor:  # fmt: skip
    tensors = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens, "conv_pool": conv_pool,
               "read_slots": read_slots, "write_slots": write_slots, "snapshot_positions": snapshot_positions,
               "snapshot_windows": snapshot_windows}  # fmt: skip
    check_call("causal_conv1d_prefill", tensors, {"activation": activation}, check)
    write = read_slots if write_slots is None else write_slots
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_prefill(x, y, weight, bias, cu_seqlens, conv_pool, conv_pool, read_slots, write, snapshot_positions,
                   snapshot_windows, read_slots.shape[0], activation)  # fmt: skip
    return y


def causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None = None, intermediate_windows: Tensor | None = None, num_accepted: Tensor | None = None,
    num_tokens: Tensor | None = None, *, activation: str | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Convolve J tokens a row, window from and to its slot: equal to prefill token by token (CONV-6).

    x `[N, J, C]`; entry j of `intermediate_windows [slots, I, C, W]`, I >= J, becomes the window after token j
    (CONV-8); num_accepted `[N]` and num_tokens `[N]` as SPEC-3 and SPEC-6 say. Returns y `[N, J, C]`. Raises
    ShapeError, DtypeError, UnsupportedError, SlotError.
    """
    run = _update_op if is_traced(x) else _update
    return run(x, weight, bias, conv_pool, read_slots, write_slots, intermediate_windows, num_accepted, num_tokens,
               activation, check)  # fmt: skip


_UPDATE_TENSORS = ("x", "weight", "bias", "conv_pool", "read_slots", "write_slots", "intermediate_windows",
                   "num_accepted", "num_tokens")  # fmt: skip


def _update(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, read_slots: Tensor, write_slots: Tensor | None,
    intermediate_windows: Tensor | None, num_accepted: Tensor | None, num_tokens: Tensor | None,
    activation: str | None, check: bool | None,
) -> Tensor:  # fmt: skip
    tensors = (x, weight, bias, conv_pool, read_slots, write_slots, intermediate_windows, num_accepted, num_tokens)
    key: Key | None = None
    if x.is_cuda and not check:
        key, pointers = key_of(tensors, "causal_conv1d_update", activation)
        launch = remembered.get(key)
        if launch is not None:
            y = _like(x)
            with device_of(x):
                launch.again([*pointers, y.data_ptr()])
            return y
    check_call("causal_conv1d_update", dict(zip(_UPDATE_TENSORS, tensors, strict=True)), {"activation": activation},
               check)  # fmt: skip
    y = _like(x)
    launch_update(x, y, weight, bias, conv_pool, read_slots, write_slots, intermediate_windows, num_accepted,
                  num_tokens, activation, key=key)  # fmt: skip
    return y


# ---------------------------------------------------------------------------------------------------------------------
# What tracers see
# ---------------------------------------------------------------------------------------------------------------------


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None,
    initial_windows: Tensor | None, activation: str | None, check: bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cu_seqlens, rows = _boundaries(x, weight, bias, seq_idx, cu_seqlens, initial_windows, activation, check)
    return convolve(x, weight, bias, cu_seqlens, rows, initial_windows, activation)


def _packed_like(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None,
    initial_windows: Tensor | None, *_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if cu_seqlens is not None:
        rows: Any = cu_seqlens.shape[0] - 1
    elif initial_windows is not None or seq_idx is None:
        rows = x.shape[0] if initial_windows is None else initial_windows.shape[0]
    else:
        rows = torch.library.get_ctx().new_dynamic_size()
    return _like(x), x.new_empty(rows, *weight.shape)


def _pull_packed(
    grad_y: Tensor, grad_final: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None,
    cu_seqlens: Tensor | None, initial_windows: Tensor | None, activation: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = grad_final.shape[0]
    if cu_seqlens is None and seq_idx is not None:
        cu_seqlens = ids_to_offsets(seq_idx, rows)
    dx, dw, db, enter = pull_back(
        grad_y, grad_final, x, weight, bias, cu_seqlens, rows, initial_windows, activation
    )
    return dx, dw, x.new_empty(0) if db is None else db, x.new_empty(0) if enter is None else enter


def _pull_like(
    grad_y: Tensor, grad_final: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None,
    cu_seqlens: Tensor | None, initial_windows: Tensor | None, activation: str | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(x.new_empty(0) if t is None else _like(t) for t in (x, weight, bias, initial_windows))


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.activation = inputs[6]


def _pull_traced(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Any, ...]:
    x, weight, bias, seq_idx, cu_seqlens, initial_windows = ctx.saved_tensors
    dx, dw, db, enter = _pull_op(
        grad_y, grad_final, x, weight, bias, seq_idx, cu_seqlens, initial_windows, ctx.activation
    )
    absent = (bias is None, initial_windows is None)
    return dx, dw, None if absent[0] else db, None, None, None if absent[1] else enter, None, None


_prefill_op = register("causal_conv1d_prefill", _prefill, _like)
_update_op = register("causal_conv1d_update", _update, _like)
_packed_op = register("causal_conv1d", _packed, _packed_like, "(Tensor, Tensor)")
_pull_op = torch.library.custom_op(
    "statescan::causal_conv1d_backward", _pull_packed, mutates_args=(),
    schema="(Tensor grad_y, Tensor grad_final, Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, "
           "Tensor? cu_seqlens, Tensor? initial_windows, str? activation) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
_pull_op.register_fake(_pull_like)
_packed_op.register_autograd(_pull_traced, setup_context=_keep_inputs)
