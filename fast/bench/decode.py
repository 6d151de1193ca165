"""The rows of the benchmark for decode: what is run, how many bytes it must move, which yardstick and which peers.

A row is prepared on a device as lists of launches, one for each set of slots: a list, captured in one CUDA graph,
goes over a pool several times as large as the L2 cache, at random slots, and every set has tokens of its own.

    python -m statescan.fast.bench.decode NAME ...      # try tiles on rows whose name contains one of these words
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from statescan.fast import delta, ssd
from statescan.fast.bench.timing import Graph, median, time_in_turn
from statescan.fast.bench.yardsticks import Launches
from statescan.fast.launch import ceil_div, power_of_2
from statescan.fast.tiling import Tile

F32, BF16 = torch.float32, torch.bfloat16
SHORT = {"gated_delta_rule": "GDN", "kimi_delta_attention": "KDA", "ssd": "Mamba2"}
ROTATED = 192 << 20
"""Bytes of state that one pass over the sets reads at least: more than three L2 caches of 60 MB."""


@dataclass(frozen=True)
class Decode:
    """One call: sizes, types, and the target it is measured against. Mamba2: heads are groups, keys d_state."""

    family: str
    rows: int
    target: str
    steps: int = 1
    copies: int = 1
    heads: int = 16
    value_heads: int = 32
    keys: int = 128
    values: int = 128
    state: torch.dtype = F32
    layout: str = "VK"
    entries: bool = False

    @property
    def name(self) -> str:
        label = SHORT.get(self.family, f"GDP{self.copies}")
        verify = "" if self.steps == 1 else f" verify {self.steps}{' + entries' if self.entries else ''}"
        kind = "fp32" if self.state == F32 else "bf16"
        return f"{label}{verify} B={self.rows} {kind}{'' if self.family == 'ssd' else ' ' + self.layout}"

    @property
    def slot(self) -> tuple[int, int, int]:
        wide = (self.keys, self.values) if self.layout == "KV" else (self.values, self.keys)
        return (self.value_heads, *wide)

    @property
    def slot_bytes(self) -> int:
        return self.value_heads * self.keys * self.values * self.state.itemsize

    @property
    def moved(self) -> int:
        """Bytes of state and activations that a call must read and write."""
        per_token = 2 * (self.copies + 1) * self.value_heads * self.values + 2 * 2 * self.heads * self.keys
        per_token += 4 * self.value_heads * (self.keys if self.family.startswith("kimi") else 1)
        states = 2 + (self.steps if self.entries else 0)
        return self.rows * (states * self.slot_bytes + self.steps * per_token)

    @property
    def yardstick(self) -> str:
        """`update`: reads slots and writes them back; `copy`: writes elsewhere too, as the entries of a verify do."""
        return "copy" if self.entries else "update"


def _mamba2(rows: int, target: str, **more: Any) -> Decode:
    return Decode("ssd", rows, target, heads=8, value_heads=128, keys=128, values=64, **more)


def rows() -> list[Decode]:
    """Every row of the table: DESIGN 10's shapes for each mixer."""
    table: list[Decode] = []
    gdn, kda, gdp = "gated_delta_rule", "kimi_delta_attention", "gated_delta_product"
    siblings: list[tuple[str, dict[str, Any]]] = [
        (gdn, {}), (kda, {"heads": 32}), (gdp, {"heads": 32, "copies": 2}), (gdp, {"heads": 32, "copies": 3}),
    ]  # fmt: skip
    for family, sizes in siblings:
        for state, one, many in ((F32, "3.3 us", "1.05 update"), (BF16, "2.9 us", "1.12 update")):
            table += [Decode(family, n, one if n == 1 else many, state=state, **sizes) for n in (1, 32, 256)]
    for state, one, many in ((F32, "4.5 us", "1.05 update"), (BF16, "3.4 us", "1.12 update")):
        table += [_mamba2(n, one if n == 1 else many, state=state) for n in (1, 32, 256)]
    table += [Decode(gdn, n, "1.15 update" if n > 1 else "", layout="KV", state=s)
              for s in (F32, BF16) for n in (1, 32, 256)]  # fmt: skip
    table += [Decode(kda, 256, "1.15 update", heads=32, layout="KV")]
    for state, target in ((F32, "1.15 update"), (BF16, "1.4 update")):
        table += [Decode(gdn, n, target if n > 1 else "", steps=4, state=state) for n in (1, 32, 256)]
        table += [_mamba2(32, target, steps=4, state=state)]
    table += [Decode(gdn, n, "1.15 copy" if n > 1 else "", steps=4, entries=True, state=s)
              for s in (F32, BF16) for n in (1, 32, 128)]  # fmt: skip
    return [*table, _mamba2(32, "1.15 copy", steps=4, entries=True)]


@dataclass
class Prepared:
    """A row's tensors on a device."""

    work: Decode
    pool: Tensor
    slots: list[Tensor]
    tokens: list[dict[str, Any]]
    shared: dict[str, Any] = field(default_factory=dict)
    kept: Tensor | None = None

    def ours(self, tile: Tile | None = None) -> Launches:
        """The public operation; with a tile, its launch alone."""
        if tile is None:
            return [lambda i=i: self._call(i) for i in range(len(self.slots))]  # type: ignore[misc]
        outputs = [torch.empty_like(t["x" if self.work.family == "ssd" else "v"][:, : self.work.steps])
                   for t in self.tokens]  # fmt: skip
        return [lambda i=i: self._launch(i, outputs[i], tile) for i in range(len(self.slots))]  # type: ignore[misc]

    def _call(self, i: int) -> Tensor:
        given: dict[str, Any] = {"state_pool": self.pool, "read_slots": self.slots[i], "intermediate_states": self.kept}
        if self.work.family == "ssd":
            return ssd.ssd_update(**self.tokens[i], **self.shared, **given)
        given |= {"use_qk_l2norm": True, "state_layout": self.work.layout}
        if self.work.copies > 1:
            given["num_householder"] = self.work.copies
        function: Any = getattr(delta, f"{self.work.family}_update")
        result: Tensor = function(**self.tokens[i], **given)
        return result

    def _launch(self, i: int, out: Tensor, tile: Tile) -> None:
        tokens, slots = {**self.tokens[i], **self.shared}, self.slots[i]
        if self.work.family == "ssd":
            inputs: Any = tuple(tokens[k] for k in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"))
            ssd.launch_update(inputs, out, self.pool, slots, None, self.kept, None, None, tile=tile)
        else:
            inputs = tuple(tokens[k] for k in ("q", "k", "v", "g", "beta"))
            delta.launch_update(inputs, out, self.pool, slots, None, self.kept, None, None, self.work.copies, None,
                                True, self.work.layout, tile)  # fmt: skip


def prepare(work: Decode, device: str = "cuda", seed: int = 0) -> Prepared:
    """Random tensors for a row: bf16 tokens, float32 gates, a pool at random slots."""
    generator = torch.Generator(device).manual_seed(seed)
    sets = max(2, ceil_div(ROTATED, work.rows * work.slot_bytes))
    count = sets * work.rows

    def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    pool = normal(count, *work.slot, dtype=work.state)
    kept = torch.empty(count, work.steps, *work.slot, device=device, dtype=work.state) if work.entries else None
    order = torch.randperm(count, generator=generator, device=device).to(torch.int32).view(sets, work.rows)
    tokens = [_ssd_tokens(work, normal) if work.family == "ssd" else _delta_tokens(work, normal) for _ in range(sets)]
    shared: dict[str, Any] = {}
    if work.family == "ssd":
        shared = {"A": -normal(work.value_heads, dtype=F32).exp(), "D": normal(work.value_heads, dtype=F32),
                  "dt_bias": normal(work.value_heads, dtype=F32)}  # fmt: skip
    return Prepared(work, pool, list(order), tokens, shared, kept)


def _delta_tokens(work: Decode, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    lead, wide = (work.rows, work.steps), (work.rows, work.steps * work.copies)
    gate = (work.value_heads, *([work.keys] if work.family.startswith("kimi") else []))
    return {
        "q": normal(*lead, work.heads, work.keys), "k": normal(*wide, work.heads, work.keys),
        "v": normal(*wide, work.value_heads, work.values), "g": -normal(*lead, *gate, dtype=F32).abs(),
        "beta": normal(*wide, work.value_heads, dtype=F32).sigmoid(),
    }  # fmt: skip


def _ssd_tokens(work: Decode, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    lead = (work.rows, work.steps)
    x, z = (normal(*lead, work.value_heads, work.values) for _ in range(2))
    B, C = (normal(*lead, work.heads, work.keys) for _ in range(2))
    return {"x": x, "dt": normal(*lead, work.value_heads), "B": B, "C": C, "z": z}


# ---------------------------------------------------------------------------------------------------------------------
# Peers, where they are installed
# ---------------------------------------------------------------------------------------------------------------------


def peers(ready: Prepared) -> Iterator[tuple[str, Launches]]:
    """Name and launches of every peer that can do the row's work; what is not installed is left out."""
    work = ready.work
    if work.entries or work.copies > 1:
        return
    if work.family == "ssd":
        if find_spec("mamba_ssm") is not None and work.steps == 1:
            yield "mamba_ssm selective_state_update", _mamba_ssm(ready)
    elif find_spec("fla") is not None:
        yield "FLA as shipped, gather and scatter", _fla_shipped(ready)
        if work.family == "gated_delta_rule" and work.state == F32 and work.steps == 1:
            for height in (8, 16, 32):
                yield f"FLA kernel in place, neighbouring slots, BV={height}", _fla_in_place(ready, height)
        if work.family == "kimi_delta_attention" and work.steps == 1:
            yield "FLA internal, slots in the kernel", _fla_slots(ready)


def _fla_shipped(ready: Prepared) -> Launches:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    run: Any = fused_recurrent_gated_delta_rule
    if ready.work.family == "kimi_delta_attention":
        run = fused_recurrent_kda

    wide = [slots.long() for slots in ready.slots]  # index_copy_ takes no others

    def launch(i: int) -> None:
        slots = wide[i]
        _, last = run(**ready.tokens[i], initial_state=ready.pool.index_select(0, slots), output_final_state=True,
                      use_qk_l2norm_in_kernel=True, state_v_first=ready.work.layout == "VK")  # fmt: skip
        ready.pool.index_copy_(0, slots, last.to(ready.pool.dtype))

    return [lambda i=i: launch(i) for i in range(len(ready.slots))]  # type: ignore[misc]


def _fla_slots(ready: Prepared) -> Launches:
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    def launch(i: int) -> None:
        fused_recurrent_kda_fwd(
            **ready.tokens[i], initial_state=ready.pool, ssm_state_indices=ready.slots[i], inplace_final_state=True,
            use_qk_l2norm_in_kernel=True, state_v_first=ready.work.layout == "VK",
        )  # fmt: skip

    return [lambda i=i: launch(i) for i in range(len(ready.slots))]  # type: ignore[misc]


def _fla_in_place(ready: Prepared, height: int) -> Launches:
    """Its kernel has no slot indices: neighbouring slots, read and written in place, one warp."""
    from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd_kernel as kernel

    work = ready.work
    outputs = [torch.empty_like(t["v"]) for t in ready.tokens]

    def launch(i: int) -> None:
        states = ready.pool[i * work.rows : (i + 1) * work.rows]
        kernel[(work.values // height * work.rows * work.value_heads,)](
            **ready.tokens[i], gk=None, gv=None, A_log=None, dt_bias=None, o=outputs[i], h0=states, ht=states,
            cu_seqlens=None, scale=work.keys**-0.5, T=work.steps, H=work.heads, HV=work.value_heads, K=work.keys,
            V=work.values, BK=work.keys, BV=height, IS_BETA_HEADWISE=True, USE_QK_L2NORM_IN_KERNEL=True,
            APPLY_BETA_SIGMOID=False, ALLOW_NEG_EIGVAL=False, STATE_V_FIRST=work.layout == "VK", num_warps=1,
            num_stages=3,
        )  # fmt: skip

    return [lambda i=i: launch(i) for i in range(len(ready.slots))]  # type: ignore[misc]


def _mamba_ssm(ready: Prepared) -> Launches:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    work, shared = ready.work, ready.shared
    H, P, R = work.value_heads, work.values, work.keys
    A = shared["A"][:, None, None].expand(H, P, R)
    D, bias = (shared[key][:, None].expand(H, P) for key in ("D", "dt_bias"))

    def launch(i: int) -> None:
        t = {key: value[:, 0] for key, value in ready.tokens[i].items()}
        selective_state_update(
            ready.pool, t["x"], t["dt"][:, :, None].expand(-1, H, P), A, t["B"], t["C"], D, z=t["z"], dt_bias=bias,
            dt_softplus=True, state_batch_indices=ready.slots[i],
        )  # fmt: skip

    return [lambda i=i: launch(i) for i in range(len(ready.slots))]  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------------
# Trying tiles
# ---------------------------------------------------------------------------------------------------------------------


def candidates(work: Decode) -> list[Tile]:
    """Tiles worth a try: heights, the split of the columns, warps."""
    tall, wide, line = power_of_2(work.values), power_of_2(work.keys), 128 // work.state.itemsize
    if work.layout == "KV" and work.family != "ssd":
        shapes = [(height, 1, wide) for height in (8, 16, 32, 64)]
        warps: tuple[int, ...] = (1, 2, 4, 8)
    else:
        inners = sorted({min(wide, size) for size in (line, 2 * line)})
        shapes = [(height, wide // inner, inner) for height in (8, 16, 32) for inner in inners]
        warps = (1, 2, 4)
    fitting = [(h, c, i) for h, c, i in shapes if h <= tall]
    return [Tile(h, c, i, w) for h, c, i in fitting for w in warps if 16 <= h * c * i // (32 * w) <= 128]


def main() -> None:
    words = sys.argv[1:]
    for work in rows():
        if words and not any(word in work.name for word in words):
            continue
        ready = prepare(work)
        graphs = {"as chosen": Graph(ready.ours())}
        graphs |= {str(tuple(tile)): Graph(ready.ours(tile)) for tile in candidates(work)}
        found = [(median(times), label) for label, times in time_in_turn(graphs).items()]
        print(f"{work.name:34s} {work.moved / 1e6:8.1f} MB target {work.target}", flush=True)
        for us, label in [found[0], *sorted(found[1:])[:5]]:
            print(f"    {us:8.2f} us {work.moved / us / 1e6:6.2f} TB/s  {label}", flush=True)
        del ready, graphs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
