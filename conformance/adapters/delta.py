"""The three ways to call the delta rule of a peer that knows no pools: a pack, a prefill and an update.

A kernel here takes fla's names: `cu_seqlens`, `initial_state`, `output_final_state`, `use_qk_l2norm_in_kernel`, and
gives the output and the final states. Adapters of other packages put their functions under these names.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from statescan.conformance.adapters.slots import Tensor, entering, padding, refuse, refuse_rows, silence, store

Function = Callable[..., Any]


def pack(kernel: Function) -> Function:
    """The packed operation: one call, with fla's names for the arguments."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None,
        initial_state: Tensor | None = None, *, use_qk_l2norm: bool = False, **settings: Any,
    ) -> Any:  # fmt: skip
        return kernel(
            q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, initial_state=initial_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm, **settings,
        )  # fmt: skip

    return call


def prefill(kernel: Function) -> Function:
    """All rows in one packed call, the gathered states as its entering ones."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, state_pool: Tensor,
        read_slots: Tensor, write_slots: Tensor | None = None, snapshot_positions: Tensor | None = None,
        snapshot_states: Tensor | None = None, *, use_qk_l2norm: bool = False, state_layout: str = "KV",
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        refuse(**{"snapshots.any": snapshot_positions})
        write = read_slots if write_slots is None else write_slots
        o, states = kernel(
            q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, initial_state=entering(state_pool, read_slots),
            output_final_state=True, use_qk_l2norm_in_kernel=use_qk_l2norm, **layout(state_layout), **settings,
        )  # fmt: skip
        store(state_pool, write, states)
        return silence(o, cu_seqlens, padding(read_slots, write))

    return call


def by_row(kernel: Function) -> Function:
    """A function that takes no offsets, called for each row of a pack; rows past the last offset are no row's."""

    def call(*, cu_seqlens: Tensor, initial_state: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        import torch

        refuse_rows(cu_seqlens, given["q"].shape[1])
        tokens = {name: value for name, value in given.items() if name in ("q", "k", "v", "g", "beta")}
        settings = {name: value for name, value in given.items() if name not in tokens}
        done = [
            kernel(**{name: value[:, start:end] for name, value in tokens.items()}, **settings,
                   initial_state=initial_state[n : n + 1])
            for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist()))
        ]  # fmt: skip
        return torch.cat([o for o, _ in done], dim=1), torch.cat([state for _, state in done])

    return call


def update(kernel: Function) -> Function:
    """The rows of a decode call are the batch of one call without offsets."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state_pool: Tensor, read_slots: Tensor,
        write_slots: Tensor | None = None, intermediate_states: Tensor | None = None,
        num_accepted: Tensor | None = None, num_tokens: Tensor | None = None, *, use_qk_l2norm: bool = False,
        state_layout: str = "KV", **settings: Any,
    ) -> Tensor:  # fmt: skip
        refuse(intermediates=intermediate_states, num_accepted=num_accepted, num_tokens=num_tokens)
        write = read_slots if write_slots is None else write_slots
        o, states = kernel(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=entering(state_pool, read_slots), output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm, **layout(state_layout), **settings,
        )  # fmt: skip
        store(state_pool, write, states)
        o[padding(read_slots, write)] = 0
        return o

    return call


def layout(state_layout: str) -> dict[str, bool]:
    """fla's word for values first; a kernel whose adapter claims one layout is never asked."""
    return {"state_v_first": True} if state_layout == "VK" else {}
