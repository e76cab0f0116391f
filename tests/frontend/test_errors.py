"""One test a mistake: the class, the message, the hint, and the user's line and columns."""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexc import errors, masks
from flexc.frontend.trace import trace
from flexc.ir.graph import ModKind
from flexc.mods import as_mask_mod, as_score_mod, mask_mod, score_mod

TABLE = torch.randn(4, 9)
LENGTH = torch.tensor(7)
FLAGS = [1, 2, 3]
COUNT = 3
THIRD = Fraction(1, 3)
HALF = Decimal("0.5")
SIZES = SimpleNamespace(rows=3)


def mistypes(b, h, q_idx, kv_idx):
    return q_idx.clampp(3) >= kv_idx


def branches(b, h, q_idx, kv_idx):
    if q_idx >= kv_idx:
        return kv_idx > 3
    return kv_idx > 5


def uses_and(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and q_idx < 9


def uses_or(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx or q_idx < 9


def uses_not(b, h, q_idx, kv_idx):
    return not q_idx >= kv_idx


def calls_a_ufunc(b, h, q_idx, kv_idx):
    return np.abs(q_idx - kv_idx) < 3


def chains(b, h, q_idx, kv_idx):
    return 0 <= q_idx < 9


def asks_membership(b, h, q_idx, kv_idx):
    return kv_idx in (0, 4)


def uses_builtin_max(b, h, q_idx, kv_idx):
    return max(q_idx, 3) >= kv_idx


def loops(b, h, q_idx, kv_idx):
    for _ in range(q_idx):
        kv_idx = kv_idx + 1
    return kv_idx > 3


def calls_int(b, h, q_idx, kv_idx):
    return int(q_idx) >= kv_idx


def calls_item(b, h, q_idx, kv_idx):
    return q_idx.item() >= kv_idx


def calls_math(b, h, q_idx, kv_idx):
    return math.sqrt(q_idx) >= kv_idx


def indexes_a_list(b, h, q_idx, kv_idx):
    return FLAGS[q_idx] == 1


def calls_numpy(b, h, q_idx, kv_idx):
    return np.asarray(q_idx) >= kv_idx


def reads_a_capture(b, h, q_idx, kv_idx):
    return q_idx < LENGTH.item()


def branches_on_a_capture(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx if LENGTH else q_idx < 3


def divides_by_zero(b, h, q_idx, kv_idx):
    return q_idx // 0 == kv_idx


def takes_the_remainder_of_zero(b, h, q_idx, kv_idx):
    return torch.remainder(q_idx - kv_idx, 0) == 1


def truncates_by_zero(b, h, q_idx, kv_idx):
    return torch.div(q_idx, 0, rounding_mode="trunc") == 1


def sorts(b, h, q_idx, kv_idx):
    return torch.sort(TABLE[h] * q_idx)[0][0] > 1


def calls_a_method(b, h, q_idx, kv_idx):
    return q_idx.cumsum(0) >= kv_idx


def draws(b, h, q_idx, kv_idx):
    return torch.rand(()) < 0.5


def unknown_form(b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx)


def too_many_indices(b, h, q_idx, kv_idx):
    return TABLE[h, q_idx, kv_idx] > 0


def constant_out_of_range(b, h, q_idx, kv_idx):
    return TABLE[11, q_idx] > 0


def float_index(b, h, q_idx, kv_idx):
    return TABLE[h, q_idx / 2] > 0


def bool_index(b, h, q_idx, kv_idx):
    return TABLE[q_idx >= kv_idx, h] > 0


def shapes_differ(b, h, q_idx, kv_idx):
    return (TABLE[h] + TABLE[:, h]).sum() > 0


LONG = torch.randn(4, 300)


def long_sum(b, h, q_idx, kv_idx):
    return LONG[h].sum(-1) > 0


def writes_a_tensor(b, h, q_idx, kv_idx):
    TABLE[h, q_idx] = 3.0
    return q_idx >= kv_idx


def adds_in_place(b, h, q_idx, kv_idx):
    LENGTH.add_(1)
    return q_idx >= kv_idx


def appends(b, h, q_idx, kv_idx):
    FLAGS.append(4)
    return q_idx >= kv_idx


def assigns_a_global(b, h, q_idx, kv_idx):
    global COUNT
    COUNT = COUNT + 1
    return q_idx >= kv_idx


COMPLEX = torch.zeros(4, dtype=torch.complex64)
HUGE = 2**70


def complex_capture(b, h, q_idx, kv_idx):
    return COMPLEX[h] == 0


def huge_capture(b, h, q_idx, kv_idx):
    return q_idx < HUGE


def strings(b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, "a", q_idx)  # type: ignore[call-overload]


def multiplies_by_a_fraction(b, h, q_idx, kv_idx):
    return q_idx * THIRD >= kv_idx


def compares_with_a_decimal(b, h, q_idx, kv_idx):
    return kv_idx < HALF


def adds_an_object(b, h, q_idx, kv_idx):
    return q_idx + SIZES >= kv_idx


CASES: list[tuple[Callable[..., Any], type[errors.TraceError], str, str]] = [
    (branches, errors.BranchOnTracedValue, "q_idx >= kv_idx", "torch.where"),
    (uses_and, errors.BranchOnTracedValue, "q_idx >= kv_idx and q_idx < 9", "`(a) & (b)`"),
    (uses_or, errors.BranchOnTracedValue, "q_idx >= kv_idx or q_idx < 9", "`(a) | (b)`"),
    (uses_not, errors.BranchOnTracedValue, "not q_idx >= kv_idx", "`~(a)`"),
    (chains, errors.BranchOnTracedValue, "0 <= q_idx < 9", "`(a) & (b)`"),
    (asks_membership, errors.BranchOnTracedValue, "kv_idx in (0, 4)", "(x == a) | (x == b)"),
    (uses_builtin_max, errors.BranchOnTracedValue, "max(q_idx, 3)", "torch.maximum"),
    (loops, errors.ConvertTracedValue, "range(q_idx)", "torch"),
    (calls_int, errors.ConvertTracedValue, "int(q_idx)", "drop int()"),
    (calls_item, errors.ConvertTracedValue, "q_idx.item()", "drop .item()"),
    (calls_math, errors.ConvertTracedValue, "math.sqrt(q_idx)", "torch"),
    (indexes_a_list, errors.ConvertTracedValue, "FLAGS[q_idx]", "torch.tensor"),
    (calls_numpy, errors.ConvertTracedValue, "np.asarray(q_idx)", "torch.from_numpy(x) outside the mod"),
    (reads_a_capture, errors.DataDependentValue, "LENGTH.item()", "use the tensor itself"),
    (
        branches_on_a_capture,
        errors.DataDependentValue,
        "q_idx >= kv_idx if LENGTH else q_idx < 3",
        "use the tensor itself",
    ),
    (divides_by_zero, errors.DivisionByZero, "q_idx // 0", "another number"),
    (takes_the_remainder_of_zero, errors.DivisionByZero, "torch.remainder(q_idx - kv_idx, 0)", "another"),
    (truncates_by_zero, errors.DivisionByZero, 'torch.div(q_idx, 0, rounding_mode="trunc")', "another"),
    (sorts, errors.UnsupportedOperation, "torch.sort(TABLE[h] * q_idx)", "elementwise"),
    (calls_a_method, errors.UnsupportedOperation, "q_idx.cumsum", "elementwise"),
    (mistypes, errors.NoSuchAttribute, "q_idx.clampp", "methods such as"),
    (draws, errors.UnsupportedOperation, "torch.rand(())", "outside the mod"),
    (
        unknown_form,
        errors.UnsupportedOperation,
        "torch.where(q_idx >= kv_idx)",
        "torch.where(condition, a, b)",
    ),
    (too_many_indices, errors.IndexRankMismatch, "TABLE[h, q_idx, kv_idx]", "one index a dimension"),
    (constant_out_of_range, errors.IndexRankMismatch, "TABLE[11, q_idx]", ""),
    (float_index, errors.WrongIndexType, "TABLE[h, q_idx / 2]", "//"),
    (bool_index, errors.WrongIndexType, "TABLE[q_idx >= kv_idx, h]", "torch.where"),
    (shapes_differ, errors.ShapesDoNotBroadcast, "TABLE[h] + TABLE[:, h]", "index the longer one"),
    (long_sum, errors.ReductionTooLong, "LONG[h].sum(-1)", "outside the mod"),
    (writes_a_tensor, errors.MutationInMod, "TABLE[h, q_idx]", "torch.where"),
    (adds_in_place, errors.MutationInMod, "LENGTH.add_(1)", "new value"),
    (appends, errors.MutationInMod, "FLAGS.append(4)", "outside the mod"),
    (assigns_a_global, errors.MutationInMod, "COUNT", "local name"),
    (complex_capture, errors.UnsupportedCapture, "COMPLEX[h]", "convert it before"),
    (huge_capture, errors.UnsupportedCapture, "q_idx < HUGE", "float"),
    (calls_a_ufunc, errors.UnsupportedOperation, "np.abs(q_idx - kv_idx)", "torch.abs(x)"),
    (multiplies_by_a_fraction, errors.UnsupportedOperation, "q_idx * THIRD", "float(x)"),
    (compares_with_a_decimal, errors.UnsupportedOperation, "kv_idx < HALF", "float(x)"),
    (adds_an_object, errors.UnsupportedOperation, "q_idx + SIZES", "attributes"),
    (strings, errors.UnsupportedOperation, 'torch.where(q_idx >= kv_idx, "a", q_idx)', "arguments"),
]


def underlined(error: errors.FlexcError) -> str:
    """The text that the error's carets are under."""
    assert error.span is not None
    line = linecache.getline(error.span.file, error.span.line)
    return line[error.span.column : error.span.end_column].rstrip("\n")


@pytest.mark.parametrize(
    ("function", "kind", "code", "hint"), CASES, ids=lambda x: getattr(x, "__name__", "")
)
def test_mistake_is_located(
    function: Callable[..., Any], kind: type[errors.TraceError], code: str, hint: str
) -> None:
    with pytest.raises(kind) as caught:
        trace(function, ModKind.MASK)
    error = caught.value
    assert error.span is not None
    assert error.span.file == __file__
    assert error.span.function == function.__name__
    first = function.__code__.co_firstlineno
    last = max(line for _, _, line in function.__code__.co_lines() if line is not None)
    assert first < error.span.line <= last
    assert underlined(error) == code
    assert hint in (error.hint or "")
    assert "^" * len(code) in str(error)
    assert f"{__file__}:{error.span.line}:{error.span.column + 1} in {function.__name__}" in str(error)


def test_every_class_of_mistake_is_tested() -> None:
    tested = {kind for _, kind, _, _ in CASES} | {errors.WrongArity, errors.WrongReturnType}
    assert tested == set(errors.TraceError.__subclasses__())


def test_classes_derive_from_builtins() -> None:
    for kind in errors.TraceError.__subclasses__():
        builtins = (TypeError, ValueError, NotImplementedError, IndexError, AttributeError, ZeroDivisionError)
        assert issubclass(kind, builtins)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda b, h, q_idx, kv_idx: None, "None"),
        (lambda b, h, q_idx, kv_idx: (q_idx, kv_idx), "a tuple"),
        (lambda b, h, q_idx, kv_idx: THIRD, "a Fraction"),
        (lambda b, h, q_idx, kv_idx: q_idx, "torch.int32"),
        (lambda b, h, q_idx, kv_idx: TABLE[h] > 0, r"shape \(9,\)"),
        (lambda b, h, q_idx, kv_idx: 0.5, "torch.float32"),
    ],
)
def test_wrong_mask_results(function: Callable[..., Any], what: str) -> None:
    with pytest.raises(errors.WrongReturnType, match=what) as caught:
        trace(function, ModKind.MASK)
    assert caught.value.span is not None
    assert caught.value.span.line == function.__code__.co_firstlineno


def test_wrong_score_results() -> None:
    with pytest.raises(errors.WrongReturnType, match="a boolean") as caught:
        trace(lambda score, b, h, q_idx, kv_idx: q_idx >= kv_idx, ModKind.SCORE)
    assert "mask_mod" in (caught.value.hint or "")


def test_return_span_is_the_return() -> None:
    def lacks_an_index(b, h, q_idx, kv_idx):
        chosen = TABLE[h]
        return chosen > 0

    with pytest.raises(errors.WrongReturnType) as caught:
        trace(lacks_an_index, ModKind.MASK)
    assert underlined(caught.value) == "return chosen > 0"
    with pytest.raises(errors.WrongReturnType) as caught:
        trace(lambda b, h, q_idx, kv_idx: q_idx - kv_idx, ModKind.MASK)
    assert underlined(caught.value) == "q_idx - kv_idx"


def test_a_method_that_is_not_bound() -> None:
    def window(self, b, h, q_idx, kv_idx):
        return kv_idx < self.size

    with pytest.raises(errors.WrongArity) as caught:
        mask_mod(window)
    assert "pass self.window" in (caught.value.hint or "")
    assert "score_mod" not in (caught.value.hint or "")


def test_a_keyword_without_a_value() -> None:
    def window(b, h, q_idx, kv_idx, *, size):
        return q_idx - kv_idx < size

    with pytest.raises(errors.WrongArity) as caught:
        mask_mod(window)
    assert caught.value.hint == "bind them before: functools.partial(window, size=...)"


def test_a_maker_of_masks_that_was_not_called() -> None:
    with pytest.raises(errors.WrongArity) as caught:
        as_mask_mod(masks.sliding_window)
    assert caught.value.message.startswith("`sliding_window` takes (W); ")
    assert caught.value.span is None  # its code is flexc's, not the user's
    assert "sliding_window(...)" in (caught.value.hint or "")


def test_a_branch_is_told_once_what_to_write() -> None:
    with pytest.raises(errors.BranchOnTracedValue) as caught:
        trace(branches, ModKind.MASK)
    assert (caught.value.hint or "").count("torch.where") == 1


def test_wrong_arity() -> None:
    with pytest.raises(errors.WrongArity, match=r"takes \(b, h, q_idx\)") as caught:

        @mask_mod
        def too_few(b, h, q_idx):
            return q_idx > 0

    assert underlined(caught.value) == "def too_few(b, h, q_idx):"
    assert "def too_few(b, h, q_idx, kv_idx)" in (caught.value.hint or "")

    def a_score(score, b, h, q_idx, kv_idx):
        return score

    with pytest.raises(errors.WrongArity) as caught:
        as_mask_mod(a_score)
    assert "score_mod=" in (caught.value.hint or "")
    with pytest.raises(errors.WrongArity):
        as_score_mod(branches)

    def keyword_only(b, h, q_idx, kv_idx, *, size):
        return q_idx - kv_idx < size

    with pytest.raises(errors.WrongArity):
        as_mask_mod(keyword_only)
    for maker in (masks.sliding_window, masks.sliding_tile_2d):  # of one argument, and of a mask's four
        with pytest.raises(errors.WrongArity) as caught:
            as_mask_mod(maker)
        assert f"pass the result, {maker.__name__}(...)" in (caught.value.hint or "")
    as_mask_mod(lambda *indices: indices[2] >= indices[3])


def test_things_that_are_no_mods() -> None:
    with pytest.raises(errors.NotAMod, match="of type int"):
        mask_mod(5)  # type: ignore[arg-type]
    with pytest.raises(errors.NotAMod) as caught:
        score_mod(mask_mod(branches))
    assert "mask_mod=" in (caught.value.hint or "")


def test_truth_of_a_mask() -> None:
    mask = mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    with pytest.raises(errors.MaskTruthValue, match="no truth value") as caught:
        bool(mask)
    assert "`&`" in (caught.value.hint or "")
    with pytest.raises(TypeError):
        mask & 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        operator.and_(mask, score_mod(lambda score, b, h, q_idx, kv_idx: score))


def test_errors_of_the_user_pass_through() -> None:
    def divides(b, h, q_idx, kv_idx):
        return q_idx >= 1 // (COUNT - COUNT)

    def misspells(b, h, q_idx, kv_idx):
        return q_idx.nonsense >= kv_idx

    with pytest.raises(ZeroDivisionError):
        trace(divides, ModKind.MASK)
    with pytest.raises(AttributeError, match="nonsense"):
        trace(misspells, ModKind.MASK)


def test_located_through_helpers_and_multi_line_expressions() -> None:
    def helper(x):
        return x.item()

    def outer(b, h, q_idx, kv_idx):
        return helper(q_idx) >= kv_idx

    with pytest.raises(errors.ConvertTracedValue) as caught:
        trace(outer, ModKind.MASK)
    assert caught.value.span is not None
    assert caught.value.span.function == "helper"

    def folded(b, h, q_idx, kv_idx):
        return math.sqrt(
            q_idx + kv_idx  # on a line of its own
        )

    with pytest.raises(errors.TraceError) as multi_line:
        trace(folded, ModKind.MASK)
    assert underlined(multi_line.value) == "math.sqrt("
