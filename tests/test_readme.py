"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flexc
from flexc.explain import draw_tiles, explain_mask
from flexc.modfile import load_one
from flexc.plane import plane

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the README shows, without its call, which is run apart."""
    (text,) = re.findall(r"```python\n(# window\.py\n.*?)```", README, re.DOTALL)
    path = tmp_path_factory.mktemp("readme") / "window.py"
    path.write_text(text.partition("q, k, v =")[0])
    return path


def test_explanation(file: Path) -> None:
    mask = load_one(f"{file}:window").mask
    assert mask is not None
    said = explain_mask(mask, 4096, 4096).splitlines()
    (shown,) = re.findall(r"```\n(  formula.*?)\n```", README, re.DOTALL)
    assert [line for line in shown.splitlines() if line not in said] == []


def test_picture(file: Path) -> None:
    mask = load_one(f"{file}:window").mask
    assert mask is not None
    assert draw_tiles(plane(mask, 1920, 1920).block_map(128, 128)) in README


def test_kernel(file: Path) -> None:
    named = load_one(f"{file}:window+softcap")
    kernel = flexc.compile(mask_mod=named.mask, score_mod=named.score, head_dim=128)
    (shown,) = re.findall(r"```python\n(@gluon\.jit.*?)```", README, re.DOTALL)
    assert shown.strip() in kernel.source


def test_commands_exist() -> None:
    from flexc.cli.app import app

    named = {command.name for command in app.registered_commands}
    assert set(re.findall(r"`flexc (\w+)", README)) <= {*(name for name in named if name)}
