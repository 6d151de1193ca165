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
# # Prefixes and the states kept of them
#
# Many prompts begin alike. An engine cuts them into blocks of some tokens, names each whole block by its tokens and all
# before them, and finds again what it has seen. An attention cache can use every block that matches: keys and values
# are there for each token. A state is one value for all tokens before it. It serves a later request at the one position
# where it was taken, and a position without a state is computed again, however much of it matches.
#
# In the figure three blocks of two tokens match, and a state is kept behind the first one.

# %%
from statescan.conformance.mutants import mutant
from statescan.reference.host.blocks import hash_blocks
from statescan.reference.host.prefix_cache import plan_skip, plan_snapshots, run_state_cache
from statescan.reference.host.requests import run_program
from statescan.spec.notation import refusal
from statescan.spec.snapshot_figures import block_table, snapshot_timeline, what_may_be_skipped
from statescan.spec.steps import Desk

what_may_be_skipped(7, 2, matched=3, states=[1])

# %% [markdown]
# (SNAP-1)=
# ## SNAP-1  A state stands for one position
#
# :::{clause} SNAP-1
# :level: MUST
# :since: 0.1
# :source: ssm_inference, prefix caching
# :applies: plan_skip, engine.run
# :observable: value
# :::
#
# A kept state MUST serve the position at which it was taken and no other, however near.
#
# Example. A prompt of `768` tokens in blocks of `256`, `3` of them match, states behind blocks `1, 3`: `256` tokens are
# skipped. The state behind block 3 would leave nothing to compute (SNAP-10).
#
# Not this. The state behind block 3 stands in for a nearer one: `512`. Fault: state-cut-back.
#
# Why. Keys and values of 768 tokens can be cut to those of 512. A state has all 768 tokens in it, and there is no way
# to take the last 256 out again.

# %%
assert plan_skip(768, 0, 3, [1, 3], 256) == 256

wrong = mutant("state-cut-back")
assert wrong["plan_skip"](768, 0, 3, [1, 3], 256) == 512

# %% [markdown]
# What going wrong looks like: a state behind `1, 2, 3` is 631. Restored for a request that goes on behind `1, 2`, with
# the same token 3, it gives 963 where 631 is right.

# %%
desk = Desk()
for slot in (0, 1):
    desk.edit("zero", slot=slot)
assert desk.prefill((0, [1, 2, 3]), snapshot=3) == [100, 310, 631]
desk.edit("commit", **{"from": 0, "block": 0})
desk.edit("restore", slot=1, block=0)
assert desk.prefill((1, [3])) == [963]

# %% [markdown]
# (SNAP-2)=
# ## SNAP-2  No skip without a restore
#
# :::{clause} SNAP-2
# :level: MUST NOT
# :since: 0.1
# :source: ssm_inference, prefix caching
# :applies: plan_skip, engine.run
# :observable: value
# :::
#
# Tokens MUST NOT be skipped unless the state behind the last of them is restored into the request's slot, which is
# possible in front of its first piece alone.
#
# Example. Of 1024 tokens 512 are done, all 4 blocks match, states behind blocks 3 and 4:
# `1024, 512, 4, [3, 4], 256` -> `0`.
#
# Not this. The later piece skips what matches beyond it: `256`. Fault: skip-on-a-later-piece.
#
# Why. The slot stands at 512, and the piece would start at 768: 256 tokens are missing from the state of this request
# for the rest of its life. An attention cache would not notice.

# %%
assert plan_skip(1024, 512, 4, [3, 4], 256) == 0

wrong = mutant("skip-on-a-later-piece")
assert wrong["plan_skip"](1024, 512, 4, [3, 4], 256) == 256

assert plan_skip(768, 0, 3, [1], 256) == 256
assert mutant("skip-by-matched-blocks")["plan_skip"](768, 0, 3, [1], 256) == 512

# %% [markdown]
# (SNAP-10)=
# ## SNAP-10  Something is left to compute
#
# :::{clause} SNAP-10
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: plan_skip, engine.run
# :observable: value
# :::
#
# Of a prompt at least the last token MUST be computed, even where the state behind it is kept.
#
# Example. All `3` blocks of `768` tokens match and have states: `768, 0, 3, [1, 2, 3], 256` -> `512`.
#
# Not this. `768`: the piece has no token. Fault: whole-prompt-skipped.
#
# Why. A state is not an output. What is chosen next comes from the last token's output, which nobody has kept.
# An engine whose pieces have two tokens or more says so: `769, 0, 3, [1, 2, 3], 256` gives `768`, and with two tokens
# left to compute `512`.

# %%
assert plan_skip(768, 0, 3, [1, 2, 3], 256) == 512

wrong = mutant("whole-prompt-skipped")
assert wrong["plan_skip"](768, 0, 3, [1, 2, 3], 256) == 768

assert plan_skip(769, 0, 3, [1, 2, 3], 256) == 768
assert plan_skip(769, 0, 3, [1, 2, 3], 256, least_tokens=2) == 512

# %% [markdown]
# ## What is recorded
#
# A state behind every block would serve every later request, and there is no memory for that: a state is as large as
# keys and values of hundreds of tokens. Three positions of a prompt are worth it. Where it parts from a prompt seen
# before, others may part too. Behind its last whole block goes on whoever continues the conversation. And what a piece
# ends with saves the rest if the request is pushed out.

# %%
snapshot_timeline(8, [3, 5], 2)

# %% [markdown]
# (SNAP-9)=
# ## SNAP-9  Which positions are recorded
#
# :::{clause} SNAP-9
# :level: MUST
# :since: 0.1
# :source: ssm_inference, prefix caching
# :applies: plan_snapshots, engine.run
# :observable: value, error
# :::
#
# Of a piece the ends of the last block that matched, of the prompt's last whole block and of the piece's last whole
# block MUST be recorded, each under that block, where they lie inside the piece and on the grid that starts with it.
#
# Example. `800` tokens in one piece, `256` skipped of `2` blocks that match, blocks of `256` on a grid of `128`:
# `[256, 1], [512, 2]`, offset and block. On the same grid a piece that starts at 300 records nothing.
#
# Not this. The state is taken one block later, `[512, 1]`, and kept under block 1 all the same. Fault:
# snapshot-one-block-late.
#
# Why. Whoever hits block 1 skips 512 tokens, and would start from the state of 768. Offsets count from the first token
# that is computed, as the hook sees them; a kernel that leaves states at chunk ends alone has none between them.

# %%
assert plan_snapshots(800, 0, 800, 256, 2, 256, 128)["snapshots"] == [[256, 1], [512, 2]]
assert plan_snapshots(800, 300, 500, 0, 0, 256, 128)["snapshots"] == []

wrong = mutant("snapshot-one-block-late")
assert wrong["plan_snapshots"](800, 0, 800, 256, 2, 256, 128)["snapshots"][0] == [512, 1]

# %% [markdown]
# (SNAP-5)=
# ## SNAP-5  The state behind the prompt
#
# :::{clause} SNAP-5
# :level: MUST
# :since: 0.1
# :source: ssm_inference, prefix caching
# :applies: plan_snapshots, engine.run
# :observable: value
# :::
#
# What the slot holds after a piece MUST be kept if the prompt and a block end there, and in no other case.
#
# Example. `512` tokens in blocks of `256`: in one piece the end is block `1`. After a first piece of `300` it is `-1`,
# none.
#
# Not this. After the first piece of `300` the end is block `1` too. Fault: end-state-of-any-piece.
#
# Why. No snapshot is taken at a piece's end, because the state is in the slot anyhow. After 300 tokens that is the
# state behind 300, and block 1 ends at 512.

# %%
assert plan_snapshots(512, 0, 512, 0, 0, 256, 128)["end"] == 1
assert plan_snapshots(512, 0, 300, 0, 0, 256, 128)["end"] == -1

wrong = mutant("end-state-of-any-piece")
assert wrong["plan_snapshots"](512, 0, 300, 0, 0, 256, 128)["end"] == 1

# %% [markdown]
# (SNAP-4)=
# ## SNAP-4  Kept in the step that recorded it
#
# :::{clause} SNAP-4
# :level: MUST
# :since: 0.1
# :source: ssm_inference, prefix caching
# :applies: engine.run
# :observable: value
# :::
#
# Snapshots and what slots hold MUST be kept after the hooks and before anything of the step changes: before drafts are
# rolled back, rows move, slots are freed, and another step runs.
#
# Example. The prompt of A is one block of one token. The edits behind step `0` keep slot `0` under block `0`, at place
# `0`.
#
# Not this. They do so behind step `1`, when A has decoded a token. Fault: commit-after-the-request-moved-on.
#
# Why. The slot then holds the state of one more token. Whoever hits the block reads that token twice, or another
# request's state if A has ended.

# %%
sizes = {"slots": 1, "block_size": 1, "blocks": 1, "places": 1}
program = [
    {"admit": ["A"], "prefill": [{"request": "A", "to": 1, "chosen": [6]}]},
    {"decode": [{"request": "A", "drafts": [], "chosen": [7]}]},
]


def kept_in(run):
    log = run(sizes, {"A": [9]}, program)
    return [(n, e["slot"], e["block"], e["place"])
            for n, step in enumerate(log["steps"]) for e in step["after"] if e["op"] == "commit"]  # fmt: skip


step, slot, block, place = kept_in(run_program)[0]
assert (step, slot, block, place) == (0, 0, 0, 0)

wrong = mutant("commit-after-the-request-moved-on")
assert kept_in(wrong["engine.run"])[0][0] == 1

# %% [markdown]
# ## Blocks, names and states
#
# A block has a name once all its tokens are computed, and it may have a state. It is held by the requests whose prompts
# it is part of. What nobody holds stays until its room is needed, or is dropped at once, by policy.

# %%
block_table(["1 2", "3 4", "", "3 9"], holders=[2, 0, 0, 1], places=[0, 1, -1, -1])

# %% [markdown]
# (SNAP-8)=
# ## SNAP-8  Match and restore speak of the same block
#
# :::{clause} SNAP-8
# :level: MUST
# :since: 0.1
# :source: ssm_inference, prefix caching
# :applies: hash_blocks, run_state_cache, engine.run
# :observable: value
# :::
#
# A name MUST stand for one block of the same tokens behind the same beginning, and go with it and its state when the
# block is dropped.
#
# Example. One block; name 1 is kept with a state, dropped, and the block filled again as name 2. A match of `2` finds
# block `0` and no state: `[0], []`, and a restore finds `-1`.
#
# Not this. The state is still there: `[0], [1]` and place `0`. Fault: state-outlives-its-block.
#
# Why. The new prompt would start from the state of the old one. It happens when the cache is full, and is different
# every time.

# %%
events = [("acquire", [1]), ("fill", 0, 1), ("commit", [0]), ("release", [0]), ("acquire", [2]), ("fill", 0, 2)]
assert run_state_cache(1, 1, [*events, ("match", [2]), ("restore", 0)])[3:5] == [[[0], []], -1]

wrong = mutant("state-outlives-its-block")
assert wrong["run_state_cache"](1, 1, [*events, ("match", [2]), ("restore", 0)])[3:5] == [[[0], [1]], 0]

# %% [markdown]
# The name of a block is a digest of its tokens and of the name of the block before it, so that the second block of
# `1, 2, 1, 2` is not its first one. What equal tokens do not say, such as an image behind a placeholder, is a salt.

# %%
first, second = hash_blocks([1, 2, 1, 2], 2)
assert first != second
assert hash_blocks([1, 2], 2, "a") != hash_blocks([1, 2], 2, "b")
assert len(set(mutant("names-without-what-is-before")["hash_blocks"]([1, 2, 1, 2], 2))) == 1

# %% [markdown]
# (SNAP-6)=
# ## SNAP-6  What eviction leaves alone
#
# :::{clause} SNAP-6
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: run_state_cache, engine.run
# :observable: value, error
# :::
#
# Room MUST be made by what nobody holds and the request does not name, the one unused longest first, or the request
# gets a CapacityError and no change.
#
# Example. Two places, states of blocks 0 and 1, nobody holds any block, and block 0 has been unused longest. Places for
# blocks 5 and 0 -> `1, 0`: block 1 goes.
#
# Not this. Block 0 goes, though it is named, and both have one place: `0, 0`. Fault: victim-among-the-named.
#
# Why. Two names for one place: whoever is kept later overwrites the other, and one of them is restored with the state
# of the other.

# %%
events = [("acquire", [10, 11, 12, 13, 14, 15]), *(("fill", n, 10 + n) for n in range(6)), ("allocate", [0, 1]),
          ("release", [0]), ("release", [1]), ("release", [2, 3, 4, 5]), ("allocate", [5, 0])]  # fmt: skip
assert run_state_cache(6, 2, events)[2] == [1, 0]

wrong = mutant("victim-among-the-named")
assert wrong["run_state_cache"](6, 2, events)[2] == [0, 0]

events = [("acquire", [10, 11, 12]), ("allocate", [0]), ("release", [1, 2]), ("allocate", [1, 2])]
assert refusal(run_state_cache, 3, 2, events) == (
    "CapacityError: 2 places asked of 2, 1 free or unheld (SNAP-6)"
)

# %% [markdown]
# (SNAP-7)=
# ## SNAP-7  A full cache fails no request
#
# :::{clause} SNAP-7
# :level: MUST
# :since: 0.1
# :source: ssm_inference, prefix caching
# :applies: run_state_cache, engine.run
# :observable: value
# :::
#
# States for which there is no place MUST be let go in silence, the first ones kept as far as there is room.
#
# Example. One place, states of blocks 1 and 2: places `0, -1`.
#
# Not this. `CapacityError`, and the step fails. Fault: full-cache-fails-the-request.
#
# Why. What is kept helps somebody later. The request at hand has no need of it.

# %%
events = [("acquire", [10, 11, 12]), ("fill", 1, 11), ("fill", 2, 12), ("commit", [1, 2])]
assert run_state_cache(3, 1, events)[1] == [0, -1]

wrong = mutant("full-cache-fails-the-request")
assert refusal(wrong["run_state_cache"], 3, 1, events).startswith("CapacityError: ")

# %% [markdown]
# (LIFE-7)=
# ## LIFE-7  A move that a request's state does not allow
#
# :::{clause} LIFE-7
# :level: MUST
# :since: 0.1
# :source: decision where the public descriptions are silent
# :applies: engine.run
# :observable: error
# :::
#
# A request MUST have a row only while it runs, and any move that its state does not allow is a SlotError that changes
# nothing.
#
# Example. A is paused and decodes -> `request 'A' is paused: run needs running (LIFE-7)`.
#
# Not this. It decodes all the same. Fault: paused-request-run.
#
# Why. Two parts of an engine disagree on where a request is. If the step goes on, slots and blocks are given back twice
# or never, and that is seen much later and elsewhere.

# %%
program = [
    {"admit": ["A"], "prefill": [{"request": "A", "to": 1, "chosen": [6]}], "pause": ["A"]},
    {"decode": [{"request": "A", "drafts": [], "chosen": [7]}]},
]
sizes = {"slots": 1}
assert refusal(run_program, sizes, {"A": [9]}, program) == (
    "SlotError: request 'A' is paused: run needs running (LIFE-7)"
)

wrong = mutant("paused-request-run")
assert refusal(wrong["engine.run"], sizes, {"A": [9]}, program) == "accepted"

# %% [markdown]
# ## A whole day of it
#
# The program below is what a scheduler decides; the log is what it means for the hooks: edits before them, rows and
# slots, edits behind them. A and B share a block of two tokens. A's first piece ends with that block, which ends inside
# no piece, so nothing is kept of it; the second piece ends the prompt and a block, and the slot's state is kept. B hits
# it: slot 0 is restored at 4, and one token is left to compute. `statescan schedules --engine` tries a stranger's
# scheduler on thousands of such programs, and says which clause it breaks, in which step.

# %%
sizes = {"slots": 2, "block_size": 2, "blocks": 5, "places": 2}
log = run_program(sizes, {"A": [1, 2, 3, 4], "B": [1, 2, 3, 4, 5]}, [
    {"admit": ["A"], "prefill": [{"request": "A", "to": 2}]},
    {"prefill": [{"request": "A", "to": 4, "chosen": [7]}]},
    {"admit": ["B"], "decode": [{"request": "A", "drafts": [], "chosen": [8]}],
     "prefill": [{"request": "B", "to": 5, "chosen": [6]}], "finish": ["A", "B"]},
])  # fmt: skip
assert [step["before"] for step in log["steps"]] == [
    [{"op": "zero", "slot": 1}], [], [{"op": "restore", "slot": 0, "block": 1, "place": 1}],
]  # fmt: skip
assert log["steps"][0]["after"] == []
assert log["steps"][1]["after"] == [{"op": "commit", "slot": 1, "block": 1, "place": 1}]
assert [(row["at"], row["tokens"]) for row in log["steps"][2]["prefill"]["rows"]] == [(4, [5])]
assert log["steps"][2]["after"] == [{"op": "free", "slot": 1}, {"op": "free", "slot": 0}]
assert log["end"]["held"] == []
