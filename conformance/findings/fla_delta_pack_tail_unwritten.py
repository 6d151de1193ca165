"""Outputs and gradients of the delta kernels are not written past the last offset (PACK-8, MEM-5, GRAD-4)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    g, cu, found = torch.zeros(1, 3, 1), torch.tensor([0, 2]), []
    for kernel, gate in ((chunk_gated_delta_rule, g), (chunk_kda, g[..., None])):
        x = torch.ones(1, 3, 1, 1, requires_grad=True)
        o, _ = kernel(q=x, k=x, v=x, g=gate, beta=g + 1, scale=1.0, cu_seqlens=cu)
        (gradient,) = torch.autograd.grad(o[:, :2].sum(), x)
        found.append((o.flatten().tolist(), gradient.flatten().tolist()))
    expected = [([1.0, 1.0, 0.0], [3.0, 1.0, 0.0])] * 2
    return expected, found


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
