"""Tile sizes, warps and stages: candidates best first, and a model of what each needs of the hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from flexc.codegen.refusals import SMALLER, no_tiles, off_the_map, too_large, with_history
from flexc.codegen.target import MatrixUnit, Target
from flexc.ir.ops import Op
from flexc.ir.place import Placement, place
from flexc.ir.spec import AttentionSpec
from flexc.ir.types import Storage

Reasons = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and columns a step, warps a program, and stages of the K/V pipeline."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two that is at least `n` and 16, the smallest side of a matrix product."""
    return max(16, 1 << (n - 1).bit_length())


# Bests for 16-bit inputs, by matrix unit and padded head dimension. Those of wgmma were timed on an H200;
# the others are the largest that compile without spills.
_PREFERRED: dict[MatrixUnit, dict[int, tuple[Tiles, ...]]] = {
    MatrixUnit.WGMMA: {
        64: (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3)),
        128: (Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
        256: (Tiles(128, 32, 8, 3), Tiles(64, 32, 4, 3)),
    },
    MatrixUnit.MMA_SYNC: {
        64: (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3)),
        128: (Tiles(128, 32, 8, 3), Tiles(128, 16, 8, 3)),
        256: (Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2)),
    },
    MatrixUnit.TCGEN05: {
        64: (Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 3)),
        128: (Tiles(128, 32, 8, 3), Tiles(64, 32, 4, 3)),
        256: (Tiles(128, 32, 8, 2), Tiles(64, 32, 4, 2)),
    },
}
# Wide fp32 heads: split operands take six times their registers, so few rows.
_PREFERRED_FP32 = (Tiles(16, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1))
# Bests for fp32 as pairs of fp16 numbers and wgmma, by padded head dimension.
_PREFERRED_PAIRS: dict[int, tuple[Tiles, ...]] = {
    64: (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)),
    128: (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 1)),
}
PAIRS = "fp16x3"
"""How a plan calls products of pairs of fp16 numbers."""
# Few rows wait for memory: more of it is under way.
_FEW_ROWS = (Tiles(16, 64, 4, 4), Tiles(16, 64, 4, 3), Tiles(16, 32, 4, 4))
_LADDER = tuple(
    Tiles(block_q, block_kv, num_warps, num_stages)
    for block_q, block_kv, num_stages in product((128, 64, 32, 16), (64, 32, 16), (3, 2, 1))
    for num_warps in ((8, 4) if block_q >= 64 else (4,))
)


def choose_tiles(
    spec: AttentionSpec,
    target: Target,
    precision: str,
    wanted: Mapping[str, int],
    skip: Mapping[Tiles, str],
) -> tuple[Tiles, Reasons]:
    """The first candidate that fits `target` and the blocks of the user's map, with the reasons.

    If none has registers enough, the first that only lacks those: it will spill. `skip` are candidates that
    proved bad when they were compiled, and how.

    Raises:
        NoFeasiblePlan: none fits with the sizes that `wanted` fixes; the message lists each and its need.
    """
    tried: dict[Tiles, str] = {}
    spilling: tuple[Tiles, str] | None = None
    for tiles, origin in _candidates(spec, target, precision, wanted):
        problem = (
            skip.get(tiles)
            or misfit(spec, target, precision, tiles)
            or _no_lighter(spec, target, precision, tiles, skip)
        )
        if problem is None:
            problem = _too_few_registers(spec, target, precision, tiles)
            if problem is None:
                return tiles, _reasons(spec, target, precision, tiles, with_history(origin, skip), wanted)
            spilling = spilling or (tiles, f"{origin}, though it may spill ({problem})")
        tried[tiles] = problem
    if spilling is not None:
        return spilling[0], _reasons(spec, target, precision, *spilling, wanted)
    raise no_tiles(f"no tiles fit {target.name} for {spec.describe()}", tried, SMALLER)


def _no_lighter(
    spec: AttentionSpec, target: Target, precision: str, tiles: Tiles, skip: Mapping[Tiles, str]
) -> str | None:
    """After some tiles spilled, only those with fewer live registers are worth compiling."""
    if not skip:
        return None
    registers = registers_per_thread(spec, target, precision, tiles)
    lightest = min(registers_per_thread(spec, target, precision, t) for t in skip)
    return f"about {registers} registers a thread, {lightest} was too many" if registers >= lightest else None


def _candidates(
    spec: AttentionSpec, target: Target, precision: str, wanted: Mapping[str, int]
) -> Iterator[tuple[Tiles, str]]:
    widest = max(power_of_two_at_least(spec.head_dim), power_of_two_at_least(spec.head_dim_v))
    half = spec.q_storage in (Storage.BF16, Storage.FP16)
    preferred = _PREFERRED[target.matrix_unit].get(max(widest, 64), ()) if half else ()
    if not half and widest >= 256:
        preferred = _PREFERRED_FP32
    if precision == PAIRS and target.matrix_unit is MatrixUnit.WGMMA:
        preferred = _PREFERRED_PAIRS.get(max(widest, 64), ())
    if spec.few_rows:
        rows = power_of_two_at_least(spec.few_rows * spec.packed_heads)
        warps = (4, 8) if rows >= 32 else (4,)
        fitting = [replace(t, block_q=rows, num_warps=n) for t in (*_FEW_ROWS, *_LADDER) for n in warps]
        for tiles in dict.fromkeys(fitting):
            yield _limited(spec, replace(tiles, **wanted), wanted), "for few rows"
        return
    for tiles in preferred:
        yield _limited(spec, replace(tiles, **wanted), wanted), "preferred"
    for tiles in _LADDER:
        yield _limited(spec, replace(tiles, **wanted), wanted), "largest that fits"


def _limited(spec: AttentionSpec, tiles: Tiles, wanted: Mapping[str, int]) -> Tiles:
    """`tiles` cut to divide the blocks of the user's map, where they were not asked for."""
    keeps = "block_q" in wanted or spec.few_rows
    block_q = tiles.block_q if keeps else min(tiles.block_q, spec.max_block_q)
    block_kv = tiles.block_kv if "block_kv" in wanted else min(tiles.block_kv, spec.max_block_kv)
    warps = tiles.num_warps
    if not spec.few_rows and "num_warps" not in wanted and block_q < 64:
        warps = min(warps, 4)
    return replace(tiles, block_q=block_q, block_kv=block_kv, num_warps=warps)


def misfit(spec: AttentionSpec, target: Target, precision: str, tiles: Tiles) -> str | None:
    """Why `tiles` can't serve `spec` on `target`; None if they can."""
    cut = off_the_map(spec, spec.few_rows or tiles.block_q, tiles.block_kv)
    return cut or too_large(shared_memory(spec, target, precision, tiles), target)


def _too_few_registers(spec: AttentionSpec, target: Target, precision: str, tiles: Tiles) -> str | None:
    registers = registers_per_thread(spec, target, precision, tiles)
    limit = target.register_limit(tiles.num_warps)
    return f"about {registers} registers a thread, {limit} there" if registers > limit else None


def shared_memory(spec: AttentionSpec, target: Target, precision: str, tiles: Tiles) -> int:
    """Bytes of shared memory that a block will need, at least what Triton takes (tests compare the two)."""
    dim, dim_v = power_of_two_at_least(spec.head_dim), power_of_two_at_least(spec.head_dim_v)
    size = spec.q_storage.itemsize
    q = tiles.block_q * dim * size
    step = tiles.block_kv * (dim + dim_v) * max(size, spec.k_storage.itemsize)
    # A product may still read a buffer: one more. Pairs are made of what is in one, in buffers of their own.
    is_async = target.matrix_unit is not MatrixUnit.MMA_SYNC and precision != PAIRS
    fewest = 0 if precision == PAIRS else 1
    rings = max(fewest, tiles.num_stages if is_async else tiles.num_stages - 1) * step
    # Loads of single elements are staged as K and V are.
    rings += element_loads(spec) * tiles.num_stages * tiles.block_q * tiles.block_kv * 4
    scratch = 16 * tiles.block_q + 16 * tiles.block_kv + 512
    shared_rows = tiles.block_q < 16 * tiles.num_warps  # several warps share the rows of a matrix instruction
    is_split = spec.q_storage is Storage.FP32 and precision != PAIRS
    if is_split or target.matrix_unit is MatrixUnit.TCGEN05 or shared_rows:
        scratch += tiles.block_q * tiles.block_kv * size  # the weights pass through shared memory
    if is_split and precision not in ("ieee", "tf32"):
        scratch += q + step // 2  # the remainders of the split operands
    if precision == PAIRS:
        scratch += tiles.block_kv * max(dim, dim_v) * size
    return q + rings + scratch


def registers_per_thread(spec: AttentionSpec, target: Target, precision: str, tiles: Tiles) -> int:
    """Registers that the live tiles take, and some for addresses and row statistics."""
    threads = 32 * tiles.num_warps
    dim, dim_v = power_of_two_at_least(spec.head_dim), power_of_two_at_least(spec.head_dim_v)
    words = spec.q_storage.itemsize / 4
    scores = tiles.block_q * tiles.block_kv
    live = tiles.block_q * dim_v + scores * (1 + words)
    if element_loads(spec):
        live += 3 * scores  # a 64-bit address and a condition each
    fixed = 40.0
    if target.matrix_unit is MatrixUnit.MMA_SYNC:
        live += tiles.block_q * dim * words  # Q stays in registers as an operand
        fixed += tiles.block_kv * max(dim, dim_v) * words / 32 / 2  # K or V too, about half of it at a time
    if precision == PAIRS:
        live += tiles.block_q * dim_v  # a product, before it is added to the others
    elif spec.q_storage is Storage.FP32:
        live += scores + tiles.block_q * dim * words  # each operand is split in two
    return int(live / threads + fixed)


@lru_cache(maxsize=1024)
def element_loads(spec: AttentionSpec) -> int:
    """How many entries of captured tensors the mods read for each pair of a query and a key."""
    roots = [root for root in (spec.score, spec.mask) if root is not None]
    placement = place(*roots)
    return sum(node.op is Op.LOAD and level is Placement.ELEMENT for node, level in placement.items())


def _reasons(
    spec: AttentionSpec, target: Target, precision: str, tiles: Tiles, origin: str, wanted: Mapping[str, int]
) -> Reasons:
    shared = shared_memory(spec, target, precision, tiles)
    fit = f"at most {shared} of {target.shared_memory} bytes of shared memory"
    reasons = {
        "block_q": f"{origin} for a head dimension of {spec.head_dim}",
        "block_kv": f"{origin}; {fit}",
        "num_warps": f"about {registers_per_thread(spec, target, precision, tiles)} registers a thread",
        "num_stages": "K and V of the next steps load under this one",
    }
    return tuple((name, "asked for" if name in wanted else reason) for name, reason in reasons.items())
