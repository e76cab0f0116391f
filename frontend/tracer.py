"""The state of one trace: captures by slot, the program of captured numbers, guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch

from flexc.errors import Span, TraceError, UnsupportedCapture, UnsupportedOperation
from flexc.frontend.holders import CapturedObject
from flexc.frontend.host import Apply, Constant, Leaf, Program, SizeOf
from flexc.frontend.numbers import TracedNumber, traced_number
from flexc.frontend.proxy import OPERATIONS, Traced
from flexc.frontend.real import call_real, realisable
from flexc.frontend.span import span_here
from flexc.frontend.value import STORAGES, number_storage
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.types import Storage


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a graph depends on of a captured tensor, and its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: torch.layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        with torch._C.DisableTorchFunction():
            return cls(tensor.dtype, tuple(tensor.shape), tensor.layout)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the value of a capture comes from.

    A watched leaf (a tensor), or a step of the program (a number).
    """

    leaf: int | None
    step: int | None


class Tracer:
    """Collects what a mod reads while it runs on traced values."""

    def __init__(self) -> None:
        self.program = Program()
        self.captures: list[Capture] = []
        self.slots: list[Slot] = []
        self.leaves: list[Any] = []
        self.leaf_names: list[str] = []
        self.facts: dict[int, TensorFacts] = {}
        self.guards: dict[int, Any] = {}
        self.sized: set[int] = set()
        self.volatile = False
        self._tensor_leaf: dict[int, int] = {}
        self._tensors: dict[int, Traced] = {}
        self._slot_of: dict[Slot, int] = {}
        self.reads: list[Span | None] = []

    # What was captured.

    def add_leaf(self, value: object, name: str) -> int:
        """A captured number or tensor; the same tensor is one leaf, however often it was found."""
        if isinstance(value, torch.Tensor):
            known = self._tensor_leaf.get(id(value))
            if known is not None:
                return known
            self._tensor_leaf[id(value)] = len(self.leaves)
            self.facts[len(self.leaves)] = TensorFacts.of(value)
        self.leaves.append(value)
        self.leaf_names.append(name)
        return len(self.leaves) - 1

    def own_tensor(self, tensor: torch.Tensor) -> Traced:
        """A tensor that the mod made from constants: the same at every call."""
        self.add_leaf(tensor, f"constant{len(self.leaves)}")
        return self.tensor(tensor)

    def number(self, value: int | float | bool, name: str) -> TracedNumber:
        """The stand-in of a captured number that was just found."""
        leaf = self.add_leaf(value, name)
        return traced_number(self, self.program.add(Leaf(leaf), name), value)

    def guard(self, step: int, value: object) -> None:
        """The trace holds only while this step has this value."""
        if not isinstance(self.program.steps[step], Constant):
            self.guards[step] = value

    def apply(
        self, function: Callable[..., Any], symbol: str, operands: tuple[object, ...], result: Any
    ) -> TracedNumber:
        """The stand-in of `function` of numbers and stand-ins."""
        steps, names = [], []
        for operand in operands:
            step = operand.step if isinstance(operand, TracedNumber) else self.program.constant(operand)  # type: ignore[arg-type]
            steps.append(step)
            name = self.program.names[step]
            names.append(f"({name})" if " " in name else name)
        if len(names) == 2:
            name = f"{names[0]} {symbol} {names[1]}"
        else:
            name = f"{symbol}({', '.join(names)})" if symbol.isalpha() else f"{symbol}{names[0]}"
        return traced_number(self, self.program.add(Apply(function, tuple(steps)), name), result)

    def size(self, leaf: int, dimension: int) -> TracedNumber:
        """The length of a dimension of a captured tensor."""
        self.sized.add(leaf)
        name = f"{self.leaf_names[leaf]}.shape[{dimension}]"
        step = self.program.add(SizeOf(leaf, dimension), name)
        return traced_number(self, step, self.facts[leaf].shape[dimension])

    def forget(self) -> None:
        """Let go of what was captured: traced values and their tracer hold each other."""
        self.leaves = []
        self._tensors.clear()

    # From captured things to nodes.

    def _slot(self, slot: Slot, name: str, storage: Storage, rank: int | None) -> int:
        found = self._slot_of.get(slot)
        if found is None:
            found = self._slot_of[slot] = len(self.slots)
            self.slots.append(slot)
            self.captures.append(Capture(name, storage, rank))
            self.reads.append(span_here())
        return found

    def tensor_slot(self, leaf: int) -> int:
        """The slot of a captured tensor.

        Raises UnsupportedCapture for a dtype or layout that kernels cannot read.
        """
        facts = self.facts[leaf]
        name = self.leaf_names[leaf]
        storage = STORAGES.get(facts.dtype)
        if facts.layout is not torch.strided:
            raise UnsupportedCapture(
                f"the captured tensor `{name}` is {facts.layout}, which kernels cannot read",
                hint=f"convert it before: `{name} = {name}.to_dense()`",
                span=span_here(),
            )
        if storage is None:
            raise UnsupportedCapture(
                f"the captured tensor `{name}` is {facts.dtype}, which kernels cannot read",
                hint="convert it before, to torch.float32 or torch.int32 for example",
                span=span_here(),
            )
        return self._slot(Slot(leaf, None), name, storage, len(facts.shape))

    def number_expr(self, number: TracedNumber) -> Expr:
        """The node of a captured number: a run-time argument, a tensor's size, or a literal."""
        step = self.program.steps[number.step]
        if isinstance(step, Constant):
            return build.const(step.value)
        if isinstance(step, SizeOf):
            return build.size(self.tensor_slot(step.leaf), step.dimension)
        storage = number_storage(number.value)
        name = self.program.names[number.step]
        if storage is None:
            raise UnsupportedCapture(
                f"the captured number `{name}` is {number.value}, which does not fit into 64 bits",
                hint="use a float, or a smaller number",
                span=span_here(),
            )
        return build.scalar(self._slot(Slot(None, number.step), name, storage, None), storage.dtype)

    def is_capture(self, value: Traced) -> bool:
        """Whether `value` is a captured tensor or a view of one, rather than a number read from it."""
        return (value.name is not None and bool(value.sizes)) or any(
            value is t for t in self._tensors.values()
        )

    # From anything a mod computes with to traced values.

    def is_operand(self, value: object, *, refuses: bool = True) -> bool:
        """Whether arithmetic with `value` is ours to do.

        With `refuses`, raises UnsupportedOperation for what could only be a mistake: numbers of another kind,
        and objects.
        """
        if isinstance(value, (Traced, TracedNumber, int, float, torch.Tensor, np.generic)):
            return True
        if refuses and (isinstance(value, Number) or type(value) is CapturedObject):
            raise _refused(value)
        return False

    def lift(self, value: object) -> Traced:
        """`value` as a traced value. Raises UnsupportedOperation for what is neither number nor tensor."""
        if isinstance(value, Traced):
            return value
        if isinstance(value, TracedNumber):
            return self._weak(self.number_expr(value), value.value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bool):
            return self._weak(build.const(value), value)
        if isinstance(value, int):
            return self._weak(self._literal(int(value)), int(value))
        if isinstance(value, float):
            return self._weak(build.const(float(value)), float(value))
        raise _refused(value)

    def _literal(self, value: int) -> Expr:
        if number_storage(value) is None:
            raise UnsupportedOperation(
                f"the integer {value} does not fit into 64 bits", hint="use float('inf')", span=span_here()
            )
        return build.const(value)

    def _weak(self, expr: Expr, value: int | float | bool) -> Traced:
        dtype = torch.bool if type(value) is bool else torch.int64 if type(value) is int else torch.float32
        traced = Traced(self, dtype, expr)
        traced.weak = True
        traced.real = lambda: value
        return traced

    def tensor(self, tensor: torch.Tensor) -> Traced:
        """A captured tensor as a traced one.

        One that was not found among the captures makes the trace volatile.
        """
        known = self._tensors.get(id(tensor))
        if known is not None:
            return known
        leaf = self._tensor_leaf.get(id(tensor))
        if leaf is None:
            self.volatile = True
            leaf = self.add_leaf(tensor, f"tensor{len(self.leaves)}")
        dtype, rank = self.facts[leaf].dtype, len(self.facts[leaf].shape)
        if rank == 0:
            traced = Traced(self, dtype, self._load(leaf, ()))
        else:
            sizes = tuple(self.size(leaf, dimension) for dimension in range(rank))
            traced = Traced(self, dtype, None, sizes, lambda index: self._load(leaf, index))
        traced.name = self.leaf_names[leaf]
        traced.real = lambda: tensor
        self._tensors[id(tensor)] = traced
        return traced

    def _load(self, leaf: int, index: tuple[Expr, ...]) -> Expr:
        slot = self.tensor_slot(leaf)
        return build.load(slot, index, STORAGES[self.facts[leaf].dtype].dtype)

    # Operations.

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The operation that torch calls `name`."""
        function = OPERATIONS.get(name)
        if function is None:
            return call_real(self, name, args, kwargs)
        try:
            result = function(self, *args, **kwargs)
        except (TraceError, RecursionError):
            raise
        except TypeError as error:
            if realisable(args, kwargs):
                return call_real(self, name, args, kwargs)
            raise UnsupportedOperation(
                f"mods cannot use {name} in this form: {error}".replace("operation() ", ""), span=span_here()
            ) from error
        if isinstance(result, Traced):
            if not torch.is_grad_enabled() and name != "detach":  # the mod's own `torch.no_grad()`
                return self.call("detach", result)
            if result.real is None and realisable(args, kwargs):
                result.real = lambda: call_real(self, name, args, kwargs, keep=True)
        elif isinstance(result, tuple) and realisable(args, kwargs):
            for i, item in enumerate(result):
                if isinstance(item, Traced):
                    item.real = lambda i=i: call_real(self, name, args, kwargs, keep=True)[i]
        return result


def _refused(value: object) -> UnsupportedOperation:
    """The error that a mod computes with something else than ints, floats and tensors."""
    kind = value.__class__.__name__  # of the original, where it is a stand-in
    hint = "convert it to a torch tensor outside the mod"
    if isinstance(value, complex):
        hint = "mods compute in real numbers"
    elif isinstance(value, Number):
        hint = f"write float(x) where x is the {kind}: PyTorch's tensors take no {kind} either"
    elif type(value) is CapturedObject:
        hint = "use its attributes that are numbers or tensors"
    return UnsupportedOperation(
        f"a mod computes with numbers and tensors, not with {kind}", hint=hint, span=span_here()
    )
