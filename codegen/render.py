"""The only user of jinja: fill a template, then check that the result parses."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

import jinja2

from flexc.errors import InternalError


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("flexc.templates", package_path=""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        line_statement_prefix="#%",
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template: str, kernel: object) -> str:
    """The template's text for `kernel`, as a Python file.

    Raises:
        InternalError: the result is no Python; the message has the lines around the fault.
    """
    text = _tidy(_environment().get_template(template).render(kernel=kernel))
    try:
        ast.parse(text)
    except SyntaxError as error:
        lines = text.splitlines()
        at = error.lineno or 1
        around = "\n".join(f"{n + 1:5} {lines[n]}" for n in range(max(0, at - 6), min(len(lines), at + 5)))
        raise InternalError(
            f"render: {template} gave text that does not parse: {error.msg}\n{around}"
        ) from error
    return text


def _tidy(text: str) -> str:
    """No trailing blanks, two blank lines between definitions, at most one inside, a newline at the end."""
    text = "\n".join(line.rstrip() for line in text.splitlines())
    text = re.sub(r"\n+(?=\n +else:)", "", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"\n+(?=@triton\.jit\n)", "\n\n\n", text)
    return text.strip("\n") + "\n"
