"""The naive delta product joins the outputs of segments and drops padding rows (PACK-8, MEM-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    x, zero = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1)
    o, _ = naive_recurrent_gated_delta_product(x, x, x, zero, zero + 1, 1.0, cu_seqlens=torch.tensor([0, 2]))
    expected = [1, 3, 1, 1]
    return expected, list(o.shape)


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
