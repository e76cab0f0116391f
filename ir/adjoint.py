"""The adjoint of a score_mod: a graph that maps the gradient of its result to those of what it reads.

Reverse-mode differentiation over the graph. The result is in the same language, so that every backend runs
it as it runs the mod: `Input.GRAD` is the gradient of the modified score, SCORE, the indices and the captures
mean what they mean in the mod.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from flexc.errors import InternalError
from flexc.ir.adjoint_rules import NO_DERIVATIVE, RULES, Part
from flexc.ir.build import FALSE, TRUE, binary, const, input_, logic, unary, where
from flexc.ir.expr import Expr, inputs_of, topological
from flexc.ir.ops import COMPARISONS, Input, Op
from flexc.ir.simplify import simplify
from flexc.ir.types import DType

AXES = (Input.B, Input.H, Input.Q_IDX, Input.KV_IDX)
"""What tells one pair of a query and a key from another."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """A gradient of a captured tensor: for every visible pair, `value` is added at `indices`.

    An index means what it means in a LOAD: negative ones count from the end; one that is out of range
    belongs to no element, and its value is dropped. `indices` is empty for a 0-dim tensor.
    """

    slot: int
    indices: tuple[Expr, ...]
    value: Expr

    @property
    def axes(self) -> frozenset[Input]:
        """Those of `AXES` that the element depends on; values can be summed over the others first."""
        read = frozenset[Input]().union(*(inputs_of(index) for index in self.indices))
        if Input.SCORE in read:
            return frozenset(AXES)
        return read.intersection(AXES)


@dataclass(frozen=True, slots=True)
class Adjoint:
    """Gradients of one pair of a query and a key, as expressions over GRAD, SCORE, indices and captures.

    `score_grad` is that of the score. What they give where the mask hides the pair, or where the modified
    score is -inf, is unspecified and may be NaN: a backend selects there, it does not multiply by zero.
    """

    score_grad: Expr
    scatters: tuple[Scatter, ...]


def adjoint(score: Expr, wanted: Collection[int] = ()) -> Adjoint:
    """The adjoint of a simplified score graph, for the score and the captured tensors in the slots `wanted`.

    Reads of one tensor at the same indices are one scatter. Where nothing that is asked for is reached,
    `score_grad` is 0 and there are no scatters.

    Example: `score + slopes[h] * d` gives `grad`, and for slopes the scatter of `grad * d` at `(h,)`.
    """
    return _adjoint(score, frozenset(wanted))


@lru_cache(maxsize=256)
def _adjoint(score: Expr, wanted: frozenset[int]) -> Adjoint:
    if score.dtype is not DType.F32:
        raise InternalError(f"adjoint: a score is f32, not {score.dtype.value}")
    order = topological(score)
    active = _active(order, wanted)
    parts: dict[Expr, list[Part]] = defaultdict(list)
    parts[score].append(Part(input_(Input.GRAD)))
    for node in reversed(order):
        if node not in active or node not in parts or not node.args or node.op is Op.LOAD:
            continue
        value, condition = _joined(parts[node])
        for arg, part in zip(node.args, RULES[node.op](node, value), strict=True):
            met = None if part is None else _met(condition, part.condition)
            if part is not None and arg in active and met is not FALSE:
                parts[arg].append(Part(part.value, met))
    scatters = [
        Scatter(node.attr, node.args, _selected(parts[node]))
        for node in order
        if node.op is Op.LOAD and isinstance(node.attr, int) and node in active and node in parts
    ]
    return Adjoint(_selected(parts[input_(Input.SCORE)]), tuple(scatters))


def _active(order: list[Expr], wanted: frozenset[int]) -> set[Expr]:
    """The float nodes that something asked for can change smoothly."""
    active: set[Expr] = set()
    for node in order:
        if node.dtype is not DType.F32:
            continue
        is_end = node.attr is Input.SCORE if node.op is Op.INPUT else node.attr in wanted
        if is_end if node.op in (Op.INPUT, Op.LOAD) else node.op in RULES and active.intersection(node.args):
            active.add(node)
    return active


def _met(one: Expr | None, other: Expr | None) -> Expr | None:
    """Both conditions; None for the one that always holds."""
    given = [condition for condition in (one, other) if condition is not None]
    if not given:
        return None
    both = simplify(given[0] if len(given) == 1 else logic(Op.AND, *given))
    return None if both is TRUE else both


def _joined(parts: list[Part]) -> Part:
    """The sum: of the values under each condition, then of these."""
    groups: dict[Expr | None, Expr] = {}
    for value, condition in parts:
        groups[condition] = binary(Op.ADD, groups[condition], value) if condition in groups else value
    if len(groups) == 1:
        ((condition, value),) = groups.items()
        return Part(simplify(value), condition)
    opposites = _opposites(groups)
    if opposites is not None:
        return opposites
    zero = const(0.0)
    total: Expr | None = None
    some: Expr = FALSE
    for condition, value in groups.items():
        chosen = value if condition is None else where(condition, value, zero)
        total = chosen if total is None else binary(Op.ADD, total, chosen)
        some = logic(Op.OR, some, TRUE if condition is None else condition)
    assert total is not None
    some = simplify(some)
    return Part(simplify(total), None if some is TRUE else some)


def _opposites(groups: dict[Expr | None, Expr]) -> Part | None:
    """One choice in place of a sum of two, where one condition is the opposite of the other."""
    if len(groups) != 2 or None in groups:
        return None
    (other, y), (one, x) = groups.items()
    if one is None or other is None or simplify(unary(Op.NOT, one)) is not other:
        return None
    return Part(simplify(where(one, x, y)))


def _selected(parts: list[Part]) -> Expr:
    """The sum as one expression that is 0 wherever no part is."""
    if not parts:
        return const(0.0)
    value, condition = _joined(parts)
    return value if condition is None else simplify(where(condition, value, const(0.0)))


def obstacle(score: Expr, slot: int) -> str | None:
    """Why no gradient reaches the captured tensor in `slot` through `score`; None where one does.

    Words that continue a sentence about the tensor: "is only compared with something".
    """
    reached = _reached(score)
    reads = [node for node in topological(score) if node.op is Op.LOAD and node.attr == slot]
    if not reads:
        return "is not read"
    if not reached.isdisjoint(reads):
        return None
    compared = [node.op for node in topological(score) if node.op in COMPARISONS and _stops(node, slot)]
    if compared:
        return f"is only compared with something, and a comparison {NO_DERIVATIVE[compared[0]]}"
    return f"is only read as an integer: a conversion {NO_DERIVATIVE[Op.CAST]}"


def _reached(score: Expr) -> set[Expr]:
    """The float nodes to which the rules can bring a gradient."""
    reached = {score}
    for node in reversed(topological(score)):
        if node in reached and node.op in RULES:
            reached.update(arg for arg in node.args if arg.dtype is DType.F32)
    return reached


def _stops(node: Expr, slot: int) -> bool:
    """Whether `node` makes something without a derivative of a float that depends on the tensor."""
    if node.op is not Op.CAST and node.op not in COMPARISONS:
        return False
    return any(
        part.op is Op.LOAD and part.attr == slot
        for arg in node.args
        if arg.dtype is DType.F32
        for part in topological(arg)
    )
