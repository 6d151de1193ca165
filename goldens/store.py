"""The corpus on disk: vector files read strictly, written canonically, listed with their digests in MANIFEST.json."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

GOLDENS = Path(__file__).parent
VECTORS = GOLDENS / "vectors"
MANIFEST = GOLDENS / "MANIFEST.json"

_MOST_DEPTH = 32
_MOST_TEXT = 64 * 1024
_MOST_BYTES = 64 << 20
_NOT_DIGESTED = ("digest", "provenance")


class FormatError(ValueError):
    """A file that does not follow its format; the message names the file and the place."""


def read_json(path: Path) -> Any:
    """The JSON in a file from outside, by the rules of `parse_json`."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise FormatError(f"{path.name}: {error.strerror}") from error
    return parse_json(data, path.name)


def parse_json(data: bytes, where: str) -> Any:
    """JSON from outside: duplicate keys, numbers that are not finite, deep nesting and long strings are refused."""
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        _check_limits(value, 0)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: {error}") from error
    return value


def load_vector(path: Path) -> dict[str, Any]:
    """One vector file, checked against the schema of its format and against its own digest if it has one."""
    vector = read_json(path)
    check_schema("vector", vector, path.name)
    if vector["id"] != path.stem:
        raise FormatError(f"{path.name}: id is {vector['id']!r}")
    if vector.get("digest") not in (None, vector_digest(vector)):
        raise FormatError(f"{path.name}: digest does not match the content")
    return dict(vector)


def load_vectors(folder: Path = VECTORS) -> dict[str, dict[str, Any]]:
    """The whole corpus by id, in order of family and id."""
    vectors = [load_vector(path) for path in vector_paths(folder)]
    return {vector["id"]: vector for vector in vectors}


def vector_paths(folder: Path = VECTORS) -> list[Path]:
    """Files of vectors, in order of family and id; the traces among them are a format of their own."""
    return [path for path in sorted(folder.glob("*/*.json")) if not path.name.startswith("trace-")]


def load_traces(folder: Path = VECTORS) -> dict[str, dict[str, Any]]:
    """The traces of the corpus by id, each checked against its schema and its digest."""
    traces = [load_trace(path) for path in sorted(folder.glob("*/trace-*.json"))]
    return {trace["id"]: trace for trace in traces}


def load_corpus(folder: Path = VECTORS) -> dict[str, dict[str, Any]]:
    """Vectors and traces by id, in order of family and id."""
    every = {**load_vectors(folder), **load_traces(folder)}
    return {path.stem: every[path.stem] for path in sorted(folder.glob("*/*.json"))}


def load_trace(path: Path) -> dict[str, Any]:
    """One trace file."""
    trace = read_json(path)
    check_schema("trace", trace, path.name)
    if trace["id"] != path.stem:
        raise FormatError(f"{path.name}: id is {trace['id']!r}")
    if trace.get("digest") not in (None, vector_digest(trace)):
        raise FormatError(f"{path.name}: digest does not match the content")
    return dict(trace)


@lru_cache(maxsize=1)
def load_faults() -> dict[str, dict[str, Any]]:
    """The catalogue of known faults by id."""
    return {fault["id"]: fault for fault in read_json(GOLDENS / "faults.json")["faults"]}


def check_schema(kind: str, value: Any, where: str) -> None:
    """Validate against `schema/<kind>.schema.json`; the first error names its place."""
    errors = sorted(_validator(kind).iter_errors(value), key=lambda e: list(map(str, e.absolute_path)))
    if errors:
        place = "/".join(map(str, errors[0].absolute_path)) or "top"
        raise FormatError(f"{where}: {place}: {errors[0].message[:300]}")


def vector_digest(vector: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON without digest and provenance."""
    content = {key: value for key, value in vector.items() if key not in _NOT_DIGESTED}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()


def kind_of(one: Mapping[str, Any]) -> str:
    """The schema of a file of the corpus: that of vectors, or that of traces."""
    return "trace" if str(one["format"]).startswith("statescan.trace") else "vector"


def vector_text(vector: Mapping[str, Any], kind: str = "vector") -> str:
    """The canonical file: one field a line, one tensor a line, keys in the schema's order."""
    order = list(_validator(kind).schema["properties"])
    lines = []
    for key in sorted(vector, key=order.index):
        value = vector[key]
        nested = isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values())
        listed = isinstance(value, list) and any(isinstance(v, dict) for v in value)
        if nested:
            inner = ",\n".join(f"  {json.dumps(k)}: {_compact(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{inner}}}")
        elif listed:
            inner = ",\n".join(f"  {_compact(v)}" for v in value)
            lines.append(f"{json.dumps(key)}: [\n{inner}]")
        else:
            lines.append(f"{json.dumps(key)}: {_compact(value)}")
    return "{" + ",\n ".join(lines) + "}\n"


def save_vector(vector: Mapping[str, Any], folder: Path = VECTORS) -> Path:
    """Write one vector canonically into its family's folder."""
    path = folder / family(vector) / f"{vector['id']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(vector_text(vector, kind_of(vector)), "utf-8")
    return path


def family(vector: Mapping[str, Any]) -> str:
    """The folder of a vector: the family of its first clause."""
    return str(vector["clauses"][0]).rpartition("-")[0].lower()


def manifest(vectors: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What MANIFEST.json says: every vector's digest and first clause."""
    rows = {v["id"]: {"clause": v["clauses"][0], "digest": v["digest"]} for v in vectors}
    whole = hashlib.sha256("".join(f"{key}{row['digest']}\n" for key, row in sorted(rows.items())).encode()).hexdigest()
    return {"format": "statescan.manifest/1", "digest": f"sha256:{whole}", "vectors": dict(sorted(rows.items()))}


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        raise ValueError(f"duplicate key {next(k for k, _ in pairs if k in seen or seen.add(k))!r}")  # type: ignore[func-returns-value]
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON number")


def _check_limits(value: Any, depth: int) -> None:
    if depth > _MOST_DEPTH:
        raise ValueError(f"nested deeper than {_MOST_DEPTH}")
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        raise ValueError(f"a string of {len(value)} characters, {_MOST_TEXT} at most")
    if isinstance(value, str) and not value.isascii():
        value.encode("utf-8")  # half of a surrogate pair could be stored nowhere
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number past the largest double")
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError(f"a whole number of {value.bit_length()} bits, 64 at most")
    children = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_limits(child, depth + 1)


@lru_cache(maxsize=8)
def _validator(kind: str) -> Draft202012Validator:
    schema = json.loads((GOLDENS / "schema" / f"{kind}.schema.json").read_text("utf-8"))
    return Draft202012Validator(schema)
