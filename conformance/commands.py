"""Commands for whoever brings an implementation: `smoke`, `explain`, `repro`, `replay`, `export`, `verify`."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from statescan import __version__
from statescan.conformance import ci, folder, recorded
from statescan.conformance import report as reports
from statescan.conformance.calls import Call, Reply
from statescan.conformance.cases import Missing
from statescan.conformance.client import Client, ProtocolError
from statescan.conformance.explain import explain, look, repro
from statescan.conformance.runner import FULL, Selection, Target, environment, target
from statescan.conformance.smoke import check_wiring
from statescan.conformance.traces import is_trace
from statescan.conformance.untrusted import MAX_BYTES, printable
from statescan.goldens.store import FormatError, load_corpus, manifest
from statescan.spec.contract import OPERAND_BITS, OPERATIONS, RULES_VERSION

console = Console()
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
ONLY = click.option("--only", multiple=True, help="A clause, a family or a pattern over ids; may be repeated.")
IMPL = "A shipped adapter, module:object, or run:COMMAND."


def say(text: str) -> None:
    """One line or more as they are, nothing in them obeyed."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _target(name: str) -> Target:
    try:
        return target(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@click.command()
@click.option("--impl", "name", required=True, help=IMPL)
def smoke(name: str) -> None:
    """Is the adapter wired rightly? A few calls of hand size; one sentence says what is wrong."""
    try:
        with Client(list(_target(name).command)) as client:
            if not client.hello["ok"]:
                say(f"{name}: {printable(client.hello.get('message', 'not installed'))}")
                sys.exit(2)
            wrong = check_wiring(client)
            claimed = sorted({claim["op"] for claim in client.capabilities})
    except ProtocolError as error:
        say(f"{name}: {printable(error)}")
        sys.exit(2)
    say(printable(wrong) if wrong else f"{name}: wired rightly, as far as eight calls tell: {', '.join(claimed)}")
    sys.exit(int(bool(wrong)))


@click.command("explain")
@click.argument("report", type=FILE)
@click.argument("identifier")
def explain_one(report: Path, identifier: str) -> None:
    """What a report says of one vector, why the vector is there, and which known faults fail it."""
    try:
        lines = list(explain(reports.read(report), identifier))
    except FormatError as error:
        raise click.UsageError(str(error)) from error
    if not lines:
        raise click.UsageError(f"{report.name} has no result for {identifier!r}")
    for line in lines:
        say(line)


@click.command("repro")
@click.argument("identifier")
@click.option("--impl", "name", required=True, help=IMPL)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The script; ID.py here otherwise.")
def repro_one(identifier: str, name: str, out: Path | None) -> None:
    """Run one vector, and write its failure as a script that needs the implementation and NumPy alone."""
    corpus = load_corpus()
    if identifier not in corpus:
        raise click.UsageError(f"{identifier!r} is no vector; `statescan list` names them")
    again = f"statescan run --impl {name} --only {identifier}"
    chosen = _target(name)
    if is_trace(corpus[identifier]) or chosen.rung != "in process":
        say(f"A trace and another language have no script of their own: {again}")
        sys.exit(2)
    try:
        with Client(list(chosen.command)) as client:
            seen = look(client, corpus[identifier], corpus)
            kind = kind_of(client)
    except ProtocolError as error:
        say(f"{name}: {printable(error)}")
        sys.exit(2)
    if isinstance(seen, Missing):
        say(f"not_applicable: {seen.word} is not claimed")
        sys.exit(0)
    if seen.verdict.passed:
        say(f"pass: nothing to show ({again})")
        sys.exit(0)
    say(f"{seen.verdict.status}: {printable(seen.verdict.message)}")
    path = repro(corpus[identifier], seen, _module(chosen), out or Path(f"{identifier}.py"), **kind)
    say(f"script: {path}" if path else f"this call has no script of its own: {again}")
    sys.exit(1)


def kind_of(client: Client) -> dict[str, str]:
    """What arrays an implementation takes, and on which device, for a script that calls it."""
    arrays, device = client.hello.get("info", {}).get("arrays"), str(client.hello.get("device", "cpu"))
    named = re.fullmatch(r"[a-z]{1,12}(:[0-9]{1,3})?", device)  # it is written into a script
    return {"arrays": "torch" if arrays == "torch" else "numpy", "device": device if named else "cpu"}


def _module(chosen: Target) -> str:
    """module:object of an implementation in Python."""
    return chosen.command[-1]


@click.command("replay")
@click.argument("file", type=FILE)
@click.option("--impl", "name", help=f"Shrink with the implementation that was recorded. {IMPL}")
@click.option("--operand", type=click.Choice(list(OPERAND_BITS)), help="Precision of its matrix operands.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="For judging, and again for shrinking.")
@click.option("--max-bytes", type=click.IntRange(1), default=MAX_BYTES, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="The script, or what is left of the record; FILE_small otherwise.")  # fmt: skip
def replay_one(
    file: Path, name: str | None, operand: str | None, seconds: float, max_bytes: int, out: Path | None
) -> None:
    """Was a recorded call right? If not: where first, what it looks like, and the least call that is still wrong."""
    from statescan.conformance import replay_call, shrink  # the reference is needed here

    try:
        call = recorded.load(file, max_bytes)
        judged = replay_call.judge_recorded(call, operand or "", seconds)
    except FormatError as error:
        raise click.UsageError(printable(error)) from error
    verdict = judged.verdict
    score = "" if verdict.score is None else f", score {verdict.score:.3g} for {judged.precision.operand} operands"
    if verdict.passed:
        furthest = f" (the {judged.places} rows and heads that are furthest off were judged)" if judged.places else ""
        say(f"right: {call.call.op}{score}{furthest} {printable(verdict.message)}".rstrip())
        sys.exit(0)
    say(f"wrong: {call.call.op}: {verdict.status}{score}\n    {printable(verdict.message)}")
    if call.slots:
        say("    slots of the pool: " + ", ".join(f"{i} is {slot}" for i, slot in enumerate(call.slots[:16])))
    path, kind = out or file.with_name(f"{file.stem}_small.py"), {}
    if name is None:
        small = shrink.shrink_record(judged, seconds)
    else:
        with Client(list(_target(name).command)) as client:
            small, kind = shrink.shrink(judged, _runner(client), seconds), kind_of(client)
    if small is None:
        say("    the implementation is right on this call now: what was wrong is not in its arguments")
        sys.exit(1)
    faults = replay_call.candidates(small.piece, small.reply, judged, "" if name else small.verdict.tensor)
    say(f"    looks like: {', '.join(faults) or 'no known fault'}")
    sizes = ", ".join(f"{letter} {n}" for letter, n in small.size.items())
    still = "still wrong" if name else "wrong in the record"
    say(f"    {still} with {sizes} ({small.tried} tried, {small.seconds:.1f} s):")
    say(f"    {printable(small.verdict.message)}")
    if name is not None and _target(name).rung == "in process":
        say(f"    script: {shrink.write(small, judged, _module(_target(name)), path, **kind)}")
    else:
        say(f"    record: {shrink.keep(small, judged, path.with_suffix('.json'))}")
    sys.exit(1)


def _runner(client: Client) -> Callable[[Call], Reply]:
    return lambda call: client.run(call, vector="replay")


@click.command("export")
@click.argument("directory", type=FOLDER)
@click.option("--claims", type=FILE, help="A JSON list of claims; without it vectors go out as they stand.")
@click.option("--impl", "name", help="Take the claims of this adapter.")
@ONLY
@click.option("--profile", default=FULL, show_default=True)
def export_folder(directory: Path, claims: Path | None, name: str | None, only: tuple[str, ...], profile: str) -> None:
    """Write the calls of vectors into a folder, to be answered elsewhere, and judged by `verify`."""
    corpus = load_corpus()
    try:
        if name is not None:
            with Client(list(_target(name).command)) as client:
                wanted = client.capabilities
        else:
            wanted = folder.read_claims(claims) if claims is not None else everything()
        vectors = [vector for vector in corpus.values() if Selection(profile, only).picks(vector)]
        count = folder.export(directory, vectors, corpus, wanted)
    except (FormatError, ProtocolError, OSError) as error:
        raise click.UsageError(printable(error)) from error
    say(f"{count} calls in {directory}: fill every .out, write done.jsonl, then `statescan verify {directory}`")


def everything() -> list[dict[str, Any]]:
    """Claims of every operation and feature in any type."""
    from statescan.conformance.adapter import ALL_FEATURES

    words = [*ALL_FEATURES, "householder:M"]
    return [{"op": name, "features": words, "operand": "f32", "dtypes": [], "limits": {}, "state_layout": ["KV", "VK"]}
            for name in OPERATIONS]  # fmt: skip


@click.command("verify")
@click.argument("directory", type=FOLDER)
@click.option("--out", type=click.Path(path_type=Path), default=Path("reports"), show_default=True)
@click.option("--name", default="folder", show_default=True, help="What the report calls the implementation.")
def verify_folder(directory: Path, out: Path, name: str) -> None:
    """Judge a folder that `export` made and somebody filled in."""
    corpus = load_corpus()
    try:
        results = list(folder.verify(directory, corpus))
    except FormatError as error:
        raise click.UsageError(printable(error)) from error
    made = {
        "format": "statescan.report/1", "suite": __version__, "rules": RULES_VERSION,
        "corpus": manifest(corpus.values())["digest"],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "profile": FULL,
        "environment": environment(),
        "runs": [{"implementation": name, "rung": "folder", "state": "ran", "results": results}],
    }  # fmt: skip
    reports.print_run(console, made["runs"][0])
    written = reports.write(made, out)
    say("reports: " + ", ".join(map(str, written)))
    sys.exit(reports.exit_code(made, [name]))


def print_changes(to: Console, before: dict[str, Any], after: dict[str, Any]) -> None:
    """What is not as it was, one line each, and how much is."""
    found = list(ci.changes(before, after))
    for name, vector, was, now, row in found:
        to.print(f"{was} -> {now} {row['clause']} {vector} ({printable(name)})", markup=False, highlight=False,
                 soft_wrap=True)  # fmt: skip
        if reports.failed(now):
            to.print(f"    {printable(row.get('message', ''))}", markup=False, highlight=False, soft_wrap=True)
    total = sum(len(run["results"]) for run in after["runs"])
    to.print(f"{len(found)} of {total} results are not as in the report before", markup=False, highlight=False)


COMMANDS = (smoke, explain_one, repro_one, replay_one, export_folder, verify_folder)
