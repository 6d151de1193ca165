"""The gradients of A_log and dt_bias add up what memory held at rows past the last offset (PACK-8, GRAD-4)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    A, bias, x = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True), torch.ones(1, 3, 1, 1)
    o, _ = chunk_gated_delta_rule(
        q=x, k=x, v=x, g=0 * x[..., 0], beta=x[..., 0] / 2, scale=1.0, cu_seqlens=torch.tensor([0, 2]),
        use_gate_in_kernel=True, A_log=A, dt_bias=bias,
    )  # fmt: skip
    gradients = torch.autograd.grad(o[:, :2].sum(), (A, bias))
    expected = [-0.0866, -0.0625]
    return expected, [round(one.item(), 4) for one in gradients]


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
