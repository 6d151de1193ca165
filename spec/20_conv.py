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
# # The short convolution
#
# Every mixer sends its inputs through a causal convolution over the last `W` tokens, one filter per channel, before the
# recurrence. Its memory is a **window**: the last `W` raw inputs, newest in the last column. One token shifts the
# window by one column and is stored in the last; the output is the weighted sum of the columns.
#
# $$ y_t = \mathrm{act}\Big(b + \sum_{j=0}^{W-1} w_j \, x_{t-(W-1)+j}\Big) $$
#
# Below, the window 5, 6, 7, 8 enters and a piece of three tokens follows. Column 0, the 5, is read by no output: it
# leaves with the first token. It only matters where a piece is so short that old columns stay (CONV-5).

# %%
from statescan.conformance.mutants import mutant
from statescan.reference.conv import causal_conv1d, causal_conv1d_grad, causal_conv1d_prefill, causal_conv1d_update
from statescan.spec.figures import conv_window
from statescan.spec.notation import NAN, channels, entries, index, numbers, refusal, taps, tokens, windows

DIGITS = taps(1000, 100, 10, 1)
conv_window([5, 6, 7, 8], [1, 2, 3], [1000, 100, 10, 1])

# %% [markdown]
# One definition serves three operations: `causal_conv1d` for training, over a whole pack; `causal_conv1d_prefill` and
# `causal_conv1d_update` for serving, with windows in a pool of slots.

# %% [markdown]
# (CONV-1)=
# ## CONV-1  The last tap meets the current token
#
# :::{clause} CONV-1
# :level: MUST
# :since: 0.1
# :source: https://github.com/Dao-AILab/causal-conv1d, reference implementation
# :applies: causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
# :observable: value
# :::
#
# Tap `j` of a weight of width `W` MUST multiply the input that lies `W - 1 - j` tokens back, per channel.
#
# Example. Weight `1000, 100, 10, 1`, tokens `1, 2, 3, 4` -> `1, 12, 123, 1234`.
#
# Not this. The taps in reverse: `1000, 2100, 3210, 4321`. Fault: taps-reversed.
#
# Why. Mathematics writes a convolution with the filter reversed, and deep-learning libraries do not. Both are in use,
# and symmetric test weights hide the difference.

# %%
x, weight = tokens(1, 2, 3, 4), taps(1000, 100, 10, 1)
assert numbers(causal_conv1d(x, weight)[0]) == [1, 12, 123, 1234]

wrong = mutant("taps-reversed")
assert numbers(wrong["causal_conv1d"](x, weight)[0]) == [1000, 2100, 3210, 4321]

# %% [markdown]
# (CONV-2)=
# ## CONV-2  Bias, then activation
#
# :::{clause} CONV-2
# :level: MUST
# :since: 0.1
# :source: https://github.com/Dao-AILab/causal-conv1d, reference implementation
# :applies: causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
# :observable: value, error
# :::
#
# The output MUST be the sum with the bias added, passed through `x * sigmoid(x)` where `activation` is `"silu"` or
# `"swish"` and through nothing where it is None; another word is refused.
#
# Example. Weight `0, 1`, bias `1024`, tokens `1024, -2048`: the sums are `2048, -1024`; both words give `2048, 0`,
# since sigmoid is 1 and 0 that far out. Without bias, token `1` gives 1 / (1 + 1/e) = `0.7310586`.
#
# Not this. `"swish"` is not recognised and the sums come back: `2048, -1024`. Fault: swish-taken-as-linear.
#
# Why. The two words name one function, and different libraries write different ones. Bias after the activation would
# give `2048, 1024` here.

# %%
x, weight, bias = tokens(1024, -2048), taps(0, 1), channels(1024)
assert numbers(causal_conv1d(x, weight, bias)[0]) == [2048, -1024]
assert numbers(causal_conv1d(x, weight)[0] + bias) == [2048, -1024]
for word in ("silu", "swish"):
    assert numbers(causal_conv1d(x, weight, bias, activation=word)[0]) == [2048, 0]
    assert numbers(causal_conv1d(x, weight, activation=word)[0] + bias) == [2048, 1024]
assert numbers(causal_conv1d(tokens(1), weight, activation="silu")[0]) == [0.7310586]
assert "CONV-2" in refusal(causal_conv1d, x, weight, bias, activation="gelu")

wrong = mutant("swish-taken-as-linear")
assert numbers(wrong["causal_conv1d"](x, weight, bias, activation="swish")[0]) == [2048, -1024]

# %% [markdown]
# (CONV-3)=
# ## CONV-3  Every tap stops at the boundary
#
# :::{clause} CONV-3
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, check_fla_sequence_packing_support
# :applies: causal_conv1d, causal_conv1d_prefill
# :observable: value
# :::
#
# A tap that reaches back past its segment's first token MUST read the entering window, and 0 where none is given.
#
# Example. Tokens `1, 2, 3, 4, 5, 6`, offsets `[0, 3, 6]` -> `1, 12, 123, 4, 45, 456`.
#
# Not this. Only the nearest tap knows of the boundary, and the others read across it: `1, 12, 123, 4, 2345, 3456`.
# Fault: boundary-seen-by-nearest-tap-only.
#
# Why. Taps read tokens at different distances, so each needs its own comparison. With the first token of a segment
# alone in the test, one comparison looks like enough.

# %%
x, offsets = tokens(1, 2, 3, 4, 5, 6), index(0, 3, 6)
assert numbers(causal_conv1d(x, DIGITS, cu_seqlens=offsets)[0]) == [1, 12, 123, 4, 45, 456]

wrong = mutant("boundary-seen-by-nearest-tap-only")
assert numbers(wrong["causal_conv1d"](x, DIGITS, cu_seqlens=offsets)[0]) == [1, 12, 123, 4, 2345, 3456]

# %% [markdown]
# (CONV-4)=
# ## CONV-4  The entering window stands before the first token
#
# :::{clause} CONV-4
# :level: MUST
# :since: 0.1
# :source: decision; kernels differ in whether they take W or W - 1 columns
# :applies: causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
# :observable: value
# :::
#
# The first token of a segment MUST read columns 1 to W - 1 of its entering window as the tokens before it, newest last.
#
# Example. Entering window `5, 6, 7, 8`, token `1` -> `6781`; column 0 may be NaN and nothing changes.
#
# Not this. Every tap before the last reads one column too old: `5671`. Fault: entering-window-shifted.
#
# Why. A window has `W` columns and an output reads `W - 1` of them. Libraries that keep `W - 1` columns and libraries
# that keep `W` meet here, one column apart.

# %%
assert numbers(causal_conv1d(tokens(1), DIGITS, initial_windows=windows([5, 6, 7, 8]))[0]) == [6781]
assert numbers(causal_conv1d(tokens(1), DIGITS, initial_windows=windows([NAN, 6, 7, 8]))[0]) == [6781]

wrong = mutant("entering-window-shifted")
assert numbers(wrong["causal_conv1d"](tokens(1), DIGITS, initial_windows=windows([5, 6, 7, 8]))[0]) == [5671]

# %% [markdown]
# (CONV-5)=
# ## CONV-5  A short piece keeps old columns
#
# :::{clause} CONV-5
# :level: MUST
# :since: 0.1
# :source: https://github.com/NVIDIA/Megatron-LM/pull/6711
# :applies: causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
# :observable: value
# :::
#
# The final window MUST hold the last `W` of the raw inputs, the entering window's columns counted before the segment's
# tokens.
#
# Example. Entering `1, 2, 3, 4`: tokens `101, 102` leave `3, 4, 101, 102`; no token leaves `1, 2, 3, 4`; five tokens
# leave their last four, `102, 103, 104, 105`.
#
# Not this. A window made of the piece alone: `0, 0, 101, 102`. Fault: short-piece-loses-old-columns.
#
# Why. The last piece of a prompt is often one token long. The window is what the next call reads, so the loss shows
# there and not here.

# %%
entering = windows([1, 2, 3, 4])
for piece, left in [
    (tokens(101, 102), [3, 4, 101, 102]),
    (tokens(), [1, 2, 3, 4]),
    (tokens(101, 102, 103, 104, 105), [102, 103, 104, 105]),
]:
    assert numbers(causal_conv1d(piece, DIGITS, initial_windows=entering)[1]) == left
raw = causal_conv1d(tokens(108), taps(2, 2, 2, 2), initial_windows=windows([13, 14, 15, 16]), activation="silu")[1]
assert numbers(raw) == [14, 15, 16, 108]

wrong = mutant("short-piece-loses-old-columns")
assert numbers(wrong["causal_conv1d"](tokens(101, 102), DIGITS, initial_windows=entering)[1]) == [0, 0, 101, 102]

# %% [markdown]
# (CONV-6)=
# ## CONV-6  Update is prefill, token by token
#
# :::{clause} CONV-6
# :level: MUST
# :since: 0.1
# :source: ssm_inference, step 3 of the module description
# :applies: causal_conv1d_update
# :observable: value, relation
# :::
#
# An update of `J` tokens MUST give the outputs and leave the windows that a prefill of the same tokens gives and
# leaves.
#
# Example. Window `5, 6, 7, 8`, weight `1, 10, 100, 1000`, bias `0.5`, tokens `1, 2, 3` -> `1876.5, 2187.5, 3218.5`, and
# the window is then `8, 1, 2, 3`.
#
# Not this. Every token reads the window the call began with: `1876.5, 2876.5, 3876.5`. Fault: update-drops-shift.
#
# Why. A prompt is prefilled and its answer is decoded. Where the two differ, the model's answer depends on how the
# engine happened to cut the text.

# %%
weight, bias, offsets, slots = taps(1, 10, 100, 1000), channels(0.5), index(0, 3), index(0)
for operation, where in [(causal_conv1d_update, ()), (causal_conv1d_prefill, (offsets,))]:
    pool = windows([5, 6, 7, 8])
    y = operation(tokens(1, 2, 3), weight, bias, *where, pool, slots)
    assert numbers(y) == [1876.5, 2187.5, 3218.5]
    assert numbers(pool) == [8, 1, 2, 3]

pool, wrong = windows([5, 6, 7, 8]), mutant("update-drops-shift")
assert numbers(wrong["causal_conv1d_update"](tokens(1, 2, 3), weight, bias, pool, slots)) == [1876.5, 2876.5, 3876.5]

# %% [markdown]
# (CONV-7)=
# ## CONV-7  Read first, then write
#
# :::{clause} CONV-7
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill
# :applies: causal_conv1d_prefill, causal_conv1d_update
# :observable: value, untouched
# :::
#
# Every window MUST be read before any slot is written, and no slot but the write slots is written.
#
# Example. Slot 0 holds `5, 6, 7, 8`; a row reads and writes it with tokens `1, 2` -> `6781, 7812`, and the slot then
# holds `7, 8, 1, 2`.
#
# Not this. The final window is stored first, and the outputs read it as the entering one: `8121, 1212`. Fault:
# pool-written-before-read.
#
# Why. A kernel that runs tokens in parallel has the final window at hand before the first output is done.

# %%
pool = windows([5, 6, 7, 8])
assert numbers(causal_conv1d_prefill(tokens(1, 2), DIGITS, None, index(0, 2), pool, index(0))) == [6781, 7812]
assert numbers(pool) == [7, 8, 1, 2]

pool, wrong = windows([5, 6, 7, 8]), mutant("pool-written-before-read")
assert numbers(wrong["causal_conv1d_prefill"](tokens(1, 2), DIGITS, None, index(0, 2), pool, index(0))) == [8121, 1212]

# %% [markdown]
# (CONV-8)=
# ## CONV-8  Intermediate windows
#
# :::{clause} CONV-8
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, intermediate_conv_state
# :applies: causal_conv1d_update when given intermediate_windows
# :observable: value
# :::
#
# Entry `j` of a slot's intermediates MUST be the whole window after token `j` of the call.
#
# Example. Window `5, 6, 7, 8`, tokens `1, 2, 3` -> entries `6, 7, 8, 1`, `7, 8, 1, 2` and `8, 1, 2, 3`.
#
# Not this. Each entry is the window before its token: `5, 6, 7, 8`, `6, 7, 8, 1` and `7, 8, 1, 2`. Fault:
# intermediates-one-late.
#
# Why. After a rejected draft the engine resumes from an entry. One token off, it repeats or loses a token, and text
# goes on fluently.

# %%
pool, kept = windows([5, 6, 7, 8]), entries([[0] * 4] * 3)
causal_conv1d_update(tokens(1, 2, 3), DIGITS, None, pool, index(0), intermediate_windows=kept)
assert numbers(kept) == [[6, 7, 8, 1], [7, 8, 1, 2], [8, 1, 2, 3]]

pool, kept, wrong = windows([5, 6, 7, 8]), entries([[0] * 4] * 3), mutant("intermediates-one-late")
wrong["causal_conv1d_update"](tokens(1, 2, 3), DIGITS, None, pool, index(0), intermediate_windows=kept)
assert numbers(kept) == [[5, 6, 7, 8], [6, 7, 8, 1], [7, 8, 1, 2]]

# %% [markdown]
# (CONV-9)=
# ## CONV-9  Widths 2, 3 and 4
#
# :::{clause} CONV-9
# :level: MUST
# :since: 0.1
# :source: https://github.com/Dao-AILab/causal-conv1d, supported widths
# :applies: causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
# :observable: value, error
# :::
#
# Widths 2, 3 and 4 MUST be served, and every other width refused with an UnsupportedError.
#
# Example. Weight `10, 1`, tokens `1, 2, 3` -> `1, 12, 23`; five taps ->
# `weight has width 5: widths 2, 3 and 4 are served (CONV-9)`.
#
# Not this. Five taps and bias `0.5` give the bias alone: `0.5, 0.5, 0.5`. Fault: other-width-gives-bias-only.
#
# Why. A kernel unrolls its taps per width. What falls through every branch returns what was there before: the bias.

# %%
x, five, bias = tokens(1, 2, 3), taps(10000, 1000, 100, 10, 1), channels(0.5)
assert numbers(causal_conv1d(x, taps(10, 1))[0]) == [1, 12, 23]
assert numbers(causal_conv1d(x, taps(100, 10, 1))[0]) == [1, 12, 123]
assert refusal(causal_conv1d, x, five, bias) == (
    "UnsupportedError: weight has width 5: widths 2, 3 and 4 are served (CONV-9)"
)

wrong = mutant("other-width-gives-bias-only")
assert numbers(wrong["causal_conv1d"](x, five, bias)[0]) == [0.5, 0.5, 0.5]

# %% [markdown]
# (CONV-10)=
# ## CONV-10  Gradients
#
# :::{clause} CONV-10
# :level: MUST
# :since: 0.1
# :source: https://github.com/fla-org/flash-linear-attention/issues/1140
# :applies: causal_conv1d
# :observable: value
# :::
#
# The gradient of every float input given, entering windows included, MUST be the derivative of both results, outputs
# and final windows.
#
# Example. Weight `10, 1`, bias, tokens `1, 2`, cotangents `1, 1` of the outputs: x `11, 1`, weight `1, 3`, bias `2`.
# Entering `5, 6, 7, 8`, one token, cotangent `1, 2, 3, 4` of the final window alone: entering `0, 1, 2, 3`, x `4`.
#
# Not this. Moved as for a piece as long as the window: entering `0, 0, 0, 0`, x `2`. Fault:
# final-window-gradient-shifted.
#
# Why. A window is a list of references to inputs, so its gradient only moves; a piece shorter than the window moves
# part of it into the entering window, the case that tests with long pieces never see.

# %%
x, weight, bias = tokens(1, 2), taps(10, 1), channels(0)
gradients = causal_conv1d_grad({"y": tokens(1, 1)}, x, weight, bias)
assert numbers(gradients["x"]) == [11, 1]
assert numbers(gradients["weight"]) == [1, 3]
assert numbers(gradients["bias"]) == [2]

last, entering = {"final_windows": windows([1, 2, 3, 4])}, windows([5, 6, 7, 8])
gradients = causal_conv1d_grad(last, tokens(1), DIGITS, initial_windows=entering)
assert numbers(gradients["initial_windows"]) == [0, 1, 2, 3]
assert numbers(gradients["x"]) == [4]
assert numbers(gradients["weight"]) == [0, 0, 0, 0]

wrong = mutant("final-window-gradient-shifted")
gradients = wrong["causal_conv1d_grad"](last, tokens(1), DIGITS, initial_windows=entering)
assert numbers(gradients["initial_windows"]) == [0, 0, 0, 0]
assert numbers(gradients["x"]) == [2]

# %% [markdown]
# ## Cases beside Megatron-Core
#
# Its packed convolution, weight `1, 10, 100, 1000`, tokens 1 to 8, offsets `[0, 2, 5, 5]` and entering columns
# `0.1, 0.2, 0.3` and `0.4, 0.5, 0.6`, gives the same first five outputs, `1032.1, 2103.2, 3065.4, 4306.5, 5430.6`; the
# rows past the last offset, 0 here, are convolved there: 6543, 7654, 8765.
#
# | its update, given | here | there |
# |---|---|---|
# | width 2 and a window of 5 columns | refused: a window has `W` columns | served |
# | the activation `"swish"` | silu | linear |
# | width 5 | refused | the bias alone |

# %%
entering = windows([NAN, 0.1, 0.2, 0.3], [NAN, 0.4, 0.5, 0.6], [0, 0, 0, 0])
x, weight, offsets = tokens(*range(1, 9)), taps(1, 10, 100, 1000), index(0, 2, 5, 5)
y, _ = causal_conv1d(x, weight, cu_seqlens=offsets, initial_windows=entering)
assert numbers(y) == [1032.1, 2103.2, 3065.4, 4306.5, 5430.6, 0, 0, 0]
assert "ShapeError" in refusal(causal_conv1d_update, tokens(6), taps(1, 10), None, windows([1, 2, 3, 4, 5]), index(0))
