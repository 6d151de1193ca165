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
# # Requests, slots and pieces
#
# A request lives in a slot: from its first piece of a prompt, through its tokens one by one, to its end. In between it
# may wait, be pushed out, be moved to another machine and back. The engine keeps the book of slots; the hooks see only
# slot numbers, and start from what a slot holds. There is no word for "this is a first piece": the engine zeroes the
# slot.
#
# The figure has two slots. A takes slot 1 first; B takes slot 0, waits for a step (in small letters), and ends; C gets
# A's slot.

# %%
from statescan.conformance.mutants import mutant
from statescan.reference.host.slots import SlotPool, run_slots
from statescan.spec.notation import refusal
from statescan.spec.serving_figures import slots_over_time
from statescan.spec.steps import Desk

slots_over_time([["", "A"], ["B", "A"], ["b", "A"], ["B", "C"], ["", "C"]])

# %% [markdown]
# The examples count in digits: a token `d` enters as 100 d + 10 times the digit before + the one before that, the state
# is the running sum, and the output is the state. So `1, 2, 3` gives `100, 310, 631`, and each output tells which
# tokens it has seen.

# %%
desk = Desk()
desk.edit("zero", slot=1)
assert desk.prefill((1, [1, 2, 3])) == [100, 310, 631]
assert (desk.window(1), desk.state(1)) == ([1, 2, 3], 631)

# %% [markdown]
# (LIFE-1)=
# ## LIFE-1  All slots or none
#
# :::{clause} LIFE-1
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: run_slots
# :observable: value, error
# :::
#
# What asks for slots MUST get as many as it asks for, the one freed last first, or a CapacityError and no change.
#
# Example. Of 3 slots the first two are `2` and `1`. Of 2 slots, one taken, 2 more are asked for -> `count=2 slots asked
# of 2, 1 free (LIFE-1)`.
#
# Not this. The one that is free is handed out: `[[1], [0], []]`. Fault: slots-handed-out-in-part.
#
# Why. Half of what a request needs is of no use, and who has it must find it and give it back. The order is part of the
# rule so that stored traces replay.

# %%
pool = SlotPool(3)
assert [pool.allocate(), pool.allocate()] == [2, 1]
events = [("allocate", 1), ("allocate", 2)]
assert refusal(run_slots, 2, events) == "CapacityError: count=2 slots asked of 2, 1 free (LIFE-1)"

wrong = mutant("slots-handed-out-in-part")
assert wrong["run_slots"](2, events) == [[1], [0], []]

# %% [markdown]
# (LIFE-2)=
# ## LIFE-2  Zeroed before first use
#
# :::{clause} LIFE-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill, states updated in place
# :applies: ssm_prefill, engine.run
# :observable: value
# :::
#
# An engine MUST zero window and state of a slot between handing it out and the first piece of its request.
#
# Example. Slot 1 holds `nan`; zeroed, tokens `1, 2` give `100, 310`.
#
# Not this. Handed out as it is: `nan, nan`. Fault: slot-not-zeroed.
#
# Why. Hooks have no flag for a first piece. Memory that nobody has written, or the end of another request, would be
# read as this one's past.

# %%
def first_piece(by=None):
    desk = Desk(by)
    desk.edit("zero", slot=1)
    return desk.prefill((1, [1, 2]))


assert first_piece() == [100, 310]

wrong = mutant("slot-not-zeroed")
assert first_piece(wrong) == ["nan", "nan"]

# %% [markdown]
# (LIFE-3)=
# ## LIFE-3  Pausing keeps, eviction restarts
#
# :::{clause} LIFE-3
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: ssm_decode, ssm_prefill, engine.run
# :observable: value
# :::
#
# A paused request MUST find its slot as it left it, and an evicted one start again from its first token in a zeroed
# slot.
#
# Example. Tokens `1, 2` in slot 0, evicted, and again `1, 2` in slot 0: `100, 310` both times.
#
# Not this. The slot is not zeroed a second time: `431, 643`. Fault: restart-keeps-the-old-state.
#
# Why. A state cannot be cut back to an earlier position. What was pushed out is computed anew, from nothing.

# %%
def twice(by=None):
    desk, outputs = Desk(by), []
    for _ in range(2):
        desk.edit("zero", slot=0)
        outputs.append(desk.prefill((0, [1, 2])))
        desk.edit("free", slot=0)
    return outputs


assert twice() == [[100, 310], [100, 310]]

wrong = mutant("restart-keeps-the-old-state")
assert twice(wrong)[1] == [431, 643]

# %% [markdown]
# (LIFE-4)=
# ## LIFE-4  Window and state move together
#
# :::{clause} LIFE-4
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: ssm_decode, engine.run
# :observable: value
# :::
#
# Whatever moves a request between slots or machines MUST move every per-slot array of every layer.
#
# Example. Tokens `1, 2, 3` in slot 0, off-loaded and brought back in slot 1: token 4 gives `1063`.
#
# Not this. The window stays behind, and slot 1 has zeros there: `1031`. Fault: window-left-behind.
#
# Why. The state is large and remembered; the window is small and forgotten. For its length every output is wrong, and a
# while later nothing can be seen.

# %%
def moved(by=None):
    desk = Desk(by)
    desk.edit("zero", slot=0)
    desk.edit("zero", slot=1)
    desk.prefill((0, [1, 2, 3]))
    desk.edit("save", slot=0, name="a")
    desk.edit("load", slot=1, name="a")
    return desk.decode((1, [4]))


assert moved() == [1063]

wrong = mutant("window-left-behind")
assert moved(wrong) == [1031]

# %% [markdown]
# (LIFE-5)=
# ## LIFE-5  Rows move, slots do not
#
# :::{clause} LIFE-5
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_decode, batch_indices
# :applies: ssm_decode, engine.run
# :observable: value
# :::
#
# A request MUST keep its slot when its row in the batch changes.
#
# Example. A has `1, 2` in slot 2, C has `5, 6` in slot 1. Rows C, A with tokens 7 and 3: `1915, 631`.
#
# Not this. Row n starts from slot n, and slot 0 is empty: `700, 1515`. Fault: state-follows-the-row.
#
# Why. Rows are packed anew in each step; states are too large to follow.

# %%
def reordered(by=None):
    desk = Desk(by)
    for slot in (0, 1, 2):
        desk.edit("zero", slot=slot)
    desk.prefill((2, [1, 2]), (1, [5, 6]))
    return desk.decode((1, [7]), (2, [3]))


assert reordered() == [1915, 631]

wrong = mutant("state-follows-the-row")
assert reordered(wrong) == [700, 1515]

# %% [markdown]
# (LIFE-6)=
# ## LIFE-6  A slot is freed once
#
# :::{clause} LIFE-6
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: run_slots
# :observable: error
# :::
#
# Freeing a slot that is free, or that is not in the pool, MUST be refused with a SlotError and change nothing.
#
# Example. Slot 2 freed twice -> `slot=2 is free already: freed once (LIFE-6)`.
#
# Not this. It is put on the free list again, and handed to two: `[[1, 2], [2, 2], [0]]`. Fault: double-free-accepted.
#
# Why. The second owner is admitted long after the mistake, and then two requests write one state.

# %%
events = [("allocate", 2), ("release", 2), ("release", 2)]
assert refusal(run_slots, 3, events) == "SlotError: slot=2 is free already: freed once (LIFE-6)"

wrong = mutant("double-free-accepted")
assert wrong["run_slots"](3, [*events, ("allocate", 2)]) == [[1, 2], [2, 2], [0]]

# %% [markdown]
# ## Pieces of a prompt
#
# A long prompt comes in pieces, beside the tokens of other requests. Where it is cut is the scheduler's business and
# nobody else's.

# %% [markdown]
# (CONT-1)=
# ## CONT-1  Any cut gives the same
#
# :::{clause} CONT-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, chunked prefill
# :applies: ssm_prefill
# :observable: value
# :::
#
# A prompt in pieces MUST give the outputs, the window and the state that it gives in one piece.
#
# Example. `1, 2, 3, 4, 5` in one piece ends with `1063, 1606`; cut behind 3, the second piece gives `1063, 1606`.
#
# Not this. Each piece starts from zeros: `400, 940`. Fault: piece-starts-fresh.
#
# Why. The slot carries everything: the state, and the `W - 1` inputs before the piece.

# %%
def in_pieces(*pieces, by=None):
    desk = Desk(by)
    desk.edit("zero", slot=0)
    return [desk.prefill((0, piece)) for piece in pieces]


assert in_pieces([1, 2, 3, 4, 5])[0][3:] == [1063, 1606]
assert in_pieces([1, 2, 3], [4, 5])[1] == [1063, 1606]

wrong = mutant("piece-starts-fresh")
assert in_pieces([1, 2, 3], [4, 5], by=wrong)[1] == [400, 940]

# %% [markdown]
# (CONT-2)=
# ## CONT-2  Pieces shorter than the window
#
# :::{clause} CONT-2
# :level: MUST
# :since: 0.1
# :source: ssm_inference, chunked prefill
# :applies: ssm_prefill
# :observable: value
# :::
#
# A piece of fewer than `W` tokens MUST leave in the window what it does not push out.
#
# Example. `1, 2`, then `3`, then `4` with `W = 3`: the last gives `1063`, and the window holds `2, 3, 4`.
#
# Not this. Columns before the piece are zeros: `1061` and `0, 0, 4`. Fault: short-piece-forgets-the-window.
#
# Why. A budget may leave room for a token or two. Code that takes the window from the piece alone has only been tried
# on long ones.

# %%
def short(by=None):
    desk = Desk(by)
    desk.edit("zero", slot=0)
    for piece in ([1, 2], [3], [4]):
        y = desk.prefill((0, piece))
    return y, desk.window(0)


W = 3
assert short() == ([1063], [2, 3, 4])

wrong = mutant("short-piece-forgets-the-window")
assert short(wrong) == ([1061], [0, 0, 4])

# %% [markdown]
# (CONT-3)=
# ## CONT-3  A first piece is fresh
#
# :::{clause} CONT-3
# :level: MUST
# :since: 0.1
# :source: ssm_inference, ssm_prefill
# :applies: ssm_prefill, engine.run
# :observable: value
# :::
#
# A first piece MUST start from a zero window and a zero state, both.
#
# Example. A leaves `1, 2, 3` in slot 0; then B's first tokens `4, 5` there give `400, 940`.
#
# Not this. The state is zeroed and the window is not: `432, 975`. Fault: window-kept-for-the-next-request.
#
# Why. One array of two is the usual half of a job. Three tokens of another user's text enter the first outputs.

# %%
def next_on_the_slot(by=None):
    desk = Desk(by, fill=0)
    desk.edit("zero", slot=0)
    desk.prefill((0, [1, 2, 3]))
    desk.edit("free", slot=0)
    desk.edit("zero", slot=0)
    return desk.prefill((0, [4, 5]))


assert next_on_the_slot() == [400, 940]

wrong = mutant("window-kept-for-the-next-request")
assert next_on_the_slot(wrong) == [432, 975]

# %% [markdown]
# (CONT-4)=
# ## CONT-4  A piece of one token is prefill
#
# :::{clause} CONT-4
# :level: MUST
# :since: 0.1
# :source: ssm_inference, decode partition
# :applies: ssm_prefill
# :observable: value, untouched
# :::
#
# A piece of one token MUST be run by prefill, with its snapshot, and write no intermediate entry.
#
# Example. The piece `4` behind `1, 2, 3`, snapshot at its end: window `2, 3, 4`, state `1063`, and entry 0 stays `-7`.
#
# Not this. It runs as decode and keeps no snapshot: `-7, -7, -7` and `-7`. Fault: one-token-piece-keeps-no-snapshot.
#
# Why. It looks like a decode row, and a scheduler that counts tokens takes it for one. But it belongs to a prompt,
# whose prefix may be kept.

# %%
def last_piece(by=None):
    desk = Desk(by)
    desk.edit("zero", slot=0)
    desk.prefill((0, [1, 2, 3]))
    desk.prefill((0, [4]), snapshot=1)
    return desk.snapshot(), desk.entry(0, 0)


assert last_piece() == (([2, 3, 4], 1063), -7)

wrong = mutant("one-token-piece-keeps-no-snapshot")
assert last_piece(wrong)[0] == ([-7, -7, -7], -7)
