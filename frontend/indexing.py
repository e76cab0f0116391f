"""Indexing of traced tensors: partial, with ellipsis, None, slices, and by tensors of indices."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flexc.errors import IndexRankMismatch, MutationInMod, UnsupportedOperation, WrongIndexType
from flexc.frontend.elementwise import broadcast, element_of, operation
from flexc.frontend.numbers import TracedNumber
from flexc.frontend.proxy import Size, Traced
from flexc.frontend.span import span_here
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Keep:
    """A dimension that stays, from `start` in steps of `step`."""

    size: Size
    start: Expr
    step: int


@dataclass(frozen=True, slots=True)
class New:
    """A dimension of length 1 that None inserts."""


@dataclass(frozen=True, slots=True)
class Pick:
    """A dimension that integers choose from."""

    index: Traced


Item = Keep | New | Pick


@operation("__getitem__")
def getitem(tracer: Tracer, input: Any, index: Any) -> Any:
    """`input[index]`. Raises IndexRankMismatch or WrongIndexType."""
    base = tracer.lift(input)
    items = _expand(tracer, base, index)
    picks = tuple(item.index for item in items if isinstance(item, Pick))
    picked = broadcast(picks) if picks else ()
    position = _position(items) if picked else 0
    kept: list[Size] = [_size(item) for item in items if not isinstance(item, Pick)]
    sizes = (*kept[:position], *picked, *kept[position:])

    def element(at: tuple[Expr, ...]) -> Expr:
        chosen = at[position : position + len(picked)]
        rest = iter((*at[:position], *at[position + len(picked) :]))
        return base.at(tuple(_resolve(items, chosen, rest)))

    result = Traced(tracer, base.dtype, element(()) if not sizes else None, sizes, element)
    result.name = base.name
    return result


def _resolve(items: list[Item], chosen: tuple[Expr, ...], rest: Any) -> Any:
    for item in items:
        if isinstance(item, Pick):
            yield element_of(item.index, chosen)
        elif isinstance(item, New):
            next(rest)
        else:
            yield _offset(item, next(rest))


def _offset(item: Keep, i: Expr) -> Expr:
    if item.step != 1:
        i = build.binary(Op.MUL, i, build.const(item.step))
    if item.start.op is Op.CONST and item.start.attr == 0:
        return i
    return build.binary(Op.ADD, i, item.start)


def _size(item: Item) -> Size:
    return item.size if isinstance(item, Keep) else 1


def _position(items: list[Item]) -> int:
    """Where dimensions of index tensors go.

    In their place if these are adjacent, else first, as in PyTorch.
    """
    places = [i for i, item in enumerate(items) if isinstance(item, Pick) and item.index.sizes]
    between = items[places[0] : places[-1] + 1]
    if not all(isinstance(item, Pick) for item in between):
        return 0
    return sum(not isinstance(item, Pick) for item in items[: places[0]])


def _expand(tracer: Tracer, base: Traced, index: Any) -> list[Item]:
    given = list(index) if isinstance(index, tuple) else [index]
    rank = len(base.sizes)
    consumed = sum(item is not None and item is not Ellipsis for item in given)
    if consumed > rank:
        name = f"`{base.name}`" if base.name else "the tensor"
        raise IndexRankMismatch(
            f"{name} has {rank} dimension(s) but is indexed with {consumed}",
            hint="give at most one index a dimension",
            span=span_here(),
        )
    if not any(item is Ellipsis for item in given):
        given.append(Ellipsis)
    items: list[Item] = []
    dimension = 0
    for item in given:
        if item is None:
            items.append(New())
        elif item is Ellipsis:
            for _ in range(rank - consumed):
                items.append(Keep(base.sizes[dimension], build.const(0), 1))
                dimension += 1
        else:
            items.append(_item(tracer, base, dimension, item))
            dimension += 1
    return items


def _item(tracer: Tracer, base: Traced, dimension: int, item: Any) -> Item:
    size = base.sizes[dimension]
    if isinstance(item, slice):
        return _slice(tracer, size, item)
    if isinstance(item, (list, np.ndarray)):
        item = tracer.call("tensor", list(item))
    if isinstance(item, (bool, np.bool_)) and not isinstance(item, TracedNumber):
        raise WrongIndexType("a bool is no index", hint="use torch.where to choose", span=span_here())
    if isinstance(item, int) and not isinstance(item, TracedNumber):
        _check_range(base, dimension, int(item))
    index = tracer.lift(item)
    if index.dtype is torch.bool or index.dtype.is_floating_point:
        raise WrongIndexType(
            f"an index must be an integer, not {index.dtype}",
            hint="choose with torch.where(condition, a, b)"
            if index.dtype is torch.bool
            else "convert it: `x.long()`, or divide integers with `//`",
            span=span_here(),
        )
    return Pick(index)


def _check_range(base: Traced, dimension: int, index: int) -> None:
    size = base.sizes[dimension]
    length = size.value if isinstance(size, TracedNumber) else size
    if not -length <= index < length:
        name = f"`{base.name}`" if base.name else "a tensor"
        raise IndexRankMismatch(
            f"index {index} is out of range for dimension {dimension} of {name}, which has length {length}",
            span=span_here(),
        )


def _slice(tracer: Tracer, size: Size, item: slice) -> Keep:
    """Positions without clamping where the ends are the usual ones; the length stays a run-time fact."""
    if any(isinstance(end, (Traced, torch.Tensor)) for end in (item.start, item.stop, item.step)):
        raise UnsupportedOperation(
            "a slice with traced ends has no fixed length",
            hint="index single elements: `table[start + i]`",
            span=span_here(),
        )
    step = 1 if item.step is None else operator.index(item.step)
    if step != 1:
        start, stop, step = slice(item.start, item.stop, step).indices(int(size))
        return Keep(len(range(start, stop, step)), build.const(start), step)
    start = _end(item.start, size, 0)
    stop = _end(item.stop, size, size)
    length = stop - start
    return Keep(length if length > 0 else 0, tracer.lift(start).value, 1)


def _end(end: Any, size: Size, default: Size) -> Size:
    if end is None:
        return default
    if end < 0:
        end = size + end
        return end if end > 0 else 0
    return end if end < size else size


@operation("__setitem__", "index_put", "scatter", "scatter_add", "index_add", "index_copy", "masked_scatter")
def setitem(tracer: Tracer, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Always refused: a mod is a pure function."""
    raise MutationInMod(
        "a mod writes into a tensor, and a mod is a pure function",
        hint="choose between values: torch.where(condition, new, old)",
        span=span_here(),
    )


@operation("select")
def select(tracer: Tracer, input: Any, dim: int, index: Any) -> Any:
    """One entry of a dimension."""
    x = tracer.lift(input)
    dim = dim % max(len(x.sizes), 1)
    return getitem(tracer, x, (*[slice(None)] * dim, index))


@operation("unbind")
def unbind(tracer: Tracer, input: Any, dim: int = 0) -> tuple[Any, ...]:
    """All entries of a dimension; its length becomes a constant."""
    x = tracer.lift(input)
    if not x.sizes:
        raise TypeError("iteration over a tensor without dimensions")
    return tuple(select(tracer, x, dim, i) for i in range(x.sizes[dim]))


@operation("index_select")
def index_select(tracer: Tracer, input: Any, dim: int, index: Any) -> Any:
    """The entries of a dimension at `index`."""
    return select(tracer, input, dim, index)


@operation("take")
def take(tracer: Tracer, input: Any, index: Any) -> Any:
    """Elements of the flattened tensor."""
    return getitem(tracer, tracer.call("flatten", input), index)
