"""Checks of the fast path: facts of torch tensors for the one text of rules, and what only torch tensors can break.

Shape rules hold on every device and always; a call whose shapes, types and words have passed once is not looked at
again, so that a decode step pays for a look into a set. Value rules are checked on CPU tensors always and on CUDA
tensors with check=True, after one copy to the host; with check=None or False a CUDA call never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from statescan.reference.host.rules import LEAST_GATE, Facts, check_gate
from statescan.reference.host.rules import check_call as check_rules
from statescan.spec.contract import OPERATIONS, DtypeError, UnsupportedError

NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
SERVED = (torch.float32, torch.bfloat16, torch.float16)
MOST_REMEMBERED = 1 << 14

Tensors = Mapping[str, Tensor | None]
Values = dict[str, list[int]]

_passed: set[Any] = set()


def check_call(
    name: str, tensors: Tensors, settings: Mapping[str, Any], check: bool | None = None
) -> Values | None:
    """Every rule of operation `name`; the integers of its index tensors where they were looked at, else None.

    `tensors` lists every tensor argument of the call in a fixed order, `settings` hashable values. Raises the classes
    of the contract before anything is written, and UnsupportedError for what the fast path cannot run.
    """
    known = (key := _key(name, tensors, settings)) in _passed
    if known and not check and _first(tensors).is_cuda:
        return None
    if not known:
        _check_devices(tensors)
    wanted = check or not _first(tensors).is_cuda
    values = _index_values(name, tensors) if wanted else None
    facts = {k: None if t is None else _facts(t, None if values is None else values.get(k)) for k, t in tensors.items()}
    check_rules(name, facts, settings)
    if not known:
        _check_served(tensors)
        if len(_passed) < MOST_REMEMBERED:
            _passed.add(key)
    return values


def check_decay(g: Tensor, live: Sequence[tuple[int, slice]]) -> None:
    """Every log-decay of the live tokens lies in -1024..0; padding rows may hold anything (NUM-3, PACK-8).

    `live` names the tokens by their row on axis 0 of `g` and their slice on axis 1. Looks at the values: call it only
    where `check_call` did (it returned some).
    """
    outside = ~((g >= LEAST_GATE) & (g <= 0))
    if not bool(outside.any()):
        return
    for row, tokens in live:
        for place in outside[row, tokens].nonzero().tolist():
            at = (row, tokens.start + place[0], *place[1:])
            check_gate(at, float(g[at]))


def live_rows(values: Values) -> list[int]:
    """The rows that are not padding: at least one of their slots is not negative (SLOT-2, PAD-1)."""
    read = values["read_slots"]
    write = values.get("write_slots", read)
    return [n for n, slots in enumerate(zip(read, write, strict=True)) if max(slots) >= 0]


def live_tokens(values: Values, rows: int, tokens: int) -> list[tuple[int, slice]]:
    """The real tokens of an update's live rows: at most `num_tokens` of `tokens` each (SPEC-6)."""
    counts = values.get("num_tokens", [tokens] * rows)
    return [(n, slice(0, counts[n])) for n in live_rows(values)]


def live_pack(values: Values) -> list[tuple[int, slice]]:
    """The tokens of a pack's live rows."""
    offsets = values["cu_seqlens"]
    return [(0, slice(offsets[n], offsets[n + 1])) for n in live_rows(values)]


def as_index(t: Tensor | None) -> Tensor | None:
    """An index tensor as kernels read it: one element after another."""
    return t if t is None or t.is_contiguous() else t.contiguous()


def check_runnable(tensor: Tensor, name: str = "x") -> None:
    """A kernel runs on this tensor: it is on a GPU, or Triton interprets."""
    from statescan.fast.kernels.common import INTERPRETED

    if not tensor.is_cuda and not INTERPRETED:
        raise UnsupportedError(
            f"{name} is a tensor on {tensor.device}: the fast path runs on CUDA tensors, and on CPU tensors only for "
            "tests, with TRITON_INTERPRET=1 set before triton is imported (ERR-5)"
        )


def _key(name: str, tensors: Tensors, settings: Mapping[str, Any]) -> Any:
    shapes = [None if t is None else (t.dtype, t.get_device(), t.shape) for t in tensors.values()]
    return name, *settings.values(), *shapes


def _first(tensors: Tensors) -> Tensor:
    return next(t for t in tensors.values() if t is not None)


def _check_devices(tensors: Tensors) -> None:
    """All tensors of a call are on one device, and something runs there."""
    (name, first), *rest = [(k, t) for k, t in tensors.items() if t is not None]
    for other, t in rest:
        if t.device != first.device:
            raise UnsupportedError(f"{other} is on {t.device} and {name} on {first.device}: one device (ERR-5)")
    check_runnable(first, name)


def _check_served(tensors: Tensors) -> None:
    for name, t in tensors.items():
        if t is not None and t.is_floating_point() and t.dtype not in SERVED:
            raise DtypeError(f"{name} has type {NAMES.get(t.dtype, str(t.dtype))}: f32, bf16 or f16 is served (ERR-1)")


def _index_values(name: str, tensors: Tensors) -> Values:
    """The integers of all index tensors, in one copy to the host."""
    indices = {a.name: t for a in OPERATIONS[name].tensors if a.kind == "index"
               and (t := tensors.get(a.name)) is not None and t.dtype in (torch.int32, torch.int64)}  # fmt: skip
    if not indices:
        return {}
    flat = torch.cat([t.reshape(-1).to(torch.int64) for t in indices.values()]).tolist()
    values, at = {}, 0
    for key, t in indices.items():
        values[key] = flat[at : at + t.numel()]
        at += t.numel()
    return values


def _facts(t: Tensor, values: list[int] | None) -> Facts:
    return Facts(tuple(t.shape), NAMES.get(t.dtype, str(t.dtype).removeprefix("torch.")), values)
