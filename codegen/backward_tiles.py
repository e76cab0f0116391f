"""Tiles of the kernels of a backward: candidates best first, and a model of what each needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from flexc.codegen.backward_spec import SLICE, BackwardSpec, Entry
from flexc.codegen.refusals import SMALLER, Spilled, no_tiles, off_the_map, too_large, with_history
from flexc.codegen.target import MatrixUnit, Target
from flexc.codegen.tiles import Reasons, Tiles, power_of_two_at_least
from flexc.ir.spec import Blocks
from flexc.ir.types import Storage

# Bests for 16-bit inputs, by kernel, matrix unit and padded head dimension; those of wgmma timed on an H200.
_PREFERRED: dict[tuple[Entry, MatrixUnit], dict[int, tuple[Tiles, ...]]] = {
    (Entry.KV, MatrixUnit.WGMMA): {
        64: (Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 3)),
        128: (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3), Tiles(32, 128, 8, 3)),
        256: (Tiles(32, 64, 8, 2), Tiles(16, 64, 8, 2)),
    },
    (Entry.Q, MatrixUnit.WGMMA): {
        64: (Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
        128: (Tiles(128, 64, 8, 3), Tiles(64, 32, 4, 3), Tiles(128, 32, 8, 3)),
        256: (Tiles(64, 32, 8, 2), Tiles(64, 16, 8, 2)),
    },
    (Entry.KV, MatrixUnit.MMA_SYNC): {
        64: (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
        128: (Tiles(32, 64, 8, 2), Tiles(32, 32, 4, 2)),
        256: (Tiles(16, 64, 8, 1), Tiles(16, 32, 8, 1)),
    },
    (Entry.Q, MatrixUnit.MMA_SYNC): {
        64: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
        128: (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2)),
        256: (Tiles(64, 16, 8, 1), Tiles(32, 16, 8, 1)),
    },
    (Entry.KV, MatrixUnit.TCGEN05): {
        64: (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
        128: (Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 2)),
        256: (Tiles(32, 64, 8, 1), Tiles(16, 64, 8, 1)),
    },
    (Entry.FUSED, MatrixUnit.WGMMA): {
        64: (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3)),
        128: (Tiles(64, 64, 8, 2), Tiles(32, 128, 8, 2)),
        256: (Tiles(32, 64, 8, 2), Tiles(16, 64, 8, 2)),
    },
    (Entry.FUSED, MatrixUnit.MMA_SYNC): {
        64: (Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 2)),
        128: (Tiles(32, 64, 8, 2), Tiles(32, 32, 4, 2)),
        256: (Tiles(16, 64, 8, 1), Tiles(16, 32, 8, 1)),
    },
    (Entry.FUSED, MatrixUnit.TCGEN05): {
        64: (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
        128: (Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 2)),
        256: (Tiles(32, 64, 8, 1), Tiles(16, 64, 8, 1)),
    },
    (Entry.Q, MatrixUnit.TCGEN05): {
        64: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
        128: (Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2)),
        256: (Tiles(64, 32, 8, 1), Tiles(64, 16, 8, 1)),
    },
}
# The same where every tile is visited, so that programs are long.
_PREFERRED_UNMASKED: dict[tuple[Entry, MatrixUnit], dict[int, Tiles]] = {
    (Entry.KV, MatrixUnit.WGMMA): {128: Tiles(64, 128, 8, 3)},
    (Entry.Q, MatrixUnit.WGMMA): {64: Tiles(128, 64, 8, 3)},
}
# Bests for fp32 and wgmma, timed on an H200. All spill; those that spill less are slower.
_PREFERRED_SINGLE: dict[Entry, tuple[Tiles, ...]] = {
    Entry.FUSED: (Tiles(16, 64, 4, 1),),
    Entry.KV: (Tiles(16, 128, 8, 1),),
    Entry.Q: (Tiles(128, 32, 8, 1),),
}
# Bests for pairs of fp16 numbers and wgmma, by kernel and padded head dimension, timed on an H200. They
# spill under a mask.
_PREFERRED_PAIRS: dict[Entry, dict[int, tuple[Tiles, ...]]] = {
    Entry.KV: {64: (Tiles(64, 64, 4, 2),), 128: (Tiles(32, 128, 8, 2), Tiles(64, 64, 4, 2))},
    Entry.Q: {64: (Tiles(128, 64, 8, 2),), 128: (Tiles(128, 64, 8, 1), Tiles(64, 64, 4, 2))},
    Entry.FUSED: {64: (Tiles(64, 64, 4, 2),), 128: (Tiles(64, 64, 4, 1),)},
}
# Of fp32 whose head dimensions are shared out, by whether a program keeps keys.
_SLICED = {
    True: (Tiles(32, 64, 8, 1), Tiles(32, 32, 8, 1)),
    False: (Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1)),
}
PLACES = 256
"""Rows or distances whose sums one program adds to gradients of captured tensors."""
_SIDES = tuple((wide, short) for wide, short in product((128, 64, 32, 16), (64, 32, 16)) if wide >= short)


def backward_tiles(
    backward: BackwardSpec,
    entry: Entry,
    target: Target,
    wanted: Mapping[str, int],
    skip: Mapping[Tiles, str],
) -> tuple[Tiles, Reasons]:
    """The first candidate that fits `target` and the blocks of the user's map, with the reasons.

    If none has registers enough, the one with the fewest live ones: it will spill. `skip` are candidates that
    proved bad when they were compiled, and how.

    Raises:
        NoFeasiblePlan: none fits with the sizes that `wanted` fixes.
    """
    tried: dict[Tiles, str] = {}
    spilling: list[Tiles] = []
    for tiles, origin in _candidates(backward, entry, target, wanted):
        problem = skip.get(tiles) or _misfit(backward, entry, target, tiles)
        if problem is None:
            registers = registers_per_thread(backward, entry, target, tiles)
            if _heavier_than_skipped(backward, entry, target, registers, skip):
                problem = f"about {registers} registers a thread, fewer were too many"
            elif registers <= target.register_limit(tiles.num_warps) or is_timed_single(backward, target):
                return tiles, _reasons(entry, tiles, origin, wanted, skip, registers)
            else:
                problem = f"about {registers} registers a thread"
                spilling.append(tiles)
        tried[tiles] = problem
    if spilling:
        tiles = min(spilling, key=lambda t: registers_per_thread(backward, entry, target, t))
        registers = registers_per_thread(backward, entry, target, tiles)
        return tiles, _reasons(entry, tiles, "lightest, though it may spill", wanted, skip, registers)
    raise no_tiles(f"no tiles fit {target.name} for the {backward.describe()}", tried, SMALLER)


def is_timed_single(backward: BackwardSpec, target: Target) -> bool:
    """Whether tiles for fp32 are known from timing, spilled registers and all."""
    is_single = backward.forward.q_storage is Storage.FP32 and not backward.forward.allow_tf32
    return target.matrix_unit is MatrixUnit.WGMMA and is_single and max(_dims(backward)) == 128


def row_tiles(backward: BackwardSpec) -> Tiles:
    """Of the kernel that only reads rows: about 8192 elements a program, half of them if it writes.

    With as many, these took 72 to 76 microseconds for 67 MB on an H200, and with half of them 70 to 71.
    """
    spec = backward.forward
    rows = (4096 if backward.clears_sums else 8192) // power_of_two_at_least(
        max(spec.head_dim, spec.head_dim_v)
    )
    return Tiles(max(16, min(128, rows)), 16, 4, 1)


def _heavier_than_skipped(
    backward: BackwardSpec, entry: Entry, target: Target, registers: int, skip: Mapping[Tiles, str]
) -> bool:
    """After some tiles spilled, only those with fewer live registers are worth compiling."""
    return any(
        registers >= registers_per_thread(backward, entry, target, t)
        for t, problem in skip.items()
        if isinstance(problem, Spilled)  # and not too large
    )


def _candidates(
    backward: BackwardSpec, entry: Entry, target: Target, wanted: Mapping[str, int]
) -> Iterator[tuple[Tiles, str]]:
    spec = backward.forward
    widest = max(_dims(backward))
    half = spec.q_storage in (Storage.BF16, Storage.FP16)
    preferred = _PREFERRED[entry, target.matrix_unit].get(max(widest, 64), ()) if half else ()
    unmasked = _PREFERRED_UNMASKED.get((entry, target.matrix_unit), {}).get(max(widest, 64))
    if entry is Entry.Q and backward.finds_delta:
        unmasked = None  # takes registers: one block of 8 warps is on a processor, not two; 2.0 for 1.6 ms
    if half and unmasked is not None and backward.blocks(entry) is Blocks.ALL:
        preferred = (unmasked, *preferred)
    if is_timed_single(backward, target):
        preferred = _PREFERRED_SINGLE[entry]
    if backward.pairs and target.matrix_unit is MatrixUnit.WGMMA:
        preferred = _PREFERRED_PAIRS[entry].get(max(widest, 64), ())
    if backward.slices > 1:
        preferred = _SLICED[entry.axes.by_keys]
    for tiles in preferred:
        yield _limited(backward, replace(tiles, **wanted), wanted), "preferred"
    for (wide, short), stages in product(_SIDES, (2, 1)):
        for warps in (8, 4) if wide >= 64 or widest >= 128 else (4,):
            block_q, block_kv = (short, wide) if entry.axes.by_keys else (wide, short)
            tiles = Tiles(block_q, block_kv, warps, stages)
            yield _limited(backward, replace(tiles, **wanted), wanted), "largest that fits"


def _limited(backward: BackwardSpec, tiles: Tiles, wanted: Mapping[str, int]) -> Tiles:
    """`tiles` cut to divide the blocks of the user's map, where they were not asked for."""
    spec = backward.forward
    block_q = tiles.block_q if "block_q" in wanted else min(tiles.block_q, spec.max_block_q)
    block_kv = tiles.block_kv if "block_kv" in wanted else min(tiles.block_kv, spec.max_block_kv)
    return replace(tiles, block_q=block_q, block_kv=block_kv)


def _misfit(backward: BackwardSpec, entry: Entry, target: Target, tiles: Tiles) -> str | None:
    cut = off_the_map(backward.forward, tiles.block_q, tiles.block_kv)
    return cut or too_large(shared_memory(backward, entry, target, tiles), target, about="about ")


def _dims(backward: BackwardSpec) -> tuple[int, int]:
    """Head dimensions of the tiles of q and k, and of v."""
    spec = backward.forward
    if backward.slices > 1:
        return SLICE, SLICE
    return power_of_two_at_least(spec.head_dim), power_of_two_at_least(spec.head_dim_v)


def _sides(entry: Entry, tiles: Tiles) -> tuple[int, int]:
    """Rows that a program keeps, and rows of a step."""
    return (tiles.block_kv, tiles.block_q) if entry.axes.by_keys else (tiles.block_q, tiles.block_kv)


def shared_memory(backward: BackwardSpec, entry: Entry, target: Target, tiles: Tiles) -> int:
    """About the bytes of shared memory that a block will need. What is compiled is measured besides."""
    spec = backward.forward
    dims = sum(_dims(backward))
    size = spec.q_storage.itemsize
    kept, moving = _sides(entry, tiles)
    is_async = target.matrix_unit is not MatrixUnit.MMA_SYNC
    resident = kept * dims * size if is_async or backward.pairs else 0
    rings = max(1, tiles.num_stages if is_async else tiles.num_stages - 1) * moving * dims * size
    return resident + rings + kept * moving * size


def registers_per_thread(backward: BackwardSpec, entry: Entry, target: Target, tiles: Tiles) -> int:
    """About the registers that the live tiles take, and some for addresses."""
    spec = backward.forward
    dim, dim_v = _dims(backward)
    words = spec.q_storage.itemsize / 4
    kept, moving = _sides(entry, tiles)
    live = kept * (dim + dim_v if entry.axes.by_keys else dim) + kept * moving * (2 + words)
    if entry is Entry.FUSED:
        live += moving * dim
    fixed = 40.0
    if target.matrix_unit is MatrixUnit.MMA_SYNC:
        fixed += moving * max(dim, dim_v) * words / 32 / 2  # an operand, about half of it at a time
    if backward.pairs:
        live += kept * max(dim, dim_v)  # a product, before it is added to the others
    elif spec.q_storage is Storage.FP32:
        live += kept * moving + kept * (dim + dim_v) * words / 2  # operands are split
    return int(live / (32 * tiles.num_warps) + fixed)


def _reasons(
    entry: Entry,
    tiles: Tiles,
    origin: str,
    wanted: Mapping[str, int],
    skip: Mapping[Tiles, str],
    registers: int,
) -> Reasons:
    why = with_history(origin, skip)
    moving = "Q and dO" if entry.axes.by_keys else "K and V"
    reasons = {
        "block_q": why,
        "block_kv": why,
        "num_warps": f"about {registers} registers a thread",
        "num_stages": f"{moving} of the next steps load under this one",
    }
    return tuple((name, "asked for" if name in wanted else reason) for name, reason in reasons.items())
