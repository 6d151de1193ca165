"""BambaModel counts the positions of every piece from 0 (CONT-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from transformers import BambaConfig, BambaModel, DynamicCache

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "mamba_n_heads": 2}
    config = BambaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, attn_layer_indices=[0], mamba_d_head=8)
    model, found, cache = BambaModel(config).eval(), [], DynamicCache(config=config)
    model.rotary_emb.register_forward_pre_hook(
        lambda module, args, given: found.append(given["position_ids"][0].tolist()), with_kwargs=True
    )
    for piece in ([[1, 2, 3]], [[4, 5]]):
        model(torch.tensor(piece), cache=cache, use_cache=True)
    expected = [[0, 1, 2], [3, 4]]
    return expected, found


if __name__ == "__main__":
    main("transformers", reproduce)
