"""flexc: attention kernels compiled from Python mask and score functions."""

from __future__ import annotations

from pathlib import Path

# In a source checkout the sub-packages sit beside this folder; in a wheel, inside it.
if not Path(__file__).with_name("ir").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from flexc._version import __version__

__all__ = ["__version__"]
