"""Make, check and change the corpus: everything in a vector that can be derived is derived here.

An author writes what a vector is about (inputs, why, effect); `--write` fills in axes, needs, bits, expectations, kills
and digest, and refuses to change an existing expectation without a reason. `--check` recomputes everything; with
`--dispatch` it does so again under other CPU dispatch settings, where every digest must be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from statescan.conformance import oracle
from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import bind_axes, in_place
from statescan.conformance.cases import ANYTHING, Case, execute, tell, vary
from statescan.conformance.compare import Precision, scores
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.lifts import Story
from statescan.conformance.mutants import faults_of, models, mutant
from statescan.conformance.replay_program import derive_trace, trace_kills
from statescan.conformance.replay_toy import derive_toy
from statescan.goldens import needs
from statescan.goldens.gains import gains, significant_bits
from statescan.goldens.store import (
    MANIFEST,
    VECTORS,
    check_schema,
    load_corpus,
    load_faults,
    load_traces,
    load_vectors,
    manifest,
    read_json,
    save_vector,
    vector_digest,
    vector_paths,
    vector_text,
)  # fmt: skip
from statescan.goldens.tensors import NAMES, Array, encode, load_blob, save_blob
from statescan.reference.host.rules import Facts, check_call
from statescan.spec.contract import OPERAND_BITS, OPERATIONS, ContractError

Vector = dict[str, Any]

NUMERIC_AGREEMENT = 2.0**-46
GRADIENT_AGREEMENT = 2.0**-32
"""Differences of float64 results are good to 11 digits: a hundredth of what float32 keeps."""
FEW = 16
"""Below this many vectors a pool of processes costs more than it saves."""
WIDEST_OPERAND = 24
"""A carried value that needs more bits is rounded wherever it is kept, so that no operand could hold it."""
LEAST_KILL = 4.0
"""The score that a fault must have in every operand class of a numeric vector that lists it."""


class DisagreementError(RuntimeError):
    """Two definitions, or a vector and what it says of itself, do not agree."""


# ---------------------------------------------------------------------------------------------------------------------
# Deriving
# ---------------------------------------------------------------------------------------------------------------------


def derive(vector: Mapping[str, Any], corpus: Mapping[str, Vector]) -> Vector:
    """The vector with every derived field filled in; raises DisagreementError where two definitions differ."""
    made: Vector = {**vector, "format": "statescan.vector/1", "rules": 1}
    {"exact": _derive_exact, "numeric": _derive_numeric, "relation": _derive_relation, "reject": _derive_reject}[
        made["class"]
    ](made, {**corpus, made["id"]: made})
    made["digest"] = vector_digest(made)
    check_schema("vector", made, made["id"])
    return made


def _derive_exact(made: Vector, corpus: Mapping[str, Vector]) -> None:
    story = _bare_story(made, corpus)
    outputs, value = oracle.first(story)
    exact, _ = oracle.first(oracle.widened(story))
    wanted = _wanted(made, story, outputs)
    other = oracle.second(_compared(story, wanted))
    expect: dict[str, Any] = {}
    for name in wanted:
        how = wanted[name].get("how", "equal")
        if name == "value":
            expect[name] = {"value": "pass" if how == "judged" else value, "how": how}
            continue
        if how == "finite":
            expect[name] = {"how": how}
            continue
        if other is not None and not _same(outputs[name], other[name]):
            raise DisagreementError(f"{made['id']}: the two definitions differ in {name}")
        expect[name] = {**encode(outputs[name]), "how": how}
        if name in story.tensors and OPERATIONS[story.op].tensors:
            expect[name]["bits_outside"] = _written(story, name)
    if not expect:
        raise DisagreementError(f"{made['id']}: expects nothing; an operation without results needs `value`")
    made["expect"] = expect
    made["inout"] = in_place(story.op, story.tensors)
    made["axes"] = _axes(story)
    made["needs"] = _needs(story, set(expect), outputs, exact)
    made["bits"] = _bits(story, outputs, exact)
    made["provenance"] = {"second": "none" if other is None else "closed form", "generator": 1}
    for key in ("inout", "axes", "bits"):
        if not made[key]:
            del made[key]


def _derive_numeric(made: Vector, corpus: Mapping[str, Vector]) -> None:
    story = oracle.widened(_bare_story(made, corpus))
    outputs, _ = oracle.first(story)
    wanted = _wanted(made, story, outputs)
    found = gains(lambda: oracle.first(story)[0], int(made.get("seed", 0)))
    other = oracle.second(story, smooth=True)
    expect = {}
    for name in wanted:
        if other is not None:
            _check_close(made["id"], name, outputs[name], other[name], found[name])
        parts = {part: save_blob(f"{name}.{part}", code) for part, code in found[name].items()}
        expect[name] = {"shape": list(outputs[name].shape), "blob": save_blob(name, outputs[name]), "gain": parts,
                        "how": "within"}  # fmt: skip
        if name in story.tensors:
            expect[name]["bits_outside"] = _written(story, name)
    made["expect"] = expect
    made["axes"] = _axes(story)
    made["needs"] = _needs(_bare_story(made, corpus), set(expect), {}, {})
    made["provenance"] = {"second": "none" if other is None else "closed form", "generator": 1}


def _derive_relation(made: Vector, corpus: Mapping[str, Vector]) -> None:
    base = tell(made, corpus)
    related = {entry["of"] for entry in made["relate"]}
    words: list[str] = []
    also: dict[str, list[str]] = {}
    case = Case(made, base, ANYTHING)
    for spec in made["calls"].values():
        op = spec.get("op", made["op"])
        if not _given_later(spec):
            own = words if op == made["op"] else also.setdefault(op, [])
            own += _needs(vary(case, spec, {}, {}), related, {}, {})["features"]
        if spec.get("strided"):
            own = words if op == made["op"] else also.setdefault(op, [])
            own.append("strided")
        if spec.get("far"):
            own = words if op == made["op"] else also.setdefault(op, [])
            own.append("offsets.64")
    words += ["repeatable"] if any(e.get("clause") == "DET-1" for e in made["relate"]) else []
    alone = [e for e in made["relate"] if e.get("clause") == "DET-3" and e["how"] == "bits"]
    words += ["batch.invariant"] if alone else []
    made["needs"] = {"op": made["op"], "features": list(dict.fromkeys(words))}
    if also:
        made["needs"]["also"] = {op: list(dict.fromkeys(own)) for op, own in also.items()}
    made["provenance"] = {"second": "none", "generator": 1}


def _derive_reject(made: Vector, corpus: Mapping[str, Vector]) -> None:
    story = tell(made, corpus)
    made["needs"] = {"op": made["op"], "features": ["checks.shape" if _seen_without_values(story) else "checks.values"]}
    made["provenance"] = {"second": "none", "generator": 1}


def _seen_without_values(story: Story) -> bool:
    """Whether the call is refused by what the host knows: shapes, types, settings."""
    if not OPERATIONS[story.op].tensors:
        return False
    facts = {name: Facts(a.shape, NAMES.get(a.dtype, str(a.dtype))) for name, a in story.tensors.items()}
    try:
        check_call(story.op, facts, story.args)
    except ContractError:
        return True
    return False


def _given_later(spec: Mapping[str, Any]) -> bool:
    parts = [p for given in (spec.get("inputs") or {}).values() if given for p in given.get("concat", [given])]
    return any(part.get("from", "base") != "base" for part in parts)


def _wanted(made: Vector, story: Story, outputs: Mapping[str, Array]) -> dict[str, Any]:
    """What is expected: what the author named (else every result), and always every pool that the call may change."""
    named = made.get("expect") or {name: {} for name in outputs}
    pools: dict[str, Any] = {name: {} for name in in_place(story.op, story.tensors)}
    return {**named, **{name: spec for name, spec in pools.items() if name not in named}}


def _compared(story: Story, wanted: Mapping[str, Any]) -> Story:
    """The story with those gradients alone that are compared with a number, not only seen to be finite."""
    if story.grad is None:
        return story
    of = tuple(name for name in story.grad.of if wanted.get(f"grad.{name}", {}).get("how") != "finite")
    return replace(story, grad=replace(story.grad, of=of) if of else None)


def _bare_story(made: Vector, corpus: Mapping[str, Vector]) -> Story:
    return tell({key: value for key, value in made.items() if key != "expect"}, corpus)


def _axes(story: Story) -> dict[str, int]:
    if not OPERATIONS[story.op].tensors:
        return {}
    return {letter: n for letter, n in bind_axes(story.op, story.tensors, story.args).items() if letter != "M"}


def _needs(story: Story, wanted: set[str], outputs: Mapping[str, Array], exact: Mapping[str, Array]) -> dict[str, Any]:
    axes = bind_axes(story.op, story.tensors, story.args)
    words = needs.features(story.op, story.args, story.tensors, wanted, axes, grad=story.grad is not None)
    pins = {}
    types = oracle.result_types(story)
    for name in (name for name in exact if name in wanted):
        if name in types and not _same(outputs[name].astype(np.float64), exact[name].astype(np.float64)):
            pins[name] = types[name]
    found: dict[str, Any] = {"op": story.op, "features": words}
    layout = needs.state_layout(story.op, story.args)
    return {**found, **({"dtypes": pins} if pins else {}), **({"state_layout": layout} if layout else {})}


def _bits(story: Story, outputs: Mapping[str, Array], exact: Mapping[str, Array]) -> dict[str, int]:
    op = OPERATIONS[story.op]
    if not op.tensors:
        return {}
    pools = in_place(story.op, story.tensors)
    inputs = [n for n, a in story.tensors.items() if a.dtype.kind not in "iu" and n not in pools]
    results = [n for n in outputs if n not in pools]
    # What is carried is an operand too: a kernel multiplies with states, windows and cotangents as with tokens.
    carried = [n for n in outputs if n in pools or n.startswith(("final_", "grad."))]
    most = {
        "operand": [story.tensors[n] for n in inputs], "carry": [exact[n] for n in [*pools, *results]],
        "pool": [outputs[n] for n in pools], "out": [outputs[n] for n in results],
    }  # fmt: skip
    bits = {place: max((significant_bits(a) for a in arrays if a.dtype.kind not in "iu"), default=0)
            for place, arrays in most.items()}  # fmt: skip
    read = [significant_bits(exact[n]) for n in carried if exact[n].dtype.kind not in "iu"]
    return {**bits, "operand": max([bits["operand"], *(b for b in read if b <= WIDEST_OPERAND)])}


def _written(story: Story, name: str) -> list[int]:
    """Rows of a pool or buffer that the call may write: its write slots, or the snapshots that are no padding."""
    if name.startswith("snapshot_"):
        return [i for i, p in enumerate(story.tensors["snapshot_positions"].tolist()) if p > 0]
    if "slots" in story.tensors:
        rows = zip(story.tensors["slots"].tolist(), story.tensors["num_accepted"].tolist(), strict=True)
        return sorted(slot for slot, accepted in rows if slot >= 0 and accepted >= 0)
    slots = story.tensors.get("write_slots", story.tensors.get("read_slots"))
    assert slots is not None
    return sorted(s for s in slots.tolist() if s >= 0)


def _same(a: Array, b: Array) -> bool:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return x.shape == y.shape and bool(((x == y) | (np.isnan(x) & np.isnan(y))).all())


def _check_close(vector: str, name: str, got: Array, want: Array, gain: Mapping[str, Array]) -> None:
    """Two float64 definitions agree within 2^-46 of the noise gains; a gradient and a difference within 2^-32."""
    element, _ = scores(got, want, {part: code for part, code in gain.items()}, Precision(), ())
    bound = (GRADIENT_AGREEMENT if name.startswith("grad.") else NUMERIC_AGREEMENT) / 2.0**-24
    if float(np.max(element, initial=0.0)) > bound:
        apart = float(element.max()) / bound
        raise DisagreementError(f"{vector}: the two definitions of {name} are {apart:.3g} bounds apart")


# ---------------------------------------------------------------------------------------------------------------------
# Kills
# ---------------------------------------------------------------------------------------------------------------------


def kills(vector: Vector, corpus: Mapping[str, Vector]) -> list[str]:
    """The known faults that this vector catches, while every unmutated model passes it."""
    case = Case(vector, tell(vector, corpus), ANYTHING)
    for structure, operations in models(vector["op"]).items():
        verdict = run_model(case, operations)
        if not verdict.passed:
            raise DisagreementError(f"{vector['id']}: the {structure} model fails it: {verdict.message}")
    return [fault for fault in faults_of(vector["op"]) if _killed(case, fault)]


def all_kills(corpus: Mapping[str, Vector]) -> dict[str, list[str]]:
    """`kills` of every vector of a corpus, over all processors where there are many."""
    if len(corpus) < FEW:
        return {key: kills(vector, corpus) for key, vector in corpus.items()}
    with ProcessPoolExecutor() as pool:
        found = pool.map(partial(kills, corpus=_bases(corpus)), corpus.values(), chunksize=8)
        return dict(zip(corpus, found, strict=True))


def _bases(corpus: Mapping[str, Vector]) -> dict[str, Vector]:
    """The vectors that a relation stands on: all that its telling needs beside itself."""
    named = {vector["base"] for vector in corpus.values() if "base" in vector}
    return {key: corpus[key] for key in named}


def run_model(case: Case, operations: Mapping[str, Callable[..., Any]]) -> Any:
    """Judge a model of ours on a case, in this process."""
    return run_in_process(case, adapter_of(operations))


def adapter_of(operations: Mapping[str, Callable[..., Any]], **claims: Any) -> Adapter:
    """A model of ours, operations and gradients by name, as an adapter; `claims` as `Adapter.op` takes them."""
    adapter = Adapter("model")
    for name, function in operations.items():
        if name.endswith("_grad"):
            adapter.grad(name.removesuffix("_grad"))(function)
        else:
            adapter.op(name, operand="f64", **claims)(function)
    return adapter


def run_in_process(case: Case, adapter: Adapter) -> Any:
    """Judge an adapter on a case without a child; every call is on memory of its own, as it is there."""
    return execute(case, lambda call, name: invoke(adapter, isolated(call)))


def _killed(case: Case, fault: str) -> bool:
    """Whether the fault shows; in a numeric vector with a score of 4 in every operand class it allows, or more."""
    operands = case.vector.get("operands", ["f64"])
    loosest = min(operands, key=lambda name: OPERAND_BITS[name])
    verdict = run_model(replace(case, capability={**case.capability, "operand": loosest}), mutant(fault))
    if verdict.score is not None and verdict.score < LEAST_KILL:
        return False
    raises = bool(load_faults().get(fault, {}).get("raises"))  # an exception is a kill only where it is the fault
    return str(verdict.status).startswith("fail.") or (raises and verdict.status == "error")


# ---------------------------------------------------------------------------------------------------------------------
# Checking and writing
# ---------------------------------------------------------------------------------------------------------------------


def check() -> list[str]:
    """Recompute the corpus; one line for each vector whose derived fields are not what is stored."""
    corpus = load_vectors()
    wrong = []
    for vector in corpus.values():
        made = derive(vector, corpus)
        if vector_text(made) != vector_text(vector):
            keys = [k for k in made if made[k] != vector.get(k)]
            wrong.append(f"{vector['id']}: {', '.join(keys)} not as computed")
    for trace in load_traces().values():
        if vector_text(derive_trace_file(trace), "trace") != vector_text(trace, "trace"):
            wrong.append(f"{trace['id']}: not as computed")
    stored = read_json(MANIFEST) if MANIFEST.exists() else None
    if stored != manifest(load_corpus().values()):
        wrong.append("MANIFEST.json does not list the corpus")
    return wrong


def write(allow_change: str | None, say: Callable[[str], None] = print) -> list[str]:
    """Derive and store every vector; refused changes are returned, and left beside the vector as `.rej`."""
    drafts = {path.stem: read_json(path) for path in vector_paths(VECTORS)}
    derived = {key: derive(draft, drafts) for key, draft in drafts.items()}
    killed = all_kills(derived)
    refused = []
    for path in vector_paths(VECTORS):
        draft, made = drafts[path.stem], derived[path.stem]
        made["kills"] = killed[path.stem]
        made["digest"] = vector_digest(made)
        news = review(draft, made)
        if news and draft.get("digest") and not allow_change:
            path.with_suffix(".rej").write_text(vector_text(made), "utf-8")
            refused.append(f"{made['id']}: {news}")
            continue
        if news or made != draft:
            say(f"{made['id']}: {news or 'derived fields'}")
        if path != save_vector(made):
            path.unlink()
        drafts[path.stem] = made
    refused += write_traces(allow_change, say)
    if not refused:
        text = json.dumps(manifest(load_corpus().values()), indent=1, ensure_ascii=False) + "\n"
        MANIFEST.write_text(text, "utf-8")
        _sweep_blobs(drafts)
    return refused


def derive_trace_file(trace: Mapping[str, Any]) -> Vector:
    """A trace with its steps, the faults it catches and its digest, from what its author wrote."""
    authored = {key: trace[key] for key in trace if key not in ("alone", "kills", "provenance", "digest")}
    toy = trace["mixer"]["kind"] == "toy"
    made = derive_toy(authored) if toy else derive_trace({k: v for k, v in authored.items() if k != "steps"})
    made["kills"] = trace_kills(made)
    made["digest"] = vector_digest(made)
    check_schema("trace", made, made["id"])
    return made


def write_traces(allow_change: str | None, say: Callable[[str], None]) -> list[str]:
    """Derive and store every trace; what would change in steps that are stored is refused without a reason."""
    refused = []
    for path in sorted(VECTORS.glob("*/trace-*.json")):
        draft = read_json(path)
        made = derive_trace_file(draft)
        if draft.get("digest") and made["steps"] != draft["steps"] and not allow_change:
            path.with_suffix(".rej").write_text(vector_text(made, "trace"), "utf-8")
            refused.append(f"{made['id']}: its steps changed")
            continue
        if made != draft:
            say(f"{made['id']}: {'derived fields' if draft.get('digest') else 'new'}")
        if path != save_vector(made):
            path.unlink()
    return refused


def review(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What changed in the expectations of a vector, in one line; empty if nothing did."""
    lines = []
    stored = {} if new["class"] == "reject" else new.get("expect", {})
    for name, want in stored.items():
        before = old.get("expect", {}).get(name)
        if before == want:
            continue
        if not before or not ({"data", "blob", "value"} & set(before)):
            lines.append(f"{name} new")
        else:
            lines.append(f"{name} {_largest_change(before, want)}")
    return ", ".join(lines)


def _largest_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    a, b = (_stored(spec) for spec in (before, after))
    if a is None or b is None or a.shape != b.shape:
        return "changed in shape or kind"
    moved = np.abs(a - b)
    if not moved.any():
        return "changed in its description only"
    where = np.unravel_index(int(np.nanargmax(moved)), moved.shape)
    first = tuple(int(i) for i in np.argwhere(moved)[0])
    ulps = float(moved[where] / np.spacing(np.abs(a[where])))
    return f"changed: {int((moved > 0).sum())} elements, by up to {ulps:.3g} ulps, first at {list(first)}"


def _stored(spec: Mapping[str, Any]) -> Array | None:
    from statescan.goldens.tensors import decode

    if "blob" in spec:
        return load_blob(spec["blob"]).astype(np.float64)
    return decode(spec).astype(np.float64) if "data" in spec else None


def _sweep_blobs(vectors: Mapping[str, Vector]) -> None:
    """Remove blob files that no vector names."""
    text = json.dumps(list(vectors.values()))
    for path in (VECTORS.parent / "blobs").glob("*.safetensors"):
        if path.stem not in text:
            path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# The same digests under every dispatch setting
# ---------------------------------------------------------------------------------------------------------------------


def digests() -> dict[str, str]:
    """A digest of each freshly computed expectation, by vector; nothing stored is looked at but the inputs."""
    corpus = load_vectors()
    return {v["id"]: derive(v, corpus)["digest"] for v in corpus.values()}


def dispatch_settings() -> dict[str, dict[str, str]]:
    """Environments that switch CPU features off: above AVX2 for NumPy, AVX2 and FMA too, and for the C library."""
    core: Any = import_module("numpy._core._multiarray_umath" if np.__version__ >= "2" else
                              "numpy.core._multiarray_umath")  # fmt: skip
    here = [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]
    wide = [name for name in here if name.startswith(("AVX512", "X86_V4"))]
    narrow = [name for name in here if name in wide or name in ("AVX2", "FMA3", "X86_V3")]
    return {
        "plain": {}, "no AVX-512": {"NPY_DISABLE_CPU_FEATURES": " ".join(wide)},
        "no AVX2 or FMA": {"NPY_DISABLE_CPU_FEATURES": " ".join(narrow)},
        "C library without AVX2": {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F"},
    }  # fmt: skip


def run_under(environment: Mapping[str, str], code: str) -> str:
    """What a Python program prints when run under more environment variables."""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, text=True, check=True,
                          capture_output=True, cwd=Path.cwd())  # fmt: skip
    return done.stdout


DIGESTS = "import json; from statescan.goldens.regenerate import digests; print(json.dumps(digests(), sort_keys=True))"


def check_dispatch() -> list[str]:
    """Recompute under every dispatch setting; one line for each that gives another digest."""
    runs = {name: run_under(env, DIGESTS) for name, env in dispatch_settings().items()}
    stored = {key: vector["digest"] for key, vector in load_vectors().items()}
    return [f"under '{name}': {key} differs" for name, text in runs.items()
            for key, value in json.loads(text.splitlines()[-1]).items() if stored[key] != value]  # fmt: skip
