"""`flexc cache`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flexc import cache as kernel_cache
from flexc.cli.show import console, show_text


class Action(StrEnum):
    """What to do with the cache."""

    LIST = "list"
    CLEAR = "clear"
    PATH = "path"


def cache(action: Annotated[Action, typer.Argument(help="What to do with it.")] = Action.LIST) -> None:
    """The kernel cache: list its kernels, delete them all, or print where they are."""
    if action is Action.PATH:
        show_text(str(kernel_cache.path()))
    elif action is Action.CLEAR:
        show_text(f"deleted {_count(kernel_cache.clear())}")
    else:
        _list()


def _list() -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("key", "kernel", "target", "size"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    found = list(kernel_cache.entries())
    for entry in found:
        size = f"{entry.bytes / 1024:.0f} KiB"
        table.add_row(entry.key[:12], escape(entry.description), entry.target, size)
    if found:
        console.print(table)
    total = sum(entry.bytes for entry in found) / 2**20
    show_text(f"{_count(len(found))}, {total:.1f} MiB, in {kernel_cache.path()}")


def _count(kernels: int) -> str:
    return f"{kernels} kernel{'' if kernels == 1 else 's'}"
