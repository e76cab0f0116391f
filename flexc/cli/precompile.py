"""`flexc precompile`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flexc.cli.options import split_dtypes, split_list, split_numbers
from flexc.cli.show import console, errors
from flexc.codegen.target import target_named
from flexc.precompile import Job, Made, plan_jobs, write_manifest
from flexc.precompile import precompile as compile_all


def precompile(
    mods: Annotated[
        list[str], typer.Argument(metavar="FILE.py[:NAME]...", help="All decorated mods, or one.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to.")],
    targets: Annotated[str, typer.Option(help="GPU generations, separated by commas.")] = "sm80,sm90,sm100",
    head_dims: Annotated[str, typer.Option(help="Head dimensions, separated by commas.")] = "64,128",
    dtypes: Annotated[str, typer.Option(help="bf16, fp16, fp32, separated by commas.")] = "bf16",
    backward: Annotated[bool, typer.Option("--backward", help="The kernels of the backward too.")] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="Kernels that drop weights.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With --backward: gradients are the same bits every time.")
    ] = False,
    groups: Annotated[
        str | None,
        typer.Option(
            help="Also kernels for few query rows, as in decoding, of so many query heads for each of keys: "
            "numbers separated by commas."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, help="Processes; by default one a core.")
    ] = None,
) -> None:
    """Compile kernels in parallel, for GPUs that need not be here: sources, machine code, manifest.json."""
    if deterministic and not backward:
        raise typer.BadParameter("add --backward: the forward always is", param_hint="--deterministic")
    wanted = [target_named(name).name for name in split_list(targets, "--targets")]
    planned = plan_jobs(
        mods,
        wanted,
        split_numbers(head_dims, "--head-dims"),
        [dtype.value for dtype in split_dtypes(dtypes, "--dtypes")],
        backward=backward,
        dropout=dropout,
        deterministic=deterministic,
        groups=[] if groups is None else split_numbers(groups, "--groups"),
    )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="-o") from error
    made = _with_progress(planned, output, jobs or os.cpu_count() or 1)
    manifest = write_manifest(made, output)
    console.print(_table(made))
    console.print(f"wrote {manifest}", markup=False, highlight=False, soft_wrap=True)
    failed = [each for each in made if each.error is not None]
    for each in failed:
        errors.print(f"[bold red]{escape(each.job.folder)}:[/] {escape(each.error or '')}", highlight=False)
    if failed:
        raise typer.Exit(1)


def _with_progress(planned: Sequence[Job], output: Path, workers: int) -> list[Made]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    made = []
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task("compiling", total=len(planned))
        for each in compile_all(planned, output, workers=workers):
            made.append(each)
            progress.update(task, advance=1, description=each.job.folder)
    return made


def _table(made: Sequence[Made]) -> Table:
    """A row for each forward, with bytes of shared memory and seconds; below, the kernels of its backward."""
    table = Table()
    for heading in ("kernel", "target", "D", "dtype", "registers", "spills", "shared", "s"):
        table.add_column(heading, justify="left" if heading in ("kernel", "target", "dtype") else "right")
    for each in sorted(made, key=lambda one: one.job.folder):
        job, seconds = each.job, f"{each.seconds:.1f}"
        of_job = (job.name, job.target, str(job.head_dim), job.dtype)
        if each.error is not None:
            table.add_row(*of_job, "[red]failed[/]", "", "", seconds)
        for place, (entry, facts) in enumerate(each.resources.items()):
            numbers = (str(facts["registers"]), str(facts["spills"]), f"{facts['shared_memory']:,}")
            if place == 0:
                table.add_row(*of_job, *numbers, seconds)
            else:
                table.add_row(f"  {entry.removeprefix('attention_')}", "", "", "", *numbers)
    return table
