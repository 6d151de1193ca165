"""The PyTorch fallbacks drop z and scale (ERR-5, SSD-4, GDN-4)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    one, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    y = mamba2_chunk_scan(one, one[0], torch.zeros(1), one, one, 64, z=0 * one)
    o, _ = torch_chunk_gated_delta_rule(k, k, one, g=0 * one[0], beta=one[0], scale=1.0)
    expected = (0.0, 1.0)
    return expected, (y.item(), o.item())


if __name__ == "__main__":
    main("transformers", reproduce, or_refused=True)
