"""The delta family as right kernels write it: token by token, or in chunks, each step in several equal ways.

In a chunk, with A_ij = beta_i (k_i . D_ij k_j) below the diagonal, the writes solve (1 + A) u = beta (v - (E k) S).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from statescan.conformance.variations import rows
from statescan.conformance.variations.arithmetic import Arithmetic
from statescan.conformance.variations.decays import decays
from statescan.conformance.variations.rows import Given, Scan, States

Tensor = torch.Tensor
Stream = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, log-decay, beta of the rows of one segment, heads first: `[HV, R, K]`, ..., `[HV, R, 1 or K]`, `[HV, R]`."""

SOLVES = ("forward", "columns", "inverse", "halves", "doubling", "solver")
BETAS = ("on the row", "on the key", "on the column")
SCALES = ("query", "output")
PAIRS = ("matrix", "anchored")
STATES = ("KV", "VK")
WRITES = ("correction", "erase")
READS = ("after", "split")
FADES = ("state", "result")
FINALS = ("scan", "tokens")

ANCHOR = 16
DOUBLED = 8
NAMES = ("gated_delta_rule", "gated_delta_product", "kimi_delta_attention")


@dataclass(frozen=True)
class Delta:
    """How one kernel does it; `chunk` 0 is token by token, where the axes of chunks say nothing, and the other way."""

    arithmetic: Arithmetic = Arithmetic()  # noqa: RUF009  frozen
    chunk: int = 0
    scan: str = "row by row"
    solve: str = "forward"
    beta: str = "on the row"
    scale: str = "query"
    pairs: str = "matrix"
    state: str = "KV"
    final: str = "scan"
    write: str = "correction"
    read: str = "after"
    fade: str = "state"
    order: str = rows.ORDERS[0]

    def operations(self) -> dict[str, Any]:
        """The nine operations of the family, and the commit of drafts."""
        found: dict[str, Any] = {"commit_accepted": commit_accepted}
        for name in NAMES:
            found |= {name: partial(self._packed), f"{name}_prefill": partial(self._prefill),
                      f"{name}_update": partial(self._update)}  # fmt: skip
        return found

    def _packed(self, **given: Any) -> Any:
        inner = (given["v"].shape[2], given["k"].shape[3], given["v"].shape[3])
        return rows.packed(self._scan(given), given, "q", "v", inner, self.order)

    def _prefill(self, **given: Any) -> Any:
        return rows.prefill(self._scan(given), given, "q", "v", self.order)

    def _update(self, **given: Any) -> Any:
        return rows.update(self._scan(given), given, "q", "v", self.order)

    # -----------------------------------------------------------------------------------------------------------------
    # One segment
    # -----------------------------------------------------------------------------------------------------------------

    def _scan(self, given: Given) -> Scan:
        copies, scale = given.get("num_householder", 1), given.get("scale")
        scale = given["q"].shape[3] ** -0.5 if scale is None else scale

        def scan(row: int, tokens: slice, entering: Tensor, marks: Collection[int]) -> tuple[Tensor, States]:
            if tokens.start == tokens.stop:
                return given["v"].new_zeros(0, *given["v"].shape[2:], dtype=torch.float32), {0: entering}
            stream = self._stream(given, row, tokens, copies, scale)
            ends = {mark * copies: mark for mark in (0, *marks)}
            state = entering if self.state == "KV" else entering.transpose(1, 2).contiguous()
            run = self._chunks if self.chunk else self._tokens
            outputs, states = run(stream, state, ends, copies)
            outputs = outputs[:, copies - 1 :: copies].transpose(0, 1)
            if self.chunk and self.final == "tokens":
                alone = replace(self, chunk=0, write="correction", read="after", fade="state")
                states = alone._tokens(stream, state, ends, copies)[1]
            kept = {ends[end]: s if self.state == "KV" else s.transpose(1, 2) for end, s in states.items()}
            return outputs * scale if self.scale == "output" else outputs, kept

        return scan

    def _stream(self, given: Given, row: int, tokens: slice, copies: int, scale: float) -> Stream:
        """The rows of the stream: a token's gate is on its first copy, its query on its last."""
        wide = slice(tokens.start * copies, tokens.stop * copies)
        q, k = given["q"][row, tokens].float(), given["k"][row, wide].float()
        v, g, beta = given["v"][row, wide].float(), given["g"][row, tokens].float(), given["beta"][row, wide].float()
        if given.get("use_qk_l2norm"):
            q, k = unit(self.arithmetic, q, 1e-6), unit(self.arithmetic, k, 1e-6)
        repeats = v.shape[1] // q.shape[1]
        q = q.repeat_interleave(repeats, 1) * (scale if self.scale == "query" else 1.0)
        g = g if g.ndim == 3 else g[:, :, None]
        q, g = spread(q, copies, copies - 1), spread(g, copies, 0)
        k, v = k.repeat_interleave(repeats, 1).transpose(0, 1), v.transpose(0, 1)
        return q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.transpose(0, 1).contiguous()

    def _seen(self, of: Tensor, state: Tensor) -> Tensor:
        """Rows `[H, R, K]` times the state: `[H, R, V]`."""
        return self.arithmetic.dot("hrk,hkv->hrv" if self.state == "KV" else "hrk,hvk->hrv", of, state)

    def _outer(self, k: Tensor, u: Tensor) -> Tensor:
        """Keys `[H, R, K]` and writes `[H, R, V]` summed over rows into a state."""
        return self.arithmetic.dot("hrk,hrv->hkv" if self.state == "KV" else "hrk,hrv->hvk", k, u)

    def _faded(self, factor: Tensor, state: Tensor) -> Tensor:
        """The state by a factor `[H, 1 or K]`."""
        return (factor[:, :, None] if self.state == "KV" else factor[:, None, :]) * state

    # -----------------------------------------------------------------------------------------------------------------
    # Token by token
    # -----------------------------------------------------------------------------------------------------------------

    def _tokens(
        self, stream: Stream, state: Tensor, ends: Collection[int], copies: int
    ) -> tuple[Tensor, States]:
        q, k, v, g, beta = stream
        factors, outputs, states = self.arithmetic.exp(g), [], {0: state}
        for i in range(q.shape[1]):
            at = slice(i, i + 1)
            state, o = self._token(q[:, at], k[:, at], v[:, at], factors[:, i], beta[:, at, None], state)
            outputs.append(o)
            if i + 1 in ends:
                states[i + 1] = state
        return torch.cat(outputs, 1), states

    def _token(
        self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One row: the state after it, and the output `[H, 1, V]`."""
        before, faded = state, self._faded(factor, state)
        late = self.fade == "result" and factor.shape[1] == 1  # a factor for all keys may come after the sum
        known = factor[:, None] * self._seen(k, before) if late else self._seen(k, faded)
        if self.write == "erase":
            state = faded - self._outer(k, beta * known) + self._outer(k, beta * v)
            u = beta * v - beta * known
        else:
            u = beta * (v - known)
            state = faded + self._outer(k, u)
        if self.read == "split":  # from the state before the write, and the write by itself
            match = self.arithmetic.dot("hrk,hsk->hrs", q, k)
            return state, self._seen(q, faded) + match * u
        return state, self._seen(q, state)

    # -----------------------------------------------------------------------------------------------------------------
    # Chunks
    # -----------------------------------------------------------------------------------------------------------------

    def _chunks(
        self, stream: Stream, state: Tensor, ends: Collection[int], copies: int
    ) -> tuple[Tensor, States]:
        outputs, states = [], {0: state}
        for start in range(0, stream[0].shape[1], self.chunk):
            part = tuple(piece[:, start : start + self.chunk] for piece in stream)
            size = part[0].shape[1]
            marks = [end - start for end in ends if start < end <= start + size]
            o, after, state = self._chunk(part, state, marks)
            outputs.append(o)
            states |= {start + mark: s for mark, s in after.items()}
        return torch.cat(outputs, 1), states

    def _chunk(self, part: tuple[Tensor, ...], state: Tensor, marks: list[int]) -> tuple[Tensor, States, Tensor]:
        q, k, v, g, beta = part
        entry, between = decays(self.arithmetic, self.scan, g)
        size, each = k.shape[1], beta[..., None]
        strictly = torch.ones(size, size, dtype=torch.bool).tril(-1)
        on_key = self.beta == "on the key"
        scores = torch.where(strictly, self._pairs(k * each if on_key else k, k, g, between), 0.0)
        known = self._seen(entry * (k * each if on_key else k), state)
        if self.beta == "on the column":  # the correction is solved for, and beta comes after
            u = each * self._solved(scores * beta[:, None, :], v - known)
        elif on_key:
            u = self._solved(scores, each * v - known)
        else:
            u = self._solved(each * scores, each * (v - known))
        upto = torch.ones(size, size, dtype=torch.bool).tril()
        reads = torch.where(upto, self._pairs(q, k, g, between), 0.0)
        o = self._seen(entry * q, state) + self.arithmetic.dot("hij,hjv->hiv", reads, u)

        def after(mark: int) -> Tensor:
            kept = self._faded(entry[:, mark - 1], state)
            return kept + self._outer(between[:, mark - 1, :mark] * k[:, :mark], u[:, :mark])

        return o, {mark: after(mark) for mark in marks}, after(size)

    def _pairs(self, a: Tensor, b: Tensor, g: Tensor, between: Tensor) -> Tensor:
        """a_i . D_ij b_j for j <= i, `[H, L, L]`; anything above the diagonal."""
        if self.pairs == "anchored":
            return self._anchored(a, b, g, between)
        if g.shape[2] == 1:
            return self.arithmetic.dot("hik,hjk->hij", a, b) * between[..., 0]
        return self.arithmetic.dot("hik,hijk->hij", a, between * b[:, None])

    def _anchored(self, a: Tensor, b: Tensor, g: Tensor, between: Tensor) -> Tensor:
        """Blocks of 16 rows, each decay in two factors that meet at the block's first row."""
        size, found = a.shape[1], []
        for start in range(0, size, ANCHOR):
            block = slice(start, min(start + ANCHOR, size))
            left = self.arithmetic.dot("hik,hjk->hij", a[:, block] * between[:, block, start],
                                       b[:, :start] * between[:, start, :start])  # fmt: skip
            near = replace(self, pairs="matrix")._pairs(a[:, block], b[:, block], g, between[:, block, block])
            right = near.new_zeros(*near.shape[:2], size - block.stop)
            found.append(torch.cat([left, near, right], 2))
        return torch.cat(found, 1)

    def _solved(self, system: Tensor, right: Tensor) -> Tensor:
        """u of (1 + system) u = right, system strictly lower triangular."""
        if self.solve == "solver":
            one = torch.eye(system.shape[1]).expand_as(system)
            found: Tensor = torch.linalg.solve_triangular(system + one, right, upper=False, unitriangular=True)
            return found
        if self.solve == "columns":
            for j in range(system.shape[1] - 1):
                right = right - system[:, :, j : j + 1] * right[:, j : j + 1]
            return right
        if self.solve == "forward":
            return self._forward(system, right)
        inverse = self._inverse(system)
        return self.arithmetic.dot("hij,hjv->hiv", inverse, right)

    def _forward(self, system: Tensor, right: Tensor) -> Tensor:
        """Row by row."""
        found = [right[:, 0]]
        for i in range(1, system.shape[1]):
            terms = system[:, i, :i, None] * torch.stack(found, 1)
            found.append(right[:, i] - self.arithmetic.sum(terms, 1))
        return torch.stack(found, 1)

    def _inverse(self, system: Tensor) -> Tensor:
        """The inverse of 1 + system."""
        size = system.shape[1]
        if self.solve == "inverse":
            return self._forward(system, torch.eye(size).expand_as(system))
        if size <= DOUBLED:
            return _series(system) if self.solve == "doubling" else self._forward(
                system, torch.eye(size).expand_as(system)
            )
        half = size // 2  # the inverse of [a 0; c b] is [a' 0; -b' c a' b']
        first, last = self._inverse(system[:, :half, :half]), self._inverse(system[:, half:, half:])
        corner = -(last @ (system[:, half:, :half] @ first))
        above = first.new_zeros(len(first), half, size - half)
        return torch.cat([torch.cat([first, above], 2), torch.cat([corner, last], 2)], 1)


def _series(system: Tensor) -> Tensor:
    """(1 - a)(1 + a^2)(1 + a^4) ..., which ends because a is strictly lower: for few rows, or its powers grow."""
    one, power = torch.eye(system.shape[1]), -system
    found, reach = one + power, 2
    while reach < system.shape[1]:
        power = power @ power
        found, reach = found @ (one + power), reach * 2
    return found


def spread(x: Tensor, copies: int, place: int) -> Tensor:
    """Tokens `[T, H, ...]` as rows `[H, T * copies, ...]`, zeros on all but one copy."""
    empty = torch.zeros_like(x)
    return torch.stack([x if m == place else empty for m in range(copies)], 1).flatten(0, 1).transpose(0, 1)


def unit(arithmetic: Arithmetic, x: Tensor, eps: float) -> Tensor:
    """Rows over the root of their squared length and eps."""
    return arithmetic.over_root(x, (arithmetic.sum(x * x, -1) + eps)[..., None])


def commit_accepted(*, pools: list[Tensor], intermediates: list[Tensor], slots: Tensor, num_accepted: Tensor,
                    **_: Any) -> None:  # fmt: skip
    """Entry `num_accepted` of each slot's intermediates becomes the slot, in every pool."""
    for slot, entry in zip(slots.tolist(), num_accepted.tolist(), strict=True):
        if slot >= 0 and entry >= 0:
            for pool, buffer in zip(pools, intermediates, strict=True):
                pool[slot] = buffer[slot, entry]
