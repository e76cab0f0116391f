"""What a prepared call reads of its mods: captured tensors may be others each time, of the same layouts.

Where they lie is all that a launch needs to know. Only those that a block map was found from must be the very
same, and unwritten since.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from flexc.execute import PLAIN
from flexc.frontend.value import Value, told_apart
from flexc.pack import as_pointed_to


class _Form(NamedTuple):
    """What a captured tensor must be like; of a watched one, also which one, of which version."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: int
    watched: weakref.ref[torch.Tensor] | None
    version: int


class Captures:
    """The captured tensors of one call, as what another's are compared with."""

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
        self._slots = None if len(tensors) == len(values) else [slot for slot, _ in tensors]
        self._read = [places[slot] for slot in read]
        self._forms = [_form(x, slot in watched) for slot, x in tensors]
        self._needs = [(place, records and x.requires_grad) for place, (_, x) in enumerate(tensors)]
        self.watched = tuple(slot for slot, _ in tensors if slot in watched)
        self._elsewhere = [place for place, (_, x) in enumerate(tensors) if x.device != device]
        self._copies: dict[int, tuple[object, torch.Tensor]] = {}

    @property
    def identity(self) -> tuple[int, ...] | None:
        """The watched tensors by their identities; None when one of them is no more."""
        living = [form.watched() for form in self._forms if form.watched is not None]
        return None if any(x is None for x in living) else tuple(map(id, living))

    @property
    def needs_copies(self) -> bool:
        """Whether a 0-dim tensor lies on the CPU, whose value is copied to the device."""
        return bool(self._elsewhere)

    def of(self, values: tuple[Value, ...], *, grad: bool) -> Sequence[Any] | None:
        """The tensors among the values of a call, whose numbers are those of this one.

        None where something differs that decides more than addresses. `grad`: autograd is on.
        """
        tensors: Sequence[Any] = values if self._slots is None else [values[slot] for slot in self._slots]
        if not self.hold(tensors):
            return None
        if grad:
            for place, needs in self._needs:
                if tensors[place].requires_grad is not needs:
                    return None
        return tensors

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Whether the launch that was prepared serves these captured tensors."""
        for x, (shape, stride, dtype, device, watched, version) in zip(tensors, self._forms, strict=True):
            if (
                type(x) not in PLAIN
                or x.shape != shape
                or x.stride() != stride
                or x.dtype is not dtype
                or x.get_device() != device
            ):
                return False
            if watched is not None and (x._version != version or watched() is not x):
                return False
        return True

    def there(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The tensors on the device. A number that is there already is not copied again."""
        if not self._elsewhere:
            return tensors
        copied = list(tensors)
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        for place in self._elsewhere:
            number = (told_apart(tensors[place].item()), stream)
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


def _form(x: torch.Tensor, is_watched: bool) -> _Form:
    watched = weakref.ref(x) if is_watched else None
    return _Form(x.shape, x.stride(), x.dtype, x.get_device(), watched, x._version if is_watched else 0)
