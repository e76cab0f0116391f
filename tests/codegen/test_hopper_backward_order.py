"""In what order a deterministic Hopper backward adds up dQ: the generated code itself, run with stand-ins.

What the adding warp of a program does depends on nothing that others write: which tiles of rows it visits,
which turn it waits for and which it passes on. So each program is run once, alone, and its trace is judged.
"""

from __future__ import annotations

import ast
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexc import masks
from flexc.call import AttentionCall
from flexc.choice import backward_parts
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import BackwardSpec, Entry, backward_spec
from flexc.codegen.hopper_backward_plan import HopperBackwardPlan
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.target import TARGETS
from flexc.ir.spec import Blocks
from flexc.pack import CAPTURED
from flexc.pack_backward import Operands, map_operands
from flexc.resolve import resolve
from tests.codegen.generate import Mod, spec_for
from tests.gradients import problem

_RUN = ("place_of", "turns_before", "rows_of", "add_in_order", "next_tile", "count_steps")


@dataclass(frozen=True)
class _Pointer:
    """An address of numbers, as the generated code counts with it."""

    values: Any
    offset: Any = 0

    def __add__(self, by: Any) -> _Pointer:
        return _Pointer(self.values, self.offset + by)


@dataclass(frozen=True)
class _Visit:
    """A tile of dQ that a program adds to, by its place in `turns_ptr`."""

    place: int
    wanted: int
    passed: int
    row: int


def _load(pointer: _Pointer, mask: Any = None, other: int = 0) -> Any:
    at, inside = np.asarray(pointer.offset), True if mask is None else np.asarray(mask)
    assert np.all(~np.asarray(inside) | ((at >= 0) & (at < len(pointer.values)))), "read outside"
    found = np.where(inside, pointer.values[np.clip(at, 0, len(pointer.values) - 1)], other)
    return found if found.ndim else np.int64(found)


def _gl() -> SimpleNamespace:
    return SimpleNamespace(
        load=_load,
        where=np.where,
        minimum=np.minimum,
        maximum=np.maximum,
        min=lambda x, axis: np.min(x, axis=axis),
        max=lambda x, axis: np.max(x, axis=axis),
        sum=lambda x, axis: np.sum(x, axis=axis),
        cdiv=lambda a, b: -(-a // b),
        arange=lambda a, b, layout: np.arange(a, b),
        BlockedLayout=lambda *sizes: None,
        int32=np.int64,
    )


class _Barrier:
    """Stands for barriers, shared memory and descriptors, which have no say here."""

    def index(self, n: int) -> _Barrier:
        return self

    def wait(self, *_: Any, **__: Any) -> None: ...

    arrive = store_wait = wait


class _Program:
    """The adding warps of each program of a call, and the walk of the loading warp."""

    def __init__(self, kernel: GeneratedKernel, numbers: dict[str, Any]) -> None:
        tree = ast.parse(kernel.source.replace(".to(gl.int32)", " * 1"))
        wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in _RUN]
        for function in wanted:
            function.decorator_list = []
        constants = [n for n in tree.body if isinstance(n, ast.Assign) and "gl.constexpr" in ast.unparse(n)]
        constants = [n for n in constants if isinstance(n.value, ast.Call) and _is_int(n.value.args[0])]
        gl = _gl()
        gl.constexpr = lambda x: x
        self.space: dict[str, Any] = {
            "gl": gl,
            "mbarrier": _Barrier(),
            "tma": _Barrier(),
            "thread_barrier": lambda: None,
            "told": lambda what, step, layout: what[step] if isinstance(what, list) else what,
            "tma_add": self._add,
            "tma_store": self._write,
            "await_turn": self._await,
            "pass_turn": self._pass,
        }
        exec(compile(ast.Module([*constants, *wanted], []), "generated", "exec"), self.space)
        plan = kernel.plan
        assert isinstance(plan, HopperBackwardPlan)
        self.groups, self.in_rounds = plan.groups, plan.in_rounds
        self.numbers = {a.name: numbers.get(a.name, 0) for a in kernel.arguments}
        self._found: list[_Visit] = []
        self._rows: list[int] = []
        self._awaited: tuple[int, int] | None = None

    def _await(self, place: _Pointer, wanted: Any) -> None:
        assert wanted > 0
        self._awaited = int(place.offset), int(wanted)

    def _add(self, desc: Any, at: list[Any], half: Any) -> None:
        self._rows.append(int(at[0]))

    def _write(self, desc: Any, at: list[Any], half: Any) -> None:
        assert self._awaited is None
        self._add(desc, at, half)

    def _pass(self, place: _Pointer, turn: Any) -> None:
        at = int(place.offset)
        awaited, wanted = self._awaited or (at, 0)
        assert awaited == at
        assert len(self._rows) == self.groups
        self._found.append(_Visit(at, wanted, int(turn), min(self._rows)))
        self._awaited = None
        self._rows.clear()

    def visits(self, pid: int) -> list[_Visit]:
        """What program `pid` adds, in its order."""
        barrier = _Barrier()
        of_warps = []
        for which in (0, 1):
            self._found = []
            known = self._told(pid) if self.in_rounds else (pid,)
            self.space["add_in_order"](which, barrier, barrier, barrier, *known, *self.numbers.values())
            of_warps.append(self._found)
        return [x for pair in zip_longest(*of_warps) for x in pair if x is not None]

    def _told(self, pid: int) -> tuple[Any, ...]:
        """What the loading warp tells of one tile of keys, behind which there are none."""
        b, kv_h, kv_start = self._start(pid)
        heads = self.numbers["q_heads"] // self.numbers["group"]
        return [b * heads + kv_h], [kv_start], [len(self.walk(pid)), 0], _Barrier()

    def _start(self, pid: int) -> tuple[Any, Any, Any]:
        n = self.numbers
        sizes = (n["batch"], n["q_heads"], n["group"], n["q_len"], n["kv_len"])
        return self.space["place_of"](pid, *sizes)  # type: ignore[no-any-return]

    def walk(self, pid: int) -> list[int]:
        """The rows of dQ that its loading warp walks, as TMA counts them."""
        space, n = self.space, self.numbers
        b, kv_h, kv_start = self._start(pid)
        first_head = kv_h * n["group"]
        steps = space["count_steps"](b, kv_start, first_head, *n.values())
        names = next_tile_state(space["next_tile"])
        state = [first_head - 1, *([0] * (len(names) - 2)), n["q_len"]]
        padded = -(-n["q_len"] // 256) * 256
        rows = []
        for _ in range(int(steps)):
            *state, _masked = space["next_tile"](
                b, kv_start, first_head + n["group"] - 1, *state, *n.values()
            )
            rows.append(int((b * n["q_heads"] + state[0]) * padded + state[-1]) * (space["PADDED_DIM"] // 32))
        return rows


def next_tile_state(function: Any) -> list[str]:
    """What the walk remembers: the parameters between `last_head` and the kernel's own."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return list(names[3 : names.index("q_ptr")])


def _is_int(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _spec(mask: Mod | None, call: AttentionCall, dim: int) -> BackwardSpec:
    lengths = call.q.shape[2], call.k.shape[2]
    found = backward_spec(spec_for(mask, head_dim=dim), resolve(None, mask)[1], lengths, deterministic=True)
    return next(of for of, entry in backward_parts(found, "sm90", (), hopper=True) if entry is Entry.HOPPER)


def _programs(mask: Mod | None, shape: tuple[int, int, int, int, int], dim: int) -> tuple[_Program, int]:
    batch, heads, kv_heads, q_len, kv_len = shape
    q = torch.zeros(batch, heads, q_len, dim, dtype=torch.bfloat16)
    k, v = (torch.zeros(batch, kv_heads, kv_len, dim, dtype=torch.bfloat16) for _ in range(2))
    call = problem(q, k, v, mask_mod=mask).call
    spec = _spec(mask, call, dim)
    kernel = lower_backward(spec, Entry.HOPPER, TARGETS["sm90"])
    block_q, block_kv = kernel.plan.tiles.block_q, kernel.plan.tiles.block_kv
    numbers: dict[str, Any] = {
        "q_heads": heads, "group": heads // kv_heads, "q_len": q_len, "kv_len": kv_len, "batch": batch,
        "turns_ptr": _Pointer(np.zeros(0)),
    }  # fmt: skip
    taken = [a for a in kernel.arguments if a.source in CAPTURED]
    captures = Operands({}, {}, call.values).pack(taken, lambda x: _Pointer(x.flatten().numpy()))
    numbers |= {a.name: value for a, value in zip(taken, captures, strict=True)}
    if spec.blocks(Entry.HOPPER) is Blocks.MAP:
        for beside in (False, True):
            tensors, found, _ = map_operands(call, block_q, block_kv, by_keys=True, beside=beside)
            numbers |= {f"{source.value}_ptr": _Pointer(x.flatten().numpy()) for source, x in tensors.items()}
            numbers |= {source.value: n for source, n in found.items()}
    return _Program(kernel, numbers), -(-kv_len // block_kv) * kv_heads * batch


def _ids(length: int, parts: int) -> torch.Tensor:
    torch.manual_seed(length)
    cuts = torch.randperm(length - 1)[: parts - 1].sort().values + 1
    return torch.searchsorted(cuts, torch.arange(length), right=True).to(torch.int32)


def _checkers(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 128 + kv_idx // 128 + h) % 3 != 0


def _window_and_first_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 200) | (kv_idx < 100))


def _far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx + 300


CASES: dict[str, Callable[[], Mod | None]] = {
    "dense": lambda: None,
    "causal": lambda: masks.causal,
    "window": lambda: masks.sliding_window(200),
    "causal_window": lambda: masks.causal & masks.sliding_window(333),
    "window_and_first_keys": lambda: _window_and_first_keys,
    "prefix": lambda: masks.prefix_lm(500),
    "documents": lambda: masks.causal & masks.document(_ids(1500, 9)),
    "checkers": lambda: _checkers,
    "some_keys_unseen": lambda: _far,
}
SHAPES = [(2, 4, 2, 1500, 1500), (1, 3, 1, 1500, 1500), (1, 2, 2, 1500, 130)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_turns(name: str, shape: tuple[int, int, int, int, int], dim: int) -> None:
    program, count = _programs(CASES[name](), shape, dim)
    adders: dict[int, list[tuple[int, _Visit]]] = {}
    traces = [program.visits(pid) for pid in range(count)]
    for pid, visits in enumerate(traces):
        # The tiles that the other warps compute, in the same order; keys that no row sees have one of zeros.
        assert [v.row for v in visits] == program.walk(pid) or (not visits and len(program.walk(pid)) == 1)
        for visit in visits:
            adders.setdefault(visit.place, []).append((pid, visit))
    for places in adders.values():
        assert len({v.row for _, v in places}) == 1
        # Each waits for the one before, which has a lower number, and the first for none: so there is one
        # order, and the program with the lowest number of those that are not complete never waits.
        turn = 0
        for _, visit in sorted(places, key=lambda entry: entry[0]):
            assert visit.wanted == turn < visit.passed
            turn = visit.passed
    assert len({(v.place, v.row) for trace in traces for v in trace}) == len(adders)
    for resident in (1, 2, 7, 132):
        assert _orders(traces, resident, seed=1) == _orders(traces, count, seed=2)


def _orders(traces: list[list[_Visit]], resident: int, seed: int) -> dict[int, list[int]]:
    """Who adds to each tile in turn, when `resident` programs run at a time and any of them gets on."""
    chosen, turns, order = random.Random(seed), dict[int, int](), dict[int, list[int]]()
    waiting, running = deque(range(len(traces))), dict[int, int]()
    while waiting or running:
        while waiting and len(running) < resident:
            running[waiting.popleft()] = 0
        ready = [
            pid
            for pid, at in running.items()
            if at == len(traces[pid]) or turns.get(traces[pid][at].place, 0) >= traces[pid][at].wanted
        ]
        assert ready, "all wait"
        pid = chosen.choice(ready)
        if running[pid] == len(traces[pid]):
            del running[pid]
            continue
        visit = traces[pid][running[pid]]
        order.setdefault(visit.place, []).append(pid)
        turns[visit.place] = max(turns.get(visit.place, 0), visit.passed)
        running[pid] += 1
    return order
