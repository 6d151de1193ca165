"""Two processes with a shard each give together what one gives with the whole: every mixer, by heads and by tokens.

The processes run once for all tests and leave their outputs in files. Outputs are compared bit for bit, where the
order of operations is the whole's: not behind a product of matrices of other sizes, nor behind a mean over two ranks.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

from statescan.conformance.mutants import mutant
from statescan.conformance.mutants import parallel as model
from statescan.reference import parallel
from statescan.reference.host.mixer_config import KINDS, MixerConfig
from statescan.reference.host.shards import head_shards, token_shards
from statescan.reference.inference import BatchDimensions, StepContext
from statescan.reference.mixers import MIXERS, RecurrentMixer
from statescan.reference.second import host as second
from statescan.spec.contract import PackedSeqParams, ShapeError

Array = npt.NDArray[Any]

RANKS, TOKENS, D_MODEL = 2, 16, 5
OFFSETS = [0, 3, 9, 9, 13]
"""The second segment crosses the edge at row 8, the third is empty, three rows are behind the last offset."""
OTHERS: dict[str, dict[str, Any]] = {"shared": {"groups": 1}, "linear": {"linear": True}, "bare": {"bare": True}}
"""Mixers with one group, which lies on both ranks; with projections; with the recurrence alone."""


def mixer_of(kind: str, *, groups: int = 2, linear: bool = False, **more: Any) -> RecurrentMixer:
    """A mixer with everything that a mixer can have; without `linear` rows come in projected and leave as they are."""
    sizes = {"heads": 4, "groups": groups, "headdim": 2, "d_state": 3} if kind == "mamba2" else {
        "heads": groups, "value_heads": 4, "key_dim": 2, "value_dim": 3,
        "num_householder": 2 if kind == "gdp" else 1}  # fmt: skip
    torch.manual_seed(7)
    config = MixerConfig(kind, **sizes, conv_bias=True, bias=True, **more)  # type: ignore[arg-type]
    ends = {} if linear else {"in_proj": nn.Identity(), "out_proj": nn.Identity()}
    mixer = MIXERS[kind](config, D_MODEL, **ends).double()  # type: ignore[arg-type]
    for parameter in mixer.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return mixer


def rows_for(mixer: RecurrentMixer) -> torch.Tensor:
    """Rows of a pack `[T, 1, d]`."""
    width = mixer.config.d_proj if isinstance(mixer.in_proj, nn.Identity) else D_MODEL
    found = torch.randn(TOKENS, 1, width, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    if mixer.config.bare and mixer.config.kind != "mamba2":  # rows hold log-decays and betas as they are
        start = width - {"gdn": 4, "gdp": 4, "kda": 8}[mixer.config.kind]
        found[..., start:] = -found[..., start:].abs()
    return found


def step_of(mixer: RecurrentMixer, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Two steps of serving: a prompt of 5 tokens into slot 1, then one token of it beside a prompt of 3 for slot 0."""
    pools = [torch.full((3, *shape), 9.0, dtype=torch.float64) for shape in mixer.ssm_state_shapes()]
    for pool in pools:
        pool[:2] = 0
    first, second_ = rows[:5], rows[5:9]
    found = [one_step(mixer, pools, first, [], [1], [5]), one_step(mixer, pools, second_, [1], [0], [3])]
    return torch.cat(found), pools


def one_step(mixer: Any, pools: Any, rows: Any, decode: list[int], slots: list[int], lengths: list[int]) -> Any:
    """A step of these slots; decode rows stand first."""
    metadata = SimpleNamespace(
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)]), batch_indices_prefill=torch.tensor(slots),
        batch_indices_decode=torch.tensor(decode), device_decode_prefill=torch.tensor([len(decode), sum(lengths)]),
    )  # fmt: skip
    dims = BatchDimensions(len(rows), len(decode), len(slots))
    return mixer.ssm_dynamic_inference(rows, StepContext(metadata, dims, slice(0, 0), [tuple(pools)]))[0]


def pack() -> PackedSeqParams:
    return PackedSeqParams(cu_seqlens_q=np.array(OFFSETS, np.int32))


# ---------------------------------------------------------------------------------------------------------------------
# What each process does
# ---------------------------------------------------------------------------------------------------------------------


def work(rank: int, folder: str, backend: str) -> None:
    """Every case on this rank; outputs by name into `rank<r>.npz`."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    try:
        found = {name: tensor.numpy() for name, tensor in outputs(rank).items()}
        np.savez(f"{folder}/rank{rank}.npz", **found)
    finally:
        dist.destroy_process_group()


def outputs(rank: int) -> dict[str, torch.Tensor]:
    """This rank's outputs of every mixer and cut."""
    found = {}
    with torch.no_grad():
        for kind in KINDS:
            whole = mixer_of(kind)
            rows = rows_for(whole)
            own = rows.chunk(RANKS)[rank]
            shard = parallel.shard_heads(whole)
            found[f"{kind} heads"] = shard(rows, packed_seq_params=pack())[0]
            gathered = parallel.shard_heads(whole, rows_are_sharded=True)
            found[f"{kind} heads, rows gathered"] = gathered(own, packed_seq_params=pack())[0]
            found[f"{kind} step"], pools = step_of(shard, rows)
            found[f"{kind} windows"], found[f"{kind} states"] = pools
            found[f"{kind} tokens"] = parallel.forward_token_shard(whole, own, pack())[0]
            found[f"{kind} tokens, afresh"] = afresh(whole, own)
            alone = parallel.shard_heads(mixer_of(kind, groups=1))
            alone.norm_ranks = [[number] for number in range(RANKS)]  # nobody shares a norm group
            found[f"{kind} own norm"] = alone(rows_for(mixer_of(kind, groups=1)), packed_seq_params=pack())[0]
            for name, other in OTHERS.items():
                mixer = mixer_of(kind, **other)
                found[f"{kind} {name}"] = parallel.shard_heads(mixer)(rows_for(mixer), packed_seq_params=pack())[0]
            bare = mixer_of(kind, bare=True)
            own = rows_for(bare).chunk(RANKS)[rank]
            found[f"{kind} bare, tokens"] = parallel.forward_token_shard(bare, own, pack())[0]
    return found


def afresh(whole: RecurrentMixer, own: torch.Tensor) -> torch.Tensor:
    """Token shards under a plan that hands nothing on, which the tests must be able to see."""
    right = parallel.token_shards
    parallel.token_shards = mutant("crossing-segment-starts-afresh")["token_shards"]
    try:
        return parallel.forward_token_shard(whole, own, pack())[0]
    finally:
        parallel.token_shards = right


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Array]]:
    """Outputs of both processes."""
    if request.param == "nccl" and torch.cuda.device_count() < RANKS:
        pytest.skip("NCCL needs a GPU for each rank")
    folder = tmp_path_factory.mktemp(request.param)
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=work, args=(rank, str(folder), request.param)) for rank in range(RANKS)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    for process in started:
        if process.is_alive():
            process.terminate()
    assert [process.exitcode for process in started] == [0] * RANKS
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(RANKS)]


# ---------------------------------------------------------------------------------------------------------------------
# Shards together are the whole
# ---------------------------------------------------------------------------------------------------------------------

every_mixer = pytest.mark.parametrize("kind", KINDS)


def whole_of(mixer: RecurrentMixer) -> Array:
    with torch.no_grad():
        return np.asarray(mixer(rows_for(mixer), packed_seq_params=pack())[0].numpy())


def same(got: Array, want: Array) -> bool:
    """Bit for bit."""
    return got.shape == want.shape and got.tobytes() == want.tobytes()


@every_mixer
def test_heads_on_two_ranks_are_the_whole(ranks: Any, kind: str) -> None:
    for found in ranks:
        assert same(found[f"{kind} heads"], whole_of(mixer_of(kind)))
        assert same(found[f"{kind} bare"], whole_of(mixer_of(kind, bare=True)))


@every_mixer
def test_ids_are_those_of_the_gathered_rows(ranks: Any, kind: str) -> None:
    """Each rank gives half of the rows, and the projection gathers them before ids are built (PAR-1)."""
    found = np.concatenate([rank[f"{kind} heads, rows gathered"] for rank in ranks])
    assert same(found, whole_of(mixer_of(kind)))


@every_mixer
def test_a_group_on_both_ranks(ranks: Any, kind: str) -> None:
    """Where the norm group is shared too, two sums of squares are added: another order than the whole's (PAR-5)."""
    want = whole_of(mixer_of(kind, groups=1))
    for found in ranks:
        got = found[f"{kind} shared"]
        assert np.allclose(got, want, rtol=1e-13, atol=1e-13)
        assert same(got, want) or kind in ("mamba2", "gdp")
        assert np.allclose(found[f"{kind} own norm"], want) == (kind not in ("mamba2", "gdp"))


@every_mixer
def test_projections_are_cut_with_the_heads(ranks: Any, kind: str) -> None:
    mixer = mixer_of(kind, linear=True)
    for found in ranks:
        assert np.allclose(found[f"{kind} linear"], whole_of(mixer), rtol=0, atol=1e-12)


@every_mixer
def test_steps_of_serving_on_two_ranks(ranks: Any, kind: str) -> None:
    mixer = mixer_of(kind)
    with torch.no_grad():
        out, (windows, states) = step_of(mixer, rows_for(mixer))
    for rank, found in enumerate(ranks):
        own = head_shards(mixer.config, RANKS)[rank]
        assert same(found[f"{kind} step"], out.numpy())
        assert same(found[f"{kind} windows"], windows[:, own["conv"]].numpy())
        assert same(found[f"{kind} states"], states[:, 2 * rank : 2 * rank + 2].contiguous().numpy())


@every_mixer
def test_tokens_on_two_ranks_are_the_whole(ranks: Any, kind: str) -> None:
    for name, mixer in (("tokens", mixer_of(kind)), ("bare, tokens", mixer_of(kind, bare=True))):
        found = np.concatenate([rank[f"{kind} {name}"] for rank in ranks])
        assert same(found, whole_of(mixer)), name


@every_mixer
def test_a_segment_that_crosses_is_seen_to_need_its_state(ranks: Any, kind: str) -> None:
    """Started afresh, the second rank's first segment is wrong, and nothing else is."""
    found, want = (ranks[1][f"{kind} tokens, afresh"], whole_of(mixer_of(kind))[8:])
    assert not np.allclose(found[:1], want[:1], rtol=1e-3, atol=0)
    assert same(found[1:], want[1:])
    assert same(ranks[0][f"{kind} tokens, afresh"], whole_of(mixer_of(kind))[:8])


# ---------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------


def test_every_small_pack_is_cut_alike_by_three_definitions() -> None:
    plans: tuple[Callable[..., Any], ...] = (second.token_shards, model.build()["token_shards"])
    for ranks, each, middle in itertools.product((1, 2, 3), (0, 1, 2), ((), (0,), (1, 1), (1, 3))):
        total = ranks * each
        if any(end > total for end in middle):
            continue
        for end in range(max(middle, default=0), total + 1):
            offsets = np.array([0, *middle, end])
            found = token_shards(offsets, total, ranks)
            for other in plans:
                assert [a.tolist() for a in other(offsets, total, ranks)] == [a.tolist() for a in found]


@every_mixer
def test_every_column_is_on_a_rank_and_heads_on_one(kind: str) -> None:
    for groups, ranks in itertools.product((1, 2, 4), (1, 2, 4)):
        config = mixer_of(kind, groups=groups).config
        shards = head_shards(config, ranks)
        assert shards == model.build()["head_shards"](config, ranks)
        rows = [column for shard in shards for column in shard["row"]]
        assert set(rows) == set(range(config.d_proj))
        assert (len(rows) == config.d_proj) == (groups >= ranks)
        assert sorted(c for shard in shards for c in shard["out"]) == list(range(config.d_inner))
        local = parallel.shard_config(config, ranks)
        assert {len(shard["row"]) for shard in shards} == {local.d_proj}
        assert {len(shard["conv"]) for shard in shards} == {local.conv_channels}


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"ranks=3 does not divide 4 heads \(PAR-2\)"):
        head_shards(mixer_of("gdn").config, 3)
    with pytest.raises(ShapeError, match=r"ranks=2 and 3 groups: one has to divide the other \(PAR-4\)"):
        head_shards({"kind": "mamba2", "heads": 12, "groups": 3}, 2)
    with pytest.raises(ShapeError, match=r"total_tokens=7 on 2 ranks: equal shards are needed \(PAR-3\)"):
        token_shards([0, 7], 7, 2)
