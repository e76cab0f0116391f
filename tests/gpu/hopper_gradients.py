"""Checks of the Hopper backward: it served the call, and its gradients are right."""

from __future__ import annotations

from typing import Any

import torch

from flexc import backends
from flexc.call import Gradients
from flexc.launcher import recording
from tests.gradients import Problem, check_gradients, differentiable_slots, problem

MAIN = "attention_backward"
NAMES = ("q", "k", "v")


def hopper_gradients(given: Problem, names: tuple[str | int, ...]) -> Gradients:
    """The gradients that `backend="auto"` gives; fails where another kernel computed them."""
    out, lse = backends.forward(given.call, "auto")
    assert lse is not None
    with recording() as launched:
        found = backends.backward(
            given.call, "auto", out, lse, given.grad_out, given.grad_lse, frozenset(names)
        )
    assert MAIN in [kernel.entry for kernel in launched]
    return found


def check_hopper_backward(*qkv: torch.Tensor, learned: bool = False, **arguments: Any) -> None:
    """Gradients of a call with these arguments against fp64; `learned`: of what the score captured, too."""
    given = problem(*qkv, **arguments)
    names: tuple[str | int, ...] = NAMES if given.call.sinks is None else (*NAMES, "sinks")
    if learned:
        names = (*names, *differentiable_slots(given.call))
    check_gradients(given, hopper_gradients(given, names), names)
