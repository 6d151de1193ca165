"""selective_state_update multiplies an int32 slot by the stride in 32 bits (MEM-4, SLOT-3)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import mmap

    import torch
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    memory = mmap.mmap(-1, 2 * (2**32 + 8), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # reserves nothing
    pool = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((5, 1, 1, 1), (2**30, 1, 1, 1))
    pool[0], pool[4] = 3, 5
    one, zero, found = torch.ones(1, 1, 1), torch.zeros(1, 1), []
    for kind in (torch.int64, torch.int32):
        slot = torch.tensor([4], dtype=kind)
        y = selective_state_update(
            pool, 0 * one, 0 * one, 0 * one, one, one, zero, dt_bias=zero, state_batch_indices=slot
        )
        found.append(y.item())
    expected = [5.0, 5.0]
    return expected, found


if __name__ == "__main__":
    main("mamba-ssm", reproduce)
