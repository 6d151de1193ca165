"""A recorded call as a file: one JSON object that says what was called, and a safetensors file with its numbers.

    000001.json          {"format": "statescan.call/1", "op": ..., "args": {...}, "tensors": [...], ...}
    000001.safetensors   in.<name> before the call, after.<name> behind it, out.<name> returned

Of pools only the slots stand there that the call could touch, renumbered from 0 (`slots` has their own numbers);
`others` are slots beyond these that changed all the same. A file may come from anyone: it is read as data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from statescan.conformance.calls import Array, Call, Plan, Reply
from statescan.conformance.transport import element_strides
from statescan.conformance.untrusted import MAX_BYTES, STORED, parse_tensors, read_file, write_file
from statescan.goldens.store import FormatError, parse_json
from statescan.goldens.tensors import NAMES
from statescan.spec.contract import OPERATIONS, RULES_VERSION

FORMAT = "statescan.call/1"
FAMILIES = ("conv", "gates", "norms", "delta", "ssd")
RECORDABLE = tuple(name for name, op in OPERATIONS.items() if op.family in FAMILIES and name != "commit_accepted")
"""Operations on tensors alone: what a kernel does. What is host bookkeeping is checked by vectors."""

_NAME = {"type": "string", "pattern": r"\A[A-Za-z0-9_.]{1,64}\Z"}
_TEXT = {"type": "string", "maxLength": 4000}
_SIZES = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 6}
_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 1 << 20}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "title": FORMAT, "type": "object",
    "properties": {
        "format": {"const": FORMAT}, "rules": {"const": RULES_VERSION}, "op": {"enum": list(RECORDABLE)},
        "args": {"type": "object", "maxProperties": 16, "additionalProperties": {"anyOf": [
            {"type": ["number", "boolean", "null"]}, {"type": "string", "maxLength": 32},
            {"type": "array", "items": {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf"]}]}, "maxItems": 4}]}},
        "status": {"enum": ["ok", "rejected", "error"]}, "error": _TEXT, "message": _TEXT,
        "implementation": _TEXT, "device": _TEXT, "time": _TEXT,
        "strides": {"type": "object", "additionalProperties": _SIZES, "maxProperties": 64},
        "slots": _NUMBERS, "pool_slots": {"type": "integer", "minimum": 0}, "others": _NUMBERS,
        "unchanged": {"type": "array", "items": _NAME, "maxItems": 64},
    },
    "required": ["format", "rules", "op", "args", "status"], "additionalProperties": False,
}  # fmt: skip

_VALIDATOR = Draft202012Validator(SCHEMA)


@dataclass(frozen=True)
class Recorded:
    """A call and what became of it.

    `call.tensors` are the inputs and the touched slots of pools before the call; `reply.outputs` the results and the
    tensors behind it. `strides` are those of inputs that were not packed, in elements.
    """

    call: Call
    reply: Reply
    slots: tuple[int, ...] = ()
    pool_slots: int = 0
    others: tuple[int, ...] = ()
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    implementation: str = ""
    device: str = ""
    time: str = ""


def save(recorded: Recorded, folder: Path, name: str) -> Path:
    """Store a recorded call as `name.json` and `name.safetensors`; the path of the first."""
    call, reply = recorded.call, recorded.reply
    tensors = {f"in.{key}": array for key, array in call.tensors.items()}
    unchanged = []
    for key, array in call.tensors.items():
        after = reply.outputs.get(f"after.{key}")
        if after is not None and after.tobytes() == array.tobytes():
            unchanged.append(key)
        elif after is not None:
            tensors[f"after.{key}"] = after
    tensors |= {f"out.{plan.name}": reply.outputs[plan.name] for plan in call.results if plan.name in reply.outputs}
    said = {
        "format": FORMAT, "rules": RULES_VERSION, "op": call.op, "args": plain(call.args), "status": reply.status,
        "error": reply.error, "message": reply.message, "implementation": recorded.implementation,
        "device": recorded.device, "time": recorded.time,
        "strides": {key: list(strides) for key, strides in recorded.strides.items()},
        "slots": list(recorded.slots), "pool_slots": recorded.pool_slots, "others": list(recorded.others),
        "unchanged": unchanged,
    }  # fmt: skip
    write_file(folder, f"{name}.safetensors", safetensors_parts(tensors))
    text = json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(folder, f"{name}.json", [text.encode("utf-8", "backslashreplace")])
    return folder / f"{name}.json"


def safetensors_parts(tensors: Mapping[str, Array]) -> list[bytes]:
    """The bytes of a safetensors file, largest elements first."""
    header: dict[str, Any] = {}
    body: list[bytes] = []
    end = 0
    for key, array in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        data = np.ascontiguousarray(array).tobytes()
        header[key] = {"dtype": STORED[NAMES[array.dtype]], "shape": list(array.shape),
                       "data_offsets": [end, end + len(data)]}  # fmt: skip
        end += len(data)
        body.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *body]


def load(path: Path, max_bytes: int = MAX_BYTES) -> Recorded:
    """A recorded call from outside; FormatError where it is none."""
    said = parse_json(bytes(read_file(path.parent, path.name, 1 << 22)), path.name)
    tensors_name = f"{path.name.removesuffix('.json')}.safetensors"
    tensors = parse_tensors(read_file(path.parent, tensors_name, max_bytes), tensors_name)
    return parse(said, tensors, path.name)


def parse(said: Any, tensors: Mapping[str, Array], where: str) -> Recorded:
    """The call that a JSON object and its tensors describe, every name checked against the operation table."""
    errors = sorted(_VALIDATOR.iter_errors(said), key=lambda e: list(map(str, e.absolute_path)))
    if errors:
        place = "/".join(map(str, errors[0].absolute_path)) or "top"
        raise FormatError(f"{where}: {place}: {errors[0].message[:300]}")
    op = OPERATIONS[said["op"]]
    named = {a.name for a in op.tensors}
    parts: dict[str, dict[str, Array]] = {"in": {}, "after": {}, "out": {}}
    for key, array in tensors.items():
        part, _, name = key.partition(".")
        known = {r.name for r in op.results} if part == "out" else named
        if part not in parts or name not in known:
            raise FormatError(f"{where}: {key!r:.80} is no tensor of {op.name}")
        parts[part][name] = array
    before, after = parts["in"], parts["after"]
    for name, array in {**after}.items():
        if name not in before or array.shape != before[name].shape or array.dtype != before[name].dtype:
            raise FormatError(f"{where}: after.{name} is not of the type and shape of in.{name}")
    after |= {name: before[name] for name in said.get("unchanged", []) if name in before and name not in after}
    missing = [a.name for a in op.tensors if not a.optional and a.name not in before]
    unknown = set(said["args"]) - {a.name for a in op.settings}
    if missing:
        raise FormatError(f"{where}: {op.name} needs {', '.join(missing)}")
    if unknown:
        raise FormatError(f"{where}: {op.name} has no setting {sorted(unknown)[0]!r:.80}")
    results = tuple(Plan(r.name, NAMES[parts["out"][r.name].dtype], parts["out"][r.name].shape)
                    for r in op.results if r.name in parts["out"])  # fmt: skip
    call = Call(op.name, {key: _wide(value) for key, value in said["args"].items()}, before, results)
    outputs = {**parts["out"], **{f"after.{name}": array for name, array in after.items()}}
    reply = Reply(said["status"], outputs, error=said.get("error", ""), message=said.get("message", ""))
    strides = {name: tuple(s) for name, s in said.get("strides", {}).items()
               if name in before and len(s) == before[name].ndim}  # fmt: skip
    return Recorded(call, reply, tuple(said.get("slots", ())), said.get("pool_slots", 0), tuple(said.get("others", ())),
                    strides, said.get("implementation", ""), said.get("device", ""), said.get("time", ""))  # fmt: skip


def plain(args: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them: pairs as lists, infinity as a word."""

    def one(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [one(v) for v in value]
        if isinstance(value, float) and math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return value

    return {key: one(value) for key, value in args.items()}


def _wide(value: Any) -> Any:
    return [float(v) if isinstance(v, str) else v for v in value] if isinstance(value, list) else value


def is_packed(array: Array) -> bool:
    """Whether an array has no gaps and lies in C order."""
    return bool(array.flags.c_contiguous) or element_strides(array) == element_strides(np.empty(array.shape, np.int8))
