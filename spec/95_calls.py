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
# # Was this call right?
#
# A served model gives a strange answer, and one call of one kernel is under suspicion. Record it where it happens, and
# ask. Here is a decode step of the gated delta rule that decays the state behind the write instead of before it; three
# requests are decoded, of which the second is padding.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(tempfile.mkdtemp())
_ = (HERE / "kernels.py").write_text('''\
import numpy as np

def step(q, k, v, g, beta, state_pool, read_slots):
    o = np.zeros_like(v)
    for n, slot in enumerate(read_slots):
        for h in range(v.shape[2] if slot >= 0 else 0):
            state, key = state_pool[slot, h], k[n, 0, h]
            state += np.outer(key, beta[n, 0, h] * (v[n, 0, h] - key @ state))
            state *= np.exp(g[n, 0, h])
            o[n, 0, h] = q.shape[3] ** -0.5 * q[n, 0, h] @ state
    return o
''')


def run(*words):
    """Run a command in that folder; shows what it prints."""
    done = subprocess.run([sys.executable, *words], cwd=HERE, capture_output=True, text=True,
                          env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"})  # fmt: skip
    print(done.stdout + done.stderr)
    return done.stdout


# %% [markdown]
# ## Record
#
# `record` is a decorator around any callable with the arguments of the [operation table](00_guide.py), or with the
# arguments a context manager. It keeps the inputs, the slots that the call names before and after, and what came back;
# of all other slots a checksum says whether they changed. It never breaks what it records: what is too large
# (`max_bytes`), or comes after `most` calls, is left out.

# %%
(HERE / "serve.py").write_text('''\
import numpy as np
import kernels
from statescan.conformance import record

step = record("gated_delta_rule_update", "calls", max_bytes=1 << 20, most=10)(kernels.step)
draw = np.random.default_rng(0)
q, k, v = (draw.normal(size=(3, 1, 4, 32)).astype("f4") for _ in range(3))
g, beta = (-abs(draw.normal(size=(3, 1, 4))).astype("f4") for _ in range(2))
pool = draw.normal(size=(1000, 4, 32, 32)).astype("f4")
step(q, k / 6, v, g, -beta / 4, pool, np.array([700, -1, 31], np.int32))
''')
run("serve.py")
assert sorted(path.name for path in (HERE / "calls").iterdir()) == ["000001.json", "000001.safetensors"]
assert (HERE / "calls" / "000001.safetensors").stat().st_size < 100_000  # the pool has 16 million bytes

# %% [markdown]
# ## Ask
#
# `replay` computes what had to come out, judges by the numeric score, and names the first bad place. With the
# implementation at hand it looks for the least call that is still wrong, and writes that as a script.

# %%
(HERE / "adapter.py").write_text('''\
from statescan.conformance import Adapter
import kernels

adapter = Adapter("kernels")
adapter.op("gated_delta_rule_update", features=["slot.pool", "slot.negative"])(kernels.step)
''')
said = run("-m", "statescan.conformance", "replay", "calls/000001.json", "--impl", "adapter:adapter")
assert said.startswith("wrong: gated_delta_rule_update: fail.value")
assert "decay-after-write" in said
assert "N 1, J 1, H 1, K 1, HV 1, V 1, slots 1" in said

# %%
print((HERE / "calls" / "000001_small.py").read_text())
shown = run("calls/000001_small.py")
assert shown.strip() in said.replace(" (row 0, token 0, value head 0, value 0)", "")

# %% [markdown]
# Without `--impl` the record itself is cut to the row, head and column that are wrong. Files of calls are data: they
# are read by strict rules, nothing in them is evaluated, and one may come from anybody.
#
# ## Elsewhere
#
# - **Another language.** `conformance/examples/conv_update.c` is a whole adapter in C, for the decode step of the
#   convolution: `statescan run --impl run:./conv_update`. `conformance/examples/foreign.py` is one in Python that needs
#   NumPy alone.
# - **Another machine.** `statescan export DIR --claims claims.json` writes calls without their answers; fill in the
#   blanks there (`python foreign.py DIR` does), write `done.jsonl`, and `statescan verify DIR` judges.
# - **A build.** `conformance/examples/workflow.yml` is a workflow to copy. `--known FILE` lists known failures with
#   their reasons, and one that starts to pass fails the build; `--junit` and `--badge` write files, `--track` tells
#   only what is not as it was, and `--fresh 12` adds vectors whose numbers are drawn at that moment.
# - **One failure.** `statescan explain reports/report.json ID` says all about it, and `statescan repro ID --impl X`
#   writes it as a script.
