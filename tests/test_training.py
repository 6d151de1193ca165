"""Training on packs: the suite's vectors, the reference's forward pass, isolation, what trainers put around a mixer.

Without a GPU operations run in plain PyTorch, or interpreted where they are kernels; the peer's kernels, guarded, are
tried in a process of their own, which is made ready for them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from statescan.conformance.adapters import fast as adapters
from statescan.conformance.cases import Missing, prepare
from statescan.fast import checks, peers, training
from statescan.fast.kernels import common
from statescan.fast.mixers import MIXERS, RecurrentMixer
from statescan.goldens.regenerate import run_in_process
from statescan.goldens.store import load_vectors
from statescan.reference import mixers as reference
from statescan.reference.host.mixer_config import KINDS, MixerConfig
from statescan.spec.contract import OPERATIONS, PackedSeqParams, PackingError, ShapeError, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="statescan.fast.bench.check_training runs on a GPU"),
]
VECTORS = load_vectors()
PACKED = ["gated_delta_rule", "gated_delta_product", "kimi_delta_attention", "ssd"]
KERNELS = ["causal_conv1d", "softplus_gate", "kda_gate", "beta_gate", "l2norm", "rmsnorm_gated"]
D_MODEL = 6
OFFSETS = [0, 5, 5, 18, 19]
ROWS = 24
SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"heads": 4, "groups": 2, "headdim": 3, "d_state": 4, "conv_bias": True},
    "gdn": {"heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5},
    "gdp": {"heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5, "num_householder": 2},
    "kda": {"heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5, "lower_bound": -5.0},
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without Triton's interpreter, where training runs all the same."""
    monkeypatch.setattr(common, "INTERPRETED", False)
    monkeypatch.setattr(checks, "_passed", set())


def mixer_of(kind: str, seed: int = 1, **more: Any) -> RecurrentMixer:
    torch.manual_seed(seed)
    mixer = MIXERS[kind](MixerConfig(kind, **{**SIZES[kind], **more}), D_MODEL)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer


def pack_of(offsets: list[int]) -> PackedSeqParams:
    return PackedSeqParams(cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32))


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(module.parameters()))
    return dict(zip([name for name, _ in module.named_parameters()], found, strict=True))


def close(got: Tensor, want: Tensor, unit: float) -> None:
    assert got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= unit * want.double().abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------------------------------------------------


def run_vectors(name: str, take: Callable[[int, Any], bool]) -> int:
    claims = [claim for claim in adapters.adapter.capabilities if claim["op"] == name]
    own = [vector for vector in VECTORS.values() if vector["op"] == name]
    passed = 0
    for vector in [v for i, v in enumerate(own) if take(i, v)]:
        case = prepare(vector, VECTORS, claims)
        assert not isinstance(case, Missing), f"{vector['id']}: {case}"
        verdict = run_in_process(case, adapters.adapter)
        assert verdict.passed, f"{vector['id']}: {verdict.message}"
        passed += 1
    return passed


@pytest.mark.parametrize("name", PACKED)
def test_vectors_of_packed_recurrences_pass(name: str) -> None:
    """All on gradients, and a third of the others; `statescan run --impl fast` runs the rest."""
    assert run_vectors(name, lambda i, v: i % 3 == 0 or "GRAD" in v["clauses"][0]) >= 15


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("no_kernels")
def test_vectors_pass_where_no_kernel_runs(name: str) -> None:
    assert run_vectors(name, lambda i, v: i % 2 == 0 or "GRAD" in v["clauses"][0]) >= 4


def inputs_of(name: str, rows: int = 7, batch: int = 1) -> list[Tensor]:
    torch.manual_seed(2)
    H, HV, K, V = 1, 2, 3, 4
    if name == "ssd":
        return [torch.randn(batch, rows, HV, V), torch.randn(batch, rows, HV), -torch.rand(HV),
                torch.randn(batch, rows, H, K), torch.randn(batch, rows, H, K)]  # fmt: skip
    gate = (HV, K) if name.startswith("kimi") else (HV,)
    wide = rows * (2 if name.endswith("product") else 1)
    return [torch.randn(batch, rows, H, K), torch.randn(batch, wide, H, K), torch.randn(batch, wide, HV, V),
            -torch.rand(batch, rows, *gate), torch.rand(batch, wide, HV)]  # fmt: skip


def state_of(name: str, rows: int) -> Tensor:
    return torch.randn(rows, 2, *((4, 3) if name == "ssd" else (3, 4)))


def settings_of(name: str) -> dict[str, Any]:
    return {"num_householder": 2} if name.endswith("product") else {}


@pytest.mark.parametrize("name", PACKED)
def test_batch_rows_are_segments_with_states_and_gradients_of_their_own(name: str) -> None:
    tensors, state = inputs_of(name, batch=3), state_of(name, 3)
    leaves = [t.requires_grad_() for t in (*tensors, state)]
    operation, settings = getattr(training, name), {**settings_of(name), "output_final_state": True}
    out, final = operation(*tensors, initial_state=state, **settings)
    cotangents = torch.randn_like(out), torch.randn_like(final)
    grads = torch.autograd.grad((out, final), leaves, cotangents)
    rate = torch.zeros(2)
    for n in range(3):
        own = [t if t.ndim == 1 else t[n : n + 1] for t in tensors]
        one, last = operation(*own, initial_state=state[n : n + 1], **settings)
        close(out[n : n + 1], one, 1e-6)
        close(final[n : n + 1], last, 1e-6)
        alone = torch.autograd.grad((one, last), [*own, state], [c[n : n + 1] for c in cotangents])
        rate += alone[2] if name == "ssd" else 0
        for got, want in zip(grads, alone, strict=True):
            if got.ndim > 1:
                close(got[n : n + 1], want[n : n + 1] if want.shape[0] == 3 else want, 1e-5)
    if name == "ssd":
        close(grads[2], rate, 1e-5)


@pytest.mark.parametrize("name", PACKED)
def test_operations_are_registered_rightly(name: str) -> None:
    tensors = [t.requires_grad_() for t in inputs_of(name)]
    offsets, state = torch.tensor([0, 3, 3, 6]), state_of(name, 3).requires_grad_()
    if name == "ssd":
        opcheck(training._ssd.traced, (*tensors, None, None, None, None, offsets, state, True, [0.0, 1.0], True, None))
        return
    rest = (2, None, True) if name.endswith("product") else (None, True)
    opcheck(training._DELTA[name].operation.traced, (*tensors, offsets, state, *rest, True, None))


@pytest.mark.parametrize("name", PACKED)
def test_a_state_keeps_its_type_and_nothing_in_gives_nothing_out(name: str) -> None:
    tensors, operation, settings = inputs_of(name), getattr(training, name), settings_of(name)
    state = state_of(name, 1).bfloat16()
    assert operation(*tensors, initial_state=state, output_final_state=True, **settings)[1].dtype == torch.bfloat16
    assert operation(*tensors, **settings)[1] is None
    none = [t[:, :0] if t.ndim > 1 else t for t in tensors]
    out, final = operation(*none, initial_state=state, output_final_state=True, **settings)
    assert out.numel() == 0
    assert torch.equal(final, state)
    nobody = torch.zeros(1, dtype=torch.int32)
    out, final = operation(*tensors, cu_seqlens=nobody, output_final_state=True, **settings)
    assert not out.any()
    assert final.shape[0] == 0


def test_batch_rows_of_other_lengths_are_refused() -> None:
    q, k, v, g, beta = inputs_of("gated_delta_rule", batch=2)
    with pytest.raises(ShapeError, match=r"k has shape \[7, 2, 1, 3\]: \[2, 7, ...\] is needed"):
        training.gated_delta_rule(q, k.reshape(7, 2, 1, 3), v, g, beta)
    with pytest.raises(UnsupportedError, match="dt_limit=3"):
        training.ssd(*inputs_of("ssd"), dt_limit=3)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Mixers
# ---------------------------------------------------------------------------------------------------------------------


def twin(mixer: RecurrentMixer) -> Any:
    """The reference's mixer with the same parameters, in float64."""
    other = reference.MIXERS[mixer.config.kind](mixer.config, D_MODEL)  # type: ignore[arg-type]
    other.load_state_dict(mixer.state_dict())
    return other.double()


@every_kind
@pytest.mark.parametrize("kernels", [False, True])
def test_forward_is_the_references_and_its_gradient_a_slope(
    kind: str, kernels: bool, request: pytest.FixtureRequest
) -> None:
    if not kernels:
        request.getfixturevalue("no_kernels")
    mixer, hidden = mixer_of(kind), torch.randn(ROWS, 1, D_MODEL)
    cotangent = torch.randn(ROWS, 1, D_MODEL)
    plain, params = twin(mixer), pack_of(OFFSETS)
    out, _ = mixer(hidden, packed_seq_params=params)
    # the reference's Mamba2 computes the rows past the last offset, as a segment of their own
    close(out[: OFFSETS[-1]], plain(hidden.double(), packed_seq_params=params)[0][: OFFSETS[-1]], 1e-5)
    assert not out[OFFSETS[-1] :].any()
    cotangent[OFFSETS[-1] :] = 0
    grads = gradients(mixer, (out * cotangent).sum())
    step, slopes = 2.0**-14, []
    way = {name: torch.randn(p.shape, dtype=torch.float64) for name, p in plain.named_parameters()}
    for sign in (1, -1):
        moved = deepcopy(plain)
        with torch.no_grad():
            for name, parameter in moved.named_parameters():
                parameter.add_(sign * step * way[name])
        slopes.append((moved(hidden.double(), packed_seq_params=params)[0] * cotangent).sum())
    slope = (slopes[0] - slopes[1]) / (2 * step)
    size = sum((grad.double() * way[name]).abs().sum() for name, grad in grads.items())
    assert abs(sum((grad.double() * way[name]).sum() for name, grad in grads.items()) - slope) <= 1e-5 * size


@every_kind
@pytest.mark.usefixtures("no_kernels")
def test_no_gradient_crosses_a_boundary(kind: str) -> None:
    mixer, hidden = mixer_of(kind), torch.randn(ROWS, 1, D_MODEL, requires_grad=True)
    out, _ = mixer(hidden, packed_seq_params=pack_of(OFFSETS))
    for start, end in pairwise(OFFSETS):
        if start == end:
            continue
        (grad,) = torch.autograd.grad(out[start:end].square().sum(), hidden, retain_graph=True)
        assert not grad[:start].any()
        assert not grad[end:].any()
        assert grad[start:end].flatten(1).any(1).all()


@every_kind
@pytest.mark.usefixtures("no_kernels")
def test_nan_in_padding_reaches_nothing(kind: str) -> None:
    mixer, found = mixer_of(kind), []
    hidden, cotangent = torch.randn(ROWS, 1, D_MODEL), torch.randn(ROWS, 1, D_MODEL)
    for fill in (0.0, torch.nan):
        rows, incoming = hidden.clone(), cotangent.clone()
        rows[OFFSETS[-1] :] = incoming[OFFSETS[-1] :] = fill
        rows.requires_grad_()
        out, _ = mixer(rows, packed_seq_params=pack_of(OFFSETS))
        own = [p for name, p in mixer.named_parameters() if not name.startswith("out_proj")]  # the caller's cotangent
        found.append([out, *torch.autograd.grad(out, [rows, *own], incoming)])
        assert not found[-1][1][OFFSETS[-1] :].any()
    for zero, nan in zip(*found, strict=True):
        assert torch.equal(zero, nan)


@every_kind
@pytest.mark.usefixtures("no_kernels")
def test_gradients_are_finite_at_the_edges(kind: str) -> None:
    """Gates that keep or forget everything, tokens without a key, huge inputs to every activation."""
    mixer, hidden = mixer_of(kind), torch.randn(ROWS, 1, D_MODEL)
    start = dict(zip([n for n, _ in mixer.config.parts], [0, *torch.tensor([w for _, w in mixer.config.parts])
                                                          .cumsum(0).tolist()], strict=False))  # fmt: skip
    widths = dict(mixer.config.parts)
    with torch.no_grad():
        for name in {"mamba2": ("dt",), "gdn": ("alpha", "beta"), "gdp": ("a", "b"), "kda": ("f", "b")}[kind]:
            mixer.in_proj.weight[start[name] : start[name] + widths[name]] *= 1000
        for name in {"mamba2": ("B", "z"), "gdn": ("k", "z"), "gdp": ("K", "z"), "kda": ("k", "z")}[kind]:
            mixer.in_proj.weight[start[name] : start[name] + widths[name]] *= 0 if name != "z" else 1000
        mixer.A_log.fill_(-2)  # type: ignore[union-attr, operator]
    rows = hidden.requires_grad_()
    out, _ = mixer(rows, packed_seq_params=pack_of(OFFSETS))
    for grad in torch.autograd.grad(out.square().sum(), [rows, *mixer.parameters()]):
        assert grad.isfinite().all()


class TwoLayers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mixer_of(kind, seed) for seed in (3, 4)])

    def forward(self, x: Tensor, params: PackedSeqParams | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, packed_seq_params=params)[0]
        return x


@every_kind
@pytest.mark.usefixtures("no_kernels")
def test_a_step_on_a_pack_is_the_token_weighted_step_over_documents(kind: str) -> None:
    """The mean of a pack's token losses is that of its documents, each counted by its tokens."""
    packed, hidden, target = TwoLayers(kind), torch.randn(ROWS, 1, D_MODEL), torch.randn(ROWS, 1, D_MODEL)
    apart, total = deepcopy(packed), OFFSETS[-1]
    loss = (packed(hidden, pack_of(OFFSETS)) - target)[:total].square().mean()
    weighted = torch.zeros(())
    for start, end in pairwise(OFFSETS):
        if end > start:
            one = (apart(hidden[start:end]) - target[start:end]).square().mean()
            weighted = weighted + one * (end - start) / total
    before = deepcopy(packed.state_dict())
    for model, value in ((packed, loss), (apart, weighted)):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert abs(loss - weighted) <= 1e-6 * abs(weighted)
    for name, parameter in apart.state_dict().items():
        step = parameter - before[name]
        assert step.abs().max() > 1e-4, name
        close(packed.state_dict()[name] - before[name], step, 2e-5)


@every_kind
@pytest.mark.usefixtures("no_kernels")
def test_batch_rows_without_offsets_are_sequences(kind: str) -> None:
    mixer, hidden = mixer_of(kind), torch.randn(7, 3, D_MODEL)
    out, bias = mixer(hidden)
    assert bias is None
    for n in range(3):
        close(out[:, n : n + 1], mixer(hidden[:, n : n + 1])[0], 1e-6)
    with pytest.raises(PackingError, match="PACK-13"):
        mixer(hidden, packed_seq_params=pack_of([0, 7]))


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("no_kernels")
def test_recomputed_activations_give_the_same_gradients(kind: str, reentrant: bool) -> None:
    mixer, hidden, params = mixer_of(kind), torch.randn(ROWS, 1, D_MODEL, requires_grad=True), pack_of(OFFSETS)
    kept = gradients(mixer, mixer(hidden, packed_seq_params=params)[0].square().sum())
    out = checkpoint(lambda x: mixer(x, packed_seq_params=params)[0], hidden, use_reentrant=reentrant)
    out.square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert torch.equal(parameter.grad, kept[name]), name  # type: ignore[arg-type]


@every_kind
def test_a_compiled_mixer_is_one_graph_with_the_same_gradients(kind: str) -> None:
    mixer, hidden = mixer_of(kind), torch.randn(ROWS, 1, D_MODEL)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)

    def loss(hidden: Tensor, offsets: Tensor) -> Tensor:
        return mixer(hidden, packed_seq_params=PackedSeqParams(cu_seqlens_q=offsets))[0].square().sum()

    compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=True)
    want, got = loss(hidden, offsets), compiled(hidden, offsets)
    close(got, want, 1e-6)
    eager = gradients(mixer, want)
    for name, grad in gradients(mixer, got).items():
        close(grad, eager[name], 1e-5)


@every_kind
@pytest.mark.usefixtures("no_kernels")
def test_bfloat16_parameters_and_autocast_stay_near_float32(kind: str) -> None:
    mixer, hidden, params = mixer_of(kind), torch.randn(ROWS, 1, D_MODEL), pack_of(OFFSETS)
    want, _ = mixer(hidden, packed_seq_params=params)
    grads = gradients(mixer, want.square().sum())
    narrow = deepcopy(mixer).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = mixer(hidden, packed_seq_params=params)
    for model, out in ((narrow, narrow(hidden.bfloat16(), packed_seq_params=params)[0]), (mixer, cast)):
        assert out.dtype == torch.bfloat16
        close(out, want, 2.0**-4)
        for name, grad in gradients(model, out.float().square().sum()).items():
            close(grad, grads[name], 0.1)


@pytest.mark.usefixtures("no_kernels")
def test_a_projection_that_gathers_rows_decides_their_number() -> None:
    """PACK-5: offsets count the rows of the whole sequence, of which the caller has a shard."""
    mixer, hidden = mixer_of("gdn"), torch.randn(ROWS, 1, D_MODEL)
    want, _ = mixer(hidden, packed_seq_params=pack_of(OFFSETS))
    whole = mixer.in_proj

    class Gather(nn.Module):
        def forward(self, shard: Tensor) -> tuple[Tensor, None]:
            assert shard.shape[0] == ROWS // 2
            return whole(hidden), None

    mixer.in_proj = Gather()
    assert torch.equal(mixer(hidden[: ROWS // 2], packed_seq_params=pack_of(OFFSETS))[0], want)


@pytest.mark.usefixtures("no_kernels")
def test_what_a_forward_pass_does_not_take_is_refused() -> None:
    mixer, hidden = mixer_of("gdn"), torch.randn(4, 1, D_MODEL)
    with pytest.raises(UnsupportedError, match="attention_mask is no argument"):
        mixer(hidden, attention_mask=None)
    with pytest.raises(UnsupportedError, match="packed_seq_params beside an inference context"):
        mixer(hidden, object(), packed_seq_params=pack_of([0, 4]))
    with pytest.raises(PackingError, match="PACK-4"):
        mixer(hidden, packed_seq_params=pack_of([0, 5]))


# ---------------------------------------------------------------------------------------------------------------------
# The peer
# ---------------------------------------------------------------------------------------------------------------------


def test_offsets_for_the_peer_are_one_object_until_they_are_written_to() -> None:
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    first = peers.same_offsets(offsets)
    assert peers.same_offsets(offsets) is first
    offsets[1:2] = 3
    second = peers.same_offsets(offsets)
    assert second is not first
    assert (first.tolist(), second.tolist()) == ([0, 2, 4], [0, 3, 4])
    known = len(peers._copies)
    del offsets
    assert len(peers._copies) == known - 1


def test_the_peer_is_asked_for_what_it_gets_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "on_gpu", lambda x: True)
    monkeypatch.setattr(peers, "is_installed", lambda: True)

    def served(name: str, kind: torch.dtype, keys: int = 64, segments: int = 1) -> bool:
        tokens = torch.empty(1, 4, 1, keys, dtype=kind)
        return peers.is_served(name, tokens, tokens, tokens, segments)

    assert served("gated_delta_rule", torch.bfloat16)
    assert not served("gated_delta_rule", torch.float16)
    assert not served("gated_delta_rule", torch.float32)
    assert not served("gated_delta_rule", torch.bfloat16, keys=257)
    assert not served("gated_delta_rule", torch.bfloat16, segments=0)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert served("kimi_delta_attention", torch.float32)
    assert not served("gated_delta_product", torch.float32)


PEER = """
from statescan.conformance.adapters import interpreter
interpreter.prepare()
import torch
from statescan.fast import peers, training
torch.manual_seed(0)
B, T, H, HV, K, V, end = torch.bfloat16, 12, 1, 2, 16, 16, 9
offsets = torch.tensor([0, 5, 5, end], dtype=torch.int32)
for name, M in (("gated_delta_rule", 1), ("gated_delta_product", 2), ("kimi_delta_attention", 1)):
    gate = (HV, K) if name.startswith("kimi") else (HV,)
    tokens = [torch.randn(1, T, H, K).to(B), torch.randn(1, T * M, H, K).to(B), torch.randn(1, T * M, HV, V).to(B),
              -torch.rand(1, T, *gate), torch.rand(1, T * M, HV)]
    for t in tokens:
        t[:, end * (t.shape[1] // T):] = torch.nan
    inputs = [*tokens, torch.randn(3, HV, K, V)]
    settings = {"use_qk_l2norm": True, "output_final_state": True} | ({"num_householder": M} if M > 1 else {})
    cotangents = torch.randn(1, T, HV, V).to(B), torch.randn(3, HV, K, V)
    cotangents[0][:, end:] = torch.nan
    found = []
    for there in (True, False):
        peers.on_gpu = lambda x: there
        leaves = [t.clone().requires_grad_() for t in inputs]
        results = getattr(training, name)(*leaves[:5], offsets, leaves[5], **settings)
        found.append([*results, *torch.autograd.grad(results, leaves, cotangents)])
    assert any(x.ne(y).any() for x, y in zip(*found)), "one path twice"
    for peer, own in zip(*found):
        assert peer.dtype == own.dtype
        assert (peer - own).abs().max() <= 2.0**-6 * own.abs().max(), name
        if peer.ndim >= 3 and peer.shape[0] == 1:
            assert not peer[:, end * (peer.shape[1] // T):].any(), name
print("done")
"""


@pytest.mark.skipif(not peers.is_installed(), reason="fla-core is not installed")
def test_the_guarded_peer_agrees_and_leaves_no_row_unwritten() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PEER], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_every_operation_with_a_gradient_has_its_path() -> None:
    assert {name for name, op in OPERATIONS.items() if op.differentiable} == {*PACKED, *KERNELS}
