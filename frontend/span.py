"""Where the user is.

The nearest frame outside flexc and torch, with the columns of the running expression.
"""

from __future__ import annotations

import linecache
import sys
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

import flexc.errors
import flexc.ir
from flexc.errors import Span

_OURS = tuple(
    str(Path(file).resolve().parent) + "/"
    for file in (__file__, flexc.errors.__file__, flexc.ir.__file__, torch.__file__)
    if file is not None
)


@lru_cache(maxsize=4096)
def is_ours(file: str) -> bool:
    """Whether a file is part of flexc or torch, or no file."""
    return file.startswith("<") or str(Path(file).resolve()).startswith(_OURS)


def user_frame() -> FrameType | None:
    """The innermost frame of code that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def span_here() -> Span | None:
    """The user's expression that is running now."""
    frame = user_frame()
    return None if frame is None else _span(frame.f_code, frame.f_lasti, frame.f_lineno)


def span_of_traceback(traceback: TracebackType | None) -> Span | None:
    """The user's expression that raised: the innermost frame that is neither ours nor torch's."""
    span = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not is_ours(code.co_filename):
            span = _span(code, traceback.tb_lasti, traceback.tb_lineno)
        traceback = traceback.tb_next
    return span


def span_of_code(code: CodeType, line: int | None = None) -> Span:
    """The first line of a function, for mistakes in its head."""
    first = code.co_firstlineno if line is None else line
    text = linecache.getline(code.co_filename, first).rstrip("\n")
    start = len(text) - len(text.lstrip())
    return Span(code.co_filename, first, start, max(len(text), start + 1), code.co_name)


def span_of_instruction(code: CodeType, offset: int) -> Span:
    """The expression that the instruction at byte `offset` of `code` belongs to."""
    return _span(code, offset, code.co_firstlineno)


def _span(code: CodeType, offset: int, fallback_line: int) -> Span:
    position = next(islice(code.co_positions(), offset // 2, None), (None, None, None, None))
    line, end_line, column, end_column = position
    if line is None or column is None or end_column is None:
        return span_of_code(code, line or fallback_line)
    text = linecache.getline(code.co_filename, line).rstrip("\n")
    if end_line != line:
        return Span(code.co_filename, line, in_characters(text, column), len(text), code.co_name)
    return Span(
        code.co_filename, line, in_characters(text, column), in_characters(text, end_column), code.co_name
    )


def in_characters(text: str, column: int) -> int:
    """A column of a line: Python counts bytes of UTF-8, people count characters."""
    return column if text.isascii() else len(text.encode()[:column].decode(errors="ignore"))
