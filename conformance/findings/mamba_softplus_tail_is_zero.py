"""The step's softplus is log(exp(x) + 1) in float32, which is 0 below -16.6 (SSD-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    one, zero = torch.ones(1, 1, 1, 1), torch.zeros(1, 1)
    x, dt = 2.0**27 * one, torch.full((1, 1, 1), -18.0)
    scan = mamba_chunk_scan_combined(x, dt, zero[0], one, one, 64, dt_softplus=True)
    step = selective_state_update(0 * one, x[0], dt, 0 * one[0], one[0], one[0], zero, dt_bias=zero, dt_softplus=True)
    expected = (2.0441, 2.0441)
    return expected, (round(scan.item(), 4), round(step.item(), 4))


if __name__ == "__main__":
    main("mamba-ssm", reproduce)
