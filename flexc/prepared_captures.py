"""What a prepared call reads of its mods: captured tensors may be others each time, of the same layouts.

Where they lie is all that a launch needs to know. Only those that a block map was found from must be the very
same, and unwritten since.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from flexc.execute import PLAIN
from flexc.frontend.value import Value
from flexc.pack import as_pointed_to


class Captures:
    """The captured values of one call, as what another's are compared with."""

    def __init__(
        self,
        values: Sequence[Value],
        device: torch.device,
        *,
        read: Sequence[int],
        watched: Collection[int],
        records: bool,
    ) -> None:
        """`read`: the slots whose addresses a kernel takes; `watched`: those that a block map was found from.

        `records`: some result needs gradients.
        """
        self._device = device
        tensors = [(slot, x) for slot, x in enumerate(values) if isinstance(x, torch.Tensor)]
        places = {slot: place for place, (slot, _) in enumerate(tensors)}
        self._slots = [slot for slot, _ in tensors]
        self._read = [places[slot] for slot in read]
        self._forms = [(x.shape, x.stride(), x.dtype, x.get_device()) for _, x in tensors]
        self._needs = [records and x.requires_grad for _, x in tensors]
        self._numbers = [(slot, x) for slot, x in enumerate(values) if not isinstance(x, torch.Tensor)]
        self.watched = tuple(slot for slot, _ in tensors if slot in watched)
        self._watched = [
            (place, weakref.ref(x), x._version) for place, (slot, x) in enumerate(tensors) if slot in watched
        ]
        self._elsewhere = [place for place, (_, x) in enumerate(tensors) if x.device != device]
        self._copies: dict[int, tuple[object, torch.Tensor]] = {}

    @property
    def identity(self) -> tuple[int, ...] | None:
        """The watched tensors by their identities; None when one of them is no more."""
        living = [reference() for _, reference, _ in self._watched]
        return None if any(x is None for x in living) else tuple(map(id, living))

    @property
    def needs_copies(self) -> bool:
        """Whether a 0-dim tensor lies on the CPU, whose value is copied to the device."""
        return bool(self._elsewhere)

    def of(self, values: tuple[Value, ...]) -> list[Any] | None:
        """The tensors among the values of a call.

        None where something differs that decides more than addresses.
        """
        for slot, number in self._numbers:
            value = values[slot]
            if value != number or type(value) is not type(number):
                return None
            if number == 0.0 and str(value) != str(
                number
            ):  # -0.0 equals 0.0, and its reciprocal is another number
                return None
        tensors = [values[slot] for slot in self._slots]
        if not self.hold(tensors):
            return None
        if torch.is_grad_enabled():
            for x, needs in zip(tensors, self._needs, strict=True):
                if x.requires_grad is not needs:  # type: ignore[union-attr]  # a tensor
                    return None
        return tensors

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Whether the launch that was prepared serves these captured tensors."""
        for x, (shape, stride, dtype, device) in zip(tensors, self._forms, strict=True):
            if (
                type(x) not in PLAIN
                or x.shape != shape
                or x.stride() != stride
                or x.dtype is not dtype
                or x.get_device() != device
            ):
                return False
        for place, reference, version in self._watched:
            if reference() is not tensors[place] or tensors[place]._version != version:
                return False
        return True

    def there(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The tensors on the device. A number that is there already is not copied again."""
        if not self._elsewhere:
            return tensors
        copied = list(tensors)
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        for place in self._elsewhere:
            number = (_text_of(tensors[place].item()), stream)
            known = self._copies.get(place)
            if known is None or known[0] != number:
                copy = as_pointed_to(tensors[place], self._device)
                assert isinstance(copy, torch.Tensor)
                known = self._copies[place] = (number, copy)
            copied[place] = known[1]
        return copied

    def addresses(self, there: Sequence[Any]) -> tuple[int, ...]:
        """Where the tensors lie whose addresses a kernel takes, in its order."""
        return tuple([there[place].data_ptr() for place in self._read])


def _text_of(number: float) -> str:
    """The number, in which 0.0 and -0.0 are two, and NaN is one."""
    return number.hex() if isinstance(number, float) else str(number)
