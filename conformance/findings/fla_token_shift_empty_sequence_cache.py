"""Token shift leaves the outgoing cache of an empty sequence unwritten (PACK-11, CONV-5, MEM-5)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.modules.token_shift import token_shift

    x, cache = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1), torch.tensor([[7.0], [8.0], [9.0]])
    _, last = token_shift(x, torch.tensor([0, 0, 1, 3]), cache, True)
    return [7.0, 1.0, 3.0], last.flatten().tolist()


if __name__ == "__main__":
    main("fla-core", reproduce)
