"""What a mod must take and return."""

from __future__ import annotations

import dis
import inspect
import linecache
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from flexc.errors import Span, WrongArity, WrongReturnType
from flexc.frontend.compose import Composition, Traceable, name_of
from flexc.frontend.proxy import Traced
from flexc.frontend.source import code_of
from flexc.frontend.span import span_of_code, span_of_instruction
from flexc.frontend.tracer import Tracer
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.graph import ModKind
from flexc.ir.types import DType

ARGUMENTS = {
    ModKind.MASK: ("b", "h", "q_idx", "kv_idx"),
    ModKind.SCORE: ("score", "b", "h", "q_idx", "kv_idx"),
}
_MADE = ("MaskMod", "ScoreMod")  # what a function that makes a mod says that it returns
_VARARGS, _VARKEYWORDS = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS


def check_arity(function: Callable[..., Any], kind: ModKind) -> None:
    """Raises WrongArity when `function` cannot be called with the arguments of `kind`, or makes a mod."""
    while isinstance(function, Traceable):
        function = function.function
    if isinstance(function, Composition):
        for part in function.parts:
            check_arity(part, kind)
        return
    wanted = len(ARGUMENTS[kind])
    if type(function) is FunctionType:
        if function.__annotations__.get("return") in _MADE:
            raise _wrong_arity(function, kind)
        code = function.__code__
        required = code.co_argcount - len(function.__defaults__ or ())
        most = wanted if code.co_flags & _VARARGS else code.co_argcount
        missing_keywords = code.co_kwonlyargcount > len(function.__kwdefaults__ or ())
        if required <= wanted <= most and not missing_keywords:
            return
    elif _binds(function, wanted):
        return
    raise _wrong_arity(function, kind)


def _binds(function: Callable[..., Any], wanted: int) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # a builtin that does not say; calling it will tell
    try:
        signature.bind(*range(wanted))
    except TypeError:
        return False
    return True


def _wrong_arity(function: Callable[..., Any], kind: ModKind) -> WrongArity:
    arguments = ARGUMENTS[kind]
    other = ModKind.SCORE if kind is ModKind.MASK else ModKind.MASK
    signature = _without_annotations(inspect.signature(function))
    names = list(signature.parameters)
    makes = inspect.signature(function).return_annotation in _MADE
    hint = f"write `def {_identifier(function)}({', '.join(arguments)})`"
    required = [
        p.name
        for p in signature.parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is inspect.Parameter.empty
    ]
    if makes:
        hint = f"it makes a mod: call it and pass the result, {name_of(function)}(...)"
    elif required:
        bound = ", ".join(f"{name}=..." for name in required)
        hint = f"bind them before: functools.partial({name_of(function)}, {bound})"
    elif names[:1] in (["self"], ["cls"]):
        hint = (
            f"a method is a mod once it is bound: pass self.{name_of(function)}, or decorate it in __init__"
        )
    elif len(names) == len(ARGUMENTS[other]):
        hint = f"it takes the arguments of a {other.value}: pass it as {other.value}=, or {hint}"
    code = None if makes else code_of(function)  # its maker is no code of the user's
    return WrongArity(
        f"`{name_of(function)}` takes {signature}; a {kind.value} is called with ({', '.join(arguments)})",
        hint=hint,
        span=None if code is None else span_of_code(code, _def_line(code)),
    )


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return inspect.Signature(parameters)


def _identifier(function: Callable[..., Any]) -> str:
    name = name_of(function)
    return name if name.isidentifier() else "mod"


def _def_line(code: Any) -> int:
    """The line of `def`, past decorators: Python counts a function from its first decorator."""
    line = int(code.co_firstlineno)
    while linecache.getline(code.co_filename, line).lstrip().startswith("@"):
        line += 1
    return line


def check_result(tracer: Tracer, result: Any, kind: ModKind, function: Callable[..., Any]) -> Expr:
    """The root of the graph. Raises WrongReturnType."""
    if result is None:
        raise _wrong_result("None", kind, "add a `return`", function)
    if isinstance(result, Traceable) or type(result) is FunctionType:
        hint = f"it makes a mod: call it and pass the result, {name_of(function)}(...)"
        raise _wrong_result("a function", kind, hint, function)
    if isinstance(result, (tuple, list, dict, str)) or not tracer.is_operand(result, refuses=False):
        raise _wrong_result(f"a {type(result).__name__}", kind, "return one value", function)
    value = tracer.lift(result)
    if value.sizes:
        shape = tuple(int(size) for size in value.sizes)
        raise _wrong_result(
            f"a tensor of shape {shape}",
            kind,
            "index every dimension of captured tensors, or reduce: `.any(-1)`, `.sum(-1)`",
            function,
        )
    return _mask_root(value, function) if kind is ModKind.MASK else _score_root(value, function)


def _mask_root(value: Traced, function: Callable[..., Any]) -> Expr:
    if value.dtype is not torch.bool:
        hint = "compare: `return x != 0`" if not value.dtype.is_floating_point else "return a comparison"
        raise _wrong_result(f"a value of {value.dtype}", ModKind.MASK, hint, function)
    return value.value


def _score_root(value: Traced, function: Callable[..., Any]) -> Expr:
    if value.dtype is torch.bool:
        hint = (
            "a condition is a mask_mod: pass it as mask_mod=, or return torch.where(condition, score, -inf)"
        )
        raise _wrong_result("a boolean", ModKind.SCORE, hint, function)
    return build.cast(value.value, DType.F32)


def _wrong_result(what: str, kind: ModKind, hint: str, function: Callable[..., Any]) -> WrongReturnType:
    wanted = "one boolean" if kind is ModKind.MASK else "one number"
    return WrongReturnType(
        f"a {kind.value} returns {wanted}, but this one returned {what}",
        hint=hint,
        span=_return_span(function),
    )


def _return_span(function: Callable[..., Any]) -> Span | None:
    """The first `return` of the function."""
    code = code_of(function)
    if code is None:
        return None
    last = before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("RETURN_VALUE", "RETURN_CONST"):
            last = before if code.co_name == "<lambda>" else instruction.offset  # lambdas have no `return`
        before = instruction.offset
    return span_of_code(code) if last is None else span_of_instruction(code, last)
