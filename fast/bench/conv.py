"""The rows of the benchmark for convolution, gates and norms: what is run, the bytes it must move, target and peers.

Pools lie channel by channel (`[slots, W, C]` in memory, seen as `[slots, C, W]`) unless a row says `CW`, where a
channel's columns lie together, as upstream allocates them.

    python -m statescan.fast.bench.conv NAME ...      # try tiles on rows whose name contains one of these words
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from statescan.fast.bench.timing import Graph, median, time_in_turn
from statescan.fast.bench.yardsticks import Launches, count_sets
from statescan.fast.conv import causal_conv1d, causal_conv1d_prefill, causal_conv1d_update
from statescan.fast.conv_launch import Tile, launch_prefill, launch_update
from statescan.fast.gates import kda_gate
from statescan.fast.norms import rmsnorm_gated

MIXED = (512, 37, 1352, 64, 600, 190, 1024, 101, 333, 800, 128, 1250, 256, 450, 711, 384)
"""Sixteen sequences, 8192 tokens."""
WIDTH = 4


@dataclass(frozen=True)
class Work:
    """One call. Prefill: `lengths` of the sequences; update: `rows` of `steps` tokens."""

    kind: str
    target: str
    channels: int = 8192
    lengths: tuple[int, ...] = ()
    rows: int = 0
    steps: int = 1
    entries: bool = False
    layout: str = "WC"
    pitched: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        size = f"C={self.channels}"
        marks = "".join([" CW" * (self.layout == "CW"), " entries" * self.entries, " pitched" * self.pitched,
                         " fp32" * (self.dtype == torch.float32)])  # fmt: skip
        if self.kind == "conv update":
            return f"conv update B={self.rows}{f' J={self.steps}' * (self.steps > 1)} {size}{marks}"
        return f"{self.kind} {self.tokens} {len(self.lengths)}seq {size}{marks}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths) if self.lengths else self.rows * self.steps

    @property
    def moved(self) -> int:
        """Bytes that must be read and written: x, y, W - 1 columns in and W out, entries; taps are left out."""
        numbers = 2 * self.tokens * self.channels
        if self.kind in ("conv prefill", "conv update"):
            rows = self.rows or len(self.lengths)
            numbers += rows * self.channels * (2 * WIDTH - 1 + (self.steps * WIDTH if self.entries else 0))
        if self.kind in ("conv training", "gated norm"):
            numbers += self.tokens * self.channels
        if self.kind == "kda gate":
            numbers += self.tokens * self.channels  # the result is in float32
        return numbers * self.dtype.itemsize

    @property
    def yardstick(self) -> str:
        return "copy"


def rows() -> list[Work]:
    """Every row of the table."""
    one, mixed, four = (8192,), MIXED, MIXED * 4
    prefill, update = "conv prefill", "conv update"
    table = [Work(prefill, "1.15 copy", channels=c, lengths=n) for c in (8192, 10240) for n in (one, mixed, four)]
    table += [Work(prefill, "", channels=8191, lengths=mixed), Work(prefill, "", lengths=mixed, pitched=True),
              Work(prefill, "", lengths=(32,) * 256), Work(prefill, "", lengths=mixed, layout="CW"),
              Work(prefill, "", lengths=(128,)), Work(prefill, "", lengths=mixed, dtype=torch.float32)]  # fmt: skip
    targets = {1: "1.9 us", 32: "3 us", 256: "10 us"}
    table += [Work(update, target, rows=n) for n, target in targets.items()]
    table += [Work(update, "", rows=n, layout="CW") for n in targets]
    table += [Work(update, "", rows=n, steps=4, entries=e) for n in (1, 32, 256) for e in (False, True)]
    table += [Work("conv training", "", lengths=mixed)]
    table += [Work("gated norm", "", channels=4096, lengths=(n,)) for n in (1, 32, 256, 8192)]
    return [*table, *(Work("kda gate", "", channels=4096, lengths=(n,)) for n in (1, 256, 8192))]


@dataclass
class Prepared:
    """A row's tensors on a device: one set of everything that is read or written for each launch."""

    work: Work
    x: list[Tensor]
    weight: Tensor
    bias: Tensor
    pool: Tensor
    slots: list[Tensor]
    cu_seqlens: Tensor
    kept: Tensor | None

    def ours(self, tile: Tile | None = None) -> Launches:
        """The public operation; with a tile, its launch alone."""
        run = self._call if tile is None else (lambda i: self._launch(i, tile))
        return [lambda i=i: run(i) for i in range(len(self.x))]  # type: ignore[misc]

    def _call(self, i: int) -> Any:
        x, w, b, kind = self.x[i], self.weight, self.bias, self.work.kind
        if kind == "conv prefill":
            return causal_conv1d_prefill(x, w, b, self.cu_seqlens, self.pool, self.slots[i], activation="silu")
        if kind == "conv update":
            return causal_conv1d_update(x, w, b, self.pool, self.slots[i], None, self.kept, activation="silu")
        if kind == "conv training":
            return self._train(x)
        if kind == "gated norm":
            return rmsnorm_gated(_heads(x), _heads(self.x[i - 1]), b[:128], norm_before_gate=True)
        return kda_gate(_heads(x), b[:32], w[:, 0].reshape(-1, 128), lower_bound=-5.0)

    def _train(self, x: Tensor) -> Any:
        x, weight, bias = (t.detach().requires_grad_() for t in (x, self.weight, self.bias))
        y, _ = causal_conv1d(x, weight, bias, None, self.cu_seqlens, activation="silu")
        return torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))

    def _launch(self, i: int, tile: Tile) -> Tensor:
        x, y = self.x[i], torch.empty_like(self.x[i], memory_format=torch.contiguous_format)
        if self.work.kind == "conv prefill":
            launch_prefill(x, y, self.weight, self.bias, self.cu_seqlens, self.pool, self.pool, self.slots[i],
                           self.slots[i], None, None, len(self.work.lengths), "silu", tile)  # fmt: skip
        else:
            launch_update(x, y, self.weight, self.bias, self.pool, self.slots[i], None, self.kept, None, None, "silu",
                          tile)  # fmt: skip
        return y


def _heads(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, 128)


def prepare(work: Work, device: str = "cuda", seed: int = 0) -> Prepared:
    """Random tensors for a row."""
    generator = torch.Generator(device).manual_seed(seed)
    sets = count_sets(work.moved)
    requests = work.rows or len(work.lengths)
    C, lead = work.channels, (work.rows, work.steps) if work.rows else (1, work.tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=work.dtype)

    x = [normal(*lead, C + 64 * work.pitched)[..., :C] for _ in range(sets)]
    if work.layout == "CW":
        pool = normal(sets * requests, C, WIDTH)
        kept = normal(sets * requests, work.steps, C, WIDTH) if work.entries else None
    else:
        pool = normal(sets * requests, WIDTH, C).mT
        kept = normal(sets * requests, work.steps, WIDTH, C).mT if work.entries else None
    order = torch.randperm(sets * requests, generator=generator, device=device).to(torch.int32).view(sets, requests)
    offsets = torch.tensor([0, *accumulate(work.lengths)], dtype=torch.int32, device=device)
    return Prepared(work, x, normal(C, WIDTH), normal(C), pool, list(order), offsets, kept)


# ---------------------------------------------------------------------------------------------------------------------
# Peers, where they are installed
# ---------------------------------------------------------------------------------------------------------------------


def peers(ready: Prepared) -> Iterator[tuple[str, Launches]]:
    """Name and launches of every peer that can do the row's work; what is not installed is left out.

    FLA keeps windows densely and knows no slots, causal-conv1d's packed call knows no windows: both do less than asked.
    """
    work = ready.work
    if work.entries or work.dtype != torch.bfloat16:
        return
    if find_spec("fla") is not None:
        if work.kind == "conv prefill":
            yield "FLA Triton, dense windows", _fla_prefill(ready)
        elif work.kind == "conv update" and work.steps == 1:
            yield "FLA Triton, dense windows", _fla_update(ready)
    if find_spec("causal_conv1d") is not None and find_spec("causal_conv1d_cuda") is not None:
        if work.kind == "conv prefill":
            yield "causal-conv1d CUDA, no windows", _dao_prefill(ready)
        elif work.kind == "conv update":
            yield "causal-conv1d CUDA, slots", _dao_update(ready)


def _fla_prefill(ready: Prepared) -> Launches:
    from fla.modules.causal_conv1d import causal_conv1d as run

    requests = len(ready.work.lengths)

    def launch(i: int) -> Any:
        windows = ready.pool[i * requests : (i + 1) * requests]
        with torch.no_grad():
            return run(ready.x[i], ready.weight, ready.bias, initial_state=windows, output_final_state=True,
                       activation="silu", cu_seqlens=ready.cu_seqlens)  # fmt: skip

    return [lambda i=i: launch(i) for i in range(len(ready.x))]  # type: ignore[misc]


def _fla_update(ready: Prepared) -> Launches:
    from fla.modules.causal_conv1d import causal_conv1d_update as run

    requests = ready.work.rows
    dense = ready.pool.contiguous()

    def launch(i: int) -> Any:
        windows = dense[i * requests : (i + 1) * requests]
        return run(ready.x[i], windows, weight=ready.weight, bias=ready.bias, activation="silu")

    return [lambda i=i: launch(i) for i in range(len(ready.x))]  # type: ignore[misc]


def _dao_prefill(ready: Prepared) -> Launches:
    from causal_conv1d import causal_conv1d_fn as run

    work = ready.work
    ids = torch.repeat_interleave(
        torch.arange(len(work.lengths), dtype=torch.int32, device=ready.x[0].device),
        torch.tensor(work.lengths, device=ready.x[0].device),
    )[None]

    def launch(i: int) -> Any:
        with torch.no_grad():
            return run(ready.x[i].mT, ready.weight, ready.bias, seq_idx=ids, activation="silu")

    return [lambda i=i: launch(i) for i in range(len(ready.x))]  # type: ignore[misc]


def _dao_update(ready: Prepared) -> Launches:
    from causal_conv1d import causal_conv1d_update as run

    columns = ready.pool[..., 1:]
    if ready.work.layout == "CW":
        columns = columns.contiguous()

    def launch(i: int) -> Any:
        return run(ready.x[i].mT, columns, ready.weight, ready.bias, "silu", conv_state_indices=ready.slots[i])

    return [lambda i=i: launch(i) for i in range(len(ready.x))]  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------------
# Trying tiles
# ---------------------------------------------------------------------------------------------------------------------


def candidates(work: Work) -> list[Tile]:
    """Tiles worth a try: tokens or rows, channels, warps."""
    if work.kind == "conv prefill":
        shapes = product((8, 16, 32, 64, 128), (256, 512, 1024, 2048), (1, 2, 4, 8))
        return [Tile(t, c, w) for t, c, w in shapes if 128 <= c // w <= 256]
    shapes = product((1, 2, 4, 8), (64, 128, 256, 512, 1024), (1, 2, 4))
    return [Tile(n, c, w) for n, c, w in shapes if n <= work.rows and 64 <= n * c // w <= 512]


def main() -> None:
    words = sys.argv[1:]
    for work in rows():
        if work.kind not in ("conv prefill", "conv update") or (words and not any(w in work.name for w in words)):
            continue
        ready = prepare(work)
        graphs = {"as chosen": Graph(ready.ours())}
        graphs |= {str(tuple(tile)): Graph(ready.ours(tile)) for tile in candidates(work)}
        times = {label: median(found) for label, found in time_in_turn(graphs, 7).items()}
        print(f"{work.name:34s} {work.moved / 1e6:8.1f} MB target {work.target}", flush=True)
        best = sorted(times, key=lambda label: times[label])[:5]
        for label in ["as chosen", *best]:
            print(f"    {times[label]:8.2f} us {work.moved / times[label] / 1e6:6.2f} TB/s  {label}", flush=True)
        del ready, graphs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
