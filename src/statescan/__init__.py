"""statescan: specification, golden vectors, conformance suite and kernels for recurrent-state sequence mixers."""

__version__ = "0.1.0"
