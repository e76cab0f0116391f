"""The plan of a Hopper kernel: tiles, consumers, stages and register budgets, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from flexc.codegen.blocks import ranges_of
from flexc.codegen.distance import only_adds_by_distance, pair_loads
from flexc.codegen.few_rows import FEW
from flexc.codegen.hopper_score import hopper_score
from flexc.codegen.hopper_walk import registers_of_walk, tiles_of_walk
from flexc.codegen.hopper_walk import shared_memory as memory_of_walk
from flexc.codegen.monotone import trend
from flexc.codegen.plan import NOTHING, KernelPlan, check_options, choose_tanh, packing
from flexc.codegen.refusals import first_fitting, off_the_map, too_large, with_history
from flexc.codegen.softmax_form import NEAR_ZERO
from flexc.codegen.target import Target
from flexc.codegen.tiles import Tiles, element_loads
from flexc.errors import NoFeasiblePlan
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.types import Storage

ROWS = 64
"""Query rows of one consumer warpgroup: what one wgmma takes."""
_L2 = 32 * 2**20
"""Bytes of keys and values of the heads that run together; they share an L2 cache of 50 MB."""


@dataclass(frozen=True, slots=True)
class HopperPlan(KernelPlan):
    """A plan for one producer warp and several consumer warpgroups. `tiles.num_warps` is one group's."""

    consumers: int
    registers: tuple[int, int]
    """A thread's registers in a consumer and in the producer."""
    tails: tuple[int, int]
    """The second part of the head dimension, of q and k and of v, where it is no power of two; or 0."""
    out_through_q: bool
    """The output leaves through the buffer of the query rows; it has none of its own."""
    q_tiles: int
    """Tiles of query rows that shared memory holds."""
    sums_in_parts: bool
    """Threads keep the sums of what they have of a row, and add these up when the row is done with."""
    values_late: bool
    """The values of a step are waited for when the weights of the next are there, not before."""
    lean: bool
    """Threads share sums to look for NaN, and a tile's first values do not add to anything."""
    threads_release: bool
    """Threads say for themselves that they are done with keys and values, not one for a warpgroup."""
    turns: bool
    """Warpgroups issue the products of a step in turns."""
    turns_by_scores: bool
    """A turn is over when the scores are there, not when the products are issued."""
    bounded: bool
    """Scores are near zero by themselves: no row has a largest one, nor is anything scaled to it."""
    guessed: bool
    """What is taken from a row's scores is the largest one of its first keys; where later ones are far
    larger, rows are computed again."""
    lazy_max: bool
    """A row's largest score is looked for only where weights under the one so far have become large."""
    polynomials: bool
    """Some of the weights are computed by multiplications, since exponentials and tanh share a unit."""
    short: bool
    """Tiles of queries see few keys: one piece of code serves all steps of a tile, and its end is awaited."""
    walks: bool
    """A program of one warpgroup computes some tiles of a head, one after the other, and loads for itself."""
    shared: int

    @property
    def design(self) -> str:
        """The family of kernels that it belongs to."""
        return "hopper"

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread at launch, so that programs that walk fit beside each other."""
        return registers_of_walk(self.tiles.num_stages) if self.walks else None

    @property
    def shares_heads(self) -> bool:
        """Whether the rows of a head are shared out to as many programs as there are for each head."""
        return self.walks

    @property
    def l2_keys(self) -> int:
        """So many keys and values fit the share of the L2 cache."""
        return _L2 // (2 * (self.padded_dim + self.padded_dim_v))


_WHY_BOUNDED = f"no score is further than {NEAR_ZERO:g} from zero, so that no largest one is needed"
_WHY_LAZY = "a row's largest score seldom changes: it is looked for where weights have become large"
_TRITON = 'pass backend="triton"'
_FEW = f"a call of fewer than {FEW} query rows takes others, unless rows of several heads fill a tile"
_REGISTERS = {1: (256, 24), 2: (240, 24), 3: (160, 32), 4: (112, 24)}
"""By consumers; with the producer's they add up to the 65,536 of a block, or all that threads can have."""


def unfit(spec: AttentionSpec, target: Target) -> str | None:
    """Why the Hopper kernel can't serve `spec` on `target`; None if it can."""
    if target.name != "sm90":
        return f"it is made for sm90, this is {target.name}"
    if spec.q_storage not in (Storage.BF16, Storage.FP16):
        return f"q is {spec.q_storage.value}, and wgmma takes 16-bit operands"
    if spec.k_storage is not spec.q_storage or spec.v_storage is not spec.q_storage:
        return "q, k and v differ in element type"
    if max(spec.head_dim, spec.head_dim_v) > 256:
        return "a head dimension is above 256"
    if not spec.aligned:
        return "TMA needs addresses and strides that are multiples of 16 bytes"
    return None


def make_hopper_plan(
    spec: AttentionSpec,
    target: Target,
    options: Mapping[str, object] | None = None,
    *,
    skip: Mapping[Tiles, str] = NOTHING,
) -> HopperPlan:
    """The plan for `spec`. `options` override tiles and stages; `skip` are tiles that spilled, and how.

    Raises:
        UnknownOption: an option that no plan has, or a value that it can't take.
        NoFeasiblePlan: the spec or the sizes asked for do not fit.
    """
    options = options or {}
    check_options(options)
    why = unfit(spec, target)
    if why is not None:
        raise NoFeasiblePlan(f"the Hopper kernel can't serve {spec.describe()}: {why}", hint=_TRITON)
    if "num_warps" in options:
        raise NoFeasiblePlan("a Hopper kernel has one warp that loads and warpgroups of four", hint=_TRITON)
    tiles = first_fitting(
        _candidates(spec, target, options),
        lambda t: skip.get(t) or _misfit(spec, target, t),
        title=f"no Hopper tiles fit {spec.describe()}",
        hint=f"leave out the options, or {_TRITON}",
    )
    return _plan(spec, target, tiles, options, skip)


def padded(dim: int) -> int:
    """A head dimension as TMA and wgmma handle it: the sum of its parts."""
    return sum(parts(dim))


def parts(dim: int) -> tuple[int, int]:
    """A head dimension as one or two powers of two, which Triton's blocks are; the second may be 0.

    The first fills rows of one or more 128-byte swizzles. 96 is 64 and 32, 192 is 128 and 64: as one block
    they would cost a third more.
    """
    whole = max(64, 1 << (dim - 1).bit_length())
    first = whole // 2
    if first < 64:
        return whole, 0
    tail = max(16, 1 << (dim - first - 1).bit_length())
    return (first, tail) if first + tail < whole else (whole, 0)


def moves_on(spec: AttentionSpec) -> bool:
    """Whether the keys that a row sees are a band that moves on with the rows, such as a window."""
    ranges = ranges_of(spec)
    if ranges is None or len(ranges.ranges) != 1:
        return False
    (band,) = ranges.ranges
    return trend(band.first).rises and trend(band.end).rises


def is_bounded(spec: AttentionSpec) -> bool:
    """Whether no row has a largest score: where scores are near zero, and their powers fit the weights' type.

    Where weights overflow, as large values may make them, rows are computed again, as after NaN. Only kernels
    of masks can do that.
    """
    fits = spec.q_storage is Storage.BF16 and not spec.has_sinks
    return spec.bounded and spec.mask is not None and fits


def is_guessed(spec: AttentionSpec) -> bool:
    """Whether rows are scaled to the largest score of the first tile in which they see a key.

    Weights have the range of a float, so nothing is lost unless a later score is larger by 116, or by 94
    beside slopes. Rows that have such scores are computed again, which only kernels of masks can do. Slopes
    want to know the first key that a row sees, which block maps do not tell.
    """
    fits = spec.q_storage is Storage.BF16 and not spec.has_sinks and not spec.dropout
    known = spec.score is None or has_slope(spec)
    known = known and (spec.blocks is not Blocks.MAP or spec.score is None)
    return fits and spec.mask is not None and known and spec.packed_heads == 1


def has_slope(spec: AttentionSpec) -> bool:
    """Whether a score is that of the keys and what rises or falls with the distance: ALiBi."""
    if spec.score is None or not spec.positive_scale:
        return False
    found = hopper_score(spec, packed=spec.packed_heads > 1, by_row=True)
    return found.slope is not None and found.factor is None


def has_lazy_max(spec: AttentionSpec, consumers: int) -> bool:
    """Whether the largest score of a row is looked for only where weights under the one so far are large.

    Then the scores of that tile are computed again, since no registers keep them, and there is nothing but
    products to compute again. Three consumers have too few registers for two ways through a step.
    """
    widest = max(padded(spec.head_dim), padded(spec.head_dim_v))
    return spec.mask is None and _is_plain_walk(spec) and consumers == 2 and widest <= 128


def _is_bias_alone(spec: AttentionSpec) -> bool:
    """Whether the only mod is a bias by distance."""
    is_bias = spec.score is not None and only_adds_by_distance(spec.score)
    return is_bias and spec.mask is None and spec.packed_heads == 1 and not spec.dropout


def _is_plain_walk(spec: AttentionSpec) -> bool:
    """Whether scores are products alone, and every row sees all keys or one range of them in closed form."""
    ranges = ranges_of(spec)
    one_range = spec.mask is None if ranges is None else len(ranges.ranges) == 1
    simple = spec.score is None or is_guessed(spec)
    return one_range and simple and spec.packed_heads == 1 and not spec.dropout


def _gains_by_turns(spec: AttentionSpec, consumers: int) -> bool:
    """Whether warpgroups had better issue products in turns: three, and two of narrow heads."""
    if consumers == 2 and spec.blocks is Blocks.MAP:
        return is_guessed(spec) and max(padded(spec.head_dim), padded(spec.head_dim_v)) == 64
    return consumers == 3 and _is_plain_walk(spec)


def _loads(spec: AttentionSpec) -> int:
    """How many entries of captured tensors are read for each pair. Several heads share no distances."""
    return element_loads(spec) if spec.packed_heads > 1 else pair_loads(spec.score, spec.mask)


def _candidates(spec: AttentionSpec, target: Target, options: Mapping[str, object]) -> list[Tiles]:
    widest = max(padded(spec.head_dim), padded(spec.head_dim_v))
    wide = 64 if widest == 256 or spec.narrow or _loads(spec) or (spec.dropout and widest > 128) else 128
    # Three consumers have few registers each: enough for narrow heads without a score_mod, with a bias by
    # distance alone, or with scores near zero, whose rows have no largest one (on an H200).
    simple = spec.score is None or _is_bias_alone(spec) or is_bounded(spec) or is_guessed(spec)
    # The blocks of maps are powers of two.
    plain = simple and spec.blocks is not Blocks.MAP and not spec.dropout
    most = 192 if widest == 64 and plain else 128
    asked = {name: options[name] for name in ("block_q", "block_kv", "num_stages") if name in options}
    found = []
    if spec.walk:
        found.append(tiles_of_walk(spec.walk))
    if spec.few_rows:
        most = spec.few_rows * spec.packed_heads
    elif widest == 64 and moves_on(spec) and not spec.dropout:
        # Few keys a row: narrow tiles waste less at both ends, and a long ring lets warpgroups drift apart.
        found.append(replace(Tiles(192, 64, 4, 6), **asked))  # type: ignore[arg-type]
    pairs = list(product((most, min(most, 128)), (128, 64)))
    if spec.score is not None:  # where registers spill, rather fewer consumers than narrow tiles of keys
        pairs.sort(key=lambda pair: -pair[1])
    for block_q, block_kv in pairs:
        if block_kv > wide:
            continue
        tiles = [replace(Tiles(block_q, block_kv, 4, n), **asked) for n in (4, 3, 2)]  # type: ignore[arg-type]
        # Fewer stages need no fewer registers: only the most that fit are worth a try.
        fitting = [t for t in tiles if _misfit(spec, target, t) is None]
        found.append((fitting or tiles)[0])
    return list(dict.fromkeys(found))


def _why_keys(spec: AttentionSpec) -> str:
    """The reason for the keys of a tile."""
    if spec.narrow:
        return "rows see few keys, of which narrow tiles waste less"
    return "one element load a pair takes registers" if _loads(spec) else "preferred"


def _walks(spec: AttentionSpec, tiles: Tiles) -> bool:
    """Whether programs of these tiles walk."""
    return spec.walk > 0 and tiles == tiles_of_walk(spec.walk)


def _misfit(spec: AttentionSpec, target: Target, tiles: Tiles) -> str | None:
    if tiles.block_q % ROWS or tiles.block_q // ROWS not in _REGISTERS:
        return f"query rows come in one to four groups of {ROWS}"
    if not 64 <= tiles.block_kv <= 128:
        return "keys come in tiles of 64 or 128"
    cut = off_the_map(spec, spec.few_rows or tiles.block_q, tiles.block_kv)
    if spec.blocks is Blocks.MAP and cut:
        return cut
    if tiles.num_stages < 2:
        return "loads need two stages to run ahead"
    return too_large(shared_memory(spec, tiles, target)[0], target)


def shared_memory(spec: AttentionSpec, tiles: Tiles, target: Target) -> tuple[int, int, bool]:
    """Bytes of shared memory, how many tiles of query rows fit, whether the output leaves through theirs."""
    if _walks(spec, tiles):
        return memory_of_walk(tiles.num_stages), 1, False
    dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    # Barriers, reductions between warps, and what the warps of other roles are told.
    scratch = 12288 if spec.mask is not None else 4096
    q = tiles.block_q * dim * 2
    stage = tiles.block_kv * (dim + dim_v) * 2
    first, tail = parts(spec.head_dim_v)
    through_q = parts(spec.head_dim)[0] == first and tail in (0, parts(spec.head_dim)[1])
    fixed = scratch + (0 if through_q else tiles.block_q * dim_v * 2)
    q_tiles = 2 if fixed + 2 * q + 2 * stage <= target.shared_memory else 1
    return fixed + q_tiles * q + tiles.num_stages * stage, q_tiles, through_q


def _plan(
    spec: AttentionSpec,
    target: Target,
    tiles: Tiles,
    options: Mapping[str, object],
    skip: Mapping[Tiles, str],
) -> HopperPlan:
    consumers = tiles.block_q // ROWS
    needed, q_tiles, through_q = shared_memory(spec, tiles, target)
    tanh, why_tanh = choose_tanh(spec, options.get("fast_tanh"))
    rescue = spec.mask is not None
    # As measured on an H200: it doesn't help where there is nothing but products and softmax.
    sums_in_parts = rescue or spec.score is not None
    # Not with one tile of query rows: its rows would be waited for before they may be loaded.
    plain = rescue and not spec.dropout and spec.packed_heads == 1
    walks = _walks(spec, tiles)
    few_keys = spec.narrow or tiles.block_kv == 128
    short = plain and spec.score is None and q_tiles == 2 and moves_on(spec) and few_keys and not walks
    lazy_max = has_lazy_max(spec, consumers)
    # Three warpgroups fall into step: all want products at once, and then all exponentials. In turns they
    # take 1 to 4 % less time on an H200, if they wait for values before the softmax.
    # Without a mask it is best to pass a turn on at once.
    turns = q_tiles == 2 and not short and _gains_by_turns(spec, consumers)
    values_late = (rescue and consumers == 3 and not turns) or (_is_bias_alone(spec) and consumers == 2)
    values_late = values_late and tiles.block_kv == 128
    # Fewer barriers of a warpgroup pay where much is done besides products; not, beside turns, more arrivals.
    bounded = is_bounded(spec) and not walks
    guessed = is_guessed(spec) and not walks
    lean = short or walks or (plain and consumers == 3 and (spec.score is None or bounded or guessed))
    return HopperPlan(
        target=target,
        tiles=tiles,
        packed_heads=spec.packed_heads,
        padded_dim=padded(spec.head_dim),
        padded_dim_v=padded(spec.head_dim_v),
        tails=(parts(spec.head_dim)[1], parts(spec.head_dim_v)[1]),
        precision="ieee",
        fast_tanh=tanh,
        blocks=spec.blocks.value,
        rescue_nan=rescue,
        consumers=consumers,
        registers=_REGISTERS[consumers],
        out_through_q=through_q,
        q_tiles=q_tiles,
        sums_in_parts=sums_in_parts or lazy_max,
        values_late=values_late,
        lean=lean,
        threads_release=lean and not turns and not walks,
        turns=turns,
        turns_by_scores=turns and rescue,
        bounded=bounded,
        guessed=guessed,
        lazy_max=lazy_max,
        polynomials=bounded and tanh and consumers == 3,
        short=short,
        walks=walks,
        shared=needed,
        reasons=_reasons(spec, tiles, skip, f"{needed} of {target.shared_memory}", why_tanh),
    )


def _reasons(
    spec: AttentionSpec, tiles: Tiles, skip: Mapping[Tiles, str], memory: str, why_tanh: str
) -> tuple[tuple[str, str], ...]:
    """Why each decision was made; `memory` is what is needed of the shared memory there is."""
    if _walks(spec, tiles):
        return (
            ("design", f"made for this target: TMA, and one warpgroup that computes with wgmma; {_FEW}"),
            ("walks", "rows see few keys: a program goes along a head, and its keys wait for the next rows"),
            (
                "num_stages",
                f"tiles of keys that {tiles.block_q} rows see, at most; {memory} bytes of shared memory",
            ),
        )
    return (
        ("design", f"made for this target: one warp loads by TMA, the others compute with wgmma; {_FEW}"),
        *packing(spec),
        ("consumers", f"warpgroups of {ROWS} query rows each; one more warp loads for them"),
        ("registers", "a thread's in a consumer and in the producer"),
        ("block_kv", with_history(_why_keys(spec), skip)),
        ("num_stages", f"{memory} bytes of shared memory"),
        ("fast_tanh", why_tanh),
        *((("bounded", _WHY_BOUNDED),) if is_bounded(spec) else ()),
        *((("lazy_max", _WHY_LAZY),) if has_lazy_max(spec, tiles.block_q // ROWS) else ()),
    )
