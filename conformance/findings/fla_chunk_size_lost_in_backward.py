"""causal_conv1d_bwd recomputes the sums with another chunk size than its chunk table has (GRAD-1, CHUNK-4)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.causal_conv1d import causal_conv1d_bwd

    x = dy = torch.full((1, 100, 1), 64.0)  # silu is linear there: its slope is 1
    dx, dw, *_ = causal_conv1d_bwd(
        x, dy, None, weight=torch.tensor([[0.0, 1.0]]), activation="silu", cu_seqlens=torch.tensor([0, 100]),
        chunk_size=128,
    )  # fmt: skip
    expected = [64.0, 64.0, 64.0, 64.0], [99 * 64.0**2, 100 * 64.0**2]
    return expected, (dx.flatten()[[0, 63, 64, 99]].tolist(), dw.flatten().tolist())


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
