"""The gradient of g is infinite in float16 where state times cotangent is over 65504 (GRAD-3, NUM-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    x, g = torch.zeros(1, 1, 1, 2, dtype=torch.float16), torch.zeros(1, 1, 1, requires_grad=True)
    state = torch.tensor([300.0, 0.0, 0.0, 0.0]).view(1, 1, 2, 2)
    _, final = chunk_gated_delta_rule(x, x, x, g, torch.zeros(1, 1, 1), initial_state=state, output_final_state=True)
    (gradient,) = torch.autograd.grad(300 * final[0, 0, 0, 0], g)
    expected = 90000.0
    return expected, gradient.item()


if __name__ == "__main__":
    main("fla-core", reproduce)
