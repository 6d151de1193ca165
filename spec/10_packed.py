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
# # Packed sequences
#
# A pack is several sequences laid end to end in one tensor, so that a kernel runs once instead of once per sequence.
# Two things say where one ends and the next begins:
#
# - **offsets**, `cu_seqlens`: `[0, 5, 7, 11]` is three segments of 5, 2 and 4 rows;
# - **ids**, `seq_idx`: the number of each row's segment, one per row.
#
# The pack may be longer than its last offset. Below, 16 rows hold 11 tokens, and the last 5 rows are padding.

# %%
from statescan.conformance.mutants import mutant
from statescan.reference.conv import causal_conv1d, causal_conv1d_grad
from statescan.reference.packed import build_packed_seq_idx, get_cu_seqlens
from statescan.spec.contract import PackedSeqParams
from statescan.spec.figures import segment_strip
from statescan.spec.notation import NAN, ids, index, numbers, refusal, runs, taps, tokens, windows

segment_strip([0, 5, 7, 11], 16)

# %% [markdown]
# Two habits keep the examples short. Ids are written in runs: `0x5 1x2` is five rows of id 0, then two of id 1.
# Convolutions use one channel and the weight 1000, 100, 10, 1, so that the digits of an output spell the tokens that it
# read: `123` read 1, 2 and 3.

# %%
DIGITS = taps(1000, 100, 10, 1)

assert runs([0, 0, 0, 0, 0, 1, 1]) == "0x5 1x2"
assert numbers(causal_conv1d(tokens(1, 2, 3), DIGITS)[0]) == [1, 12, 123]

# %% [markdown]
# (PACK-1)=
# ## PACK-1  Padded offsets win
#
# :::{clause} PACK-1
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, get_cu_seqlens
# :applies: get_cu_seqlens, build_packed_seq_idx
# :observable: value
# :::
#
# The offsets that count MUST be `cu_seqlens_q_padded` where it is given, and `cu_seqlens_q` otherwise.
#
# Example. Three segments, each padded to a multiple of four: actual `[0, 5, 7, 11]`, padded `[0, 8, 12, 16]`, 16 rows
# -> `0x8 1x4 2x4`.
#
# Not this. Ids from the actual offsets: `0x5 1x2 2x4 3x5`. Fault: actual-offsets-win.
#
# Why. The padding rows are in the tensor. Ids from the actual offsets slip against it from the first padded segment on,
# and part of each segment runs as part of the next.

# %%
padded = PackedSeqParams(cu_seqlens_q=[0, 5, 7, 11], cu_seqlens_q_padded=[0, 8, 12, 16])
assert numbers(get_cu_seqlens(padded)) == [0, 8, 12, 16]
assert runs(build_packed_seq_idx(padded, 16)) == "0x8 1x4 2x4"

wrong = mutant("actual-offsets-win")
assert runs(wrong["build_packed_seq_idx"](padded, 16)) == "0x5 1x2 2x4 3x5"

# %% [markdown]
# (PACK-2)=
# ## PACK-2  Ids are ordinals, one per row
#
# :::{clause} PACK-2
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, paragraph 2
# :applies: build_packed_seq_idx
# :observable: value, shape
# :::
#
# The ids MUST be int32 of shape `[1, total_tokens]` and hold for each row the ordinal of its segment, counted from 0.
#
# Example. `[0, 5, 7, 11]`, 16 rows -> `0x5 1x2 2x4 3x5`, of shape `(1, 16)`.
#
# Not this. Counted from one: `1x5 2x2 3x4 4x5`. Fault: ids-count-from-one.
#
# Why. Entering windows, states and slots are found by the ordinal: counted from one, each segment resumes from its
# neighbour's.

# %%
params = PackedSeqParams(cu_seqlens_q=[0, 5, 7, 11])
seq_idx = build_packed_seq_idx(params, 16)
assert runs(seq_idx) == "0x5 1x2 2x4 3x5"
assert (seq_idx.shape, seq_idx.dtype) == ((1, 16), "int32")

wrong = mutant("ids-count-from-one")
assert runs(wrong["build_packed_seq_idx"](params, 16)) == "1x5 2x2 3x4 4x5"

# %% [markdown]
# (PACK-3)=
# ## PACK-3  Rows after the last offset are a segment of their own
#
# :::{clause} PACK-3
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, paragraph 2
# :applies: build_packed_seq_idx; causal_conv1d, ssd when driven by seq_idx
# :observable: value, relation
# :::
#
# When `cu_seqlens[-1] < total_tokens`, the remaining rows MUST carry the next free ordinal; when they are equal, no
# ordinal is added.
#
# Example. `[0, 5, 7, 11]`, 16 rows -> `0x5 1x2 2x4 3x5`; the same with 11 rows -> `0x5 1x2 2x4`.
#
# Not this. The last segment stretched over the rest: `0x5 1x2 2x9`. Fault: tail-joins-last-segment.
#
# Why. Padding of a pack must not read the last document's window and state, nor end up in them.

# %%
params = PackedSeqParams(cu_seqlens_q=[0, 5, 7, 11])
assert runs(build_packed_seq_idx(params, 16)) == "0x5 1x2 2x4 3x5"
assert runs(build_packed_seq_idx(params, 11)) == "0x5 1x2 2x4"

wrong = mutant("tail-joins-last-segment")
assert runs(wrong["build_packed_seq_idx"](params, 16)) == "0x5 1x2 2x9"

# %% [markdown]
# (PACK-4)=
# ## PACK-4  Offsets that describe no pack are refused
#
# :::{clause} PACK-4
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, paragraph 2
# :applies: get_cu_seqlens, build_packed_seq_idx;
# : causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill when given cu_seqlens
# :observable: error
# :::
#
# Offsets that are not integers, do not start at 0, decrease, or pass the last row MUST be refused with a PackingError.
#
# Example. `[0, 5, 7, 6]` with 8 rows -> `cu_seqlens[3]=6 < cu_seqlens[2]=7: offsets must not decrease (PACK-4)`.
# `[3, 5]`, `[0.0, 5.0]`, and `[0, 5, 7, 11]` with only 9 rows are refused as well; an empty segment, `[0, 5, 5, 8]`, is
# not.
#
# Not this. The negative length clamped to nothing: `0x5 1x2 3x1`. Fault: decreasing-offsets-clamped.
#
# Why. A repair is a guess that gives rows to the wrong segment, and the training loss goes on falling as if nothing
# were wrong.

# %%
broken = PackedSeqParams(cu_seqlens_q=[0, 5, 7, 6])
assert refusal(build_packed_seq_idx, broken, 8) == (
    "PackingError: cu_seqlens[3]=6 < cu_seqlens[2]=7: offsets must not decrease (PACK-4)"
)
assert "must start at 0" in refusal(build_packed_seq_idx, PackedSeqParams(cu_seqlens_q=[3, 5]), 8)
assert "integers" in refusal(build_packed_seq_idx, PackedSeqParams(cu_seqlens_q=[0.0, 5.0]), 8)
assert "must not pass" in refusal(build_packed_seq_idx, PackedSeqParams(cu_seqlens_q=[0, 5, 7, 11]), 9)
assert refusal(build_packed_seq_idx, PackedSeqParams(cu_seqlens_q=[0, 5, 5, 8]), 8) == "accepted"

wrong = mutant("decreasing-offsets-clamped")
assert runs(wrong["build_packed_seq_idx"](broken, 8)) == "0x5 1x2 3x1"

# %% [markdown]
# (PACK-5)=
# ## PACK-5  The length is that of the tensor the kernel consumes
#
# :::{clause} PACK-5
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, paragraph 4
# :applies: build_packed_seq_idx
# :observable: shape, value
# :::
#
# There MUST be exactly `total_tokens` ids, one for each row that the kernel consumes after every parallel gather.
#
# Example. Offsets `[0, 3]`; the gathered tensor has 4 rows -> `0x3 1x1`.
#
# Not this. As many ids as the last offset says: `0x3`. Fault: length-from-last-offset.
#
# Why. A kernel reads one id per row. With fewer ids than rows it reads past their end, and a length taken before the
# gather is a shard's, not the pack's.

# %%
short = PackedSeqParams(cu_seqlens_q=[0, 3])
assert runs(build_packed_seq_idx(short, 4)) == "0x3 1x1"

wrong = mutant("length-from-last-offset")
assert runs(wrong["build_packed_seq_idx"](short, 4)) == "0x3"

# %% [markdown]
# (PACK-6)=
# ## PACK-6  Segments do not see each other
#
# :::{clause} PACK-6
# :level: MUST NOT
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, paragraph 3; check_fla_sequence_packing_support
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill
# :observable: value, relation
# :::
#
# A token's output and gradient MUST NOT depend on a token of another segment, neither through the window nor through
# the state.
#
# Example. Tokens `1, 2, 3, 4, 5` with offsets `[0, 3, 5]` -> outputs `1, 12, 123, 4, 45`. The gradient of the fourth
# output is `0, 0, 0, 1, 0`: only token 4 reaches it.
#
# Not this. The fourth and fifth output read across the boundary: `1, 12, 123, 1234, 2345`. Fault:
# conv-reads-across-boundary.
#
# Why. A model that reads the document before learns from text that is not there when it is used. Of a convolution only
# the first `W - 1` outputs of each document are wrong, too few to show in an average error.

# %%
x, offsets = tokens(1, 2, 3, 4, 5), index(0, 3, 5)
y, _ = causal_conv1d(x, DIGITS, cu_seqlens=offsets)
assert numbers(y) == [1, 12, 123, 4, 45]
gradients = causal_conv1d_grad({"y": tokens(0, 0, 0, 1, 0)}, x, DIGITS, cu_seqlens=offsets)
assert numbers(gradients["x"]) == [0, 0, 0, 1, 0]

wrong = mutant("conv-reads-across-boundary")
assert numbers(wrong["causal_conv1d"](x, DIGITS, cu_seqlens=offsets)[0]) == [1, 12, 123, 1234, 2345]

# %% [markdown]
# (PACK-7)=
# ## PACK-7  Ids and offsets of one call agree
#
# :::{clause} PACK-7
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, check_fla_sequence_packing_support
# :applies: causal_conv1d, ssd when given both seq_idx and cu_seqlens
# :observable: error
# :::
#
# A call with both ids and offsets MUST be refused with a PackingError unless both describe the same boundaries.
#
# Example. Offsets `[0, 2, 3]` beside ids `0, 0, 1` are served; beside ids `0, 1, 1` ->
# `seq_idx[0, 1]=1 and cu_seqlens says segment 0 (PACK-7)`. Rows past the last offset carry either -1 or the next
# ordinal, all the same one, and the offsets decide that they give 0.
#
# Not this. The offsets are used and the ids are ignored: tokens `1, 2, 3` give `1, 12, 3`. Fault:
# ids-ignored-beside-offsets.
#
# Why. Convolution and scan often take different ones of the two. If they disagree, window and state reset at different
# tokens, and no single result is right.

# %%
x, offsets = tokens(1, 2, 3), index(0, 2, 3)
assert numbers(causal_conv1d(x, DIGITS, None, ids(0, 0, 1), offsets)[0]) == [1, 12, 3]
assert refusal(causal_conv1d, x, DIGITS, None, ids(0, 1, 1), offsets) == (
    "PackingError: seq_idx[0, 1]=1 and cu_seqlens says segment 0 (PACK-7)"
)
for last in (-1, 2):
    longer, marked = tokens(1, 2, 3, 4), ids(0, 0, 1, last)
    assert numbers(causal_conv1d(longer, DIGITS, None, marked, offsets)[0]) == [1, 12, 3, 0]

wrong = mutant("ids-ignored-beside-offsets")
assert numbers(wrong["causal_conv1d"](x, DIGITS, None, ids(0, 1, 1), offsets)[0]) == [1, 12, 3]

# %% [markdown]
# (PACK-8)=
# ## PACK-8  Rows outside every segment are inert
#
# :::{clause} PACK-8
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions differ: computed in training, ignored in inference
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill
# :observable: value, relation
# :::
#
# Rows past the last offset of a call driven by offsets, and rows with id -1, MUST give 0, have gradient 0 and influence
# nothing else.
#
# Example. Tokens `1, 2, 3, nan` with offsets `[0, 2]` -> outputs `1, 12, 0, 0`; ids `0, 0, -1, -1` give the same. With
# a cotangent of `1` everywhere the gradient of the weight is `0, 0, 1, 3`, free of NaN.
#
# Not this. The rows are convolved: `1, 12, 123, nan`. Fault: rows-past-offsets-computed.
#
# Why. The memory past a batch holds whatever the last batch left there. One NaN in it, multiplied by 0 in a sum over
# all rows, ends a training run.

# %%
x = tokens(1, 2, 3, NAN)
for boundaries in ({"cu_seqlens": index(0, 2)}, {"seq_idx": ids(0, 0, -1, -1)}):
    assert numbers(causal_conv1d(x, DIGITS, **boundaries)[0]) == [1, 12, 0, 0]
    gradients = causal_conv1d_grad({"y": tokens(1, 1, 1, 1)}, x, DIGITS, **boundaries)
    assert numbers(gradients["weight"]) == [0, 0, 1, 3]
    assert numbers(gradients["x"])[2:] == [0, 0]

wrong = mutant("rows-past-offsets-computed")
assert numbers(wrong["causal_conv1d"](x, DIGITS, cu_seqlens=index(0, 2))[0]) == [1, 12, 123, "nan"]

# %% [markdown]
# Under ids without -1 the same rows are a segment like any other (PACK-3): they are computed, and isolated. Both ways
# agree on every real row.

# %%
x, real = tokens(1, 2, 3, 4), PackedSeqParams(cu_seqlens_q=[0, 2])
by_ids, _ = causal_conv1d(x, DIGITS, seq_idx=build_packed_seq_idx(real, 4))
by_offsets, _ = causal_conv1d(x, DIGITS, cu_seqlens=index(0, 2))
assert numbers(by_ids) == [1, 12, 3, 34]
assert numbers(by_offsets) == [1, 12, 0, 0]

# %% [markdown]
# (PACK-9)=
# ## PACK-9  Padding inside a segment belongs to it
#
# :::{clause} PACK-9
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, get_cu_seqlens
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd when given padded offsets
# :observable: value
# :::
#
# Tokens between a segment's end and its padded end MUST be tokens of that segment: they come after its real tokens, and
# its final window and state are those after the padding.
#
# Example. Two real tokens `1, 2` padded to four rows with `0, 0`, offsets `[0, 4]`: the real outputs are `1, 12`, the
# final window is `1, 2, 0, 0`.
#
# Not this. A final window as if the zeros were not there: `0, 0, 1, 2`. Fault: trailing-zero-tokens-dropped.
#
# Why. A kernel knows the padded offsets only; a token whose input is 0 is no padding. Whoever wants the state after the
# last real token passes the actual offsets, or asks for it (SNAP-3).

# %%
x, offsets = tokens(1, 2, 0, 0), index(0, 4)
y, final = causal_conv1d(x, DIGITS, cu_seqlens=offsets)
assert numbers(y)[:2] == [1, 12]
assert numbers(final) == [1, 2, 0, 0]

wrong = mutant("trailing-zero-tokens-dropped")
assert numbers(wrong["causal_conv1d"](x, DIGITS, cu_seqlens=offsets)[1]) == [0, 0, 1, 2]

# %% [markdown]
# PACK-10 says that one pair of functions serves every mixer; it comes with the mixers.

# %% [markdown]
# (PACK-11)=
# ## PACK-11  An empty segment uses its ordinal up
#
# :::{clause} PACK-11
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, paragraph 2
# :applies: build_packed_seq_idx;
# : causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill
# :observable: value
# :::
#
# An empty segment MUST consume its ordinal and change nothing else.
#
# Example. `[0, 5, 5, 11]`, 12 rows -> `0x5 2x6 3x1`: the empty segment has used one up.
#
# Not this. Ordinals counted over what is not empty: `0x5 1x6 2x1`. Fault: empty-segment-loses-its-id.
#
# Why. Row 1 of the entering windows still belongs to the empty segment. Without its ordinal every later segment starts
# from the window of the one before it.

# %%
params = PackedSeqParams(cu_seqlens_q=[0, 5, 5, 11])
assert runs(build_packed_seq_idx(params, 12)) == "0x5 2x6 3x1"

wrong = mutant("empty-segment-loses-its-id")
assert runs(wrong["build_packed_seq_idx"](params, 12)) == "0x5 1x6 2x1"

# %% [markdown]
# The same holds where windows enter. Offsets `[0, 1, 1, 2]`, entering windows that end in 7, 8 and 9: token 2 reads the
# 9, and the empty segment hands its window on.

# %%
entering = windows([0, 0, 0, 7], [0, 0, 0, 8], [0, 0, 0, 9])
y, final = causal_conv1d(tokens(1, 2), DIGITS, cu_seqlens=index(0, 1, 1, 2), initial_windows=entering)
assert numbers(y) == [71, 92]
assert numbers(final) == [[0, 0, 7, 1], [0, 0, 0, 8], [0, 0, 9, 2]]

# %% [markdown]
# (PACK-12)=
# ## PACK-12  Offsets alone are enough to pack
#
# :::{clause} PACK-12
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, signature
# :applies: build_packed_seq_idx
# :observable: value
# :::
#
# Ids MUST be made from the offsets and the length given, whatever `total_tokens` and `seq_idx` the parameters carry.
#
# Example. Offsets `[0, 2]`, and in the parameters ids `0, 0, 0` left from another batch; 3 rows -> `0x2 1x1`.
#
# Not this. The carried ids are handed back: `0x3`. Fault: stale-ids-of-params-win.
#
# Why. A parameter object lives longer than a batch. What can be derived is derived where it is used, so that it cannot
# be stale.

# %%
stale = PackedSeqParams(cu_seqlens_q=[0, 2], seq_idx=ids(0, 0, 0), total_tokens=3)
assert runs(build_packed_seq_idx(stale, 3)) == "0x2 1x1"

wrong = mutant("stale-ids-of-params-win")
assert runs(wrong["build_packed_seq_idx"](stale, 3)) == "0x3"

# %% [markdown]
# (PACK-13)=
# ## PACK-13  A pack has one batch row
#
# :::{clause} PACK-13
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: causal_conv1d when given more than one batch row with seq_idx or cu_seqlens
# :observable: error
# :::
#
# More than one batch row together with ids or offsets MUST be refused with a PackingError.
#
# Example. Two batch rows `1, 2, 3` and `4, 5, 6` without offsets are two segments: `1, 12, 123` and `4, 45, 456`. With
# offsets `[0, 2, 3]` -> `x has 2 batch rows and cu_seqlens is given: a pack has one row (PACK-13)`.
#
# Not this. The rows laid end to end under the offsets: `1, 12, 3` and `0, 0, 0`. Fault: batch-with-offsets-flattened.
#
# Why. Offsets could mean one row, every row or all rows end to end; three callers would mean three things.

# %%
x, offsets = tokens([1, 2, 3], [4, 5, 6]), index(0, 2, 3)
assert numbers(causal_conv1d(x, DIGITS)[0]) == [[1, 12, 123], [4, 45, 456]]
assert refusal(causal_conv1d, x, DIGITS, cu_seqlens=offsets) == (
    "PackingError: x has 2 batch rows and cu_seqlens is given: a pack has one row (PACK-13)"
)

wrong = mutant("batch-with-offsets-flattened")
assert numbers(wrong["causal_conv1d"](x, DIGITS, cu_seqlens=offsets)[0]) == [[1, 12, 3], [0, 0, 0]]

# %% [markdown]
# (PACK-14)=
# ## PACK-14  Ids do not decrease
#
# :::{clause} PACK-14
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: causal_conv1d, ssd when driven by seq_idx
# :observable: error
# :::
#
# Ids that are not int32 or int64, decrease, carry -1 anywhere but at the end, or pass the entering windows or states
# given MUST be refused with a PackingError.
#
# Example. Ids `0, 0, 1, 0` -> `seq_idx[0, 3]=0 < seq_idx[0, 2]=1: ids must not decrease (PACK-14)`. A jump, `0, 2`, is
# an empty segment 1 and is served.
#
# Not this. Positions `0, 1, 2, 0, 1` taken as ids: each token becomes a segment, and tokens `1, 2, 3, 4, 5` come back
# as `1, 2, 3, 4, 5`. Fault: positions-taken-as-ids.
#
# Why. Positions have the shape and type of ids. Taken as ids they switch the convolution off without an error.

# %%
assert refusal(causal_conv1d, tokens(1, 2, 3, 4), DIGITS, seq_idx=ids(0, 0, 1, 0)) == (
    "PackingError: seq_idx[0, 3]=0 < seq_idx[0, 2]=1: ids must not decrease (PACK-14)"
)
assert numbers(causal_conv1d(tokens(1, 2), DIGITS, seq_idx=ids(0, 2))[0]) == [1, 2]
positions, x = ids(0, 1, 2, 0, 1), tokens(1, 2, 3, 4, 5)
assert "must not decrease" in refusal(causal_conv1d, x, DIGITS, seq_idx=positions)

wrong = mutant("positions-taken-as-ids")
assert numbers(wrong["causal_conv1d"](x, DIGITS, seq_idx=positions)[0]) == [1, 2, 3, 4, 5]

# %% [markdown]
# ## Corner cases beside Megatron-Core
#
# Megatron-Core has two builders of ids, one in `PackedSeqParams` and one in `packed_seq_helpers`, and they differ where
# offsets are broken. Here is one rule. Where the last column is empty, all three agree.
#
# | offsets | rows | here | Megatron-Core: parameters, helper |
# |---|---|---|---|
# | `[0, 5, 7, 11]` | 16 | `0x5 1x2 2x4 3x5` | |
# | `[0, 5, 7, 11]` | 11 | `0x5 1x2 2x4` | |
# | `[0, 5, 5, 11]` | 12 | `0x5 2x6 3x1` | |
# | `[0]` | 4 | `0x4` | |
# | `[0, 4]` | 4 | `0x4` | |
# | `[0, 0]` | 0 | no ids, shape `(1, 0)` | |
# | padded `[0, 8, 8, 12]` | 16 | `0x8 2x4 3x4` | |
# | `[0, 5, 7, 11]` | 9 | refused | eleven ids; refused |
# | `[0, 5, 7, 6]` | 8 | refused | nine ids; refused |
# | `[3, 5]` | 8 | refused | five ids; refused |
# | none | 8 | refused | no ids; AttributeError |

# %%
CASES = [
    ([0, 5, 7, 11], 16, "0x5 1x2 2x4 3x5"), ([0, 5, 7, 11], 11, "0x5 1x2 2x4"), ([0, 5, 5, 11], 12, "0x5 2x6 3x1"),
    ([0], 4, "0x4"), ([0, 4], 4, "0x4"), ([0, 0], 0, ""), ([0, 8, 8, 12], 16, "0x8 2x4 3x4"),
]  # fmt: skip
for offsets, rows, expected in CASES:
    seq_idx = build_packed_seq_idx(PackedSeqParams(cu_seqlens_q=offsets), rows)
    assert (runs(seq_idx), seq_idx.shape) == (expected, (1, rows))
for offsets, rows in [([0, 5, 7, 11], 9), ([0, 5, 7, 6], 8), ([3, 5], 8), (None, 8)]:
    assert "PackingError" in refusal(build_packed_seq_idx, PackedSeqParams(cu_seqlens_q=offsets), rows)
