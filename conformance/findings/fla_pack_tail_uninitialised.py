"""Rows past the last offset are never written: outputs and gradients there are what the memory held (PACK-8, MEM-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d

    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1).requires_grad_()
    weight = torch.tensor([[10.0, 1.0]])
    y, _ = causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 2]))
    (gradient,) = torch.autograd.grad(y[:, :2].sum(), x)
    expected = [1.0, 12.0, 0.0], [11.0, 1.0, 0.0]
    return expected, (y.flatten().tolist(), gradient.flatten().tolist())


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
