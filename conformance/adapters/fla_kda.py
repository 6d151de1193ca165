"""fla-core's Kimi Delta Attention in Triton, interpreted on a CPU: apart from its other kernels, because it is slow.

The chunked form runs a program a token and head, which takes an interpreter some 50 ms: there it claims short packs
only, so that a run of the quick profile reaches its end.
"""

from __future__ import annotations

from statescan.conformance.adapters.fla_kernels import (
    BOTH_LAYOUTS,
    OPERANDS,
    claim_chunked,
    claim_stepped,
    function,
    interpreted,
)

adapter = interpreted("fla_kda", ["ops.kda"], "chunk_kda, fused_recurrent_kda")

RULES = ["heads.gva", "beta.double", "decay.zero", "l2norm.inside"]
LIMITS = {"T": {"max": 96}} if adapter.device == "cpu" else {}

for _kind in OPERANDS:
    claim_chunked(
        adapter, "kimi_delta_attention", function("ops.kda", "chunk_kda"), _kind, RULES, layouts=BOTH_LAYOUTS,
        limits=LIMITS,
    )  # fmt: skip
claim_stepped(adapter, "kimi_delta_attention", function("ops.kda", "fused_recurrent_kda"), RULES)
