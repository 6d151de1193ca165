"""The chunked kernels cast the entering state to float16, where it is infinite (NUM-4, GDN-6, KDA-1)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q = torch.tensor([0.25, 0.0], dtype=torch.float16).view(1, 1, 1, 2)
    state = torch.tensor([2.0**17, 0.0, 0.0, 0.0]).view(1, 1, 2, 2)
    zero = torch.zeros(1, 1, 1)
    o, final = chunk_gated_delta_rule(
        q, 0 * q, 0 * q, zero, zero, scale=1.0, initial_state=state, output_final_state=True
    )
    expected = (32768.0, 131072.0)
    return expected, (o[0, 0, 0, 0].item(), final[0, 0, 0, 0].item())


if __name__ == "__main__":
    main("fla-core", reproduce)
