# ---
# jupyter:
#   ruff: noqa:N999
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Several ranks
#
# A layer may lie on several ranks. There are two cuts, and both have to give what one rank gives:
#
# | cut | a rank has | ranks exchange |
# |---|---|---|
# | by heads | its heads: columns of a row, channels, states of its own | rows before, outputs after |
# | by tokens | a stretch of the pack's rows, and all heads | a window and a state at each edge |
#
# `reference/parallel.py` does both with `torch.distributed`. What each rank has is integers, and stands in two
# operations, `head_shards` and `token_shards`.
#
# The figure shows a pack of 12 rows on 2 ranks. Segment 1 crosses the edge at row 6.

# %%
import numpy as np

from statescan.conformance.mutants import mutant
from statescan.reference.host.shards import head_shards, token_shards
from statescan.reference.norms import rmsnorm_gated
from statescan.reference.ssd import ssd
from statescan.spec.notation import numbers, refusal
from statescan.spec.serving_figures import shards_of_tokens

offsets = np.array([0, 4, 9, 11])
ids, local, entering = token_shards(offsets, 12, 2)
assert entering.tolist() == [-1, 1]  # what enters rank 1 at row 6
shards_of_tokens(ids.tolist(), entering.tolist())

# %% [markdown]
# (PAR-1)=
# ## PAR-1  Ids are built after the gather
#
# :::{clause} PAR-1
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, total_tokens
# :applies: token_shards
# :observable: value, error
# :::
#
# Ids MUST be built from the offsets of the whole pack and from the length of the gathered rows, and be cut afterwards
# where rows are on several ranks.
#
# Example. Offsets `[0, 3]` and 8 rows on 2 ranks: `0, 0, 0, 1` and `1, 1, 1, 1`.
#
# Not this. Built on each rank from its own length: `0, 0, 0, 1` and `0, 0, 0, 1`. Fault: ids-built-before-the-gather.
#
# Why. A rank that knows its own rows only cannot know where it stands. Where offsets pass its length it is refused
# (PACK-4); where they do not, nobody notices.

# %%
assert token_shards(np.array([0, 3]), 8, 2)[0].tolist() == [[0, 0, 0, 1], [1, 1, 1, 1]]

wrong = mutant("ids-built-before-the-gather")
assert wrong["token_shards"](np.array([0, 3]), 8, 2)[0].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]

# %% [markdown]
# (PAR-2)=
# ## PAR-2  Each part of a row is cut by itself
#
# :::{clause} PAR-2
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: head_shards; causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention,
# : ssd when cut by heads
# :observable: value, error, relation
# :::
#
# A rank MUST have its heads of every part of a row, so that its convolution runs over its stretch of x, of B and of C.
#
# Example. Mamba2 without z, 2 heads and 2 groups, a row `x0 x1 B0 B1 C0 C1 dt0 dt1`: rank 1 has columns `1, 3, 5, 7`
# and channels `1, 3, 5` of the convolution.
#
# Not this. The row cut in the middle: rank 1 has columns `4, 5, 6, 7`, C and dt of both heads, and channels `3, 4, 5`.
# Fault: row-cut-in-equal-stretches.
#
# Why. A weight that is stored as one matrix looks as if it could be cut in two. Shapes agree, and so do sums.

# %%
two_heads = {"kind": "mamba2", "bare": True, "heads": 2, "groups": 2}
assert head_shards(two_heads, 2)[1] == {"row": [1, 3, 5, 7], "conv": [1, 3, 5], "out": [1], "norm": [1]}
row = ["x0", "x1", "B0", "B1", "C0", "C1", "dt0", "dt1"]
assert [row[column] for column in head_shards(two_heads, 2)[1]["row"]] == ["x1", "B1", "C1", "dt1"]

wrong = mutant("row-cut-in-equal-stretches")
found = wrong["head_shards"](two_heads, 2)[1]
assert (found["row"], found["conv"]) == ([4, 5, 6, 7], [3, 4, 5])

# %% [markdown]
# (PAR-3)=
# ## PAR-3  A segment that crosses takes its window and state along
#
# :::{clause} PAR-3
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: token_shards; causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention,
# : ssd when cut by tokens
# :observable: value, error, relation
# :::
#
# The segment that has rows on both sides of an edge, and no other, MUST enter the rank behind with the window and the
# state that it left the rank before with.
#
# Example. Offsets `[0, 3, 8, 8, 12]` and 16 rows on 4 ranks: segment 1 enters rank 1, nothing enters rank 2, and the
# rows behind the last offset are a segment of their own: `-1, 1, -1, -1`. A sum of `1, 2, 3, 4`, two tokens a rank:
# `1, 3` and `6, 10`.
#
# Not this. Every rank starts afresh: `-1, -1, -1, -1`, and `1, 3` and `3, 7`. Fault: crossing-segment-starts-afresh.
#
# Why. To a rank its first row looks like the start of a document. The edge lies where the batch size puts it, so the
# fault moves with it.

# %%
crossing = np.array([0, 3, 8, 8, 12])
assert token_shards(crossing, 16, 4)[2].tolist() == [-1, 1, -1, -1]
assert refusal(token_shards, crossing[:2], 7, 2) == (
    "ShapeError: total_tokens=7 on 2 ranks: equal shards are needed (PAR-3)"
)


def sums(plan):
    """A sum of 1, 2, 3, 4 on two ranks; the state of the first enters the second where the plan says so."""
    state, found = np.zeros((1, 1, 1, 1)), []
    for part, row in zip([[1, 2], [3, 4]], plan(np.array([0, 4]), 4, 2)[2].tolist(), strict=True):
        ones = np.ones((1, 2, 1))
        y, state = ssd(
            np.array(part, float)[None, :, None, None], ones, np.zeros(1), ones[..., None], ones[..., None],
            initial_state=state if row == 0 else None, dt_softplus=False, output_final_state=True,
        )  # fmt: skip
        found.append(numbers(y.ravel()))
    return found


assert sums(token_shards) == [[1, 3], [6, 10]]

wrong = mutant("crossing-segment-starts-afresh")
assert wrong["token_shards"](crossing, 16, 4)[2].tolist() == [-1, -1, -1, -1]
assert sums(wrong["token_shards"]) == [[1, 3], [3, 7]]

# %% [markdown]
# (PAR-4)=
# ## PAR-4  A group that lies on several ranks is on each of them
#
# :::{clause} PAR-4
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: head_shards
# :observable: value, error
# :::
#
# A group of heads that spans several ranks MUST be on each of them, and ranks that would have a part of one group and a
# part of another be refused.
#
# Example. Mamba2 of 4 heads and 2 groups on 4 ranks, B in columns 4 and 5: the ranks have `4, 4, 5, 5`. Three groups on
# 2 ranks -> `ranks=2 and 3 groups: one has to divide the other (PAR-4)`.
#
# Not this. Groups dealt in turn, rank r has group r modulo 2: `4, 5, 4, 5`. Fault: groups-dealt-by-rank-number.
#
# Why. Head h reads group `h // (heads // groups)` of the whole (GDN-5, SSD-5). On a rank with one group every head
# reads that one, so it has to be theirs.

# %%
two_groups = {"kind": "mamba2", "bare": True, "heads": 4, "groups": 2}
B = {4, 5}
assert [(B & set(rank["row"])).pop() for rank in head_shards(two_groups, 4)] == [4, 4, 5, 5]
assert refusal(head_shards, {"kind": "mamba2", "heads": 12, "groups": 3}, 2) == (
    "ShapeError: ranks=2 and 3 groups: one has to divide the other (PAR-4)"
)

wrong = mutant("groups-dealt-by-rank-number")
assert [(B & set(rank["row"])).pop() for rank in wrong["head_shards"](two_groups, 4)] == [4, 5, 4, 5]

# %% [markdown]
# (PAR-5)=
# ## PAR-5  The norm averages over its whole group
#
# :::{clause} PAR-5
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: head_shards
# :observable: value
# :::
#
# The gated norm MUST average over all channels of a norm group of the whole, on whatever ranks they lie.
#
# Example. Two heads of one group, channels of 1 and 7: both ranks name norm group 0, the mean of squares is 25, and the
# outputs are `0.2` and `1.4`.
#
# Not this. Each rank averages over its own: groups 0 and 1, outputs `1` and `1`. Fault: norm-over-a-shard.
#
# Why. Every rank then normalises its one channel to 1: what the heads say of each other is lost, and the model depends
# on the number of ranks. Where a group has all of its channels on one rank nothing is exchanged. The opposite fault
# makes groups too small, the width of a rank over the number of groups in the whole.

# %%
def normed(shards):
    """Channels of 1 and 7 on two ranks: sums of squares are added over the ranks that name one group."""
    values, found = [1.0, 7.0], []
    for rank in shards:
        together = [value for value, other in zip(values, shards, strict=True) if other["norm"] == rank["norm"]]
        whole = rmsnorm_gated(np.array([together]), None, np.ones(len(together)), eps=0.0)
        found.append(whole[0, together.index(values[len(found)])].item())
    return found


one_group = {"kind": "mamba2", "heads": 2, "groups": 1}
assert [rank["norm"] for rank in head_shards(one_group, 2)] == [[0], [0]]
assert (1**2 + 7**2) / 2 == 25
assert normed(head_shards(one_group, 2)) == [0.2, 1.4]

wrong = mutant("norm-over-a-shard")
assert [rank["norm"] for rank in wrong["head_shards"](one_group, 2)] == [[0], [1]]
assert normed(wrong["head_shards"](one_group, 2)) == [1, 1]

# %% [markdown]
# What is equal, and how far. Cut by heads or by tokens, each output is computed from the same numbers in the same
# order as on one rank, so shards together are the whole **bit for bit**. Two things are not: a norm group on several
# ranks, whose sum of squares is made of partial sums, and an output projection that is summed over ranks instead of
# gathered. Both stay within the envelope (NUM-1).
#
# Token shards run one behind the other, since a state needs the one before. Schemes that run them at once combine
# decays and states of whole shards; they have to give these numbers within the envelope too.
