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
# # Serve with pieces, a prefix cache and drafts
#
# One engine's day on three slots, by hand, with the reference's hooks: a prompt in pieces, a second request that finds
# the first one's prefix, and drafts that are half right. The mixer counts in digits: token `d` enters as 100 d + 10
# times the digit before + the one before that, the state is the running sum, and the output is the state. After
# `1, 2, 3` the outputs are `100, 310, 631`. A wrong past shows in every later number.

# %%
from statescan.conformance.mutants import mutant
from statescan.spec.steps import Desk

desk = Desk()

# %% [markdown]
# ## Pieces
#
# Request A gets slot 2. The engine zeroes it, because the hooks have no word for a first piece (LIFE-2). The prompt is
# 1 2 3 4 5, and the first step has room for three of its tokens. The state after two of them is recorded on the way.

# %%
desk.edit("zero", slot=2)
assert desk.prefill((2, [1, 2, 3]), snapshot=2) == [100, 310, 631]
assert desk.snapshot() == ([0, 1, 2], 310)

# %% [markdown]
# What was recorded is a window and a state at one position, `0, 1, 2` and 310. It is kept as block 7. The next piece
# goes on in the slot as if nothing had happened (CONT-1): `1063, 1606`.

# %%
desk.edit("commit", **{"from": 0, "block": 7})
assert desk.prefill((2, [4, 5])) == [1063, 1606]

# %% [markdown]
# ## A prefix that is there already
#
# Request B has the prompt 1 2 7. Its first two tokens are those of block 7. A state cannot be cut back, so they may be
# skipped for one reason only: a state is there at exactly that position (SNAP-2). It is restored into B's slot, window
# and state together, and one token is left to compute: 1031, as if all three had been run.

# %%
desk.edit("restore", slot=1, block=7)
assert desk.prefill((1, [7])) == [1031]
alone = Desk()
alone.edit("zero", slot=0)
assert alone.prefill((0, [1, 2, 7])) == [100, 310, 1031]

# %% [markdown]
# ## Drafts
#
# A decodes 6, and a small model has proposed 7 and 8 to follow it. All three run in one call; beside them B decodes 8
# with drafts 9 and 1, and a third row is padding. The hook leaves window and state after every token in the entries of
# the slot (SPEC-2).

# %%
y = desk.decode((2, [6, 7, 8]), (1, [8, 9, 1]), (-1, [0, 0, 0]), entries=True)
assert y == [[2260, 3025, 3901], [1903, 2890, 3088], [0, 0, 0]]
assert [desk.entry(2, j) for j in (0, 1, 2)] == [2260, 3025, 3901]

# %% [markdown]
# Sampling accepts 7 and refuses 8, so A goes back to entry 1; B's drafts are both refused, so B goes back to entry 0
# (SPEC-3). A is then at 3025 with the window `5, 6, 7`, and decodes 9 as if the drafts had never been: 4001.

# %%
desk.edit("rollback", slot=2, entry=1)
desk.edit("rollback", slot=1, entry=0)
assert (desk.state(2), desk.window(2), desk.state(1)) == (3025, [5, 6, 7], 1903)
assert desk.decode((2, [9])) == [4001]

# %% [markdown]
# ## Half a rollback
#
# An engine that takes back the state and leaves the window goes wrong one token later, and only for the window's
# length: 8 stays in the window, and the next output is 4012.

# %%
wrong = Desk(mutant("rollback-state-only"))
wrong.edit("zero", slot=2)
wrong.prefill((2, [1, 2, 3, 4, 5]))
wrong.decode((2, [6, 7, 8]), entries=True)
wrong.edit("rollback", slot=2, entry=1)
assert wrong.state(2) == 3025
assert wrong.decode((2, [9])) == [4012]

# %% [markdown]
# ## The book
#
# Here the slots, blocks and entries were chosen by hand. `statescan.reference.host` keeps the book of requests, blocks
# and slots in plain Python, for all mixers ([requests](84_requests.py), [drafts](86_drafts.py)); the whole step of a
# layer around the hooks is [one step of a layer](80_steps.py). In your engine the two functions that change are the
# kernels: import them from `statescan.fast`, with the same names and arguments.
