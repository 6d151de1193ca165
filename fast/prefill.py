"""Launches of prefill: workspaces, grids and tiles for both families, from shapes alone.

A pack of T tokens in N rows has at most T // CT + N chunks of CT tokens (`kernels.chunks`). What of a chunk needs no
state is made for all chunks at once: two matrices of 32 by 32 for each chunk and head of the delta family, steps and
sums of decays for Mamba2. A second kernel goes along the rows. Nothing here depends on what a call contains, and no
state is kept for a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from statescan.fast.checks import as_index
from statescan.fast.kernels.delta_chunk import delta_chunk_kernel
from statescan.fast.kernels.delta_prefill import delta_prefill_kernel
from statescan.fast.kernels.ssd_prefill import ssd_prefill_kernel, ssd_steps_kernel
from statescan.fast.launch import ceil_div, device_of, power_of_2, strides
from statescan.fast.norms import L2NORM_EPS
from statescan.fast.tiling import slot_strides
from statescan.spec.contract import UnsupportedError

ROWS = 32
MOST_ROWS = 64
CHANNELS = 64
"""Channels whose decays are summed and scored at a time."""
LEAST = 16
"""The least size of a matrix product's operand."""
SSD_CHUNK = 32
PRODUCTS = {torch.bfloat16: (tl.bfloat16, "ieee"), torch.float16: (tl.float32, "tf32"),
            torch.float32: (tl.float32, "tf32x3")}  # fmt: skip
"""Operands and precision of matrix products by the type of the tokens. float16 has as many bits as TF32 and too small a
range: decayed keys and discretised inputs would vanish in it. float32 is taken as the sum of two TF32 numbers and gives
three products, on the matrix units and right to 22 bits."""


class Tile(NamedTuple):
    """Values or channels a program holds, warps, stages of the pipeline along a row."""

    values: int
    warps: int
    stages: int


def token_type(*tensors: Tensor) -> torch.dtype:
    """The type that decides on matrix products: that of the tensors if they share one, else float32."""
    first, *others = {t.dtype for t in tensors}
    return first if not others else torch.float32


def row_tile(values: int, kind: torch.dtype, marked: bool) -> Tile:
    """The tile along rows for states with `values` columns.

    64 columns are what a Hopper product of four warps has at least. Three stages: what a turn needs is asked for a
    whole turn ahead. A loop with snapshots in it, and one over float32 operands, is not pipelined. There Triton 3.6
    makes matrix products of 32 columns and four warps that read outside shared memory (memcheck, on an H200), so such a
    loop has eight warps, or two warps, which use other instructions.
    """
    wide = power_of_2(values)
    if kind != torch.bfloat16:
        return Tile(max(LEAST, min(32, wide)), 2, 1)
    if marked:
        return Tile(64, 8, 1) if wide >= 64 else Tile(max(LEAST, wide), 2, 1)
    return Tile(64, 4, 3) if wide >= 64 else Tile(max(LEAST, wide), 4, 2)


def chunk_tokens(copies: int) -> tuple[int, int]:
    """Tokens and rows of a chunk, `copies` rows a token. Tokens are a power of two: a cut at any 32nd changes no bit.

    >>> [chunk_tokens(copies) for copies in (1, 2, 3, 40)]
    [(32, 32), (16, 32), (8, 32), (1, 64)]
    """
    if copies > MOST_ROWS:
        raise UnsupportedError(f"num_householder={copies}: up to {MOST_ROWS} copies are served (ERR-5)")
    rows = ROWS if copies <= ROWS else MOST_ROWS
    return 1 << (rows // copies).bit_length() - 1, rows


def near(x: Tensor, rows: int) -> Tensor:
    """x, or a copy of it where a tile of `rows` tokens or 256 columns spans 2^31 elements: tiles count in 31 bits."""
    stride = max(rows * x.stride(1), 256 * x.stride(-1))
    return x if stride < 2**31 else x.contiguous()


def snapshot_arguments(
    positions: Tensor | None, snapshots: Tensor | None, columns_first: bool
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Arguments of a kernel for the snapshots asked for, and the strides inside one; nothing where there are none."""
    if positions is None or snapshots is None or positions.shape[0] == 0:
        return (None, 0, None, 0), (0, 0, 0)
    first, *inside = slot_strides(snapshots, columns_first)
    return (as_index(positions), positions.shape[0], snapshots, first), tuple(inside)


def launch_delta(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], o: Tensor, cu_seqlens: Tensor, pool: Tensor,
    read_slots: Tensor, write_slots: Tensor | None, positions: Tensor | None, snapshots: Tensor | None,
    copies: int = 1, scale: float | None = None, use_qk_l2norm: bool = False, state_layout: str = "KV",
    tile: Tile | None = None, chunk_warps: int = 2,
) -> None:  # fmt: skip
    """Fill contiguous o `[1, T, HV, V]`, the pool and the snapshots of a checked call."""
    q, k, v, g, beta = inputs
    CT, rows = chunk_tokens(copies)
    q, k, v, g = (near(x, rows) for x in (q, k, v, g))
    (_, T, heads, keys), (value_heads, values) = q.shape, v.shape[2:]
    N, per_channel = read_slots.shape[0], g.ndim == 4
    kind = token_type(q, k)
    BQ, BK = max(LEAST, CT), max(LEAST, power_of_2(keys))
    places = T // CT + N if N else 0
    snap, snap_inside = snapshot_arguments(positions, snapshots, state_layout == "KV")
    tile = tile or row_tile(values, kind, snap[0] is not None)
    pool_n, *inside = slot_strides(pool, state_layout == "KV")
    wide = torch.float64 if kind == torch.float32 else torch.float32
    operand = torch.bfloat16 if kind == torch.bfloat16 else torch.float32

    def workspace(*shape: int, dtype: torch.dtype = operand) -> Tensor:
        return q.new_empty((places, value_heads, *shape), dtype=dtype)

    A, P = workspace(rows, rows), workspace(BQ, rows)
    factors = workspace(2 * rows + BK if per_channel else 4 * rows, dtype=torch.float32)
    sums = workspace(*((rows, BK) if per_channel else (rows,)), dtype=wide)
    scaled = [workspace(rows, BK) if per_channel else None for _ in range(3)]
    slots = (as_index(cu_seqlens), as_index(read_slots), as_index(read_slots if write_slots is None else write_slots),
             pool.shape[0], N, T)  # fmt: skip
    kept = (A, P, factors, sums, *scaled)
    sizes: tuple[Any, ...] = (value_heads, value_heads // heads, keys)
    with device_of(q):
        if places and value_heads:
            delta_chunk_kernel[(places, value_heads)](
                q, *q.stride()[1:], k, *k.stride()[1:], g, *g.stride()[1:3], g.stride(3) if per_channel else 0,
                beta, *beta.stride()[1:], *slots, N.bit_length(), keys**-0.5 if scale is None else float(scale), *kept,
                *sizes, copies, CT, rows, rows.bit_length() - 1, BQ, BK, min(BK, CHANNELS), per_channel, use_qk_l2norm,
                L2NORM_EPS, snap[0] is not None, *PRODUCTS[kind], num_warps=chunk_warps,
            )  # fmt: skip
        programs = (N + 1) * value_heads * ceil_div(values, tile.values)
        if programs and T + N:
            delta_prefill_kernel[(programs,)](
                q, *q.stride()[1:], k, *k.stride()[1:], v, *v.stride()[1:], o, *kept, *slots, pool, pool_n, *snap,
                *inside, *snap_inside, *sizes, values, copies, CT, rows, BQ, BK, tile.values, per_channel,
                *PRODUCTS[kind], tile.stages, num_warps=tile.warps,
            )  # fmt: skip


def launch_ssd(
    inputs: Sequence[Any], y: Tensor, cu_seqlens: Tensor, pool: Tensor, read_slots: Tensor,
    write_slots: Tensor | None, positions: Tensor | None, snapshots: Tensor | None, dt_softplus: bool = True,
    dt_limit: Sequence[float] = (0.0, float("inf")), tile: Tile | None = None,
) -> None:  # fmt: skip
    """Fill contiguous y `[1, T, H, P]`, the pool and the snapshots of a checked call."""
    x, dt, A, B, C, D, z, dt_bias = inputs
    x, B, C = (near(each, SSD_CHUNK) for each in (x, B, C))
    z = None if z is None else near(z, SSD_CHUNK)
    (_, T, heads, channels), (groups, columns) = x.shape, B.shape[2:]
    N, kind = read_slots.shape[0], token_type(x, B, C)
    snap, snap_inside = snapshot_arguments(positions, snapshots, columns_first=False)
    tile = tile or row_tile(channels, kind, snap[0] is not None)
    pool_n, head, column, channel = slot_strides(pool, columns_first=False)
    snap_head, snap_column, snap_channel = snap_inside
    programs = (N + 1) * heads * ceil_div(channels, tile.values)
    if not programs or not T + N:
        return
    skip = (0, 0) if D is None else (*D.stride(), 0)[:2]
    places = T // SSD_CHUNK + N if N else 0
    offsets = as_index(cu_seqlens)
    wide = kind == torch.float32
    steps = x.new_empty((places, heads, SSD_CHUNK), dtype=torch.float32)
    sums = x.new_empty(steps.shape, dtype=torch.float64 if wide else torch.float32)
    block = min(16, power_of_2(heads))
    with device_of(x):
        if places:
            ssd_steps_kernel[(places, ceil_div(heads, block))](
                dt, *dt.stride()[1:], A, A.stride(0), dt_bias, *strides(dt_bias, 1), float(dt_limit[0]),
                float(dt_limit[1]), offsets, N, T, N.bit_length(), steps, sums, heads, block, SSD_CHUNK, dt_softplus,
                wide, num_warps=4,
            )  # fmt: skip
        ssd_prefill_kernel[(programs,)](
            x, *x.stride()[1:], B, *B.stride()[1:], C, *C.stride()[1:], D, *skip, z, *strides(z, 4)[1:], y, steps,
            sums, offsets, as_index(read_slots), as_index(read_slots if write_slots is None else write_slots),
            pool.shape[0], N, T, pool, pool_n, *snap,
            head, channel, column, snap_head, snap_channel, snap_column,
            heads, heads // groups, channels, columns, SSD_CHUNK, tile.values, max(LEAST, power_of_2(columns)),
            *PRODUCTS[kind], tile.stages, num_warps=tile.warps,
        )  # fmt: skip
