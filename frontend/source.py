"""Where a mod was written, its name and its text."""

from __future__ import annotations

import functools
import linecache
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from flexc.frontend.compose import Composition, Traceable, name_of
from flexc.ir.graph import ModSource

_texts: WeakKeyDictionary[CodeType, str] = WeakKeyDictionary()


def source_of(function: Callable[..., Any]) -> ModSource:
    """Name, file, line and text; of a composition the texts of its parts."""
    parts = _leaves(function)
    codes = [code for code in map(code_of, parts) if code is not None]
    name = str(getattr(function, "__name__", None) or name_of(parts[0]))
    if not codes:
        return ModSource(name, "", 0, "")
    text = "\n".join(dict.fromkeys(_text(code) for code in codes))
    return ModSource(name, codes[0].co_filename, codes[0].co_firstlineno, text)


def _leaves(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    if isinstance(function, Traceable):
        return _leaves(function.function)
    if isinstance(function, Composition):
        return [leaf for part in function.parts for leaf in _leaves(part)]
    return [function]


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """The code that runs when `function` is called; None where it is not Python."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, Traceable):
        return code_of(function.function)
    function = getattr(function, "_torchdynamo_orig_callable", function)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        owner = type(function)
        code = getattr(getattr(owner, "forward", None) or owner.__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _text(code: CodeType) -> str:
    text = _texts.get(code)
    if text is None:
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : _last_line(code)]
        text = _texts[code] = textwrap.dedent("".join(lines)).rstrip("\n")
    return text


def _last_line(code: CodeType) -> int:
    last = max((end for _, end, _, _ in code.co_positions() if end is not None), default=code.co_firstlineno)
    return max([last, *(_last_line(c) for c in code.co_consts if isinstance(c, CodeType))])
