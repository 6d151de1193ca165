"""A mixer on several ranks, by torch.distributed: cut by heads, or by tokens (PAR).

    by heads    each rank projects all rows to its own columns, has its own pools, and runs its heads as a mixer of its
                own; outputs are put together before the last projection. Packs and serving alike.
    by tokens   each rank has a stretch of rows; window and state go from rank to rank with the segment that crosses

Shards together are the whole bit for bit: nothing is summed in another order, but for the mean of a norm group that
lies on several ranks. Any backend serves; tensors go to a rank's GPU where it is NCCL.
Source: https://github.com/NVIDIA/Megatron-LM (core/ssm/mamba_mixer, mamba_context_parallel)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from statescan.reference.arrays import Float64, add_along
from statescan.reference.conv import causal_conv1d
from statescan.reference.host.shards import head_shards, heads_and_groups, shard_config, token_shards
from statescan.reference.inference import Output, Tensor, apply_projection
from statescan.reference.mixers import MIXERS, RecurrentMixer
from statescan.reference.mixers.arrays import to_float64, to_tensor
from statescan.reference.norms import activate
from statescan.reference.packed import get_cu_seqlens
from statescan.spec.contract import PackedSeqParams

PER_HEAD: tuple[str, ...] = ("A_log", "A", "D", "dt_bias")
"""Parameters with a row for each head; those of the convolution and of the norm have one for each channel."""


# ---------------------------------------------------------------------------------------------------------------------
# By heads
# ---------------------------------------------------------------------------------------------------------------------


def shard_heads(mixer: RecurrentMixer, group: Any = None, *, rows_are_sharded: bool = False) -> RecurrentMixer:
    """This rank's part of a mixer that every rank has as a whole (PAR-2, PAR-4, PAR-5).

    It is a mixer like any other, for packs and for steps of serving, with its own heads, pools and parameters; what it
    returns is the whole's output. With `rows_are_sharded` each rank gives and gets its stretch of the rows `[T/ranks,
    1, d_model]`; rows are gathered by the projection, so that ids are built from all of them (PAR-1).
    Raises ShapeError where heads do not divide.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    columns = head_shards(mixer.config, ranks)
    own = columns[rank]
    kind = type("HeadShard", (HeadShard, MIXERS[mixer.config.kind]), {})
    shard: HeadShard = kind(
        shard_config(mixer.config, ranks), layer_number=mixer.layer_number, pp_layer_offset=mixer.pp_layer_offset,
        in_proj=Columns(mixer.in_proj, own["row"], group, rows_are_sharded),
        out_proj=Gathered(mixer.out_proj, [of["out"] for of in columns], group, rows_are_sharded),
    )  # fmt: skip
    shard.norm_ranks = [of["norm"] for of in columns]
    shard.group = group
    heads = heads_and_groups(mixer.config)[0] // ranks
    for name, parameter in parameters_of(mixer).items():
        if name.startswith("conv_"):
            parameter = parameter[own["conv"]]
        elif name == "norm_weight" and len(parameter) == mixer.config.d_inner:
            parameter = parameter[own["out"]]
        elif name in PER_HEAD:
            parameter = parameter[rank * heads : (rank + 1) * heads]
        setattr(shard, name, parameter if name == "A" else nn.Parameter(parameter))
    for name in {*PER_HEAD, "conv_bias", "norm_weight"} - set(parameters_of(mixer)):
        setattr(shard, name, None)
    return shard


def parameters_of(mixer: RecurrentMixer) -> dict[str, Tensor]:
    """The parameters that a mixer has of its own, without its projections."""
    names = ("conv_weight", "conv_bias", "norm_weight", *PER_HEAD)
    found = {name: getattr(mixer, name, None) for name in names}
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


class HeadShard(RecurrentMixer):
    """Stands before a mixer's class and makes the mean of a norm group over all ranks that it lies on (PAR-5)."""

    norm_ranks: Sequence[Sequence[int]]
    group: Any

    def finish(self, o: Float64, z: Float64 | None) -> Float64:
        """As the mixer's, with sums of squares from the other ranks where they have channels of the same norm group."""
        rank = dist.get_rank(self.group)
        shared = [r for r, groups in enumerate(self.norm_ranks) if set(groups) & set(self.norm_ranks[rank])]
        if self.norm_weight is None or shared == [rank]:
            return super().finish(o, z)
        # a shared norm group is the only one on its ranks, and the gate comes before this norm (PAR-4, NORM-2)
        first, word = self.config.norm_words
        y = o.reshape(*o.shape[:-2], -1)
        gate = None if z is None else activate(z, word)
        y = y * gate if gate is not None and not first else y
        sums = gather(torch.from_numpy(add_along(y * y, -1)), self.group)
        total = np.sum([sums[r].numpy() for r in shared], axis=0)
        root = np.sqrt(total / (len(shared) * y.shape[-1]) + self.config.norm_eps)
        y = y / root[..., None] * to_float64(self.norm_weight)
        scaled: Float64 = y * gate if gate is not None and first else y
        return scaled


class Columns(nn.Module):
    """A projection to this rank's columns of a row; only they are computed where it is a Linear layer."""

    def __init__(self, whole: Any, columns: Sequence[int], group: Any, rows_are_sharded: bool) -> None:
        super().__init__()
        self.whole, self.columns, self.group, self.rows_are_sharded = whole, list(columns), group, rows_are_sharded

    def forward(self, rows: Tensor) -> Output:
        """Rows `[T, 1, d_model]` (or this rank's) -> `[T, 1, d_proj of the rank]`, and no bias beside."""
        given = torch.cat(gather(rows, self.group)) if self.rows_are_sharded else rows
        if isinstance(self.whole, nn.Linear):
            bias = None if self.whole.bias is None else self.whole.bias[self.columns]
            return nn.functional.linear(given, self.whole.weight[self.columns], bias), None
        return apply_projection(self.whole, given)[0][..., self.columns], None


class Gathered(nn.Module):
    """The last projection behind a gathering of all ranks' channels: nothing is summed over ranks."""

    def __init__(self, whole: Any, channels: Sequence[Sequence[int]], group: Any, rows_are_sharded: bool) -> None:
        super().__init__()
        self.whole, self.channels, self.group, self.rows_are_sharded = whole, channels, group, rows_are_sharded

    def forward(self, y: Tensor) -> Output:
        """This rank's channels `[T, 1, d_inner / ranks]` -> the output of all (or this rank's rows of it), and bias."""
        all_of = y.new_empty(*y.shape[:-1], sum(map(len, self.channels)))
        for own, part in zip(self.channels, gather(y, self.group), strict=True):
            all_of[..., own] = part
        out, bias = apply_projection(self.whole, all_of)
        if self.rows_are_sharded:
            out = out.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        return out, bias


# ---------------------------------------------------------------------------------------------------------------------
# By tokens
# ---------------------------------------------------------------------------------------------------------------------


def forward_token_shard(
    mixer: RecurrentMixer, hidden_states: Tensor, packed_seq_params: PackedSeqParams, group: Any = None
) -> Output:
    """This rank's rows `[T/ranks, 1, d_model]` of a pack through a whole mixer: its rows of the output (PAR-1, PAR-3).

    `packed_seq_params` are those of the whole pack, on every rank. Window and state of the segment that crosses an edge
    come from the rank before and go to the one behind. Raises PackingError, ShapeError.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    cu = get_cu_seqlens(packed_seq_params)
    ids, offsets, entering = token_shards(cu, hidden_states.shape[0] * ranks, ranks)
    edge = Edge(entering, group)
    projected, _ = apply_projection(mixer.in_proj, hidden_states)
    rows = to_float64(projected).swapaxes(0, 1)
    own, segments = ids[rank][None], len(cu)  # one more than there are: rows past the last offset (PACK-3)

    def convolve(x: Float64) -> Float64:
        windows = edge.enter(np.zeros((segments, *mixer.config.conv_shape)))
        y, left = causal_conv1d(x, *mixer.conv_parameters(), own, None, windows, activation=mixer.activation)
        edge.leave(left)
        return y

    def recur(inputs: Any) -> Float64:
        by_ids = mixer.config.kind == "mamba2"
        states = edge.enter(np.zeros((segments, *mixer.config.state_shape)))
        bounds = {"seq_idx": own} if by_ids else {"cu_seqlens": offsets[rank]}
        y: Float64
        y, left = mixer.operation("")(*inputs, **bounds, initial_state=states if by_ids else states[:-1],
                                      output_final_state=True, **mixer.settings())  # fmt: skip
        edge.leave(left if by_ids else np.concatenate([left, states[-1:]]))
        return y

    y = mixer.mix(rows, convolve, recur, np.ones(rows.shape[:2], bool))
    return apply_projection(mixer.out_proj, to_tensor(y.swapaxes(0, 1), projected))


class Edge:
    """Where this rank's rows meet those of its neighbours: what crosses is one row of windows, or of states."""

    def __init__(self, entering: Any, group: Any) -> None:
        self.rank, self.group = dist.get_rank(group), group
        self.entering = [int(row) for row in entering]

    def enter(self, rows: Float64) -> Float64:
        """Rows `[N+1, ...]` with that of the entering segment from the rank before; the others as they are."""
        row = self.entering[self.rank]
        if row >= 0:
            received = on_wire(torch.empty(rows.shape[1:], dtype=torch.float64), self.group)
            dist.recv(received, self.peer(self.rank - 1), group=self.group)
            rows[row] = received.cpu().numpy()
        return rows

    def leave(self, rows: Float64) -> None:
        """The row of the segment that goes on, to the rank behind."""
        row = self.entering[self.rank + 1] if self.rank + 1 < len(self.entering) else -1
        if row >= 0:
            dist.send(on_wire(torch.tensor(rows[row]), self.group), self.peer(self.rank + 1), group=self.group)

    def peer(self, rank: int) -> int:
        """The number of a rank of the group among all."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


# ---------------------------------------------------------------------------------------------------------------------
# Between ranks
# ---------------------------------------------------------------------------------------------------------------------


def gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Every rank's tensor, in order of rank, where this one's lies."""
    sent = on_wire(tensor.detach().contiguous(), group)
    found = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, sent, group=group)
    return [part.to(tensor.device) for part in found]


def on_wire(tensor: Tensor, group: Any) -> Tensor:
    """The tensor where the backend takes it: a rank's GPU for NCCL, else the CPU."""
    return tensor.cuda() if dist.get_backend(group) == "nccl" else tensor.cpu()
