"""Runs a generated Gluon forward on the CPU: its roles as threads, its tiles as numpy arrays.

No check of layouts, memory orders or machine code, which take a GPU or the compiler. It checks what a kernel
computes, which barriers it waits for and which buffers it fills: barriers have counts, bytes and phases as
the hardware has, a product reads its operands when it is waited for, and a copy arrives after a while. A role
that waits for ever, or reads a buffer that was filled again, is found.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.barriers_in_python import Barrier, Barriers, arrive, side_by_side, wait
from tests.ptx_in_numpy import arithmetic

_HERE = threading.local()


class Tile(np.ndarray[Any, Any]):
    """Numbers as the language has them: integers divide towards zero, and a tile knows its type.

    A `spoiled` one is a product whose operand was filled again before it was there: it may be scaled and
    dropped, not read.
    """

    spoiled: bool = False

    def __floordiv__(self, other: Any) -> Tile:  # type: ignore[override]
        return _tile(
            np.sign(self) * np.sign(other) * (np.abs(self).view(np.ndarray) // np.abs(np.asarray(other)))
        )

    def __mod__(self, other: Any) -> Tile:
        return _tile(self - (self // other) * other)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Tile:
        result = _tile(array)
        result.spoiled = context is not None and any(map(_is_spoiled, context[1]))
        return result

    def __iadd__(self, other: Any) -> Tile:  # type: ignore[misc]
        return _tile(self + other)  # values do not change, names do

    def __imul__(self, other: Any) -> Tile:  # type: ignore[misc]
        return _tile(self * other)

    def permute(self, order: tuple[int, ...]) -> Tile:
        """With its axes in another order."""
        return _tile(self.transpose(order))

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        """The same numbers in another type; an address as the pointer that it stands for."""
        if isinstance(kind, _PointerType):
            return _POINTERS[int(self)]
        if bitcast:
            return _tile(np.ascontiguousarray(self).view(kind))
        return _tile(_rounded(self) if kind == "bf16" else self.astype(kind))

    @property
    def type(self) -> Any:
        """Its type, of which only the layout is asked for."""
        return types.SimpleNamespace(layout=None)


_POINTERS: dict[int, Pointer] = {}


class _PointerType(str):
    __slots__ = ()


def _tile(value: Any) -> Tile:
    return np.asarray(value).view(Tile)


def _rounded(x: Any) -> Any:
    """To bf16, to nearest even; numbers stay fp32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32("nan"), rounded.view(np.float32))


class Pointer:
    """A place in a flat array, or many."""

    def __init__(self, base: np.ndarray[Any, Any], at: Any = 0) -> None:
        self.base, self.at = base, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, self.at + more)

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        """An address as a number, or the same place seen as 32-bit integers, which are kept apart."""
        if not bitcast:
            address = id(self.base)
            _POINTERS[address] = self
            return _tile(np.int64(address))
        links = _LINKS.setdefault(id(self.base), np.zeros(self.base.size + 4, np.int32))
        return Pointer(links, self.at)


_LINKS: dict[int, np.ndarray[Any, Any]] = {}


class Buffer:
    """Shared memory: an array, and how often each part was filled."""

    def __init__(self, data: np.ndarray[Any, Any], fills: np.ndarray[Any, Any]) -> None:
        self.data, self.fills = data, fills

    @property
    def dtype(self) -> Any:
        """The type of its elements."""
        return self.data.dtype

    def index(self, at: Any) -> Buffer:
        """One of its parts."""
        return Buffer(self.data[int(at)], self.fills[int(at) : int(at) + 1])

    def permute(self, order: tuple[int, ...]) -> Buffer:
        """With its axes in another order."""
        return Buffer(self.data.transpose(order), self.fills)

    def store(self, value: Any) -> None:
        """Fill it."""
        assert not _is_spoiled(value)
        self.data[...] = value
        self.fills += 1

    def load(self, layout: Any) -> Tile:
        """What it holds."""
        return _tile(self.data.copy())


class Descriptor:
    """A tensor (B, H, S, D) and the shape of a tile; what lies outside reads as 0 and is not written.

    With `heads`, the tensor is seen as (B, H / group, group, S, D), and a tile has `rows` of each such head.
    """

    def __init__(
        self, tensor: np.ndarray[Any, Any], rows: int, columns: int, heads: int = 1, group: int = 1
    ) -> None:
        self.tensor, self.rows, self.columns, self.layout = tensor, rows, columns, None
        self.heads, self.group = heads, group

    def windows(self, at: list[Any]) -> Iterator[tuple[np.ndarray[Any, Any], slice, slice]]:
        """Of each head: the rows of the tile that exist, where they are there, and its columns that exist."""
        b, h, *members, row, column = (int(n) for n in at)
        assert members == [0] * (self.heads > 1), "as many numbers as the descriptor has dimensions"
        for member in range(min(self.heads, self.group)):
            of = self.tensor[b, h * self.group + member if members else h]
            first, end = max(row, 0), min(row + self.rows, of.shape[0])
            end = max(end, first)
            width = min(self.columns, of.shape[1] - column)
            place = member * self.rows - row
            yield of[first:end, column : column + width], slice(first + place, end + place), slice(0, width)


def _load_tile(
    descriptor: Descriptor, at: list[Any], barrier: Barrier, into: Buffer, there: Any = True
) -> None:
    if not there:
        return
    windows = list(descriptor.windows(at))
    size = 2 * descriptor.heads * descriptor.rows * descriptor.columns

    def land() -> None:
        into.data[...] = 0
        for values, rows, columns in windows:
            into.data[rows, columns] = values
        into.fills[...] += 1
        barrier.add(0, -size)

    into.data[...] = np.nan  # whoever reads too early sees it
    threading.Timer(0.0002, land).start()


def _store_tile(descriptor: Descriptor, at: list[Any], tile: Buffer) -> None:
    assert all(int(n) >= 0 for n in at), "a box that begins before a tensor: TMA can't store one"
    for values, rows, columns in descriptor.windows(at):
        values[...] = tile.data[rows, columns]


def _is_spoiled(x: Any) -> bool:
    return bool(getattr(x, "spoiled", False))


class _Product:
    """A product on its way, or one that is added to another: it is computed when it is waited for."""

    def __init__(self, a: Any, b: Buffer, acc: Any, use_acc: bool) -> None:
        self.operands, self.acc, self.use_acc = (a, b), acc, use_acc
        self.fills = [(x, x.fills.copy()) for x in (a, b) if isinstance(x, Buffer)]

    def result(self) -> Tile:
        acc = self.acc.result() if isinstance(self.acc, _Product) else self.acc
        if any((fills == 0).any() for _, fills in self.fills):  # nobody may use it
            return _tile(np.full_like(acc, np.nan))
        if any((buffer.fills != fills).any() for buffer, fills in self.fills):
            nothing = _tile(np.full_like(acc, np.nan))
            nothing.spoiled = True
            return nothing
        assert not (self.use_acc and _is_spoiled(acc))
        left, right = (x.data if isinstance(x, Buffer) else x for x in self.operands)
        product = np.asarray(left, np.float32) @ np.asarray(right, np.float32)
        return _tile(product + acc if self.use_acc else product)


def _multiply(a: Any, b: Buffer, acc: Any, use_acc: Any = True, is_async: bool = False) -> _Product:
    return _Product(a, b, acc, bool(use_acc))


SMALL_PRODUCTS: list[tuple[int, ...]] = []
"""The shapes of what products of the older matrix instruction gave: those of rows that are computed again."""


def _multiply_again(a: Any, b: Any, acc: Any) -> Tile:
    SMALL_PRODUCTS.append(acc.shape)
    return _tile(np.asarray(a) @ np.asarray(b) + acc)


def _wait_products(number: int, deps: list[Any]) -> Any:
    found = [d.result() if isinstance(d, _Product) else d for d in deps]
    return found[0] if len(found) == 1 else tuple(found)


def _specialize(roles: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    program = _HERE.program

    def run(role: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _HERE.program = program
        with np.errstate(all="ignore"):
            role(*arguments)

    side_by_side(run, roles)


def _read(pointer: Pointer, mask: Any = True, other: Any = 0) -> Tile:
    at, inside = np.broadcast_arrays(np.asarray(pointer.at), np.asarray(mask))
    chosen = np.where(inside, at, 0)
    assert (chosen >= 0).all()
    assert (chosen < pointer.base.size).all(), "a read outside of the tensor"
    return _tile(np.where(inside, pointer.base[chosen], other).astype(pointer.base.dtype))


def _write(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, values, inside = np.broadcast_arrays(np.asarray(pointer.at), np.asarray(value), np.asarray(mask))
    pointer.base[at[inside]] = values[inside]


_ATOMIC = threading.Lock()


def _add(pointer: Pointer, value: Any, mask: Any = True, sem: str = "") -> Tile:
    with _ATOMIC:
        before = _read(pointer)
        _write(pointer, before + value, mask)
    return before


def _turn(barrier: Barrier, *, waits: bool) -> Tile:
    """Two warpgroups meet at a named barrier, of which one may go on at once."""
    with barrier.changed:
        parity = barrier.phase & 1
        barrier.add(1, 0)
    if waits:
        barrier.wait(parity)
    return _tile(np.int32(0))


def _assembly(text: str, _: str, arguments: list[Any], *__: Any, pack: int = 1, **___: Any) -> Any:
    """Inline assembly: turns, numbers passed on within a warp, the hardware's tangent, and arithmetic."""
    if text.startswith("bar."):
        return _turn(_HERE.program[2].index(arguments[0]), waits=text.startswith("bar.sync"))
    if text.startswith("shfl.sync.idx.b32"):
        numbers, lane = arguments
        return _tile(numbers[np.arange(len(numbers)) // 32 * 32 + np.asarray(lane) % 32])
    if "bmsk.clamp.b32" in text:
        weight, count, column = arguments
        return tuple(_tile(np.where(kept, weight, 0)) for kept in (column < count, column >= count))
    if text.startswith("tanh.approx.f32"):
        return _tile(np.tanh(arguments[0]))
    return _tile(arithmetic(text, arguments, pack))


def _reduced(function: Any) -> Callable[..., Tile]:
    def reduce(x: Any, axis: int) -> Tile:
        assert not _is_spoiled(x), "an operand was filled again before its product was there"
        return _tile(function(np.asarray(x), axis=axis))

    return reduce


def _of_one(function: Any) -> Callable[[Any], Tile]:
    return lambda x: _tile(function(x))


def _of_two(function: Any) -> Callable[[Any, Any], Tile]:
    return lambda a, b: _tile(function(a, b))


def _language() -> Any:
    names: dict[str, Any] = dict.fromkeys(
        (
            "BlockedLayout",
            "SliceLayout",
            "DotOperandLayout",
            "NVMMADistributedLayout",
            "SwizzledSharedLayout",
        ),
        lambda *_: None,
    )
    names |= {n: getattr(np, n) for n in ("float32", "float16", "int32", "int64", "int8")}
    names["bfloat16"] = "bf16"
    names |= {"max": _reduced(np.max), "sum": _reduced(np.sum), "min": _reduced(np.min)}
    names |= {"exp2": _of_one(np.exp2), "log": _of_one(np.log), "abs": _of_one(np.abs)}
    names["fma"] = lambda a, b, c: _tile(np.asarray(a) * b + c)
    names["where"] = lambda c, a, b: _tile(np.where(c, a, b)).astype(np.result_type(a, b))
    names |= {"maximum": _of_two(np.maximum), "minimum": _of_two(np.minimum)}
    return types.SimpleNamespace(
        **names,
        constexpr=lambda value: value,
        pointer_type=_PointerType,
        arange=lambda first, end, layout: _tile(np.arange(first, end, dtype=np.int32)),
        full=lambda shape, value, dtype, layout: _tile(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype, layout: _tile(np.zeros(shape, dtype)),
        split=lambda x: (_tile(x[..., 0]), _tile(x[..., 1])),
        join=lambda x, y: _tile(np.stack([x, y], -1)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        cdiv=lambda a, b: _tile(-(-np.asarray(a) // b)),
        load=_read,
        store=_write,
        atomic_add=_add,
        program_id=lambda axis: _tile(np.int32(_HERE.program[0])),
        num_programs=lambda axis: _HERE.program[1],
        static_range=range,
        inline_asm_elementwise=_assembly,
        allocate_shared_memory=lambda kind, shape, layout: (
            Barriers(shape[0])
            if layout == "barrier"
            else Buffer(np.zeros(shape, np.float32 if kind == "bf16" else kind), np.zeros(shape[0], np.int64))
        ),
        warp_specialize=_specialize,
        thread_barrier=lambda: None,
    )


@contextmanager
def _modules() -> Iterator[None]:
    root = "triton.experimental.gluon"
    language = _language()
    hopper = types.SimpleNamespace(
        fence_async_shared=lambda: None,
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=lambda: "barrier",
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, size, there=True: barrier.add(1, int(size)) if there else None,
            arrive=arrive,
            wait=wait,
        ),
        mma_v2=_multiply_again,
        tma=types.SimpleNamespace(
            async_load=_load_tile, async_store=_store_tile, store_wait=lambda pending: None
        ),
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_wait_products,
    )
    gluon = types.SimpleNamespace(jit=lambda function: function, language=language)
    fakes = {
        "triton.experimental": types.SimpleNamespace(gluon=gluon),
        root: gluon,
        f"{root}.language": language,
        f"{root}.language.nvidia": types.SimpleNamespace(hopper=hopper),
        f"{root}.language.nvidia.ampere": types.SimpleNamespace(
            # By each thread of a warpgroup; no copies are on their way.
            async_copy=types.SimpleNamespace(
                mbarrier_arrive=lambda barrier, increment_count: barrier.add(0 if increment_count else 128, 0)
            )
        ),
        f"{root}.language.nvidia.hopper": hopper,
    }
    kept = {name: sys.modules.get(name) for name in fakes}
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def run(source: str, entry: str, arguments: Mapping[str, Any], programs: int) -> None:
    """Run `programs` programs side by side. Arrays become pointers, numbers stay numbers."""
    scope: dict[str, Any] = {"__name__": "generated"}
    with _modules():
        exec(compile(source, "<generated>", "exec"), scope)
    values = {name: _argument(value) for name, value in arguments.items()}

    def program(number: int) -> None:
        _HERE.program = (number, programs, Barriers(16))
        for barrier in _HERE.program[2].all:
            barrier.init(2)
        with np.errstate(all="ignore"):
            scope[entry](**values)

    side_by_side(program, [(n,) for n in range(programs)])


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return Pointer(value.reshape(-1))
    if isinstance(value, Descriptor):
        return value
    return _tile(np.float32(value) if isinstance(value, float) else np.int32(value))
