"""A scan of no tokens stores the entering state through the address of an empty tensor (MEM-2, CHUNK-2)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import os

    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, state = torch.zeros(1, 0, 1, 1), torch.full((1, 1, 1, 1), 5.0)
    child = os.fork()
    if child == 0:
        found = mamba_chunk_scan_combined(
            x, x[..., 0], torch.zeros(1), x, x, 64, initial_states=state, return_final_states=True
        )
        os._exit(0 if found[1].item() == 5 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    expected = "exit code 0"
    return expected, f"exit code {code}"


if __name__ == "__main__":
    main("mamba-ssm", reproduce)
