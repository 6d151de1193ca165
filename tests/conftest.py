"""Where there is no GPU, kernels are interpreted: Triton reads this switch when it is imported, so it comes first.

An adapter's own process sets what it needs by itself.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
