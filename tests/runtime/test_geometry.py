"""How a kernel is launched: what the driver reads of it lies where its header says."""

from __future__ import annotations

import ctypes

import pytest

from flexc import driver
from flexc.driver import Geometry

# Offsets of CUlaunchConfig and CUlaunchAttribute in cuda.h, on a machine with pointers of 64 bits.
_OF_CONFIG = {"grid": 0, "block": 12, "shared": 24, "stream": 32, "attributes": 40, "count": 48}
_OF_ATTRIBUTE = {"id": 0, "value": 8}


def test_structures_are_those_of_the_header() -> None:
    for structure, size, offsets in (
        (driver.LaunchConfig, 56, _OF_CONFIG),
        (driver.LaunchAttribute, 72, _OF_ATTRIBUTE),
    ):
        assert ctypes.sizeof(structure) == size
        assert {name: getattr(structure, name).offset for name in offsets} == offsets


@pytest.mark.parametrize(
    ("comes_early", "version", "count"), [(True, 12030, 1), (True, 12020, 0), (False, 13000, 0)]
)
def test_attributes(monkeypatch: pytest.MonkeyPatch, comes_early: bool, version: int, count: int) -> None:
    monkeypatch.setattr(driver, "version", lambda: version)
    geometry = Geometry(384, 1000, comes_early=comes_early)
    geometry.of(7, 1234)
    config = geometry.config
    assert (tuple(config.grid), tuple(config.block), config.shared) == ((7, 1, 1), (384, 1, 1), 1000)
    assert (config.stream, config.count) == (1234, count)
    if count:
        assert (config.attributes[0].id, config.attributes[0].value) == (6, 1)
