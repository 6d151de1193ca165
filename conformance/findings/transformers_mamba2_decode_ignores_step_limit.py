"""Mamba2Mixer does not clamp the step of a single token (SSD-6, CONT-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from transformers import DynamicCache, Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes = {"num_heads": 1, "head_dim": 2, "hidden_size": 1, "expand": 2, "state_size": 1, "n_groups": 1}
    config = Mamba2Config(**sizes, num_hidden_layers=1, conv_kernel=2, time_step_limit=(0.0, 0.5), use_conv_bias=False)
    layer, x, found = Mamba2Mixer(config, 0).eval(), torch.ones(1, 2, 1), []
    for name, value in (("dt_bias", 4), ("A_log", -30), ("D", 0), ("in_proj.weight", 1), ("conv1d.weight", 1)):
        torch.nn.init.constant_(layer.get_parameter(name), value)
    for pieces in ([x], [x[:, :1], x[:, 1:]]):
        cache = DynamicCache(config=config)
        for piece in pieces:
            layer(piece, cache=cache)
        found.append(round(cache.get_recurrent_state(0, state_idx=0)[0, 0, 0, 0].item(), 4))
    expected = [1.8188, 1.8188]
    return expected, found


if __name__ == "__main__":
    main("transformers", reproduce)
