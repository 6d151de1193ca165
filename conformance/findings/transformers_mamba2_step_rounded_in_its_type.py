"""The step's bias is added in bfloat16 (SSD-1, NUM-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update

    one, zero, bias = torch.ones(1, 1, 1, 1), torch.zeros(1), torch.tensor([2.0**-9])
    x, dt = 512 * one, torch.ones(1, 1, 1, dtype=torch.bfloat16)
    scan = mamba2_chunk_scan(x, dt, zero, one, one, 64, dt_bias=bias)
    step = mamba2_selective_state_update(0 * one, x[0], dt, 0 * one[0], one[0], one[0], dt_bias=bias[None])
    expected = (513.0, 513.0)
    return expected, (scan.item(), step.item())


if __name__ == "__main__":
    main("transformers", reproduce)
