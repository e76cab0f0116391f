"""The bounded dictionary behind the caches of a process."""

from __future__ import annotations

from flexc.lru import LRU


def test_what_was_used_longest_ago_is_forgotten() -> None:
    kept: LRU[str, int] = LRU(2)
    kept.put("first", 1)
    kept.put("second", 2)
    assert kept.get("first") == 1  # now the second is the oldest
    kept.put("third", 3)
    assert [kept.get(key) for key in ("first", "second", "third")] == [1, None, 3]
    assert len(kept) == 2


def test_what_is_used_is_spared_once() -> None:
    kept: LRU[int, int] = LRU(3)
    for number in range(3):
        kept.put(number, number + 10)
        kept.get(number)
    kept.put(3, 13)  # all were used: the oldest goes
    assert [kept.get(number) for number in (1, 2)] == [11, 12]
    kept.put(4, 14)  # nobody asked for 3
    assert [kept.get(number) for number in range(5)] == [None, 11, 12, None, 14]
    assert len(kept) == 3


def test_a_key_has_one_value() -> None:
    kept: LRU[str, int] = LRU(2)
    kept.put("a", 1)
    kept.put("b", 2)
    kept.put("a", 3)
    assert (kept.get("a"), kept.get("b"), len(kept)) == (3, 2, 2)


def test_stale_values_are_dropped() -> None:
    kept: LRU[str, int] = LRU(4)
    for key, value in (("a", 1), ("b", 2), ("c", 3)):
        kept.put(key, value)
    kept.drop(lambda value: value % 2 == 1)
    assert [kept.get(key) for key in ("a", "b", "c")] == [None, 2, None]
    kept.clear()
    assert len(kept) == 0
