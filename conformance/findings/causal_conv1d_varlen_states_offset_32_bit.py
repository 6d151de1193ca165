"""causal_conv1d_varlen_states addresses rows in 32 bits with int32 offsets (MEM-4). Needs 9 GB of memory."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states

    T, D = 2**22 + 1, 1024  # the last row starts at element 2^32, which in 32 bits is where row 0 starts
    x = torch.zeros(T, D, dtype=torch.bfloat16)
    x[0], x[-1] = 5, 7
    # the function selects its GPU first, also where there is none
    with nullcontext() if torch.cuda.is_available() else patch("torch.cuda.device", nullcontext):
        states = causal_conv1d_varlen_states(x, torch.tensor([T - 1, T], dtype=torch.int32), 1)
    return 7.0, states[0, 0, 0].item()


if __name__ == "__main__":
    main("causal-conv1d", reproduce)
