"""The closed form of a mask: which keys each query sees, as a few ranges that are formulas of the row.

Exact: causal masks, windows, prefixes, chunks, captured bounds of a row (`starts[q_idx]`, `window[h]`,
`kind[b]`), block diffusion, and any `&`, `|`, `~` of them, see `solve.py`. Parts without a closed form leave
ranges that hold too much, and are listed. With more than a few ranges a row there is no closed form.

Sound for every call that `Ranges.holds` accepts, with one thing taken for granted that it does not look at:
no sum of a key and a captured tensor's element wraps (`magnitude.trusted_tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from flexc.ir.expr import Expr, topological
from flexc.ir.key_sets import Piece, contains
from flexc.ir.merge import end_of, first_of, merged
from flexc.ir.ranges import LONGEST, Range, Ranges
from flexc.ir.simplify import simplify
from flexc.ir.solve import Keys, Runs, Solver
from flexc.ir.symbolic import MAY_WRAP, Algebra, TooMany

MOST_RANGES = 8
_MOST_NODES = 1000
_LONGEST_MULTIPLIED = 2**22  # a mask that multiplies kv_idx by up to 256 stays inside 32 bits


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a part of a mask has no closed form: `part` holds `node`, which `reason` is said of."""

    part: Expr
    node: Expr
    reason: str


@lru_cache(maxsize=1024)
def closed_form(mask: Expr, *, any_length: bool = False) -> Ranges | None:
    """The ranges of keys of a bool expression, or None where nothing useful can be said. Remembered.

    The answer holds for calls that `Ranges.holds` accepts. An exact answer for few keys (`Ranges.longest`,
    `Within.reach`) is preferred to a rough one for any number, unless `any_length`.
    """
    return best(simplify(mask), {}, any_length=any_length)


@lru_cache(maxsize=512)
def obstacles(mask: Expr) -> tuple[Obstacle, ...]:
    """What keeps a mask from an exact closed form; none where it has one. Remembered."""
    ranges = closed_form(mask)
    exact = ranges is not None and ranges.is_exact
    return () if exact else solve(simplify(mask), few_keys=False, runs={})[1]


def best(mask: Expr, runs: Mapping[Expr, Runs], *, any_length: bool) -> Ranges | None:
    """`closed_form` of a simplified mask, given the keys of comparisons of ids."""
    ranges, found = solve(mask, few_keys=False, runs=runs)
    given_up = ranges is None and any(obstacle.node is mask for obstacle in found)
    if any_length or given_up or (ranges is not None and ranges.is_exact):
        return ranges
    attempts = [(True, LONGEST)]
    if any(obstacle.reason.startswith(MAY_WRAP) for obstacle in found):
        attempts.append((False, _LONGEST_MULTIPLIED))
    for few_keys, longest in attempts:
        short, _ = solve(mask, few_keys=few_keys, runs=runs, longest=longest)
        if short is not None and short.is_exact:
            return short
    return ranges


def solve(
    mask: Expr, *, few_keys: bool, runs: Mapping[Expr, Runs], longest: int = LONGEST
) -> tuple[Ranges | None, tuple[Obstacle, ...]]:
    """The ranges of a simplified mask, and what could not be solved.

    `few_keys` allows assumptions on the number of keys, which `longest` bounds; `runs` has the keys of
    comparisons of ids.
    """
    if len(topological(mask)) > _MOST_NODES:
        return None, (Obstacle(mask, mask, "is a formula of thousands of terms"),)
    solver = Solver(mask, few_keys=few_keys, runs=runs, longest=longest)
    try:
        keys = merged(solver.algebra, solver.keys(mask))
    except (TooMany, RecursionError):  # a formula hundreds of levels deep
        return None, (Obstacle(mask, mask, "is more ranges than are worth walking"),)
    found = tuple(Obstacle(part, u.node, u.reason) for part, u in solver.unsolved.items())
    if len(keys) > MOST_RANGES:
        return None, (Obstacle(mask, mask, f"is {len(keys)} ranges a row"),)
    return _ranges(solver, keys), found


def _ranges(solver: Solver, keys: Keys) -> Ranges | None:
    algebra = solver.algebra
    if any(key.is_whole and not key.exact for key in keys) and not any(key.exact for key in keys):
        return None
    placed = _with_full_parts(algebra, keys)
    in_order, is_sorted = _sorted(algebra, placed)
    requires = tuple(solver.numbers[slot] for slot in sorted(solver.numbers))
    return Ranges(
        tuple(_range(algebra, piece, full) for piece, full in in_order),
        () if all(key.exact for key in keys) else tuple(solver.unsolved),
        is_sorted,
        requires,
        solver.longest,
    )


_Placed = tuple[Piece, Piece | None]  # the keys, and those of them that are surely seen


def _with_full_parts(algebra: Algebra, keys: Keys) -> list[_Placed]:
    """Exact pieces stand for themselves, or for the full part of a rough piece around them."""
    left = [key for key in keys if key.exact]
    placed: list[_Placed] = []
    for rough in (key for key in keys if not key.exact):
        inner = next((piece for piece in left if contains(algebra, rough, piece)), None)
        if inner is not None:
            left.remove(inner)
        placed.append((rough, inner))
    return placed + [(piece, piece) for piece in left]


def _sorted(algebra: Algebra, placed: list[_Placed]) -> tuple[list[_Placed], bool]:
    """The ranges by where they begin, as far as that is certain."""
    left, in_order = list(placed), []
    while left:
        for item in left:
            if all(_begins_before(algebra, item[0], other[0]) for other in left):
                left.remove(item)
                in_order.append(item)
                break
        else:
            return in_order + left, False
    return in_order, True


def _begins_before(algebra: Algebra, one: Piece, two: Piece) -> bool:
    return all(any(algebra.at_most(a, b) for b in two.firsts) for a in one.firsts)


def _range(algebra: Algebra, piece: Piece, full: Piece | None) -> Range:
    first, end = first_of(algebra, piece), end_of(algebra, piece)
    if full is None:
        return Range(first, end, first, first)
    return Range(first, end, first_of(algebra, full), end_of(algebra, full))
