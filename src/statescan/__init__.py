"""statescan."""
