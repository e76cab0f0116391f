"""The one node of the expression language, and the two ways to walk a graph of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from threading import RLock
from typing import TypeVar
from weakref import WeakValueDictionary

from flexc.ir.ops import Input, Op
from flexc.ir.types import DType

Attr = bool | int | float | Input | tuple[int, int] | None
T = TypeVar("T")

_interned: WeakValueDictionary[tuple[object, ...], Expr] = WeakValueDictionary()
_lock = RLock()


def _attr_key(attr: Attr) -> object:
    """A key that keeps apart what Python calls equal: 1, True and 1.0; 0.0 and -0.0. NaN equals itself."""
    if isinstance(attr, float):
        return (float, attr.hex())
    return (type(attr), attr)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True, repr=False)
class Expr:
    """An operation applied to operands. Interned: two equal expressions are the same object.

    `attr` is what a leaf carries: the value of a CONST, the Input of an INPUT, the slot of a SCALAR or LOAD,
    `(slot, dimension)` of a SIZE. A MIN or MAX of floats that is one step of a reduction has the reduction's
    depth, see `flexc.ir.build.extremes`. Every other op has None. Build nodes with `flexc.ir.build`, which
    promotes types and checks operands.
    """

    op: Op
    args: tuple[Expr, ...]
    attr: Attr
    dtype: DType

    def __new__(cls, op: Op, args: tuple[Expr, ...], attr: Attr, dtype: DType) -> Expr:
        key = (op, args, _attr_key(attr), dtype)
        node = _interned.get(key)
        if node is None:
            with _lock:  # two threads must not make two nodes of one expression
                node = _interned.get(key)
                if node is None:
                    node = _interned[key] = object.__new__(cls)
        return node

    def __reduce__(self) -> tuple[object, ...]:
        return Expr, (self.op, self.args, self.attr, self.dtype)

    def __repr__(self) -> str:
        from flexc.ir.printer import to_text

        return f"Expr({to_text(self)})"


def topological(*roots: Expr, leaves: Collection[Expr] = ()) -> list[Expr]:
    """Every node under `roots` once, operands before the nodes that use them, in a stable order.

    What is under `leaves` only is left out.
    """
    order: list[Expr] = []
    done: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            order.append(node)
            continue
        stack.append((node, True))
        if node not in leaves:
            stack.extend((arg, False) for arg in reversed(node.args) if arg not in done)
    return order


def fold(roots: Iterable[Expr], visit: Callable[[Expr, tuple[T, ...]], T]) -> dict[Expr, T]:
    """`visit(node, values of its operands)` for every node under `roots`, once each; the values by node."""
    values: dict[Expr, T] = {}
    for node in topological(*roots):
        values[node] = visit(node, tuple(values[arg] for arg in node.args))
    return values


def rebuild(root: Expr, replace: Callable[[Expr, tuple[Expr, ...]], Expr]) -> Expr:
    """`root` with every node replaced by `replace(node, its new operands)`, bottom up."""
    return fold([root], replace)[root]


def with_args(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` over other operands of the same types."""
    return node if args == node.args else Expr(node.op, args, node.attr, node.dtype)


def inputs_of(root: Expr) -> frozenset[Input]:
    """The inputs that `root` reads."""
    return frozenset(n.attr for n in topological(root) if n.op is Op.INPUT and isinstance(n.attr, Input))
