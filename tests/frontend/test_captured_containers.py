"""Captured containers, functions and mods, and that a mod changes none of them."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from flexc.frontend.trace import trace
from flexc.ir.graph import ModKind
from flexc.mods import MaskMod, mask_mod
from tests.frontend.captured import BIAS, check, text, window_mask

LIMITS = [4, 7]


class Pair(NamedTuple):
    low: int
    high: torch.Tensor


def test_containers() -> None:
    nested: dict[str, Any] = {"a": [2, (3, 4)], "b": Pair(1, torch.tensor(9))}
    chosen = {1, 3}

    def mask(b, h, q_idx, kv_idx):
        x, (y, z) = nested["a"]
        total = q_idx - kv_idx
        for n in LIMITS:
            total = total + n
        return (total < x + y * z) & (kv_idx >= nested["b"].low) & (kv_idx < nested["b"].high) | (2 in chosen)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    nested["a"][0] = 1
    assert check(mask, mod.trace()).graph is made.graph
    nested["a"].append(0)
    nested["a"].pop()
    nested["a"][1] = (1, 2)
    check(mask, mod.trace())
    LIMITS.append(1)
    check(mask, mod.trace())
    LIMITS.pop()
    chosen.add(2)
    check(mask, mod.trace())


def test_long_lists_and_arrays_are_watched_as_a_whole() -> None:
    numbers, array = list(range(100)), np.arange(4)

    def mask(b, h, q_idx, kv_idx):
        return (q_idx < numbers[5]) | (kv_idx < int(array[2]))

    mod = mask_mod(mask)
    check(mask, mod.trace())
    numbers[5] = 8
    check(mask, mod.trace())
    array[2] = 7
    check(mask, mod.trace())


def test_modules_and_classes() -> None:
    settings = types.ModuleType("settings")
    settings.size = 3  # type: ignore[attr-defined]

    class Defaults:
        shift = 2

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < settings.size + Defaults.shift

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    settings.size, Defaults.shift = 6, 1  # type: ignore[attr-defined]
    again = check(mask, mod.trace())
    assert again.graph is made.graph
    assert again.values == (7,)


def test_defaults_partials_and_nested_functions() -> None:
    size = 2

    def inner(q_idx, kv_idx, *, extra=1):
        return q_idx - kv_idx < size + extra

    def mask(b, h, q_idx, kv_idx, more=3):
        return inner(q_idx, kv_idx, extra=more)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    size = 5
    assert check(mask, mod.trace()).graph is made.graph
    mask.__defaults__ = (4,)
    check(mask, mod.trace())
    part = functools.partial(window_factory, 3, shift=1)
    assert check(part).values == (4,)

    def recursive(b, h, q_idx, kv_idx, depth=2):
        return q_idx >= kv_idx if depth == 0 else recursive(b, h, q_idx - 1, kv_idx, depth - 1)

    check(recursive)
    cached = functools.lru_cache(lambda x: x * size)

    def uses_a_cache(b, h, q_idx, kv_idx):
        return cached(q_idx) > kv_idx

    assert text(trace(uses_a_cache, ModKind.MASK)) == "lt(kv_idx, mul(q_idx, scalar0:i32))"
    assert cached.cache_info().currsize == 0


def window_factory(size, b, h, q_idx, kv_idx, *, shift):
    return q_idx - kv_idx < size + shift


def test_replaced_function_is_traced_again() -> None:
    inner: Callable[..., Any] = operator.ge

    def mask(b, h, q_idx, kv_idx):
        return inner(q_idx, kv_idx)

    mod = mask_mod(mask)
    check(mask, mod.trace())
    inner = operator.lt
    check(mask, mod.trace())
    inner = lambda q_idx, kv_idx: q_idx > 3 * kv_idx  # noqa: E731
    check(mask, mod.trace())
    assert mod.trace().values == ()


def test_mods_in_mods() -> None:
    size = 4
    window = mask_mod(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size)
    shifted = lambda b, h, q_idx, kv_idx: window(b, h, q_idx + 2, kv_idx)  # noqa: E731
    both = (mask_mod(shifted) & (lambda b, h, q_idx, kv_idx: kv_idx > 1)) | ~window
    made = check(both)
    size = 7
    fresh = made.refreshed()
    assert fresh is not None
    check(both, fresh)
    chain = window
    for i in range(300):
        chain = chain | window_mask(i)
    assert len(chain.trace().graph.captures) == 301
    reflected = (lambda b, h, q_idx, kv_idx: kv_idx > 1) & window
    assert isinstance(reflected, MaskMod)
    check(reflected)


# In-place operations on what the mod computed.


def test_in_place_operations_are_seen_by_every_name() -> None:
    def mask(b, h, q_idx, kv_idx):
        x = q_idx * 1
        y = x
        x += 3
        y.mul_(2)
        z = BIAS[kv_idx]
        z -= 1
        return (x > kv_idx) & (z < 0)

    check(mask)
