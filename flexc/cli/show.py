"""The terminal: highlighted where there is one, plain text in a pipe."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

PIPE_WIDTH = 160
"""Columns of a table that is not shown on a terminal."""

console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
errors = Console(stderr=True)


def show_code(text: str, language: str) -> None:
    """Prints `text` as it is; in colours on a terminal. `language` is the name of a Pygments lexer."""
    if console.is_terminal:
        console.print(Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=False))
    else:
        print(text)


def show_text(text: str) -> None:
    """Prints `text` as it is, without wrapping or markup."""
    console.print(text, markup=False, highlight=console.is_terminal, soft_wrap=True)


def show_json(data: Any) -> None:
    """Prints plain data as JSON, for programs."""
    print(json.dumps(data, indent=2))
