"""How long traces and what they captured live; names, copies and threads."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref

import torch

from flexc import masks
from flexc.mods import MaskMod, as_mask_mod, as_score_mod, mask_mod, score_mod
from tests.frontend.captured import BIAS, Model, check, text, window_mask


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
