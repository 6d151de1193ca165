"""The short convolution as right kernels write it: shifted sums, unfolded windows, a library's convolution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from statescan.conformance.variations import rows
from statescan.conformance.variations.arithmetic import Arithmetic, to_class
from statescan.conformance.variations.rows import Given

Tensor = torch.Tensor

TAPS = ("newest first", "oldest first", "strides", "unfold", "library")
BIASES = ("last", "first")
NARROW = ("f32", "tf32", "f16", "bf16")


@dataclass(frozen=True)
class Conv:
    """How one kernel does it."""

    arithmetic: Arithmetic = Arithmetic()  # noqa: RUF009  frozen
    taps: str = "newest first"
    bias: str = "last"
    order: str = rows.ORDERS[0]

    def operations(self) -> dict[str, Any]:
        """The three operations."""
        return {"causal_conv1d": self._packed, "causal_conv1d_prefill": self._prefill,
                "causal_conv1d_update": self._update}  # fmt: skip

    def _packed(self, **given: Any) -> Any:
        x, entering = given["x"], given.get("initial_windows")
        width, segments = given["weight"].shape[1], rows.segments_of(given, "x")
        y = torch.zeros(x.shape)
        final: list[Any] = [None] * len(segments)
        for n in rows.ordered(segments, self.order):
            row, tokens = segments[n]
            window = x.new_zeros(x.shape[2], width) if entering is None else entering[n]
            y[row, tokens], seen = self._row(given, x[row, tokens], window)
            final[n] = seen[:, seen.shape[1] - width :]
        last = torch.stack(final) if final else x.new_zeros(0, x.shape[2], width)
        return y.to(x.dtype), last

    def _prefill(self, **given: Any) -> Any:
        x, pool = given["x"], given["conv_pool"]
        snapshots: Any = given.get("snapshot_windows")
        offsets, width = given["cu_seqlens"].tolist(), given["weight"].shape[1]
        positions = [] if snapshots is None else given["snapshot_positions"].tolist()
        segments = [(0, slice(a, b)) for a, b in pairwise(offsets)]
        y = torch.zeros(x.shape)
        stores: list[rows.Store] = []
        for n, read, write in rows.live(given, rows.ordered(segments, self.order)):
            tokens = segments[n][1]
            y[0, tokens], seen = self._row(given, x[0, tokens], self._enter(pool, read))
            stores += [(snapshots, (i,), seen[:, p - tokens.start : p - tokens.start + width])
                       for i, p in enumerate(positions) if tokens.start < p <= tokens.stop]  # fmt: skip
            stores += [(pool, (write,), seen[:, seen.shape[1] - width :])] if write >= 0 else []
        rows.store(stores)
        return y.to(x.dtype)

    def _update(self, **given: Any) -> Any:
        x, pool = given["x"], given["conv_pool"]
        entries: Any = given.get("intermediate_windows")
        (count, steps), width = x.shape[:2], given["weight"].shape[1]
        accepted = [-1] * count if given.get("num_accepted") is None else given["num_accepted"].tolist()
        lengths = [steps] * count if given.get("num_tokens") is None else given["num_tokens"].tolist()
        y = torch.zeros(x.shape)
        stores: list[rows.Store] = []
        for n, read, write in rows.live(given, rows.ordered([(n, slice(0, lengths[n])) for n in range(count)],
                                                            self.order)):  # fmt: skip
            resumed = accepted[n] >= 0 and read >= 0
            window = entries[read, accepted[n]].clone() if resumed else self._enter(pool, read)
            y[n, : lengths[n]], seen = self._row(given, x[n, : lengths[n]], window)
            if write >= 0:
                stores.append((pool, (write,), seen[:, seen.shape[1] - width :]))
                stores += [] if entries is None else [(entries, (write, j), seen[:, j + 1 : j + 1 + width])
                                                      for j in range(lengths[n])]  # fmt: skip
        rows.store(stores)
        return y.to(x.dtype)

    @staticmethod
    def _enter(pool: Tensor, slot: int) -> Tensor:
        return pool[slot].clone() if slot >= 0 else torch.zeros_like(pool[0])

    # -----------------------------------------------------------------------------------------------------------------
    # One segment
    # -----------------------------------------------------------------------------------------------------------------

    def _row(self, given: Given, x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[n, C]`, and window and tokens one behind the other, `[C, W + n]`, in the wider of their types."""
        kind = torch.promote_types(x.dtype, window.dtype)
        seen = torch.cat([window.to(kind), x.T.to(kind)], 1)
        bias = None if given.get("bias") is None else given["bias"].float()
        weight = to_class(given["weight"].float(), self.arithmetic.operand)
        taken = to_class(seen[:, 1:].float().contiguous(), self.arithmetic.operand)  # [C, W - 1 + n]
        y = self._sums(taken, weight, bias if self.bias == "first" else None)
        if bias is not None and self.bias == "last":
            y = y + bias[:, None]
        return (y if given.get("activation") is None else self.arithmetic.silu(y)).T, seen

    def _sums(self, taken: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tap j of token t times what lies at t + j, `[C, n]`; a bias is what the sum starts from."""
        width = weight.shape[1]
        count = taken.shape[1] - width + 1
        start = taken.new_zeros(len(taken), count) if bias is None else bias[:, None].expand(-1, count)
        if count == 0:
            return start
        if self.taps in ("newest first", "oldest first"):
            for j in _direction(range(width), self.taps):
                start = start + weight[:, j : j + 1] * taken[:, j : j + count]
            return start
        if self.taps == "library":
            return start + torch.nn.functional.conv1d(taken[None], weight[:, None], groups=len(weight))[0]
        if self.taps == "band":  # not lawful: a matrix with the taps along its diagonals reads later tokens times 0
            band = torch.stack([torch.nn.functional.pad(weight, (t, count - 1 - t)) for t in range(count)], 1)
            return start + torch.einsum("cts,cs->ct", band, taken)
        if self.taps == "unfold":
            return start + torch.einsum("ctw,cw->ct", taken.unfold(1, width, 1), weight)
        windows = taken.as_strided((len(taken), count, width), (taken.stride(0), 1, 1))
        return start + self.arithmetic.sum(windows * weight[:, None], 2)


def _direction(taps: range, order: str) -> Iterable[int]:
    return reversed(taps) if order == "newest first" else taps
