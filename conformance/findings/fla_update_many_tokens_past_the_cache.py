"""causal_conv1d_update takes three tokens for a cache of one sequence and writes behind that cache (MEM-2, ERR-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d_update

    pool = torch.zeros(3, 1, 2)
    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
    y, _ = causal_conv1d_update(x, pool[:1], weight=torch.tensor([[10.0, 1.0]]))
    expected = [1.0, 12.0, 23.0], [[2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
    return expected, (y.flatten().tolist(), pool[:, 0].tolist())


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
