"""The forget gate's unused branch overflows, and its gradient is NaN (GATE-2, GRAD-3)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    from types import SimpleNamespace

    import torch
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

    layer = KimiLinearForgetGate(SimpleNamespace(linear_head_dim=1, linear_num_heads=1, hidden_size=1))
    values = {"dt_bias": 0, "A_log": 0, "f_a_proj.weight": 1, "f_b_proj.weight": 1}
    for name, value in values.items():
        torch.nn.init.constant_(layer.get_parameter(name), value)
    x = torch.full((1, 1, 1), 100.0, requires_grad=True)
    g = layer(x)
    (gradient,) = torch.autograd.grad(g, x)
    expected = (-100.0, -1.0)
    return expected, (g.item(), gradient.item())


if __name__ == "__main__":
    main("transformers", reproduce)
