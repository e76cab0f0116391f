"""What every generated kernel's file begins with."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexc.codegen.hoisting import Function


@dataclass(frozen=True, slots=True)
class Constant:
    """A named number of a generated file, and the comment beside it."""

    name: str
    value: object
    meaning: str


LOG2E = Constant("LOG2E", 1.4426950408889634, "1 / ln 2: the softmax is computed in base 2")
LN2 = Constant("LN2", 0.6931471805599453, "back to the natural logarithm")


@dataclass(frozen=True, slots=True)
class Preamble:
    """What a view has for that: docstring, constants, helpers that mods use, and the mods as functions."""

    header: str
    constants: tuple[Constant, ...]
    helpers: tuple[str, ...]
    fast_tanh: bool
    functions: tuple[Function, ...]
    starts_early: bool = field(default=False, kw_only=True)
    """The kernel before lets it begin before its own end, and it lets the next."""
