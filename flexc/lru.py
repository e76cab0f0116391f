"""A bounded dictionary that forgets what has not been used for long."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Entry(Generic[V]):
    __slots__ = ("used", "value")

    def __init__(self, value: V) -> None:
        self.value = value
        self.used = False
        """Since the entry last was the next one to go."""


class LRU(Generic[K, V]):
    """At most `capacity` entries; safe to use from several threads.

    Who looks something up takes no lock and moves nothing: an entry is marked as used, and where room is
    needed, the oldest goes that was not used since it was spared last.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[K, _Entry[V]] = {}
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        """The value of `key`, which is then not the next to go; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = True
        return entry.value

    def put(self, key: K, value: V) -> None:
        """Store `value` as the newest entry, and drop one over the capacity."""
        with self._lock:
            self._entries.pop(key, None)
            while len(self._entries) >= self._capacity:
                self._drop_one()
            self._entries[key] = _Entry(value)

    def _drop_one(self) -> None:
        """Drop the oldest entry, or make it the newest if it was used."""
        key = next(iter(self._entries))
        entry = self._entries.pop(key)
        if entry.used:
            entry.used = False
            self._entries[key] = entry

    def drop(self, is_stale: Callable[[V], bool]) -> None:
        """Forget the values that are stale."""
        with self._lock:
            for key in [key for key, entry in self._entries.items() if is_stale(entry.value)]:
                del self._entries[key]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
