"""What all tests share: seeds, golden files, and which tests need a GPU."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"

Golden = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-golden` and `--whole-corpus`."""
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )
    parser.addoption(
        "--whole-corpus",
        action="store_true",
        help="compile the corpus for every target and head dimension",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Gives the run a kernel cache of its own, shared by its worker processes: nothing old is found in it."""
    if not hasattr(config, "workerinput"):
        os.environ["FLEXC_CACHE_DIR"] = tempfile.mkdtemp(prefix="flexc-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Deletes that cache."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["FLEXC_CACHE_DIR"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `--whole-corpus` runs; marks the tests of GPUs, and skips them without one."""
    if not config.getoption("--whole-corpus"):
        left_out = [item for item in items if item.get_closest_marker("whole") is not None]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    items_on_gpu = [item for item in items if (TESTS / "gpu") in item.path.parents]
    if not items_on_gpu:
        return
    reason = _why_no_gpu()
    for item in items_on_gpu:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    return "needs an NVIDIA GPU, and torch.cuda.is_available() is False here"


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers for a test whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares text with `tests/golden/<path of the test>/<name of the test>.<suffix>`.

    `golden(text, suffix="py")` fails with a unified diff when the text differs or the file is missing;
    `pytest --update-golden` writes the file instead, for a reviewer to read in the change.
    """
    module = request.path.relative_to(TESTS).with_suffix("")
    name = request.node.name.translate(str.maketrans("[]/: ", "-----")).rstrip("-")
    update = bool(request.config.getoption("--update-golden"))

    def compare(text: str, *, suffix: str = "py") -> None:
        path = GOLDEN / module / f"{name}.{suffix}"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        where = path.relative_to(TESTS.parent)
        if not path.exists():
            pytest.fail(
                f"{where} does not exist; write it with: pytest {request.node.nodeid} --update-golden"
            )
        expected = path.read_text()
        if text != expected:
            pytest.fail(_difference(expected, text, str(where)), pytrace=False)

    return compare


def _difference(expected: str, actual: str, where: str) -> str:
    import difflib

    lines = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), f"{where} (golden)", "produced now", lineterm=""
    )
    return "\n".join(
        [*list(lines)[:200], "", "If the change is meant: pytest --update-golden, and review it."]
    )
