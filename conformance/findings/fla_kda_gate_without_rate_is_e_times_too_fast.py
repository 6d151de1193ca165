"""fused_kda_gate takes exp(1) for a missing A_log (GATE-3, ERR-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.kda.gate import fused_kda_gate

    g = fused_kda_gate(torch.full((1, 1, 1, 1), 30.0))
    expected = -30.0
    return expected, round(g.item(), 4)


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
