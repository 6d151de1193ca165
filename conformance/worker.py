"""The child process of one in-process adapter: `python -m statescan.conformance.worker MODULE:OBJECT`.

Speaks the protocol on the file descriptor that was its standard output and points that descriptor at standard error,
so that a library that prints cannot break it. Whatever an adapter must set for its whole process (the interpreter
switch, module stubs) it sets here and nowhere else.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from statescan.conformance.adapter import Adapter, Unsupported, as_adapter
from statescan.conformance.calls import Call, Gradient, Plan, span
from statescan.conformance.invoke import invoke
from statescan.conformance.transport import element_strides, open_tensors

Message = dict[str, Any]


def main(target: str) -> None:
    """Answer messages until `bye` or the end of input."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    adapter, folder = None, Path()
    for line in sys.stdin:
        message = json.loads(line)
        if message["cmd"] == "hello":
            folder = Path(message["scratch"])
            adapter = load(target)
            answer = _hello(adapter)
        elif message["cmd"] == "capabilities" and adapter is not None:
            answer = {"ok": True, "capabilities": adapter.capabilities}
        elif message["cmd"] == "setup" and adapter is not None:
            answer = answer_setup(adapter, message["mixer"])
        elif message["cmd"] == "run" and adapter is not None:
            answer = _answer(adapter, folder, message)
        else:
            answer = {"ok": True}
        out.write(json.dumps({"id": message["id"], **answer}) + "\n")
        out.flush()
        if message["cmd"] == "bye":
            return


def load(target: str) -> Adapter:
    """The adapter that `MODULE:OBJECT` names."""
    module, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())
    return as_adapter(getattr(import_module(module), name or "adapter"), target)


def _hello(adapter: Adapter) -> Message:
    if adapter.missing:
        return {"ok": False, "status": "not installed", "name": adapter.name, "message": adapter.missing}
    return {"ok": True, "protocol": "statescan/1", "name": adapter.name, "version": adapter.version,
            "language": "python", "device": adapter.device, "source": adapter.source,
            "info": {**adapter.info, "arrays": adapter.arrays}}  # fmt: skip


def answer_setup(adapter: Adapter, described: Message) -> Message:
    """Make a mixer, and say what became of it."""
    try:
        adapter.setup(described)
    except Unsupported as error:
        return {"ok": False, "status": "unsupported", "need": error.need}
    except Exception as error:  # whatever an implementation raises is a result
        return {"ok": False, "status": "error", "error": type(error).__name__, "message": str(error)[:2000]}
    return {"ok": True}


def _answer(adapter: Adapter, folder: Path, message: Message) -> Message:
    inputs = message["inputs"]
    tensors = open_tensors(folder, inputs["file"], inputs["tensors"])
    grad = None
    if "grad" in message:
        cotangents = {name: tensors.pop(f"cotangent.{name}") for name in message["grad"]["cotangents"]}
        grad = Gradient(tuple(message["grad"]["of"]), cotangents)
    described = message["outputs"]["tensors"]
    plans = tuple(Plan(row["name"], row["dtype"], tuple(row["shape"])) for row in described
                  if not row["name"].startswith("after."))  # fmt: skip
    far = tuple(message.get("far", ()))
    call = Call(message["op"], message["args"], tensors, plans, grad, message.get("installed", {}), far)
    reply = invoke(adapter, call)
    outputs = open_tensors(folder, message["outputs"]["file"], described, writable=True)
    for name, place in outputs.items():
        if name in reply.outputs:
            _fill(place, reply.outputs[name])
    if reply.status == "ok":
        return {"ok": True, "ms": reply.ms, **({} if reply.value is None else {"value": reply.value})}
    if reply.status == "unsupported":
        return {"ok": False, "status": "unsupported", "need": reply.message}
    return {"ok": False, "status": reply.status, "error": reply.error, "message": reply.message}


def _fill(place: Any, array: Any) -> None:
    """Copy a result, or an input with the gaps between its strides."""
    if element_strides(place) == element_strides(array):
        span(place)[...] = span(array)
    else:
        place[...] = array


if __name__ == "__main__":
    main(sys.argv[1])
