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
# # Pools, slots and rows
#
# A serving engine keeps the window and the state of every live request in **pools**, tensors whose first axis is slots.
# A step runs some requests, one **row** each, and each row names the slot that it resumes from (`read_slots`) and the
# slot that it stores to (`write_slots`; the same where not given):
#
# | read | write | the row |
# |---|---|---|
# | `>= 0` | `>= 0` | resumes from `read`, stores to `write` |
# | `< 0` | `>= 0` | is fresh: starts from zeros, stores to `write` |
# | `>= 0` | `< 0` | is scored only: nothing is stored |
# | `< 0` | `< 0` | is padding: nothing read, nothing written, outputs 0 |
#
# The rules are the same for every pool of every mixer. They are shown on the convolution, whose windows can be read.

# %%
import mmap

import numpy as np
from numpy.lib.stride_tricks import as_strided

from statescan.conformance.mutants import mutant
from statescan.reference.conv import causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
from statescan.spec.notation import NAN, entries, index, numbers, refusal, taps, tokens, windows

DIGITS = taps(1000, 100, 10, 1)
UNUSED = [NAN] * 4

pool = windows([5, 6, 7, 8], UNUSED)
assert numbers(causal_conv1d_update(tokens([1]), DIGITS, None, pool, index(0), index(1))) == [6781]
assert numbers(pool) == [[5, 6, 7, 8], [6, 7, 8, 1]]

# %% [markdown]
# (SLOT-1)=
# ## SLOT-1  A slot holds raw inputs, newest last
#
# :::{clause} SLOT-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, conv_state
# :applies: causal_conv1d_prefill, causal_conv1d_update
# :observable: value
# :::
#
# A slot of a convolution pool MUST hold the last `W` inputs of its request, before weights and activation, the oldest
# in column 0 and the newest in column `W - 1`.
#
# Example. A fresh row with tokens `1, 2, 3` leaves `0, 1, 2, 3`.
#
# Not this. Newest first: `3, 2, 1, 0`. Fault: window-newest-first.
#
# Why. Slots are handed between kernels, layers of cache and machines; the reader is often not the writer.

# %%
offsets, slots = index(0, 3), index(0)
pool = windows(UNUSED)
causal_conv1d_prefill(tokens(1, 2, 3), DIGITS, None, offsets, pool, index(-1), slots, activation="silu")
assert numbers(pool) == [0, 1, 2, 3]

pool, wrong = windows(UNUSED), mutant("window-newest-first")
wrong["causal_conv1d_prefill"](tokens(1, 2, 3), DIGITS, None, offsets, pool, index(-1), slots)
assert numbers(pool) == [3, 2, 1, 0]

# %% [markdown]
# (SLOT-2)=
# ## SLOT-2  A negative index is nothing
#
# :::{clause} SLOT-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, batch_indices
# :applies: *_prefill, *_update
# :observable: value, untouched
# :::
#
# A row MUST start from the slot that its read index names, or from zeros if that is negative, and store to the slot
# that its write index names, or nowhere if that is negative.
#
# Example. Slot 0 holds `5, 6, 7, 8` and four rows of one token `1` read `0, -1, 0, -1` and write `1, 2, -1, -9`:
# outputs `6781, 1, 6781, 0`; slot 1 then holds `6, 7, 8, 1`, slot 2 `0, 0, 0, 1`, and slot 0 what it held.
#
# Not this. Negative indices are raised to 0 to be safe in memory: outputs `6781, 6781, 6781, 6781`, and slot 0 becomes
# `6, 7, 8, 1`. Fault: negative-slot-clamped-to-zero.
#
# Why. Slot 0 belongs to a request. Padding that reads it looks harmless; padding that writes it puts one user's text
# into another's.

# %%
read, write, x = index(0, -1, 0, -1), index(1, 2, -1, -9), tokens([1], [1], [1], [1])
pool = windows([5, 6, 7, 8], UNUSED, UNUSED)
assert numbers(causal_conv1d_update(x, DIGITS, None, pool, read, write)) == [6781, 1, 6781, 0]
assert numbers(pool) == [[5, 6, 7, 8], [6, 7, 8, 1], [0, 0, 0, 1]]

pool, wrong = windows([5, 6, 7, 8], UNUSED, UNUSED), mutant("negative-slot-clamped-to-zero")
assert numbers(wrong["causal_conv1d_update"](x, DIGITS, None, pool, read, write)) == [6781, 6781, 6781, 6781]
assert numbers(pool[0]) == [6, 7, 8, 1]

# %% [markdown]
# (SLOT-3)=
# ## SLOT-3  Other slots keep their bits
#
# :::{clause} SLOT-3
# :level: MUST
# :since: 0.1
# :source: ssm_inference, both hooks, state updated in place
# :applies: *_prefill, *_update
# :observable: untouched
# :::
#
# Pools MUST be updated in place, and every slot that no row writes keeps its bits, NaN payloads included.
#
# Example. Slots 0 and 2 hold `nan`, slot 1 holds `5, 6, 7, 8`; after token `1` on slot 1 the pool is `nan`,
# `6, 7, 8, 1`, `nan`, and the payload of each NaN is what it was.
#
# Not this. A new pool with zeros around the row: `0, 0, 0, 0`, `6, 7, 8, 1`, `0, 0, 0, 0`. Fault:
# untouched-slots-cleared.
#
# Why. Paused requests live in the slots that no row names. They find the loss when they come back, long after the step
# that caused it.

# %%
pool = windows(UNUSED, [5, 6, 7, 8], UNUSED)
pool.view("int32")[0] = 0x7FC00123
before = pool.view("int32").tolist()
causal_conv1d_update(tokens([1]), DIGITS, None, pool, index(1))
assert numbers(pool) == [["nan"] * 4, [6, 7, 8, 1], ["nan"] * 4]
assert pool.view("int32").tolist()[::2] == before[::2]

pool, wrong = windows(UNUSED, [5, 6, 7, 8], UNUSED), mutant("untouched-slots-cleared")
wrong["causal_conv1d_update"](tokens([1]), DIGITS, None, pool, index(1))
assert numbers(pool) == [[0, 0, 0, 0], [6, 7, 8, 1], [0, 0, 0, 0]]

# %% [markdown]
# (SLOT-4)=
# ## SLOT-4  One writer, and no other reader
#
# :::{clause} SLOT-4
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: *_prefill, *_update
# :observable: error
# :::
#
# A call MUST be refused with a SlotError where two rows write one slot, or one row writes a slot that another row
# reads.
#
# Example. Two fresh rows that write slots `0, 0` ->
# `write_slots[1]=0 is also write_slots[0]: each stored to once (SLOT-4)`. To read `0, 1` and write `1, 0` is refused
# too; to read slot 0 in two rows and write slots `1, 2` is served.
#
# Not this. Rows with tokens `1` and `2` both store, and the later one stays: `0, 0, 0, 2`. Fault:
# duplicate-write-accepted.
#
# Why. Rows run in any order. With two writers, or a reader beside a writer, the result depends on which was first. A
# swap goes through new slots or is done on the pool beforehand.

# %%
x, fresh, twice = tokens([1], [2]), index(-1, -1), index(0, 0)
pool = windows(UNUSED, UNUSED, UNUSED)
assert refusal(causal_conv1d_update, x, DIGITS, None, pool, fresh, twice) == (
    "SlotError: write_slots[1]=0 is also write_slots[0]: each stored to once (SLOT-4)"
)
assert "of another row (SLOT-4)" in refusal(causal_conv1d_update, x, DIGITS, None, pool, index(0, 1), index(1, 0))
assert refusal(causal_conv1d_update, x, DIGITS, None, pool, index(0, 0), index(1, 2)) == "accepted"

pool, wrong = windows(UNUSED), mutant("duplicate-write-accepted")
assert refusal(wrong["causal_conv1d_update"], x, DIGITS, None, pool, fresh, twice) == "accepted"
assert numbers(pool) == [0, 0, 0, 2]

# %% [markdown]
# (SLOT-5)=
# ## SLOT-5  An index past the pool is refused
#
# :::{clause} SLOT-5
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: *_prefill, *_update, commit_accepted
# :observable: error
# :::
#
# A slot index that is not below the pool's number of slots MUST be refused with a SlotError.
#
# Example. A pool of 2 slots and a row on slot `2` -> `read_slots[0]=2 is outside 0..1 (SLOT-5)`.
#
# Not this. The index wraps around: slot 0, which holds `5, 6, 7, 8`, serves token `1` with `6781`. Fault:
# slot-index-wraps.
#
# Why. Past the pool lies another tensor. Where the values lie on a device and are not looked at, the row is treated as
# padding instead, so that nothing outside the pool is ever touched.

# %%
pool = windows([5, 6, 7, 8], [0, 0, 0, 0])
assert refusal(causal_conv1d_update, tokens([1]), DIGITS, None, pool, index(2)) == (
    "SlotError: read_slots[0]=2 is outside 0..1 (SLOT-5)"
)

wrong = mutant("slot-index-wraps")
assert numbers(wrong["causal_conv1d_update"](tokens([1]), DIGITS, None, pool, index(2))) == [6781]

# %% [markdown]
# SLOT-6, the declared order of a state's axes, stands with the states that have two: in the chapter of the delta rule.

# %% [markdown]
# (SLOT-7)=
# ## SLOT-7  Fresh is selected, not multiplied
#
# :::{clause} SLOT-7
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: *_prefill, *_update
# :observable: value
# :::
#
# A fresh row MUST start from zeros put in place of the pool's content, never from that content times 0.
#
# Example. Slot 0 holds `nan`; a fresh row that writes it gives for tokens `1, 2` the outputs `1, 12` and leaves
# `0, 0, 1, 2`.
#
# Not this. The slot is read and multiplied by 0: `nan, nan`. Fault: fresh-by-multiplying.
#
# Why. A freed slot holds anything, and NaN times 0 is NaN. One bad request would then poison every later one that gets
# its slot.

# %%
pool = windows(UNUSED)
y = causal_conv1d_prefill(tokens(1, 2), DIGITS, None, index(0, 2), pool, index(-1), index(0))
assert (numbers(y), numbers(pool)) == ([1, 12], [0, 0, 1, 2])

pool, wrong = windows(UNUSED), mutant("fresh-by-multiplying")
y = wrong["causal_conv1d_prefill"](tokens(1, 2), DIGITS, None, index(0, 2), pool, index(-1), index(0))
assert numbers(y) == ["nan", "nan"]

# %% [markdown]
# (SLOT-8)=
# ## SLOT-8  Prefill stores where each row ends
#
# :::{clause} SLOT-8
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, final states written back
# :applies: *_prefill
# :observable: value
# :::
#
# Prefill MUST store the final window or state of every row in its write slot; a row of no tokens stores what it read.
#
# Example. Slot 0 holds `5, 6, 7, 8`; tokens `1, 2` leave `7, 8, 1, 2`. A row of no tokens from slot 0 to slot 1 leaves
# `5, 6, 7, 8` there.
#
# Not this. Outputs alone, and slot 0 is still `5, 6, 7, 8`. Fault: final-window-not-stored.
#
# Why. The outputs of this call are right either way. The next piece of the prompt starts from what was stored.

# %%
pool = windows([5, 6, 7, 8], UNUSED)
causal_conv1d_prefill(tokens(1, 2), DIGITS, None, index(0, 2), pool, index(0))
assert numbers(pool[0]) == [7, 8, 1, 2]
pool = windows([5, 6, 7, 8], UNUSED)
causal_conv1d_prefill(tokens(), DIGITS, None, index(0, 0), pool, index(0), index(1))
assert numbers(pool) == [[5, 6, 7, 8], [5, 6, 7, 8]]

pool, wrong = windows([5, 6, 7, 8]), mutant("final-window-not-stored")
assert numbers(wrong["causal_conv1d_prefill"](tokens(1, 2), DIGITS, None, index(0, 2), pool, index(0))) == [6781, 7812]
assert numbers(pool) == [5, 6, 7, 8]

# %% [markdown]
# (PAD-1)=
# ## PAD-1  A padding row does nothing
#
# :::{clause} PAD-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, batch_indices
# :applies: *_prefill, *_update
# :observable: value, untouched
# :::
#
# A row whose read and write index are both negative MUST read nothing, write nothing and give exactly 0.
#
# Example. Slots hold `5, 6, 7, 8` and `9, 9, 9, 9`; rows with tokens `1` and `nan` on slots `0, -1` give `6781, 0`, and
# slot 1 stays `9, 9, 9, 9`.
#
# Not this. Index -1 taken as the last slot; token `2` in the padding row leaves `0, 0, 0, 2` there. Fault:
# padding-row-writes-last-slot.
#
# Why. Batches are padded to a few sizes so that a recorded graph can be replayed. In Python and in PyTorch -1 is the
# last element, and the last slot is somebody's.

# %%
pool = windows([5, 6, 7, 8], [9, 9, 9, 9])
assert numbers(causal_conv1d_update(tokens([1], [NAN]), DIGITS, None, pool, index(0, -1))) == [6781, 0]
assert numbers(pool) == [[6, 7, 8, 1], [9, 9, 9, 9]]

pool, wrong = windows([5, 6, 7, 8], [9, 9, 9, 9]), mutant("padding-row-writes-last-slot")
wrong["causal_conv1d_update"](tokens([1], [2]), DIGITS, None, pool, index(0, -1))
assert numbers(pool) == [[6, 7, 8, 1], [0, 0, 0, 2]]

# %% [markdown]
# PAD-2, zeros assigned to padding before the output projection, comes with the mixers.

# %% [markdown]
# (PAD-3)=
# ## PAD-3  Padding changes no real row
#
# :::{clause} PAD-3
# :level: MUST NOT
# :since: 0.1
# :source: ssm_inference, padded sizes of a step
# :applies: *_prefill, *_update
# :observable: relation, value
# :::
#
# Rows and tokens added to reach a graph's size MUST NOT change a bit of any real row.
#
# Example. Tokens `1, 2` in a fresh row give `1, 12` and leave `0, 0, 1, 2`, alone as well as with tokens `9, 9` past
# the last offset and a padding row after the first.
#
# Not this. The last row takes every token to the end: `1, 12, 129, 1299`, and `1, 2, 9, 9`. Fault:
# last-row-owns-the-tail.
#
# Why. The same request would get different answers in a batch of three and in a batch of four.

# %%
alone, padded = windows(UNUSED), windows(UNUSED)
y = causal_conv1d_prefill(tokens(1, 2), DIGITS, None, index(0, 2), alone, index(-1), index(0))
assert numbers(y) == [1, 12]
y = causal_conv1d_prefill(tokens(1, 2, 9, 9), DIGITS, None, index(0, 2, 2), padded, index(-1, -1), index(0, -1))
assert numbers(y) == [1, 12, 0, 0]
assert numbers(alone) == numbers(padded) == [0, 0, 1, 2]

pool, wrong = windows(UNUSED), mutant("last-row-owns-the-tail")
y = wrong["causal_conv1d_prefill"](tokens(1, 2, 9, 9), DIGITS, None, index(0, 2), pool, index(-1), index(0))
assert numbers(y) == [1, 12, 129, 1299]
assert numbers(pool) == [1, 2, 9, 9]

# %% [markdown]
# (MEM-1)=
# ## MEM-1  Inputs are never written
#
# :::{clause} MEM-1
# :level: MUST NOT
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill, *_update,
# : *_gate, l2norm, rmsnorm_gated
# :observable: untouched
# :::
#
# A call MUST NOT write to any argument that the operation table does not mark as changed in place.
#
# Example. Tokens `1, 2, 3` are still `1, 2, 3` after an update from the window `5, 6, 7, 8`.
#
# Not this. The first token's memory serves as scratch for the window's oldest column: `8, 2, 3`. Fault:
# input-overwritten.
#
# Why. The projection's output feeds more than one branch of a mixer, and the backward pass needs it again.

# %%
x = tokens([1, 2, 3])
causal_conv1d_update(x, DIGITS, None, windows([5, 6, 7, 8]), index(0))
assert numbers(x) == [1, 2, 3]

wrong = mutant("input-overwritten")
wrong["causal_conv1d_update"](x, DIGITS, None, windows([5, 6, 7, 8]), index(0))
assert numbers(x) == [8, 2, 3]

# %% [markdown]
# (MEM-2)=
# ## MEM-2  Only what is addressed is written
#
# :::{clause} MEM-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, both hooks, state updated in place
# :applies: *_prefill, *_update
# :observable: untouched
# :::
#
# Of its pools and buffers a call MUST write nothing but write slots, their entries, and snapshots of positions given.
#
# Example. A row reads slot 0, `5, 6, 7, 8`, and writes slot 1 with token `1`: slot 0 stays, slot 1 becomes
# `6, 7, 8, 1`.
#
# Not this. Slot 0 becomes `6, 7, 8, 1` too. Fault: read-slot-written-too.
#
# Why. A read slot that is not a write slot is a shared prefix: many requests start from it.

# %%
pool = windows([5, 6, 7, 8], UNUSED)
causal_conv1d_update(tokens([1]), DIGITS, None, pool, index(0), index(1))
assert numbers(pool) == [[5, 6, 7, 8], [6, 7, 8, 1]]

pool, wrong = windows([5, 6, 7, 8], UNUSED), mutant("read-slot-written-too")
wrong["causal_conv1d_update"](tokens([1]), DIGITS, None, pool, index(0), index(1))
assert numbers(pool) == [[6, 7, 8, 1], [6, 7, 8, 1]]

# %% [markdown]
# (MEM-3)=
# ## MEM-3  Strides are honoured
#
# :::{clause} MEM-3
# :level: MUST
# :since: 0.1
# :source: decision; pools are views into paged memory
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill, *_update,
# : *_gate, l2norm, rmsnorm_gated
# :observable: value, untouched
# :exact: no (strides show only beside a contiguous twin)
# :::
#
# A tensor with any strides MUST be treated as its elements say, or be refused.
#
# Example. A pool that is every second window of a memory `5, 6, 7, 8`, `1, 1, 1, 1`, `0, 0, 0, 0`: token `3` in a row
# on slot 1 makes the memory's third window `0, 0, 0, 3` and leaves the other two.
#
# Not this. Slot 1 is looked for right after slot 0: the memory's second window becomes `1, 1, 1, 3`. Fault:
# strides-ignored.
#
# Why. Engines cut pools out of pages that hold other things in between. Those things are written over, and the pool is
# not. In which order a sum is taken may depend on strides: how wide memory can be read decides which lane holds what.
# So the vectors of this clause compare bits on numbers that add up exactly.

# %%
memory = windows([5, 6, 7, 8], [1, 1, 1, 1], [0, 0, 0, 0])
causal_conv1d_update(tokens([3]), DIGITS, None, memory[::2], index(1))
assert numbers(memory) == [[5, 6, 7, 8], [1, 1, 1, 1], [0, 0, 0, 3]]

memory, wrong = windows([5, 6, 7, 8], [1, 1, 1, 1], [0, 0, 0, 0]), mutant("strides-ignored")
wrong["causal_conv1d_update"](tokens([3]), DIGITS, None, memory[::2], index(1))
assert numbers(memory) == [[5, 6, 7, 8], [1, 1, 1, 3], [0, 0, 0, 0]]

# %% [markdown]
# (MEM-4)=
# ## MEM-4  Offsets have 64 bits
#
# :::{clause} MEM-4
# :level: MUST
# :since: 0.1
# :source: https://github.com/sgl-project/sglang/issues/31934
# :applies: *_prefill, *_update
# :observable: value, untouched
# :exact: no (far places show only beside a compact twin)
# :::
#
# A slot MUST be found wherever its stride puts it, more than 2^32 elements behind the first one too.
#
# Example. Five windows, 2^30 numbers from one to the next; slot 0 holds `5, 6, 7, 8`, slot 4 holds `1, 1, 1, 1`: token
# `3` in a row on slot 4 gives `1113`.
#
# Not this. 4 x 2^30 in 32 bits is 0, so slot 0 is read: `6783`. Fault: offsets-of-32-bits.
#
# Why. States of 32 heads of 128 x 128 pass 2^31 numbers behind slot 4,096, and behind slot 85 where a slot holds 48
# layers. Slots are handed out from the front, so what fails is the busiest hour. Memory that is asked for and never
# touched costs nothing on a CPU: this is tried there as well.

# %%
def far_windows():
    memory = mmap.mmap(-1, 4 * (2**32 + 4), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # reserves nothing
    pool = as_strided(np.frombuffer(memory, np.float32), (5, 1, 4), (4 * 2**30, 16, 4))
    pool[0], pool[4] = [5, 6, 7, 8], [1, 1, 1, 1]
    return pool


assert (2**31 // (32 * 128 * 128), 2**31 // (48 * 32 * 128 * 128)) == (4096, 85)
assert numbers(causal_conv1d_update(tokens([3]), DIGITS, None, far_windows(), index(4))) == [1113]

wrong = mutant("offsets-of-32-bits")["causal_conv1d_update"]
assert numbers(wrong(tokens([3]), DIGITS, None, far_windows(), index(4))) == [6783]

# %% [markdown]
# (MEM-5)=
# ## MEM-5  Every element of an output is written
#
# :::{clause} MEM-5
# :level: MUST
# :since: 0.1
# :source: https://github.com/sgl-project/sglang/issues/30974
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill, *_update,
# : *_gate, l2norm, rmsnorm_gated
# :observable: value
# :::
#
# Every element of every output MUST be written, those of padding rows and of rows past the last offset included.
#
# Example. Tokens `1, 2, 3` with offsets `[0, 2]` -> `1, 12, 0`.
#
# Not this. The third output is left as the allocator gave it: `1, 12, nan`. Fault: padded-outputs-unwritten.
#
# Why. Fresh memory is mostly 0 in a test and anything in a server. The next operation multiplies it.

# %%
offsets = index(0, 2)
assert numbers(causal_conv1d(tokens(1, 2, 3), DIGITS, cu_seqlens=offsets)[0]) == [1, 12, 0]

wrong = mutant("padded-outputs-unwritten")
assert numbers(wrong["causal_conv1d"](tokens(1, 2, 3), DIGITS, cu_seqlens=offsets)[0]) == [1, 12, "nan"]

# %% [markdown]
# (MEM-6)=
# ## MEM-6  Buffers are written, not added to
#
# :::{clause} MEM-6
# :level: MUST NOT
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: *_prefill when given a snapshot buffer; *_update when given intermediates
# :observable: value
# :::
#
# What a call stores MUST NOT depend on what its snapshot and intermediate buffers held.
#
# Example. A snapshot buffer full of `7, 7, 7, 7`; tokens `1, 2` in a fresh row, position `1` -> `0, 0, 0, 1`.
#
# Not this. The window is added to the buffer: `7, 7, 7, 8`. Fault: snapshot-accumulates.
#
# Why. Buffers are reused without being cleared. The first step after a start is right, and no later one.

# %%
where, fresh = index(0, 2), index(-1)
kept = windows([7, 7, 7, 7])
causal_conv1d_prefill(tokens(1, 2), DIGITS, None, where, windows(UNUSED), fresh, index(0), index(1), kept)
assert numbers(kept) == [0, 0, 0, 1]

kept, wrong = windows([7, 7, 7, 7]), mutant("snapshot-accumulates")
wrong["causal_conv1d_prefill"](tokens(1, 2), DIGITS, None, where, windows(UNUSED), fresh, index(0), index(1), kept)
assert numbers(kept) == [7, 7, 7, 8]

# %% [markdown]
# (DET-1)=
# ## DET-1  The same call gives the same bits
#
# :::{clause} DET-1
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill, *_update,
# : *_gate, l2norm, rmsnorm_gated
# :observable: bits, relation
# :::
#
# Two calls with the same arguments MUST give the same bits.
#
# Example. Tokens `1, 2, 3` twice: `1, 12, 123` and `1, 12, 123`.
#
# Not this. The second call differs in a last bit: `1, 12, 123`, then `1.0000001, 12, 123`. Fault: call-counter-leaks.
#
# Why. What is not repeatable cannot be searched for faults, and a replayed batch must end in the same text.

# %%
for _ in range(2):
    assert numbers(causal_conv1d(tokens(1, 2, 3), DIGITS)[0]) == [1, 12, 123]

wrong = mutant("call-counter-leaks")
assert numbers(wrong["causal_conv1d"](tokens(1, 2, 3), DIGITS)[0]) == [1, 12, 123]
assert numbers(wrong["causal_conv1d"](tokens(1, 2, 3), DIGITS)[0]) == [1.0000001, 12, 123]

# %% [markdown]
# (DET-2)=
# ## DET-2  Later tokens change nothing earlier
#
# :::{clause} DET-2
# :level: MUST NOT
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_prefill, *_update
# :observable: bits, relation
# :::
#
# An output MUST NOT depend, to the bit, on a token that comes after it.
#
# Example. Tokens `1, 2, 3` and `1, 2, 9` give `1, 12, 123` and `1, 12, 129`: the first two outputs are the same.
#
# Not this. Each output reads one token ahead: `12, 123, 1230` and `12, 129, 1290`. Fault: window-looks-ahead.
#
# Why. A model that was trained with a look ahead cannot decode, for there is nothing ahead.

# %%
assert numbers(causal_conv1d(tokens(1, 2, 3), DIGITS)[0]) == [1, 12, 123]
assert numbers(causal_conv1d(tokens(1, 2, 9), DIGITS)[0]) == [1, 12, 129]

wrong = mutant("window-looks-ahead")
assert numbers(wrong["causal_conv1d"](tokens(1, 2, 3), DIGITS)[0]) == [12, 123, 1230]
assert numbers(wrong["causal_conv1d"](tokens(1, 2, 9), DIGITS)[0]) == [12, 129, 1290]

# %% [markdown]
# (DET-3)=
# ## DET-3  A row does not know its batch mates
#
# :::{clause} DET-3
# :level: MUST NOT
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: *_prefill, *_update
# :observable: bits, relation
# :::
#
# A row's outputs and what it stores MUST NOT depend on the other rows, nor on its own place among them.
#
# Example. Slots hold `5, 6, 7, 8` and `1, 1, 1, 1`; rows with tokens `2` and `3` on slots `0, 1` give `6782, 1113`; the
# same two in the other order give `1113, 6782`.
#
# Not this. Row 1 reads the slot of row 0: `6782, 6783`. Fault: row-uses-row-zeros-slot.
#
# Why. Who shares a batch is chance. A request that depends on it gives one answer in a test and another under load.

# %%
pool = windows([5, 6, 7, 8], [1, 1, 1, 1])
assert numbers(causal_conv1d_update(tokens([2], [3]), DIGITS, None, pool, index(0, 1))) == [6782, 1113]
pool = windows([5, 6, 7, 8], [1, 1, 1, 1])
assert numbers(causal_conv1d_update(tokens([3], [2]), DIGITS, None, pool, index(1, 0))) == [1113, 6782]

pool, wrong = windows([5, 6, 7, 8], [1, 1, 1, 1]), mutant("row-uses-row-zeros-slot")
assert numbers(wrong["causal_conv1d_update"](tokens([2], [3]), DIGITS, None, pool, index(0, 1))) == [6782, 6783]

# %% [markdown]
# (ERR-1)=
# ## ERR-1  Each family of rules has its class
#
# :::{clause} ERR-1
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions raise different built-in types
# :applies: get_cu_seqlens, build_packed_seq_idx, causal_conv1d, gated_delta_rule, gated_delta_product,
# : kimi_delta_attention, ssd, *_prefill, *_update, *_gate, l2norm, rmsnorm_gated, commit_accepted, ssm_chunking
# :observable: error
# :::
#
# A broken rule MUST raise the error class of its family, each of them a kind of ValueError.
#
# Example. Offsets `[0, 3, 2]` raise PackingError, slot `2` of a pool of 1 SlotError, a weight of two channels beside
# one ShapeError, tokens of integers DtypeError, and width `5` UnsupportedError.
#
# Not this. ValueError, whatever it was. Fault: one-class-for-all.
#
# Why. An engine treats a full pool and a malformed pack differently, and it can only ask for the class.

# %%
def raised(operation, *arguments, **settings):
    return refusal(operation, *arguments, **settings).partition(":")[0]


x, pool = tokens(1, 2, 3), windows([5, 6, 7, 8])
assert raised(causal_conv1d, x, DIGITS, cu_seqlens=index(0, 3, 2)) == "PackingError"
assert raised(causal_conv1d_update, x, DIGITS, None, pool, index(2)) == "SlotError"
assert raised(causal_conv1d, x, DIGITS.repeat(2, axis=0)) == "ShapeError"
assert raised(causal_conv1d, x.astype("int32"), DIGITS) == "DtypeError"
assert raised(causal_conv1d, x, taps(1, 2, 3, 4, 5)) == "UnsupportedError"

wrong = mutant("one-class-for-all")
assert raised(wrong["causal_conv1d"], x, DIGITS, cu_seqlens=index(0, 3, 2)) == "ValueError"

# %% [markdown]
# (ERR-2)=
# ## ERR-2  A message names rule, place and value
#
# :::{clause} ERR-2
# :level: MUST
# :since: 0.1
# :source: decision
# :applies: get_cu_seqlens, build_packed_seq_idx, causal_conv1d, gated_delta_rule, gated_delta_product,
# : kimi_delta_attention, ssd, *_prefill, *_update, *_gate, l2norm, rmsnorm_gated, commit_accepted, ssm_chunking
# :observable: text
# :::
#
# The message MUST name the argument, the place in it, the value found there, the rule in words and its label.
#
# Example. `cu_seqlens[2]=2 < cu_seqlens[1]=3: offsets must not decrease (PACK-4)`.
#
# Not this. The same without its label: `cu_seqlens[2]=2 < cu_seqlens[1]=3: offsets must not decrease`. Fault:
# message-without-label.
#
# Why. The label leads here, the place leads to the caller's fault; "invalid argument" leads nowhere.

# %%
said = "PackingError: cu_seqlens[2]=2 < cu_seqlens[1]=3: offsets must not decrease"
assert refusal(causal_conv1d, x, DIGITS, cu_seqlens=index(0, 3, 2)) == said + " (PACK-4)"

wrong = mutant("message-without-label")
assert refusal(wrong["causal_conv1d"], x, DIGITS, cu_seqlens=index(0, 3, 2)) == said

# %% [markdown]
# (ERR-3)=
# ## ERR-3  A refused call changes nothing
#
# :::{clause} ERR-3
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: *_prefill, *_update, commit_accepted
# :observable: untouched, error
# :::
#
# A call that is refused MUST leave every argument as it was.
#
# Example. Two rows on slots `0, 7` of a pool whose slot 0 holds `5, 6, 7, 8`: refused for slot 7, and slot 0 still
# holds `5, 6, 7, 8`.
#
# Not this. Slots to be written are cleared before row 1 is looked at: `0, 0, 0, 0`. Fault: writes-before-refusing.
#
# Why. The engine takes the bad request out and tries again. Row 0 would then start from a window that is gone.

# %%
pool, slots = windows([5, 6, 7, 8], UNUSED), index(0, 7)
assert "(SLOT-5)" in refusal(causal_conv1d_update, tokens([1], [2]), DIGITS, None, pool, slots)
assert numbers(pool[0]) == [5, 6, 7, 8]

wrong = mutant("writes-before-refusing")
assert "(SLOT-5)" in refusal(wrong["causal_conv1d_update"], tokens([1], [2]), DIGITS, None, pool, slots)
assert numbers(pool[0]) == [0, 0, 0, 0]

# %% [markdown]
# (ERR-4)=
# ## ERR-4  Contents are checked when asked for
#
# :::{clause} ERR-4
# :level: MUST
# :since: 0.1
# :source: decision; a value on a device cannot be looked at without waiting for it
# :applies: *_prefill, *_update
# :observable: error
# :::
#
# With `check=True` the rules about contents MUST be checked, wherever the tensors lie.
#
# Example. Two rows on slots `0, 7` of a pool of two, with `check=True`: `SlotError: read_slots[1]=7 ... (SLOT-5)`.
#
# Not this. The word is passed over, and a row on no slot of the pool is a padding row: `6781, 0`. Fault:
# check-word-ignored.
#
# Why. Shapes and types cost nothing and are checked always. Contents that lie on a device cost a wait, so there they
# are checked on request alone, which a test sets and a server does not; the capability `checks.values` says who can.
# Without the check a slot outside its pool is padding: a wrong index costs an answer and not the memory of others.

# %%
pool, slots = windows([5, 6, 7, 8], UNUSED), index(0, 7)
asked = refusal(causal_conv1d_update, tokens([1], [2]), DIGITS, None, pool, slots, check=True)
assert asked.startswith("SlotError: read_slots[1]=7")
assert asked.endswith("(SLOT-5)")

wrong = mutant("check-word-ignored")["causal_conv1d_update"]
assert numbers(wrong(tokens([1], [2]), DIGITS, None, pool, slots, check=True)) == [6781, 0]

# %% [markdown]
# (ERR-5)=
# ## ERR-5  What cannot be honoured is refused
#
# :::{clause} ERR-5
# :level: MUST
# :since: 0.1
# :source: decision; ssm_inference asks it of speculation (seq_len == 1)
# :applies: get_cu_seqlens, build_packed_seq_idx, causal_conv1d, gated_delta_rule, gated_delta_product,
# : kimi_delta_attention, ssd, *_prefill, *_update, *_gate, l2norm, rmsnorm_gated, commit_accepted, ssm_chunking
# :observable: error
# :::
#
# An argument that cannot be honoured MUST be refused, never passed over.
#
# Example. Tokens `1, 2` and snapshot position `1`, but no buffer to store the snapshot in ->
# `snapshot_positions and the snapshot buffer are given together or not at all (ERR-5)`.
#
# Not this. The call runs, `1, 12`, and records nothing. Fault: snapshot-positions-without-buffer-ignored.
#
# Why. The caller asked for something and got something else, with nothing to tell the two apart.

# %%
x, offsets, slots, position = tokens(1, 2), index(0, 2), index(0), index(1)
assert refusal(
    causal_conv1d_prefill, x, DIGITS, None, offsets, windows([0] * 4), slots, snapshot_positions=position
) == "ShapeError: snapshot_positions and the snapshot buffer are given together or not at all (ERR-5)"

wrong = mutant("snapshot-positions-without-buffer-ignored")["causal_conv1d_prefill"]
y = wrong(x, DIGITS, None, offsets, windows([0] * 4), slots, snapshot_positions=position)
assert numbers(y) == [1, 12]

# %% [markdown]
# (SNAP-3)=
# ## SNAP-3  Position p is the moment after token p - 1
#
# :::{clause} SNAP-3
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, intermediate extraction
# :applies: *_prefill when given snapshot_positions
# :observable: value, untouched, error
# :::
#
# The snapshot at position `p`, counted in tokens of the pack from 1, MUST be the window or state just after token
# `p - 1`, of the row that the token belongs to; a negative position records nothing.
#
# Example. Offsets `[0, 3, 5]`, fresh rows, tokens `1, 2, 3, 4, 5`, positions `2, 4, -1`: the snapshots are `0, 0, 1, 2`
# and `0, 0, 0, 4`, and the third entry of the buffer stays as it was. A row that is only scored records too: window
# `5, 6, 7, 8`, token `1`, position `1` -> `6, 7, 8, 1`.
#
# Not this. The window one token later: `0, 1, 2, 3` and `0, 0, 4, 5`. Fault: snapshot-one-token-late.
#
# Why. A cached prefix is looked up by its length. A window that has seen one token more counts that token twice.

# %%
x, offsets, fresh, slots = tokens(1, 2, 3, 4, 5), index(0, 3, 5), index(-1, -1), index(0, 1)
pool, kept = windows(UNUSED, UNUSED), windows(UNUSED, UNUSED, [7, 7, 7, 7])
causal_conv1d_prefill(x, DIGITS, None, offsets, pool, fresh, slots, index(2, 4, -1), kept)
assert numbers(kept) == [[0, 0, 1, 2], [0, 0, 0, 4], [7, 7, 7, 7]]
refused = refusal(causal_conv1d_prefill, x, DIGITS, None, offsets, pool, fresh, slots, index(2, 6, -1), kept)
assert refused == "PackingError: snapshot_positions[1]=6 is outside 1..5 (SNAP-3)"
pool, kept = windows([5, 6, 7, 8]), windows(UNUSED)
causal_conv1d_prefill(tokens(1), DIGITS, None, index(0, 1), pool, index(0), index(-1), index(1), kept)
assert (numbers(pool), numbers(kept)) == ([5, 6, 7, 8], [6, 7, 8, 1])

pool, kept, wrong = windows(UNUSED, UNUSED), windows(UNUSED, UNUSED, [7, 7, 7, 7]), mutant("snapshot-one-token-late")
wrong["causal_conv1d_prefill"](x, DIGITS, None, offsets, pool, fresh, slots, index(2, 4, -1), kept)
assert numbers(kept) == [[0, 1, 2, 3], [0, 0, 4, 5], [7, 7, 7, 7]]

# %% [markdown]
# (SPEC-1)=
# ## SPEC-1  Every token of a call needs its entry
#
# :::{clause} SPEC-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, seq_len = 1 + num_speculative_tokens
# :applies: *_update when given intermediates
# :observable: error
# :::
#
# A call of more tokens a row than its intermediates have entries MUST be refused with an UnsupportedError.
#
# Example. Three tokens and two entries -> `3 tokens a row and 2 intermediate entries (SPEC-1)`; two tokens and three
# entries are served.
#
# Not this. Served, and the third token has no entry: `6, 7, 8, 1` and `7, 8, 1, 2` are all there is. Fault:
# more-tokens-than-entries-accepted.
#
# Why. If every draft is accepted, the next step resumes from the entry that is missing.

# %%
pool, kept = windows([5, 6, 7, 8]), entries([[0] * 4] * 2)
refused = refusal(causal_conv1d_update, tokens([1, 2, 3]), DIGITS, None, pool, index(0), intermediate_windows=kept)
assert refused == "UnsupportedError: 3 tokens a row and 2 intermediate entries (SPEC-1)"
roomy = entries([[0] * 4] * 3)
call = (tokens([1, 2]), DIGITS, None, windows([5, 6, 7, 8]), index(0), None, roomy)
assert refusal(causal_conv1d_update, *call) == "accepted"

wrong = mutant("more-tokens-than-entries-accepted")["causal_conv1d_update"]
assert refusal(wrong, tokens([1, 2, 3]), DIGITS, None, pool, index(0), intermediate_windows=kept) == "accepted"
assert numbers(kept) == [[6, 7, 8, 1], [7, 8, 1, 2]]

# %% [markdown]
# (SPEC-2)=
# ## SPEC-2  Other entries stay
#
# :::{clause} SPEC-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, intermediate buffers
# :applies: *_update when given intermediates
# :observable: value, untouched
# :::
#
# A row MUST store into the entries of its own tokens under its write slot, and every other entry keeps its bits.
#
# Example. Window `5, 6, 7, 8`, tokens `1, 2`, three entries of `9, 9, 9, 9` -> `6, 7, 8, 1`, `7, 8, 1, 2`,
# `9, 9, 9, 9`.
#
# Not this. The remaining entries repeat the last window: `6, 7, 8, 1`, `7, 8, 1, 2`, `7, 8, 1, 2`. Fault:
# all-entries-written.
#
# Why. Requests that do not run in this step keep their entries in the same buffer.

# %%
pool, kept = windows([5, 6, 7, 8]), entries([[9] * 4] * 3)
causal_conv1d_update(tokens([1, 2]), DIGITS, None, pool, index(0), intermediate_windows=kept)
assert numbers(kept) == [[6, 7, 8, 1], [7, 8, 1, 2], [9, 9, 9, 9]]

pool, kept, wrong = windows([5, 6, 7, 8]), entries([[9] * 4] * 3), mutant("all-entries-written")
wrong["causal_conv1d_update"](tokens([1, 2]), DIGITS, None, pool, index(0), intermediate_windows=kept)
assert numbers(kept) == [[6, 7, 8, 1], [7, 8, 1, 2], [7, 8, 1, 2]]

# %% [markdown]
# (SPEC-3)=
# ## SPEC-3  Accepted drafts count without the base token
#
# :::{clause} SPEC-3
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, intermediate buffers
# :applies: *_update when given num_accepted; commit_accepted
# :observable: value
# :::
#
# A row with `num_accepted = a >= 0` MUST resume from entry `a` of its read slot, the window or state after the base
# token and `a` drafts.
#
# Example. Window `5, 6, 7, 8`; base token `1` and drafts `2, 3` leave entries `6, 7, 8, 1`, `7, 8, 1, 2` and
# `8, 1, 2, 3`. One draft was right: with `num_accepted` `1` the next token, `4`, reads `7, 8, 1, 2` -> `8124`, and the
# slot then holds `8, 1, 2, 4`. With `-1` it reads the live pool -> `1234`.
#
# Not this. The base token is counted as a draft: entry 0 is taken, `7814` and `7, 8, 1, 4`. Fault:
# accepted-count-off-by-one.
#
# Why. An engine counts tokens or it counts drafts. One off, the window has forgotten an accepted token or kept a
# rejected one.

# %%
def resumed(operation, accepted):
    pool, kept = windows([5, 6, 7, 8]), entries([[0] * 4] * 3)
    causal_conv1d_update(tokens([1, 2, 3]), DIGITS, None, pool, index(0), intermediate_windows=kept)
    assert numbers(kept) == [[6, 7, 8, 1], [7, 8, 1, 2], [8, 1, 2, 3]]
    y = operation(tokens([4]), DIGITS, None, pool, index(0), None, kept, index(accepted))
    return numbers(y), numbers(pool)


assert resumed(causal_conv1d_update, 1) == ([8124], [8, 1, 2, 4])
assert resumed(causal_conv1d_update, -1) == ([1234], [1, 2, 3, 4])

wrong = mutant("accepted-count-off-by-one")
assert resumed(wrong["causal_conv1d_update"], 1) == ([7814], [7, 8, 1, 4])

# %% [markdown]
# (SPEC-6)=
# ## SPEC-6  Rows of fewer tokens
#
# :::{clause} SPEC-6
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: *_update when given num_tokens
# :observable: value, untouched
# :::
#
# Of a row with `num_tokens = n` the first `n` tokens MUST run and the others be padding: output 0, nothing stored.
#
# Example. Window `5, 6, 7, 8`, tokens `1, 2, 3`, `num_tokens` `2` -> `6781, 7812, 0`, and the slot holds `7, 8, 1, 2`.
#
# Not this. All three run: `6781, 7812, 8123`, and `8, 1, 2, 3`. Fault: short-row-runs-full.
#
# Why. Proposers return fewer drafts at times. A placeholder that enters the window is a token that nobody wrote.

# %%
pool = windows([5, 6, 7, 8])
y = causal_conv1d_update(tokens([1, 2, 3]), DIGITS, None, pool, index(0), num_tokens=index(2))
assert (numbers(y), numbers(pool)) == ([6781, 7812, 0], [7, 8, 1, 2])

pool, wrong = windows([5, 6, 7, 8]), mutant("short-row-runs-full")
y = wrong["causal_conv1d_update"](tokens([1, 2, 3]), DIGITS, None, pool, index(0), num_tokens=index(2))
assert (numbers(y), numbers(pool)) == ([6781, 7812, 8123], [8, 1, 2, 3])
