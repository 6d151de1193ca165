"""One call of one operation: what goes in, what must come out, and what came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from statescan.goldens.tensors import DTYPES, NAMES
from statescan.spec.contract import FLOAT_TYPES, OPERATIONS, Argument, Result

Array = npt.NDArray[Any]
Axes = dict[str, int]


@dataclass(frozen=True)
class Gradient:
    """Gradients asked of a call: for these inputs, from these cotangents of results."""

    of: tuple[str, ...]
    cotangents: Mapping[str, Array]


@dataclass(frozen=True)
class Plan:
    """A tensor that a call must return: its name, element type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call: tensors by argument name (strides count), settings, and the results it must return.

    `installed` replaces the installed versions of packages for the length of the call (None: not installed). Of the
    tensors named `far`, one index of the first axis lies `FAR` elements behind the one before it.
    """

    op: str
    args: Mapping[str, Any]
    tensors: Mapping[str, Array]
    results: tuple[Plan, ...] = ()
    grad: Gradient | None = None
    installed: Mapping[str, str | None] = field(default_factory=dict)
    far: tuple[str, ...] = ()


FAR = 2**30
"""So far apart, in elements, that the offset of index 4, cut to 32 bits with or without a sign, is that of index 0. The
stride alone fits 32 bits: a compiler that looks at it finds no cause to widen the product."""


@dataclass(frozen=True)
class Reply:
    """What became of a call.

    `status`: ok, rejected, unsupported, error, shape, dtype, timeout or protocol. `outputs` holds the results and, as
    `after.<name>`, every input as it was when the call returned.
    """

    status: str
    outputs: Mapping[str, Array] = field(default_factory=dict)
    value: Any = None
    error: str = ""
    message: str = ""
    ms: float = 0.0


def bind_axes(op: str, tensors: Mapping[str, Array], args: Mapping[str, Any]) -> Axes:
    """Sizes of the axis letters of a well-formed call."""
    axes: Axes = {"M": int(args.get("num_householder", 1)), "N": 0}
    for argument in OPERATIONS[op].tensors:
        array = tensors.get(argument.name)
        if array is not None:
            for size, n in zip(axis_names(argument, array.ndim, args), array.shape, strict=False):
                if size.isalpha():
                    axes[size] = n
                elif size == "N+1":
                    axes["N"] = n - 1
    packed = any(argument.name == "cu_seqlens" and argument.optional for argument in OPERATIONS[op].tensors)
    if packed and tensors.get("cu_seqlens") is None:
        axes["batch"] = tensors[OPERATIONS[op].tensors[0].name].shape[0]
        if tensors.get("initial_windows") is None and tensors.get("initial_state") is None:
            ids = tensors.get("seq_idx")
            axes["N"] = axes["batch"] if ids is None else int(ids.max(initial=-1)) + 1
    return axes


def in_place(op: str, tensors: Mapping[str, Array]) -> list[str]:
    """Names of the given tensors that a call changes; a list of pools is given as `pools.0`, `pools.1` and so on."""
    return [name for argument in OPERATIONS[op].inout for name in tensors if name.partition(".")[0] == argument.name]


def axis_names(what: Argument | Result, rank: int, args: Mapping[str, Any]) -> tuple[str, ...]:
    """The axis letters of a tensor of this rank, its state layout minded; empty where no shape has the rank."""
    for shape in what.alternatives:
        if shape and shape[0] == "...":
            shape = (*(f"lead{i}" for i in range(rank - len(shape) + 1)), *shape[1:])
        if len(shape) == rank:
            swapped = args.get("state_layout") == "VK" and shape[-2:] == ("K", "V")
            return (*shape[:-2], "V", "K") if swapped else shape
    return ()


def plan_results(
    op: str, tensors: Mapping[str, Array], args: Mapping[str, Any], declared: Mapping[str, str], grad: Gradient | None
) -> tuple[Plan, ...]:
    """The tensors a call returns: those of the table, then `grad.<input>` where gradients are asked for.

    `declared` are the element types an implementation names for its outputs; `out` is the first result.
    """
    axes, plans = bind_axes(op, tensors, args), []
    for i, result in enumerate(OPERATIONS[op].results):
        if result.optional and not args.get("output_final_state", False):
            continue
        dtype = declared.get(result.name) or (declared.get("out") if i == 0 else None) or default_type(result, tensors)
        plans.append(Plan(result.name, dtype, _result_shape(op, result, tensors, axes, args)))
    if grad is not None:
        plans += [Plan(f"grad.{name}", NAMES[tensors[name].dtype], tensors[name].shape) for name in grad.of]
    return tuple(plans)


def default_type(result: Result, tensors: Mapping[str, Array]) -> str:
    """The element type the contract gives a result: that of an argument, or float32 (float64 for float64 inputs)."""
    named = tensors.get(result.like)
    if named is not None:
        return NAMES[named.dtype]
    if result.like in DTYPES and result.like not in FLOAT_TYPES:
        return result.like
    wide = any(array.dtype == np.float64 for array in tensors.values())
    return "f64" if wide else "f32"


def _result_shape(
    op: str, result: Result, tensors: Mapping[str, Array], axes: Axes, args: Mapping[str, Any]
) -> tuple[int, ...]:
    first = OPERATIONS[op].tensors[0].name if OPERATIONS[op].tensors else ""
    if op == "build_packed_seq_idx":
        return (1, int(args["total_tokens"]))
    if op == "get_cu_seqlens":
        return tensors["cu_seqlens_q_padded" if "cu_seqlens_q_padded" in tensors else "cu_seqlens_q"].shape
    if "..." in result.shape:
        return tensors[first].shape
    sizes = {**axes, "batch": axes.get("batch", 1), "1": 1, **_padded_sizes(tensors, args),
             **_shard_sizes(axes, args)}  # fmt: skip
    return tuple(sizes[size] if size in sizes else int(size) for size in result.shape)


def _padded_sizes(tensors: Mapping[str, Array], args: Mapping[str, Any]) -> Axes:
    """Sizes of the arrays that are padded for a graph: requests, tokens, chunks of both streams, snapshots."""
    if "padded_requests" not in args:
        return {}
    requests, tokens, copies = args["padded_requests"], args.get("padded_tokens", 0), args.get("num_householder") or 1
    chunk, given = args.get("chunk_size", 1), args.get("snapshot_capacity")
    most = tokens // chunk + requests
    return {
        "padded_requests": requests, "padded_requests+1": requests + 1, "padded_tokens": tokens, "max_chunks": most,
        "max_chunks+1": most + 1, "max_chunks_dp": tokens * copies // chunk + requests,
        "snapshot_capacity": tensors["snapshot_rows"].size if given is None and "snapshot_rows" in tensors
        else given or 0,
    }  # fmt: skip


def _shard_sizes(axes: Axes, args: Mapping[str, Any]) -> Axes:
    """Sizes of the arrays that have a row for each rank."""
    ranks = args.get("ranks", 0)
    if ranks < 1:
        return {}
    return {"ranks": ranks, "shard_tokens": args.get("total_tokens", 0) // ranks, "N+1": axes.get("N", 0) + 1}


def offsets_of(tensors: Mapping[str, Array], tokens: int) -> list[int]:
    """Segment offsets of a packed call, for naming a place; one segment where it gives neither offsets nor ids."""
    offsets, ids = tensors.get("cu_seqlens"), tensors.get("seq_idx")
    if offsets is not None:
        return [int(i) for i in offsets]
    if ids is not None:
        row = [int(i) for i in ids[0]]
        return [len([i for i in row if 0 <= i < n]) for n in range(max(row, default=-1) + 2)]
    return [0, tokens]


def strided(array: Array) -> Array:
    """The same numbers behind strides with gaps on every axis; the gaps hold NaN or the least integer."""
    wide = tuple(2 * n + 1 for n in array.shape)
    fill = np.nan if array.dtype.kind not in "iu" else np.iinfo(array.dtype).min
    base = np.full(wide, fill, array.dtype)
    view = base[tuple(slice(0, 2 * n, 2) for n in array.shape)]
    view[...] = array
    return view


def span(array: Array) -> Array:
    """The whole stretch of memory from an array's first to its last element, gaps included, one-dimensional."""
    if array.flags.c_contiguous or array.size == 0:
        return array.reshape(-1)
    length = 1 + sum(stride // array.itemsize * (n - 1) for n, stride in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (length,), (array.itemsize,))
