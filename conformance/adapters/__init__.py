"""The adapters that come with the suite, by name. Each is imported in its own worker process only."""

SHIPPED: dict[str, str] = {
    name: f"statescan.conformance.adapters.{name}"
    for name in ("reference", "fast", "fla", "fla_delta", "fla_kda", "fla_naive", "causal_conv1d", "mamba_ssm",
                 "transformers")
}  # fmt: skip
NULLS: tuple[str, ...] = ("zeros", "echo", "nothing", "refuses")
"""Null implementations (`statescan.conformance.adapters.null:NAME`): each must fail in every family."""
