"""Public architectures with our mixers in the place of their own: the same logits, however the tokens come.

    make real-models, or python tests/real_models/check.py [NAME ...] [--json PATH]

Models are built from their configuration classes at a small size with seeded random weights; nothing is downloaded.
Kernel packages are hidden, so that the library takes its own PyTorch paths. Each check says the largest deviation from
the library's logits of one full forward pass (of each document alone for a pack), as a part of the largest logit.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HIDDEN = ("fla", "causal_conv1d", "mamba_ssm", "kernels")
sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from statescan.reference.host.step import BatchDimensions, StepContext  # noqa: E402
from statescan.reference.mixers import MIXERS  # noqa: E402
from statescan.reference.mixers.checkpoints import READERS, load_mixer  # noqa: E402
from statescan.spec.contract import PackedSeqParams  # noqa: E402

TIMES = 4
"""How many times further from the library's logits than those are from its float64 ones: each side rounds elsewhere."""
WORDS = 64
BASE: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 16, "mamba_n_groups": 2,
         "mamba_chunk_size": 8}  # fmt: skip
GDN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
       "head_dim": 8}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 8, "state_size": 16, "expand": 2, "n_groups": 2,
                                "chunk_size": 8}),
    "bamba": ("BambaConfig", {**BAMBA, "attn_layer_indices": [1]}),
    "nemotron_h": ("NemotronHConfig", {
        "layers_block_type": ["mamba", "attention", "mamba"], "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {
        **BAMBA, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48,
        "num_local_experts": 0}),
    "qwen3_next": ("Qwen3NextConfig", {**HYBRID, **GDN, "num_experts": 0, "mlp_only_layers": [0, 1, 2]}),
    "qwen3_5": ("Qwen3_5TextConfig", {**HYBRID, **GDN}),
    "olmo_hybrid": ("OlmoHybridConfig", {**HYBRID, **GDN, "linear_num_key_heads": 4, "linear_allow_neg_eigval": True}),
    "kimi_linear": ("KimiLinearConfig", {
        **HYBRID, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}  # fmt: skip


class InPlace(nn.Module):
    """One of our mixers where the library calls its own: batch first, and how the tokens come told from outside."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.mixer = load_mixer(own, MIXERS)
        self.layer_type = getattr(own, "layer_type", None)
        self.run: Callable[[Any, Tensor], Tensor] = whole

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.run(self.mixer, hidden_states)


def whole(mixer: Any, rows: Tensor) -> Tensor:
    """Sequences of a batch, each by itself."""
    return torch.cat([mixer(row[:, None])[0].transpose(0, 1) for row in rows])


def packed(offsets: Sequence[int]) -> Callable[[Any, Tensor], Tensor]:
    """One row of documents, each from its offset on."""
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32))

    def run(mixer: Any, rows: Tensor) -> Tensor:
        found: Tensor = mixer(rows.transpose(0, 1), packed_seq_params=params)[0]
        return found.transpose(0, 1)

    return run


class Served:
    """One request on a slot among others, which are NaN: pieces are prefilled, tokens decoded, drafts verified."""

    DRAFTS = 2

    def __init__(self, mixer: Any, slot: int = 1) -> None:
        shapes = mixer.ssm_state_shapes()
        self.pools = tuple(torch.full((3, *shape), torch.nan) for shape in shapes)
        self.entries = tuple(torch.full((3, 1 + self.DRAFTS, *shape), torch.nan) for shape in shapes)
        self.slot, self.verify = slot, False
        self.put([torch.zeros(shape) for shape in shapes])

    def put(self, point: Sequence[Tensor]) -> None:
        """Window and state into the slot: zeros at admission, a kept point at a hit, an entry after a rejection."""
        for pool, value in zip(self.pools, point, strict=True):
            pool[self.slot] = value

    def point(self) -> list[Tensor]:
        """A copy of window and state."""
        return [pool[self.slot].clone() for pool in self.pools]

    def entry(self, accepted: int) -> list[Tensor]:
        """Window and state behind the base token and so many drafts."""
        return [entries[self.slot, accepted].clone() for entries in self.entries]

    def __call__(self, mixer: Any, rows: Tensor) -> Tensor:
        tokens, slot, none = rows.shape[1], torch.tensor([self.slot]), torch.tensor([], dtype=torch.int64)
        decode = int(tokens == 1 or self.verify)
        metadata = SimpleNamespace(
            cu_seqlens=torch.tensor([0, tokens]), batch_indices_prefill=none if decode else slot,
            batch_indices_decode=slot if decode else none, device_decode_prefill=torch.tensor([decode * tokens, 0]),
        )  # fmt: skip
        context = StepContext(
            metadata, BatchDimensions(tokens, decode, 1 - decode), slice(tokens, None), [self.pools],
            [tuple(entries[:, :tokens] for entries in self.entries)], tokens - 1 if decode else 0,
        )  # fmt: skip
        found: Tensor = mixer.ssm_dynamic_inference(rows.transpose(0, 1), context)[0]
        return found.transpose(0, 1)


def build(name: str) -> tuple[nn.Module, nn.Module]:
    """The library's model with random weights that reach the output, and a copy with our mixers in it."""
    word, sizes = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, word)(**{**BASE, **sizes})
    more = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **more).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.uniform_(0.5, 1.5)
            elif "A_log" in key or "dt_bias" in key:
                p.uniform_(-2.0, 1.0)
            else:
                p.normal_(0.0, 0.5 if p.ndim > 2 or "embed" in key else p.shape[-1] ** -0.5)
    ours = copy.deepcopy(model)
    for key, module in list(ours.named_modules()):
        if type(module).__name__ in READERS:
            parent, _, last = key.rpartition(".")
            setattr(ours.get_submodule(parent), last, InPlace(module))
    return model, ours


def come(model: nn.Module, how: Callable[[Any], Callable[[Any, Tensor], Tensor]]) -> None:
    """Tell every mixer of ours how tokens come: `how` of the mixer."""
    for module in model.modules():
        if isinstance(module, InPlace):
            module.run = how(module.mixer)


class Session:
    """A request through a whole model: attention keeps the library's cache, mixers of ours their slots."""

    def __init__(self, model: Any, cache: Any = None) -> None:
        self.model, self.at = model, 0
        self.cache = transformers.DynamicCache(config=model.config) if cache is None else cache

    @property
    def mixers(self) -> list[Served]:
        return [module.run for module in self.model.modules() if isinstance(module, InPlace)]  # type: ignore[misc]

    def feed(self, tokens: Tensor, verify: bool = False) -> Tensor:
        """Logits of the next tokens."""
        for served in self.mixers:
            served.verify = verify
        end = self.at + tokens.shape[1]
        # positions are always given: one of the models counts them from 0 where they are not
        places = {"position_ids": torch.arange(self.at, end)[None]} if attends(self.model) else {}
        self.at = end
        found: Tensor = self.model(tokens, cache=self.cache, use_cache=True, **places).logits
        return found

    def reject(self, drafts: int, accepted: int) -> None:
        """Back to the entry behind the drafts that stand; attention forgets the others."""
        for served in self.mixers:
            served.put(served.entry(accepted))
        self.at -= drafts - accepted
        for layer in self.cache.layers:
            if getattr(layer, "keys", None) is not None and drafts > accepted:
                layer.crop(accepted - drafts)


def attends(model: nn.Module) -> bool:
    """Whether a model has attention beside its recurrent layers."""
    return any(word in type(m).__name__ for m in model.modules() for word in ("Attention", "MLA"))


def in_pieces(model: Any, tokens: Tensor, cuts: Sequence[int]) -> Tensor:
    """Logits of a sequence that comes in pieces."""
    session = Session(model)
    return torch.cat([session.feed(tokens[:, a:b]) for a, b in pairwise(cuts)], 1)


def check_full(model: Any, ours: Any, tokens: Tensor) -> float:
    """A batch of two sequences in one call."""
    come(ours, lambda mixer: whole)
    return far(ours(tokens).logits, model(tokens).logits)


OFFSETS = (0, 7, 8, 20, 29)
"""Documents of a pack of 29 tokens."""


def as_pack(model: Any, tokens: Tensor) -> Tensor:
    """Logits of one row of documents, attention kept apart by a mask."""
    come(model, lambda mixer: packed(OFFSETS))
    owner = torch.bucketize(torch.arange(OFFSETS[-1]), torch.tensor(OFFSETS[1:]), right=True)
    seen = (owner[:, None] == owner[None, :]).tril()
    mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(OFFSETS)])[None]
    more = {"attention_mask": mask, "position_ids": places} if attends(model) else {}
    found: Tensor = model(tokens[:1], **more).logits
    return found


def apart(model: Any, tokens: Tensor) -> Tensor:
    """Logits of the same documents, each by itself."""
    come(model, lambda mixer: whole)
    return torch.cat([model(tokens[:1, a:b]).logits for a, b in pairwise(OFFSETS)], 1)


def check_packed(model: Any, ours: Any, tokens: Tensor) -> float:
    """Documents in one row against each by itself in the library."""
    return far(as_pack(ours, tokens), apart(model, tokens))


def check_decode(model: Any, ours: Any, tokens: Tensor) -> float:
    """A prompt and single tokens after it against the library's full forward pass."""
    come(ours, Served)
    T = tokens.shape[1]
    return far(in_pieces(ours, tokens[:1], [0, 17, *range(18, T + 1)]), model(tokens[:1]).logits)


def check_pieces(model: Any, ours: Any, tokens: Tensor) -> float:
    """A prompt in pieces, some shorter than the window."""
    come(ours, Served)
    return far(in_pieces(ours, tokens[:1], [0, 2, 11, 14, tokens.shape[1]]), model(tokens[:1]).logits)


def check_prefix(model: Any, ours: Any, tokens: Tensor) -> float:
    """What is kept after 16 tokens of one request serves another, on another slot, when the first has gone on."""
    come(ours, Served)
    first = Session(ours)
    first.feed(tokens[:1, :16])
    kept, cache = [served.point() for served in first.mixers], copy.deepcopy(first.cache)
    first.feed(tokens[1:, 16:])
    come(ours, lambda mixer: Served(mixer, slot=2))
    second = Session(ours, cache)
    second.at = 16
    for served, point in zip(second.mixers, kept, strict=True):
        served.put(point)
    return far(second.feed(tokens[:1, 16:]), model(tokens[:1]).logits[:, 16:])


def check_drafts(model: Any, ours: Any, tokens: Tensor) -> float:
    """Two drafts a step, of which none, one or both stand; what is rejected leaves no trace."""
    come(ours, Served)
    session, most = Session(ours), Served.DRAFTS
    found, turn = [session.feed(tokens[:1, :17])], 0
    while session.at < tokens.shape[1]:
        step = tokens[:1, session.at : session.at + 1 + most].clone()
        drafts = step.shape[1] - 1
        accepted = min(turn % (most + 1), drafts)
        if accepted < drafts:
            step[:, accepted + 1] = 3 + (step[:, accepted + 1] - 2) % (WORDS - 3)  # another word
        found.append(session.feed(step, verify=drafts > 0)[:, : accepted + 1])
        if drafts:
            session.reject(drafts, accepted)
        turn += 1
    return far(torch.cat(found, 1), model(tokens[:1]).logits)


CHECKS = {"full": check_full, "packed": check_packed, "decode": check_decode, "chunked prefill": check_pieces,
          "prefix hit": check_prefix, "speculation": check_drafts}  # fmt: skip


def far(got: Tensor, want: Tensor) -> float:
    """The largest deviation, as a part of the largest logit; infinity for what is no number."""
    value = float((got - want).abs().max() / want.abs().max())
    return value if value == value else float("inf")


def noise(model: nn.Module, tokens: Tensor) -> float:
    """How far the library's float32 logits are from its own float64 ones: the rounding that any float32 run has."""
    return far(model(tokens).logits, copy.deepcopy(model).double()(tokens).logits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; all without one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was measured there")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, float32 on the CPU")
    print(f"{'':18s} {'bound':>8s} " + " ".join(f"{what:>16s}" for what in CHECKS))
    for name in given.names or MODELS:
        model, ours = build(name)
        tokens = torch.randint(3, WORDS, (2, OFFSETS[-1]), generator=torch.Generator().manual_seed(7))
        bound = TIMES * noise(model, tokens)
        print(f"{name:18s} {bound:8.1e}", end="", flush=True)
        for what, check in CHECKS.items():
            value = check(model, ours, tokens)
            rows.append({"model": name, "check": what, "deviation": value, "bound": bound, "equal": value <= bound})
            print(f" {value:8.1e} {'equal' if value <= bound else 'DIFFERS':>7s}", end="", flush=True)
        print()
    if given.json:
        told = {"format": "statescan.real-models/1", "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
                "transformers": transformers.__version__, "device": "cpu", "times": TIMES, "rows": rows}  # fmt: skip
        given.json.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    return int(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
