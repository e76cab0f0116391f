"""`flexc cache`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from flexc import cache as kernel_cache
from flexc.cli.show import show_text


class Action(Enum):
    """What to do with the cache."""

    LIST = "list"
    CLEAR = "clear"
    PATH = "path"


def cache(action: Annotated[Action, typer.Argument(help="What to do with it.")] = Action.LIST) -> None:
    """The kernel cache: list its kernels, clear it, or print where it is."""
    if action is Action.PATH:
        show_text(str(kernel_cache.path()))
