"""The default beta has key heads where the kernel reads value heads (GDN-5, ERR-5, MEM-2)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    x, v, g = torch.ones(1, 3, 1, 1), torch.arange(1.0, 7.0).view(1, 3, 2, 1), torch.zeros(1, 3, 2)
    given, _ = fused_recurrent_gated_delta_rule(x, x, v, g=g, beta=torch.ones(1, 3, 2), scale=1.0)
    default, _ = fused_recurrent_gated_delta_rule(x, x, v, g=g, scale=1.0)
    expected = True
    return expected, torch.equal(default, given)


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
