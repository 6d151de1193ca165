"""fused_recurrent_kda reads K numbers of a dt_bias that its docstring gives one a head (GATE-3, MEM-2, ERR-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.kda import fused_recurrent_kda

    x, zero, bias = torch.zeros(1, 1, 1, 2), torch.zeros(1), torch.tensor([3.0, 100.0])[:1]
    _, state = fused_recurrent_kda(
        x, x, x[..., :1], x, x[..., 0], A_log=zero, dt_bias=bias, use_gate_in_kernel=True,
        initial_state=torch.ones(1, 1, 2, 1), output_final_state=True,
    )  # fmt: skip
    expected = [-3.0486, -3.0486]
    return expected, [round(one, 4) for one in state.log().flatten().tolist()]


if __name__ == "__main__":
    main("fla-core", reproduce, or_refused=True)
