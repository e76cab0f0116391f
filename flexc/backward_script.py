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

from flexc import driver
from flexc.codegen.arguments import Argument
from flexc.device_map import DeviceMap
from flexc.pack_backward import Operands

Tensors = list[torch.Tensor | None]
Number = int | float
_Action = Callable[[Tensors, list[int]], None]

_ALIGNMENT = 256
"""Of scratch in its one block of memory, in bytes."""


class Runnable(Protocol):
    """A kernel that can be launched here: on the GPU, or by Triton's interpreter."""

    arguments: tuple[Argument, ...]
    block_q: int
    block_kv: int
    shares_tiles: bool
    """Programs take tiles until there are none: as many are launched as run at a time."""

    def launch(self, programs: int, operands: Operands) -> None:
        """Run `programs` programs."""

    def repeat(self, programs: int, values: Sequence[Number | None]) -> Callable[[tuple[int, ...]], None]:
        """The same again and again, on the current device: called with the addresses that `values` lacks."""

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
        self._scratch: list[tuple[torch.Tensor, bool]] = []
        self._steps: list[_Launch | _Function] = []
        self._constants: list[torch.Tensor] = []
        self._maps: list[DeviceMap] = []

    def make(self, make: Callable[[Tensors], torch.Tensor]) -> torch.Tensor:
        """A tensor that is made anew each time, from those that are given."""
        made = make(self._tensors)
        self._makers.append((self._add(made), make))
        return made

    def scratch(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, zeroed: bool = False
    ) -> torch.Tensor:
        """A tensor that only kernels use, of zeros or of anything.

        All scratch is one allocation when the script is run again, and all zeros are written at once.
        """
        made = (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=device)
        self._refs[id(made)] = _Ref(len(self._scratch), True)
        self._scratch.append((made, zeroed))
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
        refs = [self._refs[id(x)] for x in tensors]
        assert not any(ref.is_scratch for ref in refs), "scratch is for kernels"
        takes = tuple(ref.number for ref in refs)
        found = function(*tensors)
        self._steps.append(_Function(function, takes, self._add(found)))
        return found

    def recorded(self, results: Sequence[torch.Tensor]) -> Recorded:
        """The script so far, as something to run again; `results` are tensors that it made."""
        count = len(self._tensors)
        return Recorded(
            n_blank=count - self._n_given,
            makers=tuple(self._makers),
            scratch=_planned(self._scratch),
            actions=tuple(
                _repeated(step, count) if isinstance(step, _Launch) else _called(step) for step in self._steps
            ),
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


@dataclass(frozen=True, slots=True)
class _Scratch:
    """One block of memory: its bytes, how many of them are zeros at first, where each piece starts."""

    size: int
    zeros: int
    places: tuple[int, ...]


def _planned(scratch: Sequence[tuple[torch.Tensor, bool]]) -> _Scratch:
    places, size, zeros = [0] * len(scratch), 0, 0
    for number, (x, zeroed) in sorted(enumerate(scratch), key=lambda entry: not entry[1][1]):
        places[number] = size
        size += -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT
        zeros = size if zeroed else zeros
    return _Scratch(size, zeros, tuple(places))


def _repeated(launch: _Launch, n_tensors: int) -> _Action:
    """The launch from a pool of addresses: those of tensors, then those of scratch."""
    places = [v.number + n_tensors * v.is_scratch for v in launch.values if isinstance(v, _Ref)]
    repeat = launch.kernel.repeat(
        launch.programs, [None if isinstance(v, _Ref) else v for v in launch.values]
    )
    chosen = itemgetter(slice(0, 0), *places)  # of one place it would be no tuple

    def action(tensors: Tensors, pool: list[int]) -> None:
        repeat(chosen(pool)[1:])

    return action


def _called(step: _Function) -> _Action:
    def action(tensors: Tensors, pool: list[int]) -> None:
        tensors[step.gives] = step.function(*(tensors[n] for n in step.takes))

    return action


@dataclass(frozen=True, slots=True)
class Recorded:
    """A script that runs again, on other tensors of the same layouts."""

    n_blank: int
    makers: tuple[tuple[int, Callable[[Tensors], torch.Tensor]], ...]
    scratch: _Scratch
    actions: tuple[_Action, ...]
    results: tuple[int, ...]
    maps: tuple[weakref.ref[DeviceMap], ...]
    """Those that may have been built on another stream. A user's map that is no more is ready."""
    held: tuple[torch.Tensor, ...]
    """Tensors whose addresses do not change."""

    def run(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The results for these tensors, on the current device, which is theirs; the first is not None."""
        for reference in self.maps:
            block_map = reference()
            if block_map is not None:
                block_map.ready_here()
        tensors: Tensors = [*given, *(None,) * self.n_blank]
        for number, make in self.makers:
            tensors[number] = make(tensors)
        pool = [0 if x is None else x.data_ptr() for x in tensors]
        if self.scratch.size:
            device = tensors[0].device  # type: ignore[union-attr]
            room = torch.empty(self.scratch.size, dtype=torch.uint8, device=device)
            start = room.data_ptr()
            pool += [start + place for place in self.scratch.places]
            if self.scratch.zeros:
                driver.write_zeros(start, self.scratch.zeros, device.index)
        for action in self.actions:
            action(tensors, pool)
        return [tensors[n] for n in self.results]  # type: ignore[misc]  # all are made by now
