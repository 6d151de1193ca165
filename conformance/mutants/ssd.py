"""Mamba2 twice, token by token and in chunks with explicit tables, on the rows of states of `delta`.

Step sizes are made before the scan, as kernels do, so that a row of the stream is dt x `[H, P]`, dt A `[H, 1]`, B and C
`[H, R]`; D and z come after it. In a chunk, with D_ij the product of the decays after row j up to row i and E_i that of
all up to row i:

    y_i = S (E_i C_i) + sum over j <= i of (C_i . D_ij B_j) dt_j x_j
    S  <- E_L S + sum over j of dt_j x_j (D_Lj B_j)^T

Each fault is one comparison with its id, at the place where its mechanism sits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from statescan.conformance.mutants.delta import (
    CHUNK,
    CHUNK_FAULTS,
    POOL_FAULTS,
    TOKEN_FAULTS,
    Call,
    Entry,
    Grads,
    Launch,
    StateModel,
    Stream,
    operations,
)
from statescan.conformance.mutants.gates import SOFTPLUS_FAULTS, silu, slope_silu, slope_softplus, softplus
from statescan.reference import ssd, ssd_grad
from statescan.reference.arrays import Float64
from statescan.reference.ssd import check_limit

TOKENS = ("x", "dt", "B", "C", "z")
LEAST_INITIAL_STEP = 1e-3

SSD_FAULTS: tuple[str, ...] = (
    "ids-ignored-beside-offsets", "offsets-ignored-beside-ids", "rows-of-id-minus-one-computed",
    "positions-taken-as-ids", *SOFTPLUS_FAULTS, "dt-bias-after-softplus", "dt-limit-before-softplus",
    "dt-floor-of-initialisation", "step-missing-in-write", "skip-missing", "skip-of-head-zero",
    "skip-per-channel-taken-per-head", "gate-before-skip", "groups-tiled", "groups-that-do-not-divide-accepted",
    "limit-ignored-in-update", "zero-step-still-decays", "nan-row-reaches-weight-gradient",
    "step-gradient-of-last-tile-lost",
)  # fmt: skip
FAULTS: tuple[str, ...] = (*POOL_FAULTS, *TOKEN_FAULTS, *SSD_FAULTS, "decay-after-write-in-ssd")
CHUNKED_FAULTS: tuple[str, ...] = (*POOL_FAULTS, *CHUNK_FAULTS, *SSD_FAULTS)


def build(fault: str | None = None, chunk: int | None = None) -> Mapping[str, Callable[..., Any]]:
    """Mamba2, right or with one fault: token by token, or in chunks of that many tokens."""
    return operations(SsdModel(fault, chunk), "ssd", ssd, ssd_grad)


def build_chunked(fault: str | None = None, chunk: int = CHUNK) -> Mapping[str, Callable[..., Any]]:
    """The same in chunks."""
    return build(fault, chunk)


class SsdModel(StateModel):
    """The Mamba2 recurrence with at most one fault."""

    leading, valued, content = "x", "x", ("x", "B", "C")

    # -----------------------------------------------------------------------------------------------------------------
    # Arguments
    # -----------------------------------------------------------------------------------------------------------------

    def _shown(self, call: Call) -> Call:
        x, B = call["x"], call["B"]
        uneven = x.ndim == B.ndim == 4 and 0 < B.shape[2] < x.shape[2]
        if self.fault == "groups-that-do-not-divide-accepted" and uneven:
            return {**call, "B": B[:, :, :1], "C": call["C"][:, :, :1]}
        return super()._shown(call)

    def _check(self, call: Call) -> None:
        check_limit(call["dt_limit"])

    def _state_shape(self, call: Call) -> tuple[int, ...]:
        return (*call["x"].shape[2:], call["B"].shape[3])

    def _token_names(self, call: Call) -> list[str]:
        return [name for name in TOKENS if call[name] is not None]

    # -----------------------------------------------------------------------------------------------------------------
    # The stream
    # -----------------------------------------------------------------------------------------------------------------

    def _stream(self, call: Call, launch: Launch) -> Stream:
        """dt x `[T, H, P]`, dt A `[T, H, 1]`, B and C per head `[T, H, R]`."""
        x, step, groups = self._flat(call["x"]), self._steps(call), self._groups(call)
        decaying = np.maximum(step, LEAST_INITIAL_STEP) if self.fault == "zero-step-still-decays" else step
        a = self.shift_decay((decaying * self._load(call["A"]))[:, :, None], launch)
        write = x if self.fault == "step-missing-in-write" else step[:, :, None] * x
        B, C = (np.ascontiguousarray(self._flat(call[name])[:, groups]) for name in ("B", "C"))
        return self._faded((write, a, B, C), launch, 1)

    def _steps(self, call: Call) -> Float64:
        """The step size of every token and head: bias, softplus, clamp."""
        free = self.fault == "limit-ignored-in-update" and "num_tokens" in call
        free = free or self.fault == "dt-limit-before-softplus"
        return self._unclamped(call) if free else np.clip(self._unclamped(call), *call["dt_limit"])

    def _unclamped(self, call: Call) -> Float64:
        """The step sizes before the clamp."""
        dt = self._biased(call)
        if self.fault == "dt-limit-before-softplus":
            dt = np.clip(dt, *call["dt_limit"])
        if call["dt_softplus"]:
            dt = softplus(dt, self.fault)
        if self.fault == "dt-bias-after-softplus" and call["dt_bias"] is not None:
            dt = dt + self._load(call["dt_bias"])
        return np.maximum(dt, LEAST_INITIAL_STEP) if self.fault == "dt-floor-of-initialisation" else dt

    def _biased(self, call: Call) -> Float64:
        """What goes into softplus."""
        dt = self._flat(call["dt"])
        late = self.fault == "dt-bias-after-softplus"
        return dt if call["dt_bias"] is None or late else dt + self._load(call["dt_bias"])

    def _groups(self, call: Call) -> list[int]:
        """The group of each head: neighbours share one."""
        heads, groups = call["x"].shape[2], call["B"].shape[2]
        if self.fault == "groups-tiled":
            return [head % groups for head in range(heads)]
        return [min(head // max(heads // groups, 1), groups - 1) for head in range(heads)]

    def _log_decay(self, stream: Stream) -> Float64:
        return stream[1]

    def _blank(self, stream: Stream) -> Float64:
        return np.zeros(stream[0].shape)

    def _finish(self, call: Call, outputs: Float64) -> Float64:
        """D x added, then the gate."""
        gate = 1.0 if call["z"] is None else silu(self._flat(call["z"]))
        skip = self._skip(call) * self._flat(call["x"])
        with np.errstate(all="ignore"):  # padding may hold anything
            if self.fault == "gate-before-skip":
                return outputs * gate + skip
            return (outputs + skip) * gate

    def _skip(self, call: Call) -> Float64:
        """D as `[H, 1 or P]`, zeros where absent."""
        given = call["D"]
        if given is None or self.fault == "skip-missing":
            return np.zeros((call["x"].shape[2], 1))
        D = self._load(given) if given.ndim == 2 else self._load(given)[:, None]
        if self.fault == "skip-of-head-zero":
            return np.broadcast_to(D[:1], D.shape)
        return D[:, :1] if self.fault == "skip-per-channel-taken-per-head" else D

    # -----------------------------------------------------------------------------------------------------------------
    # One token, one chunk
    # -----------------------------------------------------------------------------------------------------------------

    def _decayed(self, row: Stream, state: Float64) -> Float64:
        return np.asarray(np.exp(row[1])[:, :, None] * state)

    def _step(self, row: Stream, state: Float64) -> tuple[Float64, Float64]:
        write, _, B, C = row
        decayed, added = self._decayed(row, state), write[:, :, None] * B[:, None, :]
        after = decayed + added
        if self.fault == "decay-after-write-in-ssd":
            after = self._decayed(row, state + added)
        return self._dot(C, (decayed if self.fault == "read-before-write" else after).swapaxes(1, 2)), after

    def _read(self, row: Stream, state: Float64) -> Float64:
        return self._dot(row[3], state.swapaxes(1, 2))

    def _solve(
        self, part: Stream, state: Float64, before: Entry, marks: Sequence[int]
    ) -> tuple[Float64, list[Float64], Float64]:
        write, a, B, C = (np.ascontiguousarray(piece.swapaxes(0, 1)) for piece in part)  # [H, L, ...]
        decays, entry = self._decays(a, before)
        between, size = decays[..., 0], a.shape[1]
        inside = (C @ B.swapaxes(1, 2)) * between * self._output_mask(size)
        seen = (self._entry_for_outputs(a, entry) * C) @ self._state_for_outputs(state).swapaxes(1, 2)

        def after(rows: int) -> Float64:
            if rows == 0:
                return state
            left = between[:, rows - 1, :rows, None] * B[:, :rows]
            return np.asarray(entry[:, rows - 1, :, None] * state + write[:, :rows].swapaxes(1, 2) @ left)

        return (seen + inside @ write).swapaxes(0, 1), [after(rows) for rows in marks], after(size)

    # -----------------------------------------------------------------------------------------------------------------
    # Gradients
    # -----------------------------------------------------------------------------------------------------------------

    def run_grad(self, name: str, call: Call) -> Grads:
        cotangents, call = call["cotangents"], self._accept(name, call)
        launch, _ = self._pull_launch(call)
        with np.errstate(all="ignore"):
            stream = self._stream(call, launch)
            above = np.zeros(stream[0].shape)
            if "y" in cotangents:
                above = np.where(launch.written[:, None, None], self._flat(cotangents["y"]), 0.0)
            gate = 1.0 if call["z"] is None else silu(self._flat(call["z"]))
            scanned = np.where(launch.written[:, None, None], above * gate, 0.0)
            grads, entering = self._pull(stream, launch, 1, scanned, self._grad_last(cotangents, launch))
            found = {**self._fold_tokens(call, launch, stream, grads, scanned),
                     **self._fold_gate(call, launch, above)}  # fmt: skip
        shaped = {key: grad.reshape(call[key].shape) for key, grad in found.items()}
        given = call["initial_state"]
        return shaped if given is None else {**shaped, "initial_state": entering[: len(given)]}

    def _pull_step(
        self, row: Stream, before: Float64, after: Float64, grad_output: Float64, grad_state: Float64
    ) -> tuple[Stream, Float64]:
        write, _, B, C = row
        grad_C = (grad_output[:, None, :] @ after)[:, 0]
        grad_state = grad_state + grad_output[:, :, None] * C[:, None, :]
        grad_write, grad_B = (grad_state @ B[:, :, None])[:, :, 0], (write[:, None, :] @ grad_state)[:, 0]
        decayed = self._decayed(row, before)
        grad_a = (grad_state * decayed).sum(axis=(1, 2))[:, None]
        return (grad_write, grad_a, grad_B, grad_C), self._decayed(row, grad_state)

    def _fold_tokens(
        self, call: Call, launch: Launch, stream: Stream, grads: Sequence[Float64], scanned: Float64
    ) -> Grads:
        """Cotangents of what makes the stream, and of D, from those of the stream and of the scan's outputs."""
        write, grad_a, B, C = grads
        x, step, A = self._flat(call["x"]), self._steps(call), self._load(call["A"])
        owned = launch.written[:, None]
        grad_a = self._nan_where_masked(stream[1], grad_a, launch, 1)[:, :, 0]
        grad_a = np.zeros(grad_a.shape) if self.fault == "gate-gradient-missing" else grad_a
        grad_step = np.where(owned, (x * write).sum(axis=2), 0.0) + A * grad_a
        if self.fault == "step-gradient-of-last-tile-lost":
            grad_step[len(x) // CHUNK * CHUNK :] = 0.0
        grad_dt = np.where(owned, grad_step * self._slope(call), 0.0)
        skipped = np.where(owned[:, :, None], scanned * x, 0.0)
        found = {
            "x": np.where(owned[:, :, None], step[:, :, None] * write + self._skip(call) * scanned, 0.0),
            "dt": grad_dt, "B": self._fold_groups(B, call), "C": self._fold_groups(C, call),
            "A": self._added(np.where(owned, step * grad_a, 0.0), step * grad_a),
        }  # fmt: skip
        if call["D"] is not None:
            total = self._added(skipped, scanned * x)
            found["D"] = total if call["D"].ndim == 2 else total.sum(axis=1)
        if call["dt_bias"] is not None:
            found["dt_bias"] = self._added(grad_dt, grad_step * self._slope(call))
        return found

    def _added(self, terms: Float64, masked: Float64) -> Float64:
        """The gradient of a parameter: `terms` of all tokens added up; `masked` are those of rows without an owner
        too, multiplied by cotangents of 0 instead of left out."""
        nan = self.fault == "nan-row-reaches-weight-gradient"
        return np.asarray((masked if nan else terms).sum(axis=0))

    def _slope(self, call: Call) -> Float64:
        """Derivative of the step sizes: that of softplus, and 0 where the clamp holds them."""
        biased, (least, largest) = self._biased(call), call["dt_limit"]
        step = biased if self.fault == "dt-limit-before-softplus" else self._unclamped(call)
        free = (step >= least) & (step <= largest)
        return np.where(free, slope_softplus(biased, self.fault) if call["dt_softplus"] else 1.0, 0.0)

    def _fold_groups(self, terms: Float64, call: Call) -> Float64:
        """Cotangents per head added up to the groups they came from."""
        folded = np.zeros((len(terms), call["B"].shape[2], terms.shape[2]))
        for head, group in enumerate(self._groups(call)):
            folded[:, group] += terms[:, head]
        return folded

    def _fold_gate(self, call: Call, launch: Launch, above: Float64) -> Grads:
        """The cotangent of z: what the gate multiplies, made again by the scan."""
        if call["z"] is None:
            return {}
        outputs, _ = self._scan(call, launch, ())
        total = outputs + self._skip(call) * self._flat(call["x"])
        pulled = above * total * slope_silu(self._flat(call["z"]))
        return {"z": np.where(launch.written[:, None, None], pulled, 0.0)}
