"""Tracing of mods that torch.compile traced before: its graph of them is run on traced values.

That graph has torch functions on tensors in it, a call of `argument` for each input of the mods, and one of
`finish` with the results. What the mods captured are its placeholders.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flexc.errors import FlexcError, Span, UnsupportedOperation
from flexc.frontend.dispatch import TracingMode
from flexc.frontend.expression import columns_of
from flexc.frontend.proxy import Traced
from flexc.frontend.signature import check_result
from flexc.frontend.span import is_ours
from flexc.frontend.tracer import Tracer
from flexc.frontend.value import Value
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture, ModKind
from flexc.ir.ops import Input

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')
_NAMES = re.compile(r"^l_|_?cell_contents_?|^self_|_+$")


@dataclass(frozen=True, slots=True)
class Calls:
    """The functions in the graph that stand for something."""

    argument: Callable[..., Any]
    finish: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Traces:
    """Traced mods that share one list of captures, and their values; and what else `finish` was given."""

    score: Expr | None
    masks: tuple[Expr, ...]
    captures: tuple[Capture, ...]
    values: tuple[Value, ...]
    arguments: Mapping[str, Any]


class _Run(torch.fx.Interpreter):
    """Runs the graph. Captured tensors are stand-ins of the same shape, without contents or history."""

    def __init__(self, module: torch.fx.GraphModule, calls: Calls) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.tracer = Tracer()
        self.calls = calls
        self.real: list[Any] = []
        self.finished: dict[str, Any] = {}
        self._stand_ins: dict[int, Any] = {}
        self._operands: dict[int, Any] = {}
        """What stand-ins of numbers stand for, by their identity."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        operand = super().placeholder(target, args, kwargs)
        if isinstance(operand, torch.Tensor):
            if id(operand) not in self._stand_ins:
                self._stand_ins[id(operand)] = self._captured(_stand_in(operand), operand, str(target))
            return operand
        if isinstance(operand, (int, float, torch.SymInt, torch.SymFloat)):
            return self._number(operand, str(target))
        return operand

    def _number(self, operand: Any, target: str) -> Any:
        number = self.tracer.number(_hint(operand), _name(target))
        self._operands[id(number)] = operand
        self.real.append(operand)
        return number

    def _captured(self, stand_in: torch.Tensor, operand: torch.Tensor, target: str) -> torch.Tensor:
        self.tracer.add_leaf(stand_in, _name(target))
        self.real.append(operand)
        return stand_in

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            return super().run_node(n)
        except FlexcError as error:
            error.span = _span(n) or error.span
            raise

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor) and id(value) not in self._stand_ins:
            self._stand_ins[id(value)] = self._captured(_stand_in(value), value, str(target))
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is self.calls.argument:
            return _argument(self.tracer, args[1])
        if target is self.calls.finish:
            mods = {name: self._stand_in_for(kwargs[name]) for name in ("score", "masks")}
            scale = self._operands.get(id(kwargs["scale"]), kwargs["scale"])
            self.finished = {**kwargs, **mods, "scale": scale, "tensors": args}
            return None, None
        args, kwargs = self._stand_in_for(args), self._stand_in_for(kwargs)
        with TracingMode(self.tracer):
            return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "item" and _is_lifted_float(args[0]):
            return self._lifted_float(args[0])
        args, kwargs = self._stand_in_for(args), self._stand_in_for(kwargs)
        with TracingMode(self.tracer):
            return super().call_method(target, args, kwargs)

    def _lifted_float(self, operand: torch.Tensor) -> Traced:
        """A float that is no constant: torch.compile gives it as a tensor, which is left one to the end."""
        tensor = self.tracer.tensor(self._stand_in_for(operand))
        number = Traced(self.tracer, torch.float32, tensor.value)
        number.weak = True
        self._operands[id(number)] = operand
        return number

    def _stand_in_for(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._stand_ins.get(id(value), value)
        if isinstance(value, (tuple, list)):
            items = [self._stand_in_for(item) for item in value]
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._stand_in_for(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._stand_in_for(end) for end in (value.start, value.stop, value.step)))
        return value


def trace_subgraph(module: torch.fx.GraphModule, operands: tuple[Any, ...], calls: Calls) -> Traces:
    """The mods in a graph of torch.compile, and the values that they captured: the operands, still symbolic.

    Raises:
        TraceError: as `trace` does; `span` is a whole line where one has the same operation twice.
    """
    run = _Run(module, calls)
    run.run(*operands)
    given = run.finished
    score, masks = given.pop("score"), given.pop("masks")
    tracer = run.tracer
    score_root = None if score is None else check_result(tracer, score, ModKind.SCORE, len)
    mask_roots = tuple(check_result(tracer, mask, ModKind.MASK, len) for mask in masks)
    if tracer.volatile:
        raise UnsupportedOperation(
            "a mod computes something with captured tensors that has no form in a kernel",
            hint="compute the tensor outside the mod, and index it inside",
        )
    done = tracer.program.run(run.real)
    for step, value in tracer.guards.items():
        # Comparing a symbolic number makes torch.compile watch it; it was traced with this value.
        assert done[step] == value, "a number changed while it was traced"
    values = tuple(run.real[s.leaf] if s.leaf is not None else done[s.step or 0] for s in tracer.slots)
    return Traces(score_root, mask_roots, tuple(tracer.captures), values, given)


def _argument(tracer: Tracer, name: str) -> Traced:
    which = Input(name)
    dtype = torch.float32 if which is Input.SCORE else torch.int32
    return Traced(tracer, dtype, build.input_(which))


def _hint(number: Any) -> Any:
    """A plain number for a symbolic one: the one that was met first."""
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        hint = number.node.hint
        return int(number) if hint is None else hint
    return number


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without contents of the same dtype, and of the shape that was met first."""
    shape, strides = (tuple(map(_hint, x)) for x in (tensor.shape, tensor.stride()))
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")


def _is_lifted_float(operand: Any) -> bool:
    if not isinstance(operand, torch.Tensor):
        return False
    return operand.ndim == 0 and operand.dtype is torch.float64 and operand.device.type == "cpu"


def _name(target: str) -> str:
    """What a user may recognise in the name of a placeholder: `l_self_bias_` is `bias`."""
    return _NAMES.sub("", target) or target


def _span(node: torch.fx.Node) -> Span | None:
    """The user's expression of a node, or its line where that may be several ones.

    PyTorch notes the line; newer versions also where on it an expression starts, but not where it ends.
    """
    span = None
    for frame in _FRAME.finditer(node.meta.get("stack_trace") or ""):
        file, line = frame["file"], int(frame["line"])
        if not is_ours(file):
            text = linecache.getline(file, line).rstrip()
            columns = columns_of(file, line, _operation(node)) or (len(text) - len(text.lstrip()), len(text))
            span = Span(file, line, *columns, frame["function"])
    return span


def _operation(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
