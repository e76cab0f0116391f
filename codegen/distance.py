"""Parts of a mod that depend on the distance of a query and its key only, and read captured tensors there.

A tile of BLOCK_Q x BLOCK_KV pairs has BLOCK_Q + BLOCK_KV - 1 distances. A learned bias by distance is read
once for each of them instead of once a pair, and so is what leads to its index computed.

Accepted, `d` being `q_idx - kv_idx`: `bias[h, d + n]`, `bias[h, d.clamp(-r, r) + r]`, `bias[bucket[d]]` and
`gain[h] * bias[d + starts[b]]`; `float(q_idx) - float(kv_idx)` is a distance too. Rejected:
`bias[q_idx, kv_idx]`, `bias[q_idx + 1]`, `bias[d * q_idx]` and `bias[2 * q_idx - kv_idx]`, as not of the
distance; `float(d)`, as it reads nothing: computing is faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flexc.ir.affine import Affine, affine_forms
from flexc.ir.build import input_
from flexc.ir.expr import Expr, inputs_of, topological
from flexc.ir.ops import Input, Op
from flexc.ir.place import Placement, place
from flexc.ir.types import DType

_Q, _KV = input_(Input.Q_IDX), input_(Input.KV_IDX)


def is_of_distance(root: Expr) -> bool:
    """Whether `root` is the same for all pairs of a head at one `q_idx - kv_idx`."""
    return root in of_distance(root)


def of_distance(*roots: Expr) -> frozenset[Expr]:
    """The nodes under `roots` that are the same for all pairs of a head at one `q_idx - kv_idx`.

    What the head knows is among them.
    """
    forms = {node: form for root in roots for node, form in affine_forms(root).items()}
    found: set[Expr] = set()
    for node in topological(*roots):
        reads = inputs_of(node)
        if Input.SCORE in reads or Input.GRAD in reads:
            continue
        if not reads & {Input.Q_IDX, Input.KV_IDX} or (node.args and found.issuperset(node.args)):
            found.add(node)
            continue
        form = _form(node, forms)
        if form is not None:
            factors = dict(form.terms)
            if factors.pop(_Q, 0) == -factors.pop(_KV, 0) and found.issuperset(factors):
                found.add(node)
    return frozenset(found)


def _form(node: Expr, forms: Mapping[Expr, Affine]) -> Affine | None:
    """That of an integer, or of a sum or difference of two as floats, which hold positions exactly."""
    if node.dtype is DType.F32 and node.op in (Op.ADD, Op.SUB):
        if any(arg.op is not Op.CAST or arg.args[0] not in forms for arg in node.args):
            return None
        left, right = (forms[arg.args[0]] for arg in node.args)
        return left.plus(right, 1 if node.op is Op.ADD else -1)
    return forms.get(node)


def reads_by_distance(*roots: Expr) -> tuple[Expr, ...]:
    """The largest parts of `roots` that are to be computed once a distance, in a stable order.

    They may be computed for a query at the distance itself and key 0, though there may be no such query: they
    read nothing by query or key, not even what cancels out.

    Example: of `score + bias[h, q_idx - kv_idx + n]`, the read of `bias`.
    """
    levels, same = place(*roots), of_distance(*roots)
    same = _reading_by_distance(roots, same)
    reads: set[Expr] = set()
    for node in topological(*roots):
        here = node.op is Op.LOAD and levels[node] is Placement.ELEMENT
        if here or not reads.isdisjoint(node.args):
            reads.add(node)
    wanted = {node for node in reads & same if node.dtype in (DType.F32, DType.I32)}
    return tuple(node for node in topological(*roots, leaves=wanted) if node in wanted)


def _reading_by_distance(roots: Collection[Expr], same: frozenset[Expr]) -> frozenset[Expr]:
    """Those of `same` under which every read is of the distance too."""
    others: set[Expr] = set()
    for node in topological(*roots):
        if (node.op is Op.LOAD and node not in same) or not others.isdisjoint(node.args):
            others.add(node)
    return same - others


def pair_loads(score: Expr | None, mask: Expr | None) -> int:
    """How many entries of captured tensors are read for each pair, and not once a distance for the score."""
    roots = [root for root in (score, mask) if root is not None]
    once = () if score is None else reads_by_distance(score)
    nodes = {node for node in topological(*roots, leaves=once) if node not in once}
    levels = place(*roots)
    return sum(node.op is Op.LOAD and levels[node] is Placement.ELEMENT for node in nodes)


def only_adds_by_distance(score: Expr) -> bool:
    """Whether `score` is that of the products and a summand that is read by distance."""
    return score.op is Op.ADD and set(score.args) == {input_(Input.SCORE), *reads_by_distance(score)}


def inputs_beside(root: Expr, leaves: Collection[Expr]) -> frozenset[Input]:
    """The inputs that `root` reads other than through `leaves`."""
    nodes = [node for node in topological(root, leaves=leaves) if node not in leaves]
    return frozenset(n.attr for n in nodes if n.op is Op.INPUT and isinstance(n.attr, Input))
