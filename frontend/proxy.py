"""The traced value: what a mod computes with while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from flexc.errors import (
    BranchOnTracedValue,
    ConvertTracedValue,
    MutationInMod,
    NoSuchAttribute,
    UnsupportedOperation,
)
from flexc.frontend.branch import branch_hint
from flexc.frontend.span import span_here
from flexc.ir.expr import Expr

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer

Size = Any
"""An int, or a TracedNumber when it is the length of a captured tensor's dimension."""

OPERATIONS: dict[str, Callable[..., Any]] = {}
"""Every operation on traced values by torch's name for it: `f(tracer, *args, **kwargs)`."""

ATTRIBUTES = frozenset(
    {"shape", "ndim", "dtype", "device", "T", "mT", "data", "is_cuda", "requires_grad", "real"}
)
"""The operations that are read as attributes of a tensor."""


class Traced:
    """A number of the graph (no sizes), or a tensor of such numbers: `element` gives the one at an index.

    It behaves as the tensor that PyTorch would call the mod with, `dtype` included. `weak` marks what came
    from a Python number, which does not promote tensors. `real` computes the tensor itself where no input
    takes part.
    """

    __slots__ = ("__weakref__", "dtype", "element", "expr", "name", "real", "sizes", "tracer", "weak")
    __array_ufunc__ = None  # numpy leaves operators to us

    def __init__(
        self,
        tracer: Tracer,
        dtype: torch.dtype,
        expr: Expr | None,
        sizes: tuple[Size, ...] = (),
        element: Callable[[tuple[Expr, ...]], Expr] | None = None,
    ) -> None:
        self.tracer = tracer
        self.dtype = dtype
        self.expr = expr
        self.sizes = sizes
        self.element = element
        self.weak = False
        self.real: Callable[[], Any] | None = None
        self.name: str | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from flexc.frontend.dispatch import dispatch_from_operands

        return dispatch_from_operands(func, args, kwargs or {})

    @property
    def value(self) -> Expr:
        """The expression; only of a single number."""
        if self.expr is None:
            raise UnsupportedOperation(
                f"a tensor of {len(self.sizes)} dimension(s) is used where one number is needed",
                hint="index every dimension, or reduce the last one: `.sum(-1)`, `.any(-1)`",
                span=span_here(),
            )
        return self.expr

    def at(self, index: tuple[Expr, ...]) -> Expr:
        """The element at `index`, one expression a dimension."""
        if self.expr is not None:
            return self.expr
        assert self.element is not None
        return self.element(index)

    def __getattr__(self, name: str) -> Any:
        if name in OPERATIONS:
            if name in ATTRIBUTES:
                return self.tracer.call(name, self)
            return lambda *args, **kwargs: self.tracer.call(name, self, *args, **kwargs)
        if name.endswith("_") and not name.startswith("_") and name[:-1] in OPERATIONS:
            return lambda *args, **kwargs: self.assign(self.tracer.call(name[:-1], self, *args, **kwargs))
        if name.startswith("_"):  # Python and PyTorch ask for these, to learn what a value can do
            raise AttributeError(f"a traced value has no attribute {name!r}")
        if not hasattr(torch.Tensor, name):
            raise NoSuchAttribute(
                f"a traced value has no attribute {name!r}, and a tensor has none either",
                hint="mods use arithmetic, comparisons, and methods such as .abs() and .clamp()",
                span=span_here(),
            )
        if self.real is not None:
            return lambda *args, **kwargs: self.tracer.call(name, self, *args, **kwargs)
        raise UnsupportedOperation(
            f"mods cannot use torch.Tensor.{name}",
            hint="use elementwise arithmetic, comparisons, torch.where, and indexing of captured tensors",
            span=span_here(),
        )

    def assign(self, result: Traced) -> Traced:
        """Becomes `result`, as a tensor does under an in-place operation.

        Every name of it sees the change.
        """
        if self.tracer.is_capture(self):
            raise MutationInMod(
                f"an in-place operation changes the captured `{self.name}`, and a mod is a pure function",
                hint="write `x = x + y` in place of `x += y`",
                span=span_here(),
            )
        promoted = torch.promote_types(self.dtype, result.dtype)
        if promoted != self.dtype and not torch.can_cast(result.dtype, self.dtype):
            raise UnsupportedOperation(
                f"an in-place operation cannot turn {self.dtype} into {result.dtype}",
                hint="write `x = x + y` in place of `x += y`",
                span=span_here(),
            )
        result = self.tracer.call("to", result, self.dtype)
        self.expr, self.sizes, self.element, self.real = (
            result.expr,
            result.sizes,
            result.element,
            result.real,
        )
        return self

    def where(self, condition: Any, other: Any) -> Any:
        """Tensor.where, which has another order than torch.where."""
        return self.tracer.call("where", condition, self, other)

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.call("__getitem__", self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.call("__setitem__", self, index, value)

    def __len__(self) -> int:
        return int(self.tracer.call("__len__", self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tracer.call("unbind", self))

    def __contains__(self, item: Any) -> bool:
        return bool(self.tracer.call("any", self == item))

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise BranchOnTracedValue(
            "Python control flow needs the truth of a traced value, which differs from element to element",
            hint=branch_hint(),
            span=span_here(),
        )

    def __repr__(self) -> str:
        return f"Traced({self.dtype}, rank {len(self.sizes)})"


def _refuse(what: str, hint: str) -> Callable[..., Any]:
    def conversion(self: Traced, *args: object, **kwargs: object) -> Any:
        raise ConvertTracedValue(
            f"{what}, but a traced value differs from element to element", hint=hint, span=span_here()
        )

    return conversion


_CONVERSIONS = {
    "__int__": (
        "int() needs one number",
        "drop int(): indices are integers already; to truncate, `x.long()`",
    ),
    "__index__": (
        "a Python list, a numpy array or range() needs one number",
        "index a torch tensor: put the list in torch.tensor(...) outside the mod",
    ),
    "__float__": (
        "float() or a function of `math` needs one number",
        "use torch: `torch.exp(x)`, `x.float()`",
    ),
    "__complex__": ("complex() needs one number", "mods compute in real numbers"),
    "__round__": ("round() needs one number", "use torch.round(x)"),
    "__trunc__": ("math.trunc() needs one number", "use torch.trunc(x)"),
    "__floor__": ("math.floor() needs one number", "use torch.floor(x), or `//` for integers"),
    "__ceil__": ("math.ceil() needs one number", "use torch.ceil(x), or `-(-x // n)` for integers"),
    "__array__": (
        "numpy needs an array",
        "use torch: the function of the same name; for a numpy array, torch.from_numpy(x) outside the mod",
    ),
    "item": (".item() needs one number", "drop .item(): use the value as it is"),
    "tolist": (".tolist() needs an array", "use the value as it is"),
    "numpy": (".numpy() needs an array", "use the value as it is"),
}

OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "matmul": "matmul",
}
"""Python's binary operators, without underscores, by what torch calls each."""
_EQUALITY = ("eq", "ne")
"""What any two objects have."""
_COMPARISONS = ("lt", "le", "gt", "ge", *_EQUALITY)
_UNARY = {"neg": "neg", "pos": "positive", "invert": "bitwise_not", "abs": "abs"}


def _operator(name: str) -> Callable[[Traced, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if not self.tracer.is_operand(other, refuses=name not in _EQUALITY):
            return NotImplemented
        return self.tracer.call(name, self, other)

    return method


def _reflected(name: str) -> Callable[[Traced, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if not self.tracer.is_operand(other):
            return NotImplemented
        return self.tracer.call(name, other, self)

    return method


def _in_place(name: str) -> Callable[[Traced, Any], Any]:
    return lambda self, other: self.assign(self.tracer.call(name, self, other))


def _unary(name: str) -> Callable[[Traced], Any]:
    return lambda self: self.tracer.call(name, self)


def _install() -> None:
    for dunder, name in OPERATORS.items():
        setattr(Traced, f"__{dunder}__", _operator(name))
        setattr(Traced, f"__r{dunder}__", _reflected(name))
        setattr(Traced, f"__i{dunder}__", _in_place(name))
    for name in _COMPARISONS:
        setattr(Traced, f"__{name}__", _operator(name))
    for dunder, name in _UNARY.items():
        setattr(Traced, f"__{dunder}__", _unary(name))
    for name, (what, hint) in _CONVERSIONS.items():
        setattr(Traced, name, _refuse(what, hint))


_install()
