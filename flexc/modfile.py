"""`FILE.py:NAME`: how the command line names mask and score functions."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flexc.errors import FlexcError, ModFileError
from flexc.mods import MaskMod, ScoreMod, as_mask_mod, as_score_mod

_MASK_PARAMETERS = 4
_SCORE_PARAMETERS = 5


@dataclass(frozen=True, slots=True, eq=False)
class NamedMods:
    """A mask, a score function, or one of each, and the text that named them."""

    name: str
    mask: MaskMod | None
    score: ScoreMod | None


def load_mods(text: str) -> tuple[NamedMods, ...]:
    """What `FILE.py:NAME` names; `FILE.py:MASK+SCORE` names a pair; `FILE.py` all that is decorated in it.

    Several masks, `FILE.py:MASK+MASK+SCORE`, are put together with `&`. A plain function is a mask when
    it takes four arguments and a score function when it takes five. The file is executed with its own
    folder importable, as `python FILE.py` does (but `__name__` is not `__main__`).

    Raises:
        ModFileError: there is no such file or name, it is no mod, or the file itself raises.
    """
    path_text, _, names = text.partition(":")
    module = _execute(Path(path_text))
    if names:
        return (_named(module, names, path_text),)
    found = [name for name, value in vars(module).items() if isinstance(value, MaskMod | ScoreMod)]
    if not found:
        raise ModFileError(
            f"{path_text} has no decorated mask or score function",
            hint=f"decorate one with @flexc.mask_mod, or name a plain function: {path_text}:NAME",
        )
    return tuple(_named(module, name, path_text) for name in found)


def load_one(text: str) -> NamedMods:
    """What `FILE.py:NAME` names; raises ModFileError when it has no `:NAME` and the file holds several."""
    mods = load_mods(text)
    if len(mods) > 1:
        names = ", ".join(mod.name for mod in mods)
        file = text.removesuffix(":")
        raise ModFileError(f"{file} holds {len(mods)} mods: {names}", hint=f"name one: {file}:{mods[0].name}")
    return mods[0]


def _execute(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModFileError(f"there is no file {path}", hint="write FILE.py:NAME")
    name = f"_flexc_modfile_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ModFileError(f"{path} is no Python file", hint="write FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except FlexcError:
        raise
    except Exception as error:
        raise ModFileError(_raised_in(path, error), hint="the file must import without an error") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _raised_in(path: Path, error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
    line = f":{frames[-1].lineno}" if frames else ""
    return f"{path}{line} raised {type(error).__name__}: {error}"


def _named(module: ModuleType, names: str, path: str) -> NamedMods:
    mask: MaskMod | None = None
    score: ScoreMod | None = None
    for name in names.split("+"):
        mod = _as_mod(_look_up(module, name, path), name)
        if isinstance(mod, MaskMod):
            mask = mod if mask is None else mask & mod
        elif score is None:
            score = mod
        else:
            raise ModFileError(f"{names} names two score functions", hint="name one, and any masks")
    return NamedMods(names, mask, score)


def _look_up(module: ModuleType, name: str, path: str) -> object:
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        near = difflib.get_close_matches(name, public, 1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"write {path}:NAME with a name at the top level of the file"
        )
        raise ModFileError(f"{path} has no {name!r}", hint=hint) from None


def _as_mod(value: object, name: str) -> MaskMod | ScoreMod:
    if isinstance(value, MaskMod | ScoreMod):
        return value
    count = _parameters(value) if callable(value) else None
    if callable(value) and count == _MASK_PARAMETERS:
        return as_mask_mod(value)
    if callable(value) and count == _SCORE_PARAMETERS:
        return as_score_mod(value)
    what = "is no function" if count is None else f"takes {count} argument{'' if count == 1 else 's'}"
    raise ModFileError(
        f"{name} {what}, so it is neither a mask nor a score function",
        hint="a mask takes (b, h, q_idx, kv_idx), a score function (score, b, h, q_idx, kv_idx)",
    )


def _parameters(value: Callable[..., Any]) -> int | None:
    """How many arguments a caller must pass by position."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in by_position and p.default is inspect.Parameter.empty for p in parameters)
