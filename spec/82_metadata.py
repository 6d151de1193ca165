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
# # The arrays of a step
#
# Prefill reads its step from arrays on the context: where each request begins, in which slot it is, where chunks end.
# They are made on the host, once a step, for all layers. Their names, element types and padding are those of public
# engine code, because hooks written for it read them; the tables of the delta kernels are ours.
#
# Everything is padded to sizes that a captured graph fixes: `padded_requests`, `padded_tokens`, and with the chunk
# length `L` at most `padded_tokens // L + padded_requests` chunks. What is real stands in front.

# %%
from statescan.conformance.mutants import mutant
from statescan.reference.host.metadata import PREFILL_NAMES, decode_metadata, prefill_metadata
from statescan.spec.figures import chunk_grid
from statescan.spec.notation import Markdown, refusal, runs


def arrays(lengths, slots=None, snapshots=(), by=None, **sizes):
    """The arrays of a step by name, as lists."""
    slots = list(range(len(lengths))) if slots is None else slots
    rows, offsets = [row for row, _ in snapshots], [offset for _, offset in snapshots]
    made = (by or {"prefill_metadata": prefill_metadata})["prefill_metadata"](lengths, slots, rows, offsets, **sizes)
    return {name: array.tolist() for name, array in zip(PREFILL_NAMES, made, strict=True)}


shown = arrays([3, 0, 4], padded_requests=4, padded_tokens=8, chunk_size=2, decode_tokens=1)
Markdown("\n".join(["| array | for pieces of 3, 0 and 4 tokens |", "|---|---|",
                    *(f"| `{name}` | `{value}` |" for name, value in shown.items())]))

# %% [markdown]
# The chunks of the same step: the grid starts anew at each request, and the empty one has an empty chunk.

# %%
chunk_grid([0, 3, 3, 7, 7], 2)

# %% [markdown]
# (META-1)=
# ## META-1  Offsets start at 0
#
# :::{clause} META-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, varlen metadata
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `cu_seqlens` MUST count the tokens of the prefill partition from 0, and repeat the last offset for padding requests.
#
# Example. Pieces of 10 and 20 tokens behind 2 decode tokens, 4 padded requests: `0, 10, 30, 30, 30`.
#
# Not this. Decode tokens counted in: `2, 12, 32, 32, 32`. Fault: offsets-count-decode-tokens.
#
# Why. The hook is given the prefill rows alone, so its rows begin at 0.

# %%
step = {"padded_requests": 4, "padded_tokens": 64, "chunk_size": 64, "decode_tokens": 2}
assert arrays([10, 20], **step)["cu_seqlens"] == [0, 10, 30, 30, 30]

wrong = mutant("offsets-count-decode-tokens")
assert arrays([10, 20], by=wrong, **step)["cu_seqlens"] == [2, 12, 32, 32, 32]

# %% [markdown]
# (META-2)=
# ## META-2  Padding requests have slot -1
#
# :::{clause} META-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, batch_indices
# :applies: prefill_metadata, decode_metadata
# :observable: value, metadata
# :::
#
# The index arrays of both partitions MUST hold the slots of the real requests in batch order, and -1 for padding
# requests.
#
# Example. Decode requests in slots 7 and 0, 4 padded: `7, 0, -1, -1`.
#
# Not this. Padding on slot 0: `7, 0, 0, 0`. Fault: padding-requests-on-slot-zero.
#
# Why. Slot 0 is a slot like others. A real request without a slot, or two in one, is refused: the host can see it.

# %%
assert decode_metadata([7, 0], 4).tolist() == [7, 0, -1, -1]
assert arrays([3], [2], padded_requests=2, padded_tokens=4, chunk_size=2)["batch_indices_prefill"] == [2, -1]
assert refusal(decode_metadata, [7, 7], 4) == "SlotError: slots[1]=7 is also slots[0]: each once (SLOT-4)"

wrong = mutant("padding-requests-on-slot-zero")
assert wrong["decode_metadata"]([7, 0], 4).tolist() == [7, 0, 0, 0]

# %% [markdown]
# (META-3)=
# ## META-3  Padding tokens have id -1
#
# :::{clause} META-3
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, varlen metadata
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `seq_idx` MUST hold for every token the ordinal of its prefill request, and -1 for padding tokens.
#
# Example. Pieces of 2, 0 and 1 tokens in 6: `0x2 2x1 -1x3`.
#
# Not this. Padding with id 0: `0x2 2x1 0x3`. Fault: padding-tokens-have-id-zero.
#
# Why. Ids drive the convolution. With id 0 the first request goes on behind the last one.

# %%
step = {"padded_requests": 3, "padded_tokens": 6, "chunk_size": 2}
assert runs(arrays([2, 0, 1], **step)["seq_idx"]) == "0x2 2x1 -1x3"

wrong = mutant("padding-tokens-have-id-zero")
assert runs(arrays([2, 0, 1], by=wrong, **step)["seq_idx"]) == "0x2 2x1 0x3"

# %% [markdown]
# (META-4)=
# ## META-4  Chunks restart at each request
#
# :::{clause} META-4
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, varlen metadata
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `cu_chunk_seqlens` MUST hold the chunk bounds of every padded request in turn, counted from the start of its piece, an
# empty piece having one empty chunk, and repeat the last bound.
#
# Example. Pieces of 5, 0 and 9 tokens with chunks of 4: `0, 4, 5, 5, 9, 13, 14`.
#
# Not this. A grid over the pack: `0, 4, 5, 5, 8, 12, 14`. Fault: chunk-grid-over-the-pack.
#
# Why. A result must not depend on what stands before the request, not even in its roundings.

# %%
step = {"padded_requests": 3, "padded_tokens": 14, "chunk_size": 4}
assert arrays([5, 0, 9], **step)["cu_chunk_seqlens"] == [0, 4, 5, 5, 9, 13, 14]

wrong = mutant("chunk-grid-over-the-pack")
assert arrays([5, 0, 9], by=wrong, **step)["cu_chunk_seqlens"] == [0, 4, 5, 5, 8, 12, 14]

# %% [markdown]
# (META-5)=
# ## META-5  Every chunk names its request
#
# :::{clause} META-5
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, varlen metadata
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `seq_idx_for_varlen` MUST hold for every chunk the ordinal of its request, and 0 for padding chunks.
#
# Example. Pieces of 3 and 4 tokens, chunks of 2, room for 12 tokens: `0, 0, 1, 1, 0, 0, 0, 0`.
#
# Not this. Padding chunks of the last request: `0, 0, 1, 1, 1, 1, 1, 1`. Fault: padding-chunks-of-the-last-request.
#
# Why. A padding chunk has no tokens, but a kernel looks its request up. Public kernels find 0 there and start that
# request's state, which nobody reads.

# %%
step = {"padded_requests": 2, "padded_tokens": 12, "chunk_size": 2}
assert arrays([3, 4], **step)["seq_idx_for_varlen"] == [0, 0, 1, 1, 0, 0, 0, 0]

wrong = mutant("padding-chunks-of-the-last-request")
assert arrays([3, 4], by=wrong, **step)["seq_idx_for_varlen"] == [0, 0, 1, 1, 1, 1, 1, 1]

# %% [markdown]
# (META-6)=
# ## META-6  An empty request ends in a chunk of its own
#
# :::{clause} META-6
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, varlen metadata
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `last_chunk_indices` MUST hold for every padded request the number of its last chunk, an empty request's being its own
# empty one.
#
# Example. Pieces of 3, 0 and 2 tokens with chunks of 2: `1, 2, 3`.
#
# Not this. The empty one shares a chunk with the request before: `1, 1, 3`. Fault: empty-request-shares-a-chunk.
#
# Why. The final state of a request is that of its last chunk. Shared, the empty request is stored with its neighbour's
# state.

# %%
step = {"padded_requests": 3, "padded_tokens": 6, "chunk_size": 2}
assert arrays([3, 0, 2], **step)["last_chunk_indices"] == [1, 2, 3]

wrong = mutant("empty-request-shares-a-chunk")
assert arrays([3, 0, 2], by=wrong, **step)["last_chunk_indices"] == [1, 1, 3]

# %% [markdown]
# (META-7)=
# ## META-7  The convolution knows where a request starts
#
# :::{clause} META-7
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, varlen metadata
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `conv_seq_idx` and `conv_seq_start` MUST hold for every real token the ordinal of its request and the first token of
# that, and 0 for padding tokens.
#
# Example. Pieces of 2 and 3 tokens in 6: ids `0, 0, 1, 1, 1, 0`, starts `0, 0, 2, 2, 2, 0`.
#
# Not this. Every start is that of the pack: `0, 0, 0, 0, 0, 0`. Fault: conv-starts-at-the-pack.
#
# Why. With them a kernel needs no search for the boundary. Padding tokens get the first request's numbers: their
# outputs are nobody's.

# %%
step = {"padded_requests": 2, "padded_tokens": 6, "chunk_size": 4}
found = arrays([2, 3], **step)
assert (found["conv_seq_idx"], found["conv_seq_start"]) == ([0, 0, 1, 1, 1, 0], [0, 0, 2, 2, 2, 0])

wrong = mutant("conv-starts-at-the-pack")
assert arrays([2, 3], by=wrong, **step)["conv_seq_start"] == [0, 0, 0, 0, 0, 0]

# %% [markdown]
# (META-8)=
# ## META-8  Both counts are real
#
# :::{clause} META-8
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, merge
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `device_decode_prefill` MUST hold the number of real decode tokens and of real prefill tokens.
#
# Example. One decode token and pieces of 50 and 10: `1, 60`.
#
# Not this. Padding counted in: `2, 60`. Fault: padded-decode-tokens-counted.
#
# Why. The merge of STEP-4 reads the first of them on the device, so that one graph serves every split of a padded size.

# %%
step = {"padded_requests": 2, "padded_tokens": 64, "chunk_size": 64, "decode_tokens": 1}
assert arrays([50, 10], **step)["device_decode_prefill"] == [1, 60]

wrong = mutant("padded-decode-tokens-counted")
assert arrays([50, 10], by=wrong, **step)["device_decode_prefill"] == [2, 60]

# %% [markdown]
# (META-9)=
# ## META-9  Snapshots count in the pack
#
# :::{clause} META-9
# :level: MUST
# :since: 0.1
# :source: ssm_inference, intermediate extraction
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `intermediate_abs_positions` MUST hold the offsets of the snapshots in the pack, `intermediate_chunk_indices` the
# chunk that ends at each or -1, and `intermediate_real_count` their number.
#
# Example. Pieces of 4 and 6 tokens, chunks of 2, snapshots after 2 tokens of the first and after 4 and 5 of the second:
# positions `2, 8, 9`, chunks `0, 3, -1`.
#
# Not this. Positions within the piece: `2, 4, 5`. Fault: positions-within-the-piece.
#
# Why. A prefix kept with the state of another position, or of another request, is wrong for as long as the cache lives.
# A position inside a chunk has no chunk state; the number of the chunk before would be one.

# %%
step = {"padded_requests": 2, "padded_tokens": 10, "chunk_size": 2, "snapshots": [(0, 2), (1, 4), (1, 5)]}
found = arrays([4, 6], **step)
assert (found["intermediate_abs_positions"], found["intermediate_chunk_indices"]) == ([2, 8, 9], [0, 3, -1])
assert found["intermediate_real_count"] == [3]

wrong = mutant("positions-within-the-piece")
assert arrays([4, 6], by=wrong, **step)["intermediate_abs_positions"] == [2, 4, 5]

# %% [markdown]
# (META-10)=
# ## META-10  Empty rows stand in the delta tables
#
# :::{clause} META-10
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: prefill_metadata
# :observable: value, metadata
# :::
#
# `chunk_indices`, `chunk_indices_dp` and `chunk_offsets` MUST give every padded request at least one chunk, on the
# stream of `M` copies as on that of tokens, and fill the tables with (-1, 0).
#
# Example. Pieces of 70, 0, 33 and 0 tokens with chunks of 64: offsets `0, 2, 3, 4, 5`.
#
# Not this. Empty pieces have none: `0, 2, 2, 3, 3`. Fault: empty-row-without-a-table-entry.
#
# Why. A row of no tokens stores what it read, so somebody has to visit it. Public tables leave it out; an adapter
# converts them.

# %%
step = {"padded_requests": 4, "padded_tokens": 128, "chunk_size": 64, "num_householder": 2}
found = arrays([70, 0, 33, 0], **step)
assert found["chunk_offsets"] == [0, 2, 3, 4, 5]
assert found["chunk_indices"][-1] == found["chunk_indices_dp"][-1] == [-1, 0]

wrong = mutant("empty-row-without-a-table-entry")
assert arrays([70, 0, 33, 0], by=wrong, **step)["chunk_offsets"] == [0, 2, 2, 3, 3]
