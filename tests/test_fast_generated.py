"""The compiler takes every kernel of convolution, gates and norms, and makes good code of the fast ones.

The interpreter accepts what the compiler does not (a variable that changes its type, say), so each variant is compiled
here for sm_90, which needs no GPU.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles the kernels when it runs them")

SCRIPT = '''
import itertools, torch
from statescan.fast import conv_launch as L, delta, gates, norms, ssd
from statescan.fast.bench import yardsticks
from statescan.fast.bench.generated import describe, recording

BF16, F32 = torch.bfloat16, torch.float32
empty, found = torch.empty, {}

def slots(n): return torch.zeros(n, dtype=torch.int32)

def compiled(name, launch):
    with recording() as kernels:
        launch()
    found[name] = [tuple(describe(kernel)) for kernel in kernels]

def window(layout, dtype, *shape):
    *lead, c, w = shape
    return empty(*lead, c, w, dtype=dtype) if layout == "CW" else empty(*lead, w, c, dtype=dtype).mT

def prefill(c, w, dtype, layout, marks, bias=True):
    x, y, pool = empty(1, 8192, c, dtype=dtype), empty(1, 8192, c, dtype=dtype), window(layout, dtype, 4, c, w)
    snap = (torch.zeros(5, dtype=torch.int64), empty(5, c, w, dtype=dtype)) if marks else (None, None)
    taps = empty(c, w, dtype=dtype), empty(c) if bias else None
    L.launch_prefill(x, y, *taps, slots(3), pool, pool, slots(2), slots(2), *snap, 2, "silu")

def update(rows, steps, c, w, dtype, layout, full):
    x, y = empty(rows, steps, c, dtype=dtype), empty(rows, steps, c, dtype=dtype)
    more = (window(layout, dtype, 4, steps, c, w), slots(rows), slots(rows)) if full else (None, None, None)
    L.launch_update(x, y, empty(c, w, dtype=dtype), empty(c, dtype=dtype), window(layout, dtype, 4, c, w), slots(rows),
                    None, *more, "silu")

def packed(batch, w, offsets, entered, silu):
    x, weight = empty(batch, 300, 72), empty(72, w)
    rows = 2 if offsets else batch
    given = (weight, None, slots(3) if offsets else None)
    windows = empty(rows, 72, w) if entered else None
    L.launch_prefill(x, empty(x.shape), *given, windows, empty(rows, 72, w), None, None, None, None, rows, silu)
    L.pull_back(empty(x.shape), empty(rows, 72, w) if entered else None, x, *given, rows, windows, silu)

for w in (2, 3, 4):
    compiled(f"prefill {w}", lambda: prefill(8192, w, BF16, "WC", False))
    compiled(f"snapshots {w}", lambda: prefill(40, w, F32, "CW", True, False))
    compiled(f"update {w}", lambda: update(256, 1, 8192, w, BF16, "WC", False))
    compiled(f"verify {w}", lambda: update(5, 4, 72, w, torch.float16, "CW", True))
for batch, offsets, entered in ((1, True, True), (1, True, False), (3, False, True), (3, False, False)):
    compiled(f"training {batch} {offsets} {entered}", lambda: packed(batch, 4, offsets, entered, "silu"))
compiled("training 2", lambda: packed(1, 2, True, True, None))
compiled("training 3", lambda: packed(1, 3, True, True, "silu"))
compiled("odd", lambda: prefill(77, 4, BF16, "WC", False))
compiled("update 1", lambda: update(1, 1, 8192, 4, BF16, "WC", False))
compiled("softplus", lambda: gates._launch(empty(8, 32, 1), empty(32), None, None, empty(8, 32)))
compiled("kda", lambda: gates._launch(empty(8, 4, 128), None, empty(4, 128), -5.0, empty(8, 4, 128)))
for size in (128, 1024, 10000):
    x = empty(8, size, dtype=BF16)
    compiled(f"l2norm {size}", lambda: norms._launch(x, None, None, size, 1, 1e-6, False, True))
    compiled(f"norm {size}", lambda: norms._launch(x, x, empty(size), size, size, 1e-6, size > 128, size == 128))
def decode_ssd(steps, given, entries):
    x, dt, BC = empty(2, steps, 4, 8), empty(2, steps, 4), empty(2, steps, 2, 24)
    option = {"D": empty(4), "z": x, "bias": empty(4)}
    D, z, bias = (option[key] if key in given else None for key in ("D", "z", "bias"))
    kept, accepted = (empty(3, steps, 4, 8, 24), slots(2)) if entries else (None, None)
    inputs = x, dt, empty(4), BC, BC, D, z, bias
    ssd.launch_update(inputs, x, empty(3, 4, 8, 24), slots(2), None, kept, accepted, None)

def decode_delta(steps, copies, channels, entries, norm):
    q, k, v = empty(2, steps, 2, 24), empty(2, steps * copies, 2, 24), empty(2, steps * copies, 4, 20)
    g, beta = empty(2, steps, 4, 24) if channels else empty(2, steps, 4), empty(2, steps * copies, 4)
    kept, accepted = (empty(3, steps, 4, 24, 20), slots(2)) if entries else (None, None)
    pool, o = empty(3, 4, 24, 20), empty(2, steps, 4, 20)
    delta.launch_update((q, k, v, g, beta), o, pool, slots(2), None, kept, accepted, accepted, copies, None, norm, "KV")

for given in ((), ("D",), ("z",), ("bias",), ("D", "z", "bias")):
    for steps, entries in ((1, False), (3, True)):
        compiled(f"decode ssd {given} {steps}", lambda: decode_ssd(steps, given, entries))
for given in ((1, 1, False, False, True), (3, 2, False, True, False), (3, 1, True, True, True)):
    compiled(f"decode delta {given}", lambda: decode_delta(*given))
compiled("copy", lambda: next(yardsticks.copies(1 << 20, "cpu"))[1][0]())
compiled("update yardstick", lambda: next(yardsticks.updates(1 << 20, "cpu"))[1][0]())
print(found)
'''


def test_every_variant_compiles_and_the_fast_ones_well() -> None:
    """No stack frame anywhere; where bytes are the limit, 16-byte accesses and nothing through shared memory."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = ast.literal_eval(ran.stdout.strip().splitlines()[-1])
    assert len(found) == 43
    for name, kernels in found.items():
        assert kernels, name
        for registers, stack, *_ in kernels:
            assert (stack, registers <= 255) == (0, True), name
    for name, most in {"prefill 4": 128, "update 4": 72, "update 1": 64}.items():
        ((registers, _, shared, *_, wide_loads, wide_stores, _),) = found[name]
        assert registers <= most, (name, registers)
        assert shared == 0, (name, shared)
        assert name == "update 1" or (wide_loads >= 9 and wide_stores >= 5), (name, wide_loads, wide_stores)
