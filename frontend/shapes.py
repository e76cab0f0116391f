"""Shapes of traced tensors, and the operations that only rearrange elements."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flexc.errors import ShapesDoNotBroadcast, UnsupportedOperation
from flexc.frontend.elementwise import ZERO, broadcast, element_of, fit, operation, promote
from flexc.frontend.proxy import Size, Traced
from flexc.frontend.span import span_here
from flexc.ir import build
from flexc.ir.expr import Expr
from flexc.ir.ops import Op

if TYPE_CHECKING:
    from flexc.frontend.tracer import Tracer

Index = tuple[Expr, ...]


class TracedShape(tuple[Size, ...]):
    """A shape whose entries may stand for run-time lengths."""

    __slots__ = ()

    def numel(self) -> Size:
        """The number of elements."""
        count: Size = 1
        for size in self:
            count = count * size
        return count


@operation("shape")
def shape(tracer: Tracer, input: Any) -> TracedShape:
    """All lengths."""
    return TracedShape(tracer.lift(input).sizes)


@operation("size")
def size(tracer: Tracer, input: Any, dim: int | None = None) -> Any:
    """All lengths, or one."""
    sizes = TracedShape(tracer.lift(input).sizes)
    return sizes if dim is None else sizes[dim]


@operation("numel", "nelement")
def numel(tracer: Tracer, input: Any) -> Size:
    """The number of elements."""
    return shape(tracer, input).numel()


@operation("__len__")
def length(tracer: Tracer, input: Any) -> int:
    """The first length; Python wants a plain number, so it becomes a constant."""
    sizes = tracer.lift(input).sizes
    if not sizes:
        raise TypeError("len() of a tensor without dimensions")
    return operator.index(sizes[0])


@operation("dim", "ndimension", "ndim")
def dim(tracer: Tracer, input: Any) -> int:
    """The number of dimensions, a constant of the graph."""
    return len(tracer.lift(input).sizes)


@operation("dtype")
def dtype(tracer: Tracer, input: Any) -> torch.dtype:
    """The dtype, a constant of the graph."""
    return tracer.lift(input).dtype


@operation("device")
def device(tracer: Tracer, input: Any) -> torch.device:
    """Where the tensor lives; traced values live where the first captured tensor does."""
    tensors = [input] if isinstance(input, torch.Tensor) else tracer.leaves
    for leaf in tensors:
        if isinstance(leaf, torch.Tensor):
            with torch._C.DisableTorchFunction():
                return leaf.device
    return torch.device("cpu")


@operation("is_cuda")
def is_cuda(tracer: Tracer, input: Any) -> bool:
    """Whether the device is a GPU."""
    return device(tracer, input).type == "cuda"


@operation("requires_grad")
def requires_grad(tracer: Tracer, input: Any) -> bool:
    """Whether a captured tensor takes gradients; traced values do not say."""
    if not isinstance(input, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return bool(input.requires_grad)


@operation("real")
def real(tracer: Tracer, input: Any) -> Traced:
    """The tensor itself."""
    return tracer.lift(input)


def rearranged(x: Traced, sizes: tuple[Size, ...], source: Callable[[Index], Index]) -> Traced:
    """A tensor of `sizes` whose element at i is that of `x` at `source(i)`."""
    if x.expr is not None:
        result = Traced(x.tracer, x.dtype, None if sizes else x.expr, sizes, lambda index: x.at(()))
    elif not sizes:
        result = Traced(x.tracer, x.dtype, x.at(source(())))
    else:
        result = Traced(x.tracer, x.dtype, None, sizes, lambda index: x.at(source(index)))
    result.name = x.name
    return result


@operation("unsqueeze")
def unsqueeze(tracer: Tracer, input: Any, dim: int) -> Traced:
    """A dimension of length 1 at `dim`."""
    x = tracer.lift(input)
    at = dim % (len(x.sizes) + 1)
    return rearranged(x, (*x.sizes[:at], 1, *x.sizes[at:]), lambda i: (*i[:at], *i[at + 1 :]))


@operation("squeeze")
def squeeze(tracer: Tracer, input: Any, dim: Any = None) -> Traced:
    """Without the dimensions of length 1, or without those in `dim`."""
    x = tracer.lift(input)
    rank = len(x.sizes)
    if rank == 0:
        return x
    if dim is None:
        wanted = set(range(rank))
    else:
        wanted = {d % rank for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}
    gone = {d for d in wanted if x.sizes[d] == 1}
    kept = tuple(x.sizes[d] for d in range(rank) if d not in gone)

    def source(index: Index) -> Index:
        rest = iter(index)
        return tuple(ZERO if d in gone else next(rest) for d in range(rank))

    return rearranged(x, kept, source)


def _sizes(sizes: tuple[Any, ...]) -> tuple[Size, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else tuple(sizes)


@operation("expand", "broadcast_to")
def expand(tracer: Tracer, input: Any, *sizes: Any, size: Any = None) -> Traced:
    """Repeated along dimensions of length 1; -1 keeps a length."""
    x = tracer.lift(input)
    wanted = _sizes(sizes if size is None else (size,))
    lead = len(wanted) - len(x.sizes)
    result = tuple(x.sizes[i - lead] if type(s) is int and s == -1 else s for i, s in enumerate(wanted))
    broadcast((x, Traced(tracer, x.dtype, None, result, lambda index: ZERO)))
    return Traced(tracer, x.dtype, None if result else x.value, result, lambda index: element_of(x, index))


@operation("expand_as", "view_as", "reshape_as")
def like_other(tracer: Tracer, input: Any, other: Any) -> Traced:
    """To the shape of another tensor."""
    sizes = tracer.lift(other).sizes
    if not sizes and not tracer.lift(input).sizes:
        return tracer.lift(input)
    return expand(tracer, input, sizes)


@operation("reshape", "view")
def reshape(
    tracer: Tracer, input: Any, *sizes: Any, size: Any = None, shape: Any = None, dtype: Any = None
) -> Traced:
    """The same elements in row-major order; lengths become constants."""
    x = tracer.lift(input)
    if dtype is not None or any(isinstance(s, torch.dtype) for s in sizes):
        raise UnsupportedOperation("mods cannot reinterpret bits: view(dtype)", span=span_here())
    given = size if size is not None else shape
    wanted = [int(s) for s in _sizes(sizes if given is None else (given,))]
    if not x.sizes and all(s in (1, -1) for s in wanted):
        return x if not wanted else rearranged(x, (1,) * len(wanted), lambda i: ())
    have = [int(s) for s in x.sizes]
    total = _product(have)
    if -1 in wanted:
        known = -_product(wanted)
        wanted[wanted.index(-1)] = total // known if known else 0
    if _product(wanted) != total:
        raise ShapesDoNotBroadcast(f"shape {tuple(have)} cannot become {tuple(wanted)}", span=span_here())
    return rearranged(x, tuple(wanted), lambda index: _unravel(_ravel(index, wanted), have))


def _product(sizes: list[int]) -> int:
    result = 1
    for length in sizes:
        result *= length
    return result


def _ravel(index: Index, sizes: list[int]) -> Expr:
    flat: Expr = ZERO
    for i, length in zip(index, sizes, strict=True):
        flat = i if flat is ZERO else build.binary(Op.ADD, build.binary(Op.MUL, flat, build.const(length)), i)
    return flat


def _unravel(flat: Expr, sizes: list[int]) -> Index:
    index: list[Expr] = []
    for position, length in reversed(list(enumerate(sizes))):
        one = build.const(length)
        index.append(flat if position == 0 else build.binary(Op.MOD, flat, one))
        flat = build.binary(Op.FLOORDIV, flat, one)
    return tuple(reversed(index))


@operation("flatten", "ravel")
def flatten(tracer: Tracer, input: Any, start_dim: int = 0, end_dim: int = -1) -> Traced:
    """Several dimensions as one."""
    x = tracer.lift(input)
    rank = max(len(x.sizes), 1)
    first, last = start_dim % rank, end_dim % rank
    if first == last and x.sizes:
        return x
    return reshape(tracer, x, (*x.sizes[:first], -1, *x.sizes[last + 1 :]))


@operation("permute")
def permute(tracer: Tracer, input: Any, *dims: Any) -> Traced:
    """Dimensions in another order."""
    x = tracer.lift(input)
    order = [d % len(x.sizes) for d in _sizes(dims)]
    return rearranged(
        x,
        tuple(x.sizes[d] for d in order),
        lambda index: tuple(index[order.index(d)] for d in range(len(order))),
    )


@operation("transpose", "swapaxes", "swapdims")
def transpose(tracer: Tracer, input: Any, dim0: int, dim1: int) -> Traced:
    """Two dimensions swapped."""
    x = tracer.lift(input)
    order = list(range(len(x.sizes)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(tracer, x, *order)


@operation("T", "t")
def reverse_dimensions(tracer: Tracer, input: Any) -> Traced:
    """The transposed matrix."""
    x = tracer.lift(input)
    return permute(tracer, x, *reversed(range(len(x.sizes)))) if x.sizes else x


@operation("mT")
def transpose_last(tracer: Tracer, input: Any) -> Traced:
    """The last two dimensions swapped."""
    return transpose(tracer, input, -2, -1)


@operation("stack")
def stack(tracer: Tracer, tensors: Any, dim: int = 0) -> Traced:
    """Tensors of one shape along a new dimension."""
    values = tuple(tracer.lift(t) for t in tensors)
    result, sizes = promote(*values), broadcast(values)
    at = dim % (len(sizes) + 1)

    def element(index: Index) -> Expr:
        rest = (*index[:at], *index[at + 1 :])
        choice = fit(element_of(values[-1], rest), result)
        if index[at].op is Op.CONST and isinstance(index[at].attr, int):
            return fit(element_of(values[int(index[at].attr)], rest), result)  # type: ignore[arg-type]
        for i, value in reversed(list(enumerate(values[:-1]))):
            here = build.compare(Op.EQ, index[at], build.const(i))
            choice = build.where(here, fit(element_of(value, rest), result), choice)
        return choice

    return Traced(tracer, result, None, (*sizes[:at], len(values), *sizes[at:]), element)
