"""`KernelPlan`: every decision about one kernel, each with its reason, made in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from flexc.codegen.arguments import capture_names
from flexc.codegen.blocks import why_blocks
from flexc.codegen.target import MatrixUnit, Target
from flexc.codegen.tiles import PAIRS, Tiles, choose_tiles, power_of_two_at_least
from flexc.errors import NoFeasiblePlan, UnknownOption
from flexc.ir.expr import topological
from flexc.ir.ops import Op
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.types import Storage


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What the template needs to know beyond the spec. `reasons` says why, by field."""

    target: Target
    tiles: Tiles
    packed_heads: int
    """Query heads whose rows make up a tile."""
    padded_dim: int
    padded_dim_v: int
    precision: str
    """Of fp32 matrix products, as Triton names it: "ieee", "tf32", "tf32x3" or "bf16x6"; or "fp16x3"."""
    fast_tanh: bool
    blocks: str
    """How a tile knows the keys to visit: "all", "map" or "ranges"."""
    rescue_nan: bool
    """Whether the kernel can repeat a tile with unseen values zeroed, after a NaN came out of it."""
    reasons: tuple[tuple[str, str], ...]

    def explain(self) -> str:
        """One decision a line, with its reason."""
        lines = [f"target {self.target.name}: {self.target.matrix_unit.value}"]
        lines += [f"{name} = {self.value(name)}: {reason}" for name, reason in self.reasons]
        return "\n".join(lines)

    @property
    def design(self) -> str:
        """The family of kernels that it belongs to."""
        return "portable"

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread at launch; None where that is left to the compiler."""
        return None

    @property
    def shares_heads(self) -> bool:
        """Whether the rows of a head are shared out to as many programs as there are for each head."""
        return False

    @property
    def head_rows(self) -> int:
        """Query rows of each head in a tile."""
        return self.tiles.block_q // self.packed_heads

    def value(self, name: str) -> object:
        """The decision called `name`, of the plan or its tiles."""
        return getattr(self.tiles if hasattr(self.tiles, name) else self, name)

    def key(self) -> str:
        """A text that is equal for equal plans.

        Where tiles spill, others are tried in place of those that nobody asked for: what was asked for is a
        part of it.
        """
        parts = [
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in ("target", "reasons")
        ]
        asked = [name for name, why in self.reasons if why == _ASKED]
        parts += [f"{name} asked" for name in asked if hasattr(self.tiles, name)]
        return f"{self.target.name} {' '.join(parts)}"


NOTHING: Mapping[Tiles, str] = MappingProxyType({})
_TILE_OPTIONS = {"block_q": (16, 256), "block_kv": (16, 256), "num_warps": (1, 16), "num_stages": (1, 8)}
BACKWARD_OPTIONS = {f"backward_{name}": limits for name, limits in _TILE_OPTIONS.items()}
_SWITCHES = ("fast_tanh", "backward_fused")
_ASKED = "asked for"
SPLIT = "bf16x6"
WHY_PAIRS = "each number as two fp16 ones: three products at the full rate, as exact as sums in fp32"
_WIDEST_PAIRS = 128
_NARROWEST_PAIRS = 8
_EMPTY = "Triton 3.6 makes an empty kernel of split operands for tcgen05"
_PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x6", PAIRS)


def make_plan(
    spec: AttentionSpec,
    target: Target,
    options: Mapping[str, object] | None = None,
    *,
    skip: Mapping[Tiles, str] = NOTHING,
) -> KernelPlan:
    """The plan for `spec` on `target`. `options` override; `skip` are tiles that proved bad, and how.

    Raises:
        UnknownOption: an option that no plan has, or a value that it can't take.
        NoFeasiblePlan: the tiles that `options` ask for do not fit the target.
    """
    options = options or {}
    check_options(options)
    wanted = {name: tile_option(name, options[name]) for name in _TILE_OPTIONS if name in options}
    precision, why_precision = choose_precision(spec, target, options.get("precision"))
    if takes_pairs(spec, target, options.get("precision")):
        precision, why_precision = PAIRS, WHY_PAIRS
    try:
        tiles, why_tiles = choose_tiles(spec, target, precision, wanted, skip)
    except NoFeasiblePlan:
        if precision != SPLIT or why_precision == _ASKED:
            raise
        precision, why_precision = "ieee", "fp32 on the general units: split operands do not fit"
        tiles, why_tiles = choose_tiles(spec, target, precision, wanted, skip)
    fast_tanh, why_tanh = choose_tanh(spec, options.get("fast_tanh"))
    rescue, why_rescue = _rescue(spec, precision)
    return KernelPlan(
        target=target,
        tiles=tiles,
        packed_heads=spec.packed_heads,
        padded_dim=power_of_two_at_least(spec.head_dim),
        padded_dim_v=power_of_two_at_least(spec.head_dim_v),
        precision=precision,
        fast_tanh=fast_tanh,
        blocks=spec.blocks.value,
        rescue_nan=rescue,
        reasons=(
            *why_tiles,
            *packing(spec),
            ("precision", why_precision),
            ("fast_tanh", why_tanh),
            ("blocks", why_blocks(spec, capture_names(spec.captures), options.get("blocks"))),
            ("rescue_nan", why_rescue),
        ),
    )


def _rescue(spec: AttentionSpec, precision: str) -> tuple[bool, str]:
    """Whether a tile can be repeated after a NaN came out of it, and why."""
    if spec.mask is not None:
        return True, "values that no row sees may be NaN, and 0 * NaN is NaN"
    if precision == PAIRS:
        return True, "Inf makes a NaN of a pair"
    return False, "no mask"


def packing(spec: AttentionSpec) -> tuple[tuple[str, str], ...]:
    """Why rows of several heads share a tile, or why they do not though rows are few."""
    if not spec.few_rows:
        return ()
    if spec.packed_heads == 1:
        return (("packed_heads", "few rows, and each head has its own keys, mask or map"),)
    why = f"few rows: a tile holds {spec.few_rows} of each head that shares keys and values"
    return (("packed_heads", why),)


def check_options(options: Mapping[str, object]) -> None:
    """Raises UnknownOption for an option that no plan has, or a value that it can't take."""
    known = [*_TILE_OPTIONS, *BACKWARD_OPTIONS, *_SWITCHES, "precision", "blocks"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UnknownOption(
            f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}",
            hint=f"a plan has {', '.join(known)}",
        )
    for name, value in options.items():
        if name in _TILE_OPTIONS or name in BACKWARD_OPTIONS:
            tile_option(name, value)
    precision = options.get("precision")
    if "blocks" in options and options["blocks"] != Blocks.MAP.value:
        raise UnknownOption(
            f"option blocks is {options['blocks']!r}",
            hint='"map", to visit the tiles of a block map where a closed form would do',
        )
    if precision is not None and precision not in _PRECISIONS:
        raise UnknownOption(f"option precision is {precision!r}", hint=f"one of {', '.join(_PRECISIONS)}")
    for name in _SWITCHES:
        if options.get(name) is not None and not isinstance(options[name], bool):
            raise UnknownOption(f"option {name} is {options[name]!r}", hint="True or False")


def tile_option(name: str, value: object) -> int:
    """The value of an option about tiles. Raises UnknownOption."""
    low, high = (_TILE_OPTIONS | BACKWARD_OPTIONS)[name]
    whole = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    if not isinstance(value, int) or not whole or (not name.endswith("num_stages") and value & (value - 1)):
        kind = "an integer" if name.endswith("num_stages") else "a power of two"
        raise UnknownOption(f"option {name} is {value!r}", hint=f"{kind} from {low} to {high}")
    return value


def choose_precision(spec: AttentionSpec, target: Target, wanted: object) -> tuple[str, str]:
    """How fp32 operands are multiplied, and why.

    Raises:
        NoFeasiblePlan: `wanted` can't be had for `spec` on `target`.
    """
    if wanted == PAIRS and not holds_pairs(spec, target, wanted):
        raise NoFeasiblePlan(
            f"precision={PAIRS!r} is for fp32, up to {_WIDEST_PAIRS} head dimensions, without tf32, not on "
            f"sm100; this is {spec.describe()} on {target.name}",
            hint="leave the option out",
        )
    if wanted == SPLIT and spec.q_storage is Storage.FP32 and target.matrix_unit is MatrixUnit.TCGEN05:
        raise NoFeasiblePlan(
            f"precision={SPLIT!r} can't be had on {target.name}: {_EMPTY}", hint="leave the option out"
        )
    if wanted not in (None, PAIRS):
        return str(wanted), _ASKED
    if spec.q_storage is not Storage.FP32:
        return "ieee", "16-bit products are exact in the fp32 accumulator"
    if spec.allow_tf32:
        return "tf32", "torch.backends.cuda.matmul.allow_tf32 is set"
    if target.matrix_unit is MatrixUnit.TCGEN05:
        return "ieee", _EMPTY
    return (
        SPLIT,
        "each operand split into three bf16: more exact than fp32 sums, faster than the general units",
    )


def takes_pairs(spec: AttentionSpec, target: Target, wanted: object) -> bool:
    """Whether a forward multiplies fp32 as pairs of fp16 numbers.

    Few rows wait for memory in any case. A sum of few products is rounded less than its pairs are, so narrow
    heads take them only where they are asked for.
    """
    is_narrow = spec.head_dim < _NARROWEST_PAIRS and wanted is None
    return holds_pairs(spec, target, wanted) and not spec.few_rows and not is_narrow


def holds_pairs(spec: AttentionSpec, target: Target, wanted: object) -> bool:
    """Whether kernels can multiply fp32 as pairs of fp16 numbers: three products at the full rate.

    Tiles of wider heads spill. For tcgen05, kernels of these products that Triton 3.6 makes only trap.
    """
    is_single = spec.q_storage is Storage.FP32 and not spec.allow_tf32
    fits = max(spec.head_dim, spec.head_dim_v) <= _WIDEST_PAIRS
    return is_single and fits and target.matrix_unit is not MatrixUnit.TCGEN05 and wanted in (None, PAIRS)


def choose_tanh(spec: AttentionSpec, wanted: object) -> tuple[bool, str]:
    """Whether tanh is the hardware's, and why."""
    if wanted is not None:
        return bool(wanted), _ASKED
    if spec.score is None or all(node.op is not Op.TANH for node in topological(spec.score)):
        return False, "no tanh"
    if spec.q_storage in (Storage.BF16, Storage.FP16):
        return True, "tanh.approx is off by 2^-11, less than rounding the score to 16 bits would be"
    return False, "fp32 inputs keep fp32 accuracy"
