"""Right implementations in float32, as different kernels would round: token by token or in chunks, sums in any order,
matrix operands rounded to a class, an exponential that is biased. With a fault, the same and one thing wrong.

Only for measuring scores: nothing here is checked for bad arguments, and one text serves every operation of a family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from statescan.conformance.adapter import Adapter
from statescan.spec.contract import OPERAND_BITS

Array = npt.NDArray[Any]
Run = Callable[[int, slice, Array], tuple[Array, Array]]
F = np.float32


@dataclass(frozen=True)
class Variant:
    """How an implementation rounds: `chunk` 0 is token by token, `order` a permutation of its sums."""

    chunk: int = 0
    operand: str = "f32"
    order: int = 0
    bias: float = 0.0
    fault: str = ""

    def op(self, x: Array) -> Array:
        """A matrix operand in the variant's class."""
        if self.operand == "f32":
            return x
        mantissa, exponent = np.frexp(x)
        bits = OPERAND_BITS[self.operand]
        return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits).astype(F)

    def exp(self, x: Array) -> Array:
        """e^x with a relative bias."""
        with np.errstate(over="ignore"):
            return np.exp(x.astype(F)) * F(1 + self.bias)

    def total(self, terms: Array, axis: int) -> Array:
        """A sum along an axis, in the variant's order."""
        if self.order:
            terms = np.take(terms, np.random.default_rng(self.order).permutation(terms.shape[axis]), axis)
        return np.add.reduce(terms, axis=axis, dtype=F)

    def softplus(self, x: Array) -> Array:
        """ln(1 + e^x), linear above 20."""
        with np.errstate(over="ignore"):
            return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, F(30))))).astype(F) * F(1 + self.bias)

    def sigmoid(self, x: Array) -> Array:
        """1 / (1 + e^-x)."""
        return F(1) / (F(1) + self.exp(-x))


# ---------------------------------------------------------------------------------------------------------------------
# The delta family
# ---------------------------------------------------------------------------------------------------------------------


def delta_run(variant: Variant, given: dict[str, Any]) -> Run:
    """Outputs and last state of some tokens of one batch row."""
    copies = given.get("num_householder", 1)
    scale = given.get("scale")
    q, k, v, g, beta = (given[name].astype(F) for name in ("q", "k", "v", "g", "beta"))
    heads = np.arange(v.shape[2])
    heads = heads % q.shape[2] if variant.fault == "tiled" else heads // (v.shape[2] // q.shape[2])
    if given.get("use_qk_l2norm"):
        q, k = unit(variant, q, 1e-6), unit(variant, k, 1e-6)
    if variant.fault == "neighbour" and g.shape[2] > 1:
        g = g[:, :, [1, *range(1, g.shape[2])]]
    q = q * F(q.shape[3] ** -0.5 if scale is None else scale)
    gates = g if g.ndim == 4 else g[..., None]

    def run(row: int, tokens: slice, state: Array) -> tuple[Array, Array]:
        wide = slice(tokens.start * copies, tokens.stop * copies)
        parts = (q[row, tokens][:, heads], k[row, wide][:, heads], v[row, wide], gates[row, tokens], beta[row, wide])
        scan = delta_chunks if variant.chunk else delta_tokens
        o, last = scan(variant, copies, *parts, state.astype(F))
        return o, last

    return run


def delta_tokens(
    variant: Variant, copies: int, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """Token by token."""
    o = np.zeros((len(q), *v.shape[1:]), F)
    late = variant.fault == "decay-late"
    for t in range(len(q)):
        decay = variant.exp(g[t - 1] if variant.fault == "previous" and t else g[t])[:, :, None]
        state = state if late else decay * state
        for m in range(copies):
            i = t * copies + m
            known = variant.total(variant.op(k[i])[:, :, None] * variant.op(state), 1)
            correction = beta[i][:, None] * (v[i] - known)
            state = state + variant.op(k[i])[:, :, None] * variant.op(correction)[:, None, :]
        state = decay * state if late else state
        o[t] = variant.total(variant.op(q[t])[:, :, None] * variant.op(state), 1)
    return o, state


def delta_chunks(
    variant: Variant, copies: int, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """In chunks of rows, decays as differences of cumulative sums; copies are rows of the stream."""
    rows, keys = len(k), k.shape[2]
    queries, gates = np.zeros(k.shape, F), np.zeros((rows, *g.shape[1:]), F)
    queries[copies - 1 :: copies], gates[::copies] = q, g
    gates = np.broadcast_to(gates, k.shape) if g.shape[2] == keys else gates
    o = np.zeros(v.shape, F)
    for start in range(0, rows, variant.chunk):
        part = slice(start, min(start + variant.chunk, rows))
        o[part], state = delta_chunk(variant, queries[part], k[part], v[part], gates[part], beta[part], state)
    return o[copies - 1 :: copies], state


def delta_chunk(
    variant: Variant, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """One chunk in the WY form."""
    length, op = len(k), variant.op
    sums = np.cumsum(g, axis=0, dtype=F)  # [L, HV, K or 1]
    below = np.tril(np.ones((length, length), bool))[:, :, None, None]
    between = variant.exp(np.where(below, sums[:, None] - sums[None, :], -np.inf))  # [L, L, HV, K or 1]
    if g.shape[2] == 1:
        system = np.einsum("ihk,jhk->ijh", op(beta[:, :, None] * k), op(k)) * between[..., 0]
        reads = np.einsum("ihk,jhk->ijh", op(q), op(k)) * between[..., 0]
    else:
        system = np.einsum("ihk,ijhk,jhk->ijh", op(beta[:, :, None] * k), between, op(k))
        reads = np.einsum("ihk,ijhk,jhk->ijh", op(q), between, op(k))
    inverse = np.zeros((length, length, k.shape[1]), F)
    for i in range(length):
        inverse[i, i] = 1
        inverse[i, :i] = -np.einsum("jh,jkh->kh", system[i, :i], inverse[:i, :i])
    entry, leave = variant.exp(sums), variant.exp(sums[-1] - sums)
    values = np.einsum("ijh,jhv->ihv", op(inverse), op(beta[:, :, None] * v))
    keys = np.einsum("ijh,jhk->ihk", op(inverse), op(beta[:, :, None] * k * entry))
    fresh = values - np.einsum("ihk,hkv->ihv", op(keys), op(state))
    o = np.einsum("ihk,hkv->ihv", op(q * entry), op(state)) + np.einsum("ijh,jhv->ihv", op(reads), op(fresh))
    return o, entry[-1][:, :, None] * state + np.einsum("jhk,jhv->hkv", op(k * leave), op(fresh))


# ---------------------------------------------------------------------------------------------------------------------
# Mamba2
# ---------------------------------------------------------------------------------------------------------------------


def ssd_run(variant: Variant, given: dict[str, Any]) -> Run:
    """Outputs and last state of some tokens of one batch row."""
    x, dt, A, B, C = (given[name].astype(F) for name in ("x", "dt", "A", "B", "C"))
    heads = np.arange(x.shape[2])
    heads = heads % B.shape[2] if variant.fault == "tiled" else heads // (x.shape[2] // B.shape[2])
    B, C = B[:, :, heads], C[:, :, heads]
    dt = dt if given.get("dt_bias") is None else dt + given["dt_bias"].astype(F)
    dt = variant.softplus(dt) if given.get("dt_softplus", True) else dt
    step = np.clip(dt, *(F(bound) for bound in given.get("dt_limit", (0.0, np.inf))))
    A = A[[1, *range(1, len(A))]] if variant.fault == "neighbour" and len(A) > 1 else A

    def run(row: int, tokens: slice, state: Array) -> tuple[Array, Array]:
        scan = ssd_chunks if variant.chunk else ssd_tokens
        y, last = scan(variant, x[row, tokens], step[row, tokens], A, B[row, tokens], C[row, tokens], state.astype(F))
        if given.get("D") is not None:
            y = y + given["D"].astype(F).reshape(len(A), -1) * x[row, tokens]
        if given.get("z") is not None:
            z = given["z"][row, tokens].astype(F)
            y = y * (z * variant.sigmoid(z))
        return y, last

    return run


def ssd_tokens(
    variant: Variant, x: Array, step: Array, A: Array, B: Array, C: Array, state: Array
) -> tuple[Array, Array]:
    """Token by token."""
    y, late = np.zeros(x.shape, F), variant.fault == "decay-late"
    for t in range(len(x)):
        decay = variant.exp(step[t - 1 if variant.fault == "previous" and t else t] * A)[:, None, None]
        state = state if late else decay * state
        state = state + variant.op(step[t][:, None] * x[t])[:, :, None] * variant.op(B[t])[:, None, :]
        state = decay * state if late else state
        y[t] = variant.total(variant.op(state) * variant.op(C[t])[:, None, :], 2)
    return y, state


def ssd_chunks(
    variant: Variant, x: Array, step: Array, A: Array, B: Array, C: Array, state: Array
) -> tuple[Array, Array]:
    """In chunks, decays as differences of cumulative sums."""
    y, op = np.zeros(x.shape, F), variant.op
    for start in range(0, len(x), variant.chunk):
        part = slice(start, min(start + variant.chunk, len(x)))
        sums = np.cumsum(step[part] * A, axis=0, dtype=F)  # [L, H]
        below = np.tril(np.ones((len(sums), len(sums)), bool))[:, :, None]
        between = variant.exp(np.where(below, sums[:, None] - sums[None, :], -np.inf))
        write = step[part][:, :, None] * x[part]
        reads = np.einsum("ihr,jhr->ijh", op(C[part]), op(B[part])) * between
        entry, leave = variant.exp(sums), variant.exp(sums[-1] - sums)
        y[part] = np.einsum("ijh,jhp->ihp", op(reads), op(write))
        y[part] += np.einsum("ihr,hpr->ihp", op(C[part]), op(state)) * entry[:, :, None]
        added = np.einsum("jhp,jhr->hpr", op(write), op(B[part] * leave[:, :, None]))
        state = entry[-1][:, None, None] * state + added
    return y, state


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def over_rows(variant: Variant, run: Run, rows: list[tuple[int, slice]], y: Array, entering: Array) -> Array:
    """Run every row into `y [batch, T, ...]`; the last states."""
    last = entering.copy()
    before = np.zeros(entering.shape[1:], F)
    for n, (row, tokens) in enumerate(rows):
        state = before if variant.fault == "leak" and n else entering[n]
        y[row, tokens], before = run(row, tokens, state)
        if variant.fault in ("boundary-20", "boundary-2"):
            y[row, tokens][:3] *= F(1.2 if variant.fault == "boundary-20" else 1.02)
        last[n] = entering[n] if variant.fault == "kept" else before
    return last


def ruined(variant: Variant, y: Array, values: Array) -> Array:
    """Outputs of the faults that need no recurrence."""
    if variant.fault == "zeros":
        return np.zeros_like(y)
    return values[:, :: values.shape[1] // max(1, y.shape[1])].astype(F) if variant.fault == "echo" else y


def packed(variant: Variant, make: Callable[..., Run], values: str, **given: Any) -> Any:
    """A packed operation."""
    wide = given[values]
    tokens = given["x" if "x" in given else "q"].shape[1]
    offsets = [0, tokens] if given.get("cu_seqlens") is None else given["cu_seqlens"].tolist()
    y = np.zeros((1, tokens, *wide.shape[2:]), F)
    rows = [(0, slice(a, b)) for a, b in pairwise(offsets)]
    entering = given.get("initial_state")
    if entering is None:
        inner = (wide.shape[3], given["B"].shape[3]) if "B" in given else (given["k"].shape[3], wide.shape[3])
        entering = np.zeros((len(rows), wide.shape[2], *inner))
    last = over_rows(variant, make(variant, given), rows, y, entering.astype(F))
    return ruined(variant, y, wide), (last if given.get("output_final_state") else None)


def pooled(variant: Variant, make: Callable[..., Run], values: str, **given: Any) -> Any:
    """Prefill and update on a slot pool."""
    read = given["read_slots"]
    write = read if given.get("write_slots") is None else given["write_slots"]
    wide, pool = given[values], given["state_pool"]
    if "cu_seqlens" in given:
        rows = [(0, slice(a, b)) for a, b in pairwise(given["cu_seqlens"].tolist())]
    else:
        rows = [(n, slice(0, given["x" if "x" in given else "q"].shape[1])) for n in range(len(read))]
    live = [n for n in range(len(read)) if max(read[n], write[n]) >= 0]
    entering = np.stack([pool[read[n]] if read[n] >= 0 else np.zeros(pool.shape[1:]) for n in live]).astype(F)
    first = given["x" if "x" in given else "q"].shape
    y = np.zeros((*first[:2], *wide.shape[2:]), F)
    last = over_rows(variant, make(variant, given), [rows[n] for n in live], y, entering)
    for n, state in zip(live, last, strict=True):
        if write[n] >= 0:
            pool[write[n]] = state
    return ruined(variant, y, wide)


# ---------------------------------------------------------------------------------------------------------------------
# Gates and norms
# ---------------------------------------------------------------------------------------------------------------------


def unit(variant: Variant, x: Array, eps: float) -> Array:
    """Rows over the root of their squared length and eps."""
    return x / np.sqrt(variant.total(x * x, x.ndim - 1) + F(eps))[..., None]


def softplus_gate(variant: Variant, a: Array, A_log: Array, dt_bias: Array | None = None, **_: Any) -> Array:
    biased = a.astype(F) if dt_bias is None else a.astype(F) + dt_bias.astype(F)
    return -variant.exp(A_log) * variant.softplus(biased)


def kda_gate(variant: Variant, f: Array, A_log: Array | None = None, dt_bias: Array | None = None, *,
             lower_bound: float | None = None, **_: Any) -> Array:  # fmt: skip
    rate = F(1) if A_log is None else variant.exp(A_log)[:, None]
    biased = f.astype(F) if dt_bias is None else f.astype(F) + dt_bias.astype(F)
    if lower_bound is None:
        return -rate * variant.softplus(biased)
    return F(lower_bound) * variant.sigmoid(rate * biased)


def beta_gate(variant: Variant, b: Array, *, allow_neg_eigval: bool = False, **_: Any) -> Array:
    return F(2 if allow_neg_eigval else 1) * variant.sigmoid(b.astype(F))


def l2norm(variant: Variant, x: Array, *, eps: float = 1e-6, **_: Any) -> Array:
    return unit(variant, x.astype(F), eps)


def rmsnorm_gated(variant: Variant, x: Array, z: Array | None, weight: Array, *, eps: float = 1e-5,
                  group_size: int | None = None, norm_before_gate: bool = False, gate_activation: str = "silu",
                  **_: Any) -> Array:  # fmt: skip
    x, size = x.astype(F), group_size or x.shape[-1]
    gate = F(1)
    if z is not None:
        opened = variant.sigmoid(z.astype(F))
        gate = z.astype(F) * opened if gate_activation == "silu" else opened
    groups = (x if norm_before_gate else x * gate).reshape(*x.shape[:-1], -1, size)
    root = np.sqrt(variant.total(groups * groups, groups.ndim - 1) / F(size) + F(eps))[..., None]
    spread = np.tile(weight.astype(F), x.shape[-1] // len(weight))
    y = (groups / root).reshape(x.shape) * spread
    return y * gate if norm_before_gate else y


def implementation(variant: Variant) -> Adapter:
    """The variant as an adapter."""
    adapter = Adapter("honest")
    for name in ("gated_delta_rule", "gated_delta_product", "kimi_delta_attention"):
        _register(adapter, variant, name, delta_run, "v")
    _register(adapter, variant, "ssd", ssd_run, "x")
    for function in (softplus_gate, kda_gate, beta_gate, l2norm, rmsnorm_gated):
        adapter.op(function.__name__)(lambda _f=function, **given: _f(variant, **given))
    return adapter


def _register(adapter: Adapter, variant: Variant, name: str, make: Callable[..., Run], values: str) -> None:
    adapter.op(name)(lambda **given: packed(variant, make, values, **given))
    for kind in ("prefill", "update"):
        adapter.op(f"{name}_{kind}")(lambda **given: pooled(variant, make, values, **given))
