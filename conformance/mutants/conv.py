"""The short convolution as a GPU kernel does it: taps gathered by index arithmetic over all tokens of a call.

The tokens of a call lie one after another in one array, whatever rows they belong to. Tap j of token t is token
t - (W-1) + j; where that lies before the first token of t's row, a column of the row's entering window takes its
place. Every window that is kept (final, snapshot, intermediate) is the same gather. Outputs are made in tiles.

Each fault is one comparison with its id, at the place where its mechanism sits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statescan.conformance.mutants.packed import lenient_offsets, refusals
from statescan.reference.arrays import Array, Float64, check_arguments, dtype_name, round_to, widen
from statescan.reference.functions import sigmoid, silu
from statescan.reference.host.rules import CONV_WIDTHS
from statescan.spec.contract import ContractError, ConvError, ShapeError

Index = npt.NDArray[np.int64]
Call = dict[str, Any]
"""The arguments of one call by name."""

TILE = 4

FAULTS: tuple[str, ...] = (
    # packing
    "decreasing-offsets-clamped", "offsets-past-the-pack-accepted", "float-offsets-truncated",
    "conv-reads-across-boundary", "gradient-crosses-boundary", "batch-rows-run-together",
    "ids-ignored-beside-offsets", "offsets-ignored-beside-ids", "rows-past-offsets-computed",
    "rows-of-id-minus-one-computed", "nan-row-reaches-weight-gradient", "one-segment-taken-as-unpacked",
    "trailing-zero-tokens-dropped", "empty-segment-shifts-later-rows", "empty-pack-refused",
    "batch-with-offsets-flattened", "positions-taken-as-ids",
    # taps, activation, windows
    "taps-reversed", "padded-conv-cut-at-the-wrong-end", "swish-taken-as-linear", "bias-after-activation",
    "unknown-activation-is-linear", "boundary-seen-by-nearest-tap-only", "first-boundary-only",
    "entering-window-shifted", "entering-window-ignored", "entering-window-of-row-zero",
    "entering-window-dropped-for-one-row", "absent-entering-window-fails", "short-piece-loses-old-columns",
    "final-window-of-outputs", "empty-piece-clears-window", "update-drops-shift", "several-tokens-start-fresh",
    "pool-written-before-read", "intermediates-one-late", "intermediates-by-row", "other-width-gives-bias-only",
    # gradients
    "final-window-gradient-shifted", "bias-gradient-missing-rows", "entering-gradient-missing", "gradient-tail-wraps",
    # slots and padding
    "window-newest-first", "oldest-column-not-stored", "negative-slot-clamped-to-zero", "only-minus-one-is-padding",
    "score-only-stores", "fresh-row-resumes-last-slot", "entering-rows-compacted", "slots-looked-up-by-token",
    "untouched-slots-cleared", "duplicate-write-accepted", "write-over-others-read-accepted", "slot-index-wraps",
    "fresh-by-multiplying", "final-window-not-stored", "padding-row-writes-last-slot", "padding-row-computed",
    "padding-output-from-slot-zero", "last-row-owns-the-tail",
    # memory, determinism, errors
    "input-overwritten", "read-slot-written-too", "strides-ignored", "strided-pool-copied", "padded-outputs-unwritten",
    "partial-tile-unwritten", "snapshot-accumulates", "intermediates-accumulate", "call-counter-leaks",
    "window-looks-ahead", "row-uses-row-zeros-slot", "rows-read-as-tokens-of-one", "one-class-for-all",
    "message-without-label", "writes-before-refusing", "snapshot-positions-without-buffer-ignored",
    # snapshots and speculation
    "snapshot-one-token-late", "snapshot-ignores-entering-columns", "snapshot-skipped-for-score-only",
    "snapshot-position-within-row", "snapshot-skipped-in-short-piece", "more-tokens-than-entries-accepted",
    "all-entries-written", "accepted-count-off-by-one", "accepted-ignored", "accepted-count-unbounded",
    "short-row-runs-full",
    # seen in released packages while the suite was made: spec/findings.md
    "padding-gradient-unwritten", "padding-counts-in-gradients", "boundary-by-multiplying", "ids-alone-ignored",
    "forward-ignores-ids-gradient-obeys", "entering-window-ignored-by-outputs", "oldest-column-without-gradient",
    "empty-piece-window-unwritten", "empty-segment-refused", "tokens-read-as-rows", "window-rounded-to-weight-type",
    "padding-zeroed-in-the-input", "recomputed-sums-half-written",
)  # fmt: skip


def build(fault: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """The operations of this module, right or with one fault."""
    model = ConvModel(fault)
    return {
        "causal_conv1d": model.causal_conv1d,
        "causal_conv1d_prefill": model.causal_conv1d_prefill,
        "causal_conv1d_update": model.causal_conv1d_update,
        "causal_conv1d_grad": model.causal_conv1d_grad,
    }


class Launch(NamedTuple):
    """What one start of the kernel is given: tokens in memory order, and for every row where it lies and enters."""

    x: Float64  # [T, C] all tokens of the call: of batch rows, or of decode rows, one after another
    owner: Index  # [T] the row of each token, -1 for padding
    tap_start: Index  # [T] the first token that a tap of this token may read
    live: npt.NDArray[np.bool_]  # [T] tokens whose outputs are written
    starts: Index  # [N]
    ends: Index  # [N]
    entering: Float64  # [N, C, W]


class Rows(NamedTuple):
    """The slots of the rows of a call; negative: none."""

    read: Index  # [N]
    write: Index  # [N]

    @property
    def live(self) -> npt.NDArray[np.bool_]:
        return np.asarray((self.read >= 0) | (self.write >= 0))


class ConvModel:
    """The convolution with at most one fault."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault
        self.calls = 0

    # -----------------------------------------------------------------------------------------------------------------
    # Operations
    # -----------------------------------------------------------------------------------------------------------------

    def causal_conv1d(
        self, x: Array, weight: Array, bias: Array | None = None, seq_idx: Array | None = None,
        cu_seqlens: Array | None = None, initial_windows: Array | None = None, *, activation: str | None = None,
        check: bool | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Convolve a pack: (y, final_windows)."""
        call = self._accept("causal_conv1d", {
            "x": x, "weight": weight, "bias": bias, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens,
            "initial_windows": initial_windows,
        }, activation)  # fmt: skip
        launch = self._pack(call)
        seen = self._pack({**call, "seq_idx": None}) if self.fault == "forward-ignores-ids-gradient-obeys" else launch
        y, final = self._outputs(seen, call), self._final(launch, call)
        return self._finish(y, x), round_to(final, dtype_name(x))

    def causal_conv1d_prefill(
        self, x: Array, weight: Array, bias: Array | None, cu_seqlens: Array, conv_pool: Array, read_slots: Array,
        write_slots: Array | None = None, snapshot_positions: Array | None = None,
        snapshot_windows: Array | None = None, *, activation: str | None = None, check: bool | None = None,
    ) -> Array:  # fmt: skip
        """Convolve a pack from and to slots of the pool."""
        call = self._accept("causal_conv1d_prefill", {
            "x": x, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens, "conv_pool": conv_pool,
            "read_slots": read_slots, "write_slots": write_slots, "snapshot_positions": snapshot_positions,
            "snapshot_windows": snapshot_windows,
        }, activation)  # fmt: skip
        rows = self._rows(call)
        launch = self._pack(call, rows)
        final = self._final(launch, call)
        if self.fault == "pool-written-before-read":
            self._store_final(call, rows, final)
            launch = launch._replace(entering=self._enter(call, rows))
        y = self._outputs(launch, call)
        if self.fault != "final-window-not-stored":
            self._store_final(call, rows, final)
        self._store_snapshots(call, rows, launch)
        return self._finish(y, x)

    def causal_conv1d_update(
        self, x: Array, weight: Array, bias: Array | None, conv_pool: Array, read_slots: Array,
        write_slots: Array | None = None, intermediate_windows: Array | None = None,
        num_accepted: Array | None = None, num_tokens: Array | None = None, *, activation: str | None = None,
        check: bool | None = None,
    ) -> Array:  # fmt: skip
        """Convolve J tokens a row, window from and to its slot."""
        call = self._accept("causal_conv1d_update", {
            "x": x, "weight": weight, "bias": bias, "conv_pool": conv_pool, "read_slots": read_slots,
            "write_slots": write_slots, "intermediate_windows": intermediate_windows, "num_accepted": num_accepted,
            "num_tokens": num_tokens,
        }, activation)  # fmt: skip
        if self.fault == "rows-read-as-tokens-of-one" and len(x) > 1:
            call = _as_one_row(call)
        if self.fault == "tokens-read-as-rows":
            call = _as_rows(call)
        rows = self._rows(call)
        launch = self._decode(call, rows)
        final = self._windows(launch, call, launch.ends - 1, np.arange(len(rows.read)))
        if self.fault == "pool-written-before-read":
            self._store_final(call, rows, final)
            launch = launch._replace(entering=self._enter(call, rows))
        y = self._outputs(launch, call)
        self._store_final(call, rows, final)
        self._store_entries(call, rows, launch)
        if self.fault == "input-overwritten" and intermediate_windows is None and x.size and x.flags.writeable:
            x[0, 0, 0] = round_to(final[0, 0, 0], dtype_name(x))
        return self._finish(y, x)

    def causal_conv1d_grad(
        self, cotangents: Mapping[str, Array], x: Array, weight: Array, bias: Array | None = None,
        seq_idx: Array | None = None, cu_seqlens: Array | None = None, initial_windows: Array | None = None, *,
        activation: str | None = None,
    ) -> dict[str, Float64]:  # fmt: skip
        """Gradients of every float input given, gathered like the taps."""
        call = self._accept("causal_conv1d", {
            "x": x, "weight": weight, "bias": bias, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens,
            "initial_windows": initial_windows,
        }, activation)  # fmt: skip
        launch = self._pack(call)
        y = cotangents.get("y")
        grad_y = np.zeros(launch.x.shape) if y is None else widen(y).reshape(launch.x.shape)
        grad_last = self._grad_last(launch, cotangents.get("final_windows"))
        counted = launch
        if self.fault == "padding-counts-in-gradients" and call["cu_seqlens"] is None and call["seq_idx"] is not None:
            counted = _padding_as_row(launch)
        windows, grad_sum = self._grad_sum(counted, call, grad_y)
        grads = {
            "x": self._grad_x(counted, self._load(weight), grad_sum, grad_last).reshape(x.shape),
            **self._grad_parameters(counted, windows, grad_sum, grad_y),
            "initial_windows": self._grad_entering(launch, self._load(weight), grad_sum, grad_last),
        }
        return {name: grad for name, grad in grads.items() if call[name] is not None}

    # -----------------------------------------------------------------------------------------------------------------
    # Arguments
    # -----------------------------------------------------------------------------------------------------------------

    def _accept(self, name: str, tensors: Call, activation: str | None) -> Call:
        """The arguments as the kernel gets them, once the rules are kept."""
        call = _LENIENT.get(self.fault or "", _same)({**tensors, "activation": activation})
        if call.get("cu_seqlens") is not None and call["x"].ndim == 3:
            call = {**call, "cu_seqlens": lenient_offsets(self.fault, call["cu_seqlens"], call["x"].shape[1])}
        shown = {key: value for key, value in _HIDDEN.get(self.fault or "", _same)(call).items() if key in tensors}
        with refusals(self.fault):
            try:
                check_arguments(name, shown, {"activation": call["activation"]})
            except ContractError:
                if self.fault == "writes-before-refusing":
                    _clear_slots(call)
                raise
        tokens = call["x"].shape[1]
        if self.fault == "empty-pack-refused" and tokens == 0:
            raise ShapeError("x has no tokens: at least one is needed (ERR-1)")
        if self.fault == "absent-entering-window-fails" and tokens == 1 and call.get("initial_windows", 0) is None:
            raise ConvError("initial_windows is None (CONV-4)")
        return call

    def _load(self, array: Array) -> Float64:
        return widen(as_if_contiguous(array) if self.fault == "strides-ignored" else array)

    def _pool(self, call: Call) -> Array:
        pool: Array = call["conv_pool"]
        if self.fault == "strides-ignored":
            return as_if_contiguous(pool)
        if self.fault == "strided-pool-copied":
            return np.ascontiguousarray(pool)
        return pool

    def _finish(self, y: Float64, x: Array) -> Array:
        """The outputs in the shape and type of x, rounded once."""
        rounded = round_to(y.reshape(x.shape), dtype_name(x))
        self.calls += 1
        if self.fault == "call-counter-leaks" and self.calls % 2 == 0:
            rounded.reshape(-1).view(f"u{rounded.itemsize}")[:1] ^= 1
        return rounded

    # -----------------------------------------------------------------------------------------------------------------
    # Rows of a pack, rows of a decode call
    # -----------------------------------------------------------------------------------------------------------------

    def _pack(self, call: Call, rows: Rows | None = None) -> Launch:
        """A packed call: rows lie one behind the other, or each batch row is one."""
        batch, tokens, channels = call["x"].shape
        x = self._load(call["x"]).reshape(batch * tokens, channels)  # [T, C]
        starts, ends = self._bounds(call)
        if self.fault == "last-row-owns-the-tail" and rows is not None:
            starts, ends = _stretch_last(rows.live, starts, ends, len(x))
        owner = self._owner(np.arange(len(x)), starts, ends)
        alive = np.append(np.ones(len(ends), np.bool_) if rows is None else self._alive(rows), False)
        entering = self._given(call, len(ends)) if rows is None else self._enter(call, rows)
        if self.fault == "entering-window-ignored" or (
            self.fault == "entering-window-dropped-for-one-row" and len(ends) == 1
        ):
            entering = np.zeros(entering.shape)
        live = alive[owner]
        padding = owner < 0
        if self.fault == "rows-past-offsets-computed" and call["cu_seqlens"] is not None:
            live = live | padding
        if self.fault == "rows-of-id-minus-one-computed" and call["cu_seqlens"] is None:
            live = live | padding
        if self.fault == "padding-zeroed-in-the-input" and not live.all() and call["x"].flags.writeable:
            call["x"][~live.reshape(batch, tokens)] = 0
        return Launch(x, owner, self._tap_start(call, owner, starts, ends), live, starts, ends, entering)

    def _bounds(self, call: Call) -> tuple[Index, Index]:
        """First token and end of every row."""
        batch, tokens = call["x"].shape[:2]
        offsets, ids = call["cu_seqlens"], call.get("seq_idx")
        if offsets is not None and (ids is None or self.fault != "offsets-ignored-beside-ids"):
            bounds = np.asarray(offsets).astype(np.int64)
            if self.fault == "one-segment-taken-as-unpacked" and len(bounds) == 2:
                bounds = np.array([0, tokens])
            return bounds[:-1], bounds[1:]
        if ids is not None:
            entering = call["initial_windows"]
            count = ids.max(initial=-1) + 1 if entering is None else len(entering)
            sorted_ids = np.where(ids[0] < 0, count, ids[0])
            return (np.searchsorted(sorted_ids, np.arange(count), "left").astype(np.int64),
                    np.searchsorted(sorted_ids, np.arange(count), "right").astype(np.int64))  # fmt: skip
        starts = np.arange(batch, dtype=np.int64) * tokens
        return starts, starts + tokens

    def _owner(self, tokens: Index, starts: Index, ends: Index) -> Index:
        """The row of each token: as many rows as ended at or before it; -1 past the last."""
        if self.fault == "empty-segment-shifts-later-rows":
            past = tokens >= ends.max(initial=0)
            ends = ends[ends > starts]
            return np.where(past, -1, np.count_nonzero(tokens[:, None] >= ends, axis=1))
        row = np.count_nonzero(tokens[:, None] >= ends, axis=1)
        return np.where(row < len(ends), row, -1)

    def _tap_start(self, call: Call, owner: Index, starts: Index, ends: Index) -> Index:
        """The first token that the taps of each token may read; padding is not masked, its outputs are not kept."""
        start = np.append(starts, 0)[owner]
        if call["cu_seqlens"] is None and call.get("seq_idx") is None:
            return np.zeros_like(start) if self.fault == "batch-rows-run-together" else start
        if self.fault == "conv-reads-across-boundary":
            return np.zeros_like(start)
        if self.fault == "boundary-seen-by-nearest-tap-only":
            return np.where(np.arange(len(start)) == start, start, 0)
        if self.fault == "first-boundary-only":
            return np.minimum(start, ends[:1]) if len(ends) else start
        return start

    def _given(self, call: Call, count: int) -> Float64:
        entering = call["initial_windows"]
        return np.zeros((count, *call["weight"].shape)) if entering is None else widen(entering)

    def _decode(self, call: Call, rows: Rows) -> Launch:
        """A decode call: row n holds tokens n J .. n J + num_tokens[n]."""
        x = self._load(call["x"])
        count, steps, channels = x.shape
        lengths = np.full(count, steps) if call["num_tokens"] is None else call["num_tokens"].astype(np.int64)
        if self.fault == "short-row-runs-full":
            lengths = np.full(count, steps)
        starts = np.arange(count, dtype=np.int64) * steps
        tokens = np.arange(count * steps, dtype=np.int64)
        owner = tokens // max(steps, 1)
        live = self._alive(rows)[owner] & (tokens - starts[owner] < lengths[owner])
        tap_start = tokens if self.fault == "update-drops-shift" else starts[owner]
        entering = self._enter(call, rows)
        if self.fault == "several-tokens-start-fresh" and steps > 1:
            entering = np.zeros(entering.shape)
        return Launch(x.reshape(count * steps, channels), owner, tap_start, live, starts, starts + lengths, entering)

    # -----------------------------------------------------------------------------------------------------------------
    # Slots
    # -----------------------------------------------------------------------------------------------------------------

    def _rows(self, call: Call) -> Rows:
        """Read and write slots, as the kernel understands them."""
        read = call["read_slots"].astype(np.int64)
        write = read if call["write_slots"] is None else call["write_slots"].astype(np.int64)
        slots = len(call["conv_pool"])
        if self.fault == "negative-slot-clamped-to-zero":
            return Rows(np.maximum(read, 0), np.maximum(write, 0))
        if self.fault == "only-minus-one-is-padding":
            return Rows(np.where(read < -1, read % slots, read), np.where(write < -1, write % slots, write))
        if self.fault == "score-only-stores":
            return Rows(read, np.where(write < 0, read, write))
        if self.fault == "row-uses-row-zeros-slot":
            return Rows(np.where(read >= 0, read[:1], read), write)
        if self.fault == "slots-looked-up-by-token" and "num_tokens" in call:
            row = np.minimum(np.arange(len(read)) * call["x"].shape[1], len(read) - 1)
            return Rows(read[row], write[row])
        return Rows(read, write)

    def _alive(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Rows whose outputs are written."""
        if self.fault in ("padding-row-computed", "padding-output-from-slot-zero"):
            return np.ones(len(rows.read), np.bool_)
        return rows.live

    def _enter(self, call: Call, rows: Rows) -> Float64:
        """The window each row starts from: its slot, an intermediate entry of it, or zeros."""
        pool = self._pool(call)
        resumed, fresh = rows.read >= 0, (rows.read < 0) & (rows.write >= 0)
        entering = np.zeros((len(resumed), *pool.shape[1:]))
        entering[resumed] = self._columns(widen(pool[rows.read[resumed]]))
        if self.fault == "fresh-row-resumes-last-slot":
            entering[fresh] = widen(pool[-1:])
        if self.fault == "fresh-by-multiplying":
            entering[fresh] = widen(pool[rows.write[fresh]]) * 0.0
        if self.fault == "padding-output-from-slot-zero":
            entering[~rows.live] = widen(pool[:1])
        if self.fault == "entering-rows-compacted":
            compact = entering[resumed]
            entering = np.zeros(entering.shape)
            entering[: len(compact)] = compact
        entries, accepted = call.get("intermediate_windows"), call.get("num_accepted")
        if entries is not None and accepted is not None and self.fault != "accepted-ignored":
            entry = accepted.astype(np.int64) - (self.fault == "accepted-count-off-by-one")
            resumed = resumed & (entry >= 0)
            entering[resumed] = self._columns(widen(entries[rows.read[resumed], entry[resumed]]))
        return entering

    def _columns(self, windows: Float64) -> Float64:
        """Windows as they lie in a pool, from windows with the newest token last; its own inverse."""
        return windows[..., ::-1] if self.fault == "window-newest-first" else windows

    def _store_final(self, call: Call, rows: Rows, final: Float64) -> None:
        """Write each row's final window to its slot."""
        pool, stored = self._pool(call), rows.write >= 0
        if self.fault == "untouched-slots-cleared":
            pool[np.setdiff1d(np.arange(len(pool)), rows.write)] = 0
        if self.fault == "padding-row-writes-last-slot" and not rows.live.all():
            pool[-1] = round_to(final[~rows.live][-1], dtype_name(pool))
        windows = self._columns(final)
        if self.fault == "oldest-column-not-stored":
            windows, pool = windows[..., 1:], pool[..., 1:]
        pool[rows.write[stored]] = round_to(windows[stored], dtype_name(pool))
        if self.fault == "read-slot-written-too":
            both = stored & (rows.read >= 0)
            pool[rows.read[both]] = round_to(windows[both], dtype_name(pool))

    def _store_entries(self, call: Call, rows: Rows, launch: Launch) -> None:
        """Entry j of a row's write slot becomes the window after its token j."""
        buffer = call["intermediate_windows"]
        if buffer is None:
            return
        lengths = launch.ends - launch.starts
        entry = np.arange(buffer.shape[1])
        wanted = (entry < lengths[:, None]) & (rows.write >= 0)[:, None]
        if self.fault == "all-entries-written":
            wanted = np.repeat((rows.write >= 0)[:, None], len(entry), axis=1)
        row, entry = np.nonzero(wanted)
        last = launch.starts[row] + np.minimum(entry, lengths[row] - 1)
        if self.fault == "intermediates-one-late":
            last = last - 1
        slot = rows.write[row]
        if self.fault == "intermediates-by-row":
            slot = np.minimum(row, len(buffer) - 1)
        self._put(buffer, (slot, entry), self._windows(launch, call, last, row), "intermediates-accumulate")

    def _store_snapshots(self, call: Call, rows: Rows, launch: Launch) -> None:
        """Snapshot i becomes the window just after token positions[i] - 1, whose row must be alive."""
        positions, buffer = call["snapshot_positions"], call["snapshot_windows"]
        if positions is None:
            return
        place = positions.astype(np.int64)
        row = np.append(launch.owner, -1)[np.where(place > 0, place - 1, len(launch.owner))]
        kept = np.append(rows.live, False)[row]
        if self.fault == "snapshot-skipped-for-score-only":
            kept = kept & (np.append(rows.write, -1)[row] >= 0)
        if self.fault == "snapshot-skipped-in-short-piece":
            kept = kept & (np.append(launch.ends - launch.starts, 0)[row] >= TILE)
        place, row, at = place[kept], row[kept], np.nonzero(kept)[0]
        last = place - 1
        if self.fault == "snapshot-one-token-late":
            last = place
        if self.fault == "snapshot-position-within-row":
            last = last - launch.starts[row]
            row = launch.owner[last]
        if self.fault == "snapshot-ignores-entering-columns":
            source = np.maximum(last[:, None] + np.arange(-buffer.shape[2] + 1, 1), 0)
            self._put(buffer, (at,), launch.x[source].transpose(0, 2, 1), "")
            return
        self._put(buffer, (at,), self._windows(launch, call, last, row), "snapshot-accumulates")

    def _put(self, buffer: Array, place: tuple[Index, ...], windows: Float64, accumulates: str) -> None:
        """Store windows in a buffer that is written once an entry."""
        values = self._columns(windows)
        if self.fault == accumulates:
            values = values + widen(buffer[place])
        buffer[place] = round_to(values, dtype_name(buffer))

    # -----------------------------------------------------------------------------------------------------------------
    # The kernel
    # -----------------------------------------------------------------------------------------------------------------

    def _outputs(self, launch: Launch, call: Call) -> Float64:
        """Outputs `[T, C]`, tile by tile; tokens that are not live give 0."""
        launch = self._as_outputs_enter(launch, call)
        y = np.full(launch.x.shape, np.nan if self.fault == "padded-outputs-unwritten" else 0.0)
        for first in range(0, len(y), TILE):
            tile = np.arange(first, min(first + TILE, len(y)))
            tile = tile[launch.live[tile]]
            if self.fault == "partial-tile-unwritten" and first + TILE > len(y):
                y[tile] = np.nan
                continue
            sums = self._sums(self._taps(launch, tile), call)
            y[tile] = self._activate(sums, call)
        return y

    def _as_outputs_enter(self, launch: Launch, call: Call) -> Launch:
        """What the taps are given; windows are made of the launch itself."""
        batched = "initial_windows" in call and call["cu_seqlens"] is None and call["seq_idx"] is None
        if self.fault == "entering-window-ignored-by-outputs" and batched:
            return launch._replace(entering=np.zeros(launch.entering.shape))
        return launch

    def _taps(self, launch: Launch, tokens: Index) -> Float64:
        """What the taps of `tokens` read, `[X, C, W]`."""
        width = launch.entering.shape[2]
        source = tokens[:, None] + np.arange(-width + 1, 1)
        row = launch.owner[tokens]
        if self.fault in ("window-looks-ahead", "padded-conv-cut-at-the-wrong-end"):
            source = source + (1 if self.fault == "window-looks-ahead" else width - 1)
            source = np.where(source < np.append(launch.ends, 0)[row][:, None], source, len(launch.x))
        if self.fault == "entering-window-of-row-zero":
            row = np.minimum(row, 0)
        start = launch.tap_start[tokens]
        taps = self._gather(launch, source, row, start, int(self.fault == "entering-window-shifted"))
        if self.fault == "boundary-by-multiplying":
            others = (source >= 0) & (source < start[:, None])
            beyond = np.where(others[..., None], launch.x[np.clip(source, 0, None)], 0.0)  # [X, W, C]
            taps = taps + 0.0 * beyond.transpose(0, 2, 1)
        return taps

    def _windows(self, launch: Launch, call: Call, last: Index, row: Index) -> Float64:
        """The windows just after token `last` of each `row`, `[X, C, W]`; the one before a row's start enters."""
        source = last[:, None] + np.arange(-launch.entering.shape[2] + 1, 1)
        windows = self._gather(launch, source, row, launch.starts[row])
        if self.fault == "window-rounded-to-weight-type":
            windows = widen(round_to(windows, dtype_name(call["weight"])))
        return windows

    def _gather(self, launch: Launch, source: Index, row: Index, start: Index, shift: int = 0) -> Float64:
        """Token `source`, or the entering column of `row` that stands for it where it lies before `start`.

        Both arrays get one more entry of zeros, for padding tokens (row -1) and for what lies past the end.
        """
        width = launch.entering.shape[2]
        tokens = np.concatenate([launch.x, np.zeros((1, launch.x.shape[1]))])
        entering = np.concatenate([launch.entering, np.zeros((1, *launch.entering.shape[1:]))])
        column = np.clip(width + source - start[:, None] - shift, 0, width - 1)
        read = tokens[np.clip(source, 0, len(launch.x))]  # [X, W, C]
        entered = entering[row[:, None], :, column]  # [X, W, C]
        return np.where((source < start[:, None])[..., None], entered, read).transpose(0, 2, 1)

    def _sums(self, taps: Float64, call: Call) -> Float64:
        """Bias and weighted taps, `[X, C]`, in the order of the taps."""
        weight, bias = self._load(call["weight"]), call["bias"]
        total = np.zeros(taps.shape[:2])
        if bias is not None and self.fault != "bias-after-activation":
            total = total + widen(bias)
        width = weight.shape[1] if weight.shape[1] in CONV_WIDTHS else 0  # else only with other-width-gives-bias-only
        for j in range(width):
            tap = weight[:, width - 1 - j] if self.fault == "taps-reversed" else weight[:, j]
            total = total + tap * taps[:, :, j]
        return total

    def _activate(self, sums: Float64, call: Call) -> Float64:
        linear = (None, "swish") if self.fault == "swish-taken-as-linear" else (None,)
        y = sums if call["activation"] in linear else silu(sums)
        if self.fault == "bias-after-activation" and call["bias"] is not None:
            y = y + widen(call["bias"])
        return y

    def _final(self, launch: Launch, call: Call) -> Float64:
        """The window each row of a pack ends with, `[N, C, W]`."""
        starts, ends = launch.starts, launch.ends
        if self.fault == "empty-segment-refused" and (ends == starts).any():
            raise ShapeError("a segment has no tokens: at least one is needed (ERR-1)")
        if self.fault == "trailing-zero-tokens-dropped":
            ends = np.array([_real_end(launch.x, s, e) for s, e in zip(starts, ends, strict=True)], np.int64)
        if self.fault == "short-piece-loses-old-columns":
            launch = launch._replace(entering=np.zeros(launch.entering.shape))
        if self.fault == "final-window-of-outputs":
            launch = launch._replace(x=self._outputs(launch, call))
        final = self._windows(launch, call, ends - 1, np.arange(len(ends)))
        if self.fault == "empty-piece-clears-window":
            final[ends == starts] = 0
        if self.fault == "empty-piece-window-unwritten":
            final[ends == starts] = np.nan
        return final

    # -----------------------------------------------------------------------------------------------------------------
    # Gradients
    # -----------------------------------------------------------------------------------------------------------------

    def _grad_last(self, launch: Launch, last: Array | None) -> Float64:
        """The cotangent of each row's final window, `[N, C, W]`; zeros where none is given."""
        grad_last: Float64 = np.zeros(launch.entering.shape)
        if last is not None:
            rows = min(len(last), len(grad_last))  # they differ only where a fault finds other segments
            grad_last[:rows] = widen(last[:rows])
        if self.fault == "oldest-column-without-gradient":
            lengths = launch.ends - launch.starts  # a row of 1 to W-1 tokens gets its column from what enters
            dropped = np.nonzero((lengths == 0) | (lengths >= launch.entering.shape[2]))[0]
            grad_last[dropped, :, 0] = 0
        return grad_last

    def _grad_sum(self, launch: Launch, call: Call, grad_y: Float64) -> tuple[Float64, Float64]:
        """The windows the taps read `[T, C, W]` and the gradient of each token's sum `[T, C]`, 0 where not live."""
        windows = self._taps(self._as_outputs_enter(launch, call), np.arange(len(launch.x)))
        grad_sum = np.zeros(grad_y.shape)
        sums, wanted = self._sums(windows[launch.live], call), grad_y[launch.live]
        if call["activation"] is not None:
            if self.fault == "recomputed-sums-half-written":
                place = np.nonzero(launch.live)[0] - launch.starts[launch.owner[launch.live]]
                sums[place % TILE >= TILE // 2] = np.nan
            s = sigmoid(sums)
            wanted = wanted * (s + sums * s * (1.0 - s))
        grad_sum[launch.live] = wanted
        return windows, grad_sum

    def _grad_x(self, launch: Launch, weight: Float64, grad_sum: Float64, grad_last: Float64) -> Float64:
        """Token p is tap W-1-k of token p + k, and may stand in its row's final window."""
        width, count = weight.shape[1], len(launch.x)
        tokens, end = np.arange(count), np.append(launch.ends, 0)[launch.owner]
        grad = self._grad_from_final(launch, grad_last)
        for ahead in range(width):
            reader = tokens + ahead
            inside = reader < end
            if self.fault == "gradient-crosses-boundary":
                inside = (reader < count) & (launch.owner >= 0)
            if self.fault == "gradient-tail-wraps":
                inside = inside | ((reader >= count) & (launch.owner >= 0))
            reader = reader % max(count, 1)
            term = grad_sum[reader] * weight[:, width - 1 - ahead]
            grad = np.where(inside[:, None], grad + term, grad)
        if self.fault == "padding-gradient-unwritten":
            grad[launch.owner < 0] = np.nan
        return grad

    def _grad_from_final(self, launch: Launch, grad_last: Float64) -> Float64:
        """What each token gets from its row's final window: column W + p - end, `[T, C]`."""
        width = grad_last.shape[2]
        last = np.concatenate([grad_last, np.zeros((1, *grad_last.shape[1:]))])  # one more for padding tokens
        end = np.append(launch.ends, 0)[launch.owner]
        column = width + np.arange(len(launch.x)) - end
        if self.fault == "final-window-gradient-shifted":
            length = np.append(launch.ends - launch.starts, width)[launch.owner]
            column = column - np.maximum(width - 1 - length, 0)
        kept = (launch.owner >= 0) & (column >= 0)
        found = last[launch.owner, :, np.clip(column, 0, width - 1)]  # [T, C]
        return 0.0 + np.where(kept[:, None], found, 0.0)

    def _grad_parameters(
        self, launch: Launch, windows: Float64, grad_sum: Float64, grad_y: Float64
    ) -> dict[str, Float64]:
        """Weight and bias, one live token after another."""
        weight, bias = np.zeros(windows.shape[1:]), np.zeros(windows.shape[1])
        masked = self.fault == "nan-row-reaches-weight-gradient"  # multiplied by 0 instead of left out
        for t in np.arange(len(windows)) if masked else np.nonzero(launch.live)[0]:
            weight = weight + grad_sum[t][:, None] * windows[t]
            if self.fault == "bias-gradient-missing-rows" and t >= len(windows) // TILE * TILE:
                continue
            bias = bias + grad_sum[t]
        return {"weight": weight, "bias": bias}

    def _grad_entering(self, launch: Launch, weight: Float64, grad_sum: Float64, grad_last: Float64) -> Float64:
        """Column c is tap c - 1 - i of a row's token i, and column c - n of the final window of a row of n tokens."""
        width, lengths = weight.shape[1], launch.ends - launch.starts
        column = np.arange(width)
        later = column - lengths[:, None]  # [N, W]
        surviving = later >= 0
        if self.fault == "final-window-gradient-shifted":
            surviving = surviving & (lengths >= width - 1)[:, None]
        found = np.take_along_axis(grad_last, np.clip(later, 0, width - 1)[:, None, :], axis=2)
        grad = 0.0 + np.where(surviving[:, None, :], found, 0.0)
        padded = np.concatenate([grad_sum, np.zeros((1, grad_sum.shape[1]))])
        for i in range(width - 1):
            tap = column - 1 - i
            read = (i < lengths)[:, None, None] & (tap >= 0)
            token = np.where(i < lengths, launch.starts + i, len(grad_sum))
            term = padded[token][:, :, None] * weight[:, np.clip(tap, 0, width - 1)]
            grad = np.where(read, grad + term, grad)
        return np.zeros(grad.shape) if self.fault == "entering-gradient-missing" else grad


def _as_one_row(call: Call) -> Call:
    """[N, J, C] read as [1, N J, C]: the other rows' slots are never looked at."""
    first = {name: call[name] if call[name] is None else call[name][:1]
             for name in ("read_slots", "write_slots", "num_accepted")}  # fmt: skip
    count, steps, channels = call["x"].shape
    return {**call, **first, "x": call["x"].reshape(1, count * steps, channels), "num_tokens": None}


def _as_rows(call: Call) -> Call:
    """[N, J, C] read as [N J, 1, C]: token j of a row works on the slot j places behind the row's own.

    Past the end of the pool lies other memory; here it is the pool's first slots, so that nothing else is written.
    """
    count, steps, channels = call["x"].shape
    token, slots = np.tile(np.arange(steps), count), max(len(call["conv_pool"]), 1)
    rows = {name: call[name] if call[name] is None else np.repeat(call[name].astype(np.int64), steps)
            for name in ("read_slots", "write_slots", "num_accepted", "num_tokens")}  # fmt: skip
    for name in ("read_slots", "write_slots"):
        if rows[name] is not None:
            rows[name] = np.where(rows[name] >= 0, (rows[name] + token) % slots, rows[name])
    if rows["num_tokens"] is not None:
        rows["num_tokens"] = (token < rows["num_tokens"]).astype(np.int64)
    return {**call, **rows, "x": call["x"].reshape(count * steps, 1, channels)}


def _padding_as_row(launch: Launch) -> Launch:
    """The launch with its padding as one more row; rows with id -1 stand at the end of a pack."""
    padding, count = launch.owner < 0, len(launch.ends)
    first = np.count_nonzero(~padding)
    return launch._replace(
        owner=np.where(padding, count, launch.owner), tap_start=np.where(padding, first, launch.tap_start),
        live=np.ones(len(padding), np.bool_), starts=np.append(launch.starts, first),
        ends=np.append(launch.ends, len(padding)),
    )  # fmt: skip


def _stretch_last(live: npt.NDArray[np.bool_], starts: Index, ends: Index, total: int) -> tuple[Index, Index]:
    """Bounds where the last live row reaches to the end of the buffer, if nothing but padding rows is behind it."""
    last = np.max(np.nonzero(live)[0], initial=-1)
    if last < 0 or ends[last] != ends[-1]:
        return starts, ends
    row = np.arange(len(ends))
    return np.where(row > last, total, starts), np.where(row >= last, total, ends)


def _real_end(x: Float64, start: int, end: int) -> int:
    """The end of a row without the all-zero tokens at it."""
    while end > start and not x[end - 1].any():
        end -= 1
    return int(end)


def as_if_contiguous(array: Array) -> Array:
    """What a kernel sees that knows the first address and the sizes and no strides.

    The stretch from the first to the last element is never left: an array whose elements share memory or lie backwards
    is seen as it is.
    """
    steps = [stride // array.itemsize for stride in array.strides]
    reach = 1 + sum(step * (n - 1) for step, n in zip(steps, array.shape, strict=True))
    if array.size == 0 or min(steps, default=0) < 0 or reach < array.size:
        return array
    packed = [array.itemsize * int(np.prod(array.shape[i + 1 :])) for i in range(array.ndim)]
    return np.lib.stride_tricks.as_strided(array, array.shape, packed)


# ---------------------------------------------------------------------------------------------------------------------
# Hosts that repair, or do not look at, what they should refuse
# ---------------------------------------------------------------------------------------------------------------------


def _same(call: Call) -> Call:
    return call


def _ids_hidden(call: Call) -> Call:
    """No ids where there are offsets too."""
    return {**call, "seq_idx": None} if call.get("seq_idx") is not None and call.get("cu_seqlens") is not None else call


def _ids_alone_hidden(call: Call) -> Call:
    """No ids where there are no offsets."""
    return {**call, "seq_idx": None} if call.get("cu_seqlens") is None and "seq_idx" in call else call


def _flatten_batch(call: Call) -> Call:
    x, offsets = call["x"], call.get("cu_seqlens")
    if offsets is None or x.ndim != 3:
        return call
    return {**call, "x": x.reshape(1, x.shape[0] * x.shape[1], x.shape[2])}


def _count_runs(call: Call) -> Call:
    """Ids that decrease are renumbered: every change of id starts a segment."""
    ids = call.get("seq_idx")
    if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu" or (ids < 0).any() or (np.diff(ids) >= 0).all():
        return call
    changed = np.diff(ids[0], prepend=ids[0, :1]) != 0
    return {**call, "seq_idx": np.cumsum(changed)[None].astype(ids.dtype)}


def _linear_by_default(call: Call) -> Call:
    known = call["activation"] in (None, "silu", "swish")
    return {**call, "activation": call["activation"] if known else None}


def _wrap_slots(call: Call) -> Call:
    changed = dict(call)
    for name in ("read_slots", "write_slots"):
        slots, pool = call.get(name), call.get("conv_pool")
        if slots is not None and pool is not None and slots.dtype.kind in "iu" and len(pool):
            changed[name] = np.where(slots >= 0, slots % len(pool), slots)
    return changed


def _positions_need_a_buffer(call: Call) -> Call:
    unread = call.get("snapshot_windows") is None
    return {**call, "snapshot_positions": None} if unread and "snapshot_positions" in call else call


def _clamp_accepted(call: Call) -> Call:
    accepted, entries = call.get("num_accepted"), call.get("intermediate_windows")
    if accepted is None or entries is None or entries.ndim != 4:
        return call
    return {**call, "num_accepted": np.minimum(accepted, entries.shape[1] - 1)}


_LENIENT: dict[str, Callable[[Call], Call]] = {
    "ids-ignored-beside-offsets": _ids_hidden,
    "ids-alone-ignored": _ids_alone_hidden,
    "batch-with-offsets-flattened": _flatten_batch,
    "positions-taken-as-ids": _count_runs,
    "unknown-activation-is-linear": _linear_by_default,
    "slot-index-wraps": _wrap_slots,
    "snapshot-positions-without-buffer-ignored": _positions_need_a_buffer,
    "accepted-count-unbounded": _clamp_accepted,
}
"""What becomes of the arguments before the rules see them, by fault."""


def _served_width(call: Call) -> Call:
    """The same call with every window as wide as the widest that is served."""
    shown = dict(call)
    for name in ("weight", "conv_pool", "initial_windows", "snapshot_windows", "intermediate_windows"):
        array = call.get(name)
        if array is not None and array.ndim and array.shape[-1] > 0:
            shown[name] = np.broadcast_to(np.zeros((), array.dtype), (*array.shape[:-1], max(CONV_WIDTHS)))
    return shown


def _slots_of(call: Call) -> tuple[list[int], list[int]] | None:
    """Read and write slots as lists where they are well-formed."""
    read, write = call.get("read_slots"), call.get("write_slots")
    write = read if write is None else write
    if read is None or write is None or read.ndim != 1 or write.shape != read.shape:
        return None
    return (read.tolist(), write.tolist()) if read.dtype.kind == write.dtype.kind == "i" else None


def _each_write_once(call: Call) -> Call:
    slots = _slots_of(call)
    if slots is None:
        return call
    read, write = slots
    again = [slot >= 0 and slot in write[:n] for n, slot in enumerate(write)]
    shown_read = [-1 if twice and r == w else r for twice, r, w in zip(again, read, write, strict=True)]
    shown_write = [-1 if twice else slot for twice, slot in zip(again, write, strict=True)]
    return {**call, "read_slots": np.array(shown_read, np.int64), "write_slots": np.array(shown_write, np.int64)}


def _no_others_reads(call: Call) -> Call:
    slots = _slots_of(call)
    if slots is None:
        return call
    read, write = slots
    others = [write[:n] + write[n + 1 :] for n in range(len(write))]
    shown = [-1 if slot in other else slot for slot, other in zip(read, others, strict=True)]
    return {**call, "read_slots": np.array(shown, np.int64), "write_slots": np.array(write, np.int64)}


def _tokens_that_fit(call: Call) -> Call:
    """The same call with as many tokens a row as there are entries."""
    entries, x, lengths = call.get("intermediate_windows"), call["x"], call.get("num_tokens")
    if entries is None or entries.ndim != 4 or x.ndim != 3:
        return call
    fitting = None if lengths is None else np.minimum(lengths, min(entries.shape[1], x.shape[1]))
    return {**call, "x": x[:, : entries.shape[1]], "num_tokens": fitting}


_HIDDEN: dict[str, Callable[[Call], Call]] = {
    "offsets-ignored-beside-ids": _ids_hidden,
    "other-width-gives-bias-only": _served_width,
    "duplicate-write-accepted": _each_write_once,
    "write-over-others-read-accepted": _no_others_reads,
    "more-tokens-than-entries-accepted": _tokens_that_fit,
}
"""What the rules are shown instead of the call, by fault."""


def _clear_slots(call: Call) -> None:
    """Clear every slot in range that a row would write."""
    pool = call.get("conv_pool")
    slots = call.get("read_slots") if call.get("write_slots") is None else call["write_slots"]
    if pool is not None and slots is not None and slots.dtype.kind in "iu":
        pool[[slot for slot in slots.ravel().tolist() if 0 <= slot < len(pool)]] = 0
