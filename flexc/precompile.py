"""Compiles many kernels in parallel processes, and says in a manifest what was made."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexc._version import __version__
from flexc.compiling import compile as compile_kernel
from flexc.errors import FlexcError, InternalError
from flexc.modfile import load_mods, load_one

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to make. `mod` is `FILE.py:NAME`, which the process that compiles loads by itself."""

    mod: str
    name: str
    target: str
    head_dim: int
    dtype: str
    backward: bool = False
    dropout: bool = False
    deterministic: bool = False

    @property
    def folder(self) -> str:
        """Where the kernel goes, below the output folder."""
        parts = "-backward" * self.backward + "-dropout" * self.dropout
        parts += "-deterministic" * self.deterministic
        return f"{self.name.replace('+', '-')}-{self.target}-d{self.head_dim}-{self.dtype}{parts}"


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a job. `files` are relative to the output folder; `error` is None when it worked."""

    job: Job
    seconds: float
    files: tuple[str, ...] = ()
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None


def plan_jobs(
    mods: Sequence[str],
    targets: Sequence[str],
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    *,
    backward: bool = False,
    dropout: bool = False,
    deterministic: bool = False,
) -> list[Job]:
    """A job for every combination. `FILE.py` without a name stands for all that is decorated in it.

    Raises:
        ModFileError: see `load_mods`.
    """
    found = [(text.partition(":")[0], named.name) for text in mods for named in load_mods(text)]
    return [
        Job(f"{file}:{name}", name, target, head_dim, dtype, backward, dropout, deterministic)
        for file, name in found
        for target in targets
        for head_dim in head_dims
        for dtype in dtypes
    ]


def precompile(jobs: Sequence[Job], folder: Path, *, workers: int) -> Iterator[Made]:
    """Runs the jobs in `workers` processes and yields what was made, as it is done.

    Each kernel lies in its own folder, loadable with `flexc.load`. A job that fails yields its error; the
    others go on. Processes are spawned, not forked: torch's threads do not survive a fork.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(workers, len(jobs))), mp_context=context) as pool:
        futures = [pool.submit(make, job, folder) for job in jobs]
        for future in as_completed(futures):
            yield future.result()


def make(job: Job, folder: Path) -> Made:
    """Compiles one kernel and saves it under `folder`."""
    torch.set_num_threads(1)  # one core a process
    before = time.perf_counter()
    try:
        named = load_one(job.mod)
        kernel = compile_kernel(
            mask_mod=named.mask,
            score_mod=named.score,
            head_dim=job.head_dim,
            dtype=DTYPES[job.dtype],
            target=job.target,
            backward=job.backward,
            dropout=job.dropout,
            deterministic=job.deterministic,
        )
        kernel.save(folder / job.folder)
    except (FlexcError, InternalError, OSError) as error:
        return Made(job, time.perf_counter() - before, error=f"{type(error).__name__}: {error}")
    files = sorted(p.relative_to(folder).as_posix() for p in (folder / job.folder).rglob("*") if p.is_file())
    resources = {entry: asdict(facts) for entry, facts in kernel.resources.items()}
    return Made(job, time.perf_counter() - before, tuple(files), resources)


def write_manifest(made: Sequence[Made], folder: Path) -> Path:
    """Writes `manifest.json`: versions, and of each kernel its job, folder, files, resources or error."""
    ordered = sorted(
        made, key=lambda each: (each.job.mod, each.job.target, each.job.head_dim, each.job.dtype)
    )
    kernels = [
        {
            **asdict(each.job),
            "folder": each.job.folder,
            "files": list(each.files),
            "resources": each.resources,
        }
        | {"seconds": round(each.seconds, 3), "error": each.error}
        for each in ordered
    ]
    path = folder / MANIFEST
    data = {"manifest_version": MANIFEST_VERSION, "flexc": __version__, "kernels": kernels}
    path.write_text(json.dumps(data, indent=2) + "\n")
    return path
