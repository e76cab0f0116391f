"""Block maps on the device of the tensors, found once and kept while what they were found from is unchanged.

While a CUDA graph is captured, a map is built inside the graph, so that replays find it anew from what the
captured tensors then hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch

from flexc import driver
from flexc.call import AttentionCall
from flexc.device_map import DeviceMap
from flexc.frontend.value import Value
from flexc.ir.blockmap import BlockMap, build_block_map
from flexc.ir.expr import Expr, rebuild, topological, with_args
from flexc.ir.graph import Capture
from flexc.ir.ledger import DEFAULT_BUDGET, too_open
from flexc.ir.ops import Op
from flexc.ir.runs import TileGrid
from flexc.lru import LRU
from flexc.map_builder import BoundMask, as_read, build_device_map, form_of
from flexc.map_transforms import intersection, on_device, transposed

Graph = tuple[int, int] | None

WORTH_WAITING = 2**34
"""Pairs of a mask of which nothing is known, above which its map is built by dividing the plane.

That follows the number of tiles that analysis leaves open, but it waits for the GPU at each step. While a
CUDA graph is captured nothing may wait, and all pairs are looked at, up to the budget.
"""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a map was found from: equal keys mean equal maps while all the tensors that they name live.

    `tensors` have the version that each had.
    """

    key: tuple[object, ...]
    tensors: tuple[tuple[weakref.ref[torch.Tensor], int], ...]

    def is_current(self) -> bool:
        """Whether no tensor has died, whose identity another may have taken, or was written."""
        living = ((reference(), version) for reference, version in self.tensors)
        return all(x is not None and x._version == version for x, version in living)

    def is_same(self, other: object) -> bool:
        """Whether a map of that origin is the same map."""
        return isinstance(other, Origin) and self.key == other.key and other.is_current()


@dataclass(frozen=True, slots=True)
class _Found:
    origin: Origin
    graph: Graph
    block_map: DeviceMap


_found: LRU[tuple[object, ...], _Found] = LRU(64)
# What was made of a map lives as long as the map does.
_made_of: weakref.WeakKeyDictionary[BlockMap | DeviceMap, dict[tuple[object, ...], DeviceMap]]
_made_of = weakref.WeakKeyDictionary()


def effective_device_map(call: AttentionCall, block_q: int, block_kv: int) -> DeviceMap:
    """Which tiles a call on a GPU visits: the user's map, where there is one, met with that of the mask.

    The block sizes are the user's map's, else those given.
    """
    device, given = call.q.device, call.block_map
    if given is not None:
        block_q, block_kv = given.block_q, given.block_kv
    if call.mask is None:
        assert given is not None, "a call without mask and map visits every tile"
        return map_on(given, device)
    if isinstance(given, DeviceMap) and is_map_of_mask(call):
        return given.ready_here()
    bound, grid = _bound_call(call, call.mask, block_q, block_kv)
    origin = _origin(bound, grid, device)
    own = _map_of(bound, grid, device, origin)
    return own if given is None or given is own else intersection_on(map_on(given, device), own)


def is_map_of_mask(call: AttentionCall) -> bool:
    """Whether the user's map was built, on the device of the call, of the mask of the call as it is now."""
    given = call.block_map
    if call.mask is None or not isinstance(given, DeviceMap):
        return False
    bound, grid = _bound_call(call, call.mask, given.block_q, given.block_kv)
    origin = _origin(bound, grid, call.q.device)
    return origin is not None and origin.is_same(given.origin)


def _bound_call(call: AttentionCall, mask: Expr, block_q: int, block_kv: int) -> tuple[BoundMask, TileGrid]:
    (batch, heads, q_len, _), kv_len = call.q.shape, call.k.shape[2]
    bound = bound_mask(mask, call.captures, call.values)
    return bound, as_read(bound.mask, TileGrid(q_len, kv_len, block_q, block_kv, batch, heads))


def device_map_for(
    mask: Expr,
    captures: tuple[Capture, ...],
    values: Sequence[Value],
    grid: TileGrid,
    device: torch.device,
    budget: float = DEFAULT_BUDGET,
) -> DeviceMap | None:
    """The map of a simplified mask on `device`; None where a captured tensor is elsewhere.

    `grid` has the batches and heads of the call, whether or not the mask reads them. `budget`: see
    `create_block_mask`; pairs inside known ranges of keys do not count.

    Raises:
        MaskTooOpen: the budget does not suffice.
    """
    bound = bound_mask(mask, captures, values)
    if any(isinstance(x, torch.Tensor) and x.dim() and x.device != device for x in bound.values):
        return None
    grid = as_read(mask, grid)
    return _map_of(bound, grid, device, _origin(bound, grid, device), budget)


def _map_of(
    bound: BoundMask,
    grid: TileGrid,
    device: torch.device,
    origin: Origin | None,
    budget: float = DEFAULT_BUDGET,
) -> DeviceMap:
    capture = _graph_being_captured(device)
    key = None if origin is None else (*origin.key, capture)
    if key is not None:
        found = _found.get(key)
        if found is not None and found.origin.is_current():
            return found.block_map.ready_here()
    bound = replace(bound, values=tuple(_on(x, device) for x in bound.values))
    pairs = grid.q_len * grid.kv_len * grid.batch * grid.heads
    is_open = pairs > min(budget, WORTH_WAITING) and not form_of(bound, grid).is_bounded
    if is_open and capture and pairs > budget:
        raise too_open(
            pairs=pairs,
            tiles=grid.tiles,
            pairs_a_tile=grid.block_q * grid.block_kv,
            budget=budget,
            cost="all of them, as its rows have no ranges of keys and nothing may wait inside a CUDA graph",
        )
    if is_open and not capture:
        made = _by_dividing(bound, grid, device, budget)
    else:
        made = build_device_map(bound, grid, device)
    # A map of documents that came and went is not held, nor one in the memory of a graph that is complete.
    _found.drop(lambda old: not old.origin.is_current() or old.graph not in (None, capture))
    if key is not None and origin is not None:
        _found.put(key, _Found(origin, capture, made))
    if not capture:  # what a graph computes is another map at each replay
        made.origin = origin
        made.built_here()
    return made


def _by_dividing(bound: BoundMask, grid: TileGrid, device: torch.device, budget: float) -> DeviceMap:
    sizes = {f.name: getattr(grid, f.name) for f in fields(grid)}
    built = build_block_map(bound.mask, bound.values, **sizes, xp=torch, device=device, budget=budget)
    offsets, runs = built.offsets.cpu().numpy(), built.runs.cpu().numpy()
    return on_device(replace(built, offsets=offsets, runs=runs), device)


def _on(value: Value, device: torch.device) -> Value:
    """The value on `device`: a 0-dim tensor may lie on the CPU, and copying it would wait for the GPU."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    return torch.full((), value.item(), dtype=value.dtype, device=device)


def map_on(block_map: BlockMap | DeviceMap, device: torch.device) -> DeviceMap:
    """The map on `device`, copied there once."""
    if isinstance(block_map, DeviceMap):
        if block_map.device == device:
            return block_map.ready_here()
        block_map = block_map.host()
    return _once(block_map, ("on", device), lambda: on_device(block_map, device))


def intersection_on(one: DeviceMap, two: DeviceMap) -> DeviceMap:
    """What two maps on one device have in common, found once."""
    capture = _graph_being_captured(one.device)
    return _once(one, ("both", weakref.ref(two), capture), lambda: intersection(one, two))


def transposed_on(block_map: DeviceMap) -> DeviceMap:
    """The map with keys as rows, found once."""
    capture = _graph_being_captured(block_map.device)
    return _once(block_map, ("transposed", capture), lambda: transposed(block_map))


def _once(source: BlockMap | DeviceMap, key: tuple[object, ...], make: Callable[[], DeviceMap]) -> DeviceMap:
    made = _made_of.setdefault(source, {})
    found = made.get(key)
    if found is None:
        found = made[key] = make()
        if _graph_being_captured(found.device) is None:
            found.built_here()
    return found.ready_here()


def _graph_being_captured(device: torch.device) -> Graph:
    """The number of the CUDA graph that the current stream is captured into, and the stream; or None."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return driver.capture_id(stream), stream


def bound_mask(mask: Expr, captures: tuple[Capture, ...], values: Sequence[Value]) -> BoundMask:
    """The mask with the captures that it reads, numbered as it reads them.

    So one mask is one graph, and has one kernel and one map, whatever score_mod stands beside it.
    """
    root, slots = _renumbered(mask)
    return BoundMask(root, tuple(captures[s] for s in slots), tuple(values[s] for s in slots))


@lru_cache(maxsize=1024)
def _renumbered(mask: Expr) -> tuple[Expr, tuple[int, ...]]:
    slots: dict[int, int] = {}
    for node in topological(mask):
        if node.op in (Op.SCALAR, Op.LOAD) and isinstance(node.attr, int):
            slots.setdefault(node.attr, len(slots))
        elif node.op is Op.SIZE and isinstance(node.attr, tuple):
            slots.setdefault(node.attr[0], len(slots))

    def replaced(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op is Op.SIZE and isinstance(node.attr, tuple):
            return Expr(Op.SIZE, (), (slots[node.attr[0]], node.attr[1]), node.dtype)
        if node.op in (Op.SCALAR, Op.LOAD) and isinstance(node.attr, int):
            return Expr(node.op, args, slots[node.attr], node.dtype)
        return with_args(node, args)

    return rebuild(mask, replaced), tuple(slots)


def _origin(bound: BoundMask, grid: TileGrid, device: torch.device) -> Origin | None:
    """None: a tensor that was made in inference mode, whose contents can't be watched."""
    facts: list[object] = []
    tensors = [x for x in bound.values if isinstance(x, torch.Tensor)]
    if any(x.is_inference() for x in tensors):
        return None
    for x in bound.values:
        facts.append((id(x), x._version) if isinstance(x, torch.Tensor) else (type(x), x))
    watched = tuple((weakref.ref(x), x._version) for x in tensors)
    return Origin((bound.mask, grid, device, *facts), watched)
