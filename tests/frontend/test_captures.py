"""What a mod may capture, how a change of it is noticed, and that nothing is frozen in silence."""

from __future__ import annotations

import copy
import functools
import gc
import math
import operator
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flexc import masks
from flexc.frontend.trace import Trace, trace
from flexc.ir.graph import ModKind
from flexc.ir.printer import to_text
from flexc.ir.types import Storage
from flexc.mods import MaskMod, as_mask_mod, as_score_mod, mask_mod, score_mod
from tests.frontend.direct import run_directly, run_graph

SHAPE = (2, 3, 11, 13)
WINDOW = 5
BIAS = torch.randn(13)
LIMITS = [4, 7]


def check(function: Callable[..., Any], made: Trace | None = None) -> Trace:
    """The trace of a mask, checked against the function itself."""
    made = made or trace(function, ModKind.MASK)
    assert torch.equal(run_graph(made, SHAPE), run_directly(function, SHAPE))
    return made


def window_mask(size: Any) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size


def text(made: Trace) -> str:
    return to_text(made.graph.root)


# Numbers.


def test_closure_numbers_are_run_time_values() -> None:
    size = 3

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert made.values == (3,)
    size = 7
    again = check(mask, mod.trace())
    assert again.values == (7,)
    assert again.graph is made.graph, "not traced again"
    assert mod.trace() is again


def test_global_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < WINDOW

    mod = mask_mod(mask)
    made = mod.trace()
    monkeypatch.setitem(globals(), "WINDOW", 9)
    again = check(mask, mod.trace())
    assert (made.values, again.values) == ((5,), (9,))
    assert again.graph is made.graph
    monkeypatch.setitem(globals(), "WINDOW", 2.5)
    assert check(mask, mod.trace()).graph is not made.graph, "a float is another kind of number"


def test_arithmetic_on_numbers_is_pythons() -> None:
    big, small, ratio = 50_000, 3, 0.1

    def mask(b, h, q_idx, kv_idx):
        exact = big * big + small // -2 - (-7) % small + (1 << small) + small**2
        return (q_idx * 200_000_000.0 < exact) & (kv_idx * ratio < small / 7 + math.floor(small * 0.5))

    made = check(mask)
    assert 50_000 * 50_000 - 2 - 2 + 8 + 9 in made.values
    assert Storage.I64 in [capture.storage for capture in made.graph.captures]


def test_wider_number_is_traced_again() -> None:
    size = 3

    def mask(b, h, q_idx, kv_idx):
        return q_idx < size

    mod = mask_mod(mask)
    made = mod.trace()
    size = 2**40
    again = mod.trace()
    assert again.graph is not made.graph
    assert again.graph.captures[0].storage is Storage.I64


def test_python_needs_the_number() -> None:
    count, enabled, scale = 3, True, 4

    def mask(b, h, q_idx, kv_idx):
        result = q_idx < 0
        for i in range(count):
            result = result | (kv_idx == i)
        if enabled and scale > 2:
            result = result | (q_idx == round(math.sqrt(scale)))
        return result

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert made.values == ()
    assert mod.trace() is made
    count = 5
    again = check(mask, mod.trace())
    assert again.graph is not made.graph
    enabled = False
    check(mask, mod.trace())
    enabled, scale = True, 9
    check(mask, mod.trace())


def test_a_branch_guards_the_answer_not_the_number() -> None:
    size = 3

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size if size > 0 else q_idx >= kv_idx

    mod = mask_mod(mask)
    made = mod.trace()
    size = 8
    assert check(mask, mod.trace()).graph is made.graph
    size = 0
    assert check(mask, mod.trace()).graph is not made.graph


def test_numbers_pass_where_python_numbers_do() -> None:
    size, factor = 4, 0.5

    def mask(b, h, q_idx, kv_idx):
        assert isinstance(size, int)
        assert isinstance(factor, float)
        assert not isinstance(size, bool)
        low = torch.clamp(kv_idx, min=0, max=size)
        full = torch.full((), size) + torch.tensor(factor) + torch.full_like(q_idx, size)
        return (torch.where(q_idx > size, size, low) < full) | (min(size, 3) == kv_idx) | (f"{size}" == "7")

    check(mask)


def test_enum_members_and_numpy_numbers_are_guarded() -> None:
    class Size(IntEnum):
        SMALL = 3
        LARGE = 6

    size, other = Size.SMALL, np.int64(4)

    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < size) | (kv_idx < other)

    mod = mask_mod(mask)
    check(mask, mod.trace())
    size = Size.LARGE
    check(mask, mod.trace())
    other = np.int64(9)
    check(mask, mod.trace())


# Tensors.


def test_new_tensor_is_a_new_value() -> None:
    flags = torch.rand(13) < 0.5

    def mask(b, h, q_idx, kv_idx):
        return flags[kv_idx]

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    flags = torch.rand(13) < 0.5
    again = check(mask, mod.trace())
    assert again.graph is made.graph
    assert again.values[0] is flags
    flags = torch.randint(0, 2, (13, 13)).bool()
    with pytest.raises(Exception, match="returned a tensor"):
        mod.trace()
    flags = torch.rand(13) < 0.5
    assert check(mask, mod.trace()).values[0] is flags


def test_other_dtype_is_traced_again() -> None:
    table = torch.arange(13)

    def mask(b, h, q_idx, kv_idx):
        return table[kv_idx] > q_idx

    mod = mask_mod(mask)
    made = mod.trace()
    table = torch.arange(13).float() + 0.5
    assert check(mask, mod.trace()).graph is not made.graph
    table.data = torch.arange(13, dtype=torch.int16)
    assert check(mask, mod.trace()).graph.captures[0].storage is Storage.I16


def test_one_tensor_is_one_slot_until_it_is_two() -> None:
    rows = columns = torch.rand(13)

    def mask(b, h, q_idx, kv_idx):
        return rows[q_idx] > columns[kv_idx]

    mod = mask_mod(mask)
    assert len(check(mask, mod.trace()).values) == 1
    columns = torch.rand(13)
    assert len(check(mask, mod.trace()).values) == 2


def test_sizes_are_run_time_values() -> None:
    table = torch.rand(6, 13)

    def mask(b, h, q_idx, kv_idx):
        n, _ = table.shape
        return (q_idx < n - 1) | (kv_idx > table.size(1) // 2) | (kv_idx < table.numel() // 20)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    table = torch.rand(9, 7)
    assert check(mask, mod.trace()).graph is made.graph
    table.resize_(2, 3)
    assert check(mask, mod.trace()).graph is made.graph


def test_rank_dtype_and_device_are_constants() -> None:
    table = torch.rand(6, 13)

    def mask(b, h, q_idx, kv_idx):
        assert table.ndim == table.dim() == 2
        assert table.dtype is torch.float32
        assert table.device.type == "cpu"
        assert len(table) == 6
        assert q_idx.shape == ()
        assert q_idx.dtype is torch.int32
        assert q_idx.ndim == 0
        return table[b, kv_idx] > 0.5

    check(mask)


def test_numbers_without_dimensions() -> None:
    limit, scale = torch.tensor(6), torch.nn.Parameter(torch.tensor(0.5))

    def mask(b, h, q_idx, kv_idx):
        return (q_idx < limit) & (scale * kv_idx < torch.sigmoid(scale) * 5) & (-scale < limit)

    made = check(mask)
    assert [capture.rank for capture in made.graph.captures] == [0, 0]


def test_arithmetic_on_whole_tensors_stays_in_the_graph() -> None:
    slopes, offsets = torch.rand(3), torch.tensor([0, 4, 9, 13])

    def mask(b, h, q_idx, kv_idx):
        lengths = offsets[1:] - offsets[:-1]
        steep = (slopes * 2).exp().double()
        return (
            (lengths[h] > kv_idx) | (steep[h] > 3) | (slopes.unsqueeze(0)[0, h] < 0.1) | (offsets[-1] < q_idx)
        )

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert mod.trace() is made


def test_operations_without_a_form_are_computed_at_every_trace() -> None:
    scores = torch.rand(13)

    def mask(b, h, q_idx, kv_idx):
        outer = scores[:, None] @ scores[None]
        return (scores.cumsum(0)[kv_idx] > torch.sort(scores).values[q_idx]) | (outer[q_idx, kv_idx] < 0.1)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert made.current() is None
    scores.mul_(2)
    check(mask, mod.trace())


def test_strides_are_no_silent_constants() -> None:
    table = torch.rand(3, 4)

    def mask(b, h, q_idx, kv_idx):
        return q_idx < table.stride(0)

    mod = mask_mod(mask)
    check(mask, mod.trace())
    table = torch.rand(3, 7)
    check(mask, mod.trace())


def test_tensors_made_in_the_mod() -> None:
    def mask(b, h, q_idx, kv_idx):
        lookup = torch.tensor([1, 3, 2, 7])
        base = torch.arange(4) * 2
        shape = q_idx.new_zeros((2,)) + torch.ones(2, dtype=torch.int32)
        return (lookup[kv_idx % 4] > base[q_idx % 4]) & (shape.sum() == 2) & torch.eye(3)[h, b].bool()

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert mod.trace() is made


# Places.


@dataclass
class Config:
    window: int
    shift: torch.Tensor
    names: dict[str, int]


class Model(torch.nn.Module):
    FACTOR = 2

    def __init__(self) -> None:
        super().__init__()
        self.limit: torch.Tensor
        self.config = Config(3, torch.tensor(2), {"first": 2})
        self.register_buffer("limit", torch.tensor([9, 6]))

    @property
    def reach(self) -> int:
        return self.config.window * self.FACTOR

    @staticmethod
    def distance(q_idx, kv_idx):
        return abs(q_idx - kv_idx)

    def mask(self, b, h, q_idx, kv_idx):
        near = self.distance(q_idx, kv_idx) < self.reach + self.config.shift
        return (near & (kv_idx < self.limit[b])) | (kv_idx < self.config.names["first"])


def test_attributes_of_objects() -> None:
    model = Model()
    mod = as_mask_mod(model.mask)
    assert as_mask_mod(model.mask) is mod, "bound methods are made anew at each access"
    made = check(model.mask, mod.trace())
    assert mod.trace() is made
    model.config.window = 1
    again = check(model.mask, mod.trace())
    assert again.graph is made.graph
    model.config.names["first"] = 5
    assert check(model.mask, mod.trace()).graph is made.graph
    model.limit = torch.tensor([5, 12])
    assert check(model.mask, mod.trace()).graph is made.graph
    model.config = Config(2, torch.tensor(1), {"first": 1})
    check(model.mask, mod.trace())


REACH = 3


class Base:
    LIMIT = 9

    def near(self, q_idx, kv_idx):
        return q_idx - kv_idx < REACH


class Derived(Base):
    def near(self, q_idx, kv_idx):
        return super().near(q_idx, kv_idx) & (kv_idx < self.__class__.LIMIT)

    def __call__(self, b, h, q_idx, kv_idx):
        assert isinstance(self, Base)
        return self.near(q_idx, kv_idx)


def test_methods_after_super_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = mask_mod(Derived())
    made = check(mod.function, mod.trace())
    assert mod.trace() is made
    monkeypatch.setitem(globals(), "REACH", 6)
    check(mod.function, mod.trace())
    monkeypatch.setattr(Base, "LIMIT", 4)
    check(mod.function, mod.trace())


def test_instances_made_in_a_mod_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(b, h, q_idx, kv_idx):
        return Derived().near(q_idx, kv_idx)

    mod = mask_mod(mask)
    check(mask, mod.trace())
    monkeypatch.setitem(globals(), "REACH", 6)
    check(mask, mod.trace())
    monkeypatch.setattr(Base, "LIMIT", 4)
    check(mask, mod.trace())


def test_imports_in_a_mod_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = types.ModuleType("flexc_test_settings")
    settings.size = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flexc_test_settings", settings)

    def mask(b, h, q_idx, kv_idx):
        import math

        from flexc_test_settings import size  # type: ignore[import-not-found]

        return q_idx - kv_idx < size * math.floor(1.5)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert mod.trace() is made
    settings.size = 6  # type: ignore[attr-defined]
    assert check(mask, mod.trace()).values == (6,)


def test_numbers_on_tensors_are_watched() -> None:
    table = torch.rand(13)
    table.window = 3  # type: ignore[attr-defined]

    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < vars(table)["window"]) & (table[kv_idx] > 0.2)

    mod = mask_mod(mask)
    made = check(mask, mod.trace())
    assert mod.trace() is made
    table.window = 6  # type: ignore[attr-defined]
    check(mask, mod.trace())
    table = torch.rand(13)
    table.window = 2  # type: ignore[attr-defined]
    check(mask, mod.trace())


def test_decorated_functions() -> None:
    size = 4

    @torch.no_grad()
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size

    made = check(mask)
    assert made.values == (4,)
    compiled = torch.compile(window_mask(5), backend="eager")
    assert trace(compiled, ModKind.MASK).values == (5,)


def test_under_other_modes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    table, function = torch.rand(13), window_mask(3)
    biased = lambda b, h, q_idx, kv_idx: (table[kv_idx] * 2 > table.sum()) & (q_idx < table.shape[0])  # noqa: E731
    plain = text(trace(function, ModKind.MASK)), text(trace(biased, ModKind.MASK))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    contexts: list[Any] = [torch.inference_mode(), torch.no_grad(), torch.device("meta"), fake]
    for context in contexts:
        with context:
            assert (text(trace(function, ModKind.MASK)), text(trace(biased, ModKind.MASK))) == plain

    def traced_inside(x: torch.Tensor) -> torch.Tensor:
        assert text(trace(function, ModKind.MASK)) == plain[0]
        return x

    torch.vmap(traced_inside)(torch.rand(2))


def test_copies_of_an_object_have_their_own_mod() -> None:
    first = Window(3, torch.rand(2))
    as_mask_mod(first).trace()
    second = copy.copy(first)
    second.size = 5
    assert as_mask_mod(second).function is second
    assert as_mask_mod(second).trace().values == (5,)
    assert as_mask_mod(first).trace().values == (3,)


@dataclass
class Window:
    size: int
    unused: torch.Tensor

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.size


def test_changing_an_object_is_an_error() -> None:
    model = Model()

    def mask(b, h, q_idx, kv_idx):
        model.config.window = 4
        return q_idx >= kv_idx

    with pytest.raises(Exception, match="changes an object"):
        trace(mask, ModKind.MASK)


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


# Life time.


def test_new_closures_keep_nothing_alive() -> None:
    gc.collect()
    alive = []
    for step in range(20):
        function = window_mask(torch.tensor(step))
        as_mask_mod(function).trace()
        alive.append(weakref.ref(function))
        del function
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    model = Model()
    as_mask_mod(model.mask).trace()
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_one_mod_a_function() -> None:
    function = window_mask(3)
    assert as_mask_mod(function) is as_mask_mod(function)
    assert as_mask_mod(as_mask_mod(function)) is as_mask_mod(function)

    @functools.wraps(function)
    def wrapper(b, h, q_idx, kv_idx):
        return ~function(b, h, q_idx, kv_idx)

    assert as_mask_mod(wrapper).function is wrapper
    assert as_mask_mod(function).function is function


def module_level(b, h, q_idx, kv_idx):
    """Says what it is."""
    return q_idx >= kv_idx


MODULE_LEVEL = mask_mod(module_level)


@mask_mod
def decorated(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 5


def test_decorated_functions_are_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    combined = decorated & ~masks.causal
    assert text(pickle.loads(pickle.dumps(combined)).trace()) == text(combined.trace())


def test_pickled_and_copied() -> None:
    module_mod = as_mask_mod(module_level)
    module_mod.trace()
    combined = MODULE_LEVEL & ~MODULE_LEVEL
    for mod in (module_mod, combined, copy.deepcopy(combined), pickle.loads(pickle.dumps(combined))):
        assert isinstance(mod, MaskMod)
        assert text(mod.trace()) == text(pickle.loads(pickle.dumps(mod)).trace())
    model = Model()
    as_mask_mod(model.mask).trace()
    check(copy.deepcopy(model).mask)
    check(pickle.loads(pickle.dumps(model)).mask)


def test_names_and_source() -> None:
    assert MODULE_LEVEL.__name__ == "module_level"
    assert MODULE_LEVEL.__doc__ == "Says what it is."
    source = MODULE_LEVEL.trace().graph.source
    assert (source.name, source.file, source.line) == (
        "module_level",
        __file__,
        module_level.__code__.co_firstlineno,
    )
    assert source.text.startswith("def module_level(")
    assert source.text.endswith("return q_idx >= kv_idx")
    size, model = 3, Model()

    @score_mod
    def scaled(score, b, h, q_idx, kv_idx):
        return score * (size + 1) + BIAS[kv_idx] + model.config.window

    names = [capture.name for capture in scaled.trace().graph.captures]
    assert names == ["size + 1", "BIAS", "model.config.window"]
    assert scaled.trace().graph.source.text.startswith("@score_mod\n")
    assert repr(scaled) == "ScoreMod(scaled)"


def test_many_threads() -> None:
    mod = mask_mod(window_mask(torch.tensor(3)))
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(text(mod.trace()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8
    assert len(set(texts)) == 1


def test_calling_a_mod_calls_the_function() -> None:
    b = h = torch.tensor(0)
    assert MODULE_LEVEL(b, h, torch.tensor(3), torch.tensor(2)).item() is True
    assert (~MODULE_LEVEL)(b, h, torch.tensor(3), torch.tensor(2)).item() is False
    score = as_score_mod(lambda score, b, h, q_idx, kv_idx: score * 2)
    assert score(torch.tensor(1.5), b, h, b, h).item() == 3.0
