"""flexc: attention kernels compiled from Python mask and score functions."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a source checkout the sub-packages sit beside this folder; in a wheel, inside it.
if not Path(__file__).with_name("ir").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from flexc._version import __version__
from flexc.errors import FlexcError, InternalError

if TYPE_CHECKING:
    from flexc import masks, scores
    from flexc.api import attention
    from flexc.block_mask import BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks
    from flexc.compiling import compile
    from flexc.flex import AuxOutput, AuxRequest, flex_attention
    from flexc.kernel import Kernel, load
    from flexc.mods import MaskMod, ScoreMod, mask_mod, score_mod

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexcError",
    "InternalError",
    "Kernel",
    "MaskMod",
    "ScoreMod",
    "__version__",
    "and_masks",
    "attention",
    "compile",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "load",
    "mask_mod",
    "masks",
    "noop_mask",
    "or_masks",
    "score_mod",
    "scores",
]

# Bound on first use (PEP 562), so that `import flexc` loads no torch, triton or sympy.
_HOME = {
    "AuxOutput": "flex",
    "AuxRequest": "flex",
    "BlockMask": "block_mask",
    "Kernel": "kernel",
    "MaskMod": "mods",
    "ScoreMod": "mods",
    "and_masks": "block_mask",
    "attention": "api",
    "compile": "compiling",
    "create_block_mask": "block_mask",
    "create_mask": "block_mask",
    "flex_attention": "flex",
    "load": "kernel",
    "mask_mod": "mods",
    "noop_mask": "block_mask",
    "or_masks": "block_mask",
    "score_mod": "mods",
}


def __getattr__(name: str) -> Any:
    if name in ("masks", "scores"):
        return import_module(f"flexc.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'flexc' has no attribute {name!r}")
    value = getattr(import_module(f"flexc.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
