"""The only user of jinja: fill a template, then check that the result parses."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

import jinja2

from flexc.codegen.emit import LINE_LENGTH
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


def wrapped(line: str) -> str:
    """A long line broken as ruff breaks it: a call or a parameter list at its end, or an assigned sum."""
    code = line.lstrip()
    if len(line) <= LINE_LENGTH or code.startswith(("#", '"')):
        return line
    indent = line[: len(line) - len(code)]
    name, equals, value = code.partition(" = ")
    if equals and name.isidentifier() and (not value.endswith(")") or len(_parts(value, " ")) > 3):
        return f"{indent}{name} = (\n{indent}    {value}\n{indent})"
    colon = ":" if line.endswith("):") else ""
    if not line.endswith(f"){colon}"):
        return line
    closing = len(line) - 1 - len(colon)
    opening = _opening(line, closing)
    head, body, tail = line[: opening + 1], line[opening + 1 : closing], f"{indent}){colon}"
    if len(indent) + 4 + len(body) <= LINE_LENGTH:
        return f"{head}\n{indent}    {body}\n{tail}"
    parts = "".join(f"{indent}    {part},\n" for part in _parts(body, ","))
    return f"{head}\n{parts}{tail}"


def _opening(line: str, closing: int) -> int:
    """Where the bracket opens that closes at `closing`."""
    depth = 0
    for at in range(closing, -1, -1):
        depth += (line[at] in ")]") - (line[at] in "([")
        if depth == 0:
            return at
    raise InternalError(f"render: brackets do not match in {line!r}")


def _parts(text: str, separator: str) -> list[str]:
    """`text` at the separators that are in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _tidy(text: str) -> str:
    """No trailing blanks, two blank lines between definitions, at most one inside, a newline at the end."""
    text = "\n".join(wrapped(line.rstrip()) for line in text.splitlines())
    text = re.sub(r"\n+(?=\n +else:)", "", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"\n+(?=@(triton|gluon)\.jit\n)", "\n\n\n", text)
    return text.strip("\n") + "\n"
