"""The runs that are checked by compute-sanitizer: they reach the kernels that they are there for."""

from __future__ import annotations

from unittest.mock import patch

import pytest

import flexc.launch
from tests.gpu.inputs import NEEDS_SM90
from tests.gpu.small_runs import PROGRAMS, cases, run

pytestmark = NEEDS_SM90


NAMES = (
    "none", "causal", "window", "far_window", "documents", "alibi", "bias", "keys", "softcap", "large_cap",
    "dropout", "sinks", "few", "one", "pairs", "unseen",
)  # fmt: skip


def test_none_is_left_out() -> None:
    assert set(NAMES) == set(cases())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_reaches_its_kernels(name: str, deterministic: bool) -> None:
    case = cases()[name]
    with patch.object(flexc.launch, "processors", lambda index: PROGRAMS):
        for head_dim in case.head_dims:
            run(case, head_dim, deterministic=deterministic, backend="hopper")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_reaches_sums_in_order(head_dim: int) -> None:
    launched = run(cases()["causal"], head_dim, deterministic=True, backend="hopper")
    assert any("def add_in_order" in kernel.source for kernel in launched)
