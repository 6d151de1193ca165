"""With backend="cuda" the entering window is not read by the outputs, only by the final window (CONV-4, ERR-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.causal_conv1d.backends.cuda import ops

    # The package's own reference in place of its CUDA kernel, called with the same keywords.
    ops.causal_conv1d_fn_cuda = causal_conv1d_ref
    x, entering = torch.tensor([1.0, 2.0]).view(1, 2, 1), torch.tensor([[[0.0, 7.0]]])
    weight = torch.tensor([[10.0, 1.0]])
    y, _ = causal_conv1d(x, weight, initial_state=entering, backend="cuda")
    return [71.0, 12.0], y.flatten().tolist()


if __name__ == "__main__":
    main("fla-core", reproduce, also="causal-conv1d", or_refused=True)
