"""Triton kernels: they know tensors, strides and index arrays, never mixers, requests or contexts."""
