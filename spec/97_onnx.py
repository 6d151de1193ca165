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
# # ONNX and FlashInfer-Bench
#
# Opset 27 of ONNX has two operators of this family:
# [LinearAttention](https://onnx.ai/onnx/operators/onnx__LinearAttention.html) and
# [CausalConvWithState](https://onnx.ai/onnx/operators/onnx__CausalConvWithState.html). Both ways were tried with the
# onnx package: its evaluator on the exact vectors, and the reference on its node tests. Where the operators have the
# words, the numbers are the same.
#
# | here | there |
# |---|---|
# | [GDN](50_delta.py), decay by head | `update_rule="gated_delta"`, decay `[batch, T, HV]` |
# | KDA, decay by channel | the same, decay `[batch, T, HV*K]` |
# | GDP with M copies | the same over T*M tokens ([crosswalk](96_crosswalk.py)) |
# | [Mamba2](55_ssd.py), its step discretised | `update_rule="gated"`: q = C, k = B, v = dt x, decay dt A |
# | [convolution](20_conv.py), W columns | W - 1 columns: column 0 here is read by no token |
#
# What they cannot say, and what stands for it:
#
# | here | there |
# |---|---|
# | segments of a pack, ids, rows past the last offset (PACK) | a call for each segment |
# | slots, fresh and padding rows, split slots (SLOT, PAD) | gather and scatter around the call |
# | entries for drafts, snapshots, accepted drafts (SPEC, SNAP) | a call for each token or piece |
# | value heads that share key heads (GDN-5) | key heads are repeated: there, query heads share states |
# | a state in a type of its own, rounded once (NUM-2) | without an entering state it has the type of the query |
# | norms and gates inside the call (GATE, NORM) | other operators before it |
# | a scale of 0 | means the default |
# | gradients (GRAD), refusals (ERR), same bits (DET) | not spoken of |
#
# The node tests of the package use query heads that share a state, rules without a correction, and convolution widths
# 1 and 5; these have no operation here.

# %%
import importlib.util

import numpy as np

from statescan.reference.delta import gated_delta_rule
from statescan.spec.notation import Markdown, numbers, one_hot, states, tokens, vectors

INSTALLED = importlib.util.find_spec("onnx") is not None

# %% [markdown]
# ## One call, both ways
#
# Two drawers hold 8 and 16. The token writes half of the difference to 4 in drawer 0, after a decay that forgets
# nothing: 6 is left, and read.

# %%
k, v, g, beta, entering = one_hot(0), vectors(4), tokens(0), tokens(0.5), states([8, 16])
o, state = gated_delta_rule(k, k, v, g, beta, initial_state=entering, scale=1, output_final_state=True)
assert (numbers(o), numbers(state)) == ([6], [6, 16])


def run_onnx():
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    flat = {"query": k, "key": k, "value": v, "past_state": entering, "decay": g, "beta": beta}
    given = {n: x if n == "past_state" else x.reshape(1, 1, -1) for n, x in flat.items()}
    node = helper.make_node("LinearAttention", list(given), ["o", "state"], q_num_heads=1, kv_num_heads=1, scale=1.0)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in given.items()]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("o", "state")]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])
    return ReferenceEvaluator(model).run(None, {n: x.astype(np.float32) for n, x in given.items()})


if INSTALLED:
    assert [numbers(x) for x in run_onnx()] == [[6], [6, 16]]
Markdown("The onnx package gives the same." if INSTALLED else "The onnx package is not installed here: not tried.")

# %% [markdown]
# ## Export
#
# ```text
# python -m statescan.conformance.export_onnx FOLDER
# python -m statescan.conformance.export_flashinfer_bench FOLDER
# ```
#
# The first writes every exact vector that the two operators can express as node tests of the onnx package's own form, a
# test for each segment, each model checked by that package, and says what it leaves out and why. The second writes
# definitions and workloads of [FlashInfer-Bench](https://bench.flashinfer.ai/docs): four definitions with references in
# plain PyTorch, and a workload for each segment. That format holds no expected numbers and compares within a tolerance;
# the tests here run every reference on every workload and compare exactly.
