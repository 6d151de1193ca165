"""The golden vectors on the fast path, interpreted: every operation on a slot pool, with tokens in bfloat16.

`statescan run --impl fast` runs all of them in every type; this is the part that fits beside the other tests.
"""

from __future__ import annotations

import pytest
import torch

from statescan.conformance.adapters.fast import CHUNK, adapter
from statescan.conformance.cases import Missing, prepare
from statescan.fast.bench.check_gpu import narrowed
from statescan.goldens.regenerate import run_in_process
from statescan.goldens.store import load_vectors
from statescan.spec.contract import OPERATIONS

VECTORS = load_vectors()
ENDINGS = ("_prefill", "_update", "commit_accepted")
POOLED = [name for name, op in OPERATIONS.items() if op.family != "step" and name.endswith(ENDINGS)]
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="statescan.fast.bench.check_gpu runs them all on a GPU"),
]


@pytest.mark.parametrize("name", POOLED)
def test_vectors_pass(name: str) -> None:
    claims = [narrowed(claim, dtype, "VK" if "delta" in name and dtype == "f32" else "KV")
              for dtype in ("f32", "bf16") for claim in adapter.capabilities if claim["op"] == name]  # fmt: skip
    offered = [claim for claim in claims if claim is not None]
    passed = 0
    for vector in VECTORS.values():
        if vector["op"] != name:
            continue
        case = prepare(vector, VECTORS, offered[::-1])
        if isinstance(case, Missing):
            continue
        verdict = run_in_process(case, adapter)
        assert verdict.passed, f"{vector['id']}: {verdict.message}"
        passed += 1
    assert passed >= (1 if name == "commit_accepted" else 20), passed


@pytest.mark.parametrize("name", ["gated_delta_product_prefill", "ssd_prefill"])
def test_stories_stretched_to_the_edges_of_chunks(name: str) -> None:
    """Tokens first in their chunks, last in them, and several to a chunk: bfloat16 operands, exact states between."""
    claims = [{**claim, "limits": {"chunk": CHUNK}} for c in adapter.capabilities
              if c["op"] == name and (claim := narrowed(c, "bf16", "KV")) is not None]  # fmt: skip
    passed = 0
    for vector in VECTORS.values():
        if vector["op"] != name or "stretch" not in vector.get("lifts", []):
            continue
        case = prepare(vector, VECTORS, claims)
        if isinstance(case, Missing):
            continue
        verdict = run_in_process(case, adapter)
        assert verdict.passed, f"{vector['id']}: {verdict.message}"
        passed += 1
    assert passed >= 5, passed
