"""An empty sequence consumes no id, so every later sequence gets the id of the one before it (PACK-2, PACK-11)."""

from typing import Any

from statescan.conformance.findings import main


def reproduce() -> tuple[Any, Any]:
    import torch
    from fla.ops.utils import prepare_sequence_ids, prepare_token_indices

    offsets = torch.tensor([0, 2, 2, 4])
    expected = [0, 0, 2, 2], [[0, 0], [0, 1], [2, 0], [2, 1]]
    return expected, (prepare_sequence_ids(offsets).tolist(), prepare_token_indices(offsets).tolist())


if __name__ == "__main__":
    main("fla-core", reproduce)
