"""selective_state_update unpacks 0 where D or dt_bias is None (SSD-1, SSD-3, ERR-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    one, zero, found = torch.ones(1, 1, 1), torch.zeros(1, 1), []
    for more in ({"D": zero, "dt_bias": None}, {"D": None, "dt_bias": zero}):
        try:
            y = selective_state_update(0 * one[None], one, one, 0 * one, one, one, **more)
            found.append(y.item())
        except TypeError as error:
            found.append(f"TypeError: {error}")
    expected = [1.0, 1.0]
    return expected, found


if __name__ == "__main__":
    main("mamba-ssm", reproduce)
