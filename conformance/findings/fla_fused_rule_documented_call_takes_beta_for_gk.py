"""The call in the docstring of fused_recurrent_gated_delta_rule binds beta to gk (GDN-3, ERR-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    one = torch.ones(1, 1, 1, 1)
    g, beta = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.5)
    o, _ = fused_recurrent_gated_delta_rule(one, one, 6 * one, g, beta, initial_state=8 * one)
    expected = 7.0
    return expected, o.item()


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
