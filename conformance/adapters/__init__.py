"""The adapters that come with the suite, by name. Each is imported in its own worker process only."""

SHIPPED: dict[str, str] = {
    name: f"statescan.conformance.adapters.{name}" for name in ("reference", "fast", "fla", "causal_conv1d")
}
NULLS: tuple[str, ...] = ("zeros", "echo", "nothing", "refuses")
"""Null implementations (`statescan.conformance.adapters.null:NAME`): each must fail in every family."""
