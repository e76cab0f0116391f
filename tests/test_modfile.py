"""`FILE.py:NAME`: what it finds, and what it says when it finds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexc.errors import FlexcError, ModFileError
from flexc.modfile import load_mods, load_one
from flexc.mods import MaskMod, ScoreMod

TEXT = """
import flexc
from neighbour import WINDOW

@flexc.mask_mod
def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < WINDOW) & (q_idx >= kv_idx)

@flexc.score_mod
def double(score, b, h, q_idx, kv_idx):
    return score * 2

def plain_mask(b, h, q_idx, kv_idx):
    return q_idx == kv_idx

def plain_score(score, b, h, q_idx, kv_idx, *, factor=3.0):
    return score * factor

def two(a, b):
    return a

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WINDOW = 5\n")
    path = tmp_path / "mods.py"
    path.write_text(TEXT)
    return path


def test_a_decorated_mask(file: Path) -> None:
    named = load_one(f"{file}:window")
    assert isinstance(named.mask, MaskMod)
    assert named.score is None
    assert named.name == "window"


def test_plain_functions_are_told_apart_by_their_arguments(file: Path) -> None:
    assert isinstance(load_one(f"{file}:plain_mask").mask, MaskMod)
    assert isinstance(load_one(f"{file}:plain_score").score, ScoreMod)


def test_a_pair(file: Path) -> None:
    named = load_one(f"{file}:window+double+plain_mask")
    assert named.mask is not None
    assert named.score is not None


def test_a_file_stands_for_all_that_is_decorated(file: Path) -> None:
    assert [named.name for named in load_mods(str(file))] == ["window", "double"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("windw", "did you mean window?"),
        ("zzz", "has no 'zzz'"),
        ("NUMBER", "NUMBER is no function"),
        ("two", "two takes 2 arguments"),
        ("double+plain_score", "two score functions"),
    ],
)
def test_a_wrong_name(file: Path, name: str, message: str) -> None:
    with pytest.raises(ModFileError) as raised:
        load_one(f"{file}:{name}")
    assert message in str(raised.value)


@pytest.mark.parametrize("colon", ["", ":"])
def test_a_file_with_several_needs_a_name(file: Path, colon: str) -> None:
    with pytest.raises(ModFileError, match="holds 2 mods: window, double") as raised:
        load_one(f"{file}{colon}")
    assert f"{file}:window" in str(raised.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModFileError, match=r"there is no file .*none\.py"):
        load_one(f"{tmp_path}/none.py:f")


def test_a_file_that_raises_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(ModFileError, match=r"broken\.py:2 raised ZeroDivisionError"):
        load_one(f"{path}:y")


def test_a_file_without_mods(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    with pytest.raises(FlexcError, match="no decorated mask or score function"):
        load_mods(str(path))
