"""Traces as a part of the suite: what applies, what a failure says, and that one bad hook is one result."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from statescan.conformance import report as reports
from statescan.conformance.adapter import Adapter
from statescan.conformance.calls import Reply
from statescan.conformance.client import Client, python_command
from statescan.conformance.hooks import HOOKS, KINDS, MIXIN
from statescan.conformance.invoke import invoke, isolated
from statescan.conformance.lift_traces import fit_sizes, lift_trace
from statescan.conformance.replay_program import derive_trace, token_rows
from statescan.conformance.replay_random import BATCH, Book, random_trace, run_schedules, run_some
from statescan.conformance.runner import Selection, Target, results, run
from statescan.conformance.smoke import check_wiring
from statescan.conformance.traces import execute_trace, features, is_trace, prepare_trace, significant_bits
from statescan.conformance.worker import answer_setup
from statescan.goldens.store import check_schema, load_corpus, read_json
from statescan.reference.host import mixer_config
from statescan.reference.mixers import build_mixer

HERE = Path(__file__).parent
CORPUS = load_corpus()
LIFE, CUT, TWO = "trace-life-of-four-requests-gdn", "trace-prompt-cut-anywhere-gdn", "trace-two-layers-and-one-slot-gdn"
MERGE = "trace-mixin-merges-at-the-real-count"


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(HERE)


class InProcess:
    """What the runner needs of a client, without a child process."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.capabilities = adapter, adapter.capabilities

    def setup(self, mixer, vector: str = "") -> Reply:
        answer = answer_setup(self.adapter, mixer)
        return Reply("ok" if answer["ok"] else answer["status"], error=answer.get("error", ""),
                     message=answer.get("message", answer.get("need", "")))  # fmt: skip

    def run(self, call, *, vector: str, name: str) -> Reply:
        return invoke(self.adapter, isolated(call))


def rows_of(name: str, *chosen: str, module: str = "miniature_mixers") -> dict[str, dict]:
    """Results by trace, in this process."""
    client = InProcess(getattr(import_module(module), name))
    return {row["vector"]: row for row in results(client, [CORPUS[key] for key in chosen], CORPUS, None)}


# ---------------------------------------------------------------------------------------------------------------------
# What applies
# ---------------------------------------------------------------------------------------------------------------------


def test_kinds_are_those_of_the_mixers():
    assert KINDS == mixer_config.KINDS


def test_every_trace_of_a_claimed_kind_runs_and_the_others_say_why_not():
    for key, row in rows_of("right", *(key for key, one in CORPUS.items() if is_trace(one))).items():
        kind = CORPUS[key]["mixer"]["kind"]
        want = {"gdn": ("pass", None), "toy": ("not_applicable", MIXIN)}.get(kind, ("not_applicable", f"kind={kind}"))
        assert (row["status"], row.get("missing")) == want, key


def test_without_hooks_the_missing_word_is_the_hook():
    rows = rows_of("right", LIFE, CUT, MERGE, module="miniatures")
    assert {row["status"] for row in rows.values()} == {"not_applicable"}
    assert [rows[key]["missing"] for key in (LIFE, MERGE)] == ["ssm_decode", MIXIN]
    assert rows[CUT]["missing"] in HOOKS


@pytest.mark.parametrize(
    ("name", "trace", "word"),
    [("decode_only", LIFE, "ssm_prefill"), ("narrow_pools", LIFE, "dtypes"), ("narrow_operands", LIFE, "dtypes"),
     ("no_drafts", LIFE, "tokens.many"), ("no_keys", LIFE, "key_dim=1")],
)  # fmt: skip
def test_what_is_not_claimed_does_not_apply(name, trace, word):
    row = rows_of(name, trace)[trace]
    assert (row["status"], row["missing"]) == ("not_applicable", word)


def test_other_element_types_that_hold_every_number_serve():
    row = rows_of("double", LIFE)[LIFE]
    assert row["status"] == "pass"
    assert row["dtypes"]["ssm_state"] == "f64"


def test_a_whole_mixer_runs_the_traces_of_the_mixin_too():
    rows = rows_of("adapter", LIFE, MERGE, module="statescan.conformance.adapters.reference")
    assert {row["status"] for row in rows.values()} == {"pass"}


def test_needs_are_read_off_the_steps():
    assert features(CORPUS[LIFE], "ssm_decode") == ["slot.pool", "width:3", "window.W", "bare", "slot.negative",
                                                    "tokens.many", "intermediates"]  # fmt: skip
    of_prefill = set(features(CORPUS[LIFE], "ssm_prefill"))
    assert {"packed.cu", "empty_segments", "padded_rows", "snapshots.grid"} <= of_prefill
    assert significant_bits(np.array([0.0, -1024, 3025, 0.5])) == 12





def test_a_claim_of_what_is_no_mixer_is_refused():
    with pytest.raises(ValueError, match="'gdm' is no kind of mixer"):
        Adapter("x").mixer(kinds=["gdm"])
    assert prepare_trace(CORPUS[LIFE], CORPUS, []).word == "ssm_decode"


# ---------------------------------------------------------------------------------------------------------------------
# One trace, every size
# ---------------------------------------------------------------------------------------------------------------------

STORIES = {key: one for key, one in CORPUS.items() if is_trace(one) and one["mixer"]["kind"] != "toy"}
GROWN = {"mamba2": {"headdim": 3, "d_state": 4}}


@pytest.mark.parametrize("trace", STORIES.values(), ids=STORIES)
def test_a_lifted_trace_is_what_its_program_gives_at_that_size(trace):
    sizes = GROWN.get(trace["mixer"]["kind"], {"key_dim": 4, "value_dim": 3})
    lifted = lift_trace(trace, sizes)
    table = token_rows(trace)
    rows = [table.get(token, table[0]).tolist() for token in range(1 + max(table))]
    spelled = lift_trace({**trace, "rows": rows}, sizes)["rows"]
    authored = {key: lifted[key] for key in ("id", "mixer", "sizes", "program")}
    made = derive_trace({**authored, "rows": spelled, "requests": trace["requests"]})
    assert made["steps"] == lifted["steps"]
    assert made["alone"] == {name: {**lifted["alone"][name], "y": made["alone"][name]["y"]} for name in made["alone"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_of_larger_sizes_is_served(kind):
    limits = {"headdim": [16], "d_state": {"multiple": 8}, "key_dim": [16, 32], "value_dim": {"min": 8, "max": 64}}
    adapter = Adapter("large", arrays="torch")
    adapter.mixer(kinds=[kind], offers=(*HOOKS, MIXIN), operand="f64", limits=limits)(build_mixer)
    own = [one for one in STORIES.values() if one["mixer"]["kind"] == kind] + [CORPUS[MERGE]]
    rows = list(results(InProcess(adapter), own, CORPUS, None))
    assert {row["status"] for row in rows} == {"pass"}
    assert rows[0]["lift"] == {"mamba2": "headdim 16, d_state 8"}.get(kind, "key_dim 16, value_dim 8")


@pytest.mark.parametrize("kind", KINDS)
def test_and_so_are_random_schedules_with_several_heads(kind):
    adapter = Adapter("large", arrays="torch")
    limits = {name: [4] for name in ("headdim", "d_state", "key_dim", "value_dim")}
    adapter.mixer(kinds=[kind], offers=(*HOOKS, MIXIN), operand="f64", limits=limits)(build_mixer)
    client = InProcess(adapter)
    for seed in range(4):
        case = prepare_trace(random_trace(kind, seed), {}, client.capabilities)
        verdict = execute_trace(case, client.setup, lambda call, name: client.run(call, vector="", name=name))
        assert verdict.passed, verdict.message
        assert case.lift


def test_a_size_that_cannot_be_reached_is_said():
    assert rows_of("key_of_two", LIFE)[LIFE]["lift"] == "key_dim 2"
    assert fit_sizes(CORPUS[LIFE]["mixer"], {"key_dim": {"multiple": 8, "max": 4}, "value_dim": [0]}) == {}


# ---------------------------------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------------------------------


def test_a_failure_names_step_field_request_and_place():
    row = rows_of("late", LIFE)[LIFE]
    assert (row["status"], row["clause"], row["tensor"]) == ("fail.value", "STEP-2", "decode.y")
    assert row["place"] == {"step": 2, "request": "B", "row": 1, "token": 2, "channel": 0}
    assert row["message"].startswith("step 2: decode.y[1, 2, 0] (request B, row 1, token 2, channel 0): got ")


@pytest.mark.parametrize(
    ("name", "status", "field", "words"),
    [("writes_offsets", "fail.touched", "prefill.cu_seqlens", "prefill wrote its input cu_seqlens"),
     ("wide", "fail.dtype", "prefill", "y has type float64"), ("nothing", "fail.shape", "prefill", "y is None"),
     ("unmade", "error", None, "making the mixer: RuntimeError: no kernel of these sizes"),
     ("writes_beyond", "fail.touched", "pools_after_hooks.ssm_state", "no row names it")],
)  # fmt: skip
def test_each_misdeed_has_its_status(name, status, field, words):
    trace = TWO if name == "writes_beyond" else LIFE
    row = rows_of(name, trace)[trace]
    assert (row["status"], row.get("tensor")) == (status, field), row
    assert words in row["message"]


def test_a_crash_is_one_result():
    with Client(python_command("miniature_mixers:crashes")) as client:
        rows = {row["vector"]: row for row in results(client, [CORPUS[LIFE], CORPUS[CUT]], CORPUS, None)}
    assert rows[LIFE]["status"] == "error"
    assert "exit code 7" in rows[LIFE]["message"]
    assert rows[CUT]["status"] == "pass", "a new child takes over"


def test_a_report_has_traces_in_it(tmp_path):
    made = run([Target("late", python_command("miniature_mixers:late"))], Selection("full", ["STEP", "LIFE-1"]))
    data, page = reports.write(made, tmp_path)
    check_schema("report", read_json(data), "report")
    text = page.read_text("utf-8")
    assert "ssm_decode ssm_prefill (gdn)" in text
    assert LIFE in text
    assert "request B" in text


# ---------------------------------------------------------------------------------------------------------------------
# Wiring
# ---------------------------------------------------------------------------------------------------------------------


def told_of(change, *, kind: str, hook: str) -> str:
    """What the smoke test says of the reference with the tensors of one hook changed before it."""
    class Changed:
        def __init__(self, described) -> None:
            self.mixer = build_mixer(described)

        def ssm_decode(self, rows, conv_state, ssm_state, slots, *entries):
            conv, state, slots = change(self.mixer, conv_state.clone(), ssm_state.clone(), slots)
            return self.mixer.ssm_decode(rows, conv, state, slots, *entries)

        def ssm_prefill(self, rows, conv_state, ssm_state, context):
            metadata = context.mamba_metadata
            conv, state, metadata.batch_indices_prefill = change(self.mixer, conv_state.clone(), ssm_state.clone(),
                                                                 metadata.batch_indices_prefill)  # fmt: skip
            return self.mixer.ssm_prefill(rows, conv, state, context)

    adapter = Adapter("changed", arrays="torch")
    adapter.mixer(kinds=[kind], offers=[hook])(Changed)
    return check_wiring(InProcess(adapter))


def reversed_taps(mixer, conv, state, slots):
    mixer.conv_weight.data = mixer.conv_weight.data.flip(-1)
    conv[:, [i for i, taps in enumerate(mixer.conv_weight.tolist()) if taps == [1, 0, 0]]] = 1
    return conv, state, slots


CHANGES = {
    "": lambda m, conv, state, slots: (conv, state, slots),
    "batch rows": lambda m, conv, state, slots: (conv, state, slots * 0),
    "newest first": lambda m, conv, state, slots: (conv.flip(-1), state, slots),
    "one column off": lambda m, conv, state, slots: (conv.roll(1, -1), state, slots),
    "taps look reversed": reversed_taps,
    "hook looks as if it started from zeros": lambda m, conv, state, slots: (conv * 0, state * 0, slots),
    "state looks as if it started from zeros": lambda m, conv, state, slots: (conv, state * 0, slots),
}  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", CHANGES)
def test_a_wrongly_wired_hook_is_told_in_a_sentence(words, kind, hook):
    said = told_of(CHANGES[words], kind=kind, hook=hook)
    assert words in said
    assert said == "" if not words else said.startswith(f"{hook}: your ")


# ---------------------------------------------------------------------------------------------------------------------
# Schedules
# ---------------------------------------------------------------------------------------------------------------------


def test_a_run_of_schedules_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path, seen = tmp_path / "book.json", []

    def some(name, kind, first, count):
        if len(seen) == 1 and not path.with_suffix(".stop").exists():
            path.with_suffix(".stop").touch()
            raise KeyboardInterrupt
        seen.append((kind, first, count))
        return {"passed": count, "not_applicable": {}, "failed": []}

    monkeypatch.setattr("statescan.conformance.replay_random.run_some", some)
    with pytest.raises(KeyboardInterrupt):
        run_schedules(Book.open(path, "reference", 7), ["gdn"], 2 * BATCH + 3)
    assert Book.open(path, "reference", 7).done("gdn") == BATCH
    run_schedules(Book.open(path, "reference", 7), ["gdn", "kda"], 2 * BATCH + 3)
    starts = [7, 7 + BATCH, 7 + 2 * BATCH]
    assert seen == [(kind, first, 3 if first == starts[-1] else BATCH) for kind in ("gdn", "kda") for first in starts]
    assert Book.open(path, "reference", 8).done("gdn") == 0, "other seeds are another run"
    assert Book.open(path, "reference", 7, again=True).done("gdn") == 0


def test_schedules_of_an_adapter_are_judged_in_its_own_process():
    found = run_some("miniature_mixers:late", "gdn", 0, 6)
    assert found["failed"]
    assert "step" in found["failed"][0]["message"]
    assert run_some("miniature_mixers:right", "kda", 0, 2) == {"passed": 0, "not_applicable": {"kind=kda": 2},
                                                               "failed": []}  # fmt: skip


def test_the_recorded_run_of_the_reference_has_no_failure():
    book = read_json(HERE.parent / "conformance" / "replay_random.json")
    assert (book["format"], book["implementation"], book["first"]) == ("statescan.schedules/1", "reference", 0)
    assert set(book["mixers"]) == set(KINDS)
    for row in book["mixers"].values():
        assert row["count"] == row["passed"] >= 1000
        assert not row["failed"]
