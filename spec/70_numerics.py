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
# # Numbers and gradients
#
# What an operation means is one thing, and how exactly a kernel computes it another. This chapter says what is rounded
# and when, what the gradients are, and how a result is judged that cannot be compared with `==`.
#
# | result | its type |
# |---|---|
# | outputs | that of `v` or `x` |
# | final states | that of the entering ones; without any, float32 |
# | final windows | that of `x` |
# | gates and beta | float32 |
#
# Beside float64 inputs, which only the reference takes, everything that is float32 here is float64.

# %%
from itertools import product

import numpy as np

from statescan.conformance.mutants import mutant
from statescan.reference.delta import gated_delta_rule, gated_delta_rule_prefill, gated_delta_rule_update
from statescan.reference.delta_grad import gated_delta_rule_grad
from statescan.reference.gates import beta_gate
from statescan.reference.norms import l2norm_grad
from statescan.reference.sites import perturbing
from statescan.spec.contract import FLOAT_TYPES, OPERAND_BITS
from statescan.spec.notation import NAN, index, numbers, one_hot, refusal, states, tokens, vectors

NARROW = "bfloat16"
v = vectors(4).astype(NARROW)
o, final = gated_delta_rule(one_hot(0), one_hot(0), v, tokens(0), tokens(1), output_final_state=True)
assert (o.dtype, final.dtype, beta_gate(v[..., 0]).dtype) == (NARROW, "float32", "float32")

# %% [markdown]
# (NUM-1)=
# ## NUM-1  Sums are accumulated in float32
#
# :::{clause} NUM-1
# :level: MUST
# :since: 0.1
# :source: Megatron-Core, kernels of all mixers
# :applies: causal_conv1d*, *_delta_*, ssd, ssd_*, l2norm, rmsnorm_gated
# :observable: value
# :::
#
# Every sum MUST be accumulated in float32 or wider, whatever the types of the inputs.
#
# Example. Three drawers hold `256, 1, 1`, and the query `1, 1, 1` reads all of them -> `258`.
#
# Not this. Accumulated in bfloat16, in which 257 is no number and becomes 256, twice: `256`. Fault:
# dot-accumulates-in-bf16.
#
# Why. A sum of many small numbers stands still once it is large enough. In bfloat16 that is after 256 equal terms.

# %%
sums = {"q": vectors([1, 1, 1]), "k": one_hot(0, size=3), "v": vectors(0), "g": tokens(0), "beta": tokens(0),
        "initial_state": states([256, 1, 1]), "scale": 1.0}  # fmt: skip
assert numbers(gated_delta_rule(**sums)[0]) == [258]

wrong = mutant("dot-accumulates-in-bf16")["gated_delta_rule"]
assert numbers(wrong(**sums)[0]) == [256]
assert float(np.float64(257).astype(NARROW)) == 256

# %% [markdown]
# (NUM-2)=
# ## NUM-2  Rounded once, when stored
#
# :::{clause} NUM-2
# :level: MUST
# :since: 0.1
# :source: Megatron-Core, state update kernel of Mamba2 (registers in float32, one rounding)
# :applies: causal_conv1d*, *_delta_*, ssd, ssd_*, l2norm, rmsnorm_gated
# :observable: value
# :::
#
# Outputs, states and windows MUST be rounded once, to nearest with ties to even, when they are stored, and carried in
# float32 or wider until then.
#
# Example. Inputs in bfloat16, a pool in float32. A drawer gets 256, goes half way to 258 and then half way to 254: it
# holds 256, 257 and 255.5. The outputs are rounded -> `256, 256, 256`, and the pool holds `255.5`.
#
# Not this. The state is rounded to bfloat16 at every token: `256, 256, 255`, and `255`. Fault: state-kept-in-bf16.
#
# Why. Small updates of a large state are lost one by one, and with them all that happened lately. Short tests pass.

# %%
def carried(operation):
    k, v, pool = one_hot(0, 0, 0).astype(NARROW), vectors(256, 258, 254).astype(NARROW), states([0, 0])
    o = operation(k, k, v, tokens(0, 0, 0), tokens(1, 0.5, 0.5), index(0, 3), pool, index(0), scale=1.0)
    return numbers(o), numbers(pool)


assert carried(gated_delta_rule_prefill) == ([256, 256, 256], [255.5, 0])
assert 0.5 * (256 + 258) == 257
assert 0.5 * (257 + 254) == 255.5

wrong = mutant("state-kept-in-bf16")["gated_delta_rule_prefill"]
assert carried(wrong) == ([256, 256, 255], [255, 0])

# %% [markdown]
# (NUM-3)=
# ## NUM-3  A log-decay is between -1024 and 0
#
# :::{clause} NUM-3
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: *_delta_*
# :observable: error
# :::
#
# A `g` of a real token that is not a number from -1024 to 0 MUST be refused with an UnsupportedError.
#
# Example. The factor 0.5 where its logarithm is meant ->
# `g[0, 0, 0]=0.5 is outside -1024..0: a log-decay is meant (NUM-3)`. -1025, -inf and NaN are refused as well; -1024 is
# served, and in a row of padding anything is.
#
# Not this. The factor is taken for a logarithm, and a state of 8 grows to `13.18977`. Fault: gate-domain-not-checked.
#
# Why. Libraries differ in whether a gate is a factor or its logarithm. -1024 stands for minus infinity: its exponential
# is 0 in every type, while infinities subtracted from each other are no number.

# %%
def kept(operation, g):
    start = states([8, 0])
    return operation(one_hot(0), one_hot(0), vectors(0), tokens(g), tokens(0), initial_state=start, scale=1.0)[0]


assert refusal(kept, gated_delta_rule, 0.5) == (
    "UnsupportedError: g[0, 0, 0]=0.5 is outside -1024..0: a log-decay is meant (NUM-3)"
)
assert all("(NUM-3)" in refusal(kept, gated_delta_rule, g) for g in (-1025, -np.inf, NAN))
assert numbers(kept(gated_delta_rule, -1024)) == [0]
padded = (one_hot(0), one_hot(0), vectors(0), tokens(NAN), tokens(0), index(0, 0))
assert refusal(gated_delta_rule, *padded) == "accepted"

wrong = mutant("gate-domain-not-checked")["gated_delta_rule"]
assert numbers(kept(wrong, 0.5)) == [13.18977]

# %% [markdown]
# (NUM-4)=
# ## NUM-4  Finite in, finite out
#
# :::{clause} NUM-4
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2405.21060, section 6, segment sums; decision
# :applies: causal_conv1d*, *_delta_*, ssd, ssd_*, *_gate, l2norm, rmsnorm_gated
# :observable: value
# :::
#
# A result MUST be finite wherever all inputs are finite and in their domain and the exact result fits its type.
#
# Example. A drawer gets 4; the next token forgets and writes 6; the third goes half way to 10 -> `4, 6, 8`.
#
# Not this. The decay between two rows as a product of one exponential and the inverse of another: 0 times infinity for
# the last two rows, and the products of the chunk carry it to the first: `nan, nan, nan`. Fault:
# decay-by-positive-exponent.
#
# Why. With decays near 1 the product is right and cheap. A head that forgets fast, or a long chunk, brings its factors
# out of the range of float32 long before the result.

# %%
steep = {"q": one_hot(0, 0, 0), "k": one_hot(0, 0, 0), "v": vectors(4, 6, 10), "g": tokens(0, -1024, 0),
         "beta": tokens(1, 1, 0.5), "scale": 1.0}  # fmt: skip
assert numbers(gated_delta_rule(**steep)[0]) == [4, 6, 8]

wrong = mutant("decay-by-positive-exponent")["gated_delta_rule"]
assert numbers(wrong(**steep)[0]) == ["nan", "nan", "nan"]

# %% [markdown]
# ## Gradients, once by hand
#
# One drawer, one token: state 8, key and query 1, value 6, beta 1/2, nothing fades. The output is 7, half way. In one
# line it is
#
# $$ o = q \big( e^g S + k \beta (v - k \, e^g S) \big) $$
#
# and its derivatives at these numbers can be read off: by q it is the 7 itself; by v it is beta, 1/2; by beta the
# difference, 6 - 8; by S what the write leaves of it, 1/2, and by g that times S, 4; by k half of 6 - 2 times 8, which
# is -5.

# %%
one = np.ones((1, 1, 1, 1))
hand = {"q": one, "k": one, "v": 6 * one, "g": 0 * one[0], "beta": one[0] / 2, "initial_state": 8 * one, "scale": 1.0}
assert gated_delta_rule(**hand)[0].item() == 7
by_hand = {"q": 7, "k": -5, "v": 0.5, "g": 4, "beta": -2, "initial_state": 0.5}
assert {name: gradient.item() for name, gradient in gated_delta_rule_grad({"o": one}, **hand).items()} == by_hand

# %% [markdown]
# (GRAD-1)=
# ## GRAD-1  A gradient for every float input
#
# :::{clause} GRAD-1
# :level: MUST
# :since: 0.1
# :source: decision; https://github.com/fla-org/flash-linear-attention, backward passes
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_gate, l2norm,
# : rmsnorm_gated
# :observable: value
# :::
#
# The gradient of every float input that is given MUST be the derivative of all results with respect to it.
#
# Example. The token above: q `7`, k `-5`, v `0.5`, g `4`, beta `-2`, and the entering state `0.5`.
#
# Not this. Everything but the gate, whose gradient is `0`. Fault: gate-gradient-missing.
#
# Why. A model trains without its gates as well, only worse, and no loss curve says which of its parameters stand still.

# %%
right = gated_delta_rule_grad({"o": one}, **hand)
assert [right[name].item() for name in ("q", "k", "v")] == [7, -5, 0.5]
assert [right[name].item() for name in ("g", "beta", "initial_state")] == [4, -2, 0.5]

wrong = mutant("gate-gradient-missing")["gated_delta_rule_grad"]({"o": one}, **hand)
assert [wrong[name].item() for name in ("g", "beta", "initial_state")] == [0, -2, 0.5]

# %% [markdown]
# (GRAD-2)=
# ## GRAD-2  No gradient crosses a boundary
#
# :::{clause} GRAD-2
# :level: MUST NOT
# :since: 0.1
# :source: packed_seq_helpers, build_packed_seq_idx, paragraph 3
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd
# :observable: value, relation
# :::
#
# The gradient of a result MUST NOT reach an input of another segment, neither backward nor forward.
#
# Example. Two segments of one token, beta `0.5`, and the cotangent `0, 1`: only the second output counts. The gradient
# of the values is `0, 0.5`.
#
# Not this. The gradient of the second segment's entering state goes on into the first: `0.25, 0.5`. Fault:
# state-gradient-crosses-boundary.
#
# Why. The backward pass walks the pack from its end, and each boundary has to stop it again. Forward tests see nothing.

# %%
pair = {"q": one_hot(0, 0), "k": one_hot(0, 0), "v": vectors(6, 6), "g": tokens(0, 0), "beta": tokens(0.5, 0.5),
        "cu_seqlens": index(0, 1, 2), "initial_state": states([8, 0], [8, 0]), "scale": 1.0}  # fmt: skip
assert numbers(gated_delta_rule_grad({"o": vectors(0, 1)}, **pair)["v"]) == [0, 0.5]

wrong = mutant("state-gradient-crosses-boundary")["gated_delta_rule_grad"]
assert numbers(wrong({"o": vectors(0, 1)}, **pair)["v"]) == [0.25, 0.5]

# %% [markdown]
# (GRAD-3)=
# ## GRAD-3  Finite wherever the operation is
#
# :::{clause} GRAD-3
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, modules/l2norm.py; decision
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd, *_gate, l2norm,
# : rmsnorm_gated
# :observable: value
# :exact: no (the root of a sum of squares)
# :::
#
# Gradients MUST be finite wherever inputs and cotangents are finite and in their domain.
#
# Example. l2norm of the row `0, 0` with epsilon `0.25` and cotangent `1, 0`: divided by the root of epsilon -> `2, 0`.
#
# Not this. Written as a row over its length, whose own derivative at 0 is 0 over 0: `nan, nan`. Fault:
# l2norm-gradient-of-zero-key-nan.
#
# Why. A masked token has a zero key. One NaN in one gradient ends a training run.

# %%
zero, cotangent = vectors([0, 0]), {"y": vectors([1, 0])}
assert numbers(l2norm_grad(cotangent, zero, eps=0.25)["x"]) == [2, 0]

wrong = mutant("l2norm-gradient-of-zero-key-nan")["l2norm_grad"]
assert numbers(wrong(cotangent, zero, eps=0.25)["x"]) == ["nan", "nan"]

# %% [markdown]
# The other place is a decay that is masked. Where a kernel computes exponents above the diagonal and multiplies them by
# 0 afterwards, the forward pass is right and the backward pass is infinity times 0. Three tokens of which the second
# forgets have finite gradients, 0 for its gate:

# %%
gradients = gated_delta_rule_grad({"o": vectors(1, 1, 1)}, **steep)
assert numbers(gradients["g"]) == [0, 0, 3]
assert all(np.isfinite(gradient).all() for gradient in gradients.values())

# %% [markdown]
# (GRAD-4)=
# ## GRAD-4  Padding has gradient 0, whatever comes in
#
# :::{clause} GRAD-4
# :level: MUST
# :since: 0.1
# :source: decision; the gradient's side of PACK-8
# :applies: causal_conv1d, gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd
# :observable: value
# :::
#
# Rows past the last offset and rows with id -1 MUST have gradient 0 whatever inputs and cotangents they carry, NaN
# included.
#
# Example. Two rows, offsets `[0, 1]`, beta `0.5`, cotangent `1, nan`: the gradient of the values is `0.5, 0`.
#
# Not this. The row of padding is differentiated like any other: `0.5, nan`. Fault: padding-gradient-not-zero.
#
# Why. The next layer's padding is made of this one's, and so are the gradients that come back.

# %%
padded = {**pair, "cu_seqlens": index(0, 1), "initial_state": states([8, 0])}
assert numbers(gated_delta_rule_grad({"o": vectors(1, NAN)}, **padded)["v"]) == [0.5, 0]

wrong = mutant("padding-gradient-not-zero")["gated_delta_rule_grad"]
assert numbers(wrong({"o": vectors(1, NAN)}, **padded)["v"]) == [0.5, "nan"]

# %% [markdown]
# (GRAD-5)=
# ## GRAD-5  Entering states and windows have gradients
#
# :::{clause} GRAD-5
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, backward of initial_state
# :applies: causal_conv1d when given initial_windows;
# : gated_delta_rule, gated_delta_product, kimi_delta_attention, ssd when given initial_state
# :observable: value
# :::
#
# The gradient of entering states and windows MUST be that of everything that depends on them, final states and windows
# included.
#
# Example. Drawers `8, 16`, a token with beta `0.5` on drawer 0, cotangent `1` of its output: `0.5, 0`. With the
# cotangent `1, 1` of the final state instead: `0.5, 1`.
#
# Not this. `0, 0` both times. Fault: entering-state-gradient-missing.
#
# Why. A long document is trained in pieces, the state of one entering the next. Without this gradient no piece learns
# to write what the next one needs.

# %%
piece = {"q": one_hot(0), "k": one_hot(0), "v": vectors(6), "g": tokens(0), "beta": tokens(0.5),
         "initial_state": states([8, 16]), "scale": 1.0}  # fmt: skip
for_output, for_state = {"o": vectors(1)}, {"final_state": states([1, 1])}
assert numbers(gated_delta_rule_grad(for_output, **piece)["initial_state"]) == [0.5, 0]
assert numbers(gated_delta_rule_grad(for_state, **piece)["initial_state"]) == [0.5, 1]

wrong = mutant("entering-state-gradient-missing")["gated_delta_rule_grad"]
assert numbers(wrong(for_output, **piece)["initial_state"]) == [0, 0]
assert numbers(wrong(for_state, **piece)["initial_state"]) == [0, 0]

# %% [markdown]
# (DET-4)=
# ## DET-4  Other cuts of the same tokens
#
# :::{clause} DET-4
# :level: MUST
# :since: 0.1
# :source: decision; a state is rounded when it is stored, once a call
# :applies: gated_delta_rule_prefill, gated_delta_rule_update, gated_delta_product_prefill, gated_delta_product_update,
# : kimi_delta_attention_prefill, kimi_delta_attention_update, ssd_prefill, ssd_update
# :observable: bits, relation
# :::
#
# Cut into other calls, the same tokens MUST give the same bits wherever operands and pool hold every number exactly.
#
# Example. The drawer of NUM-2 in a float32 pool, values `256, 258, 254` with beta `1, 0.5, 0.5`: `255.5` after one call
# of three tokens, and `255.5` after three calls of one.
#
# Not this. Every call passes the state through bfloat16 on its way to the pool: `256` and `255`. Fault:
# state-stored-in-operand-type.
#
# Why. How a prompt is cut depends on how busy the server is. A pool of 16 bits is another matter: there a state is
# rounded at every cut, the two runs end at `256` and `255`, and neither is wrong. A result on such a pool is compared
# with a run of the same cuts. Numbers that no operand holds are compared within the bound below.

# %%
def cut(kind, calls, update=gated_delta_rule_update):
    k, v, beta, pool = one_hot(0, 0, 0), vectors(256, 258, 254), tokens(1, 0.5, 0.5), states([0, 0]).astype(kind)
    for part in np.split(np.arange(3), calls):
        q, g = k[:, part], tokens(*part * 0)
        update(q, q, v[:, part], g, beta[:, part], pool, index(0), scale=1.0)
    return float(pool[0, 0, 0, 0])


assert (cut("float32", 1), cut("float32", 3)) == (255.5, 255.5)
assert (cut(NARROW, 1), cut(NARROW, 3)) == (256, 255)

wrong = mutant("state-stored-in-operand-type")["gated_delta_rule_update"]
assert (cut("float32", 1, wrong), cut("float32", 3, wrong)) == (256, 255)

# %% [markdown]
# ## How a result that is not exact is judged
#
# The examples of these chapters are exact: a right result equals the expectation, whatever the order of the sums and
# the types of the operands. For random numbers that is not so, and a fixed tolerance does not do. It is too wide where
# a result is easy and too narrow where large numbers cancel, and an average over a tensor forgives a document that is
# wrong at its first three tokens. So every element has a bound of its own, made from its inputs alone.
#
# **Gain.** Wherever an implementation rounds, the reference has a named site. Move all values at these sites by one
# unit, up or down at random, and see how far the result moves, root mean square: that is its gain. Three gains are
# kept, by what is moved:
#
# | gain | moved | unit |
# |---|---|---|
# | op | what goes into products: q, k, v, the state as it is read, the correction | that of the declared operand type |
# | acc | what is carried: the state, sums | that of float32 |
# | exp | exponentials, softplus, sigmoid, roots, four units and more after long decays | that of float32 |
#
# For one token that writes 6 into an empty drawer and reads it, five factors are multiplied: the value, the correction,
# the key as it writes, the state as it is read, the query. Each moves the result by 6 units, and with random signs the
# five add up to 6 times the root of 5, which is 13.416. A drawer that holds 1000 and goes half way to -998 ends at 1.
# The result is small and the gain is not, 1657: what cancels counts in full.

# %%
OPERANDS = ("q", "k_correct", "state_correct", "v", "correction", "k_write", "state_read")
DELTA = 2.0**-20


def gain(held, value, beta):
    given = {"q": one, "k": one, "v": value * one, "g": 0 * one[0], "beta": beta * one[0],
             "initial_state": held * one, "scale": 1.0}  # fmt: skip
    exact, squares = gated_delta_rule(**given)[0].item(), []
    for signs in product((-1, 1), repeat=len(OPERANDS)):
        moves = dict(zip(OPERANDS, signs, strict=True))
        with perturbing(lambda site, x, moves=moves: x * (1 + DELTA * moves.get(site, 0))):
            squares.append(((gated_delta_rule(**given)[0].item() - exact) / DELTA) ** 2)
    return exact, float(np.sqrt(np.mean(squares)))


exact, op = gain(0, 6, 1)
assert exact == 6
assert round(op, 3) == round(6 * np.sqrt(5), 3) == 13.416
exact, op = gain(1000, -998, 0.5)
assert exact == 1
assert round(op) == 1657

# %% [markdown]
# Gains are stored in half octaves, rounded up: 13.416 as 16, the 6 of the carried state as 8.
#
# **Bound.** E is the root of the sum of squares of gain times unit. A unit is 2^-24 for float32, 2^-11 for tf32 and
# float16, 2^-8 for bfloat16, so that one expectation serves all, and whoever claims float32 operands is held to them.
#
# A pool narrower than float32 rounds what is carried, so that there the acc gain counts with the pool's unit too.
#
# **Score.** Let e be the error of an element, y its value and u its output type's unit.
#
# - `s1 = |e| / (8 E + u |y|)`, for every element;
# - `s2 = rms(e) / rms(3 E + u |y|)` over the channels of one token and head, because errors that are all alike are no
#   noise.
#
# To both denominators the smallest step of the output's type is added, which matters beside 0 alone. A result passes
# where no score is above 1. Nothing is averaged over tokens, heads, segments or slots.
#
# With the write of 6, judged as bfloat16, an output of 6.25 passes with score 0.5, and as float32 it fails by a factor
# of 28000. Four channels that are all off by 0.2 fail together, while one of four that is off by 0.3 passes.

# %%
UNITS = {name: 2.0**-bits for name, bits in OPERAND_BITS.items()}


def scores(errors, expected, operand, op=16, acc=8, exp=0):
    E = np.sqrt((UNITS[operand] * op) ** 2 + 2.0**-48 * (acc**2 + exp**2))
    own = 2.0 ** -FLOAT_TYPES["f32"].bits * abs(expected)
    errors = np.abs(errors)
    return np.max(errors / (8 * E + own)), np.sqrt(np.mean(errors**2)) / (3 * E + own)


assert UNITS["bf16"] == 2**-8
s1, _ = scores([6.25 - 6], 6, "bf16")
assert round(s1, 3) == 0.5
assert 28000 < scores([6.25 - 6], 6, "f32")[0] < 29000
s1, s2 = scores([0.2] * 4, 6, "bf16")
assert s1 < 1 < s2
s1, s2 = scores([0.3, 0, 0, 0], 6, "bf16")
assert max(s1, s2) < 1
