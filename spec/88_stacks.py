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
# # Stacks
#
# An engine allocates one kind of state for all recurrent layers of a stage, and makes one set of chunk tables a step.
# So it has to know what these layers share. A stack is a list of symbols, one a layer: `M` has its recurrent mixer as
# `layer.mixer`, `G` as `layer.self_attention`, any other symbol has none.

# %%
from types import SimpleNamespace as Layer

from statescan.conformance.mutants import mutant
from statescan.reference.host.stack import ssm_chunking
from statescan.spec.notation import refusal


def mamba(chunk_size=128, **more):
    return Layer(mixer=Layer(chunk_size=chunk_size, **more))


def gdn(chunk_size=64, **more):
    return Layer(self_attention=Layer(chunk_size=chunk_size, **more))

# %% [markdown]
# (STACK-1)=
# ## STACK-1  Three fields in order
#
# :::{clause} STACK-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, SSMChunking
# :applies: ssm_chunking
# :observable: value
# :::
#
# The chunking of a stack MUST be a tuple of the chunk length, the chunk length of prefill, and the number of
# Householder copies, 0 for mixers without.
#
# Example. A mixer that trains in chunks of 128, prefills in chunks of 64 and has 3 copies: `128, 64, 3`.
#
# Not this. The training length in both places: `128, 128, 3`. Fault: training-chunk-in-prefill.
#
# Why. Tables are made from the second field. Made from the first they describe chunks that no kernel runs.

# %%
gdp = mamba(128, ssm_inference_chunk_size=64, num_householder=3)
assert ssm_chunking(["M"], [gdp]) == (128, 64, 3)
assert ssm_chunking(["M"], [gdp])._fields == ("chunk_size", "inference_chunk_size", "num_householder")
assert ssm_chunking(["M"], [mamba()])[2] == 0

wrong = mutant("training-chunk-in-prefill")
assert wrong["ssm_chunking"](["M"], [gdp]) == (128, 128, 3)

# %% [markdown]
# (STACK-2)=
# ## STACK-2  None without recurrent layers
#
# :::{clause} STACK-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_chunking
# :applies: ssm_chunking
# :observable: value
# :::
#
# The chunking of a stack MUST be None where no layer has a recurrent mixer, a layer whose mixer is missing or None
# being passed over.
#
# Example. Attention, MLP, and an `M` whose mixer is None: `None`.
#
# Not this. Default lengths: `128, 128, 0`. Fault: no-layer-means-default-chunks.
#
# Why. A pipeline stage of attention layers has no states. Default lengths would allocate pools for it.

# %%
assert ssm_chunking(["*", "-", "M"], [Layer(), Layer(), Layer(mixer=None)]) is None

wrong = mutant("no-layer-means-default-chunks")
assert wrong["ssm_chunking"](["*", "-"], [Layer(), Layer()]) == (128, 128, 0)

# %% [markdown]
# (STACK-3)=
# ## STACK-3  A mixed stack is refused
#
# :::{clause} STACK-3
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_chunking, homogeneous
# :applies: ssm_chunking
# :observable: error
# :::
#
# A stack whose recurrent layers differ in chunking or in kind MUST be refused with a HeterogeneousStackError that names
# the first layer and the first that differs.
#
# Example. Chunks of 128, 128 and 64 -> `layer 0 has M (128, 128, 0) but layer 2 has M (64, 64, 0) (STACK-3)`.
#
# Not this. The first layer speaks for all: `128, 128, 0`. Fault: first-layer-speaks-for-all.
#
# Why. Per-mixer tables and pools of several shapes do not exist. Two kinds with equal lengths differ too: their states
# have other shapes.

# %%
assert refusal(ssm_chunking, ["M", "M", "M"], [mamba(), mamba(), mamba(64)]) == (
    "HeterogeneousStackError: every SSM layer must share one chunking; "
    "layer 0 has M (128, 128, 0) but layer 2 has M (64, 64, 0) (STACK-3)"
)
assert "layer 1 has G (64, 64, 0)" in refusal(ssm_chunking, ["M", "G"], [mamba(64), gdn()])

wrong = mutant("first-layer-speaks-for-all")
assert wrong["ssm_chunking"](["M", "M", "M"], [mamba(), mamba(), mamba(64)]) == (128, 128, 0)

# %% [markdown]
# (STACK-4)=
# ## STACK-4  Symbols match layers by position
#
# :::{clause} STACK-4
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_chunking, layer_type_list
# :applies: ssm_chunking
# :observable: error
# :::
#
# Symbols and layers MUST match by position, and lists of unequal length be refused with a ShapeError.
#
# Example. Two symbols and one layer -> `layer_type_list has 2 symbols and layers 1: one for each (STACK-4)`.
#
# Not this. Cut to the shorter list: `128, 128, 0`. Fault: longer-list-cut.
#
# Why. A list that is one too long is a mistake of a stage's bounds. Cut, the layers behind it are never looked at.

# %%
assert refusal(ssm_chunking, ["M", "M"], [mamba()]) == (
    "ShapeError: layer_type_list has 2 symbols and layers 1: one for each (STACK-4)"
)

wrong = mutant("longer-list-cut")
assert wrong["ssm_chunking"](["M", "M"], [mamba()]) == (128, 128, 0)

# %% [markdown]
# (STACK-5)=
# ## STACK-5  Fall-backs
#
# :::{clause} STACK-5
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_chunking
# :applies: ssm_chunking
# :observable: value
# :::
#
# A mixer that states no chunk length of prefill MUST have its only one there, one whose copies are missing or None has
# 0, and one without a chunk length is refused.
#
# Example. A mixer with chunks of 64 and nothing else: `64, 64, 0`.
#
# Not this. No copies read as one: `64, 64, 1`. Fault: no-copies-read-as-one.
#
# Why. Older mixers state one length. A copy that is not there would make an engine build tables of an expanded stream.

# %%
assert ssm_chunking(["G"], [gdn(num_householder=None)]) == (64, 64, 0)
silent = Layer(mixer=Layer(ssm_inference_chunk_size=64))
assert refusal(ssm_chunking, ["M"], [silent]) == (
    "UnsupportedError: layers[0] has a recurrent mixer without chunk_size (STACK-5)"
)

wrong = mutant("no-copies-read-as-one")
assert wrong["ssm_chunking"](["G"], [gdn(num_householder=None)]) == (64, 64, 1)
