"""The reference mixers under the mixin: steps with decode and prefill rows together are the packed forward pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from statescan.reference.host.mixer_config import MixerConfig
from statescan.reference.inference import BatchDimensions, StepContext
from statescan.reference.mixers import MIXERS, RecurrentMixer
from statescan.spec.contract import EmptyBatchError

D_MODEL = 6
every_mixer = pytest.mark.parametrize("kind", MIXERS)


def mixer_of(kind: str) -> RecurrentMixer:
    torch.manual_seed(3)
    sizes = {"heads": 2, "headdim": 3, "d_state": 4} if kind == "mamba2" else {
        "value_heads": 2, "key_dim": 3, "value_dim": 4, "num_householder": 2 if kind == "gdp" else 1}  # fmt: skip
    return MIXERS[kind](MixerConfig(kind, **sizes), D_MODEL).double()  # type: ignore[arg-type]


def context_of(mixer: RecurrentMixer, slots: int = 3) -> StepContext:
    """Pools of NaN: a request zeroes its slot before its first piece."""
    pools = tuple(torch.full((slots, *shape), torch.nan, dtype=torch.float64) for shape in mixer.ssm_state_shapes())
    return StepContext(SimpleNamespace(), BatchDimensions(0, 0, 0), slice(0, 0), [pools])


def step(mixer: RecurrentMixer, context: StepContext, decode: list, prefill: list) -> torch.Tensor:
    """One step of (slot, rows) pairs, decode first; the rows that come out, in the same order."""
    pieces = [rows for _, rows in (*decode, *prefill)]
    offsets = [0]
    for _, rows in prefill:
        offsets.append(offsets[-1] + rows.shape[0])
    context.padded_batch_dimensions = BatchDimensions(sum(map(len, pieces)), len(decode), len(prefill))
    context.mamba_metadata = SimpleNamespace(
        cu_seqlens=torch.tensor(offsets), batch_indices_prefill=torch.tensor([slot for slot, _ in prefill]),
        batch_indices_decode=torch.tensor([slot for slot, _ in decode]),
        device_decode_prefill=torch.tensor([len(decode), len(prefill)]),
    )  # fmt: skip
    return mixer.ssm_dynamic_inference(torch.cat(pieces), context)[0]


@every_mixer
def test_pieces_and_decode_beside_another_request_are_the_whole(kind: str) -> None:
    mixer = mixer_of(kind)
    one, two = (torch.randn(n, 1, D_MODEL, dtype=torch.float64) for n in (7, 4))
    whole = [mixer(rows)[0] for rows in (one, two)]
    context = context_of(mixer)
    for pool in context.pools[0]:
        pool[[2, 0]] = 0
    out = [step(mixer, context, [], [(2, one[:2])])]
    out.append(step(mixer, context, [], [(2, one[2:5]), (0, two[:3])]))
    out.append(step(mixer, context, [(0, two[3:])], [(2, one[5:6])]))
    out.append(step(mixer, context, [(2, one[6:])], []))
    first, (second, other), (last, sixth) = out[0], out[1].split([3, 3]), out[2].split([1, 1])
    assert torch.allclose(torch.cat([first, second, sixth, out[3]]), whole[0], rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat([other, last]), whole[1], rtol=0, atol=1e-12)
    assert bool(context.pools[0][1][1].isnan().all())


@every_mixer
def test_a_step_of_nobody_is_refused(kind: str) -> None:
    mixer = mixer_of(kind)
    with pytest.raises(EmptyBatchError, match="STEP-11"):
        mixer.ssm_dynamic_inference(torch.zeros(1, 1, D_MODEL), context_of(mixer))
