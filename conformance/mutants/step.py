"""Hooks, mixin and engine edits with at most one fault: a mixer walked token by token, slot by slot (STEP, CONT, LIFE).

The hooks take a mixer's description (a trace's `mixer`) as their first argument, the mixin an object with the two hooks
and the two projections; rows may be NumPy arrays or torch tensors in the mixin, NumPy arrays in the hooks. Each fault
is one comparison with its id, at the place where its mechanism sits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from statescan.reference.arrays import Array, Float64, dtype_name, round_to, widen
from statescan.reference.host.mixer_config import MixerConfig, read_config
from statescan.spec.contract import EmptyBatchError

HOOK_FAULTS: tuple[str, ...] = (
    "hook-slot-clamped", "hook-padding-left-nan", "hook-entries-by-row", "piece-starts-fresh",
    "only-the-first-row-resumes", "hook-snapshot-one-late", "hook-snapshot-without-window",
    "short-piece-forgets-the-window", "one-token-piece-keeps-no-snapshot", "state-follows-the-row",
)  # fmt: skip
MIXIN_FAULTS: tuple[str, ...] = (
    "rows-projected-by-partition", "prefill-rows-first", "prefill-called-per-request", "merged-at-the-padded-count",
    "bias-added-to-the-output", "missing-hook-gives-zeros", "hooks-get-a-copied-context", "mixin-wants-an-allocator",
    "decode-rows-flattened", "empty-batch-gives-zeros", "padding-multiplied-by-zero", "first-layers-slab",
    "plain-step-writes-entries", "short-prompt-writes-entries", "prefill-before-the-refusal",
)  # fmt: skip
ENGINE_FAULTS: tuple[str, ...] = (
    "slot-not-zeroed", "window-kept-for-the-next-request", "rollback-state-only", "rollback-one-too-far",
    "restart-keeps-the-old-state", "window-left-behind",
)  # fmt: skip
FAULTS: tuple[str, ...] = (*HOOK_FAULTS, *MIXIN_FAULTS, *ENGINE_FAULTS)

Point = tuple[Float64, Float64]
"""Window and state."""


def build(fault: str | None = None) -> Mapping[str, Callable[..., Any]]:
    """Both hooks, the mixin's step and the engine's edit, right or with one fault."""
    model = StepModel(fault)
    return {"ssm_decode": model.ssm_decode, "ssm_prefill": model.ssm_prefill,
            "ssm_dynamic_inference": model.ssm_dynamic_inference, "engine.edit": model.edit}  # fmt: skip


class ModelMixer:
    """A described mixer as an object with hooks, for a replayer: rows come in projected and leave as they are."""

    def __init__(self, described: Mapping[str, Any], operations: Mapping[str, Callable[..., Any]]) -> None:
        self.described, self.operations = described, operations
        self.layer_number, self.pp_layer_offset = 1, 0

    def in_proj(self, rows: Any) -> Any:
        return rows

    def out_proj(self, rows: Any) -> Any:
        return rows

    def ssm_decode(self, *given: Any) -> Any:
        return self.operations["ssm_decode"](self.described, *given)

    def ssm_prefill(self, *given: Any) -> Any:
        return self.operations["ssm_prefill"](self.described, *given)

    def ssm_dynamic_inference(self, hidden_states: Any, context: Any) -> Any:
        return self.operations["ssm_dynamic_inference"](self, hidden_states, context)


class StepModel:
    """One step of a serving engine with at most one fault."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault
        self.zeroed: set[tuple[int, int]] = set()

    # The hooks -------------------------------------------------------------------------------------------------------

    def ssm_decode(
        self, mixer: Mapping[str, Any], zxBCdt: Array, conv_state: Array, ssm_state: Array, batch_indices: Array,
        intermediate_conv_state: Array | None = None, intermediate_ssm_state: Array | None = None,
    ) -> Array:  # fmt: skip
        """J tokens of every request, row by row."""
        config = read_config(mixer)
        y = np.zeros((*zxBCdt.shape[:2], config.d_inner))
        pools = (conv_state, ssm_state)
        stores: list[tuple[tuple[Array, Array], tuple[int, ...], Point]] = []
        for n, given in enumerate(np.asarray(batch_indices).tolist()):
            slot = max(given, 0) if self.fault == "hook-slot-clamped" else given
            if slot < 0:
                y[n] = np.nan if self.fault == "hook-padding-left-nan" else 0.0
                continue
            point = entering(pools, n if self.fault == "state-follows-the-row" else slot)
            for j in range(zxBCdt.shape[1]):
                point, y[n, j] = advance(config, mixer, point, widen(zxBCdt[n, j]))
                if intermediate_conv_state is not None and intermediate_ssm_state is not None:
                    place = n if self.fault == "hook-entries-by-row" else slot
                    stores.append(((intermediate_conv_state, intermediate_ssm_state), (place, j), point))
            stores.append((pools, (slot,), point))
        for targets, where, point in stores:
            store(targets, where, point)
        return round_to(y, dtype_name(zxBCdt))

    def ssm_prefill(
        self, mixer: Mapping[str, Any], zxBCdt: Array, conv_state: Array, ssm_state: Array, context: Any
    ) -> Array:
        """All pieces, row by row; every row's entering point is gathered before any is stored."""
        config, metadata = read_config(mixer), context.mamba_metadata
        offsets, slots = np.asarray(metadata.cu_seqlens).tolist(), np.asarray(metadata.batch_indices_prefill).tolist()
        y = np.zeros((zxBCdt.shape[0], 1, config.d_inner))
        if self.fault == "hook-padding-left-nan":
            y[offsets[-1] :] = np.nan
        stores: list[tuple[tuple[Array, Array], int, Point]] = []
        pools = (conv_state, ssm_state)
        for n, given in enumerate(slots):
            slot = max(given, 0) if self.fault == "hook-slot-clamped" else given
            if slot < 0:
                continue
            points = [self.entered(pools, slot, n)]
            for t in range(offsets[n], offsets[n + 1]):
                point, y[t, 0] = advance(config, mixer, points[-1], widen(zxBCdt[t, 0]))
                points.append(point)
            stores.append((pools, slot, self.leaving(points, config)))
            stores += self.snapshots(context, offsets[n], points)
        for targets, place, point in stores:
            store(targets, (place,), point)
        return round_to(y, dtype_name(zxBCdt))

    def entered(self, pools: tuple[Array, Array], slot: int, row: int) -> Point:
        """What a piece starts from: what its slot holds."""
        window, state = entering(pools, slot)
        lost = self.fault == "piece-starts-fresh" or (self.fault == "only-the-first-row-resumes" and row > 0)
        return (0 * window, np.zeros(state.shape)) if lost else (window, state)

    def leaving(self, points: list[Point], config: MixerConfig) -> Point:
        """What a piece leaves in its slot."""
        window, state = points[-1]
        tokens = len(points) - 1
        if self.fault == "short-piece-forgets-the-window" and 0 < tokens < config.d_conv:
            window = window.copy()
            window[:, : config.d_conv - tokens] = 0
        return window, state

    def snapshots(
        self, context: Any, start: int, points: list[Point]
    ) -> list[tuple[tuple[Array, Array], int, Point]]:
        """The snapshots that fall into a piece, and the buffer row of each."""
        metadata, allocator = context.mamba_metadata, getattr(context, "mamba_slot_allocator", None)
        if allocator is None or (len(points) == 2 and self.fault == "one-token-piece-keeps-no-snapshot"):
            return []
        buffers, found = (allocator.intermediate_conv_out, allocator.intermediate_ssm_out), []
        count = int(np.asarray(metadata.intermediate_real_count)[0])
        for i, position in enumerate(np.asarray(metadata.intermediate_abs_positions).tolist()[:count]):
            at = position - start
            if 0 < at < len(points):
                late = self.fault == "hook-snapshot-one-late"
                window, state = points[min(at + 1, len(points) - 1) if late else at]
                if self.fault == "hook-snapshot-without-window":
                    window = widen(buffers[0][i])
                found.append((buffers, i, (window, state)))
        return found

    # The mixin -------------------------------------------------------------------------------------------------------

    def ssm_dynamic_inference(self, mixer: Any, hidden_states: Any, context: Any) -> tuple[Any, Any]:
        """Both partitions of a step and their merge."""
        fault, dims, metadata = self.fault, context.padded_batch_dimensions, context.mamba_metadata
        decode, prefill, tokens = dims.decode_req_count, dims.prefill_req_count, 1 + context.num_speculative_tokens
        if decode == 0 and prefill == 0 and fault != "empty-batch-gives-zeros":
            raise EmptyBatchError("Dynamic inference called with 0 decode and 0 prefill requests (STEP-11)")
        if fault == "mixin-wants-an-allocator":
            context.mamba_slot_allocator.intermediate_ssm_out  # noqa: B018  looked at, and not needed
        number = 1 if fault == "first-layers-slab" else mixer.layer_number - mixer.pp_layer_offset
        pools = context.mamba_states_cache(number)
        rows = self.project(mixer, hidden_states, decode * tokens)
        first = decode * tokens
        if decode and prefill and fault != "merged-at-the-padded-count":
            first = int(metadata.device_decode_prefill[0])
        calls: list[Callable[[], Any]] = []
        if decode:
            calls.append(lambda: self.decode(mixer, rows, pools, context, number, tokens))
        if prefill:
            calls.append(lambda: self.prefill(mixer, rows[first:], pools, context, number, tokens))
        if fault == "prefill-before-the-refusal":
            done = [call() for call in calls[::-1]][::-1]
        else:
            done = [call() for call in calls]
        y = zeros(rows, rows.shape[0], 1, done[0].shape[-1] if done else 1)
        if decode:
            y[:first] = done[0].reshape(-1, 1, y.shape[-1])[:first]
        if prefill:
            y[first : first + done[-1].shape[0]] = done[-1][: y.shape[0] - first]
        if fault == "padding-multiplied-by-zero":
            y[context.padding_slice] *= 0
        else:
            y[context.padding_slice] = 0
        return self.leave(mixer, y)

    def project(self, mixer: Any, hidden_states: Any, decoded: int) -> Any:
        """The rows of all partitions from one call of the projection."""
        if self.fault == "rows-projected-by-partition" and 0 < decoded < hidden_states.shape[0]:
            parts = [first_of(mixer.in_proj(part)) for part in (hidden_states[:decoded], hidden_states[decoded:])]
            rows = zeros(parts[0], hidden_states.shape[0], *parts[0].shape[1:])
            rows[:decoded], rows[decoded:] = parts
            return rows
        return first_of(mixer.in_proj(hidden_states))

    def decode(self, mixer: Any, rows: Any, pools: Any, context: Any, number: int, tokens: int) -> Any:
        """The decode partition."""
        count = context.padded_batch_dimensions.decode_req_count
        part = rows[: count * tokens]
        if self.fault == "prefill-rows-first" and context.padded_batch_dimensions.prefill_req_count:
            part = rows[rows.shape[0] - count * tokens :]
        part = part.reshape(*((count * tokens, 1) if self.fault == "decode-rows-flattened" else (count, tokens)), -1)
        wanted = tokens > 1 or self.fault == "plain-step-writes-entries"
        entries = context.mamba_states_cache(number, intermediate=True) if wanted else (None, None)
        slots = context.mamba_metadata.batch_indices_decode
        return self.call(mixer.ssm_decode, part, (part, *pools, slots, *entries))

    def prefill(self, mixer: Any, rows: Any, pools: Any, context: Any, number: int, tokens: int) -> Any:
        """The prefill partition."""
        given, metadata = context, context.mamba_metadata
        if self.fault == "hooks-get-a-copied-context":
            given = copy.copy(context)
        if self.fault == "prefill-called-per-request":
            return self.one_by_one(mixer, rows, pools, context)
        y = self.call(mixer.ssm_prefill, rows, (rows, *pools, given))
        if self.fault == "short-prompt-writes-entries" and tokens > 1:
            for n, slot in enumerate(metadata.batch_indices_prefill):
                length = int(metadata.cu_seqlens[n + 1]) - int(metadata.cu_seqlens[n])
                if int(slot) >= 0 and 0 < length <= tokens:
                    for buffer, pool in zip(context.mamba_states_cache(number, intermediate=True), pools, strict=True):
                        buffer[int(slot), length - 1] = pool[int(slot)]
        return y

    def one_by_one(self, mixer: Any, rows: Any, pools: Any, context: Any) -> Any:
        """A call for each request, as if a batch had one."""
        metadata, y = context.mamba_metadata, None
        for n in range(len(metadata.batch_indices_prefill)):
            start, end = int(metadata.cu_seqlens[n]), int(metadata.cu_seqlens[n + 1])
            own = SimpleNamespace(**vars(metadata))
            own.cu_seqlens, own.batch_indices_prefill = np.array([0, end - start]), metadata.batch_indices_prefill[n:]
            part = mixer.ssm_prefill(rows[start:end], *pools, SimpleNamespace(**{**vars(context),
                                                                                "mamba_metadata": own}))  # fmt: skip
            y = zeros(part, rows.shape[0], *part.shape[1:]) if y is None else y
            y[start:end] = part
        return y

    def call(self, hook: Callable[..., Any], rows: Any, given: tuple[Any, ...]) -> Any:
        """A hook, which a mixer without it must be seen to lack."""
        if self.fault != "missing-hook-gives-zeros":
            return hook(*given)
        try:
            return hook(*given)
        except NotImplementedError:
            return rows * 0

    def leave(self, mixer: Any, y: Any) -> tuple[Any, Any]:
        """The output projection and its bias."""
        found = mixer.out_proj(y)
        out, bias = found if isinstance(found, tuple) else (found, None)
        if self.fault == "bias-added-to-the-output" and bias is not None:
            return out + bias, None
        return out, bias

    # The engine between steps ----------------------------------------------------------------------------------------

    def edit(self, memory: Any, event: Mapping[str, Any]) -> None:
        """One engine edit on all per-slot arrays: windows first, then states."""
        word, slot, again = event["op"], event.get("slot"), (id(memory), event.get("slot")) in self.zeroed
        if word == "zero":
            self.zeroed.add((id(memory), event["slot"]))
        for which, pool in enumerate(memory.pools):
            if word == "zero":
                kept = {"slot-not-zeroed": True, "window-kept-for-the-next-request": which == 0,
                        "restart-keeps-the-old-state": again}.get(self.fault or "", False)  # fmt: skip
                pool[slot] = pool[slot] if kept else 0
            elif word == "restore":
                kept_block = memory.kept.get(event["block"])
                pool[slot] = 0 if kept_block is None else kept_block[which]
            elif word == "rollback" and not (self.fault == "rollback-state-only" and which == 0):
                entry = event["entry"] + (self.fault == "rollback-one-too-far")
                pool[slot] = memory.entries[which][slot, min(entry, memory.entries[which].shape[1] - 1)]
            elif word == "load" and not (self.fault == "window-left-behind" and which == 0):
                pool[slot] = memory.saved[event["name"]][which]
            elif word == "poison":
                pool[slot] = np.nan
        if word == "commit" and event.get("kept", True):
            memory.kept[event["block"]] = tuple(buffer[event["from"]].copy() for buffer in memory.snapshots)
        elif word == "save":
            memory.saved[event["name"]] = tuple(pool[slot].copy() for pool in memory.pools)
        elif word == "drop":
            memory.kept.pop(event["block"], None)


def entering(pools: tuple[Array, Array], slot: int) -> Point:
    """What a slot holds."""
    return widen(pools[0][slot]), widen(pools[1][slot])


def store(targets: tuple[Array, Array], place: tuple[int, ...], point: Point) -> None:
    """Write window and state, each rounded once."""
    for target, value in zip(targets, point, strict=True):
        target[place] = round_to(value, dtype_name(target))


def first_of(found: Any) -> Any:
    """The tensor of a projection that may return (tensor, bias)."""
    return found[0] if isinstance(found, tuple) else found


def zeros(like: Any, *shape: int) -> Any:
    """Zeros of the kind and type of `like`."""
    return like.new_zeros(shape) if hasattr(like, "new_zeros") else np.zeros(shape, like.dtype)


def advance(config: MixerConfig, mixer: Mapping[str, Any], point: Point, row: Float64) -> tuple[Point, Float64]:
    """One token of a bare mixer: its row `[d_proj]` into (window, state); the new point and y `[d_inner]`."""
    parts = config.split(row)
    window = np.concatenate([point[0][:, 1:], parts["conv"][:, None]], axis=1)
    mixed = (np.array(mixer["conv_weight"], np.float64) * window).sum(1)
    if mixer.get("conv_bias") is not None:
        mixed = mixed + np.array(mixer["conv_bias"], np.float64)
    at = 0
    for name, width in (part for part in config.parts if part[0] in config.conv_parts):
        parts[name], at = mixed[at : at + width], at + width
    state, y = (advance_ssd if config.kind == "mamba2" else advance_delta)(config, mixer, point[1], parts)
    return (window, state), y.ravel()


def advance_ssd(
    c: MixerConfig, mixer: Mapping[str, Any], state: Float64, parts: Mapping[str, Float64]
) -> tuple[Float64, Float64]:
    """One token of Mamba2, the step size as it is."""
    x, dt = parts["x"].reshape(c.heads, c.headdim), parts["dt"]
    B, C = (np.repeat(parts[n].reshape(c.groups, c.d_state), c.heads // c.groups, axis=0) for n in ("B", "C"))
    decay = np.exp(dt * np.array(mixer["A"], np.float64))
    state = decay[:, None, None] * state + (dt[:, None] * x)[:, :, None] * B[:, None, :]
    y = (state * C[:, None, :]).sum(2)
    return state, y if mixer.get("D") is None else y + np.array(mixer["D"], np.float64).reshape(c.heads, -1) * x


def advance_delta(
    c: MixerConfig, mixer: Mapping[str, Any], state: Float64, parts: Mapping[str, Float64]
) -> tuple[Float64, Float64]:
    """One token of the delta family, gates as they are."""
    m, per, upper = c.num_householder, c.hv // c.heads, c.kind == "gdp"
    q = np.repeat(parts["Q" if upper else "q"].reshape(c.heads, c.key_dim), per, axis=0)
    k = np.repeat(parts["K" if upper else "k"].reshape(m, c.heads, c.key_dim), per, axis=1)
    v = parts["V" if upper else "v"].reshape(m, c.hv, c.value_dim)
    beta = parts["beta" if c.kind == "gdn" else "b"].reshape(m, c.hv)
    g = {"gdn": "alpha", "gdp": "a", "kda": "f"}[c.kind]
    state = np.exp(parts[g].reshape(c.hv, -1))[:, :, None] * state
    for i in range(m):
        known = (k[i][:, :, None] * state).sum(1)
        state = state + k[i][:, :, None] * (beta[i][:, None] * (v[i] - known))[:, None, :]
    scale = c.key_dim**-0.5 if c.scale is None else c.scale
    return state, ((scale * q)[:, :, None] * state).sum(1)
