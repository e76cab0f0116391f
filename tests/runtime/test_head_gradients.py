"""Gradients of heads: an error of delta, which all pairs of a row share, is taken out again."""

from __future__ import annotations

import torch

from flexc import scores
from flexc.codegen.backward_form import backward_form
from flexc.codegen.backward_spec import backward_spec
from flexc.head_gradients import corrected
from flexc.resolve import resolve
from tests.codegen.generate import spec_for


def test_an_error_of_delta_is_taken_out() -> None:
    torch.manual_seed(0)
    batch, heads, length = 2, 3, 40
    shape = (batch, heads, length, length)
    weights = torch.randn(shape, dtype=torch.float64).softmax(3)
    of_weights = torch.randn(shape, dtype=torch.float64)
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    delta = (weights * of_weights).sum(3, keepdim=True)
    expected = (weights * (of_weights - delta) * distance).sum((0, 2, 3))

    off = weights * (of_weights - delta - torch.randn_like(delta))
    sums = (off * distance).sum((0, 2, 3))
    assert (sums - expected).abs().max() > 1

    score = scores.alibi(torch.ones(heads))
    values = resolve(score, None)[1]
    form = backward_form(backward_spec(spec_for(None, score), values, None, slots=(0,)), scatters=True)
    run = corrected(form.scatters, (batch, heads), values, sums.device)
    found = run(sums, off.sum(3), (weights * distance).sum(3))
    torch.testing.assert_close(found, expected)


def test_numbers_and_elements_that_do_not_exist() -> None:
    number, slopes = torch.ones(()), torch.ones(2)
    for captured, share in ((number, [[1.0, 1.0, 1.0]]), (slopes, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])):
        score = (
            (lambda s, b, h, q_idx, kv_idx: s + number * kv_idx)
            if captured is number
            else (lambda s, b, h, q_idx, kv_idx: s + slopes[h] * kv_idx)
        )
        values = resolve(score, None)[1]
        form = backward_form(backward_spec(spec_for(None, score), values, None, slots=(0,)), scatters=True)
        run = corrected(form.scatters, (1, 3), values, number.device)
        rows = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
        found = run(torch.zeros_like(captured), rows, torch.ones_like(rows))
        assert found.shape == captured.shape
        expected = -torch.tensor(share) @ rows[0].sum(1)
        torch.testing.assert_close(found.reshape(-1), expected)
