"""What the numbers of a benchmark depend on beside the code: the device, its driver, and versions."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path

import torch

from flexc._version import __version__
from flexc.gpu_facts import highest_clock, matrix_rate


def environment() -> dict[str, str]:
    """Each fact by its name."""
    facts = {"flexc": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not torch.cuda.is_available():
        return {"device": platform.processor() or platform.machine(), **facts}
    gpu = torch.cuda.get_device_properties(0)
    clock = highest_clock(0) // 10**6
    return {
        "device": f"{gpu.name}, {gpu.multi_processor_count} SMs",
        "matrix rate": f"{matrix_rate(0) / 1e12:.0f} TFLOP/s at {clock} MHz",
        "driver": _driver(),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        **facts,
    }


def _driver() -> str:
    found = re.search(r"\s(\d{3,}\.[\d.]+)\s", _text(Path("/proc/driver/nvidia/version")))
    return found[1] if found else "unknown"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
