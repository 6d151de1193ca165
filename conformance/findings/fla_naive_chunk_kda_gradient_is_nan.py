"""naive_chunk_kda exponentiates before it masks, and its gradient is NaN for strong decays (GRAD-3, KDA-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

    x, g = torch.ones(1, 64, 1, 1, requires_grad=True), torch.zeros(1, 64, 1, 1)
    g[0, 5:7] = -200
    outputs = [kernel(x, x, x, g, g[..., 0], scale=1.0)[0] for kernel in (naive_recurrent_kda, naive_chunk_kda)]
    gradients = [torch.autograd.grad(o.sum(), x)[0] for o in outputs]
    expected = [False, False]
    return expected, [one.isnan().any().item() for one in gradients]


if __name__ == "__main__":
    main("fla-core", reproduce)
