"""The slow, plain reference: float64 definitions written straight from the specification. Imports without torch."""
