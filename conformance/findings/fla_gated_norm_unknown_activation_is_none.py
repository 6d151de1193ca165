"""rms_norm_gated with a misspelt activation does not gate (NORM-2, ERR-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    x = torch.tensor([[3.0, 4.0]])
    y = rms_norm_gated(x, torch.zeros(1, 2), torch.ones(2), None, activation="Silu", eps=0.0)
    expected = [0.0, 0.0]
    return expected, [round(one, 4) for one in y.flatten().tolist()]


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
