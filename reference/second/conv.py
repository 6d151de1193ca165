"""The convolution by its closed formula: output t is a weighted total over positions t-W+1 .. t (CONV).

Position p of a segment is token p; before its first token stand the entering window's columns, newest at -1. The
formula knows no moving window: the final one is the last W positions. Plain Python numbers, newest tap first.
"""

from __future__ import annotations

from decimal import Decimal

import numpy as np

from statescan.reference.arrays import Array, Float64, dtype_name, round_to, widen
from statescan.reference.second import gates, packed, pools


def tap(x: Float64, window: Float64, position: int, channel: int) -> float:
    """What stands at a position: a token `[n, C]`, or a column of the entering window `[C, W]`."""
    column = window.shape[1] + position
    return float(x[position, channel] if position >= 0 else window[channel, column])


def run_formula(
    x: Float64, window: Float64, weight: Float64, bias: Float64 | None, activation: str | None
) -> tuple[Float64, Float64]:
    """Outputs `[n, C]` and final window `[C, W]` of one segment x `[n, C]`.

    >>> y, last = run_formula(np.array([[1.0], [2]]), np.array([[5.0, 6, 7]]), np.array([[1.0, 10, 100]]), None, None)
    >>> y.tolist(), last.tolist()
    ([[176.0], [217.0]], [[7.0, 1.0, 2.0]])
    """
    channels, width = weight.shape
    y, last = np.zeros(x.shape), np.zeros(weight.shape)
    for c in range(channels):
        for t in range(len(x)):
            total = 0.0 if bias is None else float(bias[c])
            for back in range(width):
                total += float(weight[c, width - 1 - back]) * tap(x, window, t - back, c)
            plain = activation is None or total != total
            y[t, c] = total if plain else float(gates.silu(Decimal(total)))
        last[c] = [tap(x, window, len(x) - width + column, c) for column in range(width)]
    return y, last


def runner(x: Array, weight: Array, bias: Array | None, activation: str | None) -> pools.Run:
    """Outputs and final window of a list of tokens of one batch row."""

    def run(row: int, tokens: list[int], entering: Float64) -> tuple[Float64, Float64]:
        inner = None if bias is None else widen(bias)
        return run_formula(widen(x[row])[tokens], entering, widen(weight), inner, activation)

    return run


def causal_conv1d(
    x: Array, weight: Array, bias: Array | None = None, seq_idx: Array | None = None, cu_seqlens: Array | None = None,
    initial_windows: Array | None = None, *, activation: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The packed operation."""
    segments = packed.segments(x.shape, seq_idx, cu_seqlens, initial_windows)
    run, y, final = runner(x, weight, bias, activation), np.zeros(x.shape), np.zeros((len(segments), *weight.shape))
    for n, (row, tokens) in enumerate(segments):
        entering = np.zeros(weight.shape) if initial_windows is None else widen(initial_windows)[n]
        y[row, tokens], final[n] = run(row, tokens, entering)
    return round_to(y, dtype_name(x)), round_to(final, dtype_name(x))


def causal_conv1d_prefill(
    x: Array, weight: Array, bias: Array | None, cu_seqlens: Array, conv_pool: Array, read_slots: Array,
    write_slots: Array | None = None, snapshot_positions: Array | None = None, snapshot_windows: Array | None = None,
    *, activation: str | None = None,
) -> Array:  # fmt: skip
    """The packed operation on a slot pool."""
    run, y = runner(x, weight, bias, activation), np.zeros(x.shape)
    pools.fill_prefill(
        run, y, cu_seqlens, conv_pool, read_slots, write_slots, snapshot_positions, snapshot_windows
    )  # fmt: skip
    return round_to(y, dtype_name(x))


def causal_conv1d_update(
    x: Array, weight: Array, bias: Array | None, conv_pool: Array, read_slots: Array, write_slots: Array | None = None,
    intermediate_windows: Array | None = None, num_accepted: Array | None = None, num_tokens: Array | None = None,
    *, activation: str | None = None,
) -> Array:  # fmt: skip
    """J tokens a row on a slot pool."""
    run, y = runner(x, weight, bias, activation), np.zeros(x.shape)
    pools.fill_update(
        run, y, conv_pool, read_slots, write_slots, intermediate_windows, num_accepted, num_tokens
    )  # fmt: skip
    return round_to(y, dtype_name(x))
