"""The shape of a mixer: what one projected row holds, how wide its window and how large its state is (GDP-5, STEP-10).

    mamba2   z x B C dt          window over x B C    state [H, P, R]
    gdn      q k v z beta alpha  window over q k v    state [HV, K, V]
    gdp      z V K Q b a         window over V K Q    state [HV, K, V]    V, K, b copy-major inside a token
    kda      q k v z b f         window over q k v    state [HV, K, V]    f one number a key channel

A `bare` mixer is the recurrence alone: no z, no activation, no l2norm, no norm, gates taken from the row as they are.
Sources: https://github.com/NVIDIA/Megatron-LM, https://github.com/fla-org/flash-linear-attention
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from statescan.spec.contract import ShapeError, UnsupportedError

KINDS: tuple[str, ...] = ("mamba2", "gdn", "gdp", "kda")
NORM_FIRST: tuple[str, ...] = ("gdn", "kda")
"""Mixers whose norm comes before its gate (NORM-2)."""
OPERATION_OF: dict[str, str] = {
    "mamba2": "ssd", "gdn": "gated_delta_rule", "gdp": "gated_delta_product", "kda": "kimi_delta_attention",
}  # fmt: skip


@dataclass(frozen=True)
class MixerConfig:
    """Sizes and words of one mixer; None takes the default of its kind.

    `heads` are query and key heads (Mamba2: the heads of x), `value_heads` a multiple of them (delta family),
    `groups` share B and C (Mamba2). `chunk_size` is that of training, `inference_chunk_size` that of prefill.
    Raises UnsupportedError for an unknown kind, ShapeError for sizes that do not divide.

    >>> MixerConfig("mamba2", bare=True).parts
    (('x', 1), ('B', 1), ('C', 1), ('dt', 1))
    >>> MixerConfig("gdp", heads=1, value_heads=2, key_dim=3, value_dim=4, num_householder=2).d_proj
    39
    """

    kind: str
    heads: int = 1
    value_heads: int | None = None
    key_dim: int = 1
    value_dim: int = 1
    num_householder: int = 1
    headdim: int = 1
    d_state: int = 1
    groups: int = 1
    d_conv: int = 4
    chunk_size: int = 64
    inference_chunk_size: int | None = None
    bare: bool = False
    activation: str | None = "silu"
    conv_bias: bool = False
    bias: bool = False
    use_qk_l2norm: bool = True
    allow_neg_eigval: bool = False
    lower_bound: float | None = None
    scale: float | None = None
    dt_softplus: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm: bool = True
    norm_eps: float = 1e-5
    norm_before_gate: bool | None = None
    gate_activation: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedError(f"kind={self.kind!r}: one of {', '.join(KINDS)} is served (ERR-5)")
        many, few, names = (
            (self.heads, self.groups, "heads and groups") if self.kind == "mamba2"
            else (self.hv, self.heads, "value_heads and heads")
        )  # fmt: skip
        if few < 1 or many % few:
            label = "SSD-5" if self.kind == "mamba2" else "GDN-5"
            raise ShapeError(f"{names} are {many} and {few}: the first is a multiple of the second ({label})")
        if self.num_householder < 1 or (self.num_householder > 1 and self.kind != "gdp"):
            raise UnsupportedError(f"num_householder={self.num_householder} of a {self.kind} mixer (GDP-2)")

    @property
    def hv(self) -> int:
        """Value heads."""
        return self.heads if self.value_heads is None else self.value_heads

    @property
    def d_inner(self) -> int:
        """Channels of an output row, before the last projection."""
        return self.heads * self.headdim if self.kind == "mamba2" else self.hv * self.value_dim

    @property
    def operation(self) -> str:
        """The packed operation of the recurrence; `_prefill` and `_update` are its two forms on slots."""
        return OPERATION_OF[self.kind]

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Names and widths of what a row holds, in order."""
        keys, copies, z = self.heads * self.key_dim, self.num_householder, (("z", self.d_inner),)
        shared = self.groups * self.d_state
        rows: dict[str, tuple[tuple[str, int], ...]] = {
            "mamba2": (*z, ("x", self.d_inner), ("B", shared), ("C", shared), ("dt", self.heads)),
            "gdn": (("q", keys), ("k", keys), ("v", self.d_inner), *z, ("beta", self.hv), ("alpha", self.hv)),
            "gdp": (*z, ("V", copies * self.d_inner), ("K", copies * keys), ("Q", keys), ("b", copies * self.hv),
                    ("a", self.hv)),
            "kda": (("q", keys), ("k", keys), ("v", self.d_inner), *z, ("b", self.hv), ("f", self.hv * self.key_dim)),
        }  # fmt: skip
        return tuple(part for part in rows[self.kind] if not (self.bare and part[0] == "z"))

    @property
    def conv_parts(self) -> tuple[str, ...]:
        """Names of the parts that pass through the convolution; they lie next to each other in a row."""
        return {"mamba2": ("x", "B", "C"), "gdp": ("V", "K", "Q")}.get(self.kind, ("q", "k", "v"))

    @property
    def d_proj(self) -> int:
        """Width of a projected row."""
        return sum(width for _, width in self.parts)

    @property
    def conv_channels(self) -> int:
        """Channels C of the convolution."""
        return sum(width for name, width in self.parts if name in self.conv_parts)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """A slot of the window pool."""
        return self.conv_channels, self.d_conv

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A slot of the state pool."""
        if self.kind == "mamba2":
            return self.heads, self.headdim, self.d_state
        return self.hv, self.key_dim, self.value_dim

    @property
    def norm_group(self) -> int:
        """Channels that are normalised together: a head's values, or what one group of heads has (NORM-3)."""
        if self.kind in NORM_FIRST:
            return self.value_dim
        return self.d_inner // (self.groups if self.kind == "mamba2" else self.heads)

    @property
    def norm_weights(self) -> int:
        """Length of the norm's weight: shared by the heads (GDN, KDA), or one a channel."""
        return self.value_dim if self.kind in NORM_FIRST else self.d_inner

    @property
    def norm_words(self) -> tuple[bool, str]:
        """(norm before its gate, activation of the gate): those given, else those of the kind (NORM-2)."""
        first = self.kind in NORM_FIRST if self.norm_before_gate is None else self.norm_before_gate
        word = ("sigmoid" if self.kind == "kda" else "silu") if self.gate_activation is None else self.gate_activation
        return first, word

    @property
    def ssm_inference_chunk_size(self) -> int:
        """Chunk length of prefill, from which its tables are made (META-4)."""
        return self.chunk_size if self.inference_chunk_size is None else self.inference_chunk_size

    def split(self, row: Any) -> dict[str, Any]:
        """The parts of rows `[..., d_proj]` as views `[..., width]`; `conv` is the stretch of the convolved ones."""
        if row.shape[-1] != self.d_proj:
            raise ShapeError(f"rows have {row.shape[-1]} numbers: {self.d_proj} are needed (STEP-10)")
        found, start = {}, 0
        for name, width in self.parts:
            found[name] = row[..., start : start + width]
            start += width
        first = sum(w for n, w in self.parts[: [n for n, _ in self.parts].index(self.conv_parts[0])])
        return {**found, "conv": row[..., first : first + self.conv_channels]}


PARAMETERS: tuple[str, ...] = (
    "conv_weight", "conv_bias", "norm_weight", "A_log", "A", "D", "dt_bias", "in_proj", "out_proj",
)  # fmt: skip
"""Names of the parameters that a description may give, as nested lists or None."""
_OTHER_NAMES = {"chunk": "chunk_size", "householder": "num_householder"}
_FIELDS = {field.name for field in fields(MixerConfig)}


def read_config(described: Mapping[str, Any]) -> MixerConfig:
    """The configuration in a mixer's description (a trace's `mixer`); unknown words are refused (ERR-5).

    >>> read_config({"kind": "gdn", "bare": True, "chunk": 16, "row": ["q:1"], "conv_weight": [[1]]}).chunk_size
    16
    """
    given = {_OTHER_NAMES.get(name, name): value for name, value in described.items()
             if name not in PARAMETERS and name != "row"}  # fmt: skip
    unknown = sorted(set(given) - _FIELDS)
    if unknown:
        raise UnsupportedError(f"{unknown[0]}={given[unknown[0]]!r} is no setting of a mixer (ERR-5)")
    if "dt_limit" in given:
        given["dt_limit"] = tuple(float(bound) for bound in given["dt_limit"])
    return MixerConfig(**given)
