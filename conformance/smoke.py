"""Before anything else: is the adapter wired rightly? Tiny calls whose wrong answers are recognised by their value.

A wrong answer here says more about the adapter than about the kernels behind it, so the suite does not start and one
sentence says what to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statescan.conformance.calls import Array, Call, Reply
from statescan.conformance.cases import Case, execute, prepare
from statescan.conformance.client import Client
from statescan.conformance.smoke_hooks import check_hooks

TAPS = [1.0, 4, 16, 64]
SIGMOID_OF_ONE, SOFTPLUS_OF_ZERO, E = 0.7310585786, 0.6931471806, 2.7182818285
KEY_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
Wrong = Sequence[tuple[Sequence[float], str]]


def _channel(got: Array) -> Array:
    """Channel 0: an adapter may ask for more, which the lift fills."""
    return got[..., 0]


def _values(got: Array) -> Array:
    """Two values of the first head of every token."""
    return got[..., 0, :2]


def _heads(got: Array) -> Array:
    """The first value of four heads."""
    return got[..., :4, 0]


@dataclass(frozen=True)
class Probe:
    """One call, its right answer as an exact vector, and the sentences for wrong answers of one tensor, of which `take`
    picks the numbers that no lift moves."""

    vector: Mapping[str, Any]
    tensor: str
    wrong: Wrong
    take: Callable[[Array], Array] = _channel


def _tensor(dtype: str, shape: Sequence[int], data: Sequence[float | str]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data": list(data)}


def _vector(op: str, features: Sequence[str], inputs: Mapping[str, Any], expect: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": f"smoke-{op}", "class": "exact", "op": op, "args": {"activation": None}, "inputs": inputs,
            "expect": {name: {**spec, "how": "equal"} for name, spec in expect.items()}, "lifts": ["channels"],
            "needs": {"op": op, "features": ["act.none", "width:4", *features]}}  # fmt: skip


def _probes() -> list[Probe]:
    return [*_conv_probes(), *_delta_probes(), *_ssd_probes()]


def _conv_probes() -> list[Probe]:
    weight = _tensor("f32", [1, 4], TAPS)
    reversed_taps = "your taps look reversed: weight[:, W-1] multiplies the current token (CONV-1)"
    pool = _tensor("f32", [2, 1, 4], [3, 3, 3, 3, 0, 1, 2, 3])
    slot = _tensor("i32", [1], [1])
    newest_first = "your windows look newest first: the newest input stands in column W-1 (SLOT-1)"
    cut = "your windows look one column off: of W columns the oldest is the one to drop (CONV-4)"
    by_row = "your slots look like batch rows: row n uses slot read_slots[n] (SLOT-2)"
    stored = _tensor("f32", [2, 1, 4], [3, 3, 3, 3, 1, 2, 3, 1])
    one = {"x": _tensor("f32", [1, 1, 1], [1]), "weight": weight, "conv_pool": pool, "read_slots": slot}
    windowed = [([70.0], newest_first), ([100.0], cut), ([127.0], by_row)]
    return [
        Probe(_vector("causal_conv1d", [], {"x": _tensor("f32", [1, 3, 1], [1, 2, 3]), "weight": weight},
                      {"y": _tensor("f32", [1, 3, 1], [64, 144, 228])}), "y", [([1.0, 6, 27], reversed_taps)]),
        Probe(_vector("causal_conv1d_update", ["slot.pool"], one,
                      {"y": _tensor("f32", [1, 1, 1], [121]), "conv_pool": stored}), "y", windowed),
        Probe(_vector("causal_conv1d_prefill", ["slot.pool", "packed.cu"],
                      {**one, "cu_seqlens": _tensor("i32", [2], [0, 1])},
                      {"y": _tensor("f32", [1, 1, 1], [121]), "conv_pool": stored}), "y", windowed),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Matrix states
# ---------------------------------------------------------------------------------------------------------------------

_ROW_SLOTS = "your slots look like batch rows: row n uses slot read_slots[n] (SLOT-2)"


def _matrix_vector(op: str, args: Mapping[str, Any], features: Sequence[str], inputs: Mapping[str, Any],
                   **expect: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    needed = {"": ["packed.cu", "state.in"], "_prefill": ["packed.cu", "slot.pool"], "_update": ["slot.pool"]}
    return {"id": f"smoke-{op}", "class": "exact", "op": op, "args": args, "inputs": inputs,
            "expect": {name: {**spec, "how": "equal"} for name, spec in expect.items()},
            "lifts": ["pad_k", "pad_v", "heads", "layout"],
            "needs": {"op": op, "features": [*needed[_kind(op)], *features]}}  # fmt: skip


def _kind(op: str) -> str:
    return next((kind for kind in ("_prefill", "_update") if op.endswith(kind)), "")


def _entering(op: str, state: Sequence[float], shape: Sequence[int]) -> dict[str, Any]:
    """One row's entering state, as a tensor or in slot 1 of a pool; slot 0 holds something else."""
    if _kind(op) == "":
        return {"initial_state": _tensor("f32", [1, *shape], state), "cu_seqlens": _tensor("i32", [2], [0, 1])}
    pool = {**_pool(op, state, shape), "read_slots": _tensor("i32", [1], [1])}
    return pool if _kind(op) == "_update" else {**pool, "cu_seqlens": _tensor("i32", [2], [0, 1])}


def _pool(op: str, state: Sequence[float], shape: Sequence[int]) -> dict[str, Any]:
    """The pool with a state in slot 1; nothing for an operation without one."""
    return {} if _kind(op) == "" else {"state_pool": _tensor("f32", [2, *shape], [-7.0] * len(state) + list(state))}


def _delta_probes() -> list[Probe]:
    names = ("gated_delta_rule", "gated_delta_product", "kimi_delta_attention")
    every = [f"{name}{kind}" for name in names for kind in ("", "_prefill", "_update")]
    return [*(_delta_state(op) for op in every), *(_delta_write(op) for op in every),
            *(_delta_heads(op) for op in every), _copies_probe(), _channels_probe()]  # fmt: skip


def _delta_inputs(op: str, heads: int, values: int, **given: Sequence[float]) -> dict[str, Any]:
    """One token of two keys and one copy, zeros where nothing is given."""
    per_channel = op.startswith("kimi")
    shapes = {"q": [heads, 2], "k": [heads, 2], "v": [values, 2], "g": [values, 2] if per_channel else [values],
              "beta": [values]}  # fmt: skip
    types = {"q": "bf16", "k": "bf16", "v": "bf16", "g": "f32", "beta": "f32"}
    return {name: _tensor(types[name], [1, 1, *shape], given.get(name, [0.0] * int(np.prod(shape))))
            for name, shape in shapes.items()}  # fmt: skip


def _delta_state(op: str) -> Probe:
    """A token that only reads: what the state is, and that a log-decay of 0 keeps it."""
    inputs = {**_delta_inputs(op, 1, 1, q=[1, 0]), **_entering(op, [1, 2, 3, 4], [1, 2, 2])}
    after = _pool(op, [1, 2, 3, 4], [1, 2, 2])
    right = _tensor("bf16", [1, 1, 1, 2], [1, 2])
    wrong = [([1.0, 3], 'your state looks like [V, K]; set state_layout to "VK" (SLOT-6)'),
             ([0.0, 0], "your decay looks like a factor: g is its logarithm, and 0 keeps everything (GDN-1)"),
             ([-7.0, -7], _ROW_SLOTS), *_default_scale([1, 2])]  # fmt: skip
    return Probe(_matrix_vector(op, {"scale": 1}, [], inputs, o=right, **after), "o", wrong, _values)


def _delta_write(op: str) -> Probe:
    """A token that writes and reads: beta as it is given, and the given scale once."""
    token = _delta_inputs(op, 1, 1, q=[1, 0], k=[1, 0], v=[4, 8], beta=[1])
    inputs = {**token, **_entering(op, [0, 0, 0, 0], [1, 2, 2])}
    after = _pool(op, [4, 8, 0, 0], [1, 2, 2])
    right = _tensor("bf16", [1, 1, 1, 2], [8, 16])
    wrong: list[tuple[Sequence[float], str]] = [
        ([8 * SIGMOID_OF_ONE, 16 * SIGMOID_OF_ONE],
         "your beta looks as if a sigmoid were applied to it: beta is given after its sigmoid (GATE-5)"),
        ([16.0, 32], "your scale looks applied twice (GDN-4)"), ([4.0, 8], "your scale is not applied (GDN-4)"),
        ([0.0, 0], "your outputs look one write behind: a token reads what it has written (GDN-4)"),
        *_default_scale([4, 8]),
    ]  # fmt: skip
    return Probe(_matrix_vector(op, {"scale": 2}, [], inputs, o=right, **after), "o", wrong, _values)


def _default_scale(unscaled: Sequence[float]) -> Wrong:
    said = "your scale is the default one though another is given (GDN-4)"
    return [([x * k**-0.5 for x in unscaled], said) for k in KEY_SIZES]


def _delta_heads(op: str) -> Probe:
    """Four value heads over two key heads, each with a state of its own."""
    state = [x for head in range(1, 5) for x in (head, 0, 10 * head, 0)]
    inputs = {**_delta_inputs(op, 2, 4, q=[1, 0, 0, 1]), **_entering(op, state, [4, 2, 2])}
    right = _tensor("bf16", [1, 1, 4, 2], [1, 0, 2, 0, 30, 0, 40, 0])
    tiled = "your heads look tiled: value head h uses key head h // (HV / H) (GDN-5)"
    after = _pool(op, state, [4, 2, 2])
    vector = _matrix_vector(op, {"scale": 1}, ["heads.gva"], inputs, o=right, **after)
    return Probe(vector, "o", [([1.0, 20, 3, 40], tiled)], _heads)


def _copies_probe() -> Probe:
    """Two tokens of two copies, each writing a key of its own."""
    op, keys = "gated_delta_product", np.eye(4).ravel().tolist()
    inputs = {
        "q": _tensor("bf16", [1, 2, 1, 4], [1] * 8), "k": _tensor("bf16", [1, 4, 1, 4], keys),
        "v": _tensor("bf16", [1, 4, 1, 1], [1, 2, 3, 4]), "g": _tensor("f32", [1, 2, 1], [0, 0]),
        "beta": _tensor("f32", [1, 4, 1], [1] * 4), "cu_seqlens": _tensor("i32", [2], [0, 2]),
        "initial_state": _tensor("f32", [1, 1, 4, 1], [0] * 4),
    }  # fmt: skip
    by_copy = "your copies look copy-major: row t*M + m is copy m of token t (GDP-5)"
    vector = _matrix_vector(op, {"scale": 1, "num_householder": 2}, ["householder:2"], inputs,
                            o=_tensor("bf16", [1, 2, 1, 1], [3, 10]))  # fmt: skip
    return Probe(vector, "o", [([4.0, 10], by_copy)], lambda got: got[..., 0, 0])


def _channels_probe() -> Probe:
    """A gate that lets the second key channel forget."""
    op = "kimi_delta_attention"
    inputs = {**_delta_inputs(op, 1, 1, q=[1, 1], g=[0, -1024]), **_entering(op, [1, 5, 2, 7], [1, 2, 2])}
    right = _tensor("bf16", [1, 1, 1, 2], [1, 5])
    columns = "your gate decays value columns: channel k of the gate decays row k of the state (KDA-1)"
    vector = _matrix_vector(op, {"scale": 1}, ["decay.zero"], inputs, o=right)
    return Probe(vector, "o", [([3.0, 0], columns)], _values)


def _ssd_probes() -> list[Probe]:
    every = [f"ssd{kind}" for kind in ("", "_prefill", "_update")]
    return [*(_ssd_state(op) for op in every), *(_ssd_step(op) for op in every),
            *(_ssd_groups(op) for op in every)]  # fmt: skip


def _ssd_inputs(heads: int, groups: int, **given: Sequence[float]) -> dict[str, Any]:
    """One token of two state columns, zeros where nothing is given."""
    shapes = {"x": [1, 1, heads, 2], "dt": [1, 1, heads], "A": [heads], "B": [1, 1, groups, 2], "C": [1, 1, groups, 2]}
    types = {"x": "bf16", "dt": "f32", "A": "f32", "B": "bf16", "C": "bf16"}
    return {name: _tensor(types[name], shape, given.get(name, [0.0] * int(np.prod(shape))))
            for name, shape in shapes.items()}  # fmt: skip


def _ssd_state(op: str) -> Probe:
    """A token that only reads: what the state is, and that a rate A of 0 keeps it."""
    inputs = {**_ssd_inputs(1, 1, C=[1, 0], dt=[1]), **_entering(op, [1, 2, 3, 4], [1, 2, 2])}
    after = _pool(op, [1, 2, 3, 4], [1, 2, 2])
    right = _tensor("bf16", [1, 1, 1, 2], [1, 3])
    wrong = [([1.0, 2], "your state looks like [R, P]: rows are channels, columns are d_state (SLOT-1)"),
             ([1 / E, 3 / E], "your A looks like its logarithm: A itself is given, and 0 keeps everything (SSD-2)"),
             ([-7.0, -7], _ROW_SLOTS)]  # fmt: skip
    return Probe(_matrix_vector(op, {"dt_softplus": False}, [], inputs, y=right, **after), "y", wrong, _values)


def _ssd_step(op: str) -> Probe:
    """A token whose step is 0 writes nothing."""
    inputs = {**_ssd_inputs(1, 1, x=[4, 8], B=[1, 0], C=[1, 0]), **_entering(op, [1, 2, 3, 4], [1, 2, 2])}
    after = _pool(op, [1, 2, 3, 4], [1, 2, 2])
    right = _tensor("bf16", [1, 1, 1, 2], [1, 3])
    wrong = [([1 + 4 * SOFTPLUS_OF_ZERO, 3 + 8 * SOFTPLUS_OF_ZERO],
              "your step looks as if softplus were applied to it though dt_softplus is false (SSD-1)"),
             ([5.0, 11], "your write leaves out the step: dt x is written (SSD-2)")]  # fmt: skip
    return Probe(_matrix_vector(op, {"dt_softplus": False}, [], inputs, y=right, **after), "y", wrong, _values)


def _ssd_groups(op: str) -> Probe:
    """Four heads over two groups, each with a state of its own."""
    state = [x for head in range(1, 5) for x in (head, 10 * head, 0, 0)]
    inputs = {**_ssd_inputs(4, 2, C=[1, 0, 0, 1]), **_entering(op, state, [4, 2, 2])}
    right = _tensor("bf16", [1, 1, 4, 2], [1, 0, 2, 0, 30, 0, 40, 0])
    tiled = "your groups look tiled: head h uses group h // (H / G) (SSD-5)"
    after = _pool(op, state, [4, 2, 2])
    vector = _matrix_vector(op, {"dt_softplus": False}, ["groups"], inputs, y=right, **after)
    return Probe(vector, "y", [([1.0, 20, 3, 40], tiled)], _heads)


def check_wiring(client: Client) -> str:
    """A sentence that says what is wired wrongly, or nothing."""
    for probe in _probes():
        case = prepare(probe.vector, {}, client.capabilities)
        if isinstance(case, Case):
            said = _try(probe, case, client)
            if said:
                return said
    return check_hooks(client)


def _try(probe: Probe, case: Case, client: Client) -> str:
    seen: list[Reply] = []

    def run(call: Call, name: str) -> Reply:
        seen.append(client.run(call, vector=probe.vector["id"], name=name))
        return seen[-1]

    verdict = execute(case, run)
    if verdict.passed:
        return ""
    got = seen[-1].outputs.get(probe.tensor)
    for answer, sentence in probe.wrong:
        if got is not None and seen[-1].status == "ok" and _alike(probe.take(got), answer):
            return sentence
    return f"{probe.vector['op']}: {verdict.status}: {verdict.message}"


def _alike(got: Array, answer: Sequence[float]) -> bool:
    """Whether these are the recognised values, as far as sixteen bits would show."""
    numbers = got.astype(np.float64).ravel()
    return numbers.size == len(answer) and bool(np.allclose(numbers, answer, rtol=2.0**-7, atol=2.0**-7))
