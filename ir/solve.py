"""The keys for which a condition holds, by inverting comparisons step by step.

Solved: comparisons of integers whose dependence on `kv_idx` is one term: itself, its multiples, `//` by
positive numbers, shifts, MIN, MAX, ABS, WHERE, truth values as numbers, and, on request, `%` by a number
that the mask compares `kv_idx` with too; AND, OR, NOT, equality of conditions; anything of the row. Not
solved: two different terms of `kv_idx`, captured tensors read at it, floats, other `%`, bit tricks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flexc.ir.build import FALSE, TRUE, compare, const, input_, unary
from flexc.ir.equal_terms import replaced, replacements
from flexc.ir.expr import Expr, topological
from flexc.ir.key_sets import EVERYTHING, Piece, absorbed, intersection, tidied
from flexc.ir.magnitude import assumed_numbers
from flexc.ir.merge import merged
from flexc.ir.ops import COMPARISONS, Input, Op
from flexc.ir.ranges import LONGEST, Within
from flexc.ir.rewrite_logic import flatten
from flexc.ir.simplify import simplify
from flexc.ir.step_counts import agreements
from flexc.ir.symbolic import Algebra, Form, TooMany, Unsolved
from flexc.ir.types import DType

_TURNED = {Op.LT: Op.LE, Op.LE: Op.LT, Op.EQ: Op.NE, Op.NE: Op.EQ}
_PASSES = 2  # how often keys may start again at 0 in `kv_idx % c`: the two halves of block diffusion
_MOST_PIECES = 48
_MOST_STEPS = 200

Keys = list[Piece]


@dataclass(frozen=True, slots=True)
class Runs:
    """For a comparison of ids: where the keys of the row's id lie.

    Those from `run_first` to `run_end` all have it, the query among them; none has it outside `hull_first` to
    `hull_end`.
    """

    run_first: Expr
    run_end: Expr
    hull_first: Expr
    hull_end: Expr


class Solver:
    """Finds the keys of conditions of one mask, and notes what it could not solve and what it assumed."""

    def __init__(
        self, mask: Expr, *, few_keys: bool, runs: Mapping[Expr, Runs], longest: int = LONGEST
    ) -> None:
        self.numbers = assumed_numbers(mask)
        self.runs = runs
        positions = (
            bound
            for run in runs.values()
            for bound in (run.run_first, run.run_end, run.hull_first, run.hull_end)
        )
        self.algebra = Algebra(mask, self.numbers, frozenset(positions), longest)
        for run in runs.values():
            self._know(run)
        self.borders = _borders(mask) if few_keys else frozenset[Expr]()
        self.longest = longest
        self.steps = 0
        self.unsolved: dict[Expr, Unsolved] = {}

    def keys(self, condition: Expr, truth: bool = True) -> Keys:
        """The keys for which `condition` is `truth`."""
        op, args = condition.op, condition.args
        if condition is TRUE or condition is FALSE:
            return [EVERYTHING] if (condition is TRUE) is truth else []
        if op is Op.NOT:
            return self.keys(args[0], not truth)
        if op in (Op.AND, Op.OR):
            parts = flatten(op, condition)
            return self._all(parts, truth) if (op is Op.AND) is truth else self._any(parts, truth)
        if not self.algebra.reads_kv(condition):
            return self._of_row(condition if truth else simplify(unary(Op.NOT, condition)))
        if condition in self.runs:
            return self._of_run(condition, (op is Op.EQ) is truth)
        if op in (Op.EQ, Op.NE) and args[0].dtype is DType.BOOL:
            return self._agreement(args[0], args[1], (op is Op.EQ) is truth)
        counted = agreements(*args) if op in (Op.EQ, Op.NE) else []
        if counted:
            return self._agreements(counted, (op is Op.EQ) is truth)
        try:
            if op in COMPARISONS and args[0].dtype.is_integer:
                return self._compared(op if truth else _TURNED[op], args, truth)
            if op is Op.LOAD:
                raise Unsolved(condition, "reads a captured tensor at kv_idx")
            raise Unsolved(condition, "compares floats" if op in COMPARISONS else "is no comparison")
        except Unsolved as unsolved:
            part = condition if truth else simplify(unary(Op.NOT, condition))
            self.unsolved.setdefault(part, unsolved)
            return [Piece(exact=False)]

    def _all(self, parts: list[Expr], truth: bool) -> Keys:
        """Of conditions that must all be `truth`; an equation among them rewrites the others."""
        equation = Op.EQ if truth else Op.NE
        for i in range(len(parts)):
            equal = parts[i]  # as earlier equations left it
            if equal.op is equation:
                table = replacements(equal.args[0], equal.args[1], self.algebra.reads_kv)
                parts = [part if part is equal else replaced(part, table) for part in parts]
        found: Keys = [EVERYTHING]
        for part in parts:
            found = self._checked(self._both(found, self.keys(part, truth)))
        return found

    def _any(self, parts: list[Expr], truth: bool) -> Keys:
        found: Keys = []
        for part in parts:
            found = self._checked(self._either(found, self.keys(part, truth)))
        return found

    def _checked(self, keys: Keys) -> Keys:
        if len(keys) > _MOST_PIECES:
            raise TooMany
        return keys

    def _both(self, one: Keys, two: Keys) -> Keys:
        return intersection(self.algebra, one, two)

    def _either(self, one: Keys, two: Keys) -> Keys:
        return absorbed(self.algebra, [*one, *two])

    def _agreement(self, a: Expr, b: Expr, equal: bool) -> Keys:
        both = self._both(self.keys(a, True), self.keys(b, equal))
        neither = self._both(self.keys(a, False), self.keys(b, not equal))
        return self._checked(self._either(both, neither))

    def _agreements(self, conditions: list[Expr], every: bool) -> Keys:
        """Where all of many pairs of conditions agree, or where some do not; each in one piece."""
        found: Keys = [EVERYTHING] if every else []
        for condition in conditions:
            keys = merged(self.algebra, self.keys(condition, every))
            found = self._both(found, keys) if every else self._either(found, keys)
        return self._checked(found)

    def _of_row(self, condition: Expr) -> Keys:
        if condition is TRUE or condition is FALSE:
            return [EVERYTHING] if condition is TRUE else []
        if condition.op in COMPARISONS and condition.args[0].dtype.is_integer:
            a, b = (self.algebra.form(arg) for arg in condition.args)
            extent = self.algebra.extent(a - b)
            decided = {
                Op.LE: (extent.hi <= 0, extent.lo > 0),
                Op.LT: (extent.hi < 0, extent.lo >= 0),
                Op.EQ: (extent.lo == extent.hi == 0, extent.lo > 0 or extent.hi < 0),
                Op.NE: (extent.lo > 0 or extent.hi < 0, extent.lo == extent.hi == 0),
            }[condition.op]
            if any(decided):
                return [EVERYTHING] if decided[0] else []
        return [Piece(conditions=(condition,))]

    def _know(self, run: Runs) -> None:
        q = input_(Input.Q_IDX)
        self.algebra.know(run.hull_first, run.run_first)
        self.algebra.know(run.run_end, run.hull_end)
        for first, end in ((run.run_first, run.run_end), (run.hull_first, run.hull_end)):
            self.algebra.know(first, q)
            self.algebra.know(q, end, gap=1)
            self.algebra.know(first, end, gap=1)

    def _of_run(self, comparison: Expr, equal: bool) -> Keys:
        run, form = self.runs[comparison], self.algebra.form
        contiguous = run.run_first is run.hull_first
        if not contiguous:
            self.unsolved.setdefault(comparison, Unsolved(comparison, "depends on where the ids are equal"))
        inner = Piece((form(run.run_first),), (form(run.run_end),))
        outer = Piece((form(run.hull_first),), (form(run.hull_end),), exact=False)
        if equal:
            return self._either([inner], [] if contiguous else [outer])
        outside = [Piece(ends=outer.firsts), Piece(firsts=outer.ends)]
        if contiguous:
            return outside
        around = [Piece(ends=inner.firsts, exact=False), Piece(firsts=inner.ends, exact=False)]
        return [*outside, *around]

    # Comparisons of integers.

    def _compared(self, op: Op, args: tuple[Expr, ...], truth: bool) -> Keys:
        a, b = args if truth or op in (Op.EQ, Op.NE) else (args[1], args[0])
        difference = self.algebra.form(a) - self.algebra.form(b)
        if op is Op.LE:
            return self._at_most_zero(difference)
        if op is Op.LT:
            return self._at_most_zero(difference + 1)
        if op is Op.EQ:
            return self._both(self._at_most_zero(difference), self._at_most_zero(-difference))
        return self._either(self._at_most_zero(difference + 1), self._at_most_zero(1 - difference))

    def _at_most_zero(self, form: Form) -> Keys:
        """The keys for which a form is zero or less."""
        extent = self.algebra.extent(form)
        if extent.hi <= 0:
            return [EVERYTHING]
        if extent.lo > 0:
            return []
        terms, rest = self.algebra.of_kv(form)
        if not terms:
            condition = compare(Op.LE, self.algebra.bound(rest), const(0))
            return [Piece(conditions=(simplify(condition),))]
        if len(terms) > 1:
            raise Unsolved(next(iter(terms)), "is not the only term of kv_idx in its comparison")
        ((node, factor),) = terms.items()
        if factor > 0:
            return self._limited(node, self.algebra.quotient(-rest, factor), above=True)
        return self._limited(node, self.algebra.quotient(rest - factor - 1, -factor), above=False)

    def _limited(self, node: Expr, limit: Form, *, above: bool) -> Keys:
        """The keys for which `node <= limit` (`above`), or `node >= limit`."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise TooMany
        if node.op is Op.INPUT and node.attr is Input.KV_IDX:
            piece = Piece(ends=(limit + 1,)) if above else Piece(firsts=(limit,))
            kept = tidied(self.algebra, piece)
            return [] if kept is None else [kept]
        if node.op not in _STEPS:
            raise Unsolved(node, "is not affine in kv_idx" if node.op is not Op.LOAD else _LOADED)
        return _STEPS[node.op](self, node, limit, above)

    def _under(self, form: Form, limit: Form, above: bool) -> Keys:
        return self._at_most_zero(form - limit if above else limit - form)


def _borders(mask: Expr) -> frozenset[Expr]:
    """What `kv_idx` is compared with: where one of them is a period, keys are meant to pass it once."""
    found = set()
    for node in topological(mask):
        if node.op in COMPARISONS:
            sides = [arg.args[0] if arg.op is Op.CAST else arg for arg in node.args]
            if any(side.attr is Input.KV_IDX for side in sides):
                found.update(sides)
    return frozenset(found)


_LOADED = "reads a captured tensor at kv_idx"


def _floordiv(solver: Solver, node: Expr, limit: Form, above: bool) -> Keys:
    algebra, divisor = solver.algebra, node.args[1]
    if algebra.reads_kv(divisor) or algebra.magnitudes.of(divisor).lo < 1:
        raise Unsolved(node, "divides by what may be zero or less")
    if above:
        return solver._under(algebra.form(node.args[0]), algebra.product(limit + 1, divisor) - 1, True)
    return solver._under(algebra.form(node.args[0]), algebra.product(limit, divisor), False)


def _mul(solver: Solver, node: Expr, limit: Form, above: bool) -> Keys:
    algebra = solver.algebra
    x, factor = node.args if algebra.reads_kv(node.args[0]) else reversed(node.args)
    if algebra.reads_kv(factor) or algebra.magnitudes.of(factor).lo < 1:
        raise Unsolved(node, "multiplies by what may be zero or less")
    least = limit if above else limit + algebra.form(factor) - 1
    return solver._under(algebra.form(x), algebra.ratio(least, factor), above)


def _shift(solver: Solver, node: Expr, limit: Form, above: bool) -> Keys:
    count = node.args[1].attr
    if node.args[1].op is not Op.CONST or not isinstance(count, int) or not 0 <= count < 31:
        raise Unsolved(node, "shifts by what is no literal")
    form = solver.algebra.form(node.args[0])
    return solver._under(form, (limit + 1) * 2**count - 1 if above else limit * 2**count, above)


def _mod(solver: Solver, node: Expr, limit: Form, above: bool) -> Keys:
    """`kv_idx % c` where keys pass c once: `kv_idx` before it, `kv_idx - c` from it on."""
    algebra, (x, divisor) = solver.algebra, node.args
    if algebra.reads_kv(divisor) or algebra.magnitudes.of(divisor).lo < 1:
        raise Unsolved(node, "is the remainder of a division by what may be zero or less")
    if x.op is not Op.INPUT or divisor not in solver.borders:
        raise Unsolved(node, "is periodic in kv_idx")
    if divisor.op is Op.CONST and isinstance(divisor.attr, int):
        solver.longest = min(solver.longest, _PASSES * divisor.attr)
    elif divisor.op is Op.SCALAR and isinstance(divisor.attr, int) and divisor.attr in solver.numbers:
        known = solver.numbers[divisor.attr]
        solver.numbers[divisor.attr] = Within(known.slot, known.least, known.greatest, _PASSES)
    else:
        raise Unsolved(node, "is periodic in kv_idx")
    kv, period = algebra.form(x), algebra.form(divisor)
    before = solver._both([Piece(ends=(period,))], solver._under(kv, limit, above))
    after = solver._both([Piece(firsts=(period,))], solver._under(kv - period, limit, above))
    return solver._either(before, after)


def _extreme(solver: Solver, node: Expr, limit: Form, above: bool) -> Keys:
    one, two = (solver._under(solver.algebra.form(arg), limit, above) for arg in node.args)
    return solver._either(one, two) if (node.op is Op.MIN) is above else solver._both(one, two)


def _abs(solver: Solver, node: Expr, limit: Form, above: bool) -> Keys:
    form = solver.algebra.form(node.args[0])
    one, two = solver._under(form, limit, above), solver._under(-form, limit, above)
    return solver._both(one, two) if above else solver._either(one, two)


def _where(solver: Solver, node: Expr, limit: Form, above: bool) -> Keys:
    condition, x, y = node.args
    chosen = (solver._under(solver.algebra.form(arg), limit, above) for arg in (x, y))
    one, two = (
        solver._both(solver.keys(condition, truth), keys)
        for truth, keys in zip((True, False), chosen, strict=True)
    )
    return solver._either(one, two)


def _truth(solver: Solver, node: Expr, limit: Form, above: bool) -> Keys:
    if node.args[0].dtype is not DType.BOOL:
        raise Unsolved(node, "is converted from another type")
    found: Keys = []
    for truth in (True, False):
        fits = solver._under(solver.algebra.form(const(int(truth))), limit, above)
        found = solver._either(found, solver._both(solver.keys(node.args[0], truth), fits))
    return found


_STEPS: dict[Op, Callable[[Solver, Expr, Form, bool], Keys]] = {
    Op.FLOORDIV: _floordiv,
    Op.MUL: _mul,
    Op.SHR: _shift,
    Op.MOD: _mod,
    Op.MIN: _extreme,
    Op.MAX: _extreme,
    Op.ABS: _abs,
    Op.WHERE: _where,
    Op.CAST: _truth,
}
