"""The backward pass of rms_norm_gated divides by the number of rows (NORM-2, GRAD-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    x = torch.zeros(0, 2, requires_grad=True)
    y = rms_norm_gated(x, torch.zeros(0, 2), torch.ones(2), None)
    try:
        found = f"shape {list(torch.autograd.grad(y.sum(), x)[0].shape)}"
    except ZeroDivisionError as error:
        found = f"ZeroDivisionError: {error}"
    expected = "shape [0, 2]"
    return expected, found


if __name__ == "__main__":
    main("fla-core", reproduce)
