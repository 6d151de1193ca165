"""BailingHybridForgetGate returns log-decays in bfloat16 (GATE-6, NUM-2)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    from types import SimpleNamespace

    import torch
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridForgetGate

    sizes = {"linear_head_dim": 1, "linear_num_heads": 1, "hidden_size": 1}
    layer = BailingHybridForgetGate(SimpleNamespace(**sizes, kda_safe_gate=False, kda_lower_bound=None))
    for name, value in (("dt_bias", 1), ("A_log", 0), ("f_proj.weight", 1)):
        torch.nn.init.constant_(layer.get_parameter(name), value)
    layer.f_proj.bfloat16()
    g = layer(torch.full((1, 1, 1), 256.0, dtype=torch.bfloat16))
    expected = (-257.0, torch.float32)
    return expected, (g.item(), g.dtype)


if __name__ == "__main__":
    main("transformers", reproduce)
