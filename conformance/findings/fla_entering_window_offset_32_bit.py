"""Sequence n of a pack reads its entering window at n*D*W in 32 bits (MEM-4). Needs 9 GB of memory."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d

    D, W, N = 1024, 4, 2**20 + 1  # (N - 1)*D*W = 2^32, which in 32 bits is where sequence 0 starts
    windows = torch.zeros(N, D, W, dtype=torch.bfloat16)
    windows[0], windows[-1] = 5, 7
    offsets = torch.zeros(N + 1, dtype=torch.int64)
    offsets[-1] = 1  # one token, in the last sequence
    x, weight = torch.zeros(1, 1, D, dtype=torch.bfloat16), torch.zeros(D, W, dtype=torch.bfloat16)
    weight[:, W - 2] = 1
    with torch.no_grad():
        y, _ = causal_conv1d(x, weight, initial_state=windows, cu_seqlens=offsets)
    return 7.0, y[0, 0, 0].item()


if __name__ == "__main__":
    main("fla-core", reproduce)
