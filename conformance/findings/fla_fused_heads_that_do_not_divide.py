"""The recurrent kernels take 3 value heads over 2 key heads and read the next token's keys (GDN-5, ERR-5, MEM-2)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, v = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 2, 2, 1), torch.ones(1, 2, 3, 1)
    o, _ = fused_recurrent_gated_delta_rule(q, q, v, g=torch.zeros(1, 2, 3), beta=torch.ones(1, 2, 3), scale=1.0)
    expected = "no head from another token"
    return expected, f"head 2 of token 0: {o[0, 0, 2, 0].item()}, with the key of token 1"


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
