"""JSON Schemas of what the project reads and writes, made from the contract: `python -m statescan.goldens.schemas`.

The operation table, the features, the statuses and the clause list are the enumerations, so that a name that is in no
table can stand in no file. A test holds the stored schemas to this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from statescan.goldens.tensors import DTYPES
from statescan.spec.contract import CLAUSES, FEATURES, FLOAT_TYPES, OPERAND_BITS, OPERATIONS, PROFILES, STATUSES

Schema = dict[str, Any]
FOLDER = Path(__file__).parent / "schema"

ID = {"type": "string", "pattern": "^[a-z0-9-]{3,64}$"}
SENTENCE = {"type": "string", "minLength": 10, "maxLength": 400}
LABEL = {"enum": [label for label in CLAUSES]}
NAMES = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
DIGEST = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
ROWS = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
HOW = ["bits", "equal", "within", "either", "finite", "differs", "judged"]


def schemas() -> dict[str, Schema]:
    """Every schema by name."""
    return {"vector": _vector(), "faults": _faults(), "report": _report(), "message": _message(),
            "trace": _trace()}  # fmt: skip


def write(folder: Path = FOLDER) -> None:
    """Store every schema."""
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (folder / f"{name}.schema.json").write_text(text(schema), "utf-8")


def text(schema: Schema) -> str:
    """A schema as it stands on disk."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    rest = {"required": required} if required else {}
    return {"type": "object", "properties": properties, **rest, "additionalProperties": False, **more}


def _tensor(**more: Any) -> Schema:
    gen = {
        "kind": {"enum": ["int", "pick", "flat", "bell", "neg", "onehot", "perm", "const"]},
        "bits": {"type": "integer"}, "lo": {"type": "integer"}, "hi": {"type": "integer"},
        "of": {"type": "array", "items": {"type": "integer"}}, "size": {"type": "integer"},
        "value": {"type": "integer"}, "stream": {"type": "integer", "minimum": 0},
        "shift": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
        "axis": {"type": "integer"},
    }  # fmt: skip
    return {
        "dtype": {"enum": list(DTYPES)},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 6},
        "data": {"anyOf": [NUMBER, {"type": "array", "items": NUMBER}]},
        "gen": _object(gen, ["kind"]), "blob": DIGEST, **more,
    }  # fmt: skip


def _vector() -> Schema:
    tensor = _object(_tensor(), ["dtype", "shape"])
    names = {"type": "array", "items": {"type": "string"}}
    picked = {
        "from": {"type": "string"}, "tensor": {"type": "string"}, "rows": ROWS, "axis": {"type": "integer"},
        "pick": {"type": "array", "items": {"type": "integer"}},
    }  # fmt: skip
    part = {"anyOf": [tensor, _object(picked, ["from", "tensor"])]}
    given = {"anyOf": [*part["anyOf"], {"type": "null"},
                       _object({"concat": {"type": "array", "items": part}, "axis": {"type": "integer"}},
                               ["concat"])]}  # fmt: skip
    cotangents = {"type": "object", "additionalProperties": tensor}
    grad = _object({"of": names, "cotangents": cotangents}, ["of", "cotangents"])
    change = _object({"tensor": {"type": "string"}, "rows": ROWS, "axis": {"type": "integer"},
                      "data": _tensor()["data"], "gen": _tensor()["gen"]}, ["tensor"])  # fmt: skip
    call = _object({
        "op": {"enum": list(OPERATIONS)}, "args": {"type": "object"}, "axes": {"type": "object"},
        "inputs": {"type": "object", "additionalProperties": given}, "change": {"type": "array", "items": change},
        "strided": names, "far": names, "grad": {"anyOf": [grad, {"type": "null"}]},
    })  # fmt: skip
    expected = _object(_tensor(
        how={"enum": HOW}, bits_outside={"type": "array", "items": {"type": "integer"}},
        either={"type": "array", "items": {"type": "array", "items": NUMBER}},
        gain=_object({"op": DIGEST, "acc": DIGEST, "exp": DIGEST}, ["op", "acc", "exp"]),
        value={},
    ), ["how"])  # fmt: skip
    reject = _object({"error": {"type": "string", "pattern": "Error$"}, "mentions": names}, ["error", "mentions"])
    sides = {"type": "object", "properties": {"of": {"type": "string"}, "how": {"enum": HOW}, "clause": LABEL},
             "required": ["of", "how"]}  # fmt: skip
    properties = {
        "format": {"const": "statescan.vector/1"}, "rules": {"const": 1}, "id": ID,
        "class": {"enum": ["exact", "numeric", "relation", "reject"]}, "profile": {"enum": list(PROFILES)},
        "clauses": {"type": "array", "items": LABEL, "minItems": 1, "uniqueItems": True},
        "op": {"enum": list(OPERATIONS)}, "args": {"type": "object"}, "seed": {"type": "integer", "minimum": 0},
        "axes": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
        "inputs": {"type": "object", "additionalProperties": tensor},
        "installed": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "inout": names, "grad": grad,
        "expect": {"anyOf": [_object({"reject": reject}, ["reject"]),
                             {"type": "object", "additionalProperties": expected}]},
        "base": ID, "calls": {"type": "object", "additionalProperties": call, "minProperties": 1},
        "relate": {"type": "array", "items": sides, "minItems": 1},
        "bits": _object({p: {"type": "integer", "minimum": 0, "maximum": 53}
                         for p in ("operand", "carry", "pool", "out")}),
        "lifts": NAMES, "operands": {"type": "array", "items": {"enum": list(OPERAND_BITS)}},
        "needs": _object({"op": {"enum": list(OPERATIONS)}, "features": NAMES, "dtypes": {"type": "object"},
                          "also": {"type": "object", "additionalProperties": NAMES},
                          "state_layout": {"enum": ["KV", "VK"]}}, ["op", "features"]),
        "kills": {"type": "array", "items": ID, "uniqueItems": True},
        "why": SENTENCE, "effect": SENTENCE, "seen": names, "provenance": {"type": "object"}, "digest": DIGEST,
    }  # fmt: skip
    required = ["format", "rules", "id", "class", "profile", "clauses", "op", "why", "effect"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "statescan.vector/1",
            **_object(properties, required)}  # fmt: skip


def _trace() -> Schema:
    """A program, its steps with what each hook is given and must give, and each request alone."""
    rows: Schema = {"type": "array"}
    free: Schema = {"type": "object"}
    count = {"type": "integer", "minimum": 0}
    whole = {"type": "array", "items": {"type": "integer"}}
    names = {"type": "array", "items": {"type": "string"}}
    request = _object({"tokens": whole, "row": {"type": "string"}}, ["tokens"])
    pair = _object({"conv_state": rows, "ssm_state": rows}, ["conv_state", "ssm_state"])
    words = ["zero", "restore", "rollback", "commit", "free", "move", "save", "load", "poison", "drop"]
    events = {"type": "array",
              "items": {"type": "object", "required": ["op"], "properties": {"op": {"enum": words}}}}  # fmt: skip
    lists = ("admit", "decode", "prefill", "snapshot", "commit", "finish", "pause", "resume", "evict", "move", "save",
             "drop", "poison")  # fmt: skip
    program = _object({
        "step": count, **{name: rows for name in lists},
        **{name: count for name in ("decode_pad_to", "prefill_pad_to", "token_pad_to")},
    }, ["step"])  # fmt: skip
    toy = {"hidden": rows, "hooks": names, "lacks": names, "single": {"type": "boolean"}, "expect": free}
    step = _object({
        "step": count, "before": events, "decode": free, "prefill": free, "pools_after_hooks": pair, "after": events,
        "pools_after_step": pair, **toy,
    }, ["step"])  # fmt: skip
    sizes = _object({
        **{name: count for name in ("slots", "max_drafts", "max_snapshots", "prefix_block", "blocks")},
        "pool_fill": NUMBER, "scratch_fill": NUMBER, "pool_dtype": {"enum": list(FLOAT_TYPES)},
        "scratch_dtype": {"enum": list(FLOAT_TYPES)},
    }, ["slots"])  # fmt: skip
    mixer = {"type": "object", "required": ["kind"],
             "properties": {"kind": {"enum": ["mamba2", "gdn", "gdp", "kda", "toy"]}}}  # fmt: skip
    properties = {
        "format": {"const": "statescan.trace/1"}, "rules": {"const": 1}, "id": ID, "class": {"const": "exact"},
        "profile": {"enum": list(PROFILES)}, "clauses": {"type": "array", "items": LABEL, "minItems": 1},
        "mixer": mixer, "sizes": sizes, "rows": rows,
        "requests": {"type": "object", "additionalProperties": request}, "program": {"type": "array", "items": program},
        "alone": free, "steps": {"type": "array", "items": step},
        "kills": {"type": "array", "items": ID, "uniqueItems": True}, "why": SENTENCE, "effect": SENTENCE,
        "seen": names, "provenance": free, "digest": DIGEST,
    }  # fmt: skip
    required = ["format", "rules", "id", "class", "profile", "clauses", "mixer", "sizes", "why", "effect"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "statescan.trace/1",
            **_object(properties, required)}  # fmt: skip


def _faults() -> Schema:
    fault = _object({
        "id": ID, "clauses": {"type": "array", "items": LABEL, "minItems": 1}, "kind": {"type": "string"},
        "structure": {"enum": ["recurrent", "chunked", "kernel-like", "engine", "host"]},
        "mechanism": SENTENCE, "effect": SENTENCE, "seen": {"type": "array", "items": {"type": "string"}},
        "expressible": {"type": "boolean"}, "equivalent_when": {"type": "array", "items": {"type": "string"}},
        "set": {"enum": ["open", "sealed", "finding"]}, "exact": {"anyOf": [{"const": True}, {"type": "string"}]},
        "raises": {"type": "boolean"}, "first_kill": {"anyOf": [ID, {"type": "null"}]},
    }, ["id", "clauses", "kind", "structure", "mechanism", "effect", "seen", "expressible", "set"])  # fmt: skip
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "statescan.faults/1",
            **_object({"format": {"const": "statescan.faults/1"}, "faults": {"type": "array", "items": fault}},
                      ["format", "faults"])}  # fmt: skip


def _report() -> Schema:
    place = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
    result = _object({
        "vector": ID, "status": {"enum": list(STATUSES)}, "clause": LABEL, "clauses": {"type": "array", "items": LABEL},
        "message": {"type": "string"}, "missing": {"type": "string"}, "known": {"type": "string"},
        "tensor": {"type": "string"}, "place": place,
        "call": {"type": "string"}, "score": {"type": ["number", "null"]}, "operand": {"type": "string"},
        "dtypes": {"type": "object"}, "lift": {"type": "string"}, "ms": {"type": "number"},
        "candidates": {"type": "array", "items": ID},
    }, ["vector", "status", "clause", "clauses"])  # fmt: skip
    run = _object({
        "implementation": {"type": "string"}, "version": {"type": "string"}, "device": {"type": "string"},
        "source": {"type": "string"}, "rung": {"enum": ["in process", "subprocess", "folder"]},
        "state": {"enum": ["ran", "not installed", "smoke failed", "stopped"]}, "reason": {"type": "string"},
        "info": {"type": "object"}, "seconds": {"type": "number"},
        "results": {"type": "array", "items": result},
    }, ["implementation", "state", "results"])  # fmt: skip
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "statescan.report/1",
            **_object({"format": {"const": "statescan.report/1"}, "suite": {"type": "string"}, "rules": {"const": 1},
                       "corpus": DIGEST, "date": {"type": "string"}, "profile": {"type": "string"},
                       "environment": {"type": "object"}, "runs": {"type": "array", "items": run}},
                      ["format", "suite", "rules", "corpus", "date", "profile", "runs"])}  # fmt: skip


def _message() -> Schema:
    """What an adapter may answer; the runner's own messages are its own business."""
    words = [word.partition(":")[0] for group in FEATURES.values() for word in group]
    pattern = f"^({'|'.join(sorted(set(words)))})(:.*)?$"
    types = {"enum": list(FLOAT_TYPES)}
    capability = _object({
        "op": {"type": "string"},
        "features": {"type": "array", "items": {"type": "string", "pattern": pattern}},
        "dtypes": {"type": "array", "items": {"type": "object", "additionalProperties": types}},
        "operand": {"enum": list(OPERAND_BITS)}, "state_layout": {"type": "array", "items": {"enum": ["KV", "VK"]}},
        "limits": {"type": "object"},
    }, ["op", "features"])  # fmt: skip
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "statescan/1 reply",
            **_object({
                "id": {"type": "integer"}, "ok": {"type": "boolean"}, "protocol": {"const": "statescan/1"},
                "name": {"type": "string"}, "version": {"type": "string"}, "language": {"type": "string"},
                "device": {"type": "string"}, "source": {"type": "string"}, "info": {"type": "object"},
                "capabilities": {"type": "array", "items": capability}, "ms": {"type": "number"},
                "status": {"enum": ["rejected", "unsupported", "error", "shape", "dtype", "not installed"]},
                "error": {"type": "string"}, "message": {"type": "string"}, "need": {"type": "string"}, "value": {},
            }, ["id", "ok"])}  # fmt: skip


if __name__ == "__main__":
    write()
