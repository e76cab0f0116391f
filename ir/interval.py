"""Bounds of a graph over boxes of its inputs: sound, vectorised over any number of boxes.

Every op maps bounds to bounds. Integers and floats have inclusive `(lo, hi)` (64-bit arrays), booleans have
`(surely, possibly)`: true for every point of the box, true for some point as far as is known. What is not
known is answered by the widest bounds, so a wrong "surely" or a wrong "not possibly" cannot happen; integers
that may wrap and floats that may be NaN have the widest bounds of their type.

Tight: sums and differences of the same terms (affine forms), `//` and `%` by a positive number, MIN, MAX,
ABS, shifts, bit masks, WHERE with a decided condition, monotone functions, captured tensors over index
ranges. Loose: products of correlated terms (`q % 7 * q`), AND of conditions that exclude each other, SIN and
COS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flexc.errors import InternalError
from flexc.ir.affine import Affine, affine_forms
from flexc.ir.arrays import Array, Namespace, bool_type, convert
from flexc.ir.bounds_float import FLOAT_RULES, float_literal, rounded
from flexc.ir.bounds_integer import INTEGER_RULES, full_range, in_range
from flexc.ir.expr import Expr, topological
from flexc.ir.interval_types import Bounds
from flexc.ir.ops import COMPARISONS, FLOAT_INPUTS, Input, Op
from flexc.ir.types import DType

LoadBounds = Callable[[int, tuple[Bounds, ...]], Bounds]


@dataclass(frozen=True, slots=True, eq=False)
class IntervalEnv:
    """What bounds are computed from.

    `inputs` are inclusive ranges as broadcastable int64 arrays; `values` are the captures by slot (numbers,
    and tensors for their sizes); `load_bounds(slot, index bounds)` answers for captured tensors, see
    `RangeTables`.
    """

    inputs: Mapping[Input, Bounds]
    values: Sequence[Array]
    load_bounds: LoadBounds
    xp: Namespace


def bounds(root: Expr, env: IntervalEnv) -> Bounds:
    """The bounds of `root`, of the inputs' broadcast shape or smaller where it reads less.

    Raises InternalError when `env.inputs` lacks an input that the graph reads.
    """
    plan = _plan(root)
    known: dict[Expr, Bounds] = {}
    with np.errstate(all="ignore"):
        for node in plan.steps:
            known[node] = _bounds_of(node, plan, known, env)
    return known[root]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Nodes to bound, in order; affine forms; and for comparisons, the difference where terms cancel."""

    steps: tuple[Expr, ...]
    forms: dict[Expr, Affine]
    differences: dict[Expr, Affine]


@lru_cache(maxsize=256)
def _plan(root: Expr) -> _Plan:
    forms = affine_forms(root)
    differences: dict[Expr, Affine] = {}
    for node in topological(root):
        if node.op in COMPARISONS and node.args[0].dtype.is_integer:
            left, right = (forms[arg] for arg in node.args)
            difference = left.plus(right, -1)
            if len(difference.terms) < len(left.terms) + len(right.terms):
                differences[node] = difference
    needed: set[Expr] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        stack.extend(_reads(node, forms))
        if node in differences:
            stack.extend(atom for atom, _ in differences[node].terms)
    return _Plan(tuple(n for n in topological(root) if n in needed), forms, differences)


def _is_sum(node: Expr, forms: dict[Expr, Affine]) -> bool:
    return node in forms and forms[node].terms != ((node, 1),)


def _reads(node: Expr, forms: dict[Expr, Affine]) -> tuple[Expr, ...]:
    return tuple(atom for atom, _ in forms[node].terms) if _is_sum(node, forms) else node.args


def live_nodes(root: Expr) -> int:
    """How many arrays `bounds` holds at once, to size chunks of boxes by."""
    return max(1, 2 * sum(bool(node.args) for node in _plan(root).steps))


def _bounds_of(node: Expr, plan: _Plan, known: dict[Expr, Bounds], env: IntervalEnv) -> Bounds:
    if _is_sum(node, plan.forms):
        return _sum_bounds(plan.forms[node], node.dtype, known, env)
    args = tuple(known[arg] for arg in node.args)
    if node.op in LEAF_RULES:
        return LEAF_RULES[node.op](env, node, args)
    if node in plan.differences:
        return _compare_difference(node, plan.differences[node], args, known, env)
    if node.op in SHARED_RULES:
        return SHARED_RULES[node.op](env.xp, node, args)
    if node.dtype is DType.F32:
        return FLOAT_RULES[node.op](env.xp, node, args)
    return in_range(env.xp, node.dtype, INTEGER_RULES[node.op](env.xp, node, args))


def _sum_bounds(form: Affine, dtype: DType, known: Mapping[Expr, Bounds], env: IntervalEnv) -> Bounds:
    """The bounds of a sum: exact as a number, so valid as a wrapped one where it is in range."""
    sums = _exact_sum(form, known, env)
    if dtype is DType.I64:
        return _guarded_64(form, sums, known, env)
    return in_range(env.xp, dtype, sums)


def _exact_sum(form: Affine, known: Mapping[Expr, Bounds], env: IntervalEnv) -> Bounds:
    lo = hi = _integer(env.xp, form.constant)
    for atom, factor in form.terms:
        low, high = known[atom] if factor > 0 else Bounds(known[atom].hi, known[atom].lo)
        lo, hi = (lo + low, hi + high) if factor == 1 else (lo + low * factor, hi + high * factor)
    return Bounds(lo, hi)


def _guarded_64(form: Affine, sums: Bounds, known: Mapping[Expr, Bounds], env: IntervalEnv) -> Bounds:
    """`sums`, but the widest bounds where a 64-bit sum may have wrapped."""
    xp = env.xp
    largest: Array = 0.0
    for atom, factor in form.terms:
        low, high = (xp.abs(convert(xp, end, xp.float64)) for end in known[atom])
        largest = largest + xp.maximum(low, high) * abs(factor)
    safe = xp.asarray(largest + abs(float(form.constant)) < 2.0**62)
    widest = full_range(xp, DType.I64)
    return Bounds(xp.where(safe, sums.lo, widest.lo), xp.where(safe, sums.hi, widest.hi))


def _integer(xp: Namespace, value: int) -> Array:
    return np.int64(value) if xp is np else xp.tensor(value, dtype=xp.int64)


# Leaves.


def _constant(env: IntervalEnv, value: Array, dtype: DType) -> Bounds:
    xp = env.xp
    if dtype is DType.F32:
        return float_literal(xp, value)
    if dtype is DType.BOOL:
        flag = np.bool_(bool(value)) if xp is np else xp.tensor(bool(value))
        return Bounds(flag, flag)
    number = _integer(xp, int(value))
    return Bounds(number, number)


def _const(env: IntervalEnv, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return _constant(env, node.attr, node.dtype)


def _input(env: IntervalEnv, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    assert isinstance(node.attr, Input)
    if node.attr in FLOAT_INPUTS and node.attr not in env.inputs:
        return float_literal(env.xp, math.nan)  # a score or a gradient may be anything
    if node.attr not in env.inputs:
        raise InternalError(f"bounds: no range for the input {node.attr.value}")
    return Bounds(*env.inputs[node.attr])


def _scalar(env: IntervalEnv, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    assert isinstance(node.attr, int)
    return _constant(env, env.values[node.attr], node.dtype)


def _size(env: IntervalEnv, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    assert isinstance(node.attr, tuple)
    slot, dimension = node.attr
    return _constant(env, int(env.values[slot].shape[dimension]), node.dtype)


def _load(env: IntervalEnv, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    assert isinstance(node.attr, int)
    xp = env.xp
    lo, hi = env.load_bounds(node.attr, args)
    if node.dtype is DType.BOOL:
        return Bounds(convert(xp, lo, bool_type(xp)), convert(xp, hi, bool_type(xp)))
    if node.dtype is DType.F32:
        return rounded(xp, Bounds(convert(xp, lo, xp.float64), convert(xp, hi, xp.float64)))
    return Bounds(convert(xp, lo, xp.int64), convert(xp, hi, xp.int64))


# Comparisons, logic, choice, conversion: what is not arithmetic of one type.


def _compare_difference(
    node: Expr, form: Affine, args: tuple[Bounds, ...], known: Mapping[Expr, Bounds], env: IntervalEnv
) -> Bounds:
    """A comparison by the sign of `left - right`, where equal terms cancel; by the sides if one may wrap."""
    xp = env.xp
    sides = SHARED_RULES[node.op](xp, node, args)
    wide = node.args[0].dtype is DType.I64
    lo, hi = _sum_bounds(form, DType.I64, known, env) if wide else _exact_sum(form, known, env)
    surely, possibly = {
        Op.LT: (hi < 0, lo < 0),
        Op.LE: (hi <= 0, lo <= 0),
        Op.EQ: ((lo == 0) & (hi == 0), (lo <= 0) & (hi >= 0)),
        Op.NE: ((lo > 0) | (hi < 0), (lo != 0) | (hi != 0)),
    }[node.op]
    exact = _is_exact(xp, node.args[0].dtype, args[0]) & _is_exact(xp, node.args[1].dtype, args[1])
    return Bounds((exact & surely) | sides.lo, (~exact | possibly) & sides.hi)


def _is_exact(xp: Namespace, dtype: DType, x: Bounds) -> Array:
    """Whether the number is certainly not wrapped: its bounds are not the widest."""
    widest = full_range(xp, dtype)
    return (x.lo != widest.lo) | (x.hi != widest.hi)


def _nan_free(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Array:
    """Whether no float operand may be NaN (True for other types)."""
    if node.args[0].dtype is not DType.F32:
        return True
    return ~(xp.isinf(args[0].lo) & xp.isinf(args[0].hi)) & ~(xp.isinf(args[1].lo) & xp.isinf(args[1].hi))


def _less_than(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return Bounds(a.hi < b.lo, a.lo < b.hi)


def _less_equal(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    return Bounds((a.hi <= b.lo) & _nan_free(xp, node, args), a.lo <= b.hi)


def _equal(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    a, b = args
    if node.args[0].dtype is DType.BOOL:
        return Bounds((a.lo & b.lo) | ~(a.hi | b.hi), (a.hi & b.hi) | ~(a.lo | b.lo))
    same = (a.lo == b.hi) & (a.hi == b.lo) & (a.lo == a.hi) & _nan_free(xp, node, args)
    return Bounds(same, (a.lo <= b.hi) & (b.lo <= a.hi))


def _not_equal(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    surely, possibly = _equal(xp, node, args)
    return Bounds(~possibly, ~surely)


def _and(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return Bounds(args[0].lo & args[1].lo, args[0].hi & args[1].hi)


def _or(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return Bounds(args[0].lo | args[1].lo, args[0].hi | args[1].hi)


def _not(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    return Bounds(~args[0].hi, ~args[0].lo)


def _where(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    condition, a, b = args
    if node.dtype is DType.BOOL:
        low, high = a.lo & b.lo, a.hi | b.hi
    else:
        low, high = xp.minimum(a.lo, b.lo), xp.maximum(a.hi, b.hi)
    lo = xp.where(condition.lo, a.lo, xp.where(condition.hi, low, b.lo))
    hi = xp.where(condition.lo, a.hi, xp.where(condition.hi, high, b.hi))
    return Bounds(lo, hi)


def _cast(xp: Namespace, node: Expr, args: tuple[Bounds, ...]) -> Bounds:
    x, source = args[0], node.args[0].dtype
    if node.dtype is DType.F32:
        return rounded(xp, Bounds(*(convert(xp, end, xp.float64) for end in x)))
    if source is not DType.F32:
        return in_range(xp, node.dtype, Bounds(*(convert(xp, end, xp.int64) for end in x)))
    bound = 2.0**31 if node.dtype is DType.I32 else 2.0**62
    fits = (x.lo > -bound) & (x.hi < bound)  # outside, and for NaN, the result is unspecified
    lo, hi = (convert(xp, xp.where(fits, end, xp.zeros_like(end)), xp.int64) for end in x)
    widest = full_range(xp, node.dtype)
    return Bounds(xp.where(fits, lo, widest.lo), xp.where(fits, hi, widest.hi))


LEAF_RULES: dict[Op, Callable[[IntervalEnv, Expr, tuple[Bounds, ...]], Bounds]] = {
    Op.CONST: _const,
    Op.INPUT: _input,
    Op.SCALAR: _scalar,
    Op.SIZE: _size,
    Op.LOAD: _load,
}
SHARED_RULES: dict[Op, Callable[[Namespace, Expr, tuple[Bounds, ...]], Bounds]] = {
    Op.LT: _less_than,
    Op.LE: _less_equal,
    Op.EQ: _equal,
    Op.NE: _not_equal,
    Op.AND: _and,
    Op.OR: _or,
    Op.NOT: _not,
    Op.WHERE: _where,
    Op.CAST: _cast,
}
