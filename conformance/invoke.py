"""Run one call on one adapter, in this process: arrays converted, exceptions turned into statuses, results checked."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from statescan.conformance.adapter import Adapter, Unsupported
from statescan.conformance.calls import FAR, Array, Call, Reply, span
from statescan.conformance.hooks import HOOKS, MIXIN, hook_arguments
from statescan.conformance.replay_toy import run_toy
from statescan.goldens.tensors import DTYPES, NAMES
from statescan.spec.contract import ERRORS, OPERATIONS, PACKED_SEQ_FIELDS, PackedSeqParams

_REFUSALS = {error.__name__ for error in ERRORS}
NOTHING = "None"
"""The `error` of a reply whose call returned no tensor where a result belongs."""


def invoke(adapter: Adapter, call: Call) -> Reply:
    """Run `call`; the reply holds its results and every input as the call left it."""
    hook = call.op in (*HOOKS, MIXIN)
    function = getattr(adapter.built, call.op, None) if hook else adapter.operations.get(call.op)
    if function is None:
        return Reply("unsupported", message=call.op)
    started = time.perf_counter()
    try:
        with _installed(call.installed):
            results, value = (_run_hook if hook else _run)(adapter, function, call)
    except Unsupported as error:
        return Reply("unsupported", message=error.need)
    except Exception as error:  # whatever an implementation raises is a result
        status = "rejected" if type(error).__name__ in _REFUSALS else "error"
        return Reply(status, _after(call), error=type(error).__name__, message=str(error)[:2000])
    ms = (time.perf_counter() - started) * 1e3
    for plan in call.results:
        got = results.get(plan.name)
        if got is None:
            return Reply("shape", _after(call), error=NOTHING, message=f"{plan.name} is None, a tensor expected")
        if got.shape != plan.shape:
            said = f"{plan.name} has shape {list(got.shape)}, {list(plan.shape)} expected"
            return Reply("shape", _after(call), message=said)
        if NAMES.get(got.dtype) != plan.dtype:
            return Reply("dtype", _after(call), message=f"{plan.name} has type {got.dtype}, {plan.dtype} expected")
    return Reply("ok", {**results, **_after(call)}, value, ms=ms)


def _after(call: Call) -> dict[str, Array]:
    return {f"after.{name}": array for name, array in call.tensors.items()}


def _run(adapter: Adapter, function: Any, call: Call) -> tuple[dict[str, Array], Any]:
    op = OPERATIONS[call.op]
    to, back = (to_torch, from_torch) if adapter.arrays == "torch" else (_same, _same)
    apart = {name: far_apart(call.tensors[name]) for name in call.far}
    tensors = {name: to(array, adapter.device) for name, array in {**call.tensors, **apart}.items()}
    given = _arguments(call, tensors)
    if call.grad is not None and adapter.arrays == "torch":
        return _torch_grad(function, call, given, adapter.device), None
    try:
        returned = function(**given)
    finally:
        for name, array in apart.items():
            call.tensors[name][...] = array
        _bring_back(adapter, call, tensors)
    if not op.results:
        return {}, list(returned) if isinstance(returned, tuple) else returned
    parts = returned if isinstance(returned, tuple) else (returned,)
    results = {r.name: back(part, "cpu") for r, part in zip(op.results, parts, strict=False) if part is not None}
    if call.grad is not None:
        cotangents = dict(call.grad.cotangents)
        if call.op not in adapter.gradients:
            raise Unsupported("grad")
        gradients = adapter.gradients[call.op](cotangents, **given)
        results.update({f"grad.{name}": gradients[name].astype(call.tensors[name].dtype) for name in call.grad.of})
    return results, None


def _run_hook(adapter: Adapter, function: Any, call: Call) -> tuple[dict[str, Array], Any]:
    to, back = (to_torch, from_torch) if adapter.hook_arrays == "torch" else (_same, _same)
    tensors = {name: to(array, adapter.device) for name, array in call.tensors.items()}
    value = None
    try:
        if "toy" in call.args:
            out, value = run_toy(adapter.built, call.args["toy"], tensors, lambda tensor: back(tensor, "cpu"))
        else:
            if call.op == MIXIN:
                adapter.built.layer_number = call.args["layer_number"]
            out = function(*hook_arguments(call.op, tensors, call.args))
    finally:
        _bring_back(adapter, call, tensors)
    first = out[0] if isinstance(out, tuple) else out
    return {plan.name: np.asarray(back(first, "cpu")) for plan in call.results if first is not None}, value


def far_apart(array: Array) -> Array:
    """The same numbers with `FAR` elements from one index of the first axis to the next.

    The memory between is asked for and never touched, so that it takes none on a CPU; `Unsupported` where even that is
    refused.
    """
    step = FAR * array.itemsize
    try:
        memory = mmap.mmap(-1, (len(array) - 1) * step + max(array[0].nbytes, 1), flags=_UNTOUCHED)
    except (OSError, ValueError, OverflowError) as error:
        raise Unsupported("offsets.64") from error
    steps = (step, *np.empty(array.shape[1:], array.dtype).strides)
    view = np.lib.stride_tricks.as_strided(np.frombuffer(memory, array.dtype), array.shape, steps)
    view[...] = array
    return view


_UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


def _bring_back(adapter: Adapter, call: Call, tensors: Mapping[str, Any]) -> None:
    """What a device holds after a call, a refused one too, into the arrays that are compared."""
    if adapter.device != "cpu":
        for name, array in call.tensors.items():
            array[...] = from_torch(tensors[name], "cpu")


def _arguments(call: Call, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the operation; absent optional tensors that come before a required one are None."""
    op = OPERATIONS[call.op]
    fields = {name: tensors[name] for name in PACKED_SEQ_FIELDS if name in tensors}
    given: dict[str, Any] = {} if op.family == "packed" else _with_lists(tensors)
    required = [i for i, argument in enumerate(op.tensors) if not argument.optional]
    # on the host settings have places too, behind the tensors
    placed = len(op.tensors) if op.family == "host" else max(required, default=0)
    for argument in op.tensors[:placed]:
        given.setdefault(argument.name, None)
    settings = dict(call.args)
    params = settings.pop("params", {})
    if any(argument.name == "packed_seq_params" for argument in op.arguments):
        given["packed_seq_params"] = PackedSeqParams(**fields, **params)
    if "layers" in settings:
        settings["layers"] = [_thing(layer) for layer in settings["layers"]]
    return {**given, **settings}


def _thing(described: Any) -> Any:
    """An object with the attributes that a JSON object describes; anything else as it is."""
    if isinstance(described, Mapping):
        return SimpleNamespace(**{name: _thing(value) for name, value in described.items()})
    return described


def _with_lists(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by argument; `pools.0`, `pools.1` and so on are the members of one list."""
    given = {name: tensor for name, tensor in tensors.items() if "." not in name}
    for name in sorted((name for name in tensors if "." in name), key=lambda name: int(name.partition(".")[2])):
        given.setdefault(name.partition(".")[0], []).append(tensors[name])
    return given


def _torch_grad(function: Any, call: Call, given: dict[str, Any], device: str) -> dict[str, Array]:
    import torch

    assert call.grad is not None
    leaves = {name: given[name].detach().clone().requires_grad_() for name in call.grad.of}
    returned = function(**{**given, **leaves})
    parts = returned if isinstance(returned, tuple) else (returned,)
    results = {r.name: part for r, part in zip(OPERATIONS[call.op].results, parts, strict=False) if part is not None}
    wanted = [name for name in call.grad.cotangents if results[name].requires_grad]
    gradients = torch.autograd.grad(
        [results[name] for name in wanted], list(leaves.values()),
        [to_torch(call.grad.cotangents[name], device).to(results[name].dtype) for name in wanted], allow_unused=True,
    )  # fmt: skip
    found = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }
    return {
        **{name: from_torch(part.detach(), "cpu") for name, part in results.items()},
        **{f"grad.{name}": from_torch(part, "cpu") for name, part in found.items()},
    }


def _same(array: Any, device: str) -> Any:
    return array


def to_torch(array: Array, device: str) -> Any:
    """A tensor over the same memory (a copy with the same strides on a device)."""
    import torch

    if array.dtype == DTYPES["bf16"]:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    if device == "cpu":
        return tensor
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def from_torch(tensor: Any, device: str) -> Array:
    """A tensor as an array, over the same memory where it lies on a CPU."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.contiguous().view(torch.int16).numpy().view(DTYPES["bf16"]))
    return np.asarray(tensor.numpy())


@contextmanager
def _installed(versions: Mapping[str, str | None]) -> Iterator[None]:
    """Let `importlib.metadata` answer as if these versions were installed."""
    if not versions:
        yield
        return
    real = metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return real(name)
        found = versions[name]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    with mock.patch.object(metadata, "version", version):
        yield

def isolated(call: Call) -> Call:
    """The call on copies of its tensors with the same strides, so that an in-process model cannot change the story."""
    return replace(call, tensors={name: _copy(array) for name, array in call.tensors.items()})


def _copy(array: Array) -> Array:
    whole = span(array).copy()
    return np.lib.stride_tricks.as_strided(whole, array.shape, array.strides) if array.size else array.copy()
