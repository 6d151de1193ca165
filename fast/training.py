"""The packed recurrences, differentiable: what training runs (GDN, GDP, KDA, SSD, GRAD).

Names, arguments and meaning are those of `statescan.reference`. A call goes to flash-linear-attention's kernels where
these are right (`statescan.fast.peers` says where, and what is guarded), else to chunks in plain PyTorch
(`statescan.fast.chunked`), on any device. Which of the two depends on device, types and sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from statescan.fast import chunked, peers
from statescan.fast.checks import check_call, check_decay
from statescan.fast.launch import is_traced
from statescan.fast.norms import L2NORM_EPS
from statescan.fast.packed import ids_to_offsets
from statescan.fast.plain import SOFTPLUS_LINEAR_ABOVE
from statescan.fast.recompute import Recomputed, Results
from statescan.spec.contract import ShapeError, UnsupportedError

Packed = tuple[Tensor, "Tensor | None"]
ANY_STEP = (0.0, float("inf"))


# ---------------------------------------------------------------------------------------------------------------------
# The delta family
# ---------------------------------------------------------------------------------------------------------------------


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    output_final_state: bool = False, check: bool | None = None,
) -> Packed:  # fmt: skip
    """The gated delta rule on a pack (GDN-1 to GDN-6): returns (o, final_state), both differentiable.

    q, k `[1, T, H, K]`, v `[1, T, HV, V]`, g, beta `[1, T, HV]` with cu_seqlens `[N+1]`, or `[batch, T, ...]` where
    each batch row is a segment; initial_state `[N, HV, K, V]`. o `[1, T, HV, V]` has v's type, final_state
    initial_state's, else float32. Rows past the last offset give 0 (PACK-8). Raises PackingError, ShapeError,
    DtypeError, UnsupportedError. Source: https://arxiv.org/abs/2412.06464
    """
    return _delta("gated_delta_rule", q, k, v, g, beta, cu_seqlens, initial_state, (scale, use_qk_l2norm),
                  output_final_state, check)  # fmt: skip


def gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None, *, num_householder: int = 1, scale: float | None = None,
    use_qk_l2norm: bool = False, output_final_state: bool = False, check: bool | None = None,
) -> Packed:  # fmt: skip
    """The gated delta product on a pack: M writes a token, one decay before them and one read after (GDP-1 to GDP-3).

    As `gated_delta_rule` with k, v, beta on T*M rows, row t*M + m being copy m of token t (GDP-5).
    Source: https://arxiv.org/abs/2502.10297
    """
    return _delta("gated_delta_product", q, k, v, g, beta, cu_seqlens, initial_state,
                  (num_householder, scale, use_qk_l2norm), output_final_state, check)  # fmt: skip


def kimi_delta_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None, *, scale: float | None = None, use_qk_l2norm: bool = False,
    output_final_state: bool = False, check: bool | None = None,
) -> Packed:  # fmt: skip
    """The delta rule with a decay per key channel on a pack (KDA-1, KDA-2).

    As `gated_delta_rule` with g `[1, T, HV, K]`. Source: https://arxiv.org/abs/2510.26692
    """
    return _delta("kimi_delta_attention", q, k, v, g, beta, cu_seqlens, initial_state, (scale, use_qk_l2norm),
                  output_final_state, check)  # fmt: skip


def _delta(
    name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None,
    initial_state: Tensor | None, settings: tuple[Any, ...], output_final_state: bool, check: bool | None,
) -> Packed:  # fmt: skip
    arguments = (q, k, v, g, beta, cu_seqlens, initial_state, *settings, output_final_state, check)
    family = _DELTA[name]
    if not is_traced(q) and peers.is_served(name, q, k, v, _segments(q, cu_seqlens)):
        family.check(*arguments)
        o, final = family.compute(*arguments)
    else:
        o, final = family.operation(*arguments)
    return o, final if output_final_state else None


class _DeltaFamily:
    """One operation of the family: its rules, its function, and what tracers see of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.operation = Recomputed(name, self.compute, self.check, self.fake)

    def split(self, settings: Sequence[Any]) -> tuple[int, float | None, bool]:
        """Copies, scale and l2norm from the settings in the table's order."""
        copies, scale, l2norm = settings[:3] if self.name == "gated_delta_product" else (1, *settings[:2])
        return copies, scale, l2norm

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None,
        initial_state: Tensor | None, *settings: Any,
    ) -> None:  # fmt: skip
        """Every rule of a call, the domain of g too where values may be looked at."""
        copies, *_ = self.split(settings)
        tokens, offsets = as_pack({"q": q, "k": k, "v": v, "g": g, "beta": beta}, cu_seqlens, copies)
        tensors = {**tokens, "cu_seqlens": offsets, "initial_state": initial_state}
        values = check_call(self.name, tensors, {"num_householder": copies}, settings[-1])
        if values is not None:
            total = g.shape[1] if offsets is None else values["cu_seqlens"][-1]
            check_decay(tokens["g"], [(0, slice(0, total))])

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None,
        initial_state: Tensor | None, *settings: Any,
    ) -> Results:  # fmt: skip
        """o `[batch, T, HV, V]` and the last states of a checked call, differentiable by PyTorch."""
        copies, given, l2norm = self.split(settings)
        scale = q.shape[-1] ** -0.5 if given is None else given
        segments = _segments(q, cu_seqlens)
        kind = torch.float32 if initial_state is None else initial_state.dtype
        with torch.autocast(q.device.type, enabled=False):
            if peers.is_served(self.name, q, k, v, segments):
                o, final = peers.run(self.name, q, k, v, g, beta, cu_seqlens, initial_state, copies, scale, l2norm)
                return o, final.to(kind)
            entering = _entering(initial_state, q, (segments, v.shape[2], q.shape[3], v.shape[3]))
            if segments == 0 or q.shape[1] == 0:
                return v.new_zeros(*q.shape[:2], *v.shape[2:]), entering.to(kind, copy=True)
            offsets, batch = _offsets(q, cu_seqlens), q.shape[0]
            q_rows, k_rows, v_rows, g_rows, beta_rows = (_as_one_row(x, batch) for x in (q, k, v, g, beta))
            if copies > 1:
                q_rows, g_rows = _at_copy(q_rows, copies, copies - 1), _at_copy(g_rows, copies, 0)
            o, final = chunked.delta_rule(q_rows, k_rows, v_rows, g_rows, beta_rows, offsets * copies, entering, scale,
                                          L2NORM_EPS if l2norm else None)  # fmt: skip
        o = o[:, copies - 1 :: copies] if copies > 1 else o
        return o.reshape(*q.shape[:2], *v.shape[2:]).to(v.dtype).contiguous(), final.to(kind)

    def fake(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None,
        initial_state: Tensor | None, *settings: Any,
    ) -> Results:  # fmt: skip
        kind = torch.float32 if initial_state is None else initial_state.dtype
        o = v.new_empty(*q.shape[:2], *v.shape[2:])
        return o, v.new_empty(_segments(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3], dtype=kind)


def _segments(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def as_pack(
    tokens: dict[str, Tensor], cu_seqlens: Tensor | None, copies: int = 1
) -> tuple[dict[str, Tensor], Tensor | None]:  # fmt: skip
    """Batch rows as the pack that they are: token tensors `[1, batch * T, ...]` and offsets. A pack stays as it is."""
    first = next(iter(tokens.values()))
    if cu_seqlens is not None or first.ndim < 2 or first.shape[0] == 1:
        return tokens, cu_seqlens
    for name, t in tokens.items():
        rows = first.shape[1] * (copies if name in ("k", "v", "beta") else 1)
        if t.shape[:2] != (first.shape[0], rows):
            raise ShapeError(f"{name} has shape {list(t.shape)}: [{first.shape[0]}, {rows}, ...] is needed (ERR-1)")
    return {name: _as_one_row(t, first.shape[0]) for name, t in tokens.items()}, _offsets(first, None)


def _as_one_row(x: Tensor, batch: int) -> Tensor:
    """Batch rows one after another: `[batch, T, ...]` as `[1, batch * T, ...]`."""
    return x if batch == 1 else x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def _offsets(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Those given, or those of batch rows of one length."""
    if cu_seqlens is not None:
        return cu_seqlens.to(torch.int64)
    return torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]


def _entering(initial_state: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if initial_state is None:
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    return initial_state.float()


def _at_copy(x: Tensor, copies: int, copy: int) -> Tensor:
    """One row a token as `copies` rows of which the others hold 0: they decay nothing, and read what nobody asks."""
    parts = [x if m == copy else torch.zeros_like(x) for m in range(copies)]
    return torch.stack(parts, 2).flatten(1, 2)


_DELTA = {name: _DeltaFamily(name) for name in peers.FUNCTIONS}


# ---------------------------------------------------------------------------------------------------------------------
# Mamba2
# ---------------------------------------------------------------------------------------------------------------------


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None, *, dt_softplus: bool = True, dt_limit: tuple[float, float] = ANY_STEP,
    output_final_state: bool = False, check: bool | None = None,
) -> Packed:  # fmt: skip
    """The Mamba2 recurrence on a pack (SSD-1 to SSD-7): returns (y, final_state), both differentiable.

    x, z `[1, T, H, P]`, dt `[1, T, H]`, A, dt_bias `[H]`, B, C `[1, T, G, R]`, D `[H]` or `[H, P]`, one of seq_idx
    `[1, T]` and cu_seqlens `[N+1]`, or `[batch, T, ...]`; initial_state `[N, H, P, R]`. y has x's type, final_state
    initial_state's, else float32. With ids and no states N is read from the device. Raises PackingError, ShapeError,
    DtypeError, UnsupportedError. Source: https://arxiv.org/abs/2405.21060
    """
    y, final = _ssd(x, dt, A, B, C, D, z, dt_bias, seq_idx, cu_seqlens, initial_state, dt_softplus,
                    check_limit(dt_limit), output_final_state, check)  # fmt: skip
    return y, final if output_final_state else None


def check_limit(dt_limit: Any) -> tuple[float, float]:
    """A limit is a pair (least, largest) of step sizes (SSD-6)."""
    try:
        least, largest = (float(bound) for bound in dt_limit)
    except (TypeError, ValueError):
        least, largest = 1.0, 0.0
    if not least <= largest:
        raise UnsupportedError(f"dt_limit={dt_limit!r}: a pair (least, largest) is needed (SSD-6)")
    return least, largest


def _check_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None, initial_state: Tensor | None,
    dt_softplus: bool, dt_limit: Sequence[float], output_final_state: bool, check: bool | None,
) -> None:  # fmt: skip
    tokens = {"x": x, "dt": dt, "B": B, "C": C} | ({} if z is None else {"z": z})
    if seq_idx is None:
        tokens, cu_seqlens = as_pack(tokens, cu_seqlens)
    fixed = {"A": A, "D": D, "z": None, "dt_bias": dt_bias, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens,
             "initial_state": initial_state}  # fmt: skip
    check_call("ssd", {**fixed, **tokens}, {}, check)


def _compute_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None, initial_state: Tensor | None,
    dt_softplus: bool, dt_limit: Sequence[float], output_final_state: bool, check: bool | None,
) -> Results:  # fmt: skip
    kind = torch.float32 if initial_state is None else initial_state.dtype
    if cu_seqlens is None and seq_idx is not None:
        last = seq_idx.max() if seq_idx.numel() else -1
        cu_seqlens = ids_to_offsets(seq_idx, int(last) + 1 if initial_state is None else initial_state.shape[0])
    segments, batch = _segments(x, cu_seqlens), x.shape[0]
    with torch.autocast(x.device.type, enabled=False):
        entering = _entering(initial_state, x, (segments, *x.shape[2:], B.shape[3]))
        if segments == 0 or x.shape[1] == 0:
            return torch.zeros_like(x, memory_format=torch.contiguous_format), entering.to(kind, copy=True)
        offsets = _offsets(x, cu_seqlens)
        rows = [_as_one_row(each, batch) for each in (x, dt, B, C)]
        live = torch.arange(rows[0].shape[1], device=x.device) < offsets[-1]

        def real(t: Tensor) -> Tensor:
            return torch.where(live.view(-1, *[1] * (t.ndim - 2)), t.float(), 0.0)

        # DISCRETISE
        step = real(rows[1]) if dt_bias is None else real(rows[1]) + dt_bias.float()
        step = (softplus(step, threshold=SOFTPLUS_LINEAR_ABOVE) if dt_softplus else step).clamp(*dt_limit)
        y, final = chunked.ssd_scan(rows[0], step, A, rows[2], rows[3], offsets, entering)
        if D is not None:
            y = y + D.float().view(x.shape[2], -1) * real(rows[0])
        if z is not None:
            y = y * silu(real(_as_one_row(z, batch)))
    return y.reshape(x.shape).to(x.dtype), final.to(kind).contiguous()


def _fake_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None, initial_state: Tensor | None,
    *settings: Any,
) -> Results:  # fmt: skip
    if initial_state is not None:
        return torch.empty_like(x, memory_format=torch.contiguous_format), initial_state.new_empty(initial_state.shape)
    segments: Any = _segments(x, cu_seqlens)
    if cu_seqlens is None and seq_idx is not None:
        segments = torch.library.get_ctx().new_dynamic_size()
    final = x.new_empty(segments, *x.shape[2:], B.shape[3], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), final


_ssd = Recomputed("ssd", _compute_ssd, _check_ssd, _fake_ssd)
