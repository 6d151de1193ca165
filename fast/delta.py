"""The gated delta rule, its product form and Kimi delta attention on CUDA tensors (GDN, GDP, KDA).

Names, arguments and meaning are those of `statescan.reference.delta`. Decode reads and writes pools in place through
slot indices, honours any strides, never waits for the device, and compiles nothing for what a batch contains: a call
can be captured in a CUDA graph and replayed with other slots, counts and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from statescan.fast.checks import (
    NAMES,
    as_index,
    check_call,
    check_decay,
    check_runnable,
    live_tokens,
)
from statescan.fast.kernels.commit import commit_kernel
from statescan.fast.kernels.delta_update import delta_update_kernel
from statescan.fast.launch import device_of, is_traced, register, strides
from statescan.fast.tiling import Tile, reaches_far, slot_strides, state_tile
from statescan.spec.contract import INDEX_TYPES, DtypeError, ShapeError, SlotError, UnsupportedError

L2NORM_EPS = 1e-6
MOST_AXES = 4
"""Axes of a slot that a commit can walk over, once those that lie in a row are joined."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, g, beta."""

# ---------------------------------------------------------------------------------------------------------------------
# Decode, once for all siblings
# ---------------------------------------------------------------------------------------------------------------------


def run_update(
    name: str, inputs: Inputs, pool: Tensor, read_slots: Tensor, write_slots: Tensor | None, entries: Tensor | None,
    num_accepted: Tensor | None, num_tokens: Tensor | None, copies: int, scale: float | None, use_qk_l2norm: bool,
    state_layout: str, check: bool | None,
) -> Tensor:  # fmt: skip
    """Check the call `name` and run it: o `[N, J, HV, V]`."""
    q, k, v, g, beta = inputs
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state_pool": pool, "read_slots": read_slots,
               "write_slots": write_slots, "intermediate_states": entries, "num_accepted": num_accepted,
               "num_tokens": num_tokens}  # fmt: skip
    values = check_call(name, tensors, {"num_householder": copies, "state_layout": state_layout}, check)
    if values is not None:
        check_decay(g, live_tokens(values, *q.shape[:2]))
    o = torch.empty((*q.shape[:2], *v.shape[2:]), dtype=v.dtype, device=v.device)
    launch_update(
        inputs, o, pool, read_slots, write_slots, entries, num_accepted, num_tokens, copies, scale, use_qk_l2norm,
        state_layout,
    )  # fmt: skip
    return o


def launch_update(
    inputs: Inputs, o: Tensor, pool: Tensor, read_slots: Tensor, write_slots: Tensor | None, entries: Tensor | None,
    num_accepted: Tensor | None, num_tokens: Tensor | None, copies: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, state_layout: str = "KV", tile: Tile | None = None,
) -> None:  # fmt: skip
    """Fill contiguous o, the pool and the entries of a checked call."""
    q, k, v, g, beta = inputs
    (rows, steps, heads, keys), (value_heads, values) = q.shape, v.shape[2:]
    pool_n, *inside = slot_strides(pool, state_layout == "KV")
    entry_j, *inside_entry = (0, 0, 0, 0) if entries is None else slot_strides(entries, state_layout == "KV")
    tile = tile or state_tile(rows * value_heads, values, keys, pool.element_size(), inside[2], inside[1])
    programs = rows * value_heads * triton.cdiv(values, tile.rows)
    if programs == 0:
        return
    per_channel = g.ndim == 4
    far = reaches_far([
        (keys, inside[1]), (values, inside[2]), (keys, inside_entry[1]), (values, inside_entry[2]),
        (keys, q.stride(3)), (keys, k.stride(3)), (values, v.stride(3)), (keys, g.stride(-1)),
    ])  # fmt: skip
    with device_of(q):
        delta_update_kernel[(programs,)](
            q, *q.stride(), k, *k.stride(), v, *v.stride(), g, *g.stride()[:3], g.stride(3) if per_channel else 0,
            beta, *beta.stride(), o, keys**-0.5 if scale is None else float(scale),
            pool, pool_n, entries, 0 if entries is None else entries.stride(0),
            as_index(read_slots), as_index(read_slots if write_slots is None else write_slots),
            as_index(num_accepted), as_index(num_tokens), pool.shape[0], 0 if entries is None else entries.shape[1],
            *inside, entry_j, *inside_entry, steps, copies, value_heads, value_heads // heads, keys, values,
            tile.rows, tile.chunks, tile.inner, triton.next_power_of_2(steps),
            PER_CHANNEL=per_channel, L2NORM=use_qk_l2norm, EPS=L2NORM_EPS, WIDE=far, num_warps=tile.warps,
        )  # fmt: skip
