"""Triton decides on import whether kernels are interpreted, so these tests have a process of their own.

`make test` runs them with TRITON_INTERPRET=1; without it they are skipped, or not even collected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if _INTERPRETS else ["test_*.py"]


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
            if not _INTERPRETS:
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
            for warning in _NUMPY_SAYS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True, scope="session")
def _language_is_patched_once_a_launch() -> Iterator[None]:
    """Triton's interpreter puts its own functions into the language for a launch, and for every call inside.

    The second time it finds nothing to do, in a millisecond. Kernels call small functions thousands of times.
    """
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", _once_a_launch(interpreter._patch_lang))
        yield


class _Restoring:
    """Restores the language at the end of a launch, after which nothing is patched."""

    def __init__(self, scope: Any, patched: set[int]) -> None:
        self._scope, self._patched = scope, patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def _once_a_launch(patch_language: Callable[..., Any]) -> Callable[..., Any]:
    patched: set[int] = set()

    def patch_what_is_not(function: Callable[..., Any]) -> Any:
        import triton.language as tl

        languages = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
        if languages <= patched:
            return None  # to a call inside, which does not restore anything
        scope = patch_language(function)
        if not patched:  # the launch itself
            scope = _Restoring(scope, patched)
        patched.update(languages)
        return scope

    return patch_what_is_not
