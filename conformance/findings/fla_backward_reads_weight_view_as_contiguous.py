"""causal_conv1d_bwd reads a strided weight in memory order: the gradient is that of another filter (MEM-3)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d_bwd

    x = dy = torch.ones(1, 2, 2)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()  # rows [1, 3] and [2, 4]
    dx, *_ = causal_conv1d_bwd(x, dy, None, weight=weight)
    return [[[4.0, 6.0], [3.0, 4.0]]], dx.tolist()


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
