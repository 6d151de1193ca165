"""What every part of statescan agrees on: types, errors, the operation table, the clauses. Data, no behaviour.

The table below is the single source of signatures (`reference/`, `fast/`), of the vector schema, of the adapter
protocol and of the generated documentation. Axis letters have one meaning everywhere:

    T tokens in the pack      N rows (segments, requests)   J tokens of a row in one decode call
    C conv channels           W conv width                  H query/key heads     HV value heads
    G groups (B/C of Mamba2)  K key dim                     V value dim           M Householder copies
    P headdim                 R d_state                     slots                 batch
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib.resources import files
from typing import Any, Literal, NamedTuple

RULES_VERSION = 1
"""Version of the formats and rules; it changes only when a stored vector could be judged differently."""

# ---------------------------------------------------------------------------------------------------------------------
# Errors. One class per rule family; where upstream raises another built-in type, the class derives from that too.
# ---------------------------------------------------------------------------------------------------------------------


class ContractError(ValueError):
    """A violated rule. The message names the rule's label, the argument, the place and the value (ERR-2)."""


class PackingError(ContractError, RuntimeError):
    """Offsets or segment ids that describe no pack (PACK)."""


class ConvError(ContractError):
    """A convolution argument that fits no other family (CONV)."""


class SlotError(ContractError):
    """A slot index, or a number of accepted drafts, outside its rules (SLOT)."""


class ShapeError(ContractError):
    """A rank or a size that the operation table does not allow."""


class DtypeError(ContractError):
    """An element type that the operation table does not allow."""


class HeterogeneousStackError(ContractError, AssertionError):
    """Recurrent layers of one stack that do not share one chunking (STACK-3)."""


class CapacityError(ContractError, RuntimeError):
    """A pool or cache that has no room left (LIFE-1, SNAP-7)."""


class EmptyBatchError(ContractError, RuntimeError):
    """A step with neither decode nor prefill rows (STEP-11)."""


class UnsupportedError(ContractError, NotImplementedError, AssertionError):
    """An argument that is understood and cannot be honoured (ERR-5, SPEC-7)."""


ERRORS: tuple[type[ContractError], ...] = (
    PackingError, ConvError, SlotError, ShapeError, DtypeError,
    HeterogeneousStackError, CapacityError, EmptyBatchError, UnsupportedError,
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class PackedSeqParams:
    """Boundaries of a pack (THD format), field names as in Megatron-Core.

    Offsets are integer vectors `[N+1]` that start at 0; `*_padded` count the padding between segments as well and
    win where they are given (PACK-1). Offsets alone are enough (PACK-12): `total_tokens` and `seq_idx` are carried
    for callers who want them and are never derived here.
    Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.packed_seq_params.html
    """

    qkv_format: str | None = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    total_tokens: int | None = None
    seq_idx: Any = None


class SSMChunking(NamedTuple):
    """What every recurrent layer of a stack shares (STACK-1): chunk lengths in tokens and Householder copies."""

    chunk_size: int
    inference_chunk_size: int
    num_householder: int


class ElementType(NamedTuple):
    """A stored float type: significand bits p (unit roundoff 2^-p), least step 2^eta that counts, NumPy's name."""

    bits: int
    eta: int
    numpy: str


FLOAT_TYPES: dict[str, ElementType] = {
    "f64": ElementType(53, -1022, "float64"),
    "f32": ElementType(24, -126, "float32"),
    "f16": ElementType(11, -25, "float16"),
    "bf16": ElementType(8, -126, "bfloat16"),
}
INDEX_TYPES: dict[str, str] = {"i32": "int32", "i64": "int64"}
OPERAND_BITS: dict[str, int] = {"f64": 53, "f32": 24, "tf32": 11, "f16": 11, "bf16": 8}
"""Significand bits of the operand classes an implementation may declare; `tf32` is never stored."""

# ---------------------------------------------------------------------------------------------------------------------
# The operation table
# ---------------------------------------------------------------------------------------------------------------------

Kind = Literal["float", "index", "flag", "number", "word", "object", "pools"]


@dataclass(frozen=True)
class Argument:
    """One argument of an operation.

    `shape` holds axis letters, integers or products and sums of them ("T*M", "N+1"); `shapes` lists alternatives.
    `group` names the float tensor whose element type this one follows. `inout` tensors are changed in place and are
    `window` or `state` pools. A tensor has no default: optional tensors are None where absent.
    """

    name: str
    kind: Kind
    shape: tuple[str, ...] = ()
    shapes: tuple[tuple[str, ...], ...] = ()
    group: str = ""
    optional: bool = False
    inout: bool = False
    default: Any = None
    words: tuple[str | None, ...] = ()
    doc: str = ""

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("float", "index")

    @property
    def alternatives(self) -> tuple[tuple[str, ...], ...]:
        """Every shape the argument may have."""
        return self.shapes or (self.shape,)


@dataclass(frozen=True)
class Result:
    """One returned tensor; `like` names the argument whose element type it takes ("f32", "i32" for a fixed type)."""

    name: str
    shape: tuple[str, ...]
    like: str
    optional: bool = False
    shapes: tuple[tuple[str, ...], ...] = ()

    @property
    def alternatives(self) -> tuple[tuple[str, ...], ...]:
        """Every shape the result may have."""
        return self.shapes or (self.shape,)


@dataclass(frozen=True)
class Operation:
    """One row of the table: tensors in order, keyword-only settings after them, results in order."""

    name: str
    family: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    doc: str
    differentiable: bool = False
    token_axis: str = "T"
    tensors: tuple[Argument, ...] = field(init=False)
    settings: tuple[Argument, ...] = field(init=False)
    inout: tuple[Argument, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(a for a in self.arguments if a.is_tensor))
        object.__setattr__(self, "settings", tuple(a for a in self.arguments if not a.is_tensor))
        object.__setattr__(self, "inout", tuple(a for a in self.arguments if a.inout))


def _float(name: str, *shape: str, group: str = "", **more: Any) -> Argument:
    return Argument(name, "float", shape, group=group or name, **more)


def _index(name: str, *shape: str, **more: Any) -> Argument:
    return Argument(name, "index", shape, **more)


_ACTIVATION = Argument("activation", "word", words=(None, "silu", "swish"), doc='None, "silu" or "swish" (CONV-2)')
_LAYOUT = Argument("state_layout", "word", default="KV", words=("KV", "VK"), doc="order of a state's last two axes")
_L2NORM = Argument("use_qk_l2norm", "flag", default=False, doc="normalise q and k with l2norm (NORM-1)")
_SCALE = Argument("scale", "number", doc="factor on q; None means K^-1/2 (GDN-4)")
_FINAL = Argument("output_final_state", "flag", default=False)
_CU = _index("cu_seqlens", "N+1", doc="offsets (PACK-4)")
_CU_OPT = _index("cu_seqlens", "N+1", optional=True, doc="offsets (PACK-4)")
_IDS_OPT = _index("seq_idx", "1", "T", optional=True, doc="segment ids, -1 only at the end (PACK-8)")
_READ = _index("read_slots", "N", doc="slot a row resumes from; negative: fresh (SLOT-2)")
_WRITE = _index("write_slots", "N", optional=True, doc="slot a row stores to; negative: none; default read_slots")
_SNAP_AT = _index("snapshot_positions", "X", optional=True, doc="token offsets in the pack, negative: padding (SNAP-3)")
_ACCEPTED = _index("num_accepted", "N", optional=True, doc="resume from this intermediate entry; negative: live pool")
_TOKENS = _index("num_tokens", "N", optional=True, doc="real tokens of each row, 0..J (SPEC-6)")


def _conv_family() -> list[Operation]:
    weight = _float("weight", "C", "W")
    bias = _float("bias", "C", group="weight", optional=True)
    pool = _float("conv_pool", "slots", "C", "W", inout=True, doc="raw inputs, newest in the last column (SLOT-1)")
    return [
        Operation(
            "causal_conv1d", "conv",
            (
                Argument("x", "float", shapes=(("1", "T", "C"), ("batch", "T", "C")), group="x"),
                weight, bias, _IDS_OPT, _CU_OPT,
                _float("initial_windows", "N", "C", "W", group="x", optional=True, doc="entering windows (CONV-4)"),
                _ACTIVATION,
            ),
            (Result("y", ("batch", "T", "C"), "x"), Result("final_windows", ("N", "C", "W"), "x")),
            "Depthwise causal convolution of a pack; differentiable.", differentiable=True,
        ),
        Operation(
            "causal_conv1d_prefill", "conv",
            (
                _float("x", "1", "T", "C"), weight, bias, _CU, pool, _READ, _WRITE, _ACTIVATION, _SNAP_AT,
                _float("snapshot_windows", "X", "C", "W", group="conv_pool", optional=True, inout=True),
            ),
            (Result("y", ("1", "T", "C"), "x"),),
            "The packed convolution on a slot pool: rows resume from, and store to, their slots.",
        ),
        Operation(
            "causal_conv1d_update", "conv",
            (
                _float("x", "N", "J", "C"), weight, bias, pool, _READ, _WRITE, _ACTIVATION,
                _float("intermediate_windows", "slots", "I", "C", "W", group="conv_pool", optional=True, inout=True),
                _ACCEPTED, _TOKENS,
            ),
            (Result("y", ("N", "J", "C"), "x"),),
            "J tokens a row, window from and to its slot; entry j of the intermediates is the window after token j.",
            token_axis="J",
        ),
    ]  # fmt: skip


def _gate_family() -> list[Operation]:
    return [
        Operation(
            "softplus_gate", "gates",
            (_float("a", "...", "HV"), _float("A_log", "HV"), _float("dt_bias", "HV", optional=True)),
            (Result("g", ("...", "HV"), "f32"),), "g = -exp(A_log) softplus(a + dt_bias).", differentiable=True,
        ),
        Operation(
            "kda_gate", "gates",
            (
                _float("f", "...", "HV", "K"), _float("A_log", "HV", optional=True),
                _float("dt_bias", "HV", "K", optional=True), Argument("lower_bound", "number"),
            ),
            (Result("g", ("...", "HV", "K"), "f32"),),
            "The gate per key channel; with lower_bound b: g = b sigmoid(exp(A_log) (f + dt_bias)).",
            differentiable=True,
        ),
        Operation(
            "beta_gate", "gates",
            (_float("b", "...", "HV"), Argument("allow_neg_eigval", "flag", default=False)),
            (Result("beta", ("...", "HV"), "f32"),), "sigmoid(b), doubled if asked.", differentiable=True,
        ),
        Operation(
            "l2norm", "norms",
            (_float("x", "...", "D"), Argument("eps", "number", default=1e-6)),
            (Result("y", ("...", "D"), "x"),), "x / sqrt(sum of x^2 + eps).", differentiable=True,
        ),
        Operation(
            "rmsnorm_gated", "norms",
            (
                _float("x", "...", "D"), _float("z", "...", "D", group="x", optional=True),
                Argument("weight", "float", shapes=(("D",), ("group",)), group="weight"),
                Argument("eps", "number", default=1e-5), Argument("group_size", "number"),
                Argument("norm_before_gate", "flag", default=False),
                Argument("gate_activation", "word", default="silu", words=("silu", "sigmoid")),
            ),
            (Result("y", ("...", "D"), "x"),), "Gated root-mean-square norm.", differentiable=True,
        ),
    ]  # fmt: skip


def _delta_family(name: str, per_channel: bool, copies: bool) -> list[Operation]:
    rows = "T*M" if copies else "T"
    steps = "J*M" if copies else "J"
    gate = ("HV", "K") if per_channel else ("HV",)
    householder = (Argument("num_householder", "number", default=1),) if copies else ()

    def tokens(lead: str, one: str, many: str) -> tuple[Argument, ...]:
        return (
            _float("q", lead, one, "H", "K"), _float("k", lead, many, "H", "K", group="q"),
            _float("v", lead, many, "HV", "V", group="q"), _float("g", lead, one, *gate),
            _float("beta", lead, many, "HV", group="beta"),
        )  # fmt: skip

    pool = _float("state_pool", "slots", "HV", "K", "V", inout=True)
    return [
        Operation(
            name, "delta",
            (
                *tokens("1", "T", rows), _CU_OPT, _float("initial_state", "N", "HV", "K", "V", optional=True),
                *householder, _SCALE, _L2NORM, _FINAL,
            ),
            (
                Result("o", ("1", "T", "HV", "V"), "v"),
                Result("final_state", ("N", "HV", "K", "V"), "initial_state", optional=True),
            ),
            "The packed recurrence; differentiable.", differentiable=True,
        ),
        Operation(
            f"{name}_prefill", "delta",
            (
                *tokens("1", "T", rows), _CU, pool, _READ, _WRITE, *householder, _SCALE, _L2NORM, _LAYOUT, _SNAP_AT,
                _float("snapshot_states", "X", "HV", "K", "V", group="state_pool", optional=True, inout=True),
            ),
            (Result("o", ("1", "T", "HV", "V"), "v"),), "The packed recurrence on a slot pool.",
        ),
        Operation(
            f"{name}_update", "delta",
            (
                *tokens("N", "J", steps), pool, _READ, _WRITE,
                _float("intermediate_states", "slots", "I", "HV", "K", "V",
                       group="state_pool", optional=True, inout=True),
                _ACCEPTED, _TOKENS, *householder, _SCALE, _L2NORM, _LAYOUT,
            ),
            (Result("o", ("N", "J", "HV", "V"), "v"),), "J tokens a row, state from and to its slot.", token_axis="J",
        ),
    ]  # fmt: skip


def _ssd_family() -> list[Operation]:
    def tokens(lead: str, axis: str) -> tuple[Argument, ...]:
        return (
            _float("x", lead, axis, "H", "P"), _float("dt", lead, axis, "H"), _float("A", "H"),
            _float("B", lead, axis, "G", "R", group="x"), _float("C", lead, axis, "G", "R", group="x"),
            Argument("D", "float", shapes=(("H",), ("H", "P")), group="D", optional=True),
            _float("z", lead, axis, "H", "P", group="x", optional=True), _float("dt_bias", "H", optional=True),
        )  # fmt: skip

    settings = (Argument("dt_softplus", "flag", default=True),
                Argument("dt_limit", "object", default=(0.0, float("inf"))))  # fmt: skip
    pool = _float("state_pool", "slots", "H", "P", "R", inout=True)
    return [
        Operation(
            "ssd", "ssd",
            (
                *tokens("1", "T"), _IDS_OPT, _CU_OPT, _float("initial_state", "N", "H", "P", "R", optional=True),
                *settings, _FINAL,
            ),
            (
                Result("y", ("1", "T", "H", "P"), "x"),
                Result("final_state", ("N", "H", "P", "R"), "initial_state", optional=True),
            ),
            "The packed Mamba2 recurrence; differentiable.", differentiable=True,
        ),
        Operation(
            "ssd_prefill", "ssd",
            (
                *tokens("1", "T"), _CU, pool, _READ, _WRITE, *settings, _SNAP_AT,
                _float("snapshot_states", "X", "H", "P", "R", group="state_pool", optional=True, inout=True),
            ),
            (Result("y", ("1", "T", "H", "P"), "x"),), "The packed Mamba2 recurrence on a slot pool.",
        ),
        Operation(
            "ssd_update", "ssd",
            (
                *tokens("N", "J"), pool, _READ, _WRITE,
                _float("intermediate_states", "slots", "I", "H", "P", "R",
                       group="state_pool", optional=True, inout=True),
                _ACCEPTED, _TOKENS, *settings,
            ),
            (Result("y", ("N", "J", "H", "P"), "x"),), "J tokens a row, state from and to its slot.", token_axis="J",
        ),
    ]  # fmt: skip


def _packed_family() -> list[Operation]:
    params = Argument("packed_seq_params", "object", doc="a PackedSeqParams")
    return [
        Operation("get_cu_seqlens", "packed", (params,), (Result("cu_seqlens", ("N+1",), "cu_seqlens_q"),),
                  "The offsets that count: padded ones where given."),
        Operation("build_packed_seq_idx", "packed", (params, Argument("total_tokens", "number")),
                  (Result("seq_idx", ("1", "T"), "i32"),), "Segment ids of every row of the pack."),
        Operation("check_fla_sequence_packing_support", "versions", (), (), "(ok, reason or None)."),
        Operation("check_mamba_sequence_packing_support", "versions",
                  (Argument("for_inference_not_training", "flag", default=True),), (), "(ok, reason or None)."),
    ]  # fmt: skip


def _serving_family() -> list[Operation]:
    return [
        Operation(
            "commit_accepted", "delta",
            (Argument("pools", "pools", inout=True), Argument("intermediates", "pools"), _index("slots", "N"),
             _index("num_accepted", "N")), (),
            "Copy entry num_accepted[n] of each slot's intermediates into its pool: rollback as an operation.",
        ),
        Operation("ssm_chunking", "host", (Argument("layer_type_list", "object"), Argument("layers", "object")), (),
                  "The chunking all recurrent layers share, or None."),
        Operation("layer_map", "host", (Argument("layer_type_list", "object"),), (),
                  "The slab of each layer: recurrent layers counted from 0, None for the others (LAYER-2)."),
        Operation(
            "accept_drafts", "host",
            (_index("tokens", "N", "J", doc="what each row was given: its base token, then drafts"),
             _index("chosen", "N", "J", doc="what the model chose behind each of them"),
             _index("num_tokens", "N", optional=True, doc="real tokens of each row, 0..J (SPEC-6)")),
            (Result("num_accepted", ("N",), "i32"), Result("next_tokens", ("N",), "i64")),
            "How many drafts of each row stand, and the base token of its next step (SPEC-8).",
        ),
        Operation("edit_tables", "host", (Argument("tables", "object"), Argument("events", "object")), (),
                  "Rows of a batch swapped, dropped and added in the index tables of all layer groups (LAYER-3)."),
        Operation("head_shards", "host", (Argument("mixer", "object"), Argument("ranks", "number")), (),
                  "Columns, channels and norm groups that each rank has of a mixer that is cut by heads (PAR-2)."),
        Operation(
            "token_shards", "host",
            (_index("cu_seqlens", "N+1"), Argument("total_tokens", "number"), Argument("ranks", "number")),
            (Result("seq_idx", ("ranks", "shard_tokens"), "i32"),
             Result("shard_cu_seqlens", ("ranks", "N+1"), "i32"), Result("entering_rows", ("ranks",), "i32")),
            "Ids, offsets and the entering segment of each rank of a pack that is cut by tokens (PAR-1, PAR-3).",
        ),
        Operation("run_slots", "host", (Argument("slots", "number"), Argument("events", "object")), (),
                  "Allocations and releases of a slot pool in order: what was handed out, and what is free (LIFE-1)."),
        Operation("hash_blocks", "host",
                  (Argument("tokens", "object"), Argument("block_size", "number"),
                   Argument("salt", "object", optional=True, doc="what sets equal tokens apart")), (),
                  "The name of every whole block of a prompt, chained to what is before it (SNAP-8)."),
        Operation(
            "plan_skip", "host",
            (Argument("prompt_tokens", "number"), Argument("finished", "number"), Argument("matched", "number"),
             Argument("states", "object", doc="behind how many blocks a state is kept"),
             Argument("block_size", "number"), Argument("limit", "number", optional=True),
             Argument("least_tokens", "number", optional=True)), (),
            "Tokens of a prompt that are not computed, because the state behind them is restored (SNAP-1, SNAP-2).",
        ),
        Operation(
            "plan_snapshots", "host",
            tuple(Argument(name, "number") for name in ("prompt_tokens", "finished", "piece", "skip", "matched",
                                                        "block_size", "alignment")), (),
            "Positions of a piece whose states are kept, and the block that ends with the prompt (SNAP-9, SNAP-5).",
        ),
        Operation(
            "run_state_cache", "host",
            (Argument("blocks", "number"), Argument("places", "number"), Argument("events", "object"),
             Argument("policy", "object", optional=True, doc='"lru" or "ref_zero"')), (),
            "A block table and the states under its blocks, event by event (SNAP-6, SNAP-7, SNAP-8).",
        ),
        Operation(
            "decode_metadata", "host",
            (_index("slots", "N", doc="slot of each decode request, in the order of the batch"),
             Argument("padded_requests", "number")),
            (Result("batch_indices_decode", ("padded_requests",), "i64"),),
            "The index array of the decode partition, -1 behind the real requests (META-2).",
        ),
        Operation(
            "prefill_metadata", "host",
            (
                _index("lengths", "N", doc="tokens of each prefill request in this step"),
                _index("slots", "N", doc="slot of each prefill request"),
                _index("snapshot_rows", "X", optional=True, doc="the request of each snapshot, ascending"),
                _index("snapshot_offsets", "X", optional=True, doc="tokens of its piece before the snapshot"),
                Argument("padded_requests", "number"), Argument("padded_tokens", "number"),
                Argument("chunk_size", "number"), Argument("decode_tokens", "number", optional=True),
                Argument("snapshot_capacity", "number", optional=True), Argument("d_conv", "number", optional=True),
                Argument("num_householder", "number", optional=True),
            ),
            tuple(Result(name, shape, like) for name, shape, like in _PREFILL_ARRAYS),
            "Every array that prefill hooks read from the context, padded (META).",
        ),
    ]  # fmt: skip


_PREFILL_ARRAYS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("cu_seqlens", ("padded_requests+1",), "i32"), ("batch_indices_prefill", ("padded_requests",), "i32"),
    ("seq_idx", ("1", "padded_tokens"), "i32"), ("cu_chunk_seqlens", ("max_chunks+1",), "i32"),
    ("last_chunk_indices", ("padded_requests",), "i32"), ("seq_idx_for_varlen", ("max_chunks",), "i32"),
    ("conv_seq_idx", ("padded_tokens",), "i32"), ("conv_seq_start", ("padded_tokens",), "i32"),
    ("device_decode_prefill", ("2",), "i32"), ("intermediate_chunk_indices", ("snapshot_capacity",), "i64"),
    ("intermediate_abs_positions", ("snapshot_capacity",), "i32"), ("intermediate_real_count", ("1",), "i32"),
    ("chunk_indices", ("max_chunks", "2"), "i32"), ("chunk_indices_dp", ("max_chunks_dp", "2"), "i32"),
    ("chunk_offsets", ("padded_requests+1",), "i32"),
)
"""Arrays of the prefill partition: name, shape in padded sizes, element type; the first twelve as upstream has them."""


def _step_family() -> list[Operation]:
    """What a mixer shows an engine; called through objects, so these rows name them and say what changes."""
    rows = _float("zxBCdt", "N", "J", "D")
    pools = (_float("conv_state", "slots", "C", "W", inout=True), _float("ssm_state", "slots", "...", inout=True))
    context = Argument("context", "object")
    return [
        Operation(
            "ssm_decode", "step",
            (rows, *pools, _index("batch_indices", "N"),
             _float("intermediate_conv_state", "slots", "J", "C", "W", group="conv_state", optional=True, inout=True),
             _float("intermediate_ssm_state", "slots", "J", "...", group="ssm_state", optional=True, inout=True)),
            (Result("y", ("N", "J", "D"), "zxBCdt"),), "Hook: J tokens of every decode request.", token_axis="J",
        ),
        Operation("ssm_prefill", "step", (_float("zxBCdt", "T", "1", "D"), *pools, context),
                  (Result("y", ("T", "1", "D"), "zxBCdt"),), "Hook: the pieces of all prefill requests in one call."),
        Operation("ssm_dynamic_inference", "step", (_float("hidden_states", "T", "1", "D"), context),
                  (Result("out", ("T", "1", "D"), "hidden_states"),), "A layer's step: both hooks, and the merge."),
        Operation("engine.run", "step",
                  (Argument("sizes", "object"), Argument("requests", "object"), Argument("program", "object")), (),
                  "A whole program: what each step gives the hooks, the edits before and after them, what is left."),
        Operation("engine.edit", "step", (Argument("memory", "object"), Argument("event", "object")), (),
                  "One edit that an engine makes between hooks: zero, restore, roll back, commit, save, load."),
    ]  # fmt: skip


OPERATIONS: dict[str, Operation] = {
    op.name: op
    for op in [
        *_packed_family(), *_conv_family(), *_gate_family(),
        *_delta_family("gated_delta_rule", per_channel=False, copies=False),
        *_delta_family("gated_delta_product", per_channel=False, copies=True),
        *_delta_family("kimi_delta_attention", per_channel=True, copies=False),
        *_ssd_family(), *_serving_family(), *_step_family(),
    ]
}  # fmt: skip
"""Every operation by name. All take a further keyword `check=None` (section "Checks" of the guide)."""

# ---------------------------------------------------------------------------------------------------------------------
# What an implementation may claim (capabilities), and what may become of a vector (statuses)
# ---------------------------------------------------------------------------------------------------------------------

FEATURES: dict[str, tuple[str, ...]] = {
    "packing": ("packed.cu", "packed.seq_idx", "packed.trailing", "padded_rows", "empty_segments", "batch"),
    "state": ("state.in", "state.out", "slot.pool", "slot.negative", "slot.split", "tokens.many", "intermediates",
              "snapshots.grid", "snapshots.any"),
    "rules": ("heads.gva", "groups", "beta.double", "decay.zero", "decay.floor", "l2norm.inside", "gate.inside",
              "z.inside", "D.head", "D.channel", "dt.limit", "householder:M", "gate.sigmoid", "gate.sigmoid.first"),
    "conv": ("act.none", "act.silu", "bias", "width:2", "width:3", "width:4", "window.W", "window.W-1"),
    "promises": ("grad", "repeatable", "batch.invariant", "causal.bitwise", "carry.f32", "graph.replay", "strided",
                 "offsets.64", "checks.shape", "checks.values", "bare", "num_accepted", "num_tokens"),
}  # fmt: skip

STATUSES: tuple[str, ...] = (
    "protocol", "timeout", "error", "fail.shape", "fail.dtype", "fail.nonfinite", "fail.touched", "fail.unwritten",
    "fail.value", "fail.relation", "fail.unstable", "fail.accepted", "fail.wrong_error", "fail.partial", "fail.silent",
    "xpass", "xfail", "not_applicable", "not_run", "pass",
)  # fmt: skip
"""Closed, in order of precedence: what is judged first stands first."""

PROFILES: tuple[str, ...] = ("Core", "Packed", "Serving", "Speculative")

# ---------------------------------------------------------------------------------------------------------------------
# Clauses
# ---------------------------------------------------------------------------------------------------------------------


class Clause(NamedTuple):
    """A permanent label, the version it appeared in, and `planned`, `active` or `retired -> LABEL`."""

    label: str
    since: str
    state: str

    @property
    def family(self) -> str:
        return self.label.rpartition("-")[0]


CLAUSES: dict[str, Clause] = {
    words[0]: Clause(words[0], words[1], words[2].strip())
    for line in files("statescan.spec").joinpath("CLAUSES").read_text("utf-8").splitlines()
    if line.strip() and not line.startswith("#")
    for words in [line.split(None, 2)]
}
"""The append-only list in `spec/CLAUSES`, by label."""

FAMILIES: tuple[str, ...] = tuple(dict.fromkeys(clause.family for clause in CLAUSES.values()))

PACKED_SEQ_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(PackedSeqParams))
