"""The command `flexc`: its sub-commands, and how its errors end."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape

from flexc._version import __version__
from flexc.cli.bench import bench
from flexc.cli.cache import cache
from flexc.cli.doctor import doctor
from flexc.cli.explain import explain
from flexc.cli.inspect import inspect
from flexc.cli.plot import plot
from flexc.cli.precompile import precompile
from flexc.cli.show import errors
from flexc.errors import FlexcError

app = typer.Typer(
    name="flexc",
    help="Attention kernels compiled from Python mask and score functions.",
    epilog="FILE.py:NAME names a decorated or a plain function; FILE.py:MASK+SCORE names one of each.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("inspect")(inspect)
app.command("explain")(explain)
app.command("precompile")(precompile)
app.command("plot")(plot)
app.command("bench")(bench)
app.command("cache")(cache)
app.command("doctor")(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexc {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command line and exits: 0 done, 1 the user can act, 2 wrong usage."""
    try:
        app()
    except FlexcError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has all that it wants
        sys.stderr.close()
        sys.exit(0)
