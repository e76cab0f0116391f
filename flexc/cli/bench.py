"""`flexc bench`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flexc.bench import report
from flexc.bench.cases import CASES
from flexc.bench.cells import Plan, plans, problems
from flexc.bench.environment import environment
from flexc.bench.peers import PEERS, Peer
from flexc.bench.ready import Job, get_ready
from flexc.bench.results import Cell, to_json
from flexc.bench.run import choose_peers, run_cell
from flexc.bench.sizes import ON_CPU, ON_GPU, usual_sizes
from flexc.cli.options import Dtype, DtypeOption, Json, split_list, split_numbers
from flexc.cli.show import console, errors, show_json, show_text

_DIRECTIONS = {"forward": False, "backward": True}
_COMPILING = 0.6
"""The most of the time allowed that may go by before the first cell is timed."""
_SMALL = (
    "There is no GPU: small sizes and few rounds, to see that all is right. "
    "--cases, --lengths, --head-dims, --hidden and --rounds choose others."
)


def _usual(what: str, name: str) -> str:
    """The help of an option, with its values on a GPU and on a CPU where it is not given."""
    gpu, cpu = (str(getattr(sizes, name)).strip("(,)").replace(" ", "") for sizes in (ON_GPU, ON_CPU))
    return f"{what}; by default {gpu}, on a CPU {cpu}."


def bench(
    mod: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:NAME]", help="Your own mods instead of --cases.")
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(help=f"Any of {', '.join(CASES)}; by default all, on a CPU those without windows."),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help=_usual("Sequence lengths", "lengths"))] = None,
    head_dims: Annotated[str | None, typer.Option(help=_usual("Head dimensions", "head_dims"))] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Batch x length; by default the longest length.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help=_usual("Heads x head dim", "hidden"))] = None,
    dtype: DtypeOption = Dtype.BF16,
    peers: Annotated[
        str, typer.Option(help=f"Any of {', '.join(p.name for p in PEERS)}; by default all.")
    ] = "",
    directions: Annotated[str, typer.Option(help="Any of forward, backward.")] = "forward,backward",
    rounds: Annotated[
        int | None, typer.Option(min=3, help=_usual("Timed calls of each peer, in turns", "rounds"))
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds for all; drops rounds, and what does not compile.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, help="Processes that compile; by default one a core.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write to this file after each cell: .md, otherwise JSON.")
    ] = None,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables in Markdown.")] = False,
) -> None:
    """Time flexc beside every peer that is installed, in one run, after checking each result against fp64.

    Everything is compiled first, in processes side by side. TFLOP/s count only the pairs that may attend.

    A wrong result gets no speed: samples of the output, or of the gradients. The backward is timed alone.

    On a CPU the usual sizes are small, and the whole takes half a minute.
    """
    before = time.monotonic()
    on_gpu = torch.cuda.is_available()
    usual = usual_sizes(on_gpu=on_gpu)
    sizes = split_numbers(lengths, "--lengths") if lengths else list(usual.lengths)
    grid = list(
        problems(
            lengths=sizes,
            head_dims=split_numbers(head_dims, "--head-dims") if head_dims else usual.head_dims,
            tokens=tokens or max(sizes),
            hidden=hidden or usual.hidden,
            dtype=dtype.torch,
        )
    )
    chosen = choose_peers(split_list(peers, "--peers") if peers else [])
    names = split_list(cases, "--cases") if cases else usual.cases
    wanted = plans([mod] if mod else names, grid, own=mod is not None, directions=_directions(directions))
    for plan in wanted:
        plan.make()  # a name that does not exist is an error now
    rounds = rounds or usual.rounds
    deadline = None if budget is None else before + budget
    absent = _get_ready(wanted, chosen, jobs, budget) if on_gpu else {}
    settings = {"rounds": rounds, "budget": budget, "command": _command()}
    cells = _collect(_run(wanted, chosen, absent, rounds, deadline), settings, save)
    if as_json:
        show_json(to_json(cells, settings))
    elif markdown:
        show_text(_text(cells, settings, in_markdown=True))
    else:
        _show(cells)
        if not on_gpu and lengths is None:
            console.print(_SMALL, markup=False, style="dim")


def _collect(found: Iterable[Cell], settings: dict[str, Any], save: Path | None) -> list[Cell]:
    """The cells as they are found, each told of, and all so far written to `save`."""
    cells = []
    for cell in found:
        cells.append(cell)
        errors.print(f"[dim]{escape(report.title(cell))}[/]", highlight=False)
        if save is not None:
            save.write_text(_text(cells, settings, in_markdown=save.suffix == ".md"))
    return cells


def _directions(text: str) -> list[bool]:
    names = split_list(text, "--directions")
    for name in names:
        if name not in _DIRECTIONS:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(_DIRECTIONS)}", param_hint="--directions"
            )
    return [_DIRECTIONS[name] for name in dict.fromkeys(names)]


def _get_ready(
    wanted: Sequence[Plan], peers: Sequence[Peer], jobs: int | None, budget: float | None
) -> dict[Job, str]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    count = sum(p.compiles and (plan.backward or not p.only_backward) for plan in wanted for p in peers)
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task("compiling", total=count)
        seconds = float("inf") if budget is None else _COMPILING * budget
        return get_ready(
            wanted, peers, workers=jobs, seconds=seconds, progress=lambda job: progress.advance(task)
        )


def _run(
    wanted: Sequence[Plan],
    peers: Sequence[Peer],
    absent: dict[Job, str],
    rounds: int,
    deadline: float | None,
) -> Iterator[Cell]:
    for number, plan in enumerate(wanted):
        seconds = None
        if deadline is not None:
            seconds = (deadline - time.monotonic()) / (len(wanted) - number)
        yield run_cell(
            plan.make(),
            plan.problem,
            peers=peers,
            rounds=rounds,
            backward=plan.backward,
            seconds=seconds,
            absent={job.peer: why for job, why in absent.items() if job.plan == plan},
        )


def _command() -> str:
    """What was called, without where its output goes."""
    words, given = ["flexc"], iter(sys.argv[1:])
    for word in given:
        if word == "--save":
            next(given, None)
        elif word not in ("--json", "--markdown") and not word.startswith("--save="):
            words.append(word)
    return shlex.join(words)


def _text(cells: Sequence[Cell], settings: dict[str, Any], *, in_markdown: bool) -> str:
    if in_markdown:
        return report.markdown(cells, environment(), settings["command"], date.today().isoformat())
    return json.dumps(to_json(cells, settings), indent=1) + "\n"


def _show(cells: Sequence[Cell]) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in environment().items()), style="dim")
    for name, backward in _DIRECTIONS.items():
        chosen = [cell for cell in cells if cell.backward is backward]
        if not chosen:
            continue
        headings, *body = report.rows(chosen)
        table = Table(title=f"{name}, TFLOP/s")
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "case" else "right")
        for row in body:
            table.add_row(*map(escape, row))
        console.print(table)
    for line in report.notes(cells):
        console.print(line, markup=False, style="dim")
