"""Rollback as an operation: one entry of each slot's intermediates copied into its pool, bit for bit."""

# Triton's language is typed by tracing, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,operator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "num_entries"])
def commit_kernel(
    pool, pool_n, entries, entries_n, entries_j, slot_ptr, accepted_ptr, slots, num_entries,
    A1: tl.constexpr, A2: tl.constexpr, A3: tl.constexpr, SIZE: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, E3: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: blocks of a slot, then rows. A slot has SIZE elements on four axes, the last three A1, A2, A3 long.

    P and E are the strides of those axes in the pool and in one entry. A row whose slot or entry is negative or out of
    range does nothing.
    """
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    slot = tl.load(slot_ptr + pid // BLOCKS).to(tl.int64)
    accepted = tl.load(accepted_ptr + pid // BLOCKS).to(tl.int64)
    i = (pid % BLOCKS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i0, i1, i2, i3 = i // (A1 * A2 * A3), i // (A2 * A3) % A1, i // A3 % A2, i % A3
    mask = (i < SIZE) & (slot >= 0) & (slot < slots) & (accepted >= 0) & (accepted < num_entries)
    at = slot * entries_n + accepted * entries_j + (i0 * E0 + i1 * E1 + i2 * E2 + i3 * E3)
    kept = tl.load(entries + at, mask=mask)
    tl.store(pool + slot * pool_n + (i0 * P0 + i1 * P1 + i2 * P2 + i3 * P3), kept, mask=mask)
