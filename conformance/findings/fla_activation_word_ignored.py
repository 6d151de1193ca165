"""An activation that no kernel knows means no activation at all (CONV-2, ERR-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d

    x, weight = torch.ones(1, 1, 1), torch.tensor([[0.0, 1.0]])
    y, _ = causal_conv1d(x, weight, activation="SiLU")
    return 0.7311, round(y.item(), 4)


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
