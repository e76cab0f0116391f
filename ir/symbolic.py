"""Integers of a mask as sympy polynomials: collected, compared, divided, and turned back into expressions.

A form is an exact integer, never wrapped: `forms` keeps a node whole where its own arithmetic may wrap. The
symbols are the nodes that no sum or multiple explains. The only file that uses sympy.
"""

from __future__ import annotations

from typing import Any

import sympy

from flexc.ir.build import binary, cast, const
from flexc.ir.expr import Expr, rebuild
from flexc.ir.magnitude import HUGE, LARGE, WIDTH, Extent, Magnitudes, trusted_tensors
from flexc.ir.ops import Op
from flexc.ir.place import Placement, place
from flexc.ir.printer import to_text
from flexc.ir.ranges import LONGEST, Within
from flexc.ir.simplify import simplify
from flexc.ir.types import DType

Form = Any  # a sympy polynomial with integer coefficients; sympy has no types


_MOST_QUESTIONS = 4000  # of order between bounds: about a quarter of a second
_AS_GOOD_AS_INFINITE = 2**31  # what a 64-bit number counts for beside positions, so that its products fit
_FAR = 2**58  # the same for a number that is only added, so that differences of large numbers are exact
_FEW = 4  # terms and multiples of it in a sum that fits in 64 bits
MAY_WRAP = "may wrap"


class Unsolved(Exception):
    """Why a part of a mask has no closed form. `node` is the part, `reason` goes after its formula."""

    def __init__(self, node: Expr, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


class TooMany(Exception):
    """A mask takes more pieces, or more thought, than a closed form is worth."""


class Algebra:
    """Forms over one mask's nodes."""

    def __init__(
        self, root: Expr, numbers: dict[int, Within], positions: frozenset[Expr], longest: int
    ) -> None:
        self.magnitudes = Magnitudes(numbers, positions, trusted_tensors(root), longest)
        self._placements = place(root)
        self._symbols: dict[Expr, Form] = {}
        self._nodes: dict[Form, Expr] = {}
        self._forms: dict[Expr, Form] = {}
        self._extents: dict[Form, Extent] = {}
        self._order: dict[tuple[Form, Form], bool] = {}
        self._known: list[tuple[Form, Form, int]] = []

    def reads_kv(self, node: Expr) -> bool:
        """Whether a node of the mask depends on `kv_idx`."""
        placement = self._placements.get(node)
        if placement is None:
            placement = place(node)[node]
            self._placements[node] = placement
        return placement >= Placement.COLUMN

    def node(self, symbol: Form) -> Expr:
        """What a symbol stands for."""
        return self._nodes[symbol]

    def symbol(self, node: Expr) -> Form:
        """The symbol of a node."""
        found = self._symbols.get(node)
        if found is None:
            found = self._symbols[node] = sympy.Symbol(self._name(node), integer=True)
            self._nodes[found] = node
        return found

    def _name(self, node: Expr) -> str:
        """The same in every run, as sums are in the order of names: the text of a small node, or a number."""
        if all(not inner.args for arg in node.args for inner in arg.args):
            return to_text(node)
        return f"~{len(self._symbols):04}"

    # From expressions.

    def form(self, node: Expr) -> Form:
        """`node` as an exact integer. Raises Unsolved where it reads `kv_idx` and may wrap."""
        found = self._forms.get(node)
        if found is None:
            found = self._forms[node] = self._collected(node)
        return found

    def _collected(self, node: Expr) -> Form:
        if node.op is Op.CONST and isinstance(node.attr, int):
            return sympy.Integer(int(node.attr))
        if self.magnitudes.wraps(node):
            if self.reads_kv(node):
                raise Unsolved(node, MAY_WRAP + (" its 32 bits" if node.dtype is DType.I32 else ""))
            return self.symbol(node)
        if node.op is Op.CAST and node.args[0].dtype.is_integer:
            return self.form(node.args[0])
        linear = self._linear(node)
        return self.symbol(node) if linear is None else linear

    def _linear(self, node: Expr) -> Form | None:
        args = node.args
        if node.op is Op.ADD:
            return self.form(args[0]) + self.form(args[1])
        if node.op is Op.SUB:
            return self.form(args[0]) - self.form(args[1])
        if node.op is Op.NEG:
            return -self.form(args[0])
        if node.op is Op.BIT_NOT:
            return -self.form(args[0]) - 1
        if node.op is Op.MUL:
            left, right = self.form(args[0]), self.form(args[1])
            if left.is_Integer or right.is_Integer:
                return sympy.expand(left * right)
        if node.op is Op.SHL and isinstance(args[1].attr, int) and 0 <= args[1].attr < 31:
            return sympy.expand(self.form(args[0]) * 2 ** args[1].attr)
        return None

    def terms(self, form: Form) -> tuple[dict[Form, int], int]:
        """Factors by monomial, and the constant."""
        factors = {m: int(f) for m, f in form.as_coefficients_dict().items()}
        constant = factors.pop(sympy.S.One, 0)
        return {m: f for m, f in factors.items() if f}, constant

    def of_kv(self, form: Form) -> tuple[dict[Expr, int], Form]:
        """The nodes in a form that read `kv_idx`, with their factors, and the rest of it."""
        factors, _ = self.terms(form)
        found = {}
        for monomial, factor in factors.items():
            if any(self.reads_kv(self._nodes[s]) for s in monomial.free_symbols):
                found[self._nodes[monomial]] = factor
                form = form - factor * monomial
        return found, form

    # Arithmetic that leaves the polynomials.

    def quotient(self, form: Form, divisor: int) -> Form:
        """`form // divisor`, a literal of at least 1."""
        factors, constant = self.terms(form)
        inner = sympy.Integer(constant // divisor)
        left = sympy.Integer(constant % divisor)
        for monomial, factor in factors.items():
            if factor % divisor == 0:
                inner += monomial * (factor // divisor)
            else:
                left += monomial * factor
        if left.is_Integer:
            return inner
        return inner + self.symbol(binary(Op.FLOORDIV, self.wide(left), const(divisor)))

    def ratio(self, form: Form, divisor: Expr) -> Form:
        """`form // divisor`, of a row's number that is at least 1."""
        if divisor.op is Op.CONST and isinstance(divisor.attr, int):
            return self.quotient(form, divisor.attr)
        return self.symbol(binary(Op.FLOORDIV, self.wide(form), divisor))

    def product(self, form: Form, by: Expr) -> Form:
        """`form * by`, with `x // by * by` written as `x - x % by`: closer to what people would write."""
        factor = self.form(by)
        result = sympy.expand(form * factor)
        for symbol in form.free_symbols:
            node = self._nodes[symbol]
            if node.op is Op.FLOORDIV and self.form(node.args[1]) == factor:
                count = form.coeff(symbol)
                whole = self.form(node.args[0]) - self.symbol(binary(Op.MOD, *node.args))
                result = sympy.expand(result - count * symbol * factor + count * whole)
        return result

    # Order.

    def extent(self, form: Form) -> Extent:
        """Bounds of a form over all rows and calls."""
        found = self._extents.get(form)
        if found is None:
            factors, constant = self.terms(form)
            found = self._summed(dict(factors), constant, whole=False)
            if any(self._is_mod(symbol) for symbol in factors):
                other = self._summed(factors, constant, whole=True)
                found = Extent(max(found.lo, other.lo), min(found.hi, other.hi))
            self._extents[form] = found
        return found

    def know(self, small: Expr, large: Expr, gap: int = 0) -> None:
        """From now on, `small + gap <= large` is certain."""
        self._known.append((self.symbol(small), self.symbol(large), gap))

    def _known_pairs(self, factors: dict[Form, int]) -> list[Extent]:
        """Takes `small - large` and `large - small` out of a sum, and gives their bounds."""
        found = []
        for small, large, gap in self._known:
            count = factors.get(small, 0)
            if count == 1 == -factors.get(large, 0) or count == -1 == -factors.get(large, 0):
                self._take(factors, {small: 1, large: -1}, count)
                widest = 2 * WIDTH[DType.I64].hi
                found.append(Extent(-widest, -gap) if count > 0 else Extent(gap, widest))
        return found

    def _is_mod(self, symbol: Form) -> bool:
        return symbol in self._nodes and self._nodes[symbol].op is Op.MOD

    def _summed(self, factors: dict[Form, int], constant: int, *, whole: bool) -> Extent:
        lo = hi = constant
        for low, high in [*self._known_pairs(factors), *self._remainders(factors, whole)]:
            lo, hi = lo + low, hi + high
        for monomial, factor in factors.items():
            ends = [e * factor for e in self._monomial(monomial)]
            lo, hi = lo + min(ends), hi + max(ends)
        return Extent(lo, hi)

    def _monomial(self, monomial: Form) -> Extent:
        extent = Extent(1, 1)
        for symbol, power in monomial.as_powers_dict().items():
            own = self.magnitudes.of(self._nodes[symbol])
            for _ in range(int(power)):
                corners = [a * b for a in extent for b in own]
                extent = Extent(min(corners), max(corners))
        return extent

    def _remainders(self, factors: dict[Form, int], whole: bool) -> list[Extent]:
        """Takes `c - x % c`, and `x - x % c` if `whole`, out of a sum, and gives their bounds."""
        found = []
        for symbol in [s for s in factors if self._is_mod(s)]:
            x, divisor = self._nodes[symbol].args
            if self.magnitudes.of(divisor).lo < 1:
                continue
            count = factors.get(symbol, 0)
            if whole and count < 0 and self.magnitudes.of(x).lo >= 0:
                terms, constant = self.terms(self.form(x))
                if not constant and all(factors.get(m, 0) >= -count * f > 0 for m, f in terms.items()):
                    self._take(factors, {symbol: 1} | {m: -f for m, f in terms.items()}, count)
                    found.append(Extent(0, self.magnitudes.of(x).hi * -count))
                    continue
            sign = 1 if count > 0 else -1
            terms, constant = self.terms(self.form(divisor))
            shared = min([abs(count), *(max(-sign * factors.get(m, 0) // f, 0) for m, f in terms.items())])
            if terms and shared:
                self._take(factors, {symbol: 1} | {m: -f for m, f in terms.items()}, sign * shared)
                ends = [sign * shared * (e + constant) for e in (-self.magnitudes.of(divisor).hi, -1)]
                found.append(Extent(min(ends), max(ends)))
        return found

    @staticmethod
    def _take(factors: dict[Form, int], part: dict[Form, int], count: int) -> None:
        for monomial, factor in part.items():
            factors[monomial] = factors.get(monomial, 0) - count * factor
            if not factors[monomial]:
                del factors[monomial]

    def at_most(self, a: Form, b: Form) -> bool:
        """Whether `a <= b` is certain. Raises TooMany after thousands of different questions."""
        found = self._order.get((a, b))
        if found is None:
            if len(self._order) >= _MOST_QUESTIONS:
                raise TooMany
            found = self._order[a, b] = self.extent(a - b).hi <= 0
        return found

    # To expressions.

    def wide(self, form: Form) -> Expr:
        """A form as an expression that does not wrap: of 32 bits where they surely hold it, else of 64."""
        if self.extent(form).inside(WIDTH[DType.I32]):
            return self._sum(form, DType.I32)
        return self._sum(form, DType.I64)

    def bound(self, form: Form) -> Expr:
        """A form as an int32 expression, exact between 0 and the longest length, saturated far outside."""
        if self.extent(form).inside(WIDTH[DType.I32]):
            return simplify(self._sum(form, DType.I32))
        loose = [s for s in form.free_symbols if not self._is_small(s)]
        factors, _ = self.terms(form)
        if len(loose) == 1 and abs(factors.get(loose[0], 0)) == 1:
            rest = form - factors[loose[0]] * loose[0]
            if self.extent(rest).inside(Extent(-LONGEST, LONGEST)):
                return simplify(self._sum(form, DType.I32, loose[0]))
        total = self._sum(form, DType.I64)
        limit = const(LARGE, DType.I64)
        total = binary(Op.MAX, binary(Op.MIN, total, limit), const(-LARGE, DType.I64))
        return simplify(cast(total, DType.I32))

    def _is_small(self, symbol: Form) -> bool:
        return self.magnitudes.of(self._nodes[symbol]).inside(Extent(-LARGE, LARGE))

    def _sum(self, form: Form, dtype: DType, saturated: Form = None) -> Expr:
        factors, constant = self.terms(form)
        order = sorted(factors, key=lambda m: (factors[m] < 0, m.is_Mul, _rank(m), str(m)))
        total: Expr | None = None
        for monomial in order:
            factor = factors[monomial]
            limit = _FAR if monomial.is_Symbol and max(len(order), abs(factor)) <= _FEW else None
            if saturated is not None and monomial == saturated:
                limit = LARGE
            part = self._product(monomial, dtype, limit)
            if abs(factor) != 1:
                part = binary(Op.MUL, part, const(abs(factor), dtype))
            if total is None:
                total = part if factor > 0 else binary(Op.SUB, const(constant, dtype), part)
                constant = constant if factor > 0 else 0
            else:
                total = binary(Op.ADD if factor > 0 else Op.SUB, total, part)
        if total is None:
            return const(constant, dtype)
        if constant:
            total = binary(Op.ADD if constant > 0 else Op.SUB, total, const(abs(constant), dtype))
        return total

    def _product(self, monomial: Form, dtype: DType, limit: int | None) -> Expr:
        """A product, its factors no larger than `limit` where one is given, else small enough for 64 bits."""
        result: Expr | None = None
        for symbol, power in sorted(monomial.as_powers_dict().items(), key=lambda item: str(item[0])):
            for _ in range(int(power)):
                part = self._nodes[symbol]
                if limit == LARGE:
                    part = self._clamped(part, LARGE)
                elif part.dtype is DType.I64 and not self._monomial(monomial).inside(Extent(-HUGE, HUGE)):
                    part = self._clamped(part, limit or _AS_GOOD_AS_INFINITE)
                part = cast(part, dtype)
                result = part if result is None else binary(Op.MUL, result, part)
        assert result is not None
        return result

    def _clamped(self, node: Expr, limit: int) -> Expr:
        lo, hi = self.magnitudes.of(node)
        if hi > limit:
            node = binary(Op.MIN, node, const(limit, node.dtype))
        return binary(Op.MAX, node, const(-limit, node.dtype)) if lo < -limit else node


def without_saturation(root: Expr) -> Expr:
    """A bound without what only keeps extreme values inside 32 bits: for people, not for kernels."""

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        sign = {Op.MIN: 1, Op.MAX: -1}.get(node.op)
        limits = [sign * limit for limit in (LARGE, _AS_GOOD_AS_INFINITE, _FAR)] if sign else []
        if limits and args[1].op is Op.CONST and args[1].attr in limits:
            return args[0]
        return cast(args[0], node.dtype) if node.op is Op.CAST else Expr(node.op, args, node.attr, node.dtype)

    return simplify(rebuild(root, replace))


def _rank(monomial: Form) -> int:
    """Positions before anything else."""
    return 0 if str(monomial) in ("q_idx", "b", "h") else 1
