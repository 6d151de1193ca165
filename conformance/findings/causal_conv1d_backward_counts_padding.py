"""The CUDA kernel gives rows with id -1 the output 0 and then a gradient that counts them (PACK-8, GRAD-4).

Needs the compiled extension and a GPU.
"""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from causal_conv1d import causal_conv1d_fn

    x = torch.tensor([1.0, 2.0, 5.0]).view(1, 3, 1).repeat(1, 1, 8).requires_grad_()  # channels come in eights
    weight = torch.tensor([[10.0, 1.0]]).repeat(8, 1).requires_grad_()
    y = causal_conv1d_fn(x.mT, weight, seq_idx=torch.tensor([[0, 0, -1]], dtype=torch.int32))
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    expected = [1.0, 12.0, 0.0], [11.0, 1.0, 0.0], [1.0, 3.0]
    return expected, (y[0, 0].tolist(), dx[0, :, 0].tolist(), dw[0].tolist())


if __name__ == "__main__":
    main("causal-conv1d", reproduce, compiled=True)
