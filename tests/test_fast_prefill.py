"""Prefill on slot pools against float64, interpreted: chunk edges, every kind of row, snapshots, types and layouts.

These rows are longer than a chunk; vectors run in `test_fast_vectors`. On a GPU `fast.bench.check_prefill` asks the
same at real sizes.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch

from statescan.fast import delta, prefill
from statescan.fast.bench import check_conv, check_decode, check_prefill
from statescan.fast.bench.check_prefill import BF16, F16, F32, SIBLINGS, check_pack, make
from statescan.spec.contract import UnsupportedError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every_sibling = pytest.mark.parametrize(("name", "copies"), SIBLINGS)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (check_conv, check_decode, check_prefill):
        monkeypatch.setattr(module, "DEVICE", DEVICE)


@every_sibling
def test_rows_over_several_chunks(name: str, copies: int) -> None:
    """Seven rows in place, fresh, score only, padding, split; more places of chunks than rows."""
    lengths = (65, 0, 130, 3, 64, 1, 100)
    check_pack(make(name, copies, lengths=lengths, keys=24, values=20, heads=1, value_heads=2, tokens=BF16))


@every_sibling
def test_other_types_and_layouts(name: str, copies: int) -> None:
    for layout, state, tokens in (("KV", BF16, F32), ("VK", F16, F16)):
        check_pack(make(name, copies, lengths=(70, 2), keys=17, values=16, heads=1, value_heads=2, layout=layout,
                        state=state, tokens=tokens, seed=3))  # fmt: skip


@every_sibling
def test_packs_with_nothing_in_them(name: str, copies: int) -> None:
    sizes = {"keys": 5, "values": 3, "heads": 1, "value_heads": 2}
    for lengths, tail, marks in (((), 5, False), ((0, 0, 0, 0, 0), 3, True)):
        check_pack(make(name, copies, lengths=lengths, tail=tail, marks=marks, **sizes))
    for lengths in ((), (0, 0, 0)):
        call = make(name, copies, lengths=lengths, tail=0, marks=False, **sizes)
        before = call.pool.clone()
        assert call.run().shape == (1, 0, 2, 3)
        if not lengths:
            check_conv.same(call.pool, before, "pool")


@every_sibling
def test_views_and_rows_that_store_nothing(name: str, copies: int) -> None:
    """Tokens that are slices of wider rows, a pool cut out of pages, offsets with a stride; then scores alone."""
    sizes = {"keys": 5, "values": 3, "heads": 1, "value_heads": 2}
    call = make(name, copies, lengths=(3, 66, 2), plain=True, marks=False, **sizes)
    slots, heads, third, last = call.pool.shape
    page = torch.full((2 * slots, heads, third + 1, last + 2), 7.0, device=DEVICE)
    pool = page[::2, :, :-1, :-2]
    pool.copy_(call.pool)
    tokens = {key: t if t.ndim < 3 else check_decode.sliced(t, 3) for key, t in call.tokens.items()}
    offsets = torch.stack([call.rows["cu_seqlens"]] * 2, 1)[:, 0]
    rows = {**call.rows, "cu_seqlens": offsets}
    check_pack(check_prefill.replace(call, tokens=tokens, pool=pool, rows=rows))
    pool.fill_(7.0)
    assert bool((page == 7.0).all())
    scores = make(name, copies, lengths=(3, 70), plain=True, **sizes)
    nowhere = torch.full_like(scores.rows["write_slots"], -1)
    check_pack(check_prefill.replace(scores, rows={**scores.rows, "write_slots": nowhere}))


@every_sibling
def test_a_cut_on_the_grid_changes_no_bit(name: str, copies: int) -> None:
    sizes = {"keys": 16, "values": 16, "heads": 1, "value_heads": 2}
    call = make(name, copies, lengths=(150,), tail=0, marks=False, plain=True, **sizes)
    parts, whole = call.twin(), call.run()
    pieces = []
    for a, b in ((0, 64), (64, 128), (128, 150)):
        tokens = {key: t if t.ndim < 3 else t[:, a * t.shape[1] // 150 : b * t.shape[1] // 150]
                  for key, t in parts.tokens.items()}  # fmt: skip
        rows = {**parts.rows, "cu_seqlens": torch.tensor([0, b - a], device=DEVICE)}
        pieces.append(check_prefill.replace(parts, tokens=tokens, rows=rows).run())
    check_conv.same(torch.cat(pieces, 1), whole, "outputs")
    check_conv.same(parts.pool, call.pool, "pool")


def test_strong_gates_stay_exact_between_neighbours() -> None:
    """After a decay to nothing the next tokens see each other undamped, channel by channel."""
    T, K = 40, 4
    g = torch.zeros(1, T, 1, K, device=DEVICE)
    g[0, 5] = g[0, 20] = -1024.0
    one = torch.ones(1, T, 1, K, device=DEVICE) / 2
    v, beta = torch.arange(1.0, T + 1, device=DEVICE).view(1, T, 1, 1), torch.ones(1, T, 1, device=DEVICE)
    pool = torch.full((1, 1, K, 1), 512.0, device=DEVICE)
    index = torch.tensor([0, T], device=DEVICE)
    o = delta.kimi_delta_attention_prefill(one, one, v, g, beta, index, pool, index[:1], scale=1.0)
    assert o.ravel().tolist() == v.ravel().tolist()


def test_indices_out_of_range_are_refused_before_anything_is_written() -> None:
    call = make("gated_delta_rule", lengths=(3, 2), keys=16, values=16, marks=False, plain=True)
    before = call.pool.clone()
    wild = torch.tensor([0, 99], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="SLOT-5"):
        check_prefill.replace(call, rows={**call.rows, "read_slots": wild, "write_slots": None}).run(check=True)
    check_conv.same(call.pool, before, "pool")


def test_more_copies_than_rows_of_a_chunk_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="num_householder=65"):
        prefill.chunk_tokens(65)


COMPILE = '''
import torch
from statescan.fast import prefill
from statescan.fast.bench.generated import describe, recording

empty, found = torch.empty, {}

def compiled(name, launch):
    with recording() as kernels:
        launch()
    found[name] = [tuple(describe(kernel)) for kernel in kernels]

def run_delta(copies, channels, marked, dtype, layout):
    q, k, v = (empty(1, 256 * n, h, 64, dtype=dtype) for n, h in ((1, 2), (copies, 2), (copies, 4)))
    g, beta = empty(1, 256, 4, 64) if channels else empty(1, 256, 4), empty(1, 256 * copies, 4)
    index, pool = torch.zeros(3, dtype=torch.int32), empty(3, 4, 64, 64)
    marks = (index, empty(3, 4, 64, 64)) if marked else (None, None)
    prefill.launch_delta((q, k, v, g, beta), empty(1, 256, 4, 64, dtype=dtype), index, pool, index[:2], None, *marks,
                         copies, None, True, layout)

def run_ssd(full, dtype):
    x, BC = empty(1, 256, 4, 64, dtype=dtype), empty(1, 256, 2, 64, dtype=dtype)
    index = torch.zeros(3, dtype=torch.int32)
    D, z, bias, *marks = (empty(4), x, empty(4), index, empty(3, 4, 64, 64)) if full else (None,) * 5
    inputs = x, empty(1, 256, 4), empty(4), BC, BC, D, z, bias
    prefill.launch_ssd(inputs, empty(1, 256, 4, 64, dtype=dtype), index, empty(3, 4, 64, 64), index[:2], None, *marks)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
compiled("gdn", lambda: run_delta(1, False, False, BF16, "VK"))
compiled("gdn marked", lambda: run_delta(1, False, True, BF16, "KV"))
compiled("gdp f16", lambda: run_delta(3, False, False, F16, "VK"))
compiled("kda marked", lambda: run_delta(1, True, True, BF16, "VK"))
compiled("gdn f32", lambda: run_delta(1, False, False, F32, "VK"))
compiled("ssd", lambda: run_ssd(False, BF16))
compiled("ssd full", lambda: run_ssd(True, BF16))
compiled("ssd f32", lambda: run_ssd(True, F32))
print(found)
'''


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles the kernels when it runs them")
def test_every_variant_compiles() -> None:
    """The interpreter accepts what the compiler does not; in the fast variant nothing is spilled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = ast.literal_eval(ran.stdout.strip().splitlines()[-1])
    assert len(found) == 8
    assert all(stack == 0 for _, stack, *_ in found["gdn"]), found["gdn"]
