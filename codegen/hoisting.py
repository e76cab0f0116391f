"""What is computed where: the mods of a kernel, split into head, row, column and element."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexc.codegen.arguments import RESERVED
from flexc.codegen.distance import inputs_beside
from flexc.codegen.emit import LINE_LENGTH, Scope, emit, fresh_name, hoisted_name
from flexc.codegen.kernel_form import (
    decisive,
    fold_scale,
    multiply_by_reciprocals,
    separate_comparisons,
    split_index_casts,
)
from flexc.ir.build import input_
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input
from flexc.ir.place import Hoists, Placement, hoists, place
from flexc.ir.printer import to_formula
from flexc.ir.simplify import simplify
from flexc.ir.spec import AttentionSpec, Captured


@dataclass(frozen=True, slots=True)
class Function:
    """A jitted function of the generated file."""

    name: str
    parameters: str
    doc: str
    statements: tuple[str, ...]
    result: str


@dataclass(frozen=True, slots=True)
class Element:
    """A mod as a function of a tile, and the call of it."""

    function: Function
    arguments: tuple[str, ...]
    helpers: frozenset[str]
    inputs: frozenset[Input]

    def call(self, **replaced: str) -> str:
        """The call, some arguments replaced by other expressions."""
        return f"{self.function.name}({', '.join(replaced.get(a, a) for a in self.arguments)})"


@dataclass(frozen=True, slots=True)
class Vector:
    """What is computed once a distance: the name of its tile, a function of indices, and a call of that."""

    name: str
    function: Function
    call: str


def of_functions(functions: Sequence[Function], vectors: Sequence[Vector]) -> list[str]:
    """Where each function of a file is called, one line each, for `explain`."""
    once = {vector.function for vector in vectors}
    return [f"{'once a distance' if f in once else 'per element'}: {f.name} = {f.doc}" for f in functions]


def as_tile(score: Expr, call: str, shape: str = "BLOCK_Q, BLOCK_KV") -> str:
    """A score that does not read both row and column, or the score itself, is spread over the tile."""
    if place(score)[score] is Placement.ELEMENT:
        return call
    return f"{call} + tl.zeros([{shape}], tl.float32)"


def score_form(spec: AttentionSpec, *, fold: bool = True) -> tuple[Expr | None, Expr | None]:
    """The score as the kernel computes it, and the factor that joins the softmax scale, where it may."""
    if spec.score is None:
        # A scale of zero or below can't be applied after masking with -inf: scale first, as for a score_mod.
        return (None, None) if spec.positive_scale else (input_(Input.SCORE), None)
    score = spec.score if spec.long_indices else split_index_casts(spec.score)
    score = simplify(multiply_by_reciprocals(score))
    return fold_scale(score) if fold else (score, None)


def mask_form(spec: AttentionSpec) -> Expr | None:
    """The mask as the kernel computes it."""
    return None if spec.mask is None else simplify(separate_comparisons(spec.mask))


class Hoisting:
    """Names and statements of what is computed once a head, a row or a column.

    A program keeps its rows and walks the columns; with `columns_stay` it is the other way round. What
    `by_distance` says is computed once a distance of a tile, as vectors that are then spread over the tile.
    """

    def __init__(
        self,
        spec: Captured,
        names: tuple[str, ...],
        roots: list[Expr],
        taken: set[str],
        bounds: Sequence[Expr] = (),
        *,
        columns_stay: bool = False,
        by_distance: Sequence[Expr] = (),
    ) -> None:
        """Of `bounds`, what depends on the head only is computed once a head too; see `codegen.bounds`.

        `by_distance` are parts of `roots`: see `codegen.distance`.
        """
        self.spec = spec
        self.names = names
        self.taken = taken | RESERVED | set(names)
        self.bound: dict[Expr, str] = {}
        self.exact = decisive(*roots, *bounds)
        self.helpers: set[str] = set()
        self.inputs: set[Input] = set()
        self._by_distance = frozenset(by_distance)
        found = self._hoists(*roots)
        self.head = self._lines(hoists(*roots, *bounds).head, "head_value")
        self._of_head = dict(self.bound)
        self.vectors = tuple(self._vector(node) for node in by_distance)
        self.row = () if columns_stay else self._lines(found.row, "row_value")
        self.column = self._lines(found.column, "column_value") if columns_stay else ()

    def _hoists(self, *roots: Expr) -> Hoists:
        return hoists(*roots, leaves=self._by_distance)

    def _vector(self, node: Expr) -> Vector:
        """`node` as a function of vectors of indices; from now on its name stands for it, as a tile."""
        name = hoisted_name(node, self.names, self.taken, "by_distance")
        at = self.anywhere(self.fresh(f"{name}_of"), [node], _formula(node, self.names))
        self.helpers |= at.helpers
        self.bound[node] = name
        return Vector(name, at.function, at.call(q_idx="q_idx_of", kv_idx="kv_idx_of"))

    def reads(self, *roots: Expr) -> frozenset[Input]:
        """The inputs that `roots` read for each pair, row or column."""
        return frozenset[Input]().union(*(inputs_beside(root, self._by_distance) for root in roots))

    def _lines(self, nodes: Iterable[Expr], stem: str) -> tuple[str, ...]:
        nodes = [node for node in nodes if node not in self.bound]
        results = [hoisted_name(node, self.names, self.taken, stem) for node in nodes]
        block = emit(self._scope(self.taken), nodes, results)
        self.bound.update(zip(nodes, results, strict=True))
        self.helpers |= block.helpers
        self.inputs |= block.inputs
        return tuple(block.statements)

    def _scope(self, taken: set[str]) -> Scope:
        return Scope(self.spec, self.names, self.bound, taken, self.exact)

    def column_lines(self, root: Expr | None) -> tuple[str, ...]:
        """The statements of the kv loop for `root`, less what an earlier root had computed."""
        return () if root is None else self._lines(self._hoists(root).column, "column_value")

    def row_lines(self, root: Expr | None) -> tuple[str, ...]:
        """The statements of the loop over rows for `root`, where columns stay."""
        return () if root is None else self._lines(self._hoists(root).row, "row_value")

    def scale(self, factor: Expr) -> str:
        """The softmax scale times `factor`."""
        return f"scale * {self.value(factor)}"

    def value(self, root: Expr) -> str:
        """What the head knows: a name, or an expression."""
        if root in self.bound:
            return self.bound[root]
        block = emit(self._scope(self.taken), [root], [None])
        self.helpers |= block.helpers
        return block.results[0]

    def anywhere(self, name: str, roots: Sequence[Expr], doc: str) -> Element:
        """`roots` as a function of any pairs of a head: nothing but what the head knows is passed to it."""
        taken = set(self.taken)
        scope = Scope(self.spec, self.names, self._of_head, taken, self.exact)
        block = emit(scope, roots, [None] * len(roots))
        text = "\n".join([*block.statements, *block.results])
        parameters = [i.value for i in Input if i in block.inputs]
        parameters += [h for h in dict.fromkeys(self._of_head.values()) if _mentions(text, h)]
        parameters += sorted(block.arguments - set(parameters))
        function = Function(
            name=name,
            parameters=", ".join(parameters),
            doc=doc,
            statements=tuple(block.statements),
            result=", ".join(block.results),
        )
        return Element(function, tuple(parameters), frozenset(block.helpers), frozenset(block.inputs))

    def fresh(self, stem: str) -> str:
        """A name that nothing has yet."""
        return fresh_name(self.taken, stem)

    def element(self, name: str, root: Expr, meaning: Expr) -> Element:
        """`root` as a function of what is left to do per element; `meaning` is what the user wrote."""
        found = self._hoists(root)
        block = emit(self._scope(set(self.taken)), [root], [None])
        vectors = [node for node in topological(root, leaves=self._by_distance) if node in self._by_distance]
        hoisted = [self.bound[n] for n in (*found.head, *found.row, *found.column, *vectors)]
        text = "\n".join([*block.statements, *block.results])
        parameters = [i.value for i in Input if i in block.inputs]
        parameters += [h for h in dict.fromkeys(hoisted) if _mentions(text, h)]
        parameters += sorted(block.arguments - set(parameters))
        function = Function(
            name=name,
            parameters=", ".join(parameters),
            doc=_formula(meaning, self.names),
            statements=tuple(block.statements),
            result=block.results[0],
        )
        reads = frozenset(block.inputs) | (self.reads(root) & {Input.KV_IDX})
        return Element(function, tuple(parameters), frozenset(block.helpers), reads)


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def _formula(root: Expr, names: tuple[str, ...]) -> str:
    text = to_formula(root, names)
    return textwrap.shorten(text, LINE_LENGTH - 12, placeholder=" ...")
