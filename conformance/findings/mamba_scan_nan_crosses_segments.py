"""The scan multiplies tokens of other segments by 0, and 0 times NaN is NaN (PACK-6, PACK-8)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    nan, one = float("nan"), torch.ones(1, 4, 1, 1)
    x, ids = torch.tensor([1.0, 2.0, nan, 4.0]).view(1, 4, 1, 1), torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    y = mamba_chunk_scan_combined(x, one[..., 0], torch.zeros(1), one, one, 64, seq_idx=ids)
    expected = [1.0, 3.0, nan, nan]
    return expected, y.flatten().tolist()


if __name__ == "__main__":
    main("mamba-ssm", reproduce)
