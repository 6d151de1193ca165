"""causal_conv1d_varlen_states_ref fails where a sequence has no tokens (PACK-11, CONV-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states_ref

    x, offsets = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0, 2])
    try:
        states = causal_conv1d_varlen_states_ref(x, offsets, 2).tolist()
    except RuntimeError as error:
        states = f"RuntimeError: {error}"
    return [[[0.0, 0.0]], [[1.0, 2.0]]], states


if __name__ == "__main__":
    main("causal-conv1d", reproduce)
