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
# # The suite on your code, in ten minutes
#
# You have kernels; the suite has vectors. An adapter shows the suite your kernels under the names of the
# [operation table](00_guide.py), and says what they can do. What it does not claim is left out, and told.
#
# Install, on Linux with Python 3.10 to 3.13: `make test` in a clone sets up everything in `.venv`; the command is
# `.venv/bin/statescan`.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(tempfile.mkdtemp())


def statescan(*words):
    """Run the command as you would, in the folder of your adapter; shows what it prints."""
    done = subprocess.run([sys.executable, "-m", "statescan.conformance", *words], cwd=HERE, capture_output=True,
                          text=True, env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"})  # fmt: skip
    print(done.stdout + done.stderr)
    return done.returncode


# %% [markdown]
# ## An adapter
#
# One function for each operation, with the arguments of the table. `features` are the words of what it can do, `dtypes`
# the element types that it takes. This one is a packed convolution in NumPy. It is wrong on purpose: it does not look
# at the offsets.

# %%
ADAPTER = '''\
import numpy as np
from statescan.conformance import Adapter

adapter = Adapter("mine")

@adapter.op("causal_conv1d", features=["packed.cu", "act.none", "width:4"], dtypes=[{"x": "f32", "weight": "f32"}])
def conv(x, weight, bias=None, seq_idx=None, cu_seqlens=None, initial_windows=None, *, activation=None):
    y = np.zeros_like(x)
    for j in range(4):
        back = 3 - j                     # tap j reads the token that is 3 - j tokens back
        y[:, back:] += x[:, : x.shape[1] - back] * weight[:, j]
    return y, None
'''
_ = (HERE / "mine.py").write_text(ADAPTER)

# %% [markdown]
# ## Mended
#
# The mended one stops at every offset: no tap reads across it (CONV-3, PACK-6), rows past the last one give zeros
# (PACK-8), and a final window is returned (CONV-5). What is not served is refused.

# %%
HEAD = ADAPTER.partition("    y = np.zeros_like")[0]
MENDED = HEAD.replace('"packed.cu"', '"packed.cu", "state.out", "window.W"') + '''\
    if seq_idx is not None or initial_windows is not None or bias is not None or activation is not None:
        raise NotImplementedError("ids, entering windows, bias and activation are not served")
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    y, final = np.zeros_like(x), np.zeros((len(bounds) - 1, x.shape[2], 4), x.dtype)
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        for t in range(start, end):
            final[n] = np.concatenate([final[n][:, 1:], x[0, t][:, None]], axis=1)
            y[0, t] = (final[n] * weight).sum(1)
    return y, final
'''
(HERE / "mended.py").write_text(MENDED)
code = statescan("run", "--impl", "mine:adapter", "--impl", "mended:adapter", "--only", "CONV-3", "--only", "PACK-8")
assert code == 1

# %% [markdown]
# Each failure names the clause, the vector, the first bad place and both numbers. One may be about a thing that the
# adapter does *not* claim, segment ids: the suite hands them over all the same, because an argument that is taken and
# ignored is the commonest fault of this field (ERR-5). What to do with a failure is the
# [next tutorial](92_failures.py).
#
# ## From here
#
# - Without `--only` everything runs that the adapter claims; `reports/report.html` is a page of it. Exit codes are 0
#   for pass, 1 for failures, 2 for wrong usage.
# - In your own tests: `pytest --pyargs statescan.conformance --impl mine:adapter`.
# - Kernels in another language speak JSON lines: `statescan run --impl "run:./my_program"`.
# - A mixer for an engine is shown by its two hooks: [add a mixer](93_mixer.py).
# - `Adapter("mine", arrays="torch", device="cuda")` hands over PyTorch tensors on a GPU.
