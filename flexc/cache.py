"""The kernel cache on disk: content-addressed, safe with many processes, and rebuilt where it is damaged.

`FLEXC_CACHE_DIR` says where it is; otherwise `$XDG_CACHE_HOME/flexc`, or `~/.cache/flexc`. What it holds is
read where it can't be written too; new kernels are then kept for the time of the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from flexc import artifact
from flexc.artifact import Artifact
from flexc.errors import KernelFileError


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached kernel: its key, what it is, its target, and the bytes that its files take."""

    key: str
    description: str
    target: str
    bytes: int
    folder: Path


def path() -> Path:
    """The folder of the cache; it may not exist yet."""
    chosen = os.environ.get("FLEXC_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexc"


def get_or_build(key: str, build: Callable[[Path], Artifact]) -> Artifact:
    """The kernel with `key`, built by `build(scratch folder)` if there is none or its files are damaged.

    Of several processes that want one kernel, one builds it and the others wait for that. Where the cache
    can't be written, one warning says so, and each process builds what it wants.
    """
    root = path()
    found = _read(_folder(root, key))
    if found is not None:
        return found
    if not _is_writable(_folder(root, key).parent):
        root = _for_this_process(root)
    folder = _folder(root, key)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        found = _read(folder)
        if found is not None:
            return found
        # The scratch folder stays when the build fails: the error names a file in it.
        scratch = root / "build" / f"{key}.{os.getpid()}"
        scratch.mkdir(parents=True, exist_ok=True)
        built = build(scratch)
        artifact.write(built, folder)
        shutil.rmtree(scratch, ignore_errors=True)
    return built


def _folder(root: Path, key: str) -> Path:
    return root / "kernels" / key[:2] / key


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, which is made if there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@lru_cache(maxsize=8)
def _for_this_process(root: Path) -> Path:
    """A folder in place of `root`, deleted when the process ends; the first time there is a warning."""
    folder = Path(tempfile.mkdtemp(prefix="flexc-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warnings.warn(
        f"the kernel cache {root} can't be written: kernels are built again by every process; set "
        "FLEXC_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
    return folder


def _read(folder: Path) -> Artifact | None:
    if not folder.is_dir():
        return None
    try:
        return artifact.read(folder)
    except KernelFileError:
        shutil.rmtree(folder, ignore_errors=True)
        return None


def entries() -> Iterator[Entry]:
    """Every kernel in the cache, in the order of their keys; damaged ones are left out."""
    for folder in sorted((path() / "kernels").glob("*/*")):
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        try:
            found = artifact.read(folder)
        except KernelFileError:
            continue
        size = sum(f.stat().st_size for f in folder.iterdir())
        yield Entry(folder.name, found.description, found.target, size, folder)


def clear() -> int:
    """Delete every kernel of the cache; how many there were."""
    count = sum(1 for _ in entries())
    for name in ("kernels", "build"):
        shutil.rmtree(path() / name, ignore_errors=True)
    return count
