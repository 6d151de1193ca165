"""Tiny mixers that behave badly, each in one way: what the running of traces is tested with."""

from __future__ import annotations

import os

from statescan.conformance.adapter import Adapter
from statescan.reference.mixers import build_mixer


class Right:
    """The reference's two hooks and nothing else."""

    def __init__(self, described) -> None:
        self.mixer = build_mixer(described)

    def ssm_decode(self, *given):
        return self.mixer.ssm_decode(*given)

    def ssm_prefill(self, *given):
        return self.mixer.ssm_prefill(*given)


class Crashes(Right):
    def ssm_decode(self, *given):
        os._exit(7)


class WritesOffsets(Right):
    def ssm_prefill(self, rows, conv_state, ssm_state, context):
        y = super().ssm_prefill(rows, conv_state, ssm_state, context)
        context.mamba_metadata.cu_seqlens[-1] += 1
        return y


class WritesBeyond(Right):
    """Wrong in the slot that no row names."""

    def ssm_decode(self, rows, conv_state, ssm_state, slots, *entries):
        y = super().ssm_decode(rows, conv_state, ssm_state, slots, *entries)
        free = next((slot for slot in range(len(ssm_state)) if slot not in slots.tolist()), None)
        if free is not None:
            ssm_state[free] = 1
        return y


class Wide(Right):
    def ssm_prefill(self, *given):
        return super().ssm_prefill(*given).double()


class Nothing(Right):
    def ssm_prefill(self, *given):
        return None


class Late(Right):
    """Wrong in one number of one request."""

    def ssm_decode(self, rows, *given):
        y = super().ssm_decode(rows, *given)
        y[1:, -1] += 1
        return y


def _no_mixer(described):
    raise RuntimeError("no kernel of these sizes")


def _adapter(make, **claims) -> Adapter:
    adapter = Adapter("mixers", "0", arrays="torch")
    adapter.mixer(**{"kinds": ["gdn"], "operand": "f64", **claims})(make)
    return adapter


right, crashes, writes_offsets, writes_beyond = map(_adapter, (Right, Crashes, WritesOffsets, WritesBeyond))
wide, nothing, late, unmade = map(_adapter, (Wide, Nothing, Late, _no_mixer))
decode_only = _adapter(Right, offers=["ssm_decode"])
narrow_pools = _adapter(Right, dtypes=[{"zxBCdt": "bf16", "conv_state": "bf16", "ssm_state": "bf16"}])
narrow_operands = _adapter(Right, operand="bf16")
double = _adapter(Right, dtypes=[{name: "f64" for name in ("zxBCdt", "conv_state", "ssm_state")}])
no_drafts = _adapter(Right, lacks=["tokens.many"])
key_of_two = _adapter(Right, limits={"key_dim": {"min": 2, "max": 2}})
no_keys = _adapter(Right, limits={"key_dim": {"max": 0}})
