"""The packed recurrences in plain PyTorch, chunk by chunk: on any device, differentiable, without a look at offsets.

Both families are one scan over chunks of L rows. A row decays the state by exp(g), writes k u^T and reads q S. For
Mamba2 u is the discretised input. For the delta rules u is what remains of beta v once the state and the chunk's
earlier rows have been read by k: (I + A) u = beta (v - exp(G) k S), A_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i,
G the log-decay since the chunk began. Source: https://arxiv.org/abs/2412.06464, section 3.3.

Exponents are masked before the exponential, so that none is positive and every gradient is finite (GRAD-3). Segments
begin at chunks of their own, and a chunk's first state is selected, never multiplied, so that nothing passes from one
segment to another, NaN included (PACK-6). Sums of log-decays are float64, everything else is float32 (NUM-1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DELTA_CHUNK = 64
CHANNEL_CHUNK = 16
"""Rows of a chunk whose decay is per channel: scores need one exponential for each pair of rows and channel."""
SSD_CHUNK = 64


class Layout(NamedTuple):
    """Where the rows of a pack lie in chunks of L rows: C chunks, enough for any offsets of N segments.

    rows `[C, L]` and real `[C, L]`: row of each place, and whether it has one; place `[T]` and live `[T]`: place of
    each row in `C * L`, and whether it belongs to a segment; first, segment `[C]`: whether a chunk begins its segment,
    and which that is; last `[N]` and filled `[N]`: each segment's last chunk, and whether it has rows.
    """

    rows: Tensor
    real: Tensor
    place: Tensor
    live: Tensor
    first: Tensor
    segment: Tensor
    last: Tensor
    filled: Tensor


def lay_out(cu_seqlens: Tensor, tokens: int, length: int) -> Layout:
    """The layout of offsets `[N+1]`, N > 0, over `tokens` rows, from sizes alone: nothing waits for the device.

    >>> lay_out(torch.tensor([0, 3, 3, 4]), 5, 2).rows.tolist()
    [[0, 1], [2, 3], [3, 4], [0, 0], [0, 0]]
    """
    cu = cu_seqlens.to(torch.int64)
    device, N = cu.device, cu.shape[0] - 1
    chunks = tokens // length + N
    counts = (cu.diff() + length - 1) // length
    ends = counts.cumsum(0)
    chunk = torch.arange(chunks, device=device)
    segment = torch.searchsorted(ends, chunk, right=True).clamp(max=N - 1)
    inside = chunk - (ends - counts)[segment]
    rows = (cu[segment] + inside * length)[:, None] + torch.arange(length, device=device)
    real = (rows < cu[segment + 1][:, None]) & (chunk < ends[-1])[:, None]
    row = torch.arange(tokens, device=device)
    owner = (torch.searchsorted(cu, row, right=True) - 1).clamp(max=N - 1)
    live = row < cu[-1]
    place = (ends - counts)[owner] * length + row - cu[owner]
    return Layout(
        rows.masked_fill(~real, 0), real, place.masked_fill(~live, 0), live, (inside == 0) & real[:, 0], segment,
        (ends - 1).clamp(min=0), counts > 0,
    )  # fmt: skip


def into_chunks(x: Tensor, layout: Layout) -> Tensor:
    """Rows `[1, T, heads, ...]` as `[C, heads, L, ...]` in float32; places without a row hold 0, whatever x does."""
    found = x[0][layout.rows].float()
    real = layout.real.reshape(*layout.real.shape, *[1] * (x.ndim - 2))
    return torch.where(real, found, 0.0).transpose(1, 2)


def out_of_chunks(y: Tensor, layout: Layout) -> Tensor:
    """`[C, heads, L, ...]` as rows `[1, T, heads, ...]`; rows of no segment are 0 (PACK-8)."""
    rows = y.transpose(1, 2).flatten(0, 1)[layout.place]
    return torch.where(layout.live.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0.0)[None]


def decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of log-decays `[C, heads, L]` or `[C, heads, L, K]`: exp of the sums from the start to each row, from each row
    to the end, over the whole chunk, and from row j to row i `[C, heads, i, j, ...]`, 0 where j > i."""
    G = g.double().cumsum(2)
    past = torch.ones(g.shape[2], g.shape[2], dtype=torch.bool, device=g.device).tril()
    past = past if g.ndim == 3 else past[:, :, None]
    between = torch.where(past, G.unsqueeze(3) - G.unsqueeze(2), -torch.inf).float().exp()
    return G.float().exp(), (G[:, :, -1:] - G).float().exp(), G[:, :, -1].float().exp(), between


def scan(
    q: Tensor, k: Tensor, u: Tensor, reads: Tensor | None, scores: Tensor, whole: Tensor, entering: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Carry states `[N, heads, K, V]` along the chunks: outputs `[C, heads, L, V]` and the last states.

    q `[C, heads, L, K]` holds what reads the entering state, k what writes it at the chunk's end, scores `[.., L, L]`
    what reads the rows of u `[.., L, V]`, whole `[C, heads]` or `[.., K]` the decay over a chunk; reads `[.., L, K]`
    is what a delta rule takes from u.
    """
    state = torch.zeros_like(entering[0])
    outputs, states = [], []
    for c in range(q.shape[0]):
        # ENTER
        state = torch.where(layout.first[c], entering[layout.segment[c]], state)
        # CORRECT
        written = u[c] if reads is None else u[c] - reads[c] @ state
        # READ
        outputs.append(q[c] @ state + scores[c] @ written)
        # DECAY, WRITE
        state = whole[c].reshape(whole.shape[1], -1, 1) * state + k[c].mT @ written
        states.append(state)
    final = torch.where(layout.filled[:, None, None, None], torch.stack(states)[layout.last], entering)
    return torch.stack(outputs), final


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, entering: Tensor, scale: float,
    l2norm_eps: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The delta rule on a pack, decays per head or per channel: o `[1, T, HV, V]` and states `[N, HV, K, V]`, float32.

    Arguments as in `gated_delta_rule`; entering `[N, HV, K, V]` in float32, N > 0 and T > 0.
    """
    layout = lay_out(cu_seqlens, q.shape[1], DELTA_CHUNK if g.ndim == 3 else CHANNEL_CHUNK)
    q, k, v, g, beta = (into_chunks(x, layout) for x in (q, k, v, g, beta))
    if l2norm_eps is not None:
        q, k = (x / (x.square().sum(-1, keepdim=True) + l2norm_eps).sqrt() for x in (q, k))
    copies = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(copies, 1) for x in (q * scale, k))
    before, after, whole, between = decays(g)
    if g.ndim == 3:
        before, after = before[..., None], after[..., None]
        scores, overlaps = q @ k.mT * between, k @ k.mT * between
    else:
        decayed = k.unsqueeze(2) * between
        scores, overlaps = (torch.einsum("chik,chijk->chij", x, decayed) for x in (q, k))
    matrix = (beta[..., None] * overlaps).tril(-1)
    given = beta[..., None] * torch.cat([k * before, v], -1)
    reads, u = torch.linalg.solve_triangular(matrix, given, upper=False, unitriangular=True).split(
        [k.shape[-1], v.shape[-1]], -1
    )
    y, final = scan(q * before, k * after, u, reads, scores, whole, entering, layout)
    return out_of_chunks(y, layout), final


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor, entering: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba2's recurrence on a pack, without D and z: y `[1, T, H, P]` and states `[N, H, P, R]`, float32.

    dt `[1, T, H]` are steps as they count, discretised and limited; entering `[N, H, P, R]`, N > 0 and T > 0.
    """
    layout = lay_out(cu_seqlens, x.shape[1], SSD_CHUNK)
    x, dt, B, C = (into_chunks(each, layout) for each in (x, dt, B, C))
    B, C = (each.repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (B, C))
    before, after, whole, between = decays(dt * A.float()[:, None])
    y, final = scan(C * before[..., None], B * after[..., None], x * dt[..., None], None, C @ B.mT * between, whole,
                    entering.mT, layout)  # fmt: skip
    return out_of_chunks(y, layout), final.mT
