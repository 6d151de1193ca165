"""The gates' softplus is log(1 + exp(x)) in float32, which is 0 below -16.6 (GATE-1, GATE-3)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate
    from fla.ops.kda.gate import fused_kda_gate

    x, A_log = torch.full((1, 1, 1), -18.0), torch.full((1,), 16.0)
    g, of_channel = fused_gdn_gate(x, A_log), fused_kda_gate(x[..., None], A_log)
    expected = (-0.1353, -0.1353)
    return expected, (round(g.item(), 4), round(of_channel.item(), 4))


if __name__ == "__main__":
    main("fla-core", reproduce)
