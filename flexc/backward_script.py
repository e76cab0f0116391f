"""What a backward does, step by step: done while it is written down, and done again on other tensors.

A step is the launch of a kernel, or a small function of tensors. The steps depend on the layouts of what goes
in, never on contents, so the same steps serve the next step of training: only addresses are filled in anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import torch

from flexc.codegen.arguments import Argument
from flexc.device_map import DeviceMap
from flexc.pack_backward import Operands

Tensors = list[torch.Tensor | None]
Number = int | float
_Action = Callable[[Tensors, list[Number]], None]

_ALIGNMENT = 256
"""Of scratch in its one block of memory, in bytes."""


class Runnable(Protocol):
    """A kernel that can be launched here: on the GPU, or by Triton's interpreter."""

    arguments: tuple[Argument, ...]
    block_q: int
    block_kv: int

    def launch(self, programs: int, operands: Operands) -> None:
        """Run `programs` programs."""

    def send(self, programs: int, values: Sequence[Number]) -> None:
        """The same with a number for each argument, tensors as addresses, on the current device."""

    @property
    def processors(self) -> int:
        """How many programs the device computes at a time, about."""


@dataclass(frozen=True, slots=True)
class _Ref:
    """An address that is another one each time: that of a tensor, or of a piece of scratch, by number."""

    number: int
    is_scratch: bool


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Runnable
    programs: int
    values: list[_Ref | Number]


@dataclass(frozen=True, slots=True)
class _Function:
    function: Callable[..., torch.Tensor]
    takes: tuple[int, ...]
    gives: int


class Script:
    """Does what it is told, and remembers it. Tensors are known by number: first those that are `given`."""

    def __init__(self, given: Sequence[torch.Tensor | None]) -> None:
        self._n_given = len(given)
        self._tensors: Tensors = list(given)  # held, so that their identities stay theirs
        self._refs = {id(x): _Ref(n, False) for n, x in enumerate(given) if x is not None}
        self._makers: list[tuple[int, Callable[[Tensors], torch.Tensor]]] = []
        self._scratch: list[torch.Tensor] = []
        self._steps: list[_Launch | _Function] = []
        self._constants: list[torch.Tensor] = []
        self._maps: list[DeviceMap] = []

    def make(self, make: Callable[[Tensors], torch.Tensor]) -> torch.Tensor:
        """A tensor that is made anew each time, from those that are given."""
        made = make(self._tensors)
        self._makers.append((self._add(made), make))
        return made

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor that only kernels use. All scratch is one allocation when the script is run again."""
        made = torch.empty(shape, dtype=dtype, device=device)
        self._refs[id(made)] = _Ref(len(self._scratch), True)
        self._scratch.append(made)
        return made

    def read_map(self, block_map: object) -> None:
        """Note that kernels read this map: another stream may have built it."""
        if isinstance(block_map, DeviceMap):
            self._maps.append(block_map)

    def launch(self, kernel: Runnable, programs: int, operands: Operands) -> None:
        """Launch a kernel."""
        kernel.launch(programs, operands)
        self._steps.append(_Launch(kernel, programs, operands.pack(kernel.arguments, self._refer)))

    def then(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """What `function` returns, of tensors that are given, made, or another function's."""
        takes = tuple(self._refs[id(x)].number for x in tensors)
        found = function(*tensors)
        self._steps.append(_Function(function, takes, self._add(found)))
        return found

    def recorded(self, results: Sequence[torch.Tensor]) -> Recorded:
        """The script so far, as something to run again; `results` are tensors that it made."""
        count, size, places = len(self._tensors), 0, list[int]()
        for x in self._scratch:
            places.append(size)
            size += -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT
        constants: list[Number] = []
        actions = [
            _repeated(step, count, len(places), constants) if isinstance(step, _Launch) else _called(step)
            for step in self._steps
        ]
        return Recorded(
            n_blank=count - self._n_given,
            makers=tuple(self._makers),
            scratch=(size, tuple(places)),
            constants=constants,
            actions=tuple(actions),
            results=tuple(self._refs[id(x)].number for x in results),
            maps=tuple(map(weakref.ref, self._maps)),
            held=tuple(self._constants),
        )

    def _add(self, x: torch.Tensor) -> int:
        number = len(self._tensors)
        self._tensors.append(x)
        self._refs.setdefault(id(x), _Ref(number, False))
        return number

    def _refer(self, x: torch.Tensor) -> _Ref | int:
        found = self._refs.get(id(x))
        if found is not None:
            return found
        self._constants.append(x)
        return x.data_ptr()


def _repeated(launch: _Launch, n_tensors: int, n_scratch: int, constants: list[Number]) -> _Action:
    """The launch from a pool of numbers: addresses of tensors, those of scratch, and `constants`."""
    places = []
    for value in launch.values:
        if isinstance(value, _Ref):
            places.append(value.number + (n_tensors if value.is_scratch else 0))
        else:
            places.append(n_tensors + n_scratch + len(constants))
            constants.append(value)
    send, programs, chosen = launch.kernel.send, launch.programs, itemgetter(*places)

    def action(tensors: Tensors, pool: list[Number]) -> None:
        send(programs, chosen(pool))

    return action


def _called(step: _Function) -> _Action:
    def action(tensors: Tensors, pool: list[Number]) -> None:
        tensors[step.gives] = step.function(*(tensors[n] for n in step.takes))

    return action


@dataclass(frozen=True, slots=True)
class Recorded:
    """A script that runs again, on other tensors of the same layouts."""

    n_blank: int
    makers: tuple[tuple[int, Callable[[Tensors], torch.Tensor]], ...]
    scratch: tuple[int, tuple[int, ...]]
    """Bytes, and where in them each piece starts."""
    constants: list[Number]
    actions: tuple[_Action, ...]
    results: tuple[int, ...]
    maps: tuple[weakref.ref[DeviceMap], ...]
    """Those that may have been built on another stream. A user's map that is no more is ready."""
    held: tuple[torch.Tensor, ...]
    """What constants are addresses of."""

    def run(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The results for these tensors, on the current device, which is theirs; the first is not None."""
        for reference in self.maps:
            block_map = reference()
            if block_map is not None:
                block_map.ready_here()
        tensors: Tensors = [*given, *(None,) * self.n_blank]
        for number, make in self.makers:
            tensors[number] = make(tensors)
        pool: list[Number] = [0 if x is None else x.data_ptr() for x in tensors]
        size, places = self.scratch
        room = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)  # type: ignore[union-attr]
        start = room.data_ptr()
        pool += [start + place for place in places]
        pool += self.constants
        for action in self.actions:
            action(tensors, pool)
        return [tensors[n] for n in self.results]  # type: ignore[misc]  # all are made by now
