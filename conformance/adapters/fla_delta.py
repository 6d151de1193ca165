"""fla-core's Gated Delta Net and Gated Delta Product in Triton, interpreted on a CPU.

The product has no recurrent kernel, so its updates are chunked too; it takes no float32 and one order of its states.
"""

from __future__ import annotations

from functools import partial

from statescan.conformance.adapters.delta import update
from statescan.conformance.adapters.fla_kernels import (
    BOTH_LAYOUTS,
    KEYS,
    OPERANDS,
    PROMISES,
    SLOTS,
    claim_chunked,
    claim_stepped,
    function,
    interpreted,
    types,
)

adapter = interpreted(
    "fla_delta", ["ops.gated_delta_rule", "ops.gated_delta_product"],
    "chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, chunk_gated_delta_product",
)  # fmt: skip

chunk_rule = function("ops.gated_delta_rule", "chunk_gated_delta_rule")
recurrent_rule = function("ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
chunk_product = partial(function("ops.gated_delta_product", "chunk_gated_delta_product"), num_householder=1)

RULES = ["heads.gva", "beta.double", "decay.zero", "l2norm.inside"]
# The product has as many value heads as others.
PRODUCT = ["beta.double", "decay.zero", "l2norm.inside", "householder:2", "householder:3", "householder:4"]

for _kind in OPERANDS:
    claim_chunked(adapter, "gated_delta_rule", chunk_rule, _kind, RULES, layouts=BOTH_LAYOUTS)
claim_stepped(adapter, "gated_delta_rule", recurrent_rule, RULES)
for _kind in ("bf16", "f16"):
    claim_chunked(adapter, "gated_delta_product", chunk_product, _kind, PRODUCT)
    adapter.op(
        "gated_delta_product_update", operand=OPERANDS[_kind], dtypes=[types(_kind, state_pool="f32")], limits=KEYS,
        features=[*SLOTS, "tokens.many", *PRODUCT, *PROMISES],
    )(update(chunk_product))  # fmt: skip
