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
# # Why does my kernel fail PACK-6?
#
# A failure is read from the outside in: the clause says what was promised, the vector what was asked, the first bad
# place where it went wrong, and the known faults what usually does this.
#
# Take a delta rule that runs through the pack and never resets its state. On two segments of two tokens it gives:

# %%
from statescan.conformance.mutants import mutant
from statescan.reference.delta import gated_delta_rule
from statescan.spec.clauses import parse_chapters
from statescan.spec.notation import Markdown, index, numbers, one_hot, tokens, vectors

k, v, q = one_hot(0, 1, 0, 1), vectors(4, 6, 8, 2), one_hot(0, 1, 1, 1)
settings = {"g": tokens(0, 0, 0, 0), "beta": tokens(1, 1, 1, 1), "cu_seqlens": index(0, 2, 4), "scale": 1}
right = numbers(gated_delta_rule(q, k, v, **settings)[0])
wrong = numbers(mutant("state-leaks-across-boundary")["gated_delta_rule"](q, k, v, **settings)[0])
assert right == [4, 6, 0, 2]
assert wrong == [4, 6, 6, 2]

# %% [markdown]
# Right is `4, 6, 0, 2`; it gives `4, 6, 6, 2`. The first bad place is token 2, the first of segment 1: it reads drawer
# 1, which nobody has written in this segment, and finds the other segment's 6.
#
# ## 1. The clause
#
# `statescan show PACK-6`, or its page on this site, states the rule, an example and the wrong neighbour:

# %%
clause = parse_chapters()["PACK-6"]
Markdown(f"> {clause.sentence}\n>\n> {clause.example}\n>\n> Not this. {clause.neighbour}")

# %% [markdown]
# ## 2. The place
#
# | first bad place | look at |
# |---|---|
# | first token of a segment, not the first segment | the reset: the state, or the first taps of the window |
# | the first W - 1 tokens of a segment and no later one | the window only: the scan is right |
# | every token of a segment | the entering state: another row's, or none |
# | first or last row of a chunk | the chunk table, or a mask that is off by one |
# | heads above a group's first | the head map: repeated, not tiled (GDN-5, SSD-5) |
# | a padding row, or a slot that nobody names | an index of -1 that was clamped or wrapped around (SLOT-2, PAD-1) |
# | rows past the last offset | memory that nobody writes (PACK-8, MEM-5) |
# | only the second of two calls | something is kept between calls: a table, a counter, a buffer (DET-1, MEM-6) |
# | only a relation fails, no value | the result depends on a neighbour; vary one input at a time |
#
# ## 3. The vector
#
# `statescan show ID` prints the file, and its page steps through it token by token: window, state and pool before and
# after. Exact vectors have numbers to follow by eye. What has failed at real sizes fails in the small story too,
# because the one is the other, carried by lifts; the failure says which lift.
#
# ## 4. The status
#
# | status | says |
# |---|---|
# | `fail.value`, `fail.nonfinite` | wrong numbers; NaN or infinity where numbers are due |
# | `fail.touched` | something else was written: an input, another slot, a guard |
# | `fail.unwritten` | an output or a slot kept what the memory held |
# | `fail.relation` | two calls that have to agree do not |
# | `fail.silent` | an argument that is not claimed was taken and ignored |
# | `fail.accepted`, `fail.partial` | a wrong call went through; it was refused and something changed all the same |
# | `not_applicable`, `not_run` | not claimed, with the missing word; left out for time. Never a pass |
#
# ## 5. The known faults
#
# Every vector lists the known faults that it catches, and every fault its mechanism. The one above has a page of its
# own, with the clauses that it breaks and where it was seen. When two clauses fail, begin with the one whose vectors
# are smaller: taps alone (CONV-3), then the state alone.
#
# ## Questions
#
# - *What does -1 mean?* In a list of slots: nothing is read, nothing is written, the output is 0
#   ([pools](30_pools.py), SLOT-2, PAD-1); all negative numbers mean the same. In ids: a row outside every segment
#   (PACK-8). In `num_accepted`: the live pool and no entry.
# - *Which column is newest?* The last: a window `[C, W]` holds raw inputs, newest in column W - 1
#   ([the convolution](20_conv.py), CONV-1).
# - *When may cached tokens be skipped?* When a state is restored at exactly their end, window and state together
#   (SNAP-2). A recurrent state cannot be cut back to an earlier position.
# - *How do I run this on my code?* [In ten minutes](91_adopt.py).
