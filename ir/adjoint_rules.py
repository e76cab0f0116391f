"""Derivatives of the operations: how the gradient of a node becomes gradients of its operands.

A rule gets the node and the gradient that reached it, and answers with one `Part` an operand, or None where
nothing reaches that operand. Conventions where a function has a kink or a pole are PyTorch's:

- MIN and MAX of equal operands: half to each (`torch.maximum`); where one of them is a number of Python, all
  to the other (`torch.clamp`, which has its bounds as numbers). In a reduction (`torch.amax`) as much to each
  of all that are equal.
- ABS at 0: 0. FLOOR and SIGN: 0. SQRT at 0 and LOG at 0: infinite.
- POW: the base gets 0 where the exponent is 0; the exponent gets 0 where the base is 0 and it is >= 0.
- WHERE passes the gradient to the operand that was taken. The one that was not gets nothing, even where its
  own derivative is infinite or NaN: conditions are kept apart from values, and applied last.

Floats are multiplied as little as possible: a factor that was divided by before cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from flexc.ir.build import binary, compare, const, logic, unary, where
from flexc.ir.expr import Expr
from flexc.ir.ops import Op
from flexc.ir.rewrite_arithmetic import literal


class Part(NamedTuple):
    """A gradient: `value` where `condition` holds (None: everywhere), else 0, whatever `value` is there."""

    value: Expr
    condition: Expr | None = None


Parts = tuple[Part | None, ...]
Rule = Callable[[Expr, Expr], Parts]

_LEAST, _MOST = 1e-30, 1e30  # between these a product of literals is a normal float, as are its factors


def times(grad: Expr, factor: Expr) -> Expr:
    """`grad * factor`: a division by `factor` is taken back, literals are joined."""
    undone = _without(grad, Op.DIV, factor)
    if undone is not None:
        return undone
    number = literal(factor)
    if number is not None and grad.op is Op.NEG:
        return times(grad.args[0], _number(-number))
    joined = None if number is None else _scaled(grad, float(number))
    return binary(Op.MUL, grad, factor) if joined is None else joined


def over(grad: Expr, divisor: Expr) -> Expr:
    """`grad / divisor`: a multiplication by `divisor` is taken back, literals are joined."""
    undone = _without(grad, Op.MUL, divisor)
    if undone is not None:
        return undone
    number = literal(divisor)
    joined = None if not number else _scaled(grad, 1 / float(number))
    return binary(Op.DIV, grad, divisor) if joined is None else joined


def _without(grad: Expr, op: Op, operand: Expr) -> Expr | None:
    """`grad` less one multiplication (division) by `operand` in its chain of factors, if there is one."""
    if grad.op not in (Op.MUL, Op.DIV):
        return None
    rest, factor = grad.args
    if grad.op is op and factor is operand:
        return rest
    inner = _without(rest, op, operand)
    return None if inner is None else binary(grad.op, inner, factor)


def _scaled(grad: Expr, number: float) -> Expr | None:
    """`grad` with a literal factor of its chain multiplied by `number`, if it has one."""
    if grad.op not in (Op.MUL, Op.DIV):
        return None
    rest, factor = grad.args
    known = literal(factor)
    if known is not None and grad.op is Op.MUL:
        product = known * number
        if abs(product - 1) < 2**-50:  # the reciprocal of a literal was rounded
            return rest
        return binary(Op.MUL, rest, const(product)) if _LEAST < abs(product) < _MOST else None
    inner = _scaled(rest, number)
    return None if inner is None else binary(grad.op, inner, factor)


def _number(value: float) -> Expr:
    return const(float(value))


def _negated(grad: Expr) -> Expr:
    return unary(Op.NEG, grad)


def _squared(x: Expr) -> Expr:
    return binary(Op.MUL, x, x)


def _complement(x: Expr) -> Expr:
    return binary(Op.SUB, _number(1), x)


def is_number(x: Expr) -> bool:
    """A literal or a captured number of Python, converted or not."""
    return x.op in (Op.CONST, Op.SCALAR) or (x.op is Op.CAST and is_number(x.args[0]))


def _add(node: Expr, grad: Expr) -> Parts:
    return Part(grad), Part(grad)


def _sub(node: Expr, grad: Expr) -> Parts:
    return Part(grad), Part(_negated(grad))


def _mul(node: Expr, grad: Expr) -> Parts:
    a, b = node.args
    return Part(times(grad, b)), Part(times(grad, a))


def _div(node: Expr, grad: Expr) -> Parts:
    divisor = node.args[1]
    return Part(over(grad, divisor)), Part(_negated(over(times(grad, node), divisor)))


def _extreme(node: Expr, grad: Expr) -> Parts:
    a, b = node.args
    least = (a, b) if node.op is Op.MIN else (b, a)
    first, second = compare(Op.LE, *least), compare(Op.LE, *reversed(least))
    if node.attr is None and (is_number(a) or is_number(b)):
        return Part(grad, first), Part(grad, second)
    equal, shares = compare(Op.EQ, a, b), (_number(0.5), _number(0.5))
    if node.attr is not None:
        counts = _ties(a, node), _ties(b, node)
        total = binary(Op.ADD, *counts)
        shares = binary(Op.DIV, counts[0], total), binary(Op.DIV, counts[1], total)
    of_a, of_b = (where(equal, times(grad, share), grad) for share in shares)
    return Part(of_a, first), Part(of_b, second)


def _ties(x: Expr, reduction: Expr) -> Expr:
    """How many of the items that `x` is the extreme of are equal to it, in the reduction of that node."""
    if (x.op, x.attr) != (reduction.op, reduction.attr):
        return _number(1)
    a, b = x.args
    first, second = (_ties(arg, reduction) for arg in x.args)
    of_one = where(compare(Op.EQ, x, a), first, second)
    return where(compare(Op.EQ, a, b), binary(Op.ADD, first, second), of_one)


def _pow(node: Expr, grad: Expr) -> Parts:
    base, exponent = node.args
    fewer = binary(Op.POW, base, binary(Op.SUB, exponent, _number(1)))
    of_base = Part(times(times(grad, exponent), fewer), compare(Op.NE, exponent, _number(0)))
    flat = logic(Op.AND, compare(Op.EQ, base, _number(0)), compare(Op.LE, _number(0), exponent))
    of_exponent = Part(times(times(grad, node), unary(Op.LOG, base)), unary(Op.NOT, flat))
    return of_base, of_exponent


def _where(node: Expr, grad: Expr) -> Parts:
    condition = node.args[0]
    return None, Part(grad, condition), Part(grad, unary(Op.NOT, condition))


def _flat(node: Expr, grad: Expr) -> Parts:
    """Constant between its steps, or said to be."""
    return (None,)


def _by(derivative: Callable[[Expr, Expr], Expr]) -> Rule:
    """The rule of a function of one operand; `derivative` is of the operand and the node's own value."""
    return lambda node, grad: (Part(times(grad, derivative(node.args[0], node))),)


def _rsqrt(node: Expr, grad: Expr) -> Parts:
    cube = binary(Op.MUL, _squared(node), node)
    return (Part(times(times(grad, _number(-0.5)), cube)),)


def _sigmoid(x: Expr, value: Expr) -> Expr:
    return binary(Op.MUL, value, _complement(value))


def _erf(node: Expr, grad: Expr) -> Parts:
    bell = unary(Op.EXP, unary(Op.NEG, _squared(node.args[0])))
    return (Part(times(times(grad, _number(2 / math.sqrt(math.pi))), bell)),)


# The float operations. Nodes of other types are constant to every derivative.
RULES: dict[Op, Rule] = {
    Op.ADD: _add,
    Op.SUB: _sub,
    Op.MUL: _mul,
    Op.NEG: lambda node, grad: (Part(_negated(grad)),),
    Op.ABS: _by(lambda x, value: unary(Op.SIGN, x)),
    Op.MIN: _extreme,
    Op.MAX: _extreme,
    Op.SIGN: _flat,
    Op.DIV: _div,
    Op.POW: _pow,
    Op.EXP: _by(lambda x, value: value),
    Op.EXP2: lambda node, grad: (Part(times(times(grad, _number(math.log(2))), node)),),
    Op.LOG: lambda node, grad: (Part(over(grad, node.args[0])),),
    Op.LOG2: lambda node, grad: (Part(over(times(grad, _number(1 / math.log(2))), node.args[0])),),
    Op.SQRT: lambda node, grad: (Part(over(times(grad, _number(0.5)), node)),),
    Op.RSQRT: _rsqrt,
    Op.TANH: _by(lambda x, value: _complement(_squared(value))),
    Op.SIGMOID: _by(_sigmoid),
    Op.SIN: _by(lambda x, value: unary(Op.COS, x)),
    Op.COS: lambda node, grad: (Part(_negated(times(grad, unary(Op.SIN, node.args[0])))),),
    Op.ATAN: lambda node, grad: (Part(over(grad, binary(Op.ADD, _number(1), _squared(node.args[0])))),),
    Op.ERF: _erf,
    Op.FLOOR: _flat,
    Op.DETACH: _flat,
    Op.WHERE: _where,
}

# Where a derivative begins: the gradients of these are what an adjoint is made for.
ENDS = frozenset({Op.INPUT, Op.LOAD})

_FIXED = "is a number that no gradient is asked of"
_INTEGERS = "is of integers, which change in steps"
_TRUTH = "is true or false"

# Everything else, and why nothing comes out of it.
NO_DERIVATIVE: dict[Op, str] = {
    Op.CONST: _FIXED,
    Op.SCALAR: _FIXED,
    Op.SIZE: _FIXED,
    **dict.fromkeys((Op.FLOORDIV, Op.MOD, Op.SHL, Op.SHR), _INTEGERS),
    **dict.fromkeys((Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR, Op.BIT_NOT), _INTEGERS),
    **dict.fromkeys((Op.LT, Op.LE, Op.EQ, Op.NE, Op.AND, Op.OR, Op.NOT), _TRUTH),
    Op.CAST: "makes an integer or is made of one, and integers change in steps",
}
