"""Compiles many kernels in parallel processes, and says in a manifest what was made."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from flexc._version import __version__
from flexc.compiling import compile as compile_kernel
from flexc.errors import FlexcError, InternalError
from flexc.modfile import NamedMods, load_mods, load_one

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
    q_len: int | None = None
    """Query rows of the calls that it is for, where they are few, of heads in groups of `group`."""
    group: int = 1

    @property
    def folder(self) -> str:
        """Where the kernel goes, below the output folder."""
        parts = "-backward" * self.backward + "-dropout" * self.dropout
        parts += "-deterministic" * self.deterministic
        parts += "" if self.q_len is None else f"-rows{self.q_len}-group{self.group}"
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
    groups: Sequence[int] = (),
) -> list[Job]:
    """A job for every combination. `FILE.py` without a name stands for all that is decorated in it.

    With `groups`, also those of the kernels for few query rows, of heads in groups of so many.

    Raises:
        ModFileError: see `load_mods`.
    """
    found = [(text.partition(":")[0], named) for text in mods for named in load_mods(text)]
    jobs = []
    for (file, named), target, head_dim, dtype in product(found, targets, head_dims, dtypes):
        usual = Job(
            f"{file}:{named.name}", named.name, target, head_dim, dtype, backward, dropout, deterministic
        )
        jobs.append(usual)
        jobs += [
            replace(usual, q_len=q_len, group=group)
            for group in groups
            for q_len in _few_lengths(usual, named, group)
        ]
    return jobs


def _few_lengths(job: Job, named: NamedMods, group: int) -> tuple[int, ...]:
    """Query lengths of which each has a kernel of its own; none of mods that no kernel can be made of."""
    from flexc.choice import few_lengths
    from flexc.compiling import spec_for
    from flexc.resolve import resolve

    try:
        mods, values, _ = resolve(named.score, named.mask)
        spec = spec_for(mods, values, head_dim=job.head_dim, dtype=DTYPES[job.dtype], dropout=job.dropout)
        return few_lengths("auto", spec, job.target, (), group)
    except FlexcError:  # the job of the usual kernel says why
        return ()


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
            q_len=job.q_len,
            group=job.group,
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
        made,
        key=lambda each: (each.job.mod, each.job.target, each.job.head_dim, each.job.dtype, each.job.folder),
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
