"""The rows of the benchmark for prefill: what is run, the bytes it must move, target and peers.

    python -m statescan.fast.bench.prefill NAME ...     # try tiles on rows whose name contains one of these words
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

from statescan.fast import delta, ssd
from statescan.fast.bench.conv import MIXED
from statescan.fast.bench.decode import BF16, F32, SHORT
from statescan.fast.bench.timing import Graph, median, time_in_turn
from statescan.fast.bench.yardsticks import Launches, count_sets
from statescan.fast.prefill import Tile, launch_delta, launch_ssd


@dataclass(frozen=True)
class Prefill:
    """One call: sizes, lengths, and the target it is measured against. Mamba2: heads are groups, keys d_state."""

    family: str
    lengths: tuple[int, ...]
    target: str
    copies: int = 1
    heads: int = 16
    value_heads: int = 32
    keys: int = 128
    values: int = 128
    state: torch.dtype = F32

    @property
    def name(self) -> str:
        return f"{SHORT.get(self.family, f'GDP{self.copies}')} prefill {self.tokens} {len(self.lengths)}seq"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def moved(self) -> int:
        """Bytes of tokens, outputs and states that a call must read and write once."""
        token = 2 * (self.copies + 1) * self.heads * self.keys + 2 * (self.copies + 1) * self.value_heads * self.values
        if self.family == "ssd":
            token = 2 * 2 * self.heads * self.keys + 2 * 3 * self.value_heads * self.values
        token += 4 * self.value_heads * ((self.keys if self.family.startswith("kimi") else 1) + self.copies)
        states = 2 * len(self.lengths) * self.value_heads * self.keys * self.values * self.state.itemsize
        return self.tokens * token + states

    @property
    def yardstick(self) -> str:
        return "copy"


def rows() -> list[Prefill]:
    """Every row of the table."""
    gdn, gdp, kda = "gated_delta_rule", "gated_delta_product", "kimi_delta_attention"
    mamba: dict[str, Any] = {"heads": 8, "value_heads": 128, "values": 64}
    table = []
    mixed, single = ("150 us", "355 us", "426 us", "596 us", "329 us"), ("240 us", "", "", "", "")
    for lengths, limits in ((MIXED, mixed), ((8192,), single), (MIXED * 4, ("",) * 5)):
        table += [Prefill(gdn, lengths, limits[0]), Prefill(kda, lengths, limits[1], heads=32),
                  Prefill(gdp, lengths, limits[2], copies=2, heads=32),
                  Prefill(gdp, lengths, limits[3], copies=3, heads=32),
                  Prefill("ssd", lengths, limits[4], **mamba)]  # fmt: skip
    return table


@dataclass
class Prepared:
    """A row's tensors on a device: one set of tokens and slots for each launch."""

    work: Prefill
    tokens: list[dict[str, Any]]
    shared: dict[str, Any]
    pool: Tensor
    slots: list[Tensor]
    cu_seqlens: Tensor

    def ours(self, tile: Tile | None = None, chunk_warps: int = 4) -> Launches:
        """The public operation; with a tile, its launches alone."""
        run = self._call if tile is None else (lambda i: self._launch(i, tile, chunk_warps))
        return [lambda i=i: run(i) for i in range(len(self.slots))]  # type: ignore[misc]

    def _call(self, i: int) -> Tensor:
        given: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "state_pool": self.pool, "read_slots": self.slots[i]}
        if self.work.family == "ssd":
            return ssd.ssd_prefill(**self.tokens[i], **self.shared, **given)
        if self.work.copies > 1:
            given["num_householder"] = self.work.copies
        function: Any = getattr(delta, f"{self.work.family}_prefill")
        out: Tensor = function(**self.tokens[i], **given, use_qk_l2norm=True, state_layout="VK")
        return out

    def _launch(self, i: int, tile: Tile, chunk_warps: int) -> Tensor:
        t, given = self.tokens[i], (self.cu_seqlens, self.pool, self.slots[i], None, None, None)
        if self.work.family == "ssd":
            inputs = tuple({**t, **self.shared}[key] for key in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"))
            y = torch.empty_like(t["x"])
            launch_ssd(inputs, y, *given, tile=tile)
            return y
        o = torch.empty_like(t["v"][:, : self.work.tokens])
        launch_delta((t["q"], t["k"], t["v"], t["g"], t["beta"]), o, *given, self.work.copies, None, True, "VK", tile,
                     chunk_warps)  # fmt: skip
        return o


def prepare(work: Prefill, device: str = "cuda", seed: int = 0) -> Prepared:
    """Random tensors for a row."""
    generator = torch.Generator(device).manual_seed(seed)
    sets, N, T, wide = count_sets(work.moved), len(work.lengths), work.tokens, work.tokens * work.copies
    H, HV, K, V = work.heads, work.value_heads, work.keys, work.values

    def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    tokens: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    for _ in range(sets):
        if work.family == "ssd":
            tokens.append({"x": normal(1, T, HV, V), "dt": normal(1, T, HV), "B": normal(1, T, H, K),
                           "C": normal(1, T, H, K), "z": normal(1, T, HV, V)})  # fmt: skip
        else:
            gate = (HV, K) if work.family.startswith("kimi") else (HV,)
            tokens.append({
                "q": normal(1, T, H, K), "k": normal(1, wide, H, K), "v": normal(1, wide, HV, V),
                "g": -torch.nn.functional.softplus(normal(1, T, *gate, dtype=F32)),
                "beta": normal(1, wide, HV, dtype=F32).sigmoid(),
            })  # fmt: skip
    if work.family == "ssd":
        shared = {"A": -normal(HV, dtype=F32).exp(), "D": normal(HV, dtype=F32), "dt_bias": normal(HV, dtype=F32)}
    pool = normal(sets * N, HV, V, K, dtype=F32).to(work.state)
    order = torch.randperm(sets * N, generator=generator, device=device).to(torch.int32).view(sets, N)
    offsets = torch.tensor([0, *accumulate(work.lengths)], dtype=torch.int32, device=device)
    return Prepared(work, tokens, shared, pool, list(order), offsets)


# ---------------------------------------------------------------------------------------------------------------------
# Peers, where they are installed
# ---------------------------------------------------------------------------------------------------------------------


def peers(ready: Prepared) -> Iterator[tuple[str, Launches]]:
    """Name and launches of every peer that can do the row's work; what is not installed is left out.

    FLA takes and returns dense states and knows no slots; mamba_ssm's scan is asked for no entering state and returns
    final ones densely: both do less than asked.
    """
    if ready.work.family == "ssd":
        if find_spec("mamba_ssm") is not None:
            yield "mamba_ssm chunk 128, no entering states", _mamba_ssm(ready)
    elif find_spec("fla") is not None:
        yield "FLA, dense states", _fla(ready)


def _fla(ready: Prepared) -> Launches:
    from fla.ops.gated_delta_product import chunk_gated_delta_product
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    work, N = ready.work, len(ready.work.lengths)
    dense = ready.pool[:N].mT.contiguous()
    run: Any = {"gated_delta_rule": chunk_gated_delta_rule, "kimi_delta_attention": chunk_kda}.get(
        work.family, chunk_gated_delta_product
    )
    more: dict[str, Any] = {"num_householder": work.copies} if work.copies > 1 else {}
    offsets = ready.cu_seqlens.long()

    def launch(i: int) -> Any:
        with torch.no_grad():
            return run(**ready.tokens[i], initial_state=dense, output_final_state=True, use_qk_l2norm_in_kernel=True,
                       cu_seqlens=offsets, **more)  # fmt: skip

    return [lambda i=i: launch(i) for i in range(len(ready.slots))]  # type: ignore[misc]


def _mamba_ssm(ready: Prepared) -> Launches:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as run

    lengths = torch.tensor(ready.work.lengths, device=ready.pool.device)
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths).to(torch.int32)[None]

    def launch(i: int) -> Any:
        t, s = ready.tokens[i], ready.shared
        with torch.no_grad():
            return run(t["x"], t["dt"], s["A"], t["B"], t["C"], chunk_size=128, D=s["D"], z=t["z"],
                       dt_bias=s["dt_bias"], seq_idx=ids, cu_seqlens=ready.cu_seqlens, dt_softplus=True,
                       return_varlen_states=True)  # fmt: skip

    return [lambda i=i: launch(i) for i in range(len(ready.slots))]  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------------
# Trying tiles
# ---------------------------------------------------------------------------------------------------------------------


def try_tiles(work: Prefill) -> None:
    """Every tile for one row, in turn, best first."""
    ready = prepare(work)
    graphs: dict[str, Graph] = {}
    for values, warps, stages in product((16, 32, 64, 128), (4, 8), (1, 2, 3)):
        if values > max(16, work.values) or (values >= 64) < (warps == 8):
            continue
        for chunk in (4, 8) if (values, warps, stages) == (64, 4, 2) and work.family != "ssd" else (4,):
            name = f"{values} values, {warps} warps, {stages} stages, chunks {chunk} warps"
            try:
                graphs[name] = Graph(ready.ours(Tile(values, warps, stages), chunk))
            except Exception as error:  # too much shared memory, most often
                print(f"  {name}: {type(error).__name__}")
    times = time_in_turn(graphs, 5)
    print(work.name)
    for name in sorted(graphs, key=lambda name: median(times[name]))[:8]:
        print(f"  {median(times[name]):9.2f} us  {name}", flush=True)


if __name__ == "__main__":
    for each in rows():
        if any(word in each.name for word in sys.argv[1:]):
            try_tiles(each)
            torch.cuda.empty_cache()
