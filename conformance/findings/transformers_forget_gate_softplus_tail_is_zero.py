"""The forget gate's softplus is log(1 + exp(x)) in float32, which is 0 below -16.6 (GATE-3)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    from types import SimpleNamespace

    import torch
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

    layer = KimiLinearForgetGate(SimpleNamespace(linear_head_dim=1, linear_num_heads=1, hidden_size=1))
    values = {"dt_bias": 0, "A_log": 16, "f_a_proj.weight": 1, "f_b_proj.weight": 1}
    for name, value in values.items():
        torch.nn.init.constant_(layer.get_parameter(name), value)
    g = layer(torch.full((1, 1, 1), -18.0))
    expected = -0.1353
    return expected, round(g.item(), 4)


if __name__ == "__main__":
    main("transformers", reproduce)
