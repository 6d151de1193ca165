"""The scan takes decays from sums over a whole chunk, other segments included (PACK-6, CHUNK-3)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, one = torch.tensor([1.0, 1.0, 0.0]).view(1, 3, 1, 1), torch.ones(1, 3, 1, 1)
    ids, A, found = torch.tensor([[0, 1, 1]], dtype=torch.int32), -torch.ones(1), []
    for first in (1.0, 2.0**25):  # the step of the segment before
        dt = torch.tensor([first, 1.0, 1.0]).view(1, 3, 1)
        found.append(mamba_chunk_scan_combined(x, dt, A, one, one, 64, seq_idx=ids)[0, 2].item())
    expected = [0.3679, 0.3679]
    return expected, [round(y, 4) for y in found]


if __name__ == "__main__":
    main("mamba-ssm", reproduce)
