"""What the recurrent layers of a stack share, and where each layer's slab lies (STACK, LAYER).

A stack is a list of symbols, one a layer: M holds its recurrent mixer as `layer.mixer`, G as `layer.self_attention`,
every other symbol (attention, MLP, experts) has no recurrent state.
Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.ssm.ssm_inference.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statescan.spec.contract import (
    HeterogeneousStackError,
    ShapeError,
    SSMChunking,
    UnsupportedError,
)

MIXER_OF: dict[str, str] = {"M": "mixer", "G": "self_attention"}
"""The attribute that holds the recurrent mixer of a layer, by symbol."""


def ssm_chunking(
    layer_type_list: Sequence[str], layers: Sequence[Any], *, check: bool | None = None
) -> SSMChunking | None:
    """The chunking that every recurrent layer shares, or None where there is none (STACK-1, STACK-2).

    `layer_type_list` holds one symbol a layer and matches `layers` by position (STACK-4: ShapeError). A layer without
    its mixer is passed over. Layers of another symbol, or of another chunking, than the first recurrent one are
    refused, both named (STACK-3: HeterogeneousStackError).

    >>> from types import SimpleNamespace as Thing
    >>> mamba = Thing(mixer=Thing(chunk_size=128))
    >>> ssm_chunking(["*", "M", "M"], [Thing(), mamba, mamba])
    SSMChunking(chunk_size=128, inference_chunk_size=128, num_householder=0)
    """
    if len(layer_type_list) != len(layers):
        raise ShapeError(
            f"layer_type_list has {len(layer_type_list)} symbols and layers {len(layers)}: one for each (STACK-4)"
        )
    found: tuple[int, str, SSMChunking] | None = None
    for index, (symbol, layer) in enumerate(zip(layer_type_list, layers, strict=True)):
        mixer = getattr(layer, MIXER_OF[symbol], None) if symbol in MIXER_OF else None
        if mixer is None:
            continue
        chunking = read_chunking(mixer, index)
        if found is None:
            found = (index, symbol, chunking)
        elif (symbol, chunking) != found[1:]:
            raise HeterogeneousStackError(
                f"every SSM layer must share one chunking; layer {found[0]} has {found[1]} {tuple(found[2])} "
                f"but layer {index} has {symbol} {tuple(chunking)} (STACK-3)"
            )
    return None if found is None else found[2]


def read_chunking(mixer: Any, index: int) -> SSMChunking:
    """The chunking a mixer states of itself, with the fall-backs of STACK-5."""
    if getattr(mixer, "chunk_size", None) is None:
        raise UnsupportedError(f"layers[{index}] has a recurrent mixer without chunk_size (STACK-5)")
    inference = getattr(mixer, "ssm_inference_chunk_size", None)
    copies = getattr(mixer, "num_householder", None)
    return SSMChunking(mixer.chunk_size, mixer.chunk_size if inference is None else inference, copies or 0)


def layer_map(layer_type_list: Sequence[str], *, check: bool | None = None) -> list[int | None]:
    """The slab of each layer of a stage: recurrent layers counted from 0, None for the others (LAYER-2).

    Layer numbers of a mixer count from 1 within the stage: layer n finds `layer_map(...)[n - 1]`.

    >>> layer_map(["M", "*", "M", "-", "M"])
    [0, None, 1, None, 2]
    """
    slabs, found = 0, []
    for symbol in layer_type_list:
        found.append(slabs if symbol in MIXER_OF else None)
        slabs += symbol in MIXER_OF
    return found
