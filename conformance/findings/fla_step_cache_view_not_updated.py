"""One token with a cache that is a view: the update goes into a copy, and the cache stays as it was (SLOT-3, MEM-3)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import ShortConvolution

    layer = ShortConvolution(2, 2, activation=None)
    torch.nn.init.ones_(layer.weight)
    cache = torch.zeros(1, 2, 2).mT  # [N, D, W], kept in memory as [N, W, D]
    with torch.no_grad():
        layer(torch.tensor([[[1.0, 2.0]]]), cache=cache)
        y, _ = layer(torch.tensor([[[10.0, 20.0]]]), cache=cache)
    expected = [11.0, 22.0], [[1.0, 10.0], [2.0, 20.0]]
    return expected, (y.flatten().tolist(), cache[0].tolist())


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
