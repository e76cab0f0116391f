"""Runs a generated Gluon backward on the CPU, as `gluon_in_numpy` runs forwards, with what that lacks.

Products are computed when they are issued: whether an operand is filled again too early is not seen here.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from tests import gluon_in_numpy as gluon
from tests.barriers_in_python import PATIENCE, Barrier, side_by_side
from tests.gluon_in_numpy import Buffer, Descriptor, Pointer, Tile

Array = np.ndarray[Any, Any]
_CORE = "triton.experimental.gluon.language._core"
_LINE = 32


class Rows:
    """Numbers of all rows, of which those of `count` rows are copied at a time: `width` a row."""

    layout = None

    def __init__(self, numbers: Array, count: int, width: int = 1) -> None:
        self.numbers, self.count = numbers.reshape((-1,) if width == 1 else (-1, width)), count


class Sums:
    """dQ of all rows, to which parts of a tile are added, in lines of 32: some of its columns, or rows."""

    layout = None

    def __init__(self, sums: Array, block_q: int, columns: int, *, by_columns: bool) -> None:
        self.sums, self.block_q, self.columns, self.by_columns = sums, block_q, columns, by_columns
        self._lock = threading.Lock()

    def add(self, line: int, part: Array, keep: bool = True) -> None:
        """Add a part, which begins at that line, or put it there."""
        tile, rest = divmod(line, self.block_q * self.sums.shape[1] // _LINE)
        number, apart = divmod(rest, 2 * self.columns)
        assert apart == 0, "a part begins within another"
        row, column = tile * self.block_q, 0
        row, column = (row, number * self.columns) if self.by_columns else (row + 64 * number, 0)
        with self._lock:
            place = self.sums[row : row + 64, column : column + self.columns]
            place[...] = part.reshape(64, self.columns) + (place if keep else 0.0)


class _Part(Buffer):
    """Shared memory that can be cut."""

    def index(self, at: Any) -> _Part:
        return _Part(self.data[int(at)], self.fills[:1])

    def permute(self, order: tuple[int, ...]) -> _Part:
        return _Part(self.data.transpose(order), self.fills)

    def slice(self, start: int, length: int, axis: int) -> _Part:
        """Some of its rows or columns."""
        chosen = [slice(None)] * self.data.ndim
        chosen[axis] = slice(start, start + length)
        return _Part(self.data[tuple(chosen)], self.fills)


def _multiply(a: Any, b: Any, acc: Any, use_acc: Any = True, is_async: bool = False) -> Tile:
    left, right = (np.asarray(x.data if isinstance(x, Buffer) else x, np.float32) for x in (a, b))
    product = left @ right
    return (product + np.asarray(acc) if bool(use_acc) else product).view(Tile)


def _store(descriptor: Any, at: list[Any], tile: Buffer) -> None:
    if isinstance(descriptor, Sums):
        descriptor.add(int(at[0]), tile.data.copy(), keep=False)
    else:
        gluon._store_tile(descriptor, at, tile)


def _load(usual: Callable[..., None], descriptor: Any, at: list[Any], barrier: Barrier, into: Buffer) -> None:
    if not isinstance(descriptor, Rows):
        usual(descriptor, at, barrier, into)
        return
    numbers = descriptor.numbers[int(at[0]) : int(at[0]) + descriptor.count]

    def land() -> None:
        into.data[...] = numbers
        barrier.add(0, -numbers.nbytes)

    into.data[...] = np.nan
    threading.Timer(0.0002, land).start()


class _Order:
    """Numbers in memory that a program waits for, and another raises."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def wait(self, turn: Pointer, wanted: Any) -> None:
        """Until the number is at least `wanted`."""
        with self._changed:
            done = self._changed.wait_for(lambda: turn.base[int(turn.at)] >= wanted, PATIENCE)
        assert done, "a turn that nobody passes on"

    def pass_on(self, turn: Pointer, number: Any) -> None:
        """Raise it to at least `number`."""
        with self._changed:
            turn.base[int(turn.at)] = max(turn.base[int(turn.at)], number)
            self._changed.notify_all()


class _Turns:
    """The hardware's barriers by which two warpgroups of a program take turns."""

    def __init__(self) -> None:
        self._semaphores: dict[tuple[int, int], threading.Semaphore] = {}
        self._lock = threading.Lock()

    def _of(self, program: int, which: int) -> threading.Semaphore:
        with self._lock:
            return self._semaphores.setdefault((program, which), threading.Semaphore(0))

    def take(self, program: int, which: int) -> None:
        """Wait for a turn."""
        assert self._of(program, which).acquire(timeout=PATIENCE), "a turn that nobody gives"

    def give(self, program: int, which: int) -> None:
        """Give it."""
        self._of(program, which).release()


def _score_gradient(share: Any, dp: Any, delta: Any = 0.0) -> Tile:
    """Without `delta`, dP was added to -delta already."""
    less = np.atleast_1d(np.asarray(delta))[None, :]
    return (np.asarray(share) * (np.asarray(dp) - less)).view(Tile).to("bf16")  # type: ignore[no-any-return]


@contextmanager
def _language(number: Callable[[], int]) -> Iterator[None]:
    usual, load = gluon._language, gluon._load_tile

    def assembly(usual_assembly: Callable[..., Any], text: str, *rest: Any, **more: Any) -> Any:
        if "%ctaid.x" in text:
            return np.asarray(np.int32(number())).view(Tile)
        return usual_assembly(text, *rest, **more)

    def language() -> Any:
        made = usual()
        memory, asm = made.allocate_shared_memory, made.inline_asm_elementwise

        def allocate(kind: Any, shape: Any, layout: Any) -> Any:
            found = memory(kind, shape, layout)
            return _Part(found.data, found.fills) if isinstance(found, Buffer) else found

        made.allocate_shared_memory = allocate
        made.inline_asm_elementwise = lambda text, *rest, **more: assembly(asm, text, *rest, **more)
        made.NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda *_: None)
        made.DistributedLinearLayout = lambda *_: None
        return made

    core = types.SimpleNamespace(builtin=lambda function: function)
    with (
        patch.object(gluon, "_language", language),
        patch.object(gluon, "_multiply", _multiply),
        patch.object(gluon, "_load_tile", lambda *given: _load(load, *given)),
        patch.dict(sys.modules, {_CORE: core}),
    ):
        yield


def run_backward(
    source: str,
    arguments: Mapping[str, Any],
    programs: int,
    at_a_time: int = 6,
    entry: str = "attention_backward",
) -> None:
    """Run the programs of the large kernel, or of another, some side by side. Arrays become pointers."""
    here, turns, order = gluon._HERE, _Turns(), _Order()

    def number() -> int:
        return int(here.program[0])

    scope: dict[str, Any] = {"__name__": "generated"}
    with _language(number), gluon._modules():
        hopper: Any = sys.modules["triton.experimental.gluon.language.nvidia.hopper"]
        hopper.warpgroup_mma_init = lambda x: x
        hopper.tma.async_store = _store
        hopper.tma.async_atomic_add = lambda to, at, part: to.add(int(at[0]), part.data.copy())
        exec(compile(source, "<generated>", "exec"), scope)
    scope |= {
        "take_turn": lambda x, which: turns.take(number(), which),
        "give_turn": lambda x, which: turns.give(number(), which),
        "await_turn": order.wait,
        "pass_turn": order.pass_on,
        "let_next_begin": lambda x: None,
        "await_kernel_before": lambda x: None,
        "score_gradient": _score_gradient,
        "stage": lambda dq, part: part.store(np.asarray(dq).reshape(part.data.shape)),
    }
    values = {
        name: value if isinstance(value, Rows | Sums | Descriptor) else _argument(value)
        for name, value in arguments.items()
    }

    def program(which: int) -> None:
        here.program = (which, programs)
        scope[entry](**values)

    for first in range(0, programs, at_a_time):
        side_by_side(program, [(n,) for n in range(first, min(programs, first + at_a_time))])


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return Pointer(value.reshape(-1))
    kind = np.float32 if isinstance(value, float) else np.int32
    return np.asarray(kind(value)).view(Tile)
