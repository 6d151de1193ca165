"""The oldest column of the final window is an input, and its gradient never reaches that input (CONV-10, GRAD-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d

    weight = torch.zeros(1, 2)
    x = torch.tensor([1.0, 2.0]).view(1, 2, 1).requires_grad_()
    _, final = causal_conv1d(x, weight, output_final_state=True)
    (gradient,) = torch.autograd.grad(final.sum(), x)
    expected = [1.0, 2.0], [1.0, 1.0]  # the window is x itself
    return expected, (final.flatten().tolist(), gradient.flatten().tolist())


if __name__ == "__main__":
    main("fla-core", reproduce)
