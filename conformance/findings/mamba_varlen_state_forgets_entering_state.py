"""The state of a first segment that ends in the first chunk lacks the entering one (CHUNK-5, ERR-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, zero, ids = torch.zeros(1, 2, 1, 1), torch.zeros(1), torch.zeros(1, 2, dtype=torch.int32)
    _, final, varlen = mamba_chunk_scan_combined(
        x, x[..., 0], zero, x, x, 64, initial_states=torch.full((1, 1, 1, 1), 5.0), seq_idx=ids,
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32), return_final_states=True, return_varlen_states=True,
    )  # fmt: skip
    expected = (5.0, 5.0)
    return expected, (final.item(), varlen.item())


if __name__ == "__main__":
    main("mamba-ssm", reproduce, or_refused=True)
