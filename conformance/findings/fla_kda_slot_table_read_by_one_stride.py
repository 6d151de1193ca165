"""fused_recurrent_kda_fwd reads a transposed slot table as if it were contiguous (MEM-3, SPEC-2)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    one, slots, pool = torch.ones(1, 4, 1, 1), torch.tensor([[0, 1], [2, 3]]), torch.zeros(4, 1, 1, 1)
    fused_recurrent_kda_fwd(
        q=one, k=one, v=torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1), g=0 * one, beta=one[..., 0], scale=1.0,
        initial_state=pool, cu_seqlens=torch.tensor([0, 2, 4]), ssm_state_indices=slots.mT.contiguous().mT,
        num_accepted_tokens=torch.tensor([1, 1]),
    )  # fmt: skip
    expected = [1.0, 2.0, 3.0, 4.0]
    return expected, pool.flatten().tolist()


if __name__ == "__main__":
    main("fla-core", reproduce)
