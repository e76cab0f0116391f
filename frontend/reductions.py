"""Reductions over a few elements of captured tensors, unrolled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexc.errors import ReductionTooLong
from flexc.frontend import math_forms as forms
from flexc.frontend.elementwise import ZERO, as_float, fit, mapped, operation, promote
from flexc.frontend.proxy import Traced
from flexc.frontend.span import span_here
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.types import DType

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer

LONGEST = 256
"""Elements that one reduction may unroll."""

Combine = Callable[[Expr, Expr], Expr]


def _tree(combine: Combine, items: list[Expr]) -> Expr:
    """Combined in pairs: a shallow tree, and sums round less than one after another."""
    while len(items) > 1:
        pairs = [combine(a, b) for a, b in zip(items[::2], items[1::2], strict=False)]
        items = pairs + items[len(items) - len(items) % 2 :]
    return items[0]


def reduced(
    x: Traced, dim: Any, keepdim: bool, dtype: torch.dtype, combine: Callable[[list[Expr]], Expr]
) -> Traced:
    """`combine` of the elements along `dim` (None: all). Raises ReductionTooLong."""
    rank = len(x.sizes)
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        dims = list(range(rank))
    else:
        dims = sorted({d % max(rank, 1) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))})
    if rank == 0:
        return mapped(x.tracer, lambda e: combine([fit(e, dtype)]), (x,), dtype)
    lengths = [int(x.sizes[d]) for d in dims]
    if math.prod(lengths) > LONGEST:
        raise ReductionTooLong(
            f"a reduction over {math.prod(lengths)} elements; at most {LONGEST} are unrolled",
            hint="reduce outside the mod and capture the result, or shorten the dimension",
            span=span_here(),
        )
    places = [tuple(build.const(i) for i in place) for place in product(*(range(n) for n in lengths))]
    sizes = tuple(1 if d in dims else size for d, size in enumerate(x.sizes) if keepdim or d not in dims)

    def element(index: tuple[Expr, ...]) -> Expr:
        return combine([fit(x.at(_merge(rank, dims, place, index, keepdim)), dtype) for place in places])

    return Traced(x.tracer, dtype, None if sizes else element(()), sizes, element)


def _merge(
    rank: int, dims: list[int], place: tuple[Expr, ...], index: tuple[Expr, ...], keepdim: bool
) -> tuple[Expr, ...]:
    reduced, kept = iter(place), iter(index)
    merged = []
    for d in range(rank):
        if d in dims:
            merged.append(next(reduced))
            if keepdim:
                next(kept)
        else:
            merged.append(next(kept))
    return tuple(merged)


def _with_empty(combine: Combine, empty: Expr | None) -> Callable[[list[Expr]], Expr]:
    def reduce(items: list[Expr]) -> Expr:
        if not items and empty is None:
            raise TypeError("a reduction over no elements has no value")
        return _tree(combine, items) if items else empty  # type: ignore[return-value]

    return reduce


def _counted(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.int64


@operation("sum")
def sum_(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Traced:
    """The sum; of booleans and integers an int64, as in PyTorch."""
    x = tracer.lift(input)
    return reduced(x, dim, keepdim, dtype or _counted(x.dtype), _with_empty(forms.add, ZERO))


@operation("prod")
def prod(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Traced:
    """The product."""
    x = tracer.lift(input)
    return reduced(x, dim, keepdim, dtype or _counted(x.dtype), _with_empty(forms.mul, build.const(1)))


@operation("mean")
def mean(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Traced:
    """The mean of floats."""
    x = tracer.lift(input)

    def combine(items: list[Expr]) -> Expr:
        return forms.div(_tree(forms.add, items), forms.f32(len(items)))

    return reduced(x, dim, keepdim, dtype or as_float(x.dtype), combine)


@operation("any")
def any_(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False) -> Traced:
    """Whether one element is not zero."""
    combine = _with_empty(lambda a, b: build.logic(Op.OR, a, b), build.FALSE)
    return reduced(tracer.lift(input), dim, keepdim, torch.bool, combine)


@operation("all")
def all_(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False) -> Traced:
    """Whether no element is zero."""
    combine = _with_empty(lambda a, b: build.logic(Op.AND, a, b), build.TRUE)
    return reduced(tracer.lift(input), dim, keepdim, torch.bool, combine)


@operation("count_nonzero")
def count_nonzero(tracer: Tracer, input: Any, dim: Any = None) -> Traced:
    """How many elements are not zero."""
    return sum_(tracer, tracer.call("bool", input), dim)


@operation("amax")
def amax(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False) -> Traced:
    """The largest element. Equal ones share the gradient evenly, as in PyTorch."""
    return _extreme(tracer.lift(input), dim, keepdim, Op.MAX)


@operation("amin")
def amin(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False) -> Traced:
    """The smallest element. Equal ones share the gradient evenly, as in PyTorch."""
    return _extreme(tracer.lift(input), dim, keepdim, Op.MIN)


def _extreme(x: Traced, dim: Any, keepdim: bool, op: Op) -> Traced:
    def combine(items: list[Expr]) -> Expr:
        if items and items[0].dtype is DType.F32:
            return build.extremes(op, items)
        return _with_empty(functools.partial(build.binary, op), None)(items)

    return reduced(x, dim, keepdim, x.dtype, combine)


class Extreme(NamedTuple):
    """What torch.max(x, dim) gives."""

    values: Traced
    indices: Traced


def _first(better: Callable[[Expr, Expr], Expr]) -> Callable[[list[Expr]], Expr]:
    """The position of the best element, the first among equals."""

    def combine(items: list[Expr]) -> Expr:
        best, position = items[0], build.const(0, DType.I64)
        for i, item in enumerate(items[1:], 1):
            here = better(item, best)
            best = build.where(here, item, best)
            position = build.where(here, build.const(i, DType.I64), position)
        return position

    return combine


def _chosen(x: Traced, dim: Any, keepdim: bool, better: Callable[[Expr, Expr], Expr]) -> Traced:
    """The best element, NaN before all others: the first among equals, to which the whole gradient goes."""

    def choose(best: Expr, item: Expr) -> Expr:
        number = build.unary(Op.NOT, forms.is_nan(best))
        first_nan = build.logic(Op.AND, forms.is_nan(item), number)
        return build.where(build.logic(Op.OR, better(item, best), first_nan), item, best)

    def combine(items: list[Expr]) -> Expr:
        if not items:
            raise TypeError("a reduction over no elements has no value")
        return functools.reduce(choose, items)

    return reduced(x, dim, keepdim, x.dtype, combine)


def _typed(x: Traced, dim: Any, keepdim: bool, combine: Callable[[list[Expr]], Expr]) -> Traced:
    result = reduced(x, dim, keepdim, x.dtype, combine)
    result.dtype = torch.int64
    return result


def _greater(a: Expr, b: Expr) -> Expr:
    return forms.less(b, a)


@operation("argmax")
def argmax(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False) -> Traced:
    """Where the largest element is."""
    return _typed(tracer.lift(input), dim, keepdim, _first(_greater))


@operation("argmin")
def argmin(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False) -> Traced:
    """Where the smallest element is."""
    return _typed(tracer.lift(input), dim, keepdim, _first(forms.less))


@operation("max")
def max_(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    """torch.max: of two tensors, of all elements, or along a dimension with positions."""
    if other is not None or isinstance(dim, (Traced, torch.Tensor)):
        return tracer.call("maximum", input, dim if other is None else other)
    if dim is None:
        return amax(tracer, input)
    x = tracer.lift(input)
    found = _chosen(x, dim, keepdim, _greater) if x.dtype.is_floating_point else amax(tracer, x, dim, keepdim)
    return Extreme(found, argmax(tracer, x, dim, keepdim))


@operation("min")
def min_(tracer: Tracer, input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    """torch.min: of two tensors, of all elements, or along a dimension with positions."""
    if other is not None or isinstance(dim, (Traced, torch.Tensor)):
        return tracer.call("minimum", input, dim if other is None else other)
    if dim is None:
        return amin(tracer, input)
    x = tracer.lift(input)
    found = (
        _chosen(x, dim, keepdim, forms.less) if x.dtype.is_floating_point else amin(tracer, x, dim, keepdim)
    )
    return Extreme(found, argmin(tracer, x, dim, keepdim))


@operation("logsumexp")
def logsumexp(tracer: Tracer, input: Any, dim: Any, keepdim: bool = False) -> Traced:
    """Log of the sum of exponentials."""
    x = tracer.lift(input)
    return reduced(x, dim, keepdim, as_float(x.dtype), _with_empty(forms.logaddexp, None))


@operation("dot", "inner", "vdot", "vecdot", "matmul")
def dot(tracer: Tracer, input: Any, other: Any, *, dim: int = -1) -> Traced:
    """The sum of products of two vectors, or along the last dimension."""
    a, b = tracer.lift(input), tracer.lift(other)
    if len(a.sizes) != 1 or len(b.sizes) != 1:
        raise TypeError(
            f"it takes two vectors here, not tensors of {len(a.sizes)} and {len(b.sizes)} dimensions; "
            "write (a * b).sum(-1)"
        )
    if int(a.sizes[0]) != int(b.sizes[0]):
        raise TypeError(f"vectors of {int(a.sizes[0])} and {int(b.sizes[0])} elements")
    result = promote(a, b)
    return sum_(tracer, mapped(tracer, forms.mul, (a, b), result), dim, dtype=result)


@operation("norm", "vector_norm")
def norm(tracer: Tracer, input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Traced:
    """The Euclidean norm."""
    if p not in (2, "fro", None):
        raise TypeError("only p=2")
    return tracer.call("sqrt", sum_(tracer, tracer.call("square", input), dim, keepdim))  # type: ignore[no-any-return]


@operation("isin")
def isin(tracer: Tracer, elements: Any, test_elements: Any, *, invert: bool = False) -> Traced:
    """Whether a value is among a few others."""
    values = tracer.call("flatten", test_elements)
    found = any_(tracer, tracer.call("eq", tracer.call("unsqueeze", elements, -1), values), -1)
    return tracer.call("logical_not", found) if invert else found


@operation("searchsorted")
def searchsorted(
    tracer: Tracer,
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
) -> Traced:
    """How many entries of a sorted vector are before a value: which document a position is in."""
    after = right or side == "right"
    value = tracer.call("unsqueeze", input, -1)
    before = tracer.call("le" if after else "lt", sorted_sequence, value)
    count = sum_(tracer, before, -1, dtype=torch.int32)
    return count if out_int32 else tracer.call("to", count, torch.int64)


@operation("bucketize")
def bucketize(
    tracer: Tracer, input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Traced:
    """torch.bucketize."""
    return searchsorted(tracer, boundaries, input, out_int32=out_int32, right=right)
