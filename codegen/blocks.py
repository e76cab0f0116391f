"""Which tiles of keys a kernel visits, and why: all, a block map's, or those of the mask's closed form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from flexc.codegen.bounds import BY_KEYS, BY_QUERIES, Axes, describe_ranges
from flexc.ir.expr import Expr
from flexc.ir.printer import to_formula
from flexc.ir.ranges import Ranges
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.substitute import transposed


@lru_cache(maxsize=1024)
def exact_ranges(mask: Expr) -> Ranges | None:
    """The ranges of keys that a row sees, where they are exact and there are any; else None."""
    from flexc.ir.closed_form import closed_form  # it needs sympy, whose import is slow

    found = closed_form(mask)
    return found if found is not None and found.is_exact and found.ranges else None


@lru_cache(maxsize=1024)
def turned(mask: Expr, axes: Axes) -> Expr:
    """The mask whose rows are the axis that a kernel keeps: itself, or with queries and keys exchanged."""
    return transposed(mask) if axes.by_keys else mask


def choose_blocks(
    mask: Expr | None,
    values: Sequence[object],
    *,
    given: bool,
    lengths: tuple[int, int] | None,
    wanted: object = None,
    axes: Axes = BY_QUERIES,
) -> Blocks:
    """How a kernel of `mask` finds its tiles.

    Args:
        mask: of the call, over the captured `values` by slot.
        values: decide whether the closed form holds.
        given: whether the user passed a block map, which then says where to look.
        lengths: (q_len, kv_len); None for a kernel of any length.
        wanted: the option `blocks`: "map" takes a map where a closed form would do.
        axes: what the kernel keeps a tile of, and what it walks.
    """
    if mask is None or given:
        return Blocks.MAP if given else Blocks.ALL
    mask = turned(mask, axes)
    ranges = exact_ranges(mask)
    if ranges is None or wanted == Blocks.MAP.value:
        return Blocks.MAP
    if lengths is None:
        from flexc.ir.closed_form import closed_form

        holds = ranges == closed_form(mask, any_length=True) and ranges.holds(values, 0, 0)
    else:
        kept, walked = reversed(lengths) if axes.by_keys else lengths
        holds = ranges.holds(values, kept, walked)
    return Blocks.RANGES if holds else Blocks.MAP


def ranges_of(spec: AttentionSpec) -> Ranges | None:
    """The closed form that a forward computes its loop bounds from; None for one that does not."""
    return None if spec.blocks is not Blocks.RANGES or spec.mask is None else exact_ranges(spec.mask)


def why_blocks(
    spec: AttentionSpec,
    names: tuple[str, ...],
    wanted: object = None,
    *,
    blocks: Blocks | None = None,
    axes: Axes = BY_QUERIES,
) -> str:
    """The reason for `blocks`, those of `spec` if not given; captures are called by `names`."""
    blocks = spec.blocks if blocks is None else blocks
    if spec.mask is None:
        return "no mask: every tile" if blocks is Blocks.ALL else "a block mask was given"
    mask = turned(spec.mask, axes)
    ranges = exact_ranges(mask)
    if ranges is not None and blocks is Blocks.RANGES:
        who = "a key is seen by" if axes is BY_KEYS else "a row sees"
        return f"loop bounds from the tile's coordinates: {who} {describe_ranges(ranges, names, axes)}"
    if ranges is not None:
        return "asked for" if wanted is not None else "a block mask was given, or no closed form holds"
    from flexc.ir.closed_form import obstacles

    parts = [f"{to_formula(axes.own(o.node), names)} {o.reason}" for o in obstacles(mask)]
    return "; ".join(parts) or "the mask allows nothing"
