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
# # The delta rule: a chest of drawers
#
# A state is a chest of drawers. A **key** says which drawer, a **value** is what goes into it, and a **query** says
# which drawer is read. A token of a gated delta rule does four things, in this order:
#
# 1. **decay**: everything in the chest fades by one factor; the factor 0 empties it;
# 2. **correct**: look into the drawer of the key, and take the difference between the value and what is there;
# 3. **write**: add beta times that difference. Beta 1 replaces what was there, 1/2 goes half way, 2 goes as far beyond
#    the value as it was short of it, and 0 leaves the drawer alone;
# 4. **read** the drawer of the query.
#
# Below, two drawers hold 8 and 16, and every token reads the drawer of its key.

# %%
import numpy as np

from statescan.conformance.mutants import mutant
from statescan.reference.delta import (
    gated_delta_product,
    gated_delta_rule,
    gated_delta_rule_prefill,
    gated_delta_rule_update,
    kimi_delta_attention,
)
from statescan.spec.figures import decay_map, dictionary_lens
from statescan.spec.notation import Markdown, heads, index, numbers, one_hot, refusal, states, tokens, vectors

FORGET, HALVE, KEEP = -1024, -0.6931472, 0  # log-decays: their exponentials are 0, 1/2 and 1

TOKENS = [(0, 4, 1, KEEP), (0, 6, 0.5, KEEP), (1, 10, 2, KEEP), (1, 9, 0, KEEP), (0, 3, 1, FORGET)]
dictionary_lens([8, 16], TOKENS)  # key, value, beta and log-decay of each token

# %% [markdown]
# The same in vectors. The state of a head is a matrix of `K` rows, one a drawer, and `V` columns. A key that is 1 at
# one place and 0 at all others opens one drawer. In general a key opens every drawer by its own amount, what it finds
# is the sum of all it opens, and what it writes is spread over all it opens.
#
# $$ S \leftarrow e^{g} S, \qquad r = v - S^\top k, \qquad S \leftarrow S + k \, (\beta r)^\top,
#    \qquad o = S^\top (q \cdot \mathrm{scale}) $$
#
# Three operations follow this text, each as a packed call, as a prefill on a pool of slots and as an update of a few
# tokens a row. In the boxes below `*_delta_*` stands for all nine.
#
# | operation | what it adds |
# |---|---|
# | `gated_delta_rule` (GDN) | nothing: one decay, one key and one value a token |
# | `gated_delta_product` (GDP) | `M` keys and values a token, written one after the other |
# | `kimi_delta_attention` (KDA) | a decay of its own for each drawer |
#
# The examples use one head, scale 1 and as many drawers as they need. `run` below does what is not said: nothing is
# forgotten, writes are full, and a token reads the key it writes. It returns the outputs and the final state.

# %%
def run(rule, k, v, g=None, beta=None, q=None, start=None, **settings):
    count = v.shape[1] // settings.get("num_householder", 1)
    g = np.zeros((1, count, 1), np.float32) if g is None else g
    beta = np.ones(v.shape[:3], np.float32) if beta is None else beta
    settings = {"scale": 1.0, "output_final_state": True, **settings}
    o, final = rule(k if q is None else q, k, v, g, beta, initial_state=start, **settings)
    return numbers(o), numbers(final)


keys, values, betas, decays = zip(*TOKENS, strict=True)
k, v, g, beta = one_hot(*keys), vectors(*values), tokens(*decays), tokens(*betas)
assert run(gated_delta_rule, k, v, g, beta, start=states([8, 16])) == ([4, 5, 4, 4, 3], [3, 0])

# %% [markdown]
# ## A story of thirteen tokens
#
# Three segments of 8, 3 and 2 tokens, three drawers with a pair of numbers in each. Read it line by line with a finger
# on the drawers: it needs no computer.

# %%
STORY = [  # key, value, beta, log-decay, query, output
    (0, [1, 2], 1, KEEP, 0, [1, 2]),
    (1, [3, -1], 1, KEEP, 1, [3, -1]),
    (0, [4, 0], 0.5, KEEP, 0, [2.5, 1]),
    (1, [-2, 2], 2, KEEP, 1, [-7, 5]),
    (0, [6, 2], 1, FORGET, 0, [6, 2]),
    (2, [5, 5], 1, KEEP, 2, [5, 5]),
    (2, [1, 1], 0, KEEP, 0, [6, 2]),
    (0, [2, -2], 1, KEEP, 0, [2, -2]),
    # the second segment
    (0, [3, 1], 1, KEEP, 1, [64, 1]),
    (1, [7, -7], 1, KEEP, 1, [7, -7]),
    (1, [0, 4], 0.5, KEEP, 0, [3, 1]),
    # the third
    (2, [1, 3], 0.5, KEEP, 2, [3, 0]),
    (1, [2, 3], 1, FORGET, 1, [2, 3]),
]
START = [[[8, -8], [16, 0], [-4, 2]], [[-2, 32], [64, 1], [0, -16]], [[12, 4], [-8, 8], [5, -3]]]
END = [[[2, -2], [0, 0], [5, 5]], [[3, 1], [3.5, -1.5], [0, -16]], [[0, 0], [2, 3], [0, 0]]]

keys, values, betas, decays, queries, outputs = map(list, zip(*STORY, strict=True))
story = {"k": one_hot(*keys, size=3), "v": vectors(*values), "beta": tokens(*betas), "g": tokens(*decays),
         "q": one_hot(*queries, size=3), "start": states(*START), "cu_seqlens": index(0, 8, 11, 13)}  # fmt: skip
assert run(gated_delta_rule, **story) == (outputs, END)

# %% [markdown]
# What the drawers hold after each token, and what it reads:

# %% tags=["remove-input"]
WORDS = {0: "leave {}", 0.5: "half-write {2:g}, {3:g} to {0}", 1: "write {2:g}, {3:g} to {0}"}
lines = ["| t | the token | drawer 0 | drawer 1 | drawer 2 | reads |", "|---|---|---|---|---|---|"]
for t, (key, value, beta, decay, query, output) in enumerate(STORY):
    if t in (0, 8, 11):
        chest = START[(0, 8, 11).index(t)]
        shown = " | ".join("{:g}, {:g}".format(*drawer) for drawer in chest)
        lines.append(f"| | *segment {(0, 8, 11).index(t)}* | {shown} | |")
    chest = [[0, 0]] * 3 if decay == FORGET else chest
    moved = [old + beta * (new - old) for old, new in zip(chest[key], value, strict=True)]
    chest = [moved if n == key else drawer for n, drawer in enumerate(chest)]
    assert chest[query] == output
    said = "forget, " * (decay == FORGET) + WORDS.get(beta, "overshoot {2:g}, {3:g} in {0}").format(key, 0, *value)
    shown = " | ".join("{:g}, {:g}".format(*drawer) for drawer in chest)
    lines.append(f"| {t} | {said} | {shown} | {query}: {output[0]:g}, {output[1]:g} |")
Markdown("\n".join(lines))

# %% [markdown]
# The story is made so that a fault shows: every chest starts with something in it, the chests end differently, after a
# decay another drawer is read before it is written, and one segment ends on a decay. With longer keys, more heads,
# other slots and tokens that do nothing in between it is the same story still: that is how the suite takes it to the
# sizes of real kernels.

# %% [markdown]
# (GDN-1)=
# ## GDN-1  Decay comes first
#
# :::{clause} GDN-1
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2412.06464
# :applies: gated_delta_rule*, gated_delta_product*
# :observable: value
# :::
#
# Before anything else of a token, the state of each value head MUST be multiplied by the exponential of that token's
# and head's `g`.
#
# Example. Drawers hold `8, 16`. The first token keeps everything and writes 4 to drawer 0; the second forgets and
# writes 6 to drawer 1. Both read drawer 0 -> `4, 0`, and `0, 6` is left.
#
# Not this. Each token decays by the log-decay of the token before it: `4, 4`, and `4, 6` is left. Fault:
# decay-of-previous-token.
#
# Why. Sums of log-decays up to and up to but not including a token look alike in a kernel. A model with slow decays
# hides the difference in its last digits.

# %%
story_of_two = {"k": one_hot(0, 1), "v": vectors(4, 6), "q": one_hot(0, 0), "g": tokens(KEEP, FORGET)}
assert run(gated_delta_rule, **story_of_two, start=states([8, 16])) == ([4, 0], [0, 6])

wrong = mutant("decay-of-previous-token")["gated_delta_rule"]
assert run(wrong, **story_of_two, start=states([8, 16])) == ([4, 4], [4, 6])

# %% [markdown]
# (GDN-2)=
# ## GDN-2  The correction sees the faded state
#
# :::{clause} GDN-2
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2412.06464
# :applies: *_delta_*
# :observable: value
# :::
#
# The correction MUST be taken to what the key finds in the state after the decay.
#
# Example. Drawer 0 holds `8`; a token forgets and goes half way to `6` -> `3`, half way from 0.
#
# Not this. The difference to the old 8 is taken, 6 - 8, and half of it written to the empty drawer: `-1`. Fault:
# correction-sees-undecayed-state.
#
# Why. A kernel that fuses decay and write into one step reads the state before both. The result is bounded and
# plausible, and belongs to no published model.

# %%
half = {"k": one_hot(0), "v": vectors(6), "g": tokens(FORGET), "beta": tokens(0.5), "start": states([8, 0])}
assert run(gated_delta_rule, **half) == ([3], [3, 0])

wrong = mutant("correction-sees-undecayed-state")["gated_delta_rule"]
assert run(wrong, **half) == ([-1], [-1, 0])
assert 0.5 * (6 - 8) == -1

# %% [markdown]
# (GDN-3)=
# ## GDN-3  Beta scales the whole correction
#
# :::{clause} GDN-3
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2406.06484
# :applies: *_delta_*
# :observable: value
# :::
#
# The state MUST gain the key times beta times the difference between the value and what the key finds.
#
# Example. Drawer 0 holds `8`, value `6`, beta `1, 0.5, 2, 0` -> `6, 7, 4, 8`. A key `1, 1` over drawers `8, 16` finds
# 24; with value `6` and beta `0.5` both lose 9, half of 24 - 6 -> `-1, 7`, which add up to 6.
#
# Not this. Beta on the value alone: `6, 3, 12, 0`. Fault: beta-on-value-only.
#
# Why. With beta 1 the two agree, and tests like beta 1. With beta 0 a token that is meant to do nothing empties its
# drawer.

# %%
one = {"k": one_hot(0), "v": vectors(6), "start": states([8, 0])}
assert [run(gated_delta_rule, **one, beta=tokens(b))[0] for b in (1, 0.5, 2, 0)] == [[6], [7], [4], [8]]
assert [8 + b * (6 - 8) for b in (1, 0.5, 2, 0)] == [6, 7, 4, 8]
both = {"k": vectors([1, 1]), "v": vectors(6), "beta": tokens(0.5), "start": states([8, 16])}
assert run(gated_delta_rule, **both) == ([6], [-1, 7])
assert 0.5 * (24 - 6) == 9

wrong = mutant("beta-on-value-only")["gated_delta_rule"]
assert [run(wrong, **one, beta=tokens(b))[0] for b in (1, 0.5, 2, 0)] == [[6], [3], [12], [0]]

# %% [markdown]
# (GDN-4)=
# ## GDN-4  Read after the write, scaled once
#
# :::{clause} GDN-4
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, ops/gated_delta_rule
# :applies: *_delta_*
# :observable: value
# :::
#
# The output MUST be what the query, times `scale`, finds in the state after the token's write, and a `scale` of None is
# 1 over the root of `K`.
#
# Example. Four drawers, the first holds `8`; a token writes 6 to it and reads it -> `6` with scale 1; without a scale,
# 6 over the root of 4 -> `3`.
#
# Not this. Read before the write: `8`, and `4` without a scale. Fault: read-before-write.
#
# Why. Other recurrences read before they write. A token that cannot read itself makes the model one token late, which a
# short training run hardly shows.

# %%
write = {"k": one_hot(0, size=4), "v": vectors(6), "start": states([8, 0, 0, 0])}
assert run(gated_delta_rule, **write, scale=1)[0] == [6]
assert run(gated_delta_rule, **write, scale=None)[0] == [3]

wrong = mutant("read-before-write")["gated_delta_rule"]
assert run(wrong, **write, scale=1)[0] == [8]
assert run(wrong, **write, scale=None)[0] == [4]

# %% [markdown]
# (GDN-5)=
# ## GDN-5  Neighbouring value heads share a key head
#
# :::{clause} GDN-5
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, ops/gated_delta_rule, grouped value attention
# :applies: *_delta_*
# :observable: value, error
# :::
#
# Value head `h` MUST use query and key head `h // (HV // H)`, and a number of value heads that is no multiple of the
# key heads is refused with a ShapeError.
#
# Example. Queries `1, 10` of two heads, values `1, 2, 3, 4` of four -> `1, 2, 30, 40`. Three value heads ->
# `HV=3 is no multiple of H=2 (GDN-5)`.
#
# Not this. The two heads laid out again and again: `1, 20, 3, 40`. Fault: heads-tiled.
#
# Why. To repeat each head and to repeat the list of heads are two functions with similar names. With one head, or as
# many key heads as value heads, they are the same.

# %%
def four(rule, values=(1, 2, 3, 4)):
    ones = np.ones((1, 1, len(values)), np.float32)
    return rule(heads(1, 10), heads(1, 1), heads(*values), 0 * ones, ones, scale=1.0)[0]


assert numbers(four(gated_delta_rule)) == [1, 2, 30, 40]
assert refusal(four, gated_delta_rule, (1, 2, 3)) == "ShapeError: HV=3 is no multiple of H=2 (GDN-5)"

wrong = mutant("heads-tiled")
assert numbers(four(wrong["gated_delta_rule"])) == [1, 20, 3, 40]

# %% [markdown]
# (GDN-6)=
# ## GDN-6  Entering and final states
#
# :::{clause} GDN-6
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, ops/gated_delta_rule, initial_state
# :applies: *_delta_*
# :observable: value
# :::
#
# Each segment or row MUST start from its own entering state, or from zeros where none is given, and its final state is
# the one after its last token.
#
# Example. Offsets `[0, 1, 2, 2]`, entering states `8, 16`, `32, 64` and `5, 7`. Each token writes to drawer 0, 4 and
# then 6, and reads drawer 1 -> `16, 64`; the states end as `4, 16`, `6, 64` and, with no token, `5, 7`.
#
# Not this. Every segment starts from zeros: `0, 0`, and the states end as `4, 0`, `6, 0` and `0, 0`. Fault:
# entering-state-ignored.
#
# Why. A prompt that is served in pieces has lost its beginning. Text goes on fluently, about something else.

# %%
pack = {"k": one_hot(0, 0), "v": vectors(4, 6), "q": one_hot(1, 1), "cu_seqlens": index(0, 1, 2, 2)}
entering = states([8, 16], [32, 64], [5, 7])
assert run(gated_delta_rule, **pack, start=entering) == ([16, 64], [[4, 16], [6, 64], [5, 7]])

wrong = mutant("entering-state-ignored")["gated_delta_rule"]
assert run(wrong, **pack, start=entering) == ([0, 0], [[4, 0], [6, 0], [0, 0]])

# %% [markdown]
# How much of a write is left later is the product of the decays in between, and nothing at all across a boundary.
# Below, a segment of 5 tokens and one of 3; every second token halves the chest, and token 6 forgets. Row t, column j:
# how much of what token j wrote is left after token t, if nobody has written to that drawer since.

# %%
decay_map([KEEP, HALVE, KEEP, HALVE, KEEP, HALVE, FORGET, HALVE], [0, 5, 8])

# %%
def traced(j):
    """How much of what token j wrote is left at each later token: token j alone writes, and all read its drawer."""
    values, betas = [1.0 * (t == j) for t in range(8)], [1.0 * (t == j) for t in range(8)]
    g, offsets = tokens(KEEP, HALVE, KEEP, HALVE, KEEP, HALVE, FORGET, HALVE), index(0, 5, 8)
    return run(gated_delta_rule, one_hot(*[0] * 8), vectors(*values), g, tokens(*betas), cu_seqlens=offsets)[0]


assert traced(0) == [1, 0.5, 0.5, 0.25, 0.25, 0, 0, 0]
assert traced(5) == [0, 0, 0, 0, 0, 1, 0, 0]

# %% [markdown]
# (SLOT-6)=
# ## SLOT-6  The order of a state's axes is declared
#
# :::{clause} SLOT-6
# :level: MUST
# :since: 0.1
# :source: decision; kernels keep states with keys or with values first
# :applies: *_delta_*_prefill, *_delta_*_update
# :observable: value
# :::
#
# The states of a pool and of its snapshots and intermediates MUST be read and stored as `[K, V]`, or as `[V, K]` where
# `state_layout` is `"VK"`, whatever sizes they have.
#
# Example. Drawer 0 holds `[8, 1]` and drawer 1 `[16, 2]`; a token writes `[4, 5]` to drawer 0 and reads drawer 1 ->
# `[16, 2]`. As KV the slot goes from `[[8, 1], [16, 2]]` to `[[4, 5], [16, 2]]`, as VK from `[[8, 16], [1, 2]]` to
# `[[4, 16], [5, 2]]`.
#
# Not this. The word is taken and ignored: of the VK slot `[1, 2]` is read, and `[[4, 5], [1, 2]]` is left. Fault:
# layout-word-ignored.
#
# Why. With 128 drawers of 128 numbers nothing about a state tells the two apart, and states outlive the kernel that
# wrote them.

# %%
def served(operation, slot, layout):
    pool, (q, k, v) = states(slot), (one_hot(1), one_hot(0), vectors([4, 5]))
    o = operation(q, k, v, tokens(0), tokens(1), pool, index(0), scale=1.0, state_layout=layout)
    return numbers(o), numbers(pool)


assert served(gated_delta_rule_update, [[8, 1], [16, 2]], "KV") == ([16, 2], [[4, 5], [16, 2]])
assert served(gated_delta_rule_update, [[8, 16], [1, 2]], "VK") == ([16, 2], [[4, 16], [5, 2]])
assert "'KV', 'VK' is served (ERR-5)" in refusal(served, gated_delta_rule_update, [[8, 1], [16, 2]], "vk")

wrong = mutant("layout-word-ignored")["gated_delta_rule_update"]
assert served(wrong, [[8, 16], [1, 2]], "VK") == ([1, 2], [[4, 5], [1, 2]])

# %% [markdown]
# ## The gated delta product
#
# A token with `M` keys and values writes them one after the other, each as a token of its own would, but fades once and
# reads once. The `M` writes are called Householder copies: with beta 2 and a key of length 1 a write is a reflection,
# and products of reflections can do what one write cannot, such as swap two drawers.

# %% [markdown]
# (GDP-1)=
# ## GDP-1  One decay a token, before its first copy
#
# :::{clause} GDP-1
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2502.10297
# :applies: gated_delta_product*
# :observable: value
# :::
#
# A token's decay MUST be applied once, before copy 0 is corrected and written.
#
# Example. Drawers hold `8, 16`; a token forgets, its copies write 4 to drawer 0 and 6 to drawer 1, and it reads both
# drawers -> `10`, and `4, 6` is left.
#
# Not this. Every copy decays, so that the second forgets the first: `6`, and `0, 6` is left. Fault:
# decay-at-every-copy.
#
# Why. To a kernel the copies are a stream of `M` times as many tokens. A gate that is repeated with the keys has then
# been raised to the power `M`.

# %%
pair = {"k": one_hot(0, 1), "v": vectors(4, 6), "q": vectors([1, 1]), "num_householder": 2}
assert run(gated_delta_product, **pair, g=tokens(FORGET), start=states([8, 16])) == ([10], [4, 6])

wrong = mutant("decay-at-every-copy")["gated_delta_product"]
assert run(wrong, **pair, g=tokens(FORGET), start=states([8, 16])) == ([6], [0, 6])

# %% [markdown]
# (GDP-2)=
# ## GDP-2  Copies are written in ascending order
#
# :::{clause} GDP-2
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2502.10297
# :applies: gated_delta_product*
# :observable: value
# :::
#
# Copies MUST be corrected and written one after the other in ascending order, each seeing what those before it wrote.
#
# Example. Copy 0 writes 4 to drawer 0, copy 1 goes half way to 6 there -> `5`.
#
# Not this. The last copy first, half way from 0 to 6, and then the 4 over it: `4`. Fault: copies-descend.
#
# Why. Writes to different drawers do not care, and keys are nearly orthogonal when a model is young. Papers write the
# product of matrices from right to left.

# %%
same = {"k": one_hot(0, 0), "v": vectors(4, 6), "beta": tokens(1, 0.5), "q": one_hot(0), "num_householder": 2}
assert run(gated_delta_product, **same) == ([5], [5, 0])

wrong = mutant("copies-descend")["gated_delta_product"]
assert run(wrong, **same) == ([4], [4, 0])

# %% [markdown]
# (GDP-3)=
# ## GDP-3  One read, after the last copy
#
# :::{clause} GDP-3
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2502.10297
# :applies: gated_delta_product*
# :observable: value, shape
# :::
#
# A token MUST have one output, read after its last copy was written.
#
# Example. Copies write 4 to drawer 0 and 6 to drawer 1, and the token reads both -> `10`, one output for two copies.
#
# Not this. Read after the first copy: `4`. Fault: read-after-first-copy.
#
# Why. In a stream of copies the query has to wait for the last one. Repeated with the keys it gives `M` outputs, and
# one of them has to be chosen.

# %%
pair = {"k": one_hot(0, 1), "v": vectors(4, 6), "q": vectors([1, 1]), "num_householder": 2}
assert run(gated_delta_product, **pair) == ([10], [4, 6])

wrong = mutant("read-after-first-copy")["gated_delta_product"]
assert run(wrong, **pair) == ([4], [4, 6])

# %% [markdown]
# (GDP-4)=
# ## GDP-4  With one copy it is the gated delta rule
#
# :::{clause} GDP-4
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2502.10297
# :applies: gated_delta_product*
# :observable: value, relation
# :::
#
# With `num_householder` 1 the result MUST be that of the gated delta rule for the same arguments.
#
# Example. Drawers hold `8, 16`; a token forgets, writes 4 to drawer 0 and reads both drawers -> `4` from either
# operation.
#
# Not this. The decay belongs to a first copy that has others behind it, and a single one is skipped: `20`. Fault:
# one-copy-skips-decay.
#
# Why. A configuration with one copy is the cheapest check of a product kernel, and it must not take a path of its own.

# %%
single = {"k": one_hot(0), "v": vectors(4), "g": tokens(FORGET), "q": vectors([1, 1]), "start": states([8, 16])}
assert run(gated_delta_rule, **single) == ([4], [4, 0])
assert run(gated_delta_product, **single, num_householder=1) == ([4], [4, 0])

wrong = mutant("one-copy-skips-decay")["gated_delta_product"]
assert run(wrong, **single, num_householder=1) == ([20], [4, 16])

# %% [markdown]
# (GDP-5)=
# ## GDP-5  The copies of a token lie together
#
# :::{clause} GDP-5
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, ops/gated_delta_product; decision for the hooks' rows
# :applies: gated_delta_product*
# :observable: value
# :::
#
# Copy `m` of token `t` MUST be row `t * M + m` of `k`, `v` and `beta`, while offsets, slots and positions count tokens.
#
# Example. Two tokens of two copies, keys `0, 1, 0, 1`, values `1, 2, 3, 4`; the query 1, 10 spells drawer 1 before
# drawer 0 -> `21, 43`.
#
# Not this. All first copies, then all second ones: token 0 writes 1 and 3, both to drawer 0 -> `3, 43`. Fault:
# copies-laid-out-first.
#
# Why. A projection gives the copies as blocks inside a token, and it is as easy to flatten them the other way. With one
# token a call, which is decoding, both ways are the same.

# %%
four = {"k": one_hot(0, 1, 0, 1), "v": vectors(1, 2, 3, 4), "q": vectors([1, 10], [1, 10]), "num_householder": 2}
assert run(gated_delta_product, **four) == ([21, 43], [3, 4])

wrong = mutant("copies-laid-out-first")["gated_delta_product"]
assert run(wrong, **four)[0] == [3, 43]

# %% [markdown]
# ## Kimi delta attention
#
# Each drawer fades at its own rate. Everything else is the gated delta rule.

# %% [markdown]
# (KDA-1)=
# ## KDA-1  Each channel fades its own row
#
# :::{clause} KDA-1
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2510.26692
# :applies: kimi_delta_attention*
# :observable: value
# :::
#
# Before anything else of a token, row `i` of the state of each head MUST be multiplied by the exponential of key
# channel `i` of its `g`.
#
# Example. Drawers hold `[8, 1]` and `[16, 2]`; channel 0 forgets and channel 1 keeps, nothing is written, and the query
# reads both drawers -> `[16, 2]`, and `[[0, 0], [16, 2]]` is left.
#
# Not this. The columns fade instead of the rows: `[0, 3]`, and `[[0, 1], [0, 2]]` is left. Fault:
# decay-on-value-columns.
#
# Why. With as many rows as columns the shapes fit both ways. A gate belongs to a key: it says what is forgotten, not
# which part of every value.

# %%
channels = {"k": one_hot(0), "v": vectors([0, 0]), "beta": tokens(0), "q": vectors([1, 1])}
chest = states([[8, 1], [16, 2]])
found = run(kimi_delta_attention, **channels, g=vectors([FORGET, KEEP]), start=chest)
assert found == ([16, 2], [[0, 0], [16, 2]])

wrong = mutant("decay-on-value-columns")["kimi_delta_attention"]
found = run(wrong, **channels, g=vectors([FORGET, KEEP]), start=chest)
assert found == ([0, 3], [[0, 1], [0, 2]])

# %% [markdown]
# (KDA-2)=
# ## KDA-2  Equal channels are the gated delta rule
#
# :::{clause} KDA-2
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2510.26692
# :applies: kimi_delta_attention*
# :observable: value, relation
# :::
#
# Where all channels of every token and head carry one log-decay, the result MUST be that of the gated delta rule with
# this number.
#
# Example. Drawers hold `8, 16`, and a token that writes nothing halves them: `4, 8` is left, by one gate of the head or
# by one of each channel.
#
# Not this. The channels are added up to one gate of the head, and two halves make a quarter: `2, 4`. Fault:
# equal-channels-summed.
#
# Why. It ties the two kernels together: whatever holds for one is tested on the other with numbers that are known.

# %%
still = {"k": one_hot(0), "v": vectors(0), "beta": tokens(0), "start": states([8, 16])}
assert run(gated_delta_rule, **still, g=tokens(HALVE))[1] == [4, 8]
assert run(kimi_delta_attention, **still, g=vectors([HALVE, HALVE]))[1] == [4, 8]

wrong = mutant("equal-channels-summed")["kimi_delta_attention"]
assert run(wrong, **still, g=vectors([HALVE, HALVE]))[1] == [2, 4]

# %% [markdown]
# ## Three ways to call
#
# A pack, a prefill on a pool and an update on a pool give the same outputs, and what a pack returns as a final state
# the other two store in the slot. The rules of slots, padding, snapshots and drafts are those of every pool (SLOT-2 to
# SPEC-6); they hold for states as they do for windows.

# %%
pool, offsets = states([0, 0], [8, 16]), index(0, 2)
k, v, q, g, beta = one_hot(0, 1), vectors(4, 6), one_hot(0, 0), tokens(KEEP, FORGET), tokens(1, 1)
o = gated_delta_rule_prefill(q, k, v, g, beta, offsets, pool, index(1), scale=1.0)
assert (numbers(o), numbers(pool)) == ([4, 0], [[0, 0], [0, 6]])

pool, entries = states([0, 0], [8, 16]), np.zeros((2, 2, 1, 2, 1), np.float32)
o = gated_delta_rule_update(q, k, v, g, beta, pool, index(1), intermediate_states=entries, scale=1.0)
assert (numbers(o), numbers(pool)) == ([4, 0], [[0, 0], [0, 6]])
assert numbers(entries[1]) == [[4, 16], [0, 6]]

# %% [markdown]
# ## DPv2
#
# The public pages of Megatron-Core name DPv2 beside GDP, KDA and GDN as a mixer backed by flash-linear-attention that
# shares the packing helpers. No public text defines its recurrence, so there is none here. What those pages say of it
# is said here of every mixer: one rule for boundaries (PACK-6), and one check of versions that does not ask for the
# scan package (CAP-1, CAP-2).

# %% [markdown]
# ## Names elsewhere
#
# | here | flash-linear-attention | FlashInfer | ONNX, opset 27 |
# |---|---|---|---|
# | `gated_delta_rule` | `chunk_gated_delta_rule` | `chunk_gated_delta_rule` | `LinearAttention`, `gated_delta` |
# | `..._update` | `fused_recurrent_gated_delta_rule` | `gated_delta_rule_decode`, `..._mtp` | the same, one token |
# | `gated_delta_product` | `chunk_gated_delta_product` | | |
# | `kimi_delta_attention` | `chunk_kda` | | the same, a decay per key channel |
# | `use_qk_l2norm`, False | `use_qk_l2norm_in_kernel`, False | `use_qk_l2norm`, True in decode | |
# | `num_householder` | `num_householder` | | |
#
# vLLM carries flash-linear-attention's names. Numbers that fit the shapes and mean something else are worse than names.
# Where conventions differ:
#
# - **g.** Here, in flash-linear-attention and in ONNX it is a logarithm. FlashInfer's prefill takes the factor itself,
#   and its decode kernels take the input of the gate, `a`, beside `A_log` and `dt_bias`; so does
#   flash-linear-attention with `use_gate_in_kernel`. A factor in place of a logarithm is above 0 and is refused here
#   (NUM-3).
# - **beta.** Here it comes after the sigmoid. Decode kernels of FlashInfer, and flash-linear-attention with
#   `use_beta_sigmoid_in_kernel`, take the number before it.
# - **Order of a state.** `[K, V]` here, in flash-linear-attention, in ONNX and in FlashInfer's
#   `gated_delta_rule_decode`; `[V, K]` in its `gated_delta_rule_decode_pretranspose` and `gated_delta_rule_mtp`, in
#   vLLM, and in flash-linear-attention with `state_v_first`. Here `state_layout` says which (SLOT-6).
# - **Heads.** Here value heads are a multiple of key heads, which queries share. In ONNX there are as many key as value
#   heads, and query heads are a multiple of them.
# - **Copies.** Megatron-Core's GDP projects the copies as blocks inside a token; here and in flash-linear-attention
#   they are rows (GDP-5).
# - **Kimi's names.** Its gate's input is `g` in flash-linear-attention and `f` here (GATE-3).
