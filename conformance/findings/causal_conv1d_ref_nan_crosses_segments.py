"""causal_conv1d_ref multiplies other segments by 0, so their NaN and inf come through (PACK-6, PACK-8, GRAD-4)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref

    nan, weight = float("nan"), torch.tensor([[10.0, 1.0]], requires_grad=True)
    x = torch.tensor([1.0, nan, 3.0, 4.0]).view(1, 1, 4)
    y = causal_conv1d_ref(x, weight, seq_idx=torch.tensor([[0, 0, 1, 1]]))
    x = torch.tensor([1.0, 2.0, nan]).view(1, 1, 3)  # the last row is padding
    z = causal_conv1d_ref(x, weight, seq_idx=torch.tensor([[0, 0, -1]]))
    (gradient,) = torch.autograd.grad(z.sum(), weight)
    expected = [1.0, nan, 3.0, 34.0], [1.0, 3.0]
    return expected, (y.flatten().tolist(), gradient.flatten().tolist())


if __name__ == "__main__":
    main("causal-conv1d", reproduce)
