"""Products of decays inside a chunk, in each way that cannot overflow: every exponent that is used is 0 or less.

For log-decays a_0 .. a_(L-1) of the rows of a chunk: `entry` e^(a_0 + .. + a_i), what the entering state keeps up to
row i; `between` e^(a_(j+1) + .. + a_i) for j <= i, what row j's write keeps up to row i, and 0 for j > i.
"""

from __future__ import annotations

import torch

from statescan.conformance.variations.arithmetic import Arithmetic, to_class

Tensor = torch.Tensor

SCANS = ("row by row", "doubling", "two levels", "products")
BLOCK = 8


def decays(arithmetic: Arithmetic, scan: str, a: Tensor) -> tuple[Tensor, Tensor]:
    """`entry [H, L, ...]` and `between [H, L, L, ...]` of log-decays `[H, L, ...]`."""
    if scan == "products":
        return _by_products(arithmetic.exp(a))
    sums, size = running(a, scan), a.shape[1]
    if scan == "quotients":  # not lawful: the second factor overflows
        entry = arithmetic.exp(sums)
        return entry, torch.tril(torch.ones(size, size)).reshape(1, size, size, 1) * entry[:, :, None] * arithmetic.exp(
            -sums
        )[:, None]
    below = torch.ones(size, size, dtype=torch.bool).tril().reshape(1, size, size, *[1] * (a.ndim - 2))
    gaps = torch.where(below, sums[:, :, None] - sums[:, None], -torch.inf)
    return arithmetic.exp(sums), arithmetic.exp(gaps)


def running(a: Tensor, scan: str) -> Tensor:
    """Cumulative sums along axis 1, in float32."""
    if scan == "doubling":
        return _doubled(a)
    if scan == "two levels":
        parts, carried = [], torch.zeros_like(a[:, :1])
        for block in torch.split(a, BLOCK, 1):
            parts.append(carried + _doubled(block))
            carried = parts[-1][:, -1:]
        return torch.cat(parts, 1)
    total, rows = torch.zeros_like(a[:, 0]), []
    for row in a.unbind(1):
        total = to_class(total + row, "bf16") if scan == "bfloat16" else total + row
        rows.append(total)
    return torch.stack(rows, 1)


def _doubled(a: Tensor) -> Tensor:
    """Each row adds what lies 1, 2, 4 ... rows before it."""
    step = 1
    while step < a.shape[1]:
        a = torch.cat([a[:, :step], a[:, step:] + a[:, :-step]], 1)
        step *= 2
    return a


def _by_products(factors: Tensor) -> tuple[Tensor, Tensor]:
    """No sum of log-decays at all: each row multiplies those before it by its own factor."""
    size = factors.shape[1]
    row = torch.zeros_like(factors)  # [H, L (j), ...]
    entry, rows, one = [], [], torch.ones_like(factors[:, :1])
    kept = one[:, 0]
    for i in range(size):
        kept = kept * factors[:, i]
        entry.append(kept)
        row = torch.cat([(row * factors[:, i : i + 1])[:, :i], one, torch.zeros_like(factors[:, i + 1 :])], 1)
        rows.append(row)
    return torch.stack(entry, 1), torch.stack(rows, 1)
