"""The command line: `statescan list | show | run | schedules | matrix | regen | bench`, and those of `commands.py`.

Exit codes: 0 everything that ran passed, 1 failures, 2 wrong usage or a broken protocol.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from statescan.conformance import ci, commands
from statescan.conformance import report as reports
from statescan.conformance.adapters import SHIPPED
from statescan.conformance.hooks import KINDS
from statescan.conformance.runner import FULL, QUICK, Selection, Target, run, target
from statescan.conformance.traces import is_trace, operation
from statescan.conformance.untrusted import printable
from statescan.goldens.store import FormatError, kind_of, load_corpus, load_faults, vector_text
from statescan.spec.contract import PROFILES

console = Console()
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="statescan")
def main() -> None:
    """statescan: golden vectors for recurrent-state sequence mixers, run on your kernels."""


@main.command("list")
@click.option("--only", multiple=True, help="A clause, a family or a pattern over ids; may be repeated.")
@click.option("--profile", type=click.Choice([QUICK, FULL, *PROFILES]), default=FULL)
def list_vectors(only: tuple[str, ...], profile: str) -> None:
    """List vectors: id, class, clauses, operation, why."""
    selection = Selection(profile, only)
    table = Table(Column("id", no_wrap=True), "class", "clauses", "operation", "why", box=None, pad_edge=False)
    rows = [v for v in load_corpus().values() if selection.picks(v)]
    for v in rows:
        table.add_row(v["id"], v["class"], " ".join(v["clauses"]), operation(v), v["why"])
    console.print(table)
    traces = len([v for v in rows if is_trace(v)])
    console.print(f"{len(rows) - traces} vectors, {traces} traces")


@main.command()
@click.argument("identifier")
def show(identifier: str) -> None:
    """Show one vector or trace (by id), clause (by label) or known fault (by id)."""
    vectors, faults = load_corpus(), load_faults()
    if identifier in vectors:
        text = vector_text(vectors[identifier], kind_of(vectors[identifier]))
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    text = reports.clause_text(identifier)
    if text:
        console.print(text, markup=False, highlight=False)
        named = [v["id"] for v in vectors.values() if identifier in v["clauses"]]
        console.print(f"Vectors: {', '.join(named) or 'none'}", markup=False, highlight=False)
        return
    if identifier in faults:
        for key, value in faults[identifier].items():
            console.print(f"{key}: {value}", markup=False, highlight=False)
        console.print(f"killed by: {', '.join(v['id'] for v in vectors.values() if identifier in v.get('kills', []))}",
                      markup=False, highlight=False)  # fmt: skip
        return
    raise click.UsageError(f"{identifier!r} is no vector, clause or fault; `statescan list` names the vectors")


@main.command("run")
@click.option("--impl", "names", multiple=True, help="A shipped adapter, module:object, or run:COMMAND.")
@click.option("--all", "everything", is_flag=True, help="The reference and every shipped adapter.")
@click.option("--profile", type=click.Choice([QUICK, FULL, *PROFILES]), default=QUICK, show_default=True)
@click.option("--only", multiple=True, help="A clause, a family or a pattern over ids; may be repeated.")
@click.option("--seconds", type=float, help="Time limit for each implementation.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("reports"), show_default=True)
@click.option("--must-pass", default="reference", show_default=True,
              help="With --all: the implementations whose failures decide the exit code.")  # fmt: skip
@click.option("--fresh", type=click.IntRange(0), default=0, help="Also N vectors drawn now, unknown before.")
@click.option("--known", type=FILE, help="Known failures: a JSON object from vectors to reasons.")
@click.option("--junit", type=click.Path(path_type=Path, dir_okay=False), help="Also write JUnit XML here.")
@click.option("--badge", type=click.Path(path_type=Path, dir_okay=False), help="Also write badge JSON here.")
@click.option("--track", is_flag=True, help="Tell only what is not as in the report in --out; fail if it got worse.")
def run_suite(
    names: tuple[str, ...], everything: bool, profile: str, only: tuple[str, ...], seconds: float | None, out: Path,
    must_pass: str, fresh: int, known: Path | None, junit: Path | None, badge: Path | None, track: bool,
) -> None:  # fmt: skip
    """Run vectors on implementations, print what failed and where, and write report.json and report.html."""
    chosen = list(names) or (list(SHIPPED) if everything else ["reference"])
    try:
        targets = [target(name) for name in chosen]
        listed = {} if known is None else ci.read_known(known)
        before = reports.read(out / "report.json") if track and (out / "report.json").exists() else None
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    made = ci.mark_known(_run_with_progress(targets, Selection(profile, only), seconds, fresh), listed)
    if before is None:
        for one in made["runs"]:
            reports.print_run(console, one)
        reports.print_matrix(console, made)
    else:
        commands.print_changes(console, before, made)
    written = reports.write(made, out)
    for path, content in ((junit, ci.junit(made)), (badge, json.dumps(ci.badge(made["runs"][0])).encode())):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            written.append(path)
    console.print("reports: " + ", ".join(str(path) for path in written), highlight=False)
    if before is not None:
        sys.exit(int(ci.got_worse(before, made)))
    judged = must_pass.split(",") if everything and not names else [one.name for one in targets]
    sys.exit(reports.exit_code(made, judged))


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def matrix(files: tuple[Path, ...]) -> None:
    """One table, implementations by clause families, from several report.json files."""
    try:
        merged = reports.merge([reports.read(path) for path in files])
    except FormatError as error:
        raise click.UsageError(str(error)) from error
    reports.print_matrix(console, merged)


@main.command()
@click.option("--impl", "name", default="reference", show_default=True, help="Whose mixers; as for `run`.")
@click.option("--engine", help="A scheduler or engine instead, by its engine.run: its bookkeeping alone is tried.")
@click.option("--mixer", "kinds", multiple=True, type=click.Choice(["all", *KINDS]), help="A kind; may be repeated.")
@click.option("--count", type=click.IntRange(0), default=1000, show_default=True, help="Schedules for each mixer.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first schedule.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The book of the run, from which it goes "
              "on: reports/schedules.json, or reports/engine.json with --engine.")  # fmt: skip
@click.option("--again", is_flag=True, help="Start anew, whatever the book says.")
def schedules(
    name: str, engine: str | None, kinds: tuple[str, ...], count: int, seed: int, jobs: int, out: Path | None,
    again: bool,
) -> None:  # fmt: skip
    """Random schedules of bare mixers, or of an engine's bookkeeping: every request must come out as it does alone."""
    from statescan.conformance import replay_random, schedule_programs  # the reference is needed here alone on a run

    name, out = engine or name, out or Path("reports") / ("engine.json" if engine else "schedules.json")
    some = schedule_programs.run_some if engine else None
    try:
        target(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    chosen = KINDS if not kinds or "all" in kinds else kinds
    book = replay_random.Book.open(out, name, seed, again)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {kind: progress.add_task(kind, total=count, start=False) for kind in chosen}

        def step(kind: str, done: int) -> None:
            progress.start_task(tasks[kind])
            progress.update(tasks[kind], completed=done)

        replay_random.run_schedules(book, chosen, count, jobs, step, some)
    for kind in chosen:
        row = book.mixers.get(kind, {"count": 0, "passed": 0, "not_applicable": {}, "failed": []})
        for one in row["failed"]:
            said = f"{one['status']} {kind} seed {one['seed']}: {printable(one['message'])}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        skipped = "".join(f", {n} not applicable ({word})" for word, n in row["not_applicable"].items())
        console.print(f"{kind}: {row['count']} schedules, {row['passed']} as alone{skipped}, "
                      f"{len(row['failed'])} not", markup=False, highlight=False, soft_wrap=True)  # fmt: skip
    console.print(f"book: {out}", highlight=False)
    sys.exit(int(any(book.mixers.get(kind, {}).get("failed") for kind in chosen)))


@main.command()
@click.option("--check", "mode", flag_value="check", default=True, help="Recompute everything and compare.")
@click.option("--write", "mode", flag_value="write", help="Derive and store; refuses to change an expectation.")
@click.option("--dispatch", is_flag=True, help="With --check: also under other CPU dispatch settings.")
@click.option("--allow-change", metavar="REASON", help="With --write: change expectations, and say why.")
def regen(mode: str, dispatch: bool, allow_change: str | None) -> None:
    """Recompute the golden vectors, or write them."""
    from statescan.goldens import regenerate  # the reference is needed here and nowhere else on the command line

    if mode == "write":
        refused = regenerate.write(allow_change, lambda line: console.print(line, markup=False, highlight=False))
        for line in refused:
            console.print(f"refused: {line}", markup=False, highlight=False)
        if refused:
            console.print("give --allow-change REASON to change an expectation; drafts are left as .rej")
        sys.exit(1 if refused else 0)
    wrong = regenerate.check() + (regenerate.check_dispatch() if dispatch else [])
    for line in wrong:
        console.print(line, markup=False, highlight=False)
    console.print(f"{len(load_corpus())} vectors checked, {len(wrong)} not as computed")
    sys.exit(1 if wrong else 0)


@main.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure the fast path on this machine's GPU, beside yardsticks and peers (--help says more)."""
    from statescan.fast.bench import bench as table  # torch and Triton are needed here and nowhere else

    table.main(list(arguments))


def _run_with_progress(
    targets: list[Target], selection: Selection, seconds: float | None, fresh: int = 0
) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {one.name: progress.add_task(one.name, total=None) for one in targets}

        def step(name: str, done: int, of: int) -> None:
            progress.update(tasks[name], total=of, completed=done + 1)

        return run(targets, selection, seconds=seconds, progress=step, fresh=fresh)


for command in commands.COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    main()
