"""What the steps of a Hopper backward need of each row, if it comes from memory: the loading warp leaves it.

The warpgroups that compute would wait for memory in the middle of a step, and each thread would find the
addresses of its rows; the loading warp is steps ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.codegen.backward_form import backward_form
from flexc.codegen.backward_spec import BackwardSpec
from flexc.codegen.distance import reads_by_distance
from flexc.codegen.hoisting import Hoisting
from flexc.codegen.hopper_backward_dims import is_apart, is_in_parts
from flexc.codegen.hopper_words import gluon, needed, others, target_of
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Op
from flexc.ir.place import hoists
from flexc.ir.types import DType

_STORED = {
    DType.BOOL: ("gl.int8", "{}.to(gl.int8)", 1),
    DType.I32: ("gl.int32", "{}", 4),
    DType.I64: ("gl.int64", "{}", 8),
    DType.F32: ("gl.float32", "{}", 4),
}
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Staged:
    """A value of each row of a tile: its name, where it lies, its type there, and what is stored."""

    name: str
    smem: str
    element: str
    stored: str
    is_bool: bool


@dataclass(frozen=True, slots=True)
class StagedRows:
    """`lines` of the loading warp compute the `values`; the others are what is left to do in a step."""

    lines: tuple[str, ...]
    of_scores: tuple[Staged, ...]
    of_mask: tuple[Staged, ...]
    score_lines: tuple[str, ...]
    mask_lines: tuple[str, ...]

    @property
    def values(self) -> tuple[Staged, ...]:
        """All that is staged."""
        return (*self.of_scores, *self.of_mask)


def staged_nodes(backward: BackwardSpec) -> tuple[Expr, ...]:
    """What is computed once a row from captured tensors.

    Where gradients of captured tensors are wanted, only for the mask: those read the rows of scores as well.
    """
    if is_apart(backward) or is_in_parts(backward):
        return ()  # no shared memory is left for it
    form = backward_form(backward, scatters=False)
    scores = () if backward.slots else (form.score, form.grad)
    roots = [root for root in (*scores, form.mask) if root is not None]
    leaves = frozenset(reads_by_distance(*form.of_scores))
    found = dict.fromkeys(node for root in roots for node in hoists(root, leaves=leaves).row)
    return tuple(node for node in found if any(part.op is Op.LOAD for part in topological(node)))


def staged_bytes(backward: BackwardSpec, rows: int) -> int:
    """About the shared memory that is needed for this many rows."""
    sizes = (rows * _STORED[node.dtype][2] for node in staged_nodes(backward))
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def stage_rows(
    backward: BackwardSpec,
    hoisting: Hoisting,
    score_lines: Sequence[str],
    mask_lines: Sequence[str],
    users: Sequence[str],
) -> StagedRows:
    """What the loading warp computes of rows, and what is left of the lines of a step.

    Args:
        backward: what is computed.
        hoisting: knows the names.
        score_lines: what a step computes once a row for scores and their gradients.
        mask_lines: what it computes for the mask besides.
        users: the arguments of all that a step computes for each pair.
    """
    names = {hoisting.bound[node]: node for node in staged_nodes(backward) if node in hoisting.bound}
    score_lines, mask_lines = gluon(score_lines), gluon(mask_lines)
    everything = (*gluon(hoisting.head), *score_lines, *mask_lines)
    rest = others((*score_lines, *mask_lines), frozenset(names))
    kept = set(needed(rest, users)) if names else set(rest)

    def staged(lines: Sequence[str]) -> tuple[Staged, ...]:
        assigned = map(target_of, lines)
        return tuple(_staged(name, names[name], hoisting) for name in assigned if name in names)

    return StagedRows(
        lines=needed(everything, tuple(names)) if names else (),
        of_scores=staged(score_lines),
        of_mask=staged(mask_lines),
        score_lines=tuple(line for line in score_lines if line in kept),
        mask_lines=tuple(line for line in mask_lines if line in kept),
    )


def _staged(name: str, node: Expr, hoisting: Hoisting) -> Staged:
    element, stored, _ = _STORED[node.dtype]
    smem = hoisting.fresh(f"{name}_smem")
    return Staged(name, smem, element, stored.format(name), node.dtype is DType.BOOL)
