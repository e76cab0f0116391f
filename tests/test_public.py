"""The public names exist, are documented, and cost nothing until they are used."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import flexc

ROOT = Path(__file__).parents[1]

PUBLIC = {
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
}

MASKS = {
    "block_diffusion",
    "causal",
    "chunked",
    "dilated",
    "document",
    "document_from_cu_seqlens",
    "global_tokens",
    "natten2d",
    "natten3d",
    "prefix_lm",
    "sliding_tile_2d",
    "sliding_tile_3d",
    "sliding_window",
    "tree",
}

SCORES = {"alibi", "relative_bias", "softcap", "temperature"}


def test_exported_names() -> None:
    assert set(flexc.__all__) == PUBLIC
    assert set(dir(flexc)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_every_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(flexc, name))


def test_ready_made_mods() -> None:
    for module, names in ((flexc.masks, MASKS), (flexc.scores, SCORES)):
        missing = [name for name in sorted(names) if not inspect.getdoc(getattr(module, name, None))]
        assert not missing, f"{module.__name__} lacks, or does not document: {missing}"


def test_functions_stay_functions_when_modules_are_imported() -> None:
    """A sub-module bound on the package, such as one called `compile`, would hide a function of that name."""
    modules = sorted(path.stem for path in (ROOT / "flexc").glob("*.py") if not path.stem.startswith("__"))
    code = (
        f"import importlib, flexc\nfor name in {modules}: importlib.import_module(f'flexc.{{name}}')\n"
        "print([name for name in flexc.__all__ if type(getattr(flexc, name)).__name__ == 'module'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['masks', 'scores']"


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="flash"):
        _ = flexc.flash


def test_import_is_light() -> None:
    code = (
        "import sys, flexc; "
        "heavy = {'torch', 'triton', 'sympy', 'networkx', 'matplotlib', 'jinja2', 'numpy', 'typer', 'rich'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
