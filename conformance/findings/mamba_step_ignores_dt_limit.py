"""Mamba2.step does not clamp the step that Mamba2.forward clamps (SSD-6)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    from unittest.mock import patch

    import torch
    from mamba_ssm.modules import mamba2

    names = ("mamba_chunk_scan_combined", "selective_state_update")
    scan, step = (patch.object(mamba2, name, wraps=getattr(mamba2, name)) for name in names)
    with torch.no_grad(), scan as scan, step as step, patch.object(mamba2, "causal_conv1d_update", None):
        sizes = {"d_model": 8, "d_state": 1, "d_conv": 2, "expand": 1, "headdim": 8}
        layer = mamba2.Mamba2(**sizes, dt_limit=(0.0, 0.5), use_mem_eff_path=False, layer_idx=0)
        with patch.object(mamba2, "causal_conv1d_fn", None):
            layer(torch.ones(1, 2, 8))
        layer.step(torch.ones(1, 1, 8), *layer.allocate_inference_cache(1, 1, dtype=torch.float32))
    limits = [call.call_args.kwargs.get("dt_limit") for call in (scan, step)]
    expected = [(0.0, 0.5), (0.0, 0.5)]
    return expected, limits


if __name__ == "__main__":
    main("mamba-ssm", reproduce, also="transformers")
