"""What check_gpu asks of serving: traces and schedules through the mixers, and whole steps captured in one graph.

A trace runs as it is, and with every hook call as the replay of a graph that was captured with another step's contents.
A whole step is two layers with their projections: decode rows with drafts and entries to resume from, pieces with
snapshots, padding in both partitions and behind them. It is captured once and replayed with other requests, slots and
lengths; eager calls must give the same bits, the reference on the CPU the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from statescan.conformance.adapters.reference import adapter as reference
from statescan.conformance.replay import Arrays, on_object, replay
from statescan.conformance.replay_random import THROUGH, random_trace
from statescan.conformance.replay_toy import replay_toy
from statescan.fast.bench.check_conv import BF16, F32, Check, same
from statescan.fast.metadata import StepArrays
from statescan.fast.mixers import MIXERS, RecurrentMixer, build_mixer
from statescan.goldens.store import load_traces
from statescan.reference.host.mixer_config import KINDS, MixerConfig
from statescan.reference.host.step import BatchDimensions, SlotAllocator, StepContext

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D_MODEL = 32
LOOSE = {F32: 2.0**-13, BF16: 2.0**-3}
"""Relative: two layers, each a projection, a convolution, some two hundred tokens and a norm."""
SCHEDULES, SHARDS = 50, 4
LAYER_MAP = (0, None, 1)
LAYERS = (1, 3)
Tensors = Sequence[Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Graphs
# ---------------------------------------------------------------------------------------------------------------------


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """A call as one graph: each replay gives the tensors it was captured with. On the CPU the call itself."""
    run()  # kernels are compiled and libraries ready before a capture
    if DEVICE == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replayed() -> Any:
        graph.replay()
        return out

    return replayed


@dataclass
class Graphed:
    """A mixer whose hooks run as graphs, one for each set of shapes, with contents copied in and out."""

    mixer: RecurrentMixer
    graphs: dict[Any, tuple[list[Tensor], Callable[[], Tensor]]] = field(default_factory=dict)
    replays: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "layer_number":
            self.mixer.layer_number = value
        else:
            super().__setattr__(name, value)

    def run(self, key: Any, tensors: Tensors, call: Callable[[Tensors], Tensor]) -> Tensor:
        key = (key, *((t.shape, t.dtype) for t in tensors))
        if key not in self.graphs:
            own = [t.clone() for t in tensors]
            self.graphs[key] = own, captured(partial(call, own))
        own, replayed = self.graphs[key]
        for mine, given in zip(own, tensors, strict=True):
            mine.copy_(given)
        out = replayed().clone()
        for mine, given in zip(own, tensors, strict=True):
            given.copy_(mine)
        self.replays += 1
        return out

    def ssm_decode(self, *tensors: Tensor) -> Tensor:
        return self.run("decode", tensors, lambda own: self.mixer.ssm_decode(*own))

    def ssm_prefill(self, zxBCdt: Tensor, conv_state: Tensor, ssm_state: Tensor, context: Any) -> Tensor:
        names, arrays = zip(*vars(context.mamba_metadata).items(), strict=True)
        kept = vars(context.mamba_slot_allocator)

        def call(own: Tensors) -> Tensor:
            rows, windows, states = own[:3]
            found = self.context(context, names, own[5:], own[3:5], ())
            return self.mixer.ssm_prefill(rows, windows, states, found)

        return self.run("prefill", (zxBCdt, conv_state, ssm_state, *kept.values(), *arrays), call)

    def ssm_dynamic_inference(self, hidden_states: Tensor, context: Any) -> tuple[Tensor, Tensor | None]:
        names, arrays = zip(*vars(context.mamba_metadata).items(), strict=True)
        kept, number = vars(context.mamba_slot_allocator), self.mixer.layer_number
        drafts = context.num_speculative_tokens
        dims = tuple(vars(context.padded_batch_dimensions).values())
        layer = [*context.mamba_states_cache(number)]
        layer += context.mamba_states_cache(number, intermediate=True) if drafts else []

        def call(own: Tensors) -> Tensor:
            found = self.context(context, names, own[3 + len(layer) :], own[1:3], own[3 : 3 + len(layer)])
            return self.mixer.ssm_dynamic_inference(own[0], found)[0]

        tensors = (hidden_states, *kept.values(), *layer, *arrays)
        return self.run((number, drafts, dims, names), tensors, call), None

    @staticmethod
    def context(like: Any, names: Sequence[str], arrays: Tensors, kept: Tensors, layer: Tensors) -> Any:
        """The context with a graph's own tensors."""
        pools, entries = tuple(layer[:2]), tuple(layer[2:])
        return SimpleNamespace(
            mamba_metadata=SimpleNamespace(**dict(zip(names, arrays, strict=True))), layer_map=like.layer_map,
            mamba_slot_allocator=SlotAllocator(*kept), padded_batch_dimensions=like.padded_batch_dimensions,
            num_speculative_tokens=like.num_speculative_tokens,
            mamba_states_cache=lambda number, intermediate=False: entries if intermediate else pools,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Traces and schedules
# ---------------------------------------------------------------------------------------------------------------------


def stories(kind: str, words: str = "") -> Iterator[Mapping[str, Any]]:
    """The traces of one kind of mixer."""
    for name, trace in load_traces().items():
        if trace["mixer"]["kind"] == kind and words in name:
            yield trace


def make(described: Mapping[str, Any]) -> RecurrentMixer:
    return build_mixer(described).to(DEVICE)


def check_told(trace: Mapping[str, Any], told: Any, way: str) -> None:
    if not told.passed:
        raise AssertionError(f"{trace['id']} through {way}: {told.status}: {told.message}")


def traces(kind: str, words: str = "") -> None:
    """Every trace through the hooks, the mixin and a stack."""
    for trace in stories(kind, words):
        for way in THROUGH:
            check_told(trace, replay(trace, make(trace["mixer"]), arrays=Arrays(device=DEVICE), through=way), way)


def graphed_traces(kind: str, words: str = "") -> None:
    """The same with every call a graph's replay; most graphs serve several steps."""
    graphs = replays = 0
    for trace in stories(kind, words):
        for way in THROUGH:
            mixer = Graphed(make(trace["mixer"]))
            check_told(trace, replay(trace, mixer, arrays=Arrays(device=DEVICE), through=way), way)
            graphs, replays = graphs + len(mixer.graphs), replays + mixer.replays
    if replays <= graphs:
        raise AssertionError(f"{replays} replays of {graphs} graphs: none had another step in it")


def toys() -> None:
    """The mixin alone, by its log."""
    described = next(stories("gdn"))["mixer"]
    for trace in load_traces().values():
        if trace["mixer"]["kind"] == "toy":
            check_told(trace, replay_toy(trace, on_object(make(described), Arrays(device=DEVICE))), "mixin")


def schedules(kind: str, count: int = SCHEDULES, shards: int = SHARDS) -> None:
    """Random schedules, each request as alone; over several processes, because every mixer has kernels of its own."""
    jobs = [(kind, range(first, count, shards)) for first in range(shards)]
    if shards == 1:
        wrong = run_schedules(jobs[0])
    else:
        with ProcessPoolExecutor(shards, mp_context=get_context("spawn")) as pool:
            wrong = [text for found in pool.map(run_schedules, jobs) for text in found]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {count} schedules: {wrong[0]}")


def run_schedules(job: tuple[str, Sequence[int]]) -> list[str]:
    """What was wrong with the schedules of these seeds."""
    kind, seeds = job
    wrong = []
    for seed in seeds:
        trace, way = random_trace(kind, seed), THROUGH[seed % len(THROUGH)]
        mixer = make(trace["mixer"])
        try:
            check_told(trace, replay(trace, mixer, arrays=Arrays(device=DEVICE), through=way, derived=seed % 2 == 0),
                       way)  # fmt: skip
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


# ---------------------------------------------------------------------------------------------------------------------
# Whole steps
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Padded sizes of a step, and how long its pieces are."""

    decode: int = 6
    drafts: int = 2
    prefill: int = 4
    tokens: int = 240
    spare: int = 9
    snapshots: int = 3
    slots: int = 16
    heads: int = 2
    width: int = 32

    @property
    def rows(self) -> int:
        return self.decode * (1 + self.drafts) + self.tokens + self.spare

    def config(self, kind: str) -> MixerConfig:
        """A mixer with everything in it: groups, gates, norm, biases."""
        if kind == "mamba2":
            return MixerConfig(kind, heads=2 * self.heads, groups=self.heads, headdim=self.width, d_state=self.width,
                               conv_bias=True)  # fmt: skip
        return MixerConfig(kind, heads=self.heads, value_heads=2 * self.heads, key_dim=self.width,
                           value_dim=self.width // 2, num_householder=2 if kind == "gdp" else 1,
                           lower_bound=-5.0 if kind == "kda" else None)  # fmt: skip


TINY = Sizes(decode=2, drafts=1, prefill=2, tokens=6, spare=1, snapshots=1, slots=6, heads=1, width=4)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


class World:
    """Two layers and all that a step of them reads and writes, at places that stay."""

    def __init__(self, kind: str, dtype: torch.dtype, sizes: Sizes, seed: int = 0) -> None:
        self.sizes, self.dtype, self.config = sizes, dtype, sizes.config(kind)
        draw = torch.Generator().manual_seed(seed)
        self.described = [self.describe(draw) for _ in LAYERS]
        self.mixers = nn.ModuleList(build_mixer(described, layer_number=number)
                                    for number, described in zip(LAYERS, self.described, strict=True))  # fmt: skip
        self.mixers.to(DEVICE, dtype)
        n, lead = sizes, (sizes.slots, 1 + sizes.drafts)
        self.arrays = self.new_arrays(DEVICE)
        mixer: Any = self.mixers[0]
        self.pools = [mixer.new_pools(n.slots, device=DEVICE) for _ in LAYERS]
        self.entries = [mixer.new_pools(*lead, device=DEVICE) for _ in LAYERS]
        self.snapshots = mixer.new_pools(len(LAYERS), n.snapshots, device=DEVICE)
        self.hidden = torch.zeros(n.rows, 1, D_MODEL, device=DEVICE, dtype=dtype)

    def describe(self, draw: torch.Generator) -> dict[str, Any]:
        """A description with random parameters, that a type of 16 bits holds."""
        mixer = MIXERS[self.config.kind](self.config, D_MODEL)
        words = {name: value for name, value in asdict(self.config).items() if value is not None}
        for name, parameter in mixer.named_parameters():
            scale = D_MODEL**-0.5 if name == "in_proj.weight" else self.config.d_inner**-0.5 if "proj" in name else 0.5
            value = (scale * normal(draw, *parameter.shape) + (name == "norm_weight")).to(self.dtype)
            key = name.removesuffix(".weight")
            words[key] = value.tolist()
        return words | ({} if self.config.conv_bias else {"conv_bias": None})  # a flag and a parameter

    def new_arrays(self, device: str) -> StepArrays:
        n = self.sizes
        return StepArrays(decode_requests=n.decode, prefill_requests=n.prefill, tokens=n.tokens, snapshots=n.snapshots,
                          num_householder=self.config.num_householder, d_conv=self.config.d_conv, resume=True,
                          device=device)  # fmt: skip

    def context(self) -> StepContext:
        """One for every step: nothing in it says how many requests are real."""
        n = self.sizes
        return StepContext(
            self.arrays, BatchDimensions(n.rows, n.decode, n.prefill), slice(0, 0), self.pools, self.entries, n.drafts,
            SlotAllocator(*self.snapshots), LAYER_MAP,
        )  # fmt: skip

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        """The step, layer by layer; what each layer's projection gives."""
        hidden, outs = self.hidden, []
        for mixer in self.mixers:
            outs.append(mixer(hidden, self.context())[0])
            hidden = hidden + outs[-1]
        return outs

    def tensors(self) -> list[Tensor]:
        """All that a step may write."""
        return [t for pair in (*self.pools, *self.entries, self.snapshots) for t in pair]

    def fill(self, step: Mapping[str, Any], seed: int) -> None:
        """Another step: its arrays, rows with NaN for padding, slots and entries with NaN where nobody may read."""
        self.arrays.fill(**step)
        n, draw = self.sizes, torch.Generator().manual_seed(seed)
        real = sum(step["lengths"]) + len(step["decode_slots"]) * (1 + n.drafts)
        rows = normal(draw, n.rows, 1, D_MODEL)
        rows[real:] = torch.nan
        self.hidden.copy_(rows)
        named = [*step["slots"], *step["decode_slots"]]
        for t in self.tensors():
            values = 0.3 * normal(draw, *t.shape)
            others = torch.ones(n.slots, dtype=torch.bool)
            others[named] = False
            if len(t) == n.slots:
                values[others] = torch.nan
            t.copy_(values)

    def random_step(self, seed: int) -> dict[str, Any]:
        """Requests, slots, lengths and snapshots; the first steps have nobody, everybody, one partition alone."""
        n, draw = self.sizes, torch.Generator().manual_seed(1000 + seed)

        def below(most: int) -> int:
            return int(torch.randint(most, (), generator=draw))

        decode, pieces = (0, n.decode, 0, n.decode)[seed] if seed < 4 else below(n.decode + 1), below(n.prefill + 1)
        pieces = (0, n.prefill, n.prefill, 0)[seed] if seed < 4 else pieces
        slots = torch.randperm(n.slots, generator=draw).tolist()
        lengths, left = [], n.tokens
        for _ in range(pieces):
            lengths.append(below(min(left, 2 * n.tokens // n.prefill) + 1))
            left -= lengths[-1]
        marked = [row for row, length in enumerate(lengths) if length][: n.snapshots]
        return {
            "decode_slots": slots[:decode], "drafts": n.drafts, "slots": slots[decode : decode + pieces],
            "lengths": lengths, "snapshot_rows": marked,
            "snapshot_offsets": [1 + below(lengths[row]) for row in marked],
            "num_accepted": [below(n.drafts + 2) - 1 for _ in range(decode)],
        }  # fmt: skip

    def expected(self, step: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """What the reference gives from here: outputs of the layers, and all that may be written."""
        arrays, n = self.new_arrays("cpu"), self.sizes
        arrays.fill(**step)
        wide = [[tuple(t.cpu().double().contiguous() for t in pair) for pair in pairs]
                for pairs in (self.pools, self.entries, [self.snapshots])]  # fmt: skip
        real = int(arrays.device_decode_prefill.sum())
        context = StepContext(
            arrays, BatchDimensions(n.rows, n.decode, n.prefill), slice(real, n.rows), wide[0],
            wide[1], n.drafts, SlotAllocator(*wide[2][0]), LAYER_MAP,
        )  # fmt: skip
        hidden, outs = self.hidden.cpu().double(), []
        for number, described in zip(LAYERS, self.described, strict=True):
            reference.setup(described)
            mixer = reference.built.double().requires_grad_(False)
            mixer.layer_number = number
            outs.append(mixer(hidden, context)[0])
            hidden = hidden + outs[-1]
        return outs, [t for pairs in wide for pair in pairs for t in pair]


def check_near(got: Tensor, want: Tensor, what: str, dtype: torch.dtype) -> None:
    """NaN where and only where it is expected; float32 by its worst element, bfloat16 by the mean square.

    A norm of small numbers carries the roundings of bfloat16 rows into single elements, so these say nothing.
    """
    now, want = got.detach().cpu().double(), want.detach()
    same(now.isnan().int(), want.isnan().int(), f"{what}: NaN")
    error, size = (now - want).nan_to_num(), want.nan_to_num()
    if not error.numel():
        return
    if dtype == F32:
        most = float(error.abs().max()) / max(1.0, float(size.abs().max()))
    else:
        most = float(error.square().sum().sqrt()) / max(1.0, float(size.square().sum().sqrt()))
    if not most <= LOOSE[dtype]:
        place = (error.abs() == error.abs().max()).nonzero()[0].tolist()
        raise AssertionError(f"{what}{place}: off by {most:.2e}, {LOOSE[dtype]:.2e} allowed")


def whole_step(kind: str, dtype: torch.dtype, sizes: Sizes, seeds: Sequence[int]) -> None:
    """One graph of a step, replayed with other steps: eager's bits, the reference's numbers."""
    world, twin = (World(kind, dtype, sizes) for _ in range(2))
    world.fill(world.random_step(1), 1)
    replayed = captured(world.run)
    for seed in seeds:
        step = world.random_step(seed)
        for one in (world, twin):
            one.fill(step, seed)
        wanted, kept = twin.expected(step)
        outs, eager = replayed(), twin.run()
        for n, (got, other, want) in enumerate(zip(outs, eager, wanted, strict=True)):
            same(got, other, f"{kind} step {seed}, layer {n}, graph and eager")
            check_near(got, want, f"{kind} step {seed}, layer {n}", dtype)
        for i, (got, other, want) in enumerate(zip(world.tensors(), twin.tensors(), kept, strict=True)):
            same(got, other, f"{kind} step {seed}, tensor {i}, graph and eager")
            check_near(got, want, f"{kind} step {seed}, tensor {i}", dtype)


def never_waits() -> None:
    """A step and the arrays for it are given to the device without a look at it."""
    for kind in KINDS:
        world = World(kind, BF16, Sizes())
        step = world.random_step(1)
        world.fill(step, 1)
        world.run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for seed in range(6):
                world.arrays.fill(**world.random_step(seed))
                world.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def checks(tiny: bool) -> Iterator[Check]:
    """Every check; small whole steps alone where each memory access is watched."""
    for kind in KINDS:
        for dtype in (F32, BF16):
            sizes, steps = (TINY, range(5)) if tiny else (Sizes(), range(24))
            name = str(dtype).removeprefix("torch.")
            yield f"serving {kind} whole step {name}", partial(whole_step, kind, dtype, sizes, steps)
    if tiny:
        return
    yield "serving never waits", never_waits
    yield "serving toys", toys
    for kind in KINDS:
        yield f"serving {kind} traces", partial(traces, kind)
        yield f"serving {kind} traces as graphs", partial(graphed_traces, kind)
        yield f"serving {kind} {SCHEDULES} schedules", partial(schedules, kind)
