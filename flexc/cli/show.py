"""The terminal: highlighted where there is one, plain text in a pipe."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

console = Console()
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
