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
# # Gates and norms
#
# A recurrent state forgets and learns, and each token says how much of both. Two numbers say it, made from the token by
# small functions:
#
# - the **log-decay** $g \le 0$: the state is multiplied by $e^g$. 0 keeps everything, and -1024 keeps nothing, since
#   its exponential is exactly 0;
# - **beta**, how much of a correction is written: 1 all of it, 1/2 half, 2 twice as much.
#
# $$ g = -e^{A} \, \mathrm{softplus}(a + b), \qquad \mathrm{softplus}(x) = \ln(1 + e^x), \qquad
#    \beta = \frac{1}{1 + e^{-x}} $$
#
# where $A$ is `A_log`, $b$ is `dt_bias`, and $a$ and $x$ come from the token. With $A = 0$ and the sum 0 the decay is
# -ln 2: the state is halved.
#
# | mixer | log-decay | beta | queries and keys | norm of the output |
# |---|---|---|---|---|
# | Mamba2 | `dt A` (SSD-1, SSD-2) | the step `dt` | as they are | gate, then norm; silu |
# | GDP | `softplus_gate`, one a token and head | `beta_gate`, one a copy | l2norm | gate, then norm; silu |
# | GDN | `softplus_gate`, one a token and head | `beta_gate` | l2norm | norm, then gate; silu |
# | KDA | `kda_gate`, one a token, head and key channel | `beta_gate` | l2norm | norm, then gate; sigmoid |
#
# Gates and norms work on each token alone. They know of no segments, so a row of padding is a row like any other.

# %%
import numpy as np

from statescan.conformance.mutants import mutant
from statescan.reference.gates import beta_gate, kda_gate, softplus_gate
from statescan.reference.norms import l2norm, rmsnorm_gated
from statescan.spec.notation import channels, numbers, refusal, tokens, vectors

g = softplus_gate(tokens(0), channels(0))
assert numbers(g) == [-0.6931472]
assert numbers(np.exp(g)) == [0.5]
assert np.exp(-1024.0) == 0

# %% [markdown]
# (GATE-1)=
# ## GATE-1  The decay of a head
#
# :::{clause} GATE-1
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2312.00752, section 3.6; Megatron-Core, gated delta net
# :applies: softplus_gate; kda_gate when given no lower_bound
# :observable: value
# :::
#
# The log-decay MUST be minus `exp(A_log)` times the softplus of the sum of the input and `dt_bias`.
#
# Example. Input `-1024`, bias `1054`, `A_log` `0`: the sum is 30, and softplus of that is 30 as well -> `-30`. Input
# `-1`, bias `1` -> `-0.6931472`.
#
# Not this. The bias is added after the softplus: `-1054`, and `-1.3132616`. Fault: gate-bias-after-softplus.
#
# Why. The bias sets how long a head remembers before it has learned anything. After the softplus it only ever makes
# heads forget faster.

# %%
assert -1024 + 1054 == 30
assert numbers(softplus_gate(tokens(-1024), channels(0), channels(1054))) == [-30]
assert numbers(softplus_gate(tokens(-1), channels(0), channels(1))) == [-0.6931472]

wrong = mutant("gate-bias-after-softplus")
assert numbers(wrong["softplus_gate"](tokens(-1024), channels(0), channels(1054))) == [-1054]
assert numbers(wrong["softplus_gate"](tokens(-1), channels(0), channels(1))) == [-1.3132616]

# %% [markdown]
# (GATE-2)=
# ## GATE-2  Softplus is linear above 20
#
# :::{clause} GATE-2
# :level: MUST
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, selective_state_update; PyTorch, softplus with threshold 20
# :applies: softplus_gate; kda_gate when given no lower_bound; ssd, ssd_* when dt_softplus is true
# :observable: value
# :::
#
# The softplus of an `x` above 20 MUST be `x` itself, and ln(1 + e^x) of any other.
#
# Example. Inputs `100, 30, 1, -1024` -> `-100, -30, -1.3132616, 0`. The step at 20 shows in float64 alone: inputs
# `20, 20.5` -> `-20.000000002061153, -20.5`.
#
# Not this. The exponential overflows on the way: `-inf` in place of `-100`, and the other three as they are. Fault:
# softplus-overflows.
#
# Why. In float32 e^x is infinite from 89 on. The threshold is part of the definition because every kernel has it, and
# because a smaller one, 0 say, would be visible.

# %%
rate = channels(0)
assert numbers(softplus_gate(tokens(100, 30, 1, -1024), rate)) == [-100, -30, -1.3132616, 0]
assert numbers(softplus_gate(np.array([[20], [20.5]]), rate)) == [-20.000000002061153, -20.5]

wrong = mutant("softplus-overflows")
assert numbers(wrong["softplus_gate"](tokens(100, 30, 1, -1024), rate)) == ["-inf", -30, -1.3132616, 0]

# %% [markdown]
# (GATE-3)=
# ## GATE-3  Kimi delta attention has a gate per key channel
#
# :::{clause} GATE-3
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2510.26692; https://github.com/fla-org/flash-linear-attention, ops/kda/gate.py
# :applies: kda_gate
# :observable: value
# :::
#
# Each key channel MUST have its own input and its own `dt_bias`, while all channels of a head share one `A_log`, and
# None for it is the factor 1.
#
# Example. One head, two channels: inputs `30, 40` -> `-30, -40`; with biases `1, 2` -> `-31, -42`.
#
# Not this. The first channel's gate for the whole head: `-30, -30`, and `-31, -31`. Fault: kda-gate-of-channel-zero.
#
# Why. Channels that decay at their own rates are what this mixer adds to GDN. A kernel that was grown from GDN's runs
# well with one of them.

# %%
f, bias = vectors([30, 40]), np.array([[1, 2]], np.float32)
assert numbers(kda_gate(f, channels(0))) == [-30, -40]
assert numbers(kda_gate(f)) == [-30, -40]
assert numbers(kda_gate(f, channels(0), bias)) == [-31, -42]

wrong = mutant("kda-gate-of-channel-zero")
assert numbers(wrong["kda_gate"](f, channels(0))) == [-30, -30]
assert numbers(wrong["kda_gate"](f, channels(0), bias)) == [-31, -31]

# %% [markdown]
# (GATE-4)=
# ## GATE-4  A lower bound is another gate
#
# :::{clause} GATE-4
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, ops/kda/gate.py
# :applies: kda_gate when given lower_bound
# :observable: value, error
# :::
#
# With a `lower_bound` the log-decay MUST be the bound times the sigmoid of `exp(A_log)` times the sum of input and
# `dt_bias`, and a bound outside -1024..0 is refused with an UnsupportedError.
#
# Example. Bound `-4`, inputs `0, 1024, -1024` -> `-2, -4, 0`. Bound `4` ->
# `lower_bound=4 is outside -1024..0 (GATE-4)`.
#
# Not this. The softplus gate, cut off at the bound: `-0.6931472, -4, 0`. Fault: lower-bound-as-clamp.
#
# Why. The two agree at both ends and nowhere between. A cut also has no gradient where it holds, so a channel that
# reached the bound would stay there.

# %%
f = vectors([0, 1024, -1024])
assert numbers(kda_gate(f, lower_bound=-4)) == [-2, -4, 0]
assert refusal(kda_gate, f, lower_bound=4) == "UnsupportedError: lower_bound=4 is outside -1024..0 (GATE-4)"

wrong = mutant("lower-bound-as-clamp")
assert numbers(wrong["kda_gate"](f, lower_bound=-4)) == [-0.6931472, -4, 0]

# %% [markdown]
# (GATE-5)=
# ## GATE-5  Beta, and twice beta
#
# :::{clause} GATE-5
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2411.12537; https://github.com/fla-org/flash-linear-attention, allow_neg_eigval
# :applies: beta_gate
# :observable: value
# :::
#
# Beta MUST be the sigmoid of its input, computed in float32 or wider, and exactly twice that where `allow_neg_eigval`
# is set.
#
# Example. Inputs `1024, -1024, 0` -> `1, 0, 0.5`; doubled, `2, 0, 1`. A bfloat16 input `1` gives `0.7310586`, a number
# that bfloat16 does not have.
#
# Not this. Asked to double, and not doubled: `1, 0, 0.5`. Fault: beta-not-doubled.
#
# Why. A write with beta 2 mirrors what a key holds at the new value instead of replacing it. Without that a state
# cannot count in twos, and a model that was trained with it loses what it counted.

# %%
b = tokens(1024, -1024, 0)
assert numbers(beta_gate(b)) == [1, 0, 0.5]
assert numbers(beta_gate(b, allow_neg_eigval=True)) == [2, 0, 1]
assert numbers(beta_gate(tokens(1).astype("bfloat16"))) == [0.7310586]

wrong = mutant("beta-not-doubled")
assert numbers(wrong["beta_gate"](b, allow_neg_eigval=True)) == [1, 0, 0.5]

# %% [markdown]
# (GATE-6)=
# ## GATE-6  Parameters are widened first
#
# :::{clause} GATE-6
# :level: MUST
# :since: 0.1
# :source: decision; Megatron-Core keeps the parameters in float32 in one mixer and in the model's type in another
# :applies: softplus_gate, kda_gate
# :observable: value
# :exact: no (the exponential of a parameter)
# :::
#
# `A_log` and `dt_bias` MUST be widened to float32 or more before anything is computed with them.
#
# Example. `A_log` `1` in bfloat16 and input `30`: 30 e -> `-81.548454`.
#
# Not this. The exponential is rounded to bfloat16 before it is used: 30 times `2.71875` -> `-81.5625`. Fault:
# parameters-exponentiated-in-their-own-type.
#
# Why. All tokens share the rate, so that its error is not averaged out: it adds up over all that a head looks back on.
# Rounded in serving and not in training, it makes two models of one.

# %%
a, rate = tokens(30), channels(1).astype("bfloat16")
assert numbers(softplus_gate(a, rate)) == [-81.548454]

wrong = mutant("parameters-exponentiated-in-their-own-type")
assert numbers(wrong["softplus_gate"](a, rate)) == [-30 * 2.71875] == [-81.5625]

# %% [markdown]
# (NORM-1)=
# ## NORM-1  The epsilon of l2norm is inside the root
#
# :::{clause} NORM-1
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention, modules/l2norm.py
# :applies: l2norm; *_delta_* when use_qk_l2norm is set
# :observable: value
# :exact: no (a root)
# :::
#
# A row MUST be divided by the root of the sum of its squares and epsilon.
#
# Example. Row `1, 2, 2`: its squares add up to 9, and with epsilon 16 the root is 5 -> `0.2, 0.4, 0.4`. A row `0, 0`
# stays `0, 0`.
#
# Not this. The larger of the two under the root, 4: `0.25, 0.5, 0.5`. Fault: l2norm-epsilon-as-maximum.
#
# Why. With the epsilon of `1e-6` the difference is small for a long key and everything for a short one, and the key of
# a masked token is the shortest there is.

# %%
assert numbers(l2norm(vectors([1, 2, 2]), eps=16)) == [0.2, 0.4, 0.4]
assert 1 + 2 * 2 + 2 * 2 == 9
assert 9 + 16 == 5 * 5
assert numbers(l2norm(vectors([0, 0]), eps=1e-6)) == [0, 0]

wrong = mutant("l2norm-epsilon-as-maximum")
assert numbers(wrong["l2norm"](vectors([1, 2, 2]), eps=16)) == [0.25, 0.5, 0.5] == [1 / 4, 2 / 4, 2 / 4]

# %% [markdown]
# (NORM-2)=
# ## NORM-2  Order and gate of the output norm are the mixer's
#
# :::{clause} NORM-2
# :level: MUST
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, layernorm_gated; Megatron-Core, gated delta net
# :applies: rmsnorm_gated
# :observable: value
# :exact: no (a root)
# :::
#
# The gate MUST multiply the input before the norm, or the normalised result where `norm_before_gate` is set, and it is
# silu or sigmoid as `gate_activation` says.
#
# Example. Inputs `2, 2`, gate inputs `1024, 1024`, of which silu is 1024 and sigmoid is 1. Gate first: the norm takes
# the gate away again -> `1, 1`. Norm first: `1024, 1024` with silu, `1, 1` with sigmoid.
#
# Not this. The gate first, whatever was asked for: `1, 1` in place of `1024, 1024`. Fault: norm-order-ignored.
#
# Why. Mamba2 and GDP gate first, GDN and KDA norm first. One function serves all four, and the setting is easily left
# at what the first of them needed.

# %%
x, z, weight = vectors([2, 2]), vectors([1024, 1024]), channels(1, 1)
assert numbers(rmsnorm_gated(x, z, weight, eps=0)) == [1, 1]
assert numbers(rmsnorm_gated(x, z, weight, eps=0, norm_before_gate=True)) == [1024, 1024]
assert numbers(rmsnorm_gated(x, z, weight, eps=0, norm_before_gate=True, gate_activation="sigmoid")) == [1, 1]

wrong = mutant("norm-order-ignored")
assert numbers(wrong["rmsnorm_gated"](x, z, weight, eps=0, norm_before_gate=True)) == [1, 1]

# %% [markdown]
# (NORM-3)=
# ## NORM-3  Groups are normalised apart
#
# :::{clause} NORM-3
# :level: MUST
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, layernorm_gated; Megatron-Core, Mamba mixer (groups per rank)
# :applies: rmsnorm_gated
# :observable: value, error
# :exact: no (a root)
# :::
#
# The mean square MUST be taken over each `group_size` neighbouring channels on their own, and a size that does not
# divide the channels is refused with a ShapeError.
#
# Example. Inputs `1, 1, 7, 7`: groups of 2 -> `1, 1, 1, 1`. Without groups the mean square is 25 ->
# `0.2, 0.2, 1.4, 1.4`. Groups of 3 -> `group_size=3 does not divide the 4 channels of x (NORM-3)`.
#
# Not this. Groups of 2 are asked for and not made: `0.2, 0.2, 1.4, 1.4`. Fault: group-size-ignored.
#
# Why. The groups are what lets several devices each norm their own channels. Without them the result of a model depends
# on how many devices it runs on.

# %%
x, weight = vectors([1, 1, 7, 7]), channels(1, 1, 1, 1)
assert numbers(rmsnorm_gated(x, None, weight, eps=0, group_size=2)) == [1, 1, 1, 1]
assert numbers(rmsnorm_gated(x, None, weight, eps=0)) == [0.2, 0.2, 1.4, 1.4]
assert (1 + 1 + 7 * 7 + 7 * 7) / 4 == 25
assert refusal(rmsnorm_gated, x, None, weight, group_size=3) == (
    "ShapeError: group_size=3 does not divide the 4 channels of x (NORM-3)"
)

wrong = mutant("group-size-ignored")
assert numbers(wrong["rmsnorm_gated"](x, None, weight, eps=0, group_size=2)) == [0.2, 0.2, 1.4, 1.4]

# %% [markdown]
# A weight has one number a channel, or one a place within the group that every group shares: weights `1, 10` on the
# inputs `1, 1, 7, 7` give `1, 10, 1, 10`.

# %%
assert numbers(rmsnorm_gated(x, None, channels(1, 10), eps=0, group_size=2)) == [1, 10, 1, 10]

# %% [markdown]
# ## Cases beside Megatron-Core
#
# | where | here | there |
# |---|---|---|
# | sigmoid of beta | in float32 | in the input's type (GDP; GDN in training), in float32 (GDN's decode kernel) |
# | `A_log`, `dt_bias` | any float type, widened | `A_log` float32 in Mamba2 and GDP, the model's type in GDN |
# | twice beta | if asked | never |
# | order of norm and gate | a setting | fixed by the class of the mixer |
#
# With a bfloat16 input `1`, beta is `0.7310586` here and `0.73046875` there.

# %%
beta = beta_gate(tokens(1).astype("bfloat16"))
assert numbers(beta) == [0.7310586]
assert float(beta.astype("bfloat16").item()) == 0.73046875
