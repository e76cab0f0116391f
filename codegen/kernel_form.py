"""Rewrites that make a mod cheap per element: work moves to where it is done once a row, column or head.

They change a float by at most its last place; integers stay exact.
"""

from __future__ import annotations

from flexc.codegen.signed_terms import signed_sum, signed_terms
from flexc.ir import build
from flexc.ir.expr import Expr, rebuild, topological, with_args
from flexc.ir.ops import COMPARISONS, Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.types import SHORT_NUMBER, DType

SHORT = 2**23
"""Indices below this stay exact in 32-bit floats even after a literal below it was added."""


def split_index_casts(root: Expr) -> Expr:
    """`float(q_idx - kv_idx)` becomes `float(q_idx) - float(kv_idx)`: no conversion is left per element.

    Requires lengths below `SHORT`, so that every index and difference is exact. Also under `abs`.
    """
    levels = place(root)

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is Op.CAST and node.dtype is DType.F32 and levels[node] is Placement.ELEMENT:
            pushed = _pushed(args[0])
            if pushed is not None:
                return pushed
        return with_args(node, args)

    return rebuild(root, replace)


def _pushed(index: Expr) -> Expr | None:
    if index.op is Op.ABS:
        inner = _pushed(index.args[0])
        return None if inner is None else build.unary(Op.ABS, inner)
    if index.op in (Op.ADD, Op.SUB) and all(_is_short(arg) for arg in index.args):
        return build.binary(index.op, *(build.cast(arg, DType.F32) for arg in index.args))
    return None


def _is_short(index: Expr) -> bool:
    """An index itself, or with a small literal added: exact as a float."""
    if index.op is Op.INPUT:
        return index.attr in (Input.Q_IDX, Input.KV_IDX)
    if index.op is Op.CONST:
        return isinstance(index.attr, int) and abs(index.attr) < SHORT
    return (
        index.op in (Op.ADD, Op.SUB)
        and any(a.op is Op.CONST for a in index.args)
        and all(map(_is_short, index.args))
    )


def decisive(*roots: Expr) -> frozenset[Expr]:
    """Nodes whose last place may decide something: a comparison, a floor, a sign, an index.

    `49 * (1 / 49)` is below 1 in floats, so `floor(q_idx / 49)` needs the quotient itself.
    """
    deciding = [node for node in topological(*roots) if _decides(node)]
    return frozenset(topological(*(arg for node in deciding for arg in node.args)))


def _decides(node: Expr) -> bool:
    if node.op is Op.CAST:
        return node.args[0].dtype.is_float
    return node.op in COMPARISONS or node.op in (Op.FLOOR, Op.SIGN)


def multiply_by_reciprocals(root: Expr) -> Expr:
    """`x / d` becomes `x * (1 / d)` where `d` is known at a lower level: fewer divisions.

    Not where the last place may decide something.
    """
    levels = place(root)
    exact = decisive(root)

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is not Op.DIV or node.args[0].op is Op.CONST or node in exact:
            return with_args(node, args)
        numerator, divisor = args
        if divisor.op is Op.CONST:
            value = divisor.attr
            if isinstance(value, float) and 1e-37 < abs(value) < 1e37:  # the reciprocal is a normal float
                return build.binary(Op.MUL, numerator, build.const(1 / value))
        elif levels[node.args[1]] is not Placement.ELEMENT and levels[node] is Placement.ELEMENT:
            return build.binary(Op.MUL, numerator, build.binary(Op.DIV, build.const(1.0), divisor))
        return with_args(node, args)

    return rebuild(root, replace)


def fold_scale(root: Expr) -> tuple[Expr, Expr | None]:
    """Take a factor that every use of `score` is multiplied by out of the graph: it joins the softmax scale.

    Returns the graph with `score` for `score * factor`, and the factor, which the head knows; or the graph
    as it was and None. Example: `c * tanh(score * (1 / c))` gives `c * tanh(score)` and `1 / c`. Of
    `a * (b * score)`, both factors.
    """
    folded, factor = _fold_once(root)
    while factor is not None:
        folded, more = _fold_once(folded)
        if more is None:
            break
        factor = build.binary(Op.MUL, factor, more)
    return folded, factor


def _fold_once(root: Expr) -> tuple[Expr, Expr | None]:
    """The same for the operations that `score` itself is an operand of."""
    levels = place(root)
    factors: set[Expr] = set()
    for node in topological(root):
        for arg in node.args:
            if arg.op is Op.INPUT and arg.attr is Input.SCORE:
                factor = _factor(node)
                if factor is None or levels[factor] not in (Placement.KERNEL, Placement.HEAD):
                    return root, None
                factors.add(factor)
    if len(factors) != 1:
        return root, None
    (factor,) = factors
    score = build.input_(Input.SCORE)

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        return score if score in node.args and node.op is Op.MUL else with_args(node, args)

    return rebuild(root, replace), factor


def _factor(node: Expr) -> Expr | None:
    if node.op is not Op.MUL:
        return None
    a, b = node.args
    return b if a.op is Op.INPUT and a.attr is Input.SCORE else a


def separate_comparisons(root: Expr) -> Expr:
    """`q_idx - kv_idx < w` becomes `q_idx - w < kv_idx`: one comparison is all that is left per element.

    Only of indices, literals and captured 32-bit numbers, whose sums do not overflow: see `SHORT_NUMBER`.
    """
    levels = place(root)

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op in COMPARISONS and levels[node] is Placement.ELEMENT:
            parted = _parted(node.op, *args)
            if parted is not None:
                return parted
        return with_args(node, args)

    return rebuild(root, replace)


def _parted(op: Op, left: Expr, right: Expr) -> Expr | None:
    terms = [*signed_terms(left), *((term, -sign) for term, sign in signed_terms(right))]
    if not terms or any(not _is_safe(term) for term, _ in terms):
        return None
    column = [(term, sign) for term, sign in terms if term.attr is Input.KV_IDX]
    others = [(term, sign) for term, sign in terms if term.attr is not Input.KV_IDX]
    if len(column) != 1 or not others:
        return None
    (index, sign) = column[0]
    rest = signed_sum([(term, -s * sign) for term, s in others])
    return build.compare(op, index, rest) if sign > 0 else build.compare(op, rest, index)


def _is_safe(term: Expr) -> bool:
    if term.dtype is not DType.I32:
        return False
    if term.op is Op.CONST:
        return isinstance(term.attr, int) and abs(term.attr) < SHORT_NUMBER
    return term.op in (Op.INPUT, Op.SCALAR)
