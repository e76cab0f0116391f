"""In which order programs of a backward take tiles."""

from __future__ import annotations

from flexc.codegen.backward_spec import Entry
from flexc.codegen.bounds import Bounds


def first_tiles(entry: Entry, bounds: Bounds | None, *, across: bool) -> dict[str, str]:
    """Which tiles come first: those with the most to visit. Under a causal mask, first keys and last rows.

    Programs of pairs are few and long, and compute for longer than a tile takes from memory. So the longest
    of all heads come first: those of one head after those of another leave the last head's to few processors.
    """
    axes = entry.axes
    from_first = axes.by_keys
    if bounds is not None and (bounds.first_rows_heaviest or bounds.last_rows_heaviest):
        from_first = bounds.first_rows_heaviest
    tiles = f"{axes.kept}_tiles"
    number = "pid // head_count" if across else f"pid % {tiles}"
    at = number if from_first else f"({tiles} - 1 - {number})"
    what = f"{'keys' if axes.by_keys else 'rows'}{' of all heads' if across else ''}"
    return {
        "first_start": f"{at} * {axes.kept_tile}",
        "order": f"The {'first' if from_first else 'last'} {what} come first, which have most to visit.",
    }
