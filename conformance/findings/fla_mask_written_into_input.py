"""ShortConvolution multiplies the mask into the caller's tensor, and NaN times 0 stays NaN (MEM-1, PACK-8)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import ShortConvolution

    layer, mask = ShortConvolution(1, 2, activation=None), torch.tensor([[0, 1, 1]])
    torch.nn.init.ones_(layer.weight)
    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
    layer(x, mask=mask)
    y, _ = layer(torch.tensor([float("nan"), 2.0, 3.0]).view(1, 3, 1), mask=mask)
    expected = [1.0, 2.0, 3.0], [0.0, 2.0, 5.0]
    return expected, (x.flatten().tolist(), y.flatten().tolist())


if __name__ == "__main__":
    main("fla-core", reproduce)
