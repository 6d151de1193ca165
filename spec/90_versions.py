# ---
# jupyter:
#   ruff: noqa:N999
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Installed versions
#
# Packed sequences need kernels that reset at boundaries, and these came with certain versions of two packages:
# `causal_conv1d` for the convolution and `mamba_ssm` for the scan of Mamba2. Two functions say whether what is
# installed is enough. Both return `(True, None)` or `(False, reason)`, and never raise.

# %%
from contextlib import contextmanager
from importlib import metadata
from unittest import mock

from statescan.conformance.mutants import mutant
from statescan.reference.packed import check_fla_sequence_packing_support, check_mamba_sequence_packing_support


@contextmanager
def installed(**versions):
    """Pretend that exactly these packages are installed."""

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    with mock.patch.object(metadata, "version", version):
        yield


# %% [markdown]
# (CAP-1)=
# ## CAP-1  The convolution from 1.4.0 on
#
# :::{clause} CAP-1
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, check_fla_sequence_packing_support
# :applies: check_fla_sequence_packing_support
# :observable: value, text
# :::
#
# The answer for mixers backed by flash-linear-attention MUST be `(True, None)` with `causal_conv1d` of at least 1.4.0,
# and False with the reason `"causal_conv1d >= 1.4.0 is required for packed sequences"` otherwise.
#
# Example. Version `1.4.0` -> `(True, None)`; version `1.3.9`, and none at all, -> False with that reason.
#
# Not this. Newer than the minimum is asked for: `1.4.0` is refused, `1.4.1` is not. Fault: gate-off-by-one-version.
#
# Why. Before 1.4.0 the convolution takes no ids, so every document reads its neighbour. Callers show the reason to
# their users, so its text is part of the answer.

# %%
REASON = (False, "causal_conv1d >= 1.4.0 is required for packed sequences")
with installed(causal_conv1d="1.4.0"):
    assert check_fla_sequence_packing_support() == (True, None)
with installed(causal_conv1d="1.3.9"):
    assert check_fla_sequence_packing_support() == REASON
with installed():
    assert check_fla_sequence_packing_support() == REASON

wrong = mutant("gate-off-by-one-version")
with installed(causal_conv1d="1.4.0"):
    assert wrong["check_fla_sequence_packing_support"]() == REASON
with installed(causal_conv1d="1.4.1"):
    assert wrong["check_fla_sequence_packing_support"]() == (True, None)

# %% [markdown]
# (CAP-2)=
# ## CAP-2  The scan package is not asked
#
# :::{clause} CAP-2
# :level: MUST NOT
# :since: 0.1
# :source: packed_seq_helpers, check_fla_sequence_packing_support
# :applies: check_fla_sequence_packing_support
# :observable: value
# :::
#
# The answer for mixers backed by flash-linear-attention MUST NOT depend on `mamba_ssm`.
#
# Example. `causal_conv1d` `1.4.0` and no `mamba_ssm` -> `(True, None)`.
#
# Not this. The scan package is asked for as well: False, `"mamba_ssm >= 2.0.0 is required"`. Fault:
# scan-package-asked-too.
#
# Why. Their scans reset by offsets on their own. A package that is never called would have to be built first.

# %%
with installed(causal_conv1d="1.4.0"):
    assert check_fla_sequence_packing_support() == (True, None)

wrong = mutant("scan-package-asked-too")
with installed(causal_conv1d="1.4.0"):
    assert wrong["check_fla_sequence_packing_support"]() == (False, "mamba_ssm >= 2.0.0 is required")

# %% [markdown]
# (CAP-3)=
# ## CAP-3  Mamba2 asks for a stricter pair
#
# :::{clause} CAP-3
# :level: MUST
# :since: 0.1
# :source: packed_seq_helpers, check_fla_sequence_packing_support, last paragraph
# :applies: check_mamba_sequence_packing_support
# :observable: value, text
# :::
#
# For Mamba2 both `causal_conv1d` and `mamba_ssm` MUST be at least 1.5.3.post1 and 2.2.6.post3 for inference, 1.4.0 and
# 2.0.0 for training; the reason names the first that is not, the convolution before the scan.
#
# Example. Nothing installed -> False, `"causal_conv1d >= 1.5.3.post1 is required"`. With `causal_conv1d` `1.4.0` and
# `mamba_ssm` `2.0.0`, training has `(True, None)` and inference the same reason.
#
# Not this. The scan is checked first, and with nothing installed the reason is
# `"mamba_ssm >= 2.2.6.post3 is required"`. Fault: scan-checked-first.
#
# Why. Two people with the same installation must read the same reason, or they install different things.

# %%
CONV, SCAN = "causal_conv1d >= 1.5.3.post1 is required", "mamba_ssm >= 2.2.6.post3 is required"
with installed():
    assert check_mamba_sequence_packing_support() == (False, CONV)
with installed(causal_conv1d="1.4.0", mamba_ssm="2.0.0"):
    assert check_mamba_sequence_packing_support(for_inference_not_training=False) == (True, None)
    assert check_mamba_sequence_packing_support() == (False, CONV)
with installed(causal_conv1d="1.5.3.post1", mamba_ssm="2.2.6.post2"):
    assert check_mamba_sequence_packing_support() == (False, SCAN)
with installed(causal_conv1d="1.10.0", mamba_ssm="2.2.6.post3"):
    assert check_mamba_sequence_packing_support() == (True, None)

wrong = mutant("scan-checked-first")
with installed():
    assert wrong["check_mamba_sequence_packing_support"]() == (False, SCAN)
