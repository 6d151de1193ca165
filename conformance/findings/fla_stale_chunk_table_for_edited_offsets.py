"""The chunk table is kept by the identity of the offsets: offsets edited in place get the old table (DET-1, MEM-6)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d

    x, weight = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1), torch.tensor([[10.0, 1.0]])
    offsets = torch.tensor([0, 4, 4])
    causal_conv1d(x, weight, cu_seqlens=offsets)
    offsets.copy_(torch.tensor([0, 0, 4]))
    y, _ = causal_conv1d(x, weight, cu_seqlens=offsets)
    return [1.0, 12.0, 23.0, 34.0], y.flatten().tolist()


if __name__ == "__main__":
    main("fla-core", reproduce)
