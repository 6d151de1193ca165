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
# # Mamba2: a running sum that fades
#
# The state of a Mamba2 head is a sum of what its tokens wrote, and it fades. Nothing is looked up and nothing is
# replaced, which is all that sets it apart from the delta rule. In its smallest form, one number that does not fade,
# tokens 1, 2, 3 make the state and the output 1, 3, 6.
#
# Each token brings a **step** $\Delta$, which says how long the token lasts: the longer, the more the state fades, and
# the more of the token is written.
#
# $$ \Delta \leftarrow \mathrm{softplus}(\Delta + b), \qquad S \leftarrow e^{\Delta A} S + (\Delta x) B^\top, \qquad
#    y = (S C + D x) \cdot \mathrm{silu}(z) $$
#
# $x$ has `P` numbers a head, $B$ and $C$ have `R`, and the state is a matrix of `P` rows and `R` columns: $B$ says into
# which columns a token is written, $C$ which of them are read, as keys and queries do. $A$ is negative or 0 and belongs
# to the head; $b$ is `dt_bias`; $D$ lets a token's own input through; $z$ gates the output where the mixer's norm does
# not.

# %%
import numpy as np

from statescan.conformance.mutants import mutant
from statescan.reference.ssd import ssd, ssd_prefill, ssd_update
from statescan.spec.notation import channels, heads, ids, index, numbers, refusal, states, tokens, vectors


def run(operation, x, dt=None, A=0, B=None, C=None, start=None, **given):
    ones = np.ones((*x.shape[:2], 1, 1), np.float32)
    dt, B, C = (ones[..., 0] if dt is None else dt), (ones if B is None else B), (ones if C is None else C)
    given = {"dt_softplus": False, "output_final_state": True, **given}
    y, final = operation(x, dt, channels(A), B, C, initial_state=start, **given)
    return numbers(y), numbers(final)


assert run(ssd, vectors(1, 2, 3)) == ([1, 3, 6], [6])

# %% [markdown]
# In the cells below `run` does what is not said: steps of 1 taken as they are, B and C of 1, nothing fades. It returns
# the outputs and the final state. A pair of numbers in `x` shows the rows of the state, a pair in B its columns:

# %%
B, C = vectors([1, 10]), vectors([0, 1])
assert run(ssd, vectors([1, 2]), B=B, C=C) == ([10, 20], [[1, 10], [2, 20]])

# %% [markdown]
# (SSD-1)=
# ## SSD-1  The step: bias, softplus, limit
#
# :::{clause} SSD-1
# :level: MUST
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, selective_state_update and ssd_chunk_state
# :applies: ssd, ssd_*
# :observable: value
# :::
#
# The step MUST be the input plus `dt_bias`, passed through softplus where `dt_softplus` is set, then clamped to
# `dt_limit`.
#
# Example. Input `-1024`, bias `1054`: the sum is 30 and so is its softplus, and a token `1` writes and reads `30`.
# Without softplus, input `2` and bias `1` -> `3`. With limits `0, 10` the first becomes `10`.
#
# Not this. The bias after the softplus, which has made 0 of the input: `1054`. Fault: dt-bias-after-softplus.
#
# Why. The order is spread over several kernels and is written out in none of their names. Biases are small when a model
# is young, so that the fault grows with training.

# %%
long = {"x": vectors(1), "dt": tokens(-1024), "dt_bias": channels(1054), "dt_softplus": True}
assert run(ssd, **long) == ([30], [30])
assert run(ssd, vectors(1), tokens(2), dt_bias=channels(1)) == ([3], [3])
assert run(ssd, **long, dt_limit=(0, 10)) == ([10], [10])

wrong = mutant("dt-bias-after-softplus")["ssd"]
assert run(wrong, **long) == ([1054], [1054])

# %% [markdown]
# (SSD-2)=
# ## SSD-2  Fade, then write step times input
#
# :::{clause} SSD-2
# :level: MUST
# :since: 0.1
# :source: https://arxiv.org/abs/2405.21060
# :applies: ssd, ssd_*
# :observable: value
# :::
#
# The state of each head MUST be multiplied by the exponential of step times `A` and then gain the product of step times
# `x` and `B`.
#
# Example. The state is `8`; a token `3` with step 2 makes it 8 + 6 -> `14` where `A` is 0, and `6` where `A` is -512,
# since nothing is left of the 8.
#
# Not this. The step in the decay alone, the token written as it is: `11`, and `3`. Fault: step-missing-in-write.
#
# Why. A step is 1 in many tests, and between 0.001 and 0.1 where most models begin.

# %%
assert run(ssd, vectors(3), tokens(2), 0, start=states([8])) == ([14], [14])
assert run(ssd, vectors(3), tokens(2), -512, start=states([8])) == ([6], [6])
assert 8 + 6 == 8 + 2 * 3 == 14

wrong = mutant("step-missing-in-write")["ssd"]
assert run(wrong, vectors(3), tokens(2), 0, start=states([8])) == ([11], [11])
assert run(wrong, vectors(3), tokens(2), -512, start=states([8])) == ([3], [3])

# %% [markdown]
# (SSD-3)=
# ## SSD-3  Read after the write, and D lets the input through
#
# :::{clause} SSD-3
# :level: MUST
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, selective_state_update; D of shape [H] or [H, P]
# :applies: ssd, ssd_*
# :observable: value
# :::
#
# The output MUST be the product of the state after the write and `C`, plus `D` times `x` where `D` is given, with one
# number of `D` a head or one a channel as its shape says.
#
# Example. A token `[1, 2]` reads itself, `1, 2`. `D` of 10 a head -> `11, 22`; `D` of 10 and 100 a channel ->
# `11, 202`.
#
# Not this. Of `10, 100` the first for the whole head: `11, 22`. Fault: skip-per-channel-taken-per-head.
#
# Why. Both shapes are in use, and a kernel that was written for one reads the other without an error: the first numbers
# are there either way.

# %%
x = vectors([1, 2])
assert run(ssd, x)[0] == [1, 2]
assert run(ssd, x, D=channels(10))[0] == [11, 22]
assert run(ssd, x, D=np.array([[10, 100]], np.float32))[0] == [11, 202]

wrong = mutant("skip-per-channel-taken-per-head")["ssd"]
assert run(wrong, x, D=np.array([[10, 100]], np.float32))[0] == [11, 22]

# %% [markdown]
# (SSD-4)=
# ## SSD-4  The gate comes last
#
# :::{clause} SSD-4
# :level: MUST
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, selective_state_update
# :applies: ssd, ssd_* when given z
# :observable: value
# :::
#
# Where `z` is given, the output with the part of `D` in it MUST be multiplied by silu of `z`.
#
# Example. Token `1`, `D` `1`, `z` `1024`, of which silu is 1024: 1 + 1 times 1024 -> `2048`.
#
# Not this. The gate before the input is let through: 1024 + 1 -> `1025`. Fault: gate-before-skip.
#
# Why. A mixer that ends in a norm gates there, and only one without gates in the scan: the scan's gate is the one that
# is tested less.

# %%
gated = {"x": vectors(1), "D": channels(1), "z": vectors(1024)}
assert run(ssd, **gated)[0] == [2048]
assert (1 + 1) * 1024 == 2048
assert 1 * 1024 + 1 == 1025

wrong = mutant("gate-before-skip")["ssd"]
assert run(wrong, **gated)[0] == [1025]

# %% [markdown]
# (SSD-5)=
# ## SSD-5  Neighbouring heads share a group
#
# :::{clause} SSD-5
# :level: MUST
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, ngroups
# :applies: ssd, ssd_*
# :observable: value, error
# :::
#
# Head `h` MUST use `B` and `C` of group `h // (H // G)`, and a number of heads that is no multiple of the groups is
# refused with a ShapeError.
#
# Example. `B` of two groups `1, 10`, tokens `1, 2, 3, 4` of four heads -> `1, 2, 30, 40`. Three heads ->
# `H=3 is no multiple of G=2 (SSD-5)`.
#
# Not this. The two groups laid out again and again: `1, 20, 3, 40`. Fault: groups-tiled.
#
# Why. A group is what one device of several holds. Tiled, every device would need all of them.

# %%
def grouped(operation, values=(1, 2, 3, 4)):
    count, B, C = len(values), heads(1, 10), heads(1, 1)
    dt, A = np.ones((1, 1, count), np.float32), np.zeros(count, np.float32)
    return operation(heads(*values), dt, A, B, C, dt_softplus=False)[0]


assert numbers(grouped(ssd)) == [1, 2, 30, 40]
assert refusal(grouped, ssd, (1, 2, 3)) == "ShapeError: H=3 is no multiple of G=2 (SSD-5)"

wrong = mutant("groups-tiled")
assert numbers(grouped(wrong["ssd"])) == [1, 20, 3, 40]

# %% [markdown]
# (SSD-6)=
# ## SSD-6  The limit holds in decode too
#
# :::{clause} SSD-6
# :level: MUST
# :since: 0.1
# :source: decision; Megatron-Core clamps in prefill alone, with limits that never bind
# :applies: ssd, ssd_*
# :observable: value, error
# :::
#
# A `dt_limit` MUST clamp the step of every token, in a pack, a prefill and an update alike, and one that is no pair
# with the smaller number first is refused with an UnsupportedError.
#
# Example. Step `30`, limits `0, 10`, token `1` -> `10` from each of the three. Limits `10, 0` ->
# `dt_limit=(10, 0): a pair (least, largest) is needed (SSD-6)`.
#
# Not this. The update does not know the limit: `30`. Fault: limit-ignored-in-update.
#
# Why. Long steps are rare, so that a prompt and its answer part at a rare token and never come together again.

# %%
def by_each(operations, limit):
    one, slot, settings = vectors(1), index(0), {"dt_softplus": False, "dt_limit": limit}
    given = (one, tokens(30), channels(0), one, one)
    packed, prefill, update = operations
    yield numbers(packed(*given, **settings)[0])
    yield numbers(prefill(*given, None, None, None, index(0, 1), states([0]), slot, **settings))
    yield numbers(update(*given, None, None, None, states([0]), slot, **settings))


assert list(by_each((ssd, ssd_prefill, ssd_update), (0, 10))) == [[10], [10], [10]]
assert refusal(list, by_each((ssd, ssd_prefill, ssd_update), (10, 0))) == (
    "UnsupportedError: dt_limit=(10, 0): a pair (least, largest) is needed (SSD-6)"
)

wrong = mutant("limit-ignored-in-update")
assert list(by_each((wrong["ssd"], wrong["ssd_prefill"], wrong["ssd_update"]), (0, 10))) == [[10], [10], [30]]

# %% [markdown]
# (SSD-7)=
# ## SSD-7  A step of 0 is no token
#
# :::{clause} SSD-7
# :level: MUST NOT
# :since: 0.1
# :source: https://github.com/state-spaces/mamba, ssd_chunk_state: rows past a chunk's end have a step of 0
# :applies: ssd, ssd_*
# :observable: value
# :::
#
# A token whose step is 0 after bias, softplus and limit MUST NOT change the state.
#
# Example. The state is `8`, `A` is -1024000; a token `5` with step 0 leaves and reads `8`.
#
# Not this. The decay sees a step of at least 0.001, a usual floor when parameters are drawn, and here just enough to
# forget everything: `0`. Fault: zero-step-still-decays.
#
# Why. Kernels fill up their tiles with steps of 0. If those decay, what a request remembers depends on how its length
# fits the tiles.

# %%
nothing = {"x": vectors(5), "dt": tokens(0), "A": -1024000, "start": states([8])}
assert run(ssd, **nothing) == ([8], [8])

wrong = mutant("zero-step-still-decays")["ssd"]
assert run(wrong, **nothing) == ([0], [0])
assert 0.001 * -1024000 == -1024

# %% [markdown]
# ## Driven by ids, by offsets, or neither
#
# Like the convolution, and unlike the delta rules, `ssd` takes ids or offsets, and the rules for both are the same
# (PACK-6 to PACK-9). Ids without -1 make a segment of the rows past the last offset (PACK-3); offsets leave them alone.

# %%
x, dt, one = vectors(1, 2, 3, 4), tokens(1, 1, 1, 1), np.ones((1, 4, 1, 1), np.float32)
assert numbers(ssd(x, dt, channels(0), one, one, seq_idx=ids(0, 0, 1, 1), dt_softplus=False)[0]) == [1, 3, 3, 7]
assert numbers(ssd(x, dt, channels(0), one, one, cu_seqlens=index(0, 2), dt_softplus=False)[0]) == [1, 3, 0, 0]

# %% [markdown]
# ## A worked decode beside Megatron-Core
#
# One head, two tokens on a slot that holds 1, 2, with every argument given: steps become `0.9130153, 0.6443967`, and
# outputs and last state are those of its update kernel up to the last digit of float32, in which it computes.

# %%
given = {"x": vectors(2, -1), "dt": tokens(0.3, -0.2), "A": channels(-1.5), "B": vectors([1, 0.5], [0.25, -1]),
         "C": vectors([2, -1], [1, 1]), "D": channels(0.25), "z": vectors(1, -2), "dt_bias": channels(0.1)}  # fmt: skip
pool = np.array([[[[1, 2]]]], np.float32)
y = ssd_update(**given, state_pool=pool, read_slots=index(0))
assert numbers(y) == [2.3679323, -0.37316993]
assert numbers(pool) == [0.6301814, 1.1850904]
steps = np.log1p(np.exp(np.array([0.3, -0.2]) + 0.1))
assert [round(step, 7) for step in steps] == [0.9130153, 0.6443967]

# %% [markdown]
# ## Names elsewhere
#
# | here | mamba_ssm | Megatron-Core |
# |---|---|---|
# | `ssd` | `mamba_chunk_scan_combined` | the training forward of the Mamba2 mixer |
# | `ssd_prefill` | the same with `cu_seqlens` or `seq_idx`, states gathered and scattered around it | `ssm_prefill` |
# | `ssd_update` | `selective_state_update`, slots in `state_batch_indices` | `ssm_decode` |
# | `A` | `A`, negative | `A_log`, of which `A` is minus the exponential |
# | `initial_state`, `[N, H, P, R]` | `initial_states` | the same shape |
# | `dt_softplus`, True where not given | False where not given | on |
# | `dt_limit`, in decode too | `dt_limit`, in the chunked scan alone | not in decode |
# | `D` `[H]` or `[H, P]` | `D` `[H]` or `[H, P]` | `[H]`, or one a channel |
