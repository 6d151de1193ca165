"""causal_conv1d_update_ref stores the window rounded to the type of the weights (SLOT-1, CONV-5, NUM-2)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_update_ref

    window = torch.tensor([[[257.0, 258.0, 259.0]]])
    weight = torch.ones(1, 2, dtype=torch.bfloat16)
    causal_conv1d_update_ref(torch.tensor([[261.0]]), window, weight)
    return [258.0, 259.0, 261.0], window.flatten().tolist()


if __name__ == "__main__":
    main("causal-conv1d", reproduce)
