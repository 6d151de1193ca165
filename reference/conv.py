"""The short causal convolution of every mixer, token by token: packed, on a slot pool, and its gradients (CONV).

    window <- window shifted by one column, the new token last
    y      <- activation(bias + sum over j of weight[:, j] * window[:, j])

A window `[C, W]` holds raw inputs, newest in column W-1; column 0 leaves with the next token and only matters where a
piece is shorter than the window. Source: https://github.com/Dao-AILab/causal-conv1d
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from statescan.reference.arrays import Array, Float64, check_arguments, dtype_name, round_to, widen
from statescan.reference.functions import sigmoid, silu
from statescan.reference.packed import unpack_segments
from statescan.reference.pools import scan_prefill, scan_update
from statescan.reference.sites import Site, keep


def step_conv(
    window: Float64, x: Float64, weight: Float64, bias: Float64 | None, activation: str | None, at: Site = keep
) -> tuple[Float64, Float64]:
    """One token of one segment: x `[C]` into window `[C, W]`; returns (y `[C]`, window after it) (CONV-1, CONV-2).

    >>> y, window = step_conv(np.array([[5.0, 6, 7, 8]]), np.array([1.0]), np.array([[1.0, 10, 100, 1000]]), None, None)
    >>> y.tolist(), window.tolist()
    ([1876.0], [[6.0, 7.0, 8.0, 1.0]])
    """
    # SHIFT
    window = np.concatenate([window[:, 1:], x[:, None]], axis=1)  # [C, W]
    # SUM
    taps, weight = at("x", window), at("weight", weight)  # [C, W]
    total = np.zeros(x.shape) if bias is None else bias  # [C]
    for j in range(weight.shape[1]):
        total = total + weight[:, j] * taps[:, j]
    total = at("sum", total)
    # ACTIVATE
    return (total if activation is None else at("activation", silu(total))), window


def scan_conv(
    x: Float64, window: Float64, weight: Float64, bias: Float64 | None, activation: str | None, at: Site = keep
) -> tuple[Float64, list[Float64]]:
    """All tokens of one segment: x `[n, C]`; returns y `[n, C]` and the n + 1 windows, entering one first."""
    y, windows = np.zeros(x.shape), [window]
    for t in range(x.shape[0]):
        y[t], window = step_conv(window, x[t], weight, bias, activation, at)
        windows.append(window)
    return y, windows


def causal_conv1d(
    x: Array, weight: Array, bias: Array | None = None, seq_idx: Array | None = None, cu_seqlens: Array | None = None,
    initial_windows: Array | None = None, *, activation: str | None = None, check: bool | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Convolve a pack, resetting at every boundary (CONV-3): returns (y, final_windows).

    x `[1, T, C]` with one of `seq_idx [1, T]`, `cu_seqlens [N+1]`, or `[batch, T, C]` where each batch row is a
    segment. weight `[C, W]`, bias `[C]`, initial_windows `[N, C, W]` (CONV-4; zeros where absent). y has x's shape and
    type, final_windows `[N, C, W]` x's type (CONV-5). Rows past the last offset, or with id -1, give 0 (PACK-8).
    Raises PackingError, ShapeError, DtypeError, UnsupportedError.

    >>> x = np.array([[[1.0], [2], [3]]])
    >>> y, final = causal_conv1d(x, np.array([[10.0, 1]]), cu_seqlens=np.array([0, 2, 3]))
    >>> y.ravel().tolist(), final.tolist()
    ([1.0, 12.0, 3.0], [[[1.0, 2.0]], [[0.0, 3.0]]])
    """
    segments = check_conv(x, weight, bias, seq_idx, cu_seqlens, initial_windows, activation)
    w, b = widen(weight), None if bias is None else widen(bias)
    y = np.zeros(x.shape)
    final = np.zeros((len(segments), *w.shape))
    for n, (row, tokens) in enumerate(segments):
        entering = np.zeros(w.shape) if initial_windows is None else widen(initial_windows[n])
        y[row, tokens], windows = scan_conv(widen(x[row, tokens]), entering, w, b, activation)
        final[n] = windows[-1]
    return round_to(y, dtype_name(x)), round_to(final, dtype_name(x))


def check_conv(
    x: Array, weight: Array, bias: Array | None, seq_idx: Array | None, cu_seqlens: Array | None,
    initial_windows: Array | None, activation: str | None,
) -> list[tuple[int, slice]]:  # fmt: skip
    """Check a packed call; each segment as its batch row and its tokens, empty segments included (PACK-11)."""
    tensors = {"x": x, "weight": weight, "bias": bias, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens,
               "initial_windows": initial_windows}  # fmt: skip
    check_arguments("causal_conv1d", tensors, {"activation": activation})
    return unpack_segments(x.shape, seq_idx, cu_seqlens, initial_windows)


def causal_conv1d_prefill(
    x: Array, weight: Array, bias: Array | None, cu_seqlens: Array, conv_pool: Array, read_slots: Array,
    write_slots: Array | None = None, snapshot_positions: Array | None = None, snapshot_windows: Array | None = None,
    *, activation: str | None = None, check: bool | None = None,
) -> Array:  # fmt: skip
    """Convolve a pack whose rows resume from, and store to, slots of `conv_pool [slots, C, W]` (SLOT-2, SLOT-3).

    x `[1, T, C]`, cu_seqlens `[N+1]`, read_slots and write_slots `[N]`; snapshot_windows `[X, C, W]` receive the
    windows at snapshot_positions `[X]` (SNAP-3). Returns y `[1, T, C]`; raises as `causal_conv1d`, and SlotError.
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens, "conv_pool": conv_pool,
               "read_slots": read_slots, "write_slots": write_slots, "snapshot_positions": snapshot_positions,
               "snapshot_windows": snapshot_windows}  # fmt: skip
    check_arguments("causal_conv1d_prefill", tensors, {"activation": activation})
    w, b = widen(weight), None if bias is None else widen(bias)
    y = np.zeros(x.shape)

    def scan(n: int, tokens: slice, entering: Float64) -> tuple[Float64, list[Float64]]:
        return scan_conv(widen(x[0, tokens]), entering, w, b, activation)

    scan_prefill(scan, y, cu_seqlens, conv_pool, read_slots, write_slots, snapshot_positions, snapshot_windows)
    return round_to(y, dtype_name(x))


def causal_conv1d_update(
    x: Array, weight: Array, bias: Array | None, conv_pool: Array, read_slots: Array, write_slots: Array | None = None,
    intermediate_windows: Array | None = None, num_accepted: Array | None = None, num_tokens: Array | None = None,
    *, activation: str | None = None, check: bool | None = None,
) -> Array:  # fmt: skip
    """Convolve J tokens a row, window from and to its slot: equal to prefill token by token (CONV-6).

    x `[N, J, C]`; entry j of `intermediate_windows [slots, I, C, W]`, I >= J, becomes the window after token j
    (CONV-8); num_accepted `[N]` and num_tokens `[N]` as SPEC-3 and SPEC-6 say. Returns y `[N, J, C]`.

    >>> pool = np.array([[[5.0, 6, 7, 8]]])
    >>> weight, slots = np.array([[1.0, 10, 100, 1000]]), np.array([0])
    >>> causal_conv1d_update(np.array([[[1.0], [2], [3]]]), weight, np.array([0.5]), pool, slots).ravel().tolist()
    [1876.5, 2187.5, 3218.5]
    >>> pool.tolist()
    [[[8.0, 1.0, 2.0, 3.0]]]
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "conv_pool": conv_pool, "read_slots": read_slots,
               "write_slots": write_slots, "intermediate_windows": intermediate_windows, "num_accepted": num_accepted,
               "num_tokens": num_tokens}  # fmt: skip
    check_arguments("causal_conv1d_update", tensors, {"activation": activation})
    w, b = widen(weight), None if bias is None else widen(bias)
    y = np.zeros(x.shape)

    def scan(n: int, tokens: slice, entering: Float64) -> tuple[Float64, list[Float64]]:
        return scan_conv(widen(x[n, tokens]), entering, w, b, activation)

    scan_update(
        scan, y, conv_pool, read_slots, write_slots, intermediate_windows, num_accepted, num_tokens
    )
    return round_to(y, dtype_name(x))


def causal_conv1d_grad(
    cotangents: Mapping[str, Array], x: Array, weight: Array, bias: Array | None = None, seq_idx: Array | None = None,
    cu_seqlens: Array | None = None, initial_windows: Array | None = None, *, activation: str | None = None,
) -> dict[str, Float64]:  # fmt: skip
    """Gradients of `causal_conv1d` for every float input given, from cotangents of `y` and `final_windows` (CONV-10).

    A window is a list of references to tokens and to entering columns, so every derivative is a product of at most
    three numbers: cotangent, slope of the activation, tap or input. Rows outside every segment take no part (PACK-8).
    """
    segments = check_conv(x, weight, bias, seq_idx, cu_seqlens, initial_windows, activation)
    w = widen(weight)
    grads = {"x": np.zeros(x.shape), "weight": np.zeros(w.shape), "bias": np.zeros(w.shape[:1]),
             "initial_windows": np.zeros((len(segments), *w.shape))}  # fmt: skip
    grad_y = widen(cotangents["y"]) if "y" in cotangents else np.zeros(x.shape)
    for n, (row, tokens) in enumerate(segments):
        entering = np.zeros(w.shape) if initial_windows is None else widen(initial_windows[n])
        inputs = np.concatenate([entering, widen(x[row, tokens]).T], axis=1)  # [C, W + n]: all that a window can hold
        grad_inputs = np.zeros(inputs.shape)
        last = widen(cotangents["final_windows"][n]) if "final_windows" in cotangents else np.zeros(w.shape)
        grad_inputs[:, inputs.shape[1] - w.shape[1] :] += last
        for t in range(tokens.stop - tokens.start):
            window = inputs[:, t + 1 : t + 1 + w.shape[1]]  # [C, W], token t last
            total = _sum(window, w, None if bias is None else widen(bias))
            grad_sum = grad_y[row, tokens.start + t] * slope(total, activation)  # [C]
            grads["bias"] += grad_sum
            grads["weight"] += grad_sum[:, None] * window
            grad_inputs[:, t + 1 : t + 1 + w.shape[1]] += grad_sum[:, None] * w
        grads["initial_windows"][n] = grad_inputs[:, : w.shape[1]]
        grads["x"][row, tokens] = grad_inputs[:, w.shape[1] :].T
    absent = {"bias": bias, "initial_windows": initial_windows}
    return {name: grad for name, grad in grads.items() if name not in absent or absent[name] is not None}


def slope(total: Float64, activation: str | None) -> Float64:
    """Derivative of the activation at its argument; for silu s(t) = sigmoid(t): s + t s (1 - s)."""
    if activation is None:
        return np.ones(total.shape)
    s = sigmoid(total)
    return s + total * s * (1.0 - s)


def _sum(window: Float64, weight: Float64, bias: Float64 | None) -> Float64:
    total = np.zeros(window.shape[:1]) if bias is None else bias
    for j in range(weight.shape[1]):
        total = total + weight[:, j] * window[:, j]
    return total
