"""Shorthand of the serving chapters: a toy mixer that shows what the mixin does, and a desk with slots of digits.

The toy gives 10 times a decode row and 100 times a prefill row, so that an output tells which hook it came from. The
desk has a Mamba2 mixer of one head that counts in digits: a token d enters as 100 d + 10 times the digit before it +
the one before that, and the state is the running sum. After 1, 2, 3 the outputs are 100, 310, 631.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from statescan.conformance.mutants.step import build
from statescan.reference.host.metadata import PREFILL_NAMES, decode_metadata, prefill_metadata
from statescan.reference.inference import BatchDimensions, SSMDynamicInferenceMixin, StepContext
from statescan.reference.mixers import build_mixer
from statescan.reference.mixers.arrays import to_array
from statescan.spec.contract import UnsupportedError
from statescan.spec.notation import numbers

Array = npt.NDArray[Any]
Operations = Mapping[str, Callable[..., Any]]
Piece = tuple[int, Sequence[int]]
"""A slot, and the digits that enter it."""

DIGITS: dict[str, Any] = {
    "kind": "mamba2", "bare": True, "d_conv": 3, "chunk": 2, "conv_weight": [[1, 10, 100], [0, 0, 1], [0, 0, 1]],
    "A": [0], "D": [0], "dt_bias": None, "dt_softplus": False,
}  # fmt: skip
"""A mixer whose rows are (digit, 1, 1, 1)."""


class Toy(SSMDynamicInferenceMixin):
    """A mixer with two hooks and nothing else: 10 times a decode row, 100 times a prefill row, NaN in padding.

    It logs what is called, with what; `single` refuses drafts, `bias` is what its last projection hands on.
    """

    def __init__(self, *, single: bool = False, bias: float = 7.0) -> None:
        self.layer_number, self.single, self.bias = 1, single, torch.tensor([bias])
        self.log: list[str] = []
        self.seen: Any = None

    def in_proj(self, rows: torch.Tensor) -> torch.Tensor:
        self.log.append(f"in_proj {rows.shape[0]}")
        return rows

    def out_proj(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.log.append(f"out_proj {rows.shape[0]}")
        return rows, self.bias

    def ssm_decode(self, zxBCdt: Any, conv_state: Any, ssm_state: Any, batch_indices: Any, *entries: Any) -> Any:
        self.log.append(f"decode {'x'.join(map(str, zxBCdt.shape))}")
        if self.single and zxBCdt.shape[1] > 1:
            raise UnsupportedError(f"zxBCdt has {zxBCdt.shape[1]} tokens a request: this mixer takes 1 (SPEC-7)")
        y = 10 * zxBCdt
        for n, slot in enumerate(batch_indices.tolist()):
            y[n] = y[n] if slot >= 0 else float("nan")
        return y

    def ssm_prefill(self, zxBCdt: Any, conv_state: Any, ssm_state: Any, context: Any) -> Any:
        self.log.append("prefill")
        self.seen = context
        end = int(context.mamba_metadata.cu_seqlens[-1])
        for slot in context.mamba_metadata.batch_indices_prefill.tolist():
            ssm_state[slot] += 1
        return torch.cat([100 * zxBCdt[:end], float("nan") * zxBCdt[end:]])


def toy_context(
    rows: int, decode: Sequence[int] = (), lengths: Sequence[int] = (), slots: Sequence[int] = (), tokens: int = 1
) -> StepContext:
    """A step of `rows` rows: slots of the padded decode requests, lengths and slots of the prefill requests."""
    real = tokens * sum(slot >= 0 for slot in decode)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    metadata = SimpleNamespace(
        cu_seqlens=torch.from_numpy(offsets), batch_indices_prefill=torch.tensor(slots, dtype=torch.int32),
        batch_indices_decode=torch.tensor(decode), device_decode_prefill=torch.tensor([real, int(offsets[-1])]),
    )  # fmt: skip
    pools = torch.zeros(4, 1, 2), torch.zeros(4, 1, 1)
    return StepContext(
        metadata, BatchDimensions(rows, len(decode), len(slots)), slice(real + int(offsets[-1]), rows), [pools],
        [(torch.zeros(4, tokens, 1, 2), torch.zeros(4, tokens, 1, 1))], tokens - 1,
    )  # fmt: skip


def step(
    rows: Sequence[float], *, by: Operations | None = None, toy: Any = None, context: StepContext | None = None,
    **more: Any,
) -> Any:  # fmt: skip
    """The outputs of one step over these rows, by the mixin or by a model of it.

    >>> step([1, 2, 3], decode=[0, -1], lengths=[1], slots=[2])
    [10.0, 200.0, 0.0]
    """
    toy, context = toy or Toy(), context or toy_context(len(rows), **more)
    hidden = torch.tensor(rows, dtype=torch.float32)[:, None, None]
    run = by["ssm_dynamic_inference"] if by is not None else SSMDynamicInferenceMixin.ssm_dynamic_inference
    return numbers(run(toy, hidden, context)[0].numpy())


class Desk:
    """Slots of digits: hooks of the reference, or a model with a fault, and the engine's edits between their calls.

    >>> desk = Desk()
    >>> desk.edit("zero", slot=1), desk.prefill((1, [1, 2, 3])), desk.state(1), desk.window(1)
    (None, [100.0, 310.0, 631.0], 631.0, [1.0, 2.0, 3.0])
    """

    def __init__(self, operations: Operations | None = None, slots: int = 3, fill: float = float("nan")) -> None:
        self.operations, self.right = operations, build()
        self.mixer = build_mixer(DIGITS)
        pools = np.full((slots, 3, 3), fill, np.float32), np.full((slots, 1, 1, 1), fill, np.float32)
        entries = tuple(np.full((slots, 3, *pool.shape[1:]), -7, np.float32) for pool in pools)
        snapshots = tuple(np.full((1, *pool.shape[1:]), -7, np.float32) for pool in pools)
        self.memory = SimpleNamespace(pools=pools, entries=entries, snapshots=snapshots, kept={}, saved={})

    def edit(self, op: str, **event: Any) -> None:
        """An engine edit: zero, rollback, save, load, commit, restore."""
        (self.operations or self.right)["engine.edit"](self.memory, {"op": op, **event})

    def decode(self, *rows: Piece, entries: bool = False) -> Any:
        """Outputs of a decode call, each row its slot and its digits; a slot of -1 is padding."""
        slots = [slot for slot, _ in rows]
        given = digit_rows([digits for _, digits in rows])
        count = given.shape[1]
        buffers = [buffer[:, :count] for buffer in self.memory.entries] if entries else []
        index = np.array(slots, np.int64)
        if self.operations is not None:
            return numbers(self.operations["ssm_decode"](DIGITS, given, *self.memory.pools, index, *buffers))
        tensors = [torch.from_numpy(array) for array in (given, *self.memory.pools, index, *buffers)]
        return numbers(to_array(self.mixer.ssm_decode(*tensors)))

    def prefill(self, *pieces: Piece, snapshot: int | None = None, padding: int = 0) -> Any:
        """Outputs of a prefill call, each piece its slot and its digits; a snapshot position in the pack if given."""
        lengths, slots = [len(digits) for _, digits in pieces], [slot for slot, _ in pieces]
        given = digit_rows([[d] for _, digits in pieces for d in digits] + [[np.nan]] * padding)
        offsets = np.cumsum([0, *lengths])
        rows = [] if snapshot is None else [int(np.searchsorted(offsets, snapshot)) - 1]
        arrays = prefill_metadata(lengths, slots, rows, [] if snapshot is None else [snapshot - int(offsets[rows[0]])],
                                  len(slots), len(given), 2, None, 1, 3)  # fmt: skip
        named = dict(zip(PREFILL_NAMES, arrays, strict=True))
        context = SimpleNamespace(
            mamba_metadata=SimpleNamespace(**named), mamba_slot_allocator=SimpleNamespace(
                intermediate_conv_out=self.memory.snapshots[0], intermediate_ssm_out=self.memory.snapshots[1]),
        )  # fmt: skip
        if self.operations is not None:
            return numbers(self.operations["ssm_prefill"](DIGITS, given, *self.memory.pools, context))
        context.mamba_slot_allocator = SimpleNamespace(
            intermediate_conv_out=torch.from_numpy(self.memory.snapshots[0]),
            intermediate_ssm_out=torch.from_numpy(self.memory.snapshots[1]),
        )
        tensors = [torch.from_numpy(array) for array in (given, *self.memory.pools)]
        return numbers(to_array(self.mixer.ssm_prefill(tensors[0], tensors[1], tensors[2], context)))

    def state(self, slot: int) -> float:
        """The running sum in a slot."""
        return float(self.memory.pools[1][slot].item())

    def window(self, slot: int) -> Any:
        """The digits in a slot's window."""
        return numbers(self.memory.pools[0][slot, 0])

    def entry(self, slot: int, j: int) -> float:
        """The running sum in entry j of a slot's intermediates."""
        return float(self.memory.entries[1][slot, j].item())

    def snapshot(self) -> tuple[Any, float]:
        """Window and running sum of the snapshot buffer."""
        return numbers(self.memory.snapshots[0][0, 0]), float(self.memory.snapshots[1].item())


def digit_rows(digits: Sequence[Sequence[float]]) -> Array:
    """Rows (digit, 1, 1, 1) of digits `[n, J]`; NaN all along where a digit is NaN."""
    table = np.array(digits, np.float32)
    ones = np.where(np.isnan(table), np.nan, 1).astype(np.float32)
    return np.stack([table, ones, ones, ones], axis=-1)


__all__ = ["DIGITS", "Desk", "Toy", "decode_metadata", "step", "toy_context"]
