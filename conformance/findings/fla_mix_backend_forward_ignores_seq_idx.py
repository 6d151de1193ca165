"""With backend="mix" the forward pass ignores `seq_idx`, which the backward pass obeys (PACK-6, PACK-7)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d

    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
    ids = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    y, _ = causal_conv1d(x, torch.tensor([[10.0, 1.0]]), backend="mix", seq_idx=ids)
    return [1.0, 12.0, 3.0], y.flatten().tolist()


if __name__ == "__main__":
    main("fla-core", reproduce, also="causal-conv1d")
