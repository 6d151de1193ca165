"""The delta family twice, token by token and in chunks with explicit tables, and the rows of state pools for both.

All tokens of a call lie one after another in one stream, whatever rows they belong to; M copies are M rows a token,
the gate on the first and the query on the last. A row of a call is a stretch of the stream that starts from a state of
its own. `StateModel` knows rows, slots, snapshots and drafts and is shared with Mamba2; a recurrence adds one step and
one chunk.

In a chunk row i writes k_i u_i^T. With D_ij the product of the decays after row j up to row i (never a quotient, so
that a decay of exp(-1024) costs later rows nothing) and E_i that of all up to row i:

    u_i = beta_i (v_i - S^T (E_i k_i)) - sum over j < i of beta_i (k_i . D_ij k_j) u_j
    o_i = S^T (E_i q_i) + sum over j <= i of (q_i . D_ij k_j) u_j
    S  <- E_L S + sum over j of (D_Lj k_j) u_j^T

Each fault is one comparison with its id, at the place where its mechanism sits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statescan.conformance.mutants.conv import as_if_contiguous
from statescan.conformance.mutants.gates import L2NORM_FAULTS, pull_unit_rows, to_bf16, unit_rows
from statescan.conformance.mutants.packed import lenient_offsets, refusals
from statescan.reference import delta, delta_grad
from statescan.reference.arrays import Array, Float64, check_arguments, dtype_name, round_to, widen
from statescan.reference.delta import check_commit, check_decay
from statescan.reference.packed import unpack_segments
from statescan.reference.pools import live_rows
from statescan.spec.contract import OPERATIONS, ContractError, ShapeError

Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Call = dict[str, Any]
"""The arguments of one call by name."""
Mark = tuple[int, int]
"""A place where a state may be wanted: row, and number of its tokens that have been taken in."""
States = dict[Mark, Float64]
Grads = dict[str, Float64]
Stream = tuple[Float64, ...]
"""Tensors with one row for each row of the stream."""

CHUNK = 4
TILE = 2
NARROW_EVERY = 64
FLOOR = -20.0
SMALLEST_STEP = 2.0**-10

# What every operation on rows of states knows, however it scans.
POOL_FAULTS: tuple[str, ...] = (
    # packing
    "decreasing-offsets-clamped", "offsets-past-the-pack-accepted", "float-offsets-truncated",
    "one-segment-taken-as-unpacked", "trailing-zero-tokens-dropped", "empty-pack-refused",
    "batch-with-offsets-flattened", "state-leaks-across-boundary", "state-tail-computed", "nan-row-reaches-state",
    "state-empty-segment-shifts-later-rows", "empty-segment-zeroes-state",
    # entering and final states
    "entering-state-ignored", "entering-state-dropped-for-one-row", "entering-state-of-segment-zero",
    "entering-rows-compacted", "several-tokens-start-fresh", "fresh-state-from-last-call", "final-state-not-stored",
    # slots and padding
    "state-negative-slot-clamped", "state-only-minus-one-is-padding", "state-score-only-stores",
    "fresh-row-resumes-last-slot", "slots-looked-up-by-token", "state-untouched-slots-cleared",
    "duplicate-write-accepted", "write-over-others-read-accepted", "slot-index-wraps", "state-fresh-by-multiplying",
    "state-padding-row-writes-last-slot", "state-padding-row-computed", "padding-output-from-slot-zero",
    "last-row-owns-the-tail",
    # memory, determinism, errors
    "input-overwritten", "state-read-slot-written-too", "state-strides-ignored", "strided-pool-copied",
    "state-padded-outputs-unwritten", "state-buffers-accumulate", "state-call-counter-leaks",
    "state-row-uses-row-zeros-slot", "rows-read-as-tokens-of-one", "one-class-for-all", "message-without-label",
    "writes-before-refusing", "snapshot-positions-without-buffer-ignored",
    # snapshots and drafts
    "state-snapshot-one-late", "snapshot-position-within-row", "snapshot-skipped-for-score-only",
    "more-tokens-than-entries-accepted", "state-intermediates-one-late", "state-intermediates-by-row",
    "state-all-entries-written", "state-accepted-off-by-one", "accepted-ignored", "accepted-count-unbounded",
    "state-short-row-runs-full",
    # roundings, decays
    "state-store-truncates", "decay-of-previous-token", "decay-of-first-token-skipped", "neighbours-decay",
    "decay-floored",
    # gradients
    "gate-gradient-missing", "state-gradient-crosses-boundary", "padding-gradient-not-zero",
    "entering-state-gradient-missing",
)  # fmt: skip

# What only a loop over tokens knows.
TOKEN_FAULTS: tuple[str, ...] = (
    "read-before-write", "state-looks-ahead", "final-state-before-last-write", "dot-accumulates-in-bf16",
    "state-kept-in-bf16", "state-rounded-every-64-tokens",
)  # fmt: skip

# What only chunks know.
CHUNK_FAULTS: tuple[str, ...] = (
    "last-partial-chunk-dropped", "chunk-edge-token-twice", "chunk-grid-not-restarted",
    "empty-segment-without-a-chunk", "one-token-row-in-chunks-nan", "padded-chunk-rows-decay-the-state",
    "chunk-state-in-bf16", "entering-state-not-decayed", "entering-state-at-every-chunk",
    "decay-measured-from-the-pack", "entry-decay-measured-from-tile", "decay-by-positive-exponent",
    "decay-masked-after-exponent", "decay-anchored-at-later-row", "output-mask-strict",
    "output-reads-state-transposed", "snapshot-rounded-to-the-chunk-grid", "snapshot-skipped-in-short-piece",
    "masked-exponent-gradient-nan",
)  # fmt: skip

# What the delta family alone knows, however it scans.
DELTA_FAULTS: tuple[str, ...] = (
    "scale-ignored", "scale-twice", "scale-of-value-dim", "heads-tiled", "gate-of-key-head",
    "heads-that-do-not-divide-accepted", "entering-state-transposed", "layout-inferred-from-sizes",
    "layout-word-ignored", "q-scaled-in-place", "gate-domain-not-checked", "gate-kept-below-zero",
    "decay-at-every-copy", "decay-at-last-copy", "copies-descend", "read-after-first-copy", "one-copy-skips-decay",
    "copies-laid-out-first", "one-beta-for-all-copies", "decay-of-channel-zero", "equal-channels-summed",
    "gate-lanes-past-k-read", "gate-gradient-of-head-zero", "beta-gradient-through-write-only", *L2NORM_FAULTS,
    "commit-takes-the-live-state", "rollback-state-only", "commit-by-row",
)  # fmt: skip
DELTA_TOKEN_FAULTS: tuple[str, ...] = (
    "decay-after-write", "correction-sees-undecayed-state", "beta-on-value-only", "beta-on-key-twice",
    "correction-left-out", "decay-on-value-columns", "values-past-k-left-out",
)  # fmt: skip
DELTA_CHUNK_FAULTS: tuple[str, ...] = ("solve-cut-to-one-step", "system-with-diagonal")

FAULTS: tuple[str, ...] = (*POOL_FAULTS, *TOKEN_FAULTS, *DELTA_FAULTS, *DELTA_TOKEN_FAULTS)
CHUNKED_FAULTS: tuple[str, ...] = (*POOL_FAULTS, *CHUNK_FAULTS, *DELTA_FAULTS, *DELTA_CHUNK_FAULTS)


def build(fault: str | None = None, chunk: int | None = None) -> Mapping[str, Callable[..., Any]]:
    """The delta family, right or with one fault: token by token, or in chunks of that many rows of the stream."""
    model = DeltaModel(fault, chunk)
    names = ("gated_delta_rule", "gated_delta_product", "kimi_delta_attention")
    family = {key: operation for name in names for key, operation in operations(model, name, delta, delta_grad).items()}
    return {**family, "commit_accepted": model.commit_accepted}


def build_chunked(fault: str | None = None, chunk: int = CHUNK) -> Mapping[str, Callable[..., Any]]:
    """The same in chunks."""
    return build(fault, chunk)


def operations(
    model: StateModel, name: str, forward: ModuleType, backward: ModuleType
) -> dict[str, Callable[..., Any]]:
    """The three ways to call operation `name` and its gradient, with the signatures of the reference's modules."""
    return {
        name: _like(getattr(forward, name), partial(model.run_packed, name)),
        f"{name}_prefill": _like(getattr(forward, f"{name}_prefill"), partial(model.run_prefill, f"{name}_prefill")),
        f"{name}_update": _like(getattr(forward, f"{name}_update"), partial(model.run_update, f"{name}_update")),
        f"{name}_grad": _like(getattr(backward, f"{name}_grad"), partial(model.run_grad, name)),
    }


def _like(function: Callable[..., Any], run: Callable[[Call], Any]) -> Callable[..., Any]:
    """`run` on the arguments by name, behind the signature of `function`."""
    signature = inspect.signature(function)

    def operation(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        return run(dict(bound.arguments))

    operation.__signature__ = signature  # type: ignore[attr-defined]
    return operation


class Launch(NamedTuple):
    """What one start of a scan is given: where each row lies among the tokens of the call, and what it starts from."""

    starts: Index  # [N]
    ends: Index  # [N]
    live: Mask  # [N] rows that are run
    entering: Float64  # [N, ...]
    written: Mask  # [tokens] those whose outputs are kept
    faded: Mask  # [tokens] those that are multiplied by 0 instead of left out: none in a right model
    packed: bool  # rows lie one behind the other in a pack


class Rows(NamedTuple):
    """The slots of the rows of a call; negative: none."""

    read: Index  # [N]
    write: Index  # [N]

    @property
    def live(self) -> Mask:
        return np.asarray((self.read >= 0) | (self.write >= 0))


class Chunk(NamedTuple):
    """An entry of the chunk table: rows start .. end of the stream, which belong to row `row` of the call."""

    row: int
    start: int
    end: int
    first: bool  # of its row


class Entry(NamedTuple):
    """How a chunk's entering state decays: in a right model by the chunk's own rows and nothing else."""

    undecayed: bool
    origin: Float64  # [heads, 1 or K], a log-decay that is added


# ---------------------------------------------------------------------------------------------------------------------
# Rows of states
# ---------------------------------------------------------------------------------------------------------------------


class StateModel:
    """Rows that carry a matrix state from and to arguments or slots, with at most one fault.

    `chunk` None: token by token. A recurrence fills in what is not implemented here.
    """

    leading = ""
    """The token tensor with one row a token."""
    valued = ""
    """The token tensor whose type and head shape the outputs have; stored over by a certain fault."""
    content: tuple[str, ...] = ()
    """The token tensors without gates: what is zero in an all-zero token."""

    def __init__(self, fault: str | None = None, chunk: int | None = None) -> None:
        self.fault, self.chunk = fault, chunk
        self.calls = 0
        self.last: Float64 | None = None

    def _stream(self, call: Call, launch: Launch) -> Stream:
        """Every token of the call in float64, contiguous, parameters applied."""
        raise NotImplementedError

    def _step(self, row: Stream, state: Float64) -> tuple[Float64, Float64]:
        """Output and state after one row of the stream."""
        raise NotImplementedError

    def _solve(
        self, part: Stream, state: Float64, before: Entry, marks: Sequence[int]
    ) -> tuple[Float64, list[Float64], Float64]:
        """Outputs of one chunk, the states after `marks` of its rows, and the state after all of them."""
        raise NotImplementedError

    def _log_decay(self, stream: Stream) -> Float64:
        """The log-decay of every row of the stream, `[R, heads, 1 or K]`."""
        raise NotImplementedError

    def shift_decay(self, g: Float64, launch: Launch) -> Float64:
        """The log-decay of every token, `[T, heads, ...]`: as it is, but for faults."""
        if self.fault == "decay-of-previous-token":
            return g[np.maximum(np.arange(len(g)) - 1, 0)]
        if self.fault == "decay-of-first-token-skipped":
            g = g.copy()
            g[launch.starts[launch.ends > launch.starts]] = 0.0
        if self.fault == "neighbours-decay" and g.shape[1] > 1:
            g = g.copy()
            g[:, -1] = g[:, -2]
        return np.maximum(g, FLOOR) if self.fault == "decay-floored" else g

    def _faded(self, stream: Stream, launch: Launch, copies: int) -> Stream:
        """The stream with padding multiplied by 0 where a fault runs over it so."""
        if not launch.faded.any():
            return stream
        kept = np.repeat(~launch.faded, copies).astype(np.float64)
        return tuple(part * kept.reshape(-1, *[1] * (part.ndim - 1)) for part in stream)

    def _finish(self, call: Call, outputs: Float64) -> Float64:
        """Outputs of the tokens from those of the scan."""
        return outputs

    def _check(self, call: Call) -> None:
        """Value rules beyond those of the table."""

    # -----------------------------------------------------------------------------------------------------------------
    # The three ways to call
    # -----------------------------------------------------------------------------------------------------------------

    def run_packed(self, name: str, call: Call) -> tuple[Array, Array | None]:
        """Outputs of a pack, and the final states if asked for."""
        call = self._accept(name, call)
        launch = self._pack(call, None)
        count = launch.starts.size - self._tail_rows(call)
        lengths = (launch.ends - launch.starts).tolist()
        outputs, states = self._scan(call, launch, {(n, lengths[n]) for n in range(count)})
        final = np.zeros((count, *launch.entering.shape[1:]))
        for n in range(count):
            final[n] = self._after(states, (n, lengths[n]), final[n])
        self.last = final[-1] if count else self.last
        given = call["initial_state"]
        kind = gate_kind(call[self.valued]) if given is None else dtype_name(given)
        return self._deliver(call, launch, outputs), self._rounded(final, kind) if call["output_final_state"] else None

    def run_prefill(self, name: str, call: Call) -> Array:
        """Outputs of a pack whose rows resume from, and store to, slots."""
        call = self._accept(name, call)
        rows = self._rows(call)
        launch = self._pack(call, rows)
        snapshots = self._snapshots(call, launch, rows)
        lengths = launch.ends - launch.starts
        finals = [(n, int(lengths[n])) for n in range(len(rows.read))]
        outputs, states = self._scan(call, launch, {*finals, *snapshots.values()})
        if self.fault != "final-state-not-stored":
            self._store_final(call, rows, finals, states)
        if snapshots:
            self._put(self._view(call, "snapshot_states"), [((i,), mark) for i, mark in snapshots.items()], states)
        return self._deliver(call, launch, outputs)

    def run_update(self, name: str, call: Call) -> Array:
        """Outputs of J tokens a row, from and to slots."""
        call = self._accept(name, call)
        shape = call[self.leading].shape
        if self.fault == "rows-read-as-tokens-of-one" and shape[0] > 1:
            call = self._as_one_row(call)
        rows = self._rows(call)
        launch = self._decode(call, rows)
        lengths = launch.ends - launch.starts
        finals = [(n, int(lengths[n])) for n in range(len(rows.read))]
        entries = self._entries(call, rows, lengths)
        outputs, states = self._scan(call, launch, {*finals, *(mark for _, mark in entries)})
        self._store_final(call, rows, finals, states)
        if entries:
            self._put(self._view(call, "intermediate_states"), entries, states)
        target = call[self.valued]
        if self.fault == "input-overwritten" and call["intermediate_states"] is None and target.flags.writeable:
            self._store_over(target, rows, finals, states)
        return self._deliver(call, launch, outputs, shape[:2])

    # -----------------------------------------------------------------------------------------------------------------
    # Arguments
    # -----------------------------------------------------------------------------------------------------------------

    def run_grad(self, name: str, call: Call) -> Grads:
        """Gradients of every float input given."""
        raise NotImplementedError

    def _accept(self, name: str, call: Call) -> Call:
        """The arguments as the kernel gets them, once the rules are kept."""
        call = _LENIENT.get(self.fault or "", _same)(call)
        steps = call[self.leading].shape[1] if call[self.leading].ndim > 1 else 0
        if call.get("cu_seqlens") is not None:
            call = {**call, "cu_seqlens": lenient_offsets(self.fault, call["cu_seqlens"], steps)}
        shown = self._shown(call)
        with refusals(self.fault):
            try:
                check_arguments(name, *(
                    {argument.name: shown[argument.name] for argument in arguments}
                    for arguments in (OPERATIONS[name].tensors, OPERATIONS[name].settings)
                ))  # fmt: skip
                self._check(call)
            except ContractError:
                if self.fault == "writes-before-refusing":
                    _clear_slots(call)
                raise
        if self.fault == "empty-pack-refused" and steps == 0:
            raise ShapeError(f"{self.leading} has no tokens: at least one is needed (ERR-1)")
        return call

    def _shown(self, call: Call) -> Call:
        """What the rules are shown instead of the call."""
        return _HIDDEN.get(self.fault or "", _same)(call)

    def _load(self, array: Array) -> Float64:
        """A tensor in float64 and in C order, so that its strides cannot choose between two roundings."""
        seen = as_if_contiguous(array) if self.fault == "state-strides-ignored" else array
        return np.ascontiguousarray(widen(seen))

    def _flat(self, array: Array) -> Float64:
        """A token tensor without its leading axis: all tokens of the call, one after another."""
        loaded = self._load(array)
        return loaded.reshape(loaded.shape[0] * loaded.shape[1], *loaded.shape[2:])

    def _view(self, call: Call, name: str) -> Array:
        """A pool or buffer as the kernel addresses it, keys before values."""
        pool: Array = call[name]
        if self.fault == "state-strides-ignored":
            pool = as_if_contiguous(pool)
        if self.fault == "strided-pool-copied":
            pool = np.ascontiguousarray(pool)
        return self._turned(pool, call)

    def _turned(self, states: Array, call: Call) -> Array:
        return states

    def _deliver(
        self, call: Call, launch: Launch, outputs: Float64, lead: tuple[int, ...] | None = None
    ) -> Array:
        """The outputs in the shape and type of the call, rounded once; tokens that are not written give 0."""
        like, tokens = call[self.valued], self._finish(call, outputs)
        blank = np.nan if self.fault == "state-padded-outputs-unwritten" else 0.0
        kept = np.where(launch.written.reshape(-1, *[1] * (tokens.ndim - 1)), tokens, blank)
        lead = call[self.leading].shape[:2] if lead is None else lead
        rounded = round_to(kept.reshape(*lead, *tokens.shape[1:]), dtype_name(like))
        self.calls += 1
        if self.fault == "state-call-counter-leaks" and self.calls % 2 == 0:
            rounded.reshape(-1).view(f"u{rounded.itemsize}")[:1] ^= 1
        return rounded

    def _rounded(self, states: Float64, name: str) -> Array:
        """States in the type they are stored in, rounded once."""
        rounded = round_to(states, name)
        if self.fault != "state-store-truncates":
            return rounded
        bits = rounded.view(f"u{rounded.itemsize}")  # sign and magnitude: one less is one step towards zero
        bits[np.abs(widen(rounded)) > np.abs(states)] -= 1
        return rounded

    # -----------------------------------------------------------------------------------------------------------------
    # Rows of a pack, rows of a decode call
    # -----------------------------------------------------------------------------------------------------------------

    def _pack(self, call: Call, rows: Rows | None) -> Launch:
        """A packed call: rows lie one behind the other, or each batch row is one."""
        batch, steps = call[self.leading].shape[:2]
        starts, ends = self._bounds(call, batch, steps)
        if self.fault == "trailing-zero-tokens-dropped":
            filled = np.zeros(batch * steps, np.bool_)
            for name in self.content:
                held = (self._flat(call[name]) != 0).any(axis=(1, 2))
                filled |= held.reshape(len(filled), len(held) // max(len(filled), 1)).any(axis=1)
            ends = np.array([_real_end(filled, s, e) for s, e in zip(starts, ends, strict=True)], np.int64)
        live = np.ones(len(ends), np.bool_) if rows is None else self._alive(rows)
        entering = self._given(call, len(ends)) if rows is None else self._enter(call, rows)
        if self.fault == "state-empty-segment-shifts-later-rows":
            starts, ends, live = _compacted(starts, ends, live)
        written, faded = _covered(starts, ends, live, batch * steps), np.zeros(batch * steps, np.bool_)
        launch = Launch(starts, ends, live, self._altered(entering), written, faded, True)
        return self._stretched(call, launch)

    def _bounds(self, call: Call, batch: int, steps: int) -> tuple[Index, Index]:
        """First token and end of every row."""
        offsets, ids = call["cu_seqlens"], call.get("seq_idx")
        if offsets is not None and (ids is None or self.fault != "offsets-ignored-beside-ids"):
            bounds = np.asarray(offsets).astype(np.int64)
            if self.fault == "one-segment-taken-as-unpacked" and len(bounds) == 2:
                bounds = np.array([0, steps])
            return bounds[:-1], bounds[1:]
        if ids is not None:
            given = call.get("initial_state")
            count = ids.max(initial=-1) + 1 if given is None else len(given)
            row = np.where(ids[0] < 0, count, ids[0])
            return (np.searchsorted(row, np.arange(count), "left").astype(np.int64),
                    np.searchsorted(row, np.arange(count), "right").astype(np.int64))  # fmt: skip
        starts = np.arange(batch, dtype=np.int64) * steps
        return starts, starts + steps

    def _stretched(self, call: Call, launch: Launch) -> Launch:
        """Rows that reach further than they should, by fault."""
        tokens, end = len(launch.written), int(launch.ends.max(initial=0))
        alone = np.flatnonzero(launch.live)
        behind = len(alone) > 0 and launch.ends[alone[-1]] == end  # nothing but padding rows behind the last live one
        if self.fault == "last-row-owns-the-tail" and call.get("state_pool") is not None and behind:
            row = np.arange(len(launch.ends))
            starts = np.where(row > alone[-1], tokens, launch.starts)
            ends = np.where(row >= alone[-1], tokens, launch.ends)
            return launch._replace(starts=starts, ends=ends, written=_covered(starts, ends, launch.live, tokens))
        if self.fault == "nan-row-reaches-state" and behind and call["cu_seqlens"] is not None:
            ends = launch.ends.copy()
            ends[alone[-1]] = tokens
            return launch._replace(ends=ends, faded=np.arange(tokens) >= end)
        if self._tail_rows(call):
            more = np.zeros((1, *launch.entering.shape[1:]))
            launch = launch._replace(
                starts=np.append(launch.starts, end), ends=np.append(launch.ends, tokens),
                live=np.append(launch.live, True), entering=np.concatenate([launch.entering, more]),
                written=launch.written | (np.arange(tokens) >= end),
            )  # fmt: skip
        return launch

    def _tail_rows(self, call: Call) -> int:
        """How many rows are run beyond those of the call: the rows past the last offset or with id -1, by fault."""
        if call["cu_seqlens"] is not None:
            return int(self.fault == "state-tail-computed")
        return int(self.fault == "rows-of-id-minus-one-computed" and call.get("seq_idx") is not None)

    def _given(self, call: Call, count: int) -> Float64:
        given = call["initial_state"]
        if given is not None:
            return self._load(given)
        states = np.zeros((count, *self._state_shape(call)))
        if self.fault == "fresh-state-from-last-call" and self.last is not None and self.last.shape == states.shape[1:]:
            states[:] = self.last
        return states

    def _state_shape(self, call: Call) -> tuple[int, ...]:
        raise NotImplementedError

    def _altered(self, entering: Float64) -> Float64:
        """The entering states as the scan gets them: as they are, but for faults."""
        dropped = self.fault == "entering-state-dropped-for-one-row" and len(entering) == 1
        if dropped or self.fault == "entering-state-ignored":
            return np.zeros(entering.shape)
        if self.fault == "entering-state-of-segment-zero" and len(entering):
            return np.repeat(entering[:1], len(entering), axis=0)
        if self.fault == "entering-state-transposed" and entering.shape[-1] == entering.shape[-2]:
            return np.ascontiguousarray(entering.swapaxes(-1, -2))
        return entering

    def _decode(self, call: Call, rows: Rows) -> Launch:
        """A decode call: row n holds tokens n J .. n J + num_tokens[n]."""
        count, steps = call[self.leading].shape[:2]
        lengths = np.full(count, steps) if call["num_tokens"] is None else call["num_tokens"].astype(np.int64)
        if self.fault == "state-short-row-runs-full":
            lengths = np.full(count, steps)
        starts = np.arange(count, dtype=np.int64) * steps
        live = self._alive(rows)
        entering = self._enter(call, rows)
        if self.fault == "several-tokens-start-fresh" and steps > 1:
            entering = np.zeros(entering.shape)
        written = _covered(starts, starts + lengths, live, count * steps)
        faded = np.zeros(count * steps, np.bool_)
        return Launch(starts, starts + lengths, live, self._altered(entering), written, faded, False)

    def _as_one_row(self, call: Call) -> Call:
        """[N, J, ...] read as [1, N J, ...]: the other rows' slots are never looked at."""
        count = call[self.leading].shape[0]
        first = {name: call[name] if call[name] is None else call[name][:1]
                 for name in ("read_slots", "write_slots", "num_accepted")}  # fmt: skip
        tokens = {name: call[name].reshape(1, count * call[name].shape[1], *call[name].shape[2:])
                  for name in self._token_names(call)}  # fmt: skip
        return {**call, **first, **tokens, "num_tokens": None}

    def _token_names(self, call: Call) -> list[str]:
        """The tensors of the call that have a row for every token or copy."""
        raise NotImplementedError

    # -----------------------------------------------------------------------------------------------------------------
    # Slots
    # -----------------------------------------------------------------------------------------------------------------

    def _rows(self, call: Call) -> Rows:
        """Read and write slots, as the kernel understands them."""
        read = call["read_slots"].astype(np.int64)
        write = read if call["write_slots"] is None else call["write_slots"].astype(np.int64)
        slots = len(call["state_pool"])
        if self.fault == "state-negative-slot-clamped":
            return Rows(np.maximum(read, 0), np.maximum(write, 0))
        if self.fault == "state-only-minus-one-is-padding":
            return Rows(np.where(read < -1, read % slots, read), np.where(write < -1, write % slots, write))
        if self.fault == "state-score-only-stores":
            return Rows(read, np.where(write < 0, read, write))
        if self.fault == "state-row-uses-row-zeros-slot":
            return Rows(np.where(read >= 0, read[:1], read), write)
        if self.fault == "slots-looked-up-by-token" and "num_tokens" in call:
            row = np.minimum(np.arange(len(read)) * call[self.leading].shape[1], len(read) - 1)
            return Rows(read[row], write[row])
        return Rows(read, write)

    def _alive(self, rows: Rows) -> Mask:
        """Rows that are run."""
        if self.fault in ("state-padding-row-computed", "padding-output-from-slot-zero"):
            return np.ones(len(rows.read), np.bool_)
        return rows.live

    def _enter(self, call: Call, rows: Rows) -> Float64:
        """The state each row starts from: its slot, an intermediate entry of it, or zeros."""
        pool = self._view(call, "state_pool")
        resumed, fresh = rows.read >= 0, (rows.read < 0) & (rows.write >= 0)
        entering = np.zeros((len(resumed), *pool.shape[1:]))
        entering[resumed] = widen(pool[rows.read[resumed]])
        if self.fault == "fresh-row-resumes-last-slot":
            entering[fresh] = widen(pool[-1:])
        if self.fault == "state-fresh-by-multiplying":
            entering[fresh] = widen(pool[rows.write[fresh]]) * 0.0
        if self.fault == "padding-output-from-slot-zero":
            entering[~rows.live] = widen(pool[:1])
        if self.fault == "entering-rows-compacted":
            compact = entering[resumed]
            entering = np.zeros(entering.shape)
            entering[: len(compact)] = compact
        accepted = call.get("num_accepted")
        if accepted is not None and call["intermediate_states"] is not None and self.fault != "accepted-ignored":
            entry = accepted.astype(np.int64) - (self.fault == "state-accepted-off-by-one")
            resumed = resumed & (entry >= 0)
            entering[resumed] = widen(self._view(call, "intermediate_states")[rows.read[resumed], entry[resumed]])
        return entering

    def _after(self, states: States, mark: Mark, unwritten: Float64) -> Float64:
        """The state a row ends with; `unwritten` where it was never run."""
        if self.fault == "empty-segment-zeroes-state" and mark[1] == 0:
            return np.zeros(unwritten.shape)
        return states.get(mark, unwritten)

    def _store_final(self, call: Call, rows: Rows, finals: list[Mark], states: States) -> None:
        """Write each row's final state to its slot."""
        pool = self._view(call, "state_pool")
        if self.fault == "state-untouched-slots-cleared":
            pool[np.setdiff1d(np.arange(len(pool)), rows.write)] = 0
        if self.fault == "state-padding-row-writes-last-slot" and not rows.live.all():
            pool[-1] = 0  # the final state of a row that starts from zeros and holds nothing
        for mark in finals:
            n = mark[0]
            if rows.write[n] < 0 or mark not in states:
                continue
            final = self._rounded(self._after(states, mark, states[mark]), dtype_name(pool))
            pool[rows.write[n]] = final
            if self.fault == "state-read-slot-written-too" and rows.read[n] >= 0:
                pool[rows.read[n]] = final

    def _store_over(self, target: Array, rows: Rows, finals: list[Mark], states: States) -> None:
        """Store the first live row's state over the first element of an input."""
        written = [mark for mark in finals if rows.live[mark[0]] and mark in states and states[mark].size]
        if written and target.size:
            target[(0,) * target.ndim] = round_to(states[written[0]].ravel()[0], dtype_name(target))

    def _entries(self, call: Call, rows: Rows, lengths: Index) -> list[tuple[tuple[int, ...], Mark]]:
        """Which entries of the intermediates are written: entry j of a write slot gets the state after token j."""
        buffer = call["intermediate_states"]
        if buffer is None:
            return []
        plan: list[tuple[tuple[int, ...], Mark]] = []
        for n in np.flatnonzero(rows.write >= 0).tolist():
            length, slot = int(lengths[n]), int(rows.write[n])
            if self.fault == "state-intermediates-by-row":
                slot = min(n, len(buffer) - 1)
            entries = buffer.shape[1] if self.fault == "state-all-entries-written" else min(length, buffer.shape[1])
            for j in range(entries):
                count = min(j + 1, length) - (self.fault == "state-intermediates-one-late")
                plan.append(((slot, j), (n, count)))
        return plan

    def _snapshots(self, call: Call, launch: Launch, rows: Rows) -> dict[int, Mark]:
        """The state that each snapshot wants: after token position - 1, whose row must be alive."""
        if call["snapshot_positions"] is None:
            return {}
        plan = {}
        lengths = (launch.ends - launch.starts).tolist()
        for i, position in enumerate(call["snapshot_positions"].tolist()):
            row = self._row_of(launch, position - 1)
            if self.fault == "snapshot-position-within-row" and row >= 0:
                position -= int(launch.starts[row])
                row = self._row_of(launch, position - 1)
            if position <= 0 or row < 0 or not launch.live[row]:
                continue
            count = position - int(launch.starts[row])
            if self.fault == "snapshot-skipped-for-score-only" and rows.write[row] < 0:
                continue
            if self.fault == "snapshot-skipped-in-short-piece" and lengths[row] < CHUNK:
                continue
            late = self.fault == "state-snapshot-one-late"
            plan[i] = (row, min(count + late, lengths[row]))
        return plan

    def _row_of(self, launch: Launch, token: int) -> int:
        """The row of a token, -1 where it has none."""
        found = np.flatnonzero((launch.starts <= token) & (token < launch.ends))
        return int(found[0]) if len(found) else -1

    def _put(self, buffer: Array, plan: Iterable[tuple[tuple[int, ...], Mark]], states: States) -> None:
        """Store states in a buffer that is written once an entry."""
        for place, mark in plan:
            if mark not in states:
                continue
            value = states[mark]
            if self.fault == "state-buffers-accumulate":
                value = value + widen(buffer[place])
            buffer[place] = self._rounded(value, dtype_name(buffer))

    # -----------------------------------------------------------------------------------------------------------------
    # The scan
    # -----------------------------------------------------------------------------------------------------------------

    def _scan(self, call: Call, launch: Launch, wanted: Collection[Mark]) -> tuple[Float64, States]:
        """Outputs of all tokens, and the states after the wanted marks of live rows."""
        copies = call.get("num_householder", 1)
        with np.errstate(all="ignore"):  # padding that no row owns may hold anything
            stream = self._stream(call, launch)
            run = self._run_tokens if self.chunk is None else self._run_chunks
            outputs, states = run(stream, launch, copies, set(wanted))
        read = 0 if self.fault == "read-after-first-copy" else copies - 1
        return outputs[read::copies], states

    def _first(self, launch: Launch, row: int, carried: Float64 | None) -> Float64:
        """What a row starts from; `carried` is the last state of the row before it."""
        leaks = self.fault == "state-leaks-across-boundary" and launch.packed and carried is not None
        return carried if leaks and carried is not None else launch.entering[row]

    def _run_tokens(
        self, stream: Stream, launch: Launch, copies: int, wanted: set[Mark]
    ) -> tuple[Float64, States]:
        """Every live row, token by token."""
        outputs, states, carried = self._blank(stream), {}, None
        for n in np.flatnonzero(launch.live).tolist():
            start, length = int(launch.starts[n]) * copies, int(launch.ends[n] - launch.starts[n])
            state = self._first(launch, n, carried)
            if (n, 0) in wanted:
                states[n, 0] = state
            for count in range(1, length + 1):
                rows, before = range(start + (count - 1) * copies, start + count * copies), state
                state = self._narrowed(self._token(stream, rows, before, outputs, count == 1), count)
                if (n, count) in wanted:
                    early = self.fault == "final-state-before-last-write" and count == length
                    states[n, count] = self._unwritten(stream, rows, before) if early else state
            carried = state
        return outputs, states

    def _token(self, stream: Stream, rows: range, state: Float64, outputs: Float64, first: bool) -> Float64:
        """The state after one token; its copies' outputs are put in place."""
        for i in rows:
            outputs[i], state = self._step(_row(stream, i), state)
            if self.fault == "state-looks-ahead" and not (first and i == rows[0]):
                outputs[i - 1] = self._read(_row(stream, i - 1), state)
        return state

    def _unwritten(self, stream: Stream, rows: range, state: Float64) -> Float64:
        """The state of a token before its last write."""
        for i in rows[:-1]:
            _, state = self._step(_row(stream, i), state)
        return self._decayed(_row(stream, rows[-1]), state)

    def _read(self, row: Stream, state: Float64) -> Float64:
        """What a row of the stream reads from a state."""
        raise NotImplementedError

    def _decayed(self, row: Stream, state: Float64) -> Float64:
        """A state after the decay of a row of the stream."""
        raise NotImplementedError

    def _blank(self, stream: Stream) -> Float64:
        """Outputs for every row of the stream, all 0."""
        raise NotImplementedError

    def _narrowed(self, state: Float64, count: int) -> Float64:
        """The state as it is carried to the next token."""
        if self.fault == "state-kept-in-bf16":
            return to_bf16(state)
        if self.fault == "state-rounded-every-64-tokens" and count % NARROW_EVERY == 0:
            return to_bf16(state)
        return state

    def _dot(self, a: Float64, state: Float64) -> Float64:
        """Vectors `[heads, X]` times matrices `[heads, X, Y]`."""
        if self.fault != "dot-accumulates-in-bf16":
            return np.asarray((a[:, None, :] @ state)[:, 0])
        total = np.zeros((len(a), state.shape[2]))
        for i in range(a.shape[1]):
            total = to_bf16(total + a[:, i, None] * state[:, i])
        return total

    # -----------------------------------------------------------------------------------------------------------------
    # Chunks
    # -----------------------------------------------------------------------------------------------------------------

    def _run_chunks(
        self, stream: Stream, launch: Launch, copies: int, wanted: set[Mark]
    ) -> tuple[Float64, States]:
        """Every chunk of the table; a row's state passes from one of its chunks to the next."""
        outputs, states, state = self._blank(stream), {}, None
        for chunk in self._table(launch, copies):
            entered = self._enter_chunk(launch, chunk, state)
            marks = self._marks(launch, chunk, copies, wanted)
            inner, state = [entered] * len(marks), entered
            if chunk.end > chunk.start:
                part = tuple(piece[chunk.start : chunk.end] for piece in stream)
                before = self._before(stream, launch, chunk)
                solved, inner, state = self._solve(part, entered, before, [at for _, at in marks])
                solved, state = self._at_the_edge(launch, chunk, part, solved, state)
                outputs[chunk.start : chunk.end] = solved
            for (mark, at), found in zip(marks, inner, strict=True):
                between = launch.packed and at < chunk.end - chunk.start
                rounded_down = self.fault == "snapshot-rounded-to-the-chunk-grid" and between
                states[mark] = entered if rounded_down else found
            last = (chunk.row, int(launch.ends[chunk.row] - launch.starts[chunk.row]))
            if last in wanted:  # a later chunk of the row writes it again
                states[last] = state
        return outputs, states

    def _table(self, launch: Launch, copies: int) -> Iterator[Chunk]:
        """The chunks of every live row, restarted at its start; an empty row has one empty chunk."""
        assert self.chunk is not None
        if self.fault == "chunk-grid-not-restarted" and launch.packed:
            yield from self._global_table(launch, copies)
            return
        for n in np.flatnonzero(launch.live).tolist():
            start, end = int(launch.starts[n]) * copies, int(launch.ends[n]) * copies
            count = max(1, -(-(end - start) // self.chunk))
            if launch.packed:
                count = self._faulty_count(count, end - start)
            for c in range(count):
                low, high = start + c * self.chunk, min(start + (c + 1) * self.chunk, end)
                if self.fault == "chunk-edge-token-twice" and c > 0:
                    low -= copies
                yield Chunk(n, low, high, c == 0)

    def _faulty_count(self, count: int, rows: int) -> int:
        assert self.chunk is not None
        if self.fault == "last-partial-chunk-dropped":
            return rows // self.chunk if rows else count
        if self.fault == "empty-segment-without-a-chunk" and rows == 0:
            return 0
        return count

    def _global_table(self, launch: Launch, copies: int) -> Iterator[Chunk]:
        """One grid over the pack; a chunk belongs to the row of its first token, whatever follows in it."""
        assert self.chunk is not None
        last, end = -1, int(launch.ends.max(initial=0)) * copies
        for low in range(0, end, self.chunk):
            n = self._row_of(launch, low // copies)
            if n >= 0 and launch.live[n]:
                yield Chunk(n, low, min(low + self.chunk, end), n != last)
            last = n

    def _enter_chunk(self, launch: Launch, chunk: Chunk, state: Float64 | None) -> Float64:
        """The state that enters a chunk: the row's own, or what the chunk before it left."""
        if chunk.first or state is None:
            return self._first(launch, chunk.row, state)
        if self.fault == "chunk-state-in-bf16":
            return to_bf16(state)
        if self.fault == "entering-state-at-every-chunk":
            return np.asarray(state + launch.entering[chunk.row])
        return state

    def _marks(self, launch: Launch, chunk: Chunk, copies: int, wanted: set[Mark]) -> list[tuple[Mark, int]]:
        """The wanted marks before the end of a chunk's row, and how many rows of the chunk are behind each."""
        found, length = [], int(launch.ends[chunk.row] - launch.starts[chunk.row])
        for mark in wanted:
            at = (int(launch.starts[chunk.row]) + mark[1]) * copies - chunk.start
            reached = 0 < at <= chunk.end - chunk.start or (mark[1] == 0 and chunk.first)
            if mark[0] == chunk.row and mark[1] < length and reached:
                found.append((mark, max(at, 0)))
        return found

    def _before(self, stream: Stream, launch: Launch, chunk: Chunk) -> Entry:
        """What the decays of a chunk are measured from: its own start."""
        undecayed = self.fault == "entering-state-not-decayed" and chunk.first
        origin = np.zeros((1, 1))
        if self.fault == "decay-measured-from-the-pack" and chunk.first and launch.packed:
            origin = np.nan_to_num(self._log_decay(stream)[: chunk.start]).sum(axis=0)
        return Entry(undecayed, origin)

    def _at_the_edge(
        self, launch: Launch, chunk: Chunk, part: Stream, outputs: Float64, state: Float64
    ) -> tuple[Float64, Float64]:
        """What becomes of a chunk's outputs and last state where it has fewer rows than the others, by fault."""
        assert self.chunk is not None
        size = chunk.end - chunk.start
        alone = launch.ends[chunk.row] - launch.starts[chunk.row] == 1
        if self.fault == "one-token-row-in-chunks-nan" and launch.packed and alone:
            return np.full(outputs.shape, np.nan), np.full(state.shape, np.nan)
        if self.fault == "padded-chunk-rows-decay-the-state" and launch.packed:
            padding = self._log_decay(part)[-1] * (self.chunk - size)
            return outputs, np.asarray(state * np.exp(padding)[..., None])
        return outputs, state

    def _decays(self, g: Float64, before: Entry) -> tuple[Float64, Float64]:
        """Decay from row j to row i `[heads, L, L, X]`, and from the chunk's start to row i `[heads, L, X]`.

        g `[heads, L, X]` is the log-decay of every row.
        """
        factor = np.exp(g)
        between = np.zeros((*g.shape[:2], *g.shape[1:]))
        for i in range(g.shape[1]):
            if i:
                between[:, i, :i] = between[:, i - 1, :i] * factor[:, i, None]
            between[:, i, i] = 1.0
        entry = np.ones(g.shape) if before.undecayed else np.cumprod(factor, axis=1)
        return self._faulty_between(g, between), np.asarray(np.exp(before.origin)[:, None] * entry)

    def _faulty_between(self, g: Float64, between: Float64) -> Float64:
        """The decays between rows from one long sum, by fault: c_i - c_j, or its two exponentials apart."""
        long, below = np.cumsum(g, axis=1), np.tri(g.shape[1])[:, :, None]
        if self.fault == "decay-by-positive-exponent":
            apart = np.exp(long)[:, :, None] * np.exp(-long)[:, None]
            return np.where(below > 0, apart, 0.0)
        if self.fault == "decay-masked-after-exponent":
            return np.asarray(np.exp(long[:, :, None] - long[:, None]) * below)
        if self.fault == "decay-anchored-at-later-row":
            anchor = long[:, g.shape[1] // 2, None]
            apart = to_bf16(np.exp(long - anchor))[:, :, None] * to_bf16(np.exp(anchor - long))[:, None]
            return np.where(below > 0, apart, 0.0)
        return between

    def _entry_for_outputs(self, g: Float64, entry: Float64) -> Float64:
        """The decay of the entering state as the outputs see it."""
        if self.fault != "entry-decay-measured-from-tile":
            return entry
        start = np.arange(g.shape[1]) // TILE * TILE
        long = np.concatenate([np.zeros((len(g), 1, g.shape[2])), np.cumsum(g, axis=1)], axis=1)
        return np.asarray(np.exp(long[:, 1:] - long[:, start]))

    def _state_for_outputs(self, state: Float64) -> Float64:
        """The entering state as the outputs see it."""
        square = state.shape[-1] == state.shape[-2]
        return state.swapaxes(-1, -2) if self.fault == "output-reads-state-transposed" and square else state

    def _output_mask(self, length: int) -> Float64:
        """Which rows of its chunk a row reads: all up to itself."""
        return np.tri(length, k=-1 if self.fault == "output-mask-strict" else 0)

    # -----------------------------------------------------------------------------------------------------------------
    # Gradients
    # -----------------------------------------------------------------------------------------------------------------

    def _pull(
        self, stream: Stream, launch: Launch, copies: int, grad_outputs: Float64, grad_last: Float64
    ) -> tuple[list[Float64], Float64]:
        """Cotangents of the stream and of the entering states, rows and tokens last first."""
        grads = [np.zeros(part.shape) for part in stream]
        entering, later = np.zeros(launch.entering.shape), 0.0
        for n in np.flatnonzero(launch.live).tolist()[::-1]:
            rows = range(int(launch.starts[n]) * copies, int(launch.ends[n]) * copies)
            states = [launch.entering[n]]
            for i in rows:
                states.append(self._step(_row(stream, i), states[-1])[1])
            grad = grad_last[n] + (later if self.fault == "state-gradient-crosses-boundary" else 0.0)
            for i in reversed(rows):
                before, after = states[i - rows.start], states[i - rows.start + 1]
                pulled, grad = self._pull_step(_row(stream, i), before, after, grad_outputs[i], grad)
                for total, one in zip(grads, pulled, strict=True):
                    total[i] = one
            entering[n] = later = grad
        if self.fault == "entering-state-gradient-missing":
            entering = np.zeros(entering.shape)
        return grads, entering

    def _pull_step(
        self, row: Stream, before: Float64, after: Float64, grad_output: Float64, grad_state: Float64
    ) -> tuple[Stream, Float64]:
        """Cotangents of one row of the stream and of the state before it."""
        raise NotImplementedError

    def _pull_launch(self, call: Call) -> tuple[Launch, int]:
        """The launch whose gradient is asked for, and how many rows at its end are padding, by fault."""
        launch = self._pack(call, None)
        if self.fault != "padding-gradient-not-zero" or call["cu_seqlens"] is None:
            return launch, self._tail_rows(call)
        end, tokens = int(launch.ends.max(initial=0)), len(launch.written)
        more = np.zeros((1, *launch.entering.shape[1:]))
        return launch._replace(
            starts=np.append(launch.starts, end), ends=np.append(launch.ends, tokens),
            live=np.append(launch.live, True), entering=np.concatenate([launch.entering, more]),
            written=launch.written | (np.arange(tokens) >= end),
        ), 1  # fmt: skip

    def _grad_last(self, cotangents: Mapping[str, Array], launch: Launch) -> Float64:
        """The cotangent of every row's final state, 0 for rows of padding."""
        grad, given = np.zeros(launch.entering.shape), cotangents.get("final_state")
        if given is not None:
            grad[: len(given)] = widen(given)[: len(grad)]
        return grad

    def _nan_where_masked(self, g: Float64, grad: Float64, launch: Launch, copies: int) -> Float64:
        """Gradients of log-decays of chunks in which an exponential above the diagonal overflows, by fault."""
        if self.fault != "masked-exponent-gradient-nan":
            return grad
        grad = grad.copy()
        for chunk in self._table(launch, copies):
            rows = slice(chunk.start, chunk.end)
            reach = g[rows].sum(axis=0) - (g[chunk.start] if chunk.end > chunk.start else 0.0)
            with np.errstate(over="ignore"):
                grad[rows] = np.where(np.isinf(np.exp(-reach)), np.nan, grad[rows])
        return grad


def gate_kind(values: Array) -> str:
    """Element type of a state that nothing gives a type: f32, or f64 beside f64 values."""
    return "f64" if values.dtype == np.float64 else "f32"


def _row(stream: Stream, i: int) -> Stream:
    return tuple(part[i] for part in stream)


def _covered(starts: Index, ends: Index, live: Mask, tokens: int) -> Mask:
    """The tokens that live rows own."""
    place = np.arange(tokens)[:, None]
    return np.asarray(((starts <= place) & (place < ends) & live).any(axis=1))


def _compacted(starts: Index, ends: Index, live: Mask) -> tuple[Index, Index, Mask]:
    """Rows of a table that numbers non-empty rows only, looked up by that number: later ones are never run."""
    row, filled = np.arange(len(ends)), ends > starts
    return starts, ends, live & ((row < np.count_nonzero(filled)) | ~filled)


def _real_end(filled: Mask, start: int, end: int) -> int:
    """The end of a row without the all-zero tokens at it."""
    while end > start and not filled[end - 1]:
        end -= 1
    return int(end)


# ---------------------------------------------------------------------------------------------------------------------
# The delta family
# ---------------------------------------------------------------------------------------------------------------------

TOKENS = ("q", "k", "v", "g", "beta")
L2NORM_EPS = 1e-6


class DeltaModel(StateModel):
    """The gated delta rule and its siblings with at most one fault."""

    leading, valued, content = "q", "v", ("q", "k", "v")

    # -----------------------------------------------------------------------------------------------------------------
    # Arguments
    # -----------------------------------------------------------------------------------------------------------------

    def _accept(self, name: str, call: Call) -> Call:
        pool, q, v = call.get("state_pool"), call["q"], call["v"]
        if self.fault == "layout-inferred-from-sizes" and pool is not None and q.ndim == v.ndim == 4:
            call = {**call, "state_layout": "KV" if pool.shape[-2:] == (q.shape[3], v.shape[3]) else "VK"}
        return super()._accept(name, call)

    def _shown(self, call: Call) -> Call:
        q, v = call["q"], call["v"]
        if self.fault == "heads-that-do-not-divide-accepted" and q.ndim == v.ndim == 4 and 0 < q.shape[2] < v.shape[2]:
            return {**call, "q": q[:, :, :1], "k": call["k"][:, :, :1]}
        return super()._shown(call)

    def _check(self, call: Call) -> None:
        """Every log-decay that reaches something lies in its domain."""
        if self.fault == "gate-domain-not-checked":
            return
        shape = call["q"].shape
        if "state_pool" not in call:
            live = unpack_segments(shape, None, call["cu_seqlens"], call["initial_state"])
        elif "cu_seqlens" in call:
            bounds = call["cu_seqlens"].tolist()
            live = [(0, slice(bounds[n], bounds[n + 1])) for n in live_rows(call["read_slots"], call["write_slots"])]
        else:
            counts = [shape[1]] * shape[0] if call["num_tokens"] is None else call["num_tokens"].tolist()
            live = [(n, slice(0, counts[n])) for n in live_rows(call["read_slots"], call["write_slots"])]
        check_decay(call["g"], live)

    def _turned(self, states: Array, call: Call) -> Array:
        if call.get("state_layout", "KV") == "KV":
            return states
        if self.fault == "layout-word-ignored" and states.flags.c_contiguous:
            return states.reshape(*states.shape[:-2], states.shape[-1], states.shape[-2])
        return states.swapaxes(-1, -2)

    def _state_shape(self, call: Call) -> tuple[int, ...]:
        return call["v"].shape[2], call["k"].shape[3], call["v"].shape[3]

    def _token_names(self, call: Call) -> list[str]:
        return list(TOKENS)

    # -----------------------------------------------------------------------------------------------------------------
    # The stream
    # -----------------------------------------------------------------------------------------------------------------

    def _stream(self, call: Call, launch: Launch) -> Stream:
        """q, k, v, g, beta per value head, M rows a token: the gate on the first, the query on the last."""
        copies = call.get("num_householder", 1)
        q, k, v, beta = (self._flat(call[name]) for name in ("q", "k", "v", "beta"))
        if call["use_qk_l2norm"]:
            q, k = unit_rows(q, L2NORM_EPS, self.fault), unit_rows(k, L2NORM_EPS, self.fault)
        k, v, beta = (self._in_order(part, call) for part in (k, v, beta))
        heads, gates = self._heads(call), self._gates(call, launch)
        if self.fault == "one-beta-for-all-copies":
            beta = np.repeat(beta[::copies], copies, axis=0)
        if self.fault == "gate-of-key-head":
            gates, beta = gates[:, heads], beta[:, heads]
        if self.fault == "gate-lanes-past-k-read":
            v = v + np.repeat(_lanes_past(gates), copies, axis=0)[:, :, None]
        queries, decays = np.zeros((len(k), len(heads), k.shape[2])), np.zeros((len(k), *gates.shape[1:]))
        read = 0 if self.fault == "read-after-first-copy" else copies - 1
        queries[read::copies] = (q * self._scale(call))[:, heads]
        decays[copies - 1 if self.fault == "decay-at-last-copy" else 0 :: copies] = gates
        if self.fault == "decay-at-every-copy":
            decays = np.repeat(gates, copies, axis=0)
        return self._faded((queries, np.ascontiguousarray(k[:, heads]), v, decays, beta), launch, copies)

    def _in_order(self, part: Float64, call: Call) -> Float64:
        """The rows of a tensor that has M a token, copy after copy, token after token."""
        copies, (rows, steps) = call.get("num_householder", 1), call["q"].shape[:2]
        if self.fault == "copies-descend":
            return part.reshape(rows * steps, copies, *part.shape[1:])[:, ::-1].reshape(part.shape)
        if self.fault == "copies-laid-out-first":
            return part.reshape(rows, copies, steps, *part.shape[1:]).swapaxes(1, 2).reshape(part.shape)
        return part

    def _heads(self, call: Call) -> list[int]:
        """The query and key head of each value head: neighbours share one."""
        heads, values = call["q"].shape[2], call["v"].shape[2]
        if self.fault == "heads-tiled":
            return [head % heads for head in range(values)]
        return [min(head // max(values // heads, 1), heads - 1) for head in range(values)]

    def _scale(self, call: Call) -> float:
        """The factor on q."""
        channels = call["v" if self.fault == "scale-of-value-dim" else "q"].shape[3]
        scale = float(1.0 / np.sqrt(np.float64(channels))) if call["scale"] is None else float(call["scale"])
        return {"scale-ignored": 1.0, "scale-twice": scale * scale}.get(self.fault or "", scale)

    def _gates(self, call: Call, launch: Launch) -> Float64:
        """The log-decay of every token, `[T, HV, 1 or K]`."""
        g = self._flat(call["g"])
        g = self.shift_decay(g if g.ndim == 3 else g[:, :, None], launch)
        if self.fault == "one-copy-skips-decay" and call.get("num_householder") == 1:
            return np.zeros(g.shape)
        if self.fault == "decay-of-channel-zero":
            return np.broadcast_to(g[:, :, :1], g.shape)
        if self.fault == "equal-channels-summed":
            return np.broadcast_to(g.sum(axis=2, keepdims=True), g.shape)
        return np.minimum(g, -SMALLEST_STEP) if self.fault == "gate-kept-below-zero" else g

    def _log_decay(self, stream: Stream) -> Float64:
        return stream[3]

    def _blank(self, stream: Stream) -> Float64:
        return np.zeros(stream[2].shape)

    def _finish(self, call: Call, outputs: Float64) -> Float64:
        q, scale = call["q"], self._scale(call)
        if self.fault == "q-scaled-in-place" and q.flags.writeable:
            q[...] = round_to(widen(q) * scale, dtype_name(q))
        return outputs

    # -----------------------------------------------------------------------------------------------------------------
    # One row of the stream
    # -----------------------------------------------------------------------------------------------------------------

    def _decayed(self, row: Stream, state: Float64) -> Float64:
        factor = np.exp(row[3])  # [HV, 1 or K]
        if self.fault == "decay-on-value-columns" and factor.shape[1] > 1:
            return np.asarray(state * factor[:, None, np.arange(state.shape[2]) % factor.shape[1]])
        return np.asarray(factor[:, :, None] * state)

    def _step(self, row: Stream, state: Float64) -> tuple[Float64, Float64]:
        q, k, v, _, beta = row
        decayed, late = self._decayed(row, state), self.fault == "decay-after-write"
        seen = state if late or self.fault == "correction-sees-undecayed-state" else decayed
        known = np.zeros(v.shape) if self.fault == "correction-left-out" else self._dot(k, seen)
        write = beta[:, None] * (v - known)
        if self.fault == "beta-on-value-only":
            write = beta[:, None] * v - known
        key = beta[:, None] * k if self.fault == "beta-on-key-twice" else k
        after = (state if late else decayed) + key[:, :, None] * write[:, None, :]
        after = self._decayed(row, after) if late else after
        o = self._dot(q, decayed if self.fault == "read-before-write" else after)
        if self.fault == "values-past-k-left-out":
            keys = k.shape[1]
            o[:, keys:], after[:, :, keys:] = 0.0, state[:, :, keys:]
        return o, after

    def _read(self, row: Stream, state: Float64) -> Float64:
        return self._dot(row[0], state)

    # -----------------------------------------------------------------------------------------------------------------
    # One chunk
    # -----------------------------------------------------------------------------------------------------------------

    def _solve(
        self, part: Stream, state: Float64, before: Entry, marks: Sequence[int]
    ) -> tuple[Float64, list[Float64], Float64]:
        q, k, v, g, beta = (np.ascontiguousarray(piece.swapaxes(0, 1)) for piece in part)  # [HV, L, ...]
        between, entry = self._decays(g, before)
        size = k.shape[1]
        system = beta[:, :, None] * _scores(k, between, k) * np.tri(size)
        u = self._substitute(system, beta[:, :, None] * (v - (entry * k) @ state))
        seen = (self._entry_for_outputs(g, entry) * q) @ self._state_for_outputs(state)
        o = seen + (_scores(q, between, k) * self._output_mask(size)) @ u

        def after(rows: int) -> Float64:
            if rows == 0:
                return state
            left = between[:, rows - 1, :rows] * k[:, :rows]
            return np.asarray(entry[:, rows - 1, :, None] * state + left.swapaxes(1, 2) @ u[:, :rows])

        return o.swapaxes(0, 1), [after(rows) for rows in marks], after(size)

    def _substitute(self, system: Float64, right: Float64) -> Float64:
        """u with u + system u = right, where only what lies below the diagonal of system `[HV, L, L]` counts."""
        if self.fault == "solve-cut-to-one-step":
            return np.asarray(right - np.tril(system, -1) @ right)
        u = np.zeros(right.shape)
        for i in range(right.shape[1]):
            u[:, i] = right[:, i] - (system[:, i, None, :i] @ u[:, :i])[:, 0]
            if self.fault == "system-with-diagonal":
                u[:, i] /= 1.0 + system[:, i, i, None]
        return u

    # -----------------------------------------------------------------------------------------------------------------
    # Gradients
    # -----------------------------------------------------------------------------------------------------------------

    def run_grad(self, name: str, call: Call) -> Grads:
        cotangents, call = call["cotangents"], self._accept(name, call)
        launch, _ = self._pull_launch(call)
        copies = call.get("num_householder", 1)
        with np.errstate(all="ignore"):
            stream = self._stream(call, launch)
            above = np.zeros(stream[2].shape)
            if "o" in cotangents:
                above[copies - 1 :: copies] = np.where(launch.written[:, None, None], self._flat(cotangents["o"]), 0.0)
            grads, entering = self._pull(stream, launch, copies, above, self._grad_last(cotangents, launch))
            found = self._fold(call, launch, stream, grads)
        shaped = {key: grad.reshape(call[key].shape) for key, grad in found.items()}
        given = call["initial_state"]
        return shaped if given is None else {**shaped, "initial_state": entering[: len(given)]}

    def _pull_step(
        self, row: Stream, before: Float64, after: Float64, grad_output: Float64, grad_state: Float64
    ) -> tuple[Stream, Float64]:
        q, k, v, g, beta = row
        decayed = self._decayed(row, before)
        rest = v - self._dot(k, decayed)
        grad_q = (after @ grad_output[:, :, None])[:, :, 0]
        grad_state = grad_state + q[:, :, None] * grad_output[:, None, :]
        grad_written = self._dot(k, grad_state)
        through = v if self.fault == "beta-gradient-through-write-only" else rest
        grad_beta = (through * grad_written).sum(axis=1)
        grad_v = beta[:, None] * grad_written
        grad_k = (grad_state @ (beta[:, None] * rest)[:, :, None] - decayed @ grad_v[:, :, None])[:, :, 0]
        grad_state = grad_state - k[:, :, None] * grad_v[:, None, :]
        grad_g = (grad_state * decayed).sum(axis=2)
        grad_g = grad_g if g.shape[1] == grad_g.shape[1] else grad_g.sum(axis=1, keepdims=True)
        factor = np.exp(g[:1] if self.fault == "gate-gradient-of-head-zero" else g)
        return (grad_q, grad_k, grad_v, grad_g, grad_beta), factor[:, :, None] * grad_state

    def _fold(self, call: Call, launch: Launch, stream: Stream, grads: Sequence[Float64]) -> Grads:
        """Cotangents of the inputs from those of the stream; rows of no segment get 0."""
        copies = call.get("num_householder", 1)
        q, k, v, g, beta = grads
        queries = self._fold_heads(q[copies - 1 :: copies], call) * self._scale(call)
        keys = self._fold_heads(k, call)
        if call["use_qk_l2norm"]:
            queries = pull_unit_rows(queries, self._flat(call["q"]), L2NORM_EPS, self.fault)
            keys = pull_unit_rows(keys, self._flat(call["k"]), L2NORM_EPS, self.fault)
        g = self._nan_where_masked(stream[3], g, launch, copies)[::copies]
        g = np.zeros(g.shape) if self.fault == "gate-gradient-missing" else g
        owned = _covered(launch.starts, launch.ends, launch.live, len(launch.written))[:, None, None]
        wide = np.repeat(owned, copies, axis=0)
        return {"q": np.where(owned, queries, 0.0), "k": np.where(wide, keys, 0.0), "v": v, "g": g, "beta": beta}

    def _fold_heads(self, terms: Float64, call: Call) -> Float64:
        """Cotangents per value head added up to the heads they came from."""
        folded = np.zeros((len(terms), call["q"].shape[2], terms.shape[2]))
        for value_head, head in enumerate(self._heads(call)):
            folded[:, head] += terms[:, value_head]
        return folded

    # -----------------------------------------------------------------------------------------------------------------
    # Rollback
    # -----------------------------------------------------------------------------------------------------------------

    def commit_accepted(
        self, pools: Sequence[Array], intermediates: Sequence[Array], slots: Array, num_accepted: Array, *,
        check: bool | None = None,
    ) -> None:  # fmt: skip
        """Copy entry num_accepted[n] of each slot's intermediates into its pool."""
        sound = len(pools) == len(intermediates) and slots.shape == num_accepted.shape
        if self.fault == "accepted-count-unbounded" and sound and pools:
            num_accepted = np.minimum(num_accepted, intermediates[0].shape[1] - 1)
        if self.fault == "slot-index-wraps" and sound and pools:
            slots = np.where(slots >= 0, slots % len(pools[0]), slots)
        with refusals(self.fault):
            try:
                check_commit(pools, intermediates, slots, num_accepted)
            except ContractError:
                if self.fault == "writes-before-refusing" and pools and slots.dtype.kind in "iu":
                    pools[0][[slot for slot in slots.ravel().tolist() if 0 <= slot < len(pools[0])]] = 0
                raise
        if self.fault == "state-only-minus-one-is-padding" and pools:
            slots = np.where(slots < -1, slots % len(pools[0]), slots)
        if self.fault == "state-negative-slot-clamped":
            slots = np.maximum(slots, 0)
        if self.fault != "commit-takes-the-live-state":
            self._commit(pools, intermediates, slots, num_accepted)

    def _commit(
        self, pools: Sequence[Array], intermediates: Sequence[Array], slots: Array, num_accepted: Array
    ) -> None:
        rows = np.flatnonzero((slots >= 0) & (num_accepted >= 0))
        for pool, entries in zip(pools, intermediates, strict=True):
            if self.fault == "rollback-state-only" and pool.ndim == 3:  # a window
                continue
            source = np.minimum(rows, len(entries) - 1) if self.fault == "commit-by-row" else slots[rows]
            pool[slots[rows]] = entries[source, num_accepted[rows]]


def _scores(a: Float64, between: Float64, b: Float64) -> Float64:
    """a_i . D_ij b_j for every pair of rows, `[HV, L, L]`."""
    if between.shape[3] == 1:
        return np.asarray((a @ b.swapaxes(1, 2)) * between[..., 0])
    return np.asarray(np.einsum("hik,hijk,hjk->hij", a, between, b))


def _lanes_past(g: Float64) -> Float64:
    """0 times the exponential of what lies behind each head's K gates, up to a power of two: NaN where that is one."""
    tokens, heads, keys = g.shape
    lanes = (1 << max(keys - 1, 0).bit_length()) - keys
    behind = np.concatenate([g.ravel(), np.zeros(lanes)])
    place = np.arange(tokens * heads)[:, None] * keys + keys + np.arange(lanes)
    return np.asarray((0.0 * np.exp(behind[place])).sum(axis=1).reshape(tokens, heads))


# ---------------------------------------------------------------------------------------------------------------------
# Hosts that repair, or do not look at, what they should refuse
# ---------------------------------------------------------------------------------------------------------------------


def _same(call: Call) -> Call:
    return call


def _flatten_batch(call: Call) -> Call:
    """Batch rows laid one behind the other where offsets are given too."""
    if call.get("cu_seqlens") is None:
        return call
    names = [name for name in ("q", "k", "v", "g", "beta", "x", "dt", "B", "C", "z") if call.get(name) is not None]
    flat = {name: call[name].reshape(1, call[name].shape[0] * call[name].shape[1], *call[name].shape[2:])
            for name in names}  # fmt: skip
    return {**call, **flat}


def _wrap_slots(call: Call) -> Call:
    changed, pool = dict(call), call.get("state_pool")
    for name in ("read_slots", "write_slots"):
        slots = call.get(name)
        if slots is not None and pool is not None and slots.dtype.kind in "iu" and len(pool):
            changed[name] = np.where(slots >= 0, slots % len(pool), slots)
    return changed


def _positions_need_a_buffer(call: Call) -> Call:
    unread = call.get("snapshot_states") is None
    return {**call, "snapshot_positions": None} if unread and "snapshot_positions" in call else call


def _clamp_accepted(call: Call) -> Call:
    accepted, entries = call.get("num_accepted"), call.get("intermediate_states")
    if accepted is None or entries is None:
        return call
    return {**call, "num_accepted": np.minimum(accepted, entries.shape[1] - 1)}


def _ids_hidden(call: Call) -> Call:
    """No ids where there are offsets too."""
    return {**call, "seq_idx": None} if call.get("seq_idx") is not None and call["cu_seqlens"] is not None else call


def _count_runs(call: Call) -> Call:
    """Ids that decrease are renumbered: every change of id starts a segment."""
    ids = call.get("seq_idx")
    if ids is None or ids.dtype.kind not in "iu" or (ids < 0).any() or (np.diff(ids) >= 0).all():
        return call
    changed = np.diff(ids[0], prepend=ids[0, :1]) != 0
    return {**call, "seq_idx": np.cumsum(changed)[None].astype(ids.dtype)}


_LENIENT: dict[str, Callable[[Call], Call]] = {
    "ids-ignored-beside-offsets": _ids_hidden,
    "batch-with-offsets-flattened": _flatten_batch,
    "positions-taken-as-ids": _count_runs,
    "slot-index-wraps": _wrap_slots,
    "snapshot-positions-without-buffer-ignored": _positions_need_a_buffer,
    "accepted-count-unbounded": _clamp_accepted,
}
"""What becomes of the arguments before the rules see them, by fault."""


def _slots_of(call: Call) -> tuple[list[int], list[int]] | None:
    """Read and write slots as lists where they are well-formed."""
    read, write = call.get("read_slots"), call.get("write_slots")
    write = read if write is None else write
    if read is None or write is None or write.shape != read.shape:
        return None
    return (read.tolist(), write.tolist()) if read.dtype.kind == write.dtype.kind == "i" else None


def _with_slots(call: Call, read: Sequence[int], write: Sequence[int]) -> Call:
    return {**call, "read_slots": np.array(read, np.int64), "write_slots": np.array(write, np.int64)}


def _each_write_once(call: Call) -> Call:
    """Rows that store to a slot of an earlier row are shown as padding."""
    slots = _slots_of(call)
    if slots is None:
        return call
    read, write = slots
    again = [slot >= 0 and slot in write[:n] for n, slot in enumerate(write)]
    shown = [-1 if twice and r == w else r for twice, r, w in zip(again, read, write, strict=True)]
    return _with_slots(call, shown, [-1 if twice else slot for twice, slot in zip(again, write, strict=True)])


def _no_others_reads(call: Call) -> Call:
    """Rows that read what another row writes are shown as fresh."""
    slots = _slots_of(call)
    if slots is None:
        return call
    read, write = slots
    others = [write[:n] + write[n + 1 :] for n in range(len(write))]
    return _with_slots(call, [-1 if slot in other else slot for slot, other in zip(read, others, strict=True)], write)


def _entries_that_fit(call: Call) -> Call:
    """The same call with as many entries as a row has tokens."""
    entries, tokens = call.get("intermediate_states"), call.get("q", call.get("x"))
    if entries is None or tokens is None or entries.shape[1] >= tokens.shape[1]:
        return call
    wide = (entries.shape[0], tokens.shape[1], *entries.shape[2:])
    return {**call, "intermediate_states": np.broadcast_to(np.zeros((), entries.dtype), wide)}


_HIDDEN: dict[str, Callable[[Call], Call]] = {
    "offsets-ignored-beside-ids": _ids_hidden,
    "duplicate-write-accepted": _each_write_once,
    "write-over-others-read-accepted": _no_others_reads,
    "more-tokens-than-entries-accepted": _entries_that_fit,
}
"""What the rules are shown instead of the call, by fault."""


def _clear_slots(call: Call) -> None:
    """Clear every slot in range that a row would write."""
    pool = call.get("state_pool")
    slots = call.get("read_slots") if call.get("write_slots") is None else call["write_slots"]
    if pool is not None and slots is not None and slots.dtype.kind in "iu":
        pool[[slot for slot in slots.ravel().tolist() if 0 <= slot < len(pool)]] = 0
