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
# # Add a mixer
#
# A mixer for a serving engine is two functions, the hooks. `ssm_decode` gets a few tokens of every decoding request,
# `ssm_prefill` pieces of prompts laid end to end; both are given the pools of all slots, and leave in a slot what its
# next call needs. Who is in which slot, what is fresh, what is rolled back, is the engine's affair
# ([one step of a layer](80_steps.py)).
#
# Here is a whole mixer: Mamba2 with heads of one group, no gate and no norm, and nothing else. One request's tokens go
# through `run`, whether they come from a prompt or from decoding; a slot below 0 is padding.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MIXER = '''\
import torch
from statescan.conformance import Adapter

adapter = Adapter("my-mixer", arrays="torch")

@adapter.mixer(kinds=["mamba2"], lacks=["snapshots.grid", "snapshots.any"], limits={"groups": [1], "heads": [1]})
class Mamba2:
    def __init__(self, described):               # sizes and parameters, by the names of the clauses
        self.taps, self.A = torch.tensor(described["conv_weight"]), torch.tensor(described["A"])

    def run(self, rows, slot, pools, entries=()):        # rows [tokens, x B C dt]
        window, state = pools[0][slot], pools[1][slot, 0]
        y = torch.zeros(len(rows), len(state))
        for j, row in enumerate(rows if slot >= 0 else ()):
            window[:] = torch.cat([window[:, 1:], row[: len(window), None]], 1)
            x, B, C = (window * self.taps).sum(1).split([len(state), state.shape[1], state.shape[1]])
            dt = row[-1]
            state[:] = (dt * self.A[0]).exp() * state + torch.outer(dt * x, B)
            y[j] = state @ C
            for entry, pool in zip(entries, pools):      # drafts: what the slot holds after each token
                entry[slot, j] = pool[slot]
        return y

    def ssm_decode(self, rows, conv_state, ssm_state, slots, *entries):
        return torch.stack([self.run(x, slot, (conv_state, ssm_state), entries) for x, slot in zip(rows, slots)])

    def ssm_prefill(self, rows, conv_state, ssm_state, context):
        step = context.mamba_metadata
        pieces = zip(rows[:, 0].tensor_split(step.cu_seqlens[1:].tolist()), [*step.batch_indices_prefill, -1])
        return torch.cat([self.run(x, slot, (conv_state, ssm_state)) for x, slot in pieces])[:, None]
'''
HERE = Path(tempfile.mkdtemp())
(HERE / "mine.py").write_text(MIXER)


def statescan(*words):
    done = subprocess.run([sys.executable, "-m", "statescan.conformance", *words], cwd=HERE, capture_output=True,
                          text=True, env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"})  # fmt: skip
    print(done.stdout + done.stderr)
    return done.returncode


# %% [markdown]
# Traces are small stories of an engine: pieces, drafts, padding, slots that change hands. The runner makes the engine's
# edits and compares every slot after every step. Beside the mixer runs a copy without `if slot >= 0`. There the padding
# row of a decode step runs on the last slot of the pool, because that is what -1 means to Python (PAD-1).

# %%
(HERE / "clamped.py").write_text(MIXER.replace("rows if slot >= 0 else ()", "rows"))
assert statescan("run", "--impl", "mine:adapter", "--impl", "clamped:adapter", "--only", "trace-step-*-mamba2",
                 "--only", "trace-prompt-*-mamba2") == 1

# %% [markdown]
# The one that is right passes what it claims. Two more places carry most of what mixers get wrong: the window, which
# has to move with the state (CONT-2, SPEC-3), and the entries, which belong to slots and not to rows of the batch
# (SPEC-2). `--only 'trace-*'` runs all stories.
#
# ## In this project
#
# A mixer that is to stand beside the four needs, in this order: its recurrence in a chapter, with clauses; `step_*` and
# `scan_*` in `reference/`, and a second definition in `reference/second/`; a row in the operation table of
# `spec/contract.py`; vectors, and faults that they catch; then `reference/mixers/` and `fast/`. `CONTRIBUTING.md` has
# the form of each. The mixin, the metadata and the bookkeeping are shared and stay as they are: a subclass with the two
# hooks runs under them (STEP-6).
