"""What flexc can do on this machine, and why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from flexc._version import __version__

MIN_CAPABILITY = (8, 0)
TRITON_VERSIONS = ((3, 6), (3, 9))
"""The oldest and the newest minor version that is supported."""

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "sympy",
    "networkx",
    "jinja2",
    "matplotlib",
    "flash-attn",
    "transformers",
)


class State(Enum):
    """Whether something can be used here."""

    YES = "yes"
    NO = "no"
    INFO = "-"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `hint` says what to do about a NO."""

    section: str
    name: str
    state: State
    detail: str
    hint: str | None = None


def diagnose() -> tuple[Finding, ...]:
    """Versions, GPUs, backends, compilers and the cache, in the order to show them. Compiles nothing."""
    return (*_versions(), *_gpus(), *_backends(), *_tools(), _cache())


def _versions() -> list[Finding]:
    system = f"{platform.system()} {platform.machine()}"
    found = [
        Finding("versions", "flexc", State.INFO, __version__),
        Finding("versions", "python", State.INFO, f"{platform.python_version()} on {system}"),
    ]
    for package in PACKAGES:
        version = _version_of(package)
        if version is not None:
            found.append(Finding("versions", package, State.INFO, version))
    return found


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        reason = (
            "this torch has no CUDA" if torch.version.cuda is None else "torch finds no usable GPU or driver"
        )
        return [Finding("GPUs", "none", State.INFO, reason)]
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = f"{facts.total_memory / 2**30:.0f} GiB"
        detail = f"{facts.name}, sm{facts.major}{facts.minor}, {facts.multi_processor_count} SMs, {memory}"
        found.append(Finding("GPUs", f"cuda:{index}", State.INFO, f"{detail}, CUDA {torch.version.cuda}"))
    return found


def _backends() -> list[Finding]:
    later = "not in this version"
    return [
        Finding("backends", "cpu", State.YES, "block-sparse, forward and backward"),
        Finding("backends", "reference", State.YES, "dense, for tests"),
        _triton_backend(),
        _hopper_backend(),
        Finding("backends", "blackwell", State.NO, later),
    ]


def _triton_backend() -> Finding:
    def no(detail: str, hint: str) -> Finding:
        return Finding("backends", "triton", State.NO, detail, hint)

    wrong = _wrong_triton()
    if wrong is not None:
        return no(*wrong)
    if not torch.cuda.is_available():
        return no(
            "torch finds no NVIDIA GPU", "install a driver and a CUDA build of torch; kernels compile without"
        )
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return no(f"the GPU is sm{major}{minor}", "the oldest supported generation is sm80")
    return Finding("backends", "triton", State.YES, "forward and backward")


def _hopper_backend() -> Finding:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return Finding("backends", "hopper", State.YES, "forward, 16-bit inputs")
    return Finding("backends", "hopper", State.NO, "no GPU is sm90", "kernels compile without one")


def _wrong_triton() -> tuple[str, str] | None:
    """What is wrong with the installed Triton, and what to do; None when it serves."""
    version = _version_of("triton")
    oldest, newest = TRITON_VERSIONS
    advice = f"pip install 'triton>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}'"
    if version is None:
        return "triton is not installed", advice
    minor = tuple(int(part) for part in version.split(".")[:2])
    if not oldest <= minor <= newest:
        return f"triton {version} is not supported", advice
    return None


def _tools() -> list[Finding]:
    wrong = _wrong_triton()
    compile_ = (
        Finding("tools", "compile", State.YES, "kernels for every target, no GPU needed")
        if wrong is None
        else Finding("tools", "compile", State.NO, *wrong)
    )
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    launcher = (
        Finding("tools", "C compiler", State.YES, compiler)
        if compiler
        else Finding(
            "tools", "C compiler", State.NO, "none found", "Triton builds its launchers with gcc or clang"
        )
    )
    plot = (
        Finding("tools", "plot", State.YES, "matplotlib")
        if importlib.util.find_spec("matplotlib")
        else Finding("tools", "plot", State.NO, "matplotlib is not installed", "pip install 'flexc[plot]'")
    )
    return [compile_, launcher, plot]


def _cache() -> Finding:
    from flexc import cache

    path = Path(cache.path())
    if not path.exists():
        return Finding("cache", "kernels", State.INFO, f"{path} (empty)")
    kind = State.INFO if os.access(path, os.W_OK) else State.NO
    hint = None if kind is State.INFO else "make it writable, or set FLEXC_CACHE_DIR"
    return Finding("cache", "kernels", kind, str(path), hint)
