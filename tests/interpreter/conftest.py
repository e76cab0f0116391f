"""Triton decides on import whether kernels are interpreted, so these tests have a process of their own.

`make test` runs them with TRITON_INTERPRET=1; without it they are not collected.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


_NUMPY_SAYS = (
    # Triton's interpreter turns arrays of one element into numbers, which numpy is about to forbid.
    "ignore:Conversion of an array with ndim:DeprecationWarning",
    # The kernels compute with infinities on purpose, and repair NaN.
    "ignore::RuntimeWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings that numpy gives inside the interpreter are no faults of the kernels."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in _NUMPY_SAYS:
                item.add_marker(pytest.mark.filterwarnings(warning))
