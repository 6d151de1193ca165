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
# # One step of a layer
#
# In serving a layer sees one **step** after another. A step has decode rows, a few tokens of requests that generate,
# and prefill rows, pieces of prompts; behind them stands padding. Kernels do one or the other, so a step is split, run
# and merged. That is the same for every mixer and stands in one place, the **mixin** `SSMDynamicInferenceMixin`. A
# mixer brings two **hooks**, `ssm_decode` and `ssm_prefill`, and two projections.
#
# | rows | are | go to |
# |---|---|---|
# | first `J` rows of each decode request | base token and drafts | `ssm_decode`, `[n, J, d_proj]` |
# | rows behind the **real** decode tokens | pieces of prompts, one behind the other | `ssm_prefill`, `[t, 1, d_proj]` |
# | the rest | padding | nobody; outputs 0 |
#
# The figure has two decode requests, one of them padding, and a piece of three tokens. The padded decode partition
# reaches over a row of the prompt; that is harmless, because the row belongs to a request of slot -1, and the merge
# takes prefill's answer for it.

# %%
from types import SimpleNamespace

import torch

from statescan.conformance.mutants import mutant
from statescan.reference.host.stack import layer_map
from statescan.reference.host.tables import edit_tables
from statescan.reference.inference import SSMDynamicInferenceMixin
from statescan.spec.notation import numbers, refusal
from statescan.spec.serving_figures import split_and_merge
from statescan.spec.steps import Toy, step, toy_context

split_and_merge(["d", "p0", "p1", "p2", "", ""], decode_rows=2, real_decode=1, prefill_rows=3)

# %% [markdown]
# The examples run a toy: its decode hook gives 10 times a row, its prefill hook 100 times, and both leave NaN in
# padding rows. It logs what is called.

# %%
toy = Toy()
assert step([1, 2, 3, 4, 5, 6], toy=toy, decode=[2, -1], lengths=[3], slots=[0]) == [10, 200, 300, 400, 0, 0]
assert toy.log == ["in_proj 6", "decode 2x1x1", "prefill", "out_proj 6"]

# %% [markdown]
# (STEP-1)=
# ## STEP-1  All rows are projected once
#
# :::{clause} STEP-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, step 2
# :applies: ssm_dynamic_inference
# :observable: value
# :::
#
# All padded rows of a step MUST pass the input projection in one call.
#
# Example. Six rows: the log begins with `in_proj 6`.
#
# Not this. A call for each partition: `in_proj 2` and `in_proj 4`. Fault: rows-projected-by-partition.
#
# Why. One product of all rows is what a GPU wants, and under quantisation two calls have two scales, so that a row
# would depend on its partition.

# %%
toy = Toy()
step([1, 2, 3, 4, 5, 6], toy=toy, decode=[2, -1], lengths=[3], slots=[0])
assert toy.log[0] == "in_proj 6"

toy, wrong = Toy(), mutant("rows-projected-by-partition")
step([1, 2, 3, 4, 5, 6], by=wrong, toy=toy, decode=[2, -1], lengths=[3], slots=[0])
assert toy.log[:2] == ["in_proj 2", "in_proj 4"]

# %% [markdown]
# (STEP-2)=
# ## STEP-2  Decode rows first
#
# :::{clause} STEP-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, step 3
# :applies: ssm_dynamic_inference
# :observable: value
# :::
#
# The rows of a step MUST be the `J` tokens of each decode request in order, then the prefill pieces, then padding.
#
# Example. Two decode requests of `J = 2` and pieces of 1 and 2 tokens, rows `1, 2, 3, 4, 5, 6, 7, 8` -> `10, 20, 30,
# 40, 500, 600, 700, 0`.
#
# Not this. Decode takes the last rows: `50, 60, 70, 80, 500, 600, 700, 0`. Fault: prefill-rows-first.
#
# Why. Engine and layer must agree on it without a word: there is no index array that says which row is whose.

# %%
given = {"decode": [1, 2], "lengths": [1, 2], "slots": [0, 3], "tokens": 2}
assert toy_context(8, **given).num_speculative_tokens + 1 == given["tokens"]
J = 2
assert step([1, 2, 3, 4, 5, 6, 7, 8], **given) == [10, 20, 30, 40, 500, 600, 700, 0]

wrong = mutant("prefill-rows-first")
assert step([1, 2, 3, 4, 5, 6, 7, 8], by=wrong, **given) == [50, 60, 70, 80, 500, 600, 700, 0]

# %% [markdown]
# (STEP-3)=
# ## STEP-3  Each hook at most once
#
# :::{clause} STEP-3
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, steps 3 and 4
# :applies: ssm_dynamic_inference
# :observable: value
# :::
#
# A step MUST call each hook at most once, with all requests of its partition, and not at all where the padded partition
# is empty.
#
# Example. Two pieces: the log is `in_proj 4`, `prefill`, `out_proj 4`.
#
# Not this. A call for each request: `in_proj 4`, `prefill`, `prefill`, `out_proj 4`. Fault: prefill-called-per-request.
#
# Why. A step then costs as many launches as it has requests, and cannot be captured: the number of calls would be in
# the graph.

# %%
toy = Toy()
step([1, 2, 3, 4], toy=toy, lengths=[1, 2], slots=[0, 3])
assert toy.log == ["in_proj 4", "prefill", "out_proj 4"]

toy, wrong = Toy(), mutant("prefill-called-per-request")
step([1, 2, 3, 4], by=wrong, toy=toy, lengths=[1, 2], slots=[0, 3])
assert toy.log == ["in_proj 4", "prefill", "prefill", "out_proj 4"]

# %% [markdown]
# (STEP-4)=
# ## STEP-4  Merged at the real count
#
# :::{clause} STEP-4
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, step 5
# :applies: ssm_dynamic_inference
# :observable: value
# :::
#
# Prefill outputs MUST stand behind the real decode tokens, not behind the padded ones.
#
# Example. One real decode request of two padded ones and a piece of three tokens, rows `1, 2, 3, 4, 5, 6` -> `10, 200,
# 300, 400, 0, 0`.
#
# Not this. Merged at 2: the second row is the padding of decode, `10, nan, 300, 400, 0, 0`. Fault:
# merged-at-the-padded-count.
#
# Why. Padding has no place among the rows: the engine packs real tokens without gaps. At the padded count the first
# prompt loses its first token.

# %%
given = {"decode": [2, -1], "lengths": [3], "slots": [0]}
assert step([1, 2, 3, 4, 5, 6], **given) == [10, 200, 300, 400, 0, 0]

wrong = mutant("merged-at-the-padded-count")
assert len(given["decode"]) == 2
assert step([1, 2, 3, 4, 5, 6], by=wrong, **given) == [10, "nan", 300, 400, 0, 0]

# %% [markdown]
# (STEP-5)=
# ## STEP-5  The last projection's pair is returned
#
# :::{clause} STEP-5
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, step 6
# :applies: ssm_dynamic_inference
# :observable: value
# :::
#
# A step MUST return what the output projection gives for the merged rows, the rows and its bias or None, and add
# nothing to either.
#
# Example. The toy's projection hands on a bias of 7: the step returns `10, 20` and, apart, `7`.
#
# Not this. The bias is added: `17, 27`, and None. Fault: bias-added-to-the-output.
#
# Why. Whoever fuses the bias with the residual adds it once, and needs to get it. A projection that returns rows alone
# has the bias None.

# %%
hidden, context = torch.tensor([[[1.0]], [[2.0]]]), toy_context(2, decode=[0, 1])
out, bias = Toy(bias=7).ssm_dynamic_inference(hidden, context)
assert (numbers(out.numpy()), numbers(bias.numpy())) == ([10, 20], [7])

wrong = mutant("bias-added-to-the-output")
out, bias = wrong["ssm_dynamic_inference"](Toy(bias=7), hidden, context)
assert (numbers(out.numpy()), bias) == ([17, 27], None)

# %% [markdown]
# (STEP-6)=
# ## STEP-6  Two hooks make a mixer
#
# :::{clause} STEP-6
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, SSMDynamicInferenceMixin
# :applies: ssm_dynamic_inference
# :observable: value, error
# :::
#
# A class with the two hooks, two projections and a layer number MUST serve; a hook that it lacks raises
# NotImplementedError when it is called.
#
# Example. The toy is such a class. Without its decode hook -> `ssm_decode is the mixer's own (STEP-6)`.
#
# Not this. A missing hook counts as zeros: `0, 0`. Fault: missing-hook-gives-zeros.
#
# Why. New mixers are written by people who read two signatures. What they have not written yet must say so.

# %%
class Half(Toy):
    ssm_decode = SSMDynamicInferenceMixin.ssm_decode


def said(by):
    try:
        return step([1, 2], by=by, toy=Half(), decode=[0, 1])
    except NotImplementedError as error:
        return str(error)


assert step([1, 2], decode=[0, 1]) == [10, 20]
assert said(None) == "ssm_decode is the mixer's own (STEP-6)"

wrong = mutant("missing-hook-gives-zeros")
assert said(wrong) == [0, 0]

# %% [markdown]
# (STEP-7)=
# ## STEP-7  Decode has arguments, prefill has the context
#
# :::{clause} STEP-7
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, both hooks
# :applies: ssm_dynamic_inference
# :observable: value
# :::
#
# `ssm_decode` MUST get all that it needs as arguments, while `ssm_prefill` gets the engine's own context and reads it.
#
# Example. The context that the toy's prefill hook sees is the one that the step was given: `True`.
#
# Not this. A copy, or a list of what the mixin thinks is needed: `False`. Fault: hooks-get-a-copied-context.
#
# Why. A mixer of tomorrow reads a field that today's mixin does not know. The public text lets both hooks have the
# context, and its signature for decode has none: the signature counts.

# %%
toy, context = Toy(), toy_context(4, lengths=[2], slots=[1])
step([1, 2, 3, 4], toy=toy, context=context)
assert (toy.seen is context) == True  # noqa: E712  the word of the example

toy, wrong = Toy(), mutant("hooks-get-a-copied-context")
step([1, 2, 3, 4], by=wrong, toy=toy, context=context)
assert (toy.seen is context) == False  # noqa: E712

# %% [markdown]
# (STEP-8)=
# ## STEP-8  The mixin knows no cache
#
# :::{clause} STEP-8
# :level: MUST NOT
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, chunked prefill and prefix caching
# :applies: ssm_dynamic_inference
# :observable: value
# :::
#
# The mixin MUST NOT read an attribute of a prefix cache: a context without any of them serves.
#
# Example. A context without `mamba_slot_allocator`: rows `1, 2, 3` -> `10, 200, 300`.
#
# Not this. The mixin looks at it: `AttributeError`. Fault: mixin-wants-an-allocator.
#
# Why. Pieces and cached prefixes are the prefill hook's business. An engine without a cache has nothing to show.

# %%
context = toy_context(3, decode=[3], lengths=[2], slots=[1])
bare = SimpleNamespace(**{name: value for name, value in vars(context).items() if name != "mamba_slot_allocator"})
bare.mamba_states_cache = context.mamba_states_cache
assert step([1, 2, 3], context=bare) == [10, 200, 300]

wrong = mutant("mixin-wants-an-allocator")
try:
    found = step([1, 2, 3], by=wrong, context=bare)
except AttributeError as error:
    found = type(error).__name__
assert found == "AttributeError"

# %% [markdown]
# (STEP-10)=
# ## STEP-10  The shapes of both hooks
#
# :::{clause} STEP-10
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, both hooks, returns
# :applies: ssm_dynamic_inference
# :observable: value, shape
# :::
#
# The decode hook MUST be given `[n, J, d_proj]` and give `[n, J, d_inner]`, and the prefill hook be given `[t, 1,
# d_proj]` and give `[t, 1, d_inner]`.
#
# Example. Two requests of two tokens, one number a row: the log has `decode 2x2x1`.
#
# Not this. Drafts as requests of their own: `decode 4x1x1`. Fault: decode-rows-flattened.
#
# Why. The tokens of a request depend on each other: flattened, a draft starts from the state before the base token.

# %%
toy = Toy()
step([1, 2, 3, 4], toy=toy, decode=[1, 2], tokens=2)
assert toy.log[1] == "decode 2x2x1"

toy, wrong = Toy(), mutant("decode-rows-flattened")
step([1, 2, 3, 4], by=wrong, toy=toy, decode=[1, 2], tokens=2)
assert toy.log[1] == "decode 4x1x1"

# %% [markdown]
# (STEP-11)=
# ## STEP-11  Nothing to run is an error, padding alone is not
#
# :::{clause} STEP-11
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference
# :applies: ssm_dynamic_inference
# :observable: value, error
# :::
#
# A step whose padded partitions are both empty MUST be refused with an EmptyBatchError, while one of padding requests
# alone runs and changes nothing.
#
# Example. No request -> `Dynamic inference called with 0 decode and 0 prefill requests (STEP-11)`; one padding request
# in each partition -> `0, 0, 0`.
#
# Not this. No request gives zeros: `0, 0, 0`. Fault: empty-batch-gives-zeros.
#
# Why. An engine that has lost its batch must not go on. A graph, though, is captured on padding, so that must run.

# %%
assert refusal(step, [1, 2, 3]) == (
    "EmptyBatchError: Dynamic inference called with 0 decode and 0 prefill requests (STEP-11)"
)
assert step([1, 2, 3], decode=[-1], lengths=[0], slots=[-1]) == [0, 0, 0]

wrong = mutant("empty-batch-gives-zeros")
assert step([1, 2, 3], by=wrong) == [0, 0, 0]

# %% [markdown]
# (PAD-2)=
# ## PAD-2  Padding enters the last projection as zeros
#
# :::{clause} PAD-2
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: ssm_dynamic_inference
# :observable: value
# :::
#
# Rows of padding MUST be set to 0 behind the hooks and before the output projection, whatever the hooks left in them.
#
# Example. The toy leaves `nan` in padding: one real row and two of padding, rows `1, 2, 3` -> `10, 0, 0`.
#
# Not this. Multiplied by 0: `10, nan, nan`. Fault: padding-multiplied-by-zero.
#
# Why. A norm of zeros beside a gate of NaN is NaN, and a quantised projection takes its scale over all rows.

# %%
assert step([1, 2, 3], decode=[0, -1, -1]) == [10, 0, 0]

wrong = mutant("padding-multiplied-by-zero")
assert step([1, 2, 3], by=wrong, decode=[0, -1, -1]) == [10, "nan", "nan"]

# %% [markdown]
# (LAYER-1)=
# ## LAYER-1  Each layer has its own slab
#
# :::{clause} LAYER-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, step 1
# :applies: ssm_dynamic_inference
# :observable: value, untouched
# :::
#
# A layer MUST read and write its own pair of pools and no other's.
#
# Example. Two layers of the toy that adds 1 to the slot of every piece, one after the other on slot 2: each layer's
# slot 2 holds `1`.
#
# Not this. Both use the first layer's pools: `2` and `0`. Fault: first-layers-slab.
#
# Why. The same slot number in two layers is two places. One slab for all feeds the state of one layer to the next.

# %%
def after_two_layers(by):
    context = toy_context(2, lengths=[2], slots=[2])
    context.pools, context.layer_map = [*context.pools, *toy_context(2).pools], [0, 1]
    for number in (1, 2):
        toy = Toy()
        toy.layer_number = number
        step([1, 2], by=by, toy=toy, context=context)
    return [pools[1][2].item() for pools in context.pools]


assert after_two_layers(None) == [1, 1]

wrong = mutant("first-layers-slab")
assert after_two_layers(wrong) == [2, 0]

# %% [markdown]
# (LAYER-2)=
# ## LAYER-2  Slabs are counted over recurrent layers
#
# :::{clause} LAYER-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_dynamic_inference, step 1; ssm_chunking
# :applies: layer_map
# :observable: value
# :::
#
# The slab of a layer MUST be the number of recurrent layers before it on its pipeline stage.
#
# Example. Layers `*`, `M`, `-`, `M`: the slabs are `None, 0, None, 1`.
#
# Not this. Positions in the list: `None, 1, None, 3`. Fault: slab-counts-every-layer.
#
# Why. Pools have as many slabs as there are recurrent layers. A mixer's `layer_number` counts all layers of the stage
# from 1, so somebody has to translate.

# %%
assert layer_map(["*", "M", "-", "M"]) == [None, 0, None, 1]

wrong = mutant("slab-counts-every-layer")
assert wrong["layer_map"](["*", "M", "-", "M"]) == [None, 1, None, 3]

# %% [markdown]
# (LAYER-3)=
# ## LAYER-3  The tables of all groups of layers change together
#
# :::{clause} LAYER-3
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: edit_tables
# :observable: value, error
# :::
#
# An edit of the rows of a batch MUST be made in the index tables of all groups of layers, so that a row is the same
# request in each of them.
#
# Example. Three requests, slots `2, 0, 1` in the recurrent layers and blocks `5, 6, 7` in attention. The first ends and
# the last moves up: slots `1, 0` and blocks `7, 6`.
#
# Not this. The rows of the first group alone are moved: slots `1, 0` and blocks `5, 6`. Fault:
# rows-moved-in-the-first-group-only.
#
# Why. A shortcut that refreshes the states' indices and keeps the others looks right until rows move; in a captured
# graph the old ones are read for ever. The first request then continues from one prompt's state and another's keys.

# %%
tables, ends = {"recurrent": [2, 0, 1], "attention": [5, 6, 7]}, [("drop", 0)]
assert edit_tables(tables, ends) == {"recurrent": [1, 0], "attention": [7, 6]}
assert refusal(edit_tables, tables, [("add", {"recurrent": 3})]) == (
    "ShapeError: a new row and group 'attention': an entry for every group, and no other (LAYER-3)"
)

wrong = mutant("rows-moved-in-the-first-group-only")
assert wrong["edit_tables"](tables, ends) == {"recurrent": [1, 0], "attention": [5, 6]}
