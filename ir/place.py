"""Where each part of a mod is computed: once a kernel, a head, a row, a column, or for every pair."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from flexc.ir.expr import Expr, fold, topological
from flexc.ir.ops import Input, Op


class Placement(Enum):
    """The loop that a node belongs to. `a <= b` where what is placed at `a` is also known at `b`.

    A partial order: KERNEL < HEAD < ROW < ELEMENT and HEAD < COLUMN < ELEMENT. ROW and COLUMN join
    to ELEMENT.
    """

    KERNEL = 0b000
    HEAD = 0b001
    ROW = 0b011
    COLUMN = 0b101
    ELEMENT = 0b111

    def join(self, other: Placement) -> Placement:
        """The lowest placement that knows both."""
        return Placement(self.value | other.value)

    def __le__(self, other: Placement) -> bool:
        return self.value | other.value == other.value

    def __lt__(self, other: Placement) -> bool:
        return self is not other and self <= other

    def __ge__(self, other: Placement) -> bool:
        return other <= self

    def __gt__(self, other: Placement) -> bool:
        return other < self


_INPUTS = {
    Input.B: Placement.HEAD,
    Input.H: Placement.HEAD,
    Input.Q_IDX: Placement.ROW,
    Input.KV_IDX: Placement.COLUMN,
    Input.SCORE: Placement.ELEMENT,
    Input.GRAD: Placement.ELEMENT,
    Input.Q_LEN: Placement.KERNEL,
    Input.KV_LEN: Placement.KERNEL,
}


@dataclass(frozen=True, slots=True)
class Hoists:
    """Subexpressions to compute early, operands before users: once a head, a row, a column of a tile."""

    head: tuple[Expr, ...]
    row: tuple[Expr, ...]
    column: tuple[Expr, ...]


def place(*roots: Expr) -> dict[Expr, Placement]:
    """The placement of every node under `roots`: that of an input, or the join of its operands'."""

    def visit(node: Expr, args: tuple[Placement, ...]) -> Placement:
        if node.op is Op.INPUT and isinstance(node.attr, Input):
            return _INPUTS[node.attr]
        placement = Placement.KERNEL
        for arg in args:
            placement = placement.join(arg)
        return placement

    return fold(roots, visit)


def hoists(*roots: Expr, leaves: Collection[Expr] = ()) -> Hoists:
    """The largest subexpressions of each level that a higher level reads; a root counts as read by all.

    Left out as not worth a name: literals, inputs, captured numbers, sizes, and conversions of those that
    hold for the whole kernel. What belongs to the kernel is counted with the head. `leaves` are computed
    elsewhere, and what they alone read is no part of this.

    Example: of `score + slopes[h] * float(q_idx - kv_idx)`, head is `slopes[h]`.
    """
    levels = {node: level.join(Placement.HEAD) for node, level in place(*roots).items()}
    read_above = set(roots)
    order = [node for node in topological(*roots, leaves=leaves) if node not in leaves]
    for node in order:
        read_above.update(arg for arg in node.args if levels[arg] < levels[node])
    chosen = [node for node in order if node in read_above and not _is_trivial(node)]
    return Hoists(
        head=tuple(node for node in chosen if levels[node] is Placement.HEAD),
        row=tuple(node for node in chosen if levels[node] is Placement.ROW),
        column=tuple(node for node in chosen if levels[node] is Placement.COLUMN),
    )


def _is_trivial(node: Expr) -> bool:
    if node.op is Op.CAST:
        return node.args[0].op in (Op.CONST, Op.SCALAR, Op.SIZE)
    return node.op in (Op.CONST, Op.INPUT, Op.SCALAR, Op.SIZE)
