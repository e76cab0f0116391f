"""Which integer expressions of a row only rise, or only fall, from one query row to the next.

Such a bound takes its extremes over a tile at the tile's first and last row: two scalars instead of a vector
and a reduction. Sound as long as nothing overflows, which whoever solved a mask for its bounds made sure of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flexc.codegen.signed_terms import signed_terms
from flexc.codegen.signs import nonnegative
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op


class Trend(NamedTuple):
    """Whether a value may rise and may fall with the row. Neither: it is the same for all rows of a head."""

    rises: bool
    falls: bool

    @property
    def is_constant(self) -> bool:
        """The same for every row."""
        return not self.rises and not self.falls

    @property
    def is_monotone(self) -> bool:
        """Its extremes over neighbouring rows are at the first and the last of them."""
        return not (self.rises and self.falls)

    def join(self, other: Trend) -> Trend:
        """What a sum, a minimum or a maximum of both may do."""
        return Trend(self.rises or other.rises, self.falls or other.falls)

    def flipped(self) -> Trend:
        """What the negative may do."""
        return Trend(self.falls, self.rises)


_CONSTANT = Trend(False, False)
_RISING = Trend(True, False)
_UNKNOWN = Trend(True, True)


def trend(root: Expr) -> Trend:
    """What `root` may do as `q_idx` grows, everything else fixed.

    Example: `q_idx // 64 * 64` rises, `min(n, 7 - q_idx)` falls, `starts[b]` is constant, `starts[q_idx]` and
    `q_idx % 64` may do both.
    """
    positive = nonnegative(root)
    found: dict[Expr, Trend] = {}
    for node in topological(root):
        found[node] = _trend(node, found, positive)
    return found[root]


def _trend(node: Expr, found: Mapping[Expr, Trend], positive: frozenset[Expr]) -> Trend:
    if node.op is Op.INPUT:
        return _input(node)
    args = tuple(found[arg] for arg in node.args)
    if all(arg.is_constant for arg in args):
        return _CONSTANT
    if not node.dtype.is_integer:
        return _UNKNOWN
    if node.op in (Op.ADD, Op.SUB):
        return _sum(node, found)
    return _integer(node, args, positive)


def _input(node: Expr) -> Trend:
    if node.attr is Input.Q_IDX:
        return _RISING
    return _UNKNOWN if node.attr in (Input.KV_IDX, Input.SCORE) else _CONSTANT


def _integer(node: Expr, args: tuple[Trend, ...], positive: frozenset[Expr]) -> Trend:
    op = node.op
    if op in (Op.MIN, Op.MAX):
        return args[0].join(args[1])
    if op in (Op.NEG, Op.BIT_NOT):
        return args[0].flipped()
    if op is Op.MUL:
        return _product(node, args, positive)
    if op is Op.FLOORDIV and args[1].is_constant:
        return _scaled(args[0], node.args[1], positive)
    if op in (Op.SHL, Op.SHR) and args[1].is_constant:
        return args[0]
    if op is Op.WHERE and args[0].is_constant:
        return args[1].join(args[2])
    if op is Op.CAST and node.args[0].dtype.is_integer:
        return args[0]
    return _UNKNOWN


def _sum(node: Expr, found: Mapping[Expr, Trend]) -> Trend:
    """By terms. `x - x % n` rises with x: it is n times a quotient that rounds down."""
    terms = signed_terms(node)
    trend_ = _CONSTANT
    for term, sign in list(terms):
        whole = (term.args[0], -sign) if term.op is Op.MOD and found[term.args[1]].is_constant else None
        if whole in terms and (term, sign) in terms:
            terms.remove(whole)
            terms.remove((term, sign))
            multiple = found[whole[0]]
            trend_ = trend_.join(multiple if sign < 0 else multiple.flipped())
    for term, sign in terms:
        trend_ = trend_.join(found[term] if sign > 0 else found[term].flipped())
    return trend_


def _product(node: Expr, args: tuple[Trend, ...], positive: frozenset[Expr]) -> Trend:
    for trend_, factor in ((args[0], node.args[1]), (args[1], node.args[0])):
        other = args[1] if factor is node.args[1] else args[0]
        if other.is_constant:
            return _scaled(trend_, factor, positive)
    if all(arg in positive for arg in node.args):
        return args[0].join(args[1])
    return _UNKNOWN


def _scaled(trend_: Trend, factor: Expr, positive: frozenset[Expr]) -> Trend:
    """Times or divided by a `factor` of the head: by its sign."""
    if factor in positive:
        return trend_
    if factor.op is Op.CONST and isinstance(factor.attr, int) and factor.attr < 0:
        return trend_.flipped()
    return _UNKNOWN
