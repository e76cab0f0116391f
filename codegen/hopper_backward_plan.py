"""The plan of the Hopper backward: tiles, schedule and register budgets, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexc.codegen.backward_form import backward_form
from flexc.codegen.backward_schedule import FUSED_OPTION
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.bounds import range_roots
from flexc.codegen.hopper_backward_dims import (
    APART,
    IN_PARTS,
    NARROW,
    PART,
    WIDE,
    dims,
    is_apart,
    is_in_parts,
    is_of_pairs,
)
from flexc.codegen.hopper_gradients import why_no_gradients
from flexc.codegen.hopper_plan import unfit as unfit_forward
from flexc.codegen.hopper_staged import staged_bytes
from flexc.codegen.monotone import trend
from flexc.codegen.plan import (
    NOTHING,
    WHY_PAIRS,
    KernelPlan,
    check_options,
    choose_tanh,
    holds_pairs,
    tile_option,
)
from flexc.codegen.refusals import first_fitting, off_the_map, too_large, with_history
from flexc.codegen.scatter import Sum
from flexc.codegen.target import Target
from flexc.codegen.tiles import PAIRS, Tiles, power_of_two_at_least
from flexc.errors import NoFeasiblePlan
from flexc.ir.spec import AttentionSpec, Blocks

KEYS = 64
"""Keys of one consumer warpgroup: what one wgmma takes."""
BLOCK_KV = 2 * KEYS
_TRITON = 'pass backend="triton"'
_IN_ROUNDS = (
    "in_rounds",
    "programs take one tile of keys after another, whose first queries are there by then",
)
_ORDERED = ("ordered", "deterministic: a tile of dQ is added to from the last keys to the first")


_WHY_BOTH = f"{KEYS} keys a warpgroup, whose dK and dV stay in registers"
_WHY_ONE_EACH = f"of {KEYS} keys one warpgroup has dV in registers, the other dK; dQ has a kernel of its own"


@dataclass(frozen=True, slots=True)
class HopperBackwardPlan(KernelPlan):
    """A plan for one producer warp and two consumer warpgroups. `tiles.num_warps` is one group's."""

    in_turns: bool
    """The warpgroups hand the tensor cores to each other."""
    late: bool
    """dQ of a step is computed beside the scores of the one after the next, and not beside dP of the next."""
    ordered: bool
    """A tile of dQ is added to from the last keys that its rows visit to the first, and not in any order."""
    in_rounds: bool
    """Programs take one tile of keys after another, until there are none."""
    shared: int

    @property
    def design(self) -> str:
        """The family of kernels that it belongs to."""
        return "hopper"

    @property
    def dq_columns(self) -> int:
        """Columns of what a warpgroup computes of dQ: its share of them of 64 rows, or all of 64 of 128."""
        if self.in_parts:
            return PART
        return self.padded_dim // self.groups if self.halves_are_columns else self.padded_dim

    @property
    def groups(self) -> int:
        """Warpgroups that compute, each for `KEYS` keys. One leaves room for a second program beside it."""
        return 2 if self.apart else self.tiles.block_kv // KEYS

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread at launch, so that two programs fit; None where the compiler decides."""
        return 128 if self.groups == 1 else None

    @property
    def apart(self) -> bool:
        """Whether each warpgroup has one of dK and dV, and another kernel computes dQ."""
        return self.padded_dim == APART or self.pairs

    @property
    def pairs(self) -> bool:
        """Whether operands are pairs of fp16 numbers, side by side in a row of twice the columns."""
        return self.precision == PAIRS

    @property
    def in_parts(self) -> bool:
        """Whether q and k have a second block of columns, and dQ comes in three parts."""
        return self.padded_dim == IN_PARTS

    @property
    def tail(self) -> int:
        """Columns of that block."""
        return IN_PARTS - WIDE if self.in_parts else 0

    @property
    def halves_are_columns(self) -> bool:
        """Whether the two halves of dQ are left and right, or its upper and lower rows."""
        return self.tiles.block_q == 64


def unfit(backward: BackwardSpec, target: Target) -> str | None:
    """Why the Hopper kernel can't compute `backward` on `target`; None if it can."""
    spec = backward.forward
    if is_of_pairs(backward):
        return _unfit_pairs(backward, target)
    why = unfit_forward(spec, target)
    if why is not None:
        return why
    if is_apart(backward) or is_in_parts(backward):
        return _unfit_wide(backward)
    dim, dim_v = dims(backward)
    if dim != dim_v:
        return f"head dimensions {spec.head_dim} and {spec.head_dim_v} need buffers of different widths"
    return why_no_gradients(backward)


def _unfit_pairs(backward: BackwardSpec, target: Target) -> str | None:
    """The same in fp32."""
    spec = backward.forward
    widths = {power_of_two_at_least(spec.head_dim), power_of_two_at_least(spec.head_dim_v)}
    if not holds_pairs(spec, target, None) or target.name != "sm90":
        return "q is fp32, which only pairs of fp16 numbers on sm90 are for"
    if {spec.k_storage, spec.v_storage} != {spec.q_storage}:
        return "q, k and v differ in element type"
    if widths != {WIDE}:
        return f"q is fp32, and the kernels for it have tiles of {WIDE} head dimensions"
    return _unfit_wide(backward)


def _unfit_wide(backward: BackwardSpec) -> str | None:
    """The same where a head dimension is above 128."""
    if backward.slots:
        return f"gradients of captured tensors, and {_needs(backward)}"
    if backward.forward.dropout:
        return f"dropout, and {_needs(backward)}"
    return None


def _other_sums(options: Mapping[str, object]) -> str | None:
    """Which option asks for sums that the kernels for pairs do not compute."""
    if options.get("precision") not in (None, PAIRS):
        return f"precision={options['precision']!r} was asked for"
    return f"{FUSED_OPTION} was given" if FUSED_OPTION in options else None


def _needs(backward: BackwardSpec) -> str:
    """What takes the registers that would serve that too."""
    return "q is fp32" if is_of_pairs(backward) else f"a head dimension is above {WIDE}"


def suited(backward: BackwardSpec) -> BackwardSpec:
    """`backward`, its tiles taken from a block map where the Hopper kernel can't compute them itself.

    It can for ranges whose bounds only rise or only fall with the key: the warp that loads has no columns.
    Where dQ is added up in order there is to be one range: the keys that a row visits are then neighbours, so
    that whose turn comes before is known from the next keys alone.
    """
    ranges = backward.ranges(Entry.HOPPER)
    if ranges is None:
        return backward
    is_simple = len(ranges.ranges) == 1 or not backward.deterministic
    if is_simple and all(trend(e).is_monotone for e in range_roots(ranges)):
        return backward
    return replace(backward, kv_blocks=Blocks.MAP)


def make_hopper_backward_plan(
    backward: BackwardSpec,
    target: Target,
    options: Mapping[str, object] | None = None,
    *,
    skip: Mapping[Tiles, str] = NOTHING,
) -> HopperBackwardPlan:
    """The plan for `backward`. `options` override tiles and stages; `skip` are tiles that spilled, and how.

    Raises:
        UnknownOption: an option that no plan has, or a value that it can't take.
        NoFeasiblePlan: the spec or the sizes asked for do not fit.
    """
    options = options or {}
    check_options(options)
    why = unfit(backward, target) or (_other_sums(options) if is_of_pairs(backward) else None)
    if why is not None:
        raise NoFeasiblePlan(f"the Hopper kernel can't serve the {backward.describe()}: {why}", hint=_TRITON)
    wanted = {
        name: tile_option(f"backward_{name}", options[f"backward_{name}"])
        for name in ("block_q", "block_kv", "num_warps", "num_stages")
        if f"backward_{name}" in options
    }
    tiles = first_fitting(
        [replace(t, **wanted) for t in _candidates(backward)],
        lambda t: skip.get(t) or _misfit(backward, target, t),
        title=f"no Hopper tiles fit the {backward.describe()}",
        hint=f"leave out the options, or {_TRITON}",
    )
    return _plan(backward, target, tiles, options, skip)


def _candidates(backward: BackwardSpec) -> tuple[Tiles, ...]:
    """Best first, measured on an H200."""
    if is_apart(backward):
        return (Tiles(64, KEYS, 4, 2),)
    if is_in_parts(backward):
        return (Tiles(64, BLOCK_KV, 4, 2),)
    narrow = dims(backward)[0] == NARROW
    if not narrow:
        wide = Tiles(64, BLOCK_KV, 4, 3)
        # Programs that take one tile of keys after another load two steps ahead: three tiles of queries. Of
        # others, what is known of rows from memory, or more barriers, may leave no room for the fourth.
        return (wide,) if _is_in_rounds(backward, wide) else (replace(wide, num_stages=4), wide)
    # A factor on the gradient of the score is another number a weight: too many with 128 queries. So are
    # unrounded gradients, and the random words of dropout.
    few = backward_form(backward, scatters=False).grad is not None
    few |= bool(backward.slots) or backward.forward.dropout
    whole = (Tiles(64, BLOCK_KV, 4, 4),) if few else (Tiles(128, BLOCK_KV, 4, 3), Tiles(64, BLOCK_KV, 4, 4))
    # Two programs fit beside each other: one computes while the other begins or ends. On an H200 24 % more
    # for documents of 340 keys, nothing for those of 1,365, 19 % for a window of 128, nothing for 1,024,
    # 11 % less for causal masks. Of wide heads one warpgroup computes dQ in pieces: 3 to 19 % less.
    return (Tiles(64, KEYS, 4, 3), *whole) if backward.short else whole


def _preferred(spec: AttentionSpec) -> str:
    return "few, as random words and two kinds of weights need registers" if spec.dropout else "preferred"


def _is_late(backward: BackwardSpec) -> bool:
    """Whether dQ comes late, beside dK: it then needs no registers beside weights.

    They are few where weights are of two kinds or fp32: with a factor on the gradient of the score, such as a
    soft cap has, dropout, or gradients of captured tensors. Otherwise dQ comes beside dP: the products of one
    warpgroup then take about as long as what the other computes meanwhile.
    """
    has_factor = backward_form(backward, scatters=False).grad is not None
    return has_factor or backward.forward.dropout or bool(backward.slots)


def _takes_turns(backward: BackwardSpec, tiles: Tiles) -> bool:
    """Whether one warpgroup weighs scores while the other multiplies.

    Not with 128 queries, whose products take long enough; nor where gradients of keys or distances are added
    up, which is done under the next products, if there are registers for both: 10 % faster on an H200.
    """
    if tiles.block_kv == KEYS:
        return False
    if tiles.block_q != 64 or not backward.slots or dims(backward)[0] >= WIDE:
        return tiles.block_q == 64
    return any(scatter.sum is Sum.HEAD for scatter in backward_form(backward, scatters=True).scatters)


def _is_in_rounds(backward: BackwardSpec, tiles: Tiles) -> bool:
    """Whether programs take tiles of keys one after another: then the next queries are there when they begin.

    dK and dV leave through tiles of dS, or dV through the buffer of values: hardly a load waits for them.
    """
    if is_apart(backward) or is_in_parts(backward) or backward.slots or backward.forward.dropout:
        return False
    if tiles.num_stages < 3:
        return False
    is_wide = dims(backward)[0] == WIDE
    return tiles.block_kv == KEYS or tiles.block_q == 2 * KEYS or is_wide


def _misfit(backward: BackwardSpec, target: Target, tiles: Tiles) -> str | None:
    spec = backward.forward
    if is_apart(backward) and tiles != Tiles(64, KEYS, 4, 2):
        return f"64 queries meet {KEYS} keys, in warpgroups of 4 warps, and of queries two tiles fit"
    if not is_apart(backward):
        misfit = _misfit_of_both(backward, tiles)
        if misfit:
            return misfit
    cut = off_the_map(spec, tiles.block_q, tiles.block_kv)
    if backward.blocks(Entry.HOPPER) is Blocks.MAP and cut:
        return cut
    return too_large(shared_memory(backward, tiles), target)


def _misfit_of_both(backward: BackwardSpec, tiles: Tiles) -> str | None:
    """What is wrong with tiles where a warpgroup has both dK and dV."""
    if tiles.block_kv == KEYS and tiles.block_q == 64 and tiles.num_warps == 4:
        if dims(backward)[0] >= WIDE:
            return "one warpgroup has no registers for dQ of wide heads"
        if backward.slots or backward.forward.dropout:
            return "one warpgroup computes no gradients of captured tensors, and drops nothing"
    elif tiles.block_q not in (64, 128) or tiles.block_kv != BLOCK_KV or tiles.num_warps != 4:
        return f"64 or 128 queries meet {BLOCK_KV} keys, in warpgroups of 4 warps"
    if tiles.block_q == 128 and backward.slots:
        return "128 queries and gradients of captured tensors do not fit the registers"
    if is_in_parts(backward) and tiles.num_stages != 2:
        return "two tiles of queries of wide heads fit shared memory"
    if tiles.block_q == 128 and dims(backward)[0] >= WIDE:
        return "128 queries of wide heads do not fit the registers"
    if not 2 <= tiles.num_stages <= 4:
        return "tiles of queries are loaded two to four steps ahead"
    return None


def shared_memory(backward: BackwardSpec, tiles: Tiles) -> int:
    """About the bytes of shared memory that a block needs."""
    dim, dim_v = dims(backward)
    size = 4 if is_of_pairs(backward) else 2
    keys = tiles.block_kv * (dim + dim_v) * size
    rings = (tiles.num_stages * dim + 2 * dim_v) * tiles.block_q * size + tiles.num_stages * tiles.block_q * 8
    rings += staged_bytes(backward, tiles.num_stages * tiles.block_q)
    ds = 2 * tiles.block_kv * tiles.block_q * 2
    dq = 0 if is_apart(backward) else tiles.block_q * (2 * PART if is_in_parts(backward) else dim) * 4
    scratch = 1024  # barriers, and what the warps of other roles are told
    return keys + rings + ds + dq + scratch


def _plan(
    backward: BackwardSpec,
    target: Target,
    tiles: Tiles,
    options: Mapping[str, object],
    skip: Mapping[Tiles, str],
) -> HopperBackwardPlan:
    spec = backward.forward
    needed = shared_memory(backward, tiles)
    tanh, why_tanh = choose_tanh(spec, options.get("fast_tanh"))
    rescue = spec.mask is not None
    in_turns, late = _takes_turns(backward, tiles), _is_late(backward)
    return HopperBackwardPlan(
        target=target,
        tiles=tiles,
        padded_dim=dims(backward)[0],
        padded_dim_v=dims(backward)[1],
        precision=PAIRS if is_of_pairs(backward) else "ieee",
        fast_tanh=tanh,
        blocks=backward.blocks(Entry.HOPPER).value,
        rescue_nan=rescue,
        packed_heads=1,
        in_turns=in_turns,
        late=late,
        ordered=backward.deterministic and not is_apart(backward),
        in_rounds=_is_in_rounds(backward, tiles),
        shared=needed,
        reasons=(
            ("design", "made for this target: one warp loads by TMA, two warpgroups compute with wgmma"),
            ("block_q", with_history(_preferred(spec), skip)),
            ("block_kv", _WHY_ONE_EACH if is_apart(backward) else _WHY_BOTH),
            *([_IN_ROUNDS] if _is_in_rounds(backward, tiles) else []),
            ("num_stages", f"{needed} of {target.shared_memory} bytes of shared memory"),
            *([("precision", WHY_PAIRS)] if is_of_pairs(backward) else []),
            *_schedule(backward, in_turns, late),
            *([_ORDERED] if backward.deterministic and not is_apart(backward) else []),
            ("fast_tanh", why_tanh),
            ("rescue_nan", "the portable kernels compute again what became NaN" if rescue else "no mask"),
        ),
    )


def _schedule(backward: BackwardSpec, in_turns: bool, late: bool) -> list[tuple[str, str]]:
    """Which products are computed beside which."""
    if is_apart(backward):
        return [("in_turns", "one weighs scores, and the other computes their gradients from the weights")]
    if is_in_parts(backward):
        return [("in_turns", "there is room for one tile: scores, parts of dQ and dP are in it by turns")]
    return [
        ("in_turns", "one weighs scores while the other multiplies" if in_turns else "no order is faster"),
        ("late", "beside the next dK it needs fewer registers" if late else "there are registers enough"),
    ]
