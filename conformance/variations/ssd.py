"""Mamba2 as right kernels write it: token by token, in chunks, one quadratic form, or states that are passed later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from statescan.conformance.variations import rows
from statescan.conformance.variations.arithmetic import Arithmetic
from statescan.conformance.variations.decays import decays
from statescan.conformance.variations.rows import Given, Scan, States

Tensor = torch.Tensor
Stream = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""x `[H, T, P]`, step sizes `[H, T, 1]`, log-decays `[H, T, 1]`, B and C `[H, T, R]` of one segment."""

FORMS = ("tokens", "chunks", "quadratic", "passed")
STEPS = ("on x", "on B", "on the score")
SKIPS = ("after", "before")
STATES = ("PR", "RP")


@dataclass(frozen=True)
class Ssd:
    """How one kernel does it; `chunk` says nothing token by token and in the quadratic form."""

    arithmetic: Arithmetic = Arithmetic()  # noqa: RUF009  frozen
    form: str = "tokens"
    chunk: int = 0
    scan: str = "row by row"
    step: str = "on x"
    skip: str = "after"
    state: str = "PR"
    order: str = rows.ORDERS[0]

    def operations(self) -> dict[str, Any]:
        """The three operations."""
        return {"ssd": self._packed, "ssd_prefill": self._prefill, "ssd_update": self._update}

    def _packed(self, **given: Any) -> Any:
        inner = (*given["x"].shape[2:], given["B"].shape[3])
        return rows.packed(self._scan(given), given, "x", "x", inner, self.order)

    def _prefill(self, **given: Any) -> Any:
        return rows.prefill(self._scan(given), given, "x", "x", self.order)

    def _update(self, **given: Any) -> Any:
        return rows.update(self._scan(given), given, "x", "x", self.order)

    # -----------------------------------------------------------------------------------------------------------------
    # One segment
    # -----------------------------------------------------------------------------------------------------------------

    def _scan(self, given: Given) -> Scan:
        def scan(row: int, tokens: slice, entering: Tensor, marks: Collection[int]) -> tuple[Tensor, States]:
            if tokens.start == tokens.stop:
                return given["x"].new_zeros(0, *given["x"].shape[2:], dtype=torch.float32), {0: entering}
            stream = self._stream(given, row, tokens)
            skipped = self._skipped(given, stream[0])
            state = entering if self.state == "PR" else entering.transpose(1, 2).contiguous()
            run = {"tokens": self._tokens, "passed": self._passed}.get(self.form, self._chunks)
            y, states = run(stream, state, marks)
            y = (skipped + y if self.skip == "before" else y + skipped).transpose(0, 1)
            if given.get("z") is not None:
                y = y * self.arithmetic.silu(given["z"][row, tokens].float())
            return y, {mark: s if self.state == "PR" else s.transpose(1, 2) for mark, s in states.items()}

        return scan

    def _stream(self, given: Given, row: int, tokens: slice) -> Stream:
        x, dt, A = given["x"][row, tokens].float(), given["dt"][row, tokens].float(), given["A"].float()
        B, C = given["B"][row, tokens].float(), given["C"][row, tokens].float()
        if given.get("dt_bias") is not None:
            dt = dt + given["dt_bias"].float()
        if given.get("dt_softplus", True):
            dt = self.arithmetic.soft(dt)
        step = dt.clamp(*given.get("dt_limit", (0.0, float("inf"))))
        repeats = x.shape[1] // B.shape[1]
        B, C = B.repeat_interleave(repeats, 1), C.repeat_interleave(repeats, 1)
        x, dt, a, B, C = (part.transpose(0, 1).contiguous()
                          for part in (x, step[..., None], (step * A)[..., None], B, C))  # fmt: skip
        return x, dt, a, B, C

    def _skipped(self, given: Given, x: Tensor) -> Tensor:
        """D x, `[H, T, P]`."""
        D = given.get("D")
        return torch.zeros_like(x) if D is None else D.float().reshape(len(x), 1, -1) * x

    def _write(self, x: Tensor, step: Tensor, B: Tensor) -> Tensor:
        """dt x B^T summed over rows, into a state."""
        x, B = (x * step, B) if self.step != "on B" else (x, B * step)
        return self.arithmetic.dot("htp,htr->hpr" if self.state == "PR" else "htp,htr->hrp", x, B)

    def _seen(self, C: Tensor, state: Tensor) -> Tensor:
        """Rows of C times the state: `[H, T, P]`."""
        return self.arithmetic.dot("htr,hpr->htp" if self.state == "PR" else "htr,hrp->htp", C, state)

    def _tokens(self, stream: Stream, state: Tensor, marks: Collection[int]) -> tuple[Tensor, States]:
        x, step, a, B, C = stream
        factors, outputs, states = self.arithmetic.exp(a), [], {0: state}
        for t in range(x.shape[1]):
            at = slice(t, t + 1)
            state = factors[:, at] * state + self._write(x[:, at], step[:, at], B[:, at])
            outputs.append(self._seen(C[:, at], state))
            if t + 1 in marks:
                states[t + 1] = state
        return torch.cat(outputs, 1), states

    def _chunks(self, stream: Stream, state: Tensor, marks: Collection[int]) -> tuple[Tensor, States]:
        """Chunk after chunk; the quadratic form is one chunk."""
        size = stream[0].shape[1]
        length = size if self.form == "quadratic" else self.chunk
        outputs, states = [], {0: state}
        for start in range(0, size, length):
            x, step, a, B, C = (piece[:, start : start + length] for piece in stream)
            entry, between = decays(self.arithmetic, self.scan, a)
            outputs.append(self._inside(x, step, between, B, C) + entry * self._seen(C, state))
            before = state
            for mark in sorted({*(m - start for m in marks if start < m <= start + length), x.shape[1]}):
                kept = between[:, mark - 1, :mark] * B[:, :mark]
                state = entry[:, mark - 1, :, None] * before + self._write(x[:, :mark], step[:, :mark], kept)
                states[start + mark] = state
        return torch.cat(outputs, 1), states

    def _inside(self, x: Tensor, step: Tensor, between: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """What rows of a chunk read from each other."""
        if self.step == "on B":
            B = B * step
        scores = self.arithmetic.dot("htr,hsr->hts", C, B) * between[..., 0]
        if self.step == "on the score":
            scores = scores * step[:, None, :, 0]
        return self.arithmetic.dot("hts,hsp->htp", scores, x * step if self.step == "on x" else x)

    def _passed(self, stream: Stream, state: Tensor, marks: Collection[int]) -> tuple[Tensor, States]:
        """What each chunk adds by itself, then the states between chunks by one small matrix of decays."""
        size = stream[0].shape[1]
        cuts = sorted({*range(0, size, self.chunk), *(m for m in marks if m < size), size, 0})
        parts = [tuple(piece[:, a:b] for piece in stream) for a, b in pairwise(cuts)]
        made = [decays(self.arithmetic, self.scan, part[2]) for part in parts]
        added = [state] + [self._write(x, step, between[:, -1] * B)
                           for (x, step, _, B, _), (_, between) in zip(parts, made, strict=True)]  # fmt: skip
        totals = torch.stack([torch.zeros_like(stream[2][:, 0])] + [self._total(part[2]) for part in parts], 1)
        _, across = decays(self.arithmetic, self.scan, totals)  # [H, chunks + 1, chunks + 1, 1]
        stacked = torch.stack(added, 1)  # [H, chunks + 1, ...]
        after = self.arithmetic.sum(across[..., None] * stacked[:, None], 2)
        outputs = [
            self._inside(x, step, between, B, C) + entry * self._seen(C, after[:, n])
            for n, ((x, step, _, B, C), (entry, between)) in enumerate(zip(parts, made, strict=True))
        ]
        return torch.cat(outputs, 1), {cut: after[:, n] for n, cut in enumerate(cuts)}

    def _total(self, a: Tensor) -> Tensor:
        """The log-decay of a whole chunk, `[H, 1]`."""
        return self.arithmetic.sum(a, 1)
