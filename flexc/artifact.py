"""A compiled kernel as files: what the cache holds, what `Kernel.save` writes and `flexc.load` reads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexc.codegen.arguments import Argument, Source
from flexc.errors import KernelFileError
from flexc.ir.graph import Capture
from flexc.ir.ranges import Within
from flexc.ir.types import Storage

FORMAT = 5
_REGISTERS, _SHARED = 65536, 228 * 1024
"""Registers, and bytes of shared memory, of a multiprocessor of an sm90."""
SOURCE, CUBIN, PTX, TTGIR, METADATA = (
    "kernel.py",
    "kernel.cubin",
    "kernel.ptx",
    "kernel.ttgir",
    "metadata.json",
)


@dataclass(frozen=True, slots=True)
class Resources:
    """`registers` and `spills` (bytes of local memory) a thread; `shared_memory` (bytes), `warps` a block."""

    registers: int
    spills: int
    shared_memory: int
    warps: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """One kernel with all that a launch needs. `key` identifies the spec and plan it was made from."""

    key: str
    description: str
    target: str
    entry: str
    source: str
    cubin: bytes
    ptx: str
    ttgir: str
    shared: int
    num_warps: int
    block_q: int
    block_kv: int
    parameters: int
    resources: Resources
    arguments: tuple[Argument, ...]
    captures: tuple[Capture, ...]
    requires: tuple[Within, ...]
    """What its loop bounds take for granted of captured numbers."""
    explanation: str
    flexc_version: str
    triton_version: str
    head_dim: int = 0
    """Of q and k, and of v below; 0 for a kernel that is no attention forward."""
    head_dim_v: int = 0
    packed_heads: int = 1
    """Query heads whose rows share a tile; where it is above 1, a program computes all of a group."""
    shares_heads: bool = False
    """A multiple of the heads may be launched as programs: they share out the rows of each."""

    @property
    def shares_tiles(self) -> bool:
        """Any number of programs may be launched: each takes tiles until none are left."""
        return any(a.source is Source.COUNTER for a in self.arguments)

    @property
    def beside(self) -> int:
        """How many programs of an sm90 fit a multiprocessor at a time."""
        threads = 32 * self.resources.warps
        registers = _REGISTERS // (-(-self.resources.registers // 8) * 8 * threads)
        return max(1, min(_SHARED // self.resources.shared_memory, registers))

    @property
    def waits(self) -> bool:
        """The kernel may begin before the one before it has ended: it waits for that by itself."""
        return "griddepcontrol.wait" in self.ptx


def write(artifact: Artifact, folder: Path, backward: Sequence[Artifact] = ()) -> None:
    """Write `artifact` as files under `folder`, which appears whole or not at all.

    The kernels of its backward lie in folders of their own below, by entry point.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_files(artifact, draft, [kernel.entry for kernel in backward])
        for kernel in backward:
            (draft / kernel.entry).mkdir()
            _write_files(kernel, draft / kernel.entry)
        draft.chmod(0o755)
        _put_in_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_files(artifact: Artifact, folder: Path, backward: Sequence[str] = ()) -> None:
    (folder / SOURCE).write_text(artifact.source)
    (folder / CUBIN).write_bytes(artifact.cubin)
    (folder / PTX).write_text(artifact.ptx)
    (folder / TTGIR).write_text(artifact.ttgir)
    facts = {**_metadata(artifact), "backward": list(backward)}
    (folder / METADATA).write_text(json.dumps(facts, indent=1) + "\n")


def _put_in_place(draft: Path, folder: Path) -> None:
    if folder.exists() and not (folder / METADATA).is_file() and not _is_empty(folder):
        raise KernelFileError(
            f"{folder} is there and holds no kernel: nothing was written, and nothing deleted",
            hint="save to a new folder",
        )
    try:
        os.replace(draft, folder)
    except (
        OSError
    ):  # a folder of that name is there and not empty: another process was first, or it is replaced
        retired = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        os.replace(folder, retired / "kernel")
        os.replace(draft, folder)
        shutil.rmtree(retired, ignore_errors=True)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _metadata(artifact: Artifact) -> dict[str, Any]:
    facts = asdict(artifact)
    for name in ("source", "cubin", "ptx", "ttgir"):
        del facts[name]
    facts["arguments"] = [{**asdict(a), "source": a.source.value} for a in artifact.arguments]
    facts["captures"] = [{**asdict(c), "storage": c.storage.value} for c in artifact.captures]
    facts["format"] = FORMAT
    facts["checksum"] = _checksum(artifact.source, artifact.cubin)
    return facts


def _checksum(source: str, cubin: bytes) -> str:
    return hashlib.sha256(source.encode() + b"\0" + cubin).hexdigest()


def read_backward(folder: Path) -> tuple[Artifact, ...]:
    """The kernels of the backward beside the kernel in `folder`, in the order of their launch; or none.

    Raises:
        KernelFileError: see `read`.
    """
    try:
        entries = json.loads((folder / METADATA).read_text())["backward"]
    except (OSError, ValueError, KeyError) as error:
        raise _no_kernel(folder, error) from error
    return tuple(read(folder / entry) for entry in entries)


def read(folder: Path) -> Artifact:
    """The kernel in `folder`.

    Raises:
        KernelFileError: a file is missing or damaged, or it was written in another format.
    """
    try:
        facts = json.loads((folder / METADATA).read_text())
        source, ptx, ttgir = ((folder / name).read_text() for name in (SOURCE, PTX, TTGIR))
        cubin = (folder / CUBIN).read_bytes()
        if facts.pop("format") != FORMAT:
            raise KernelFileError(
                f"{folder} was written in another format", hint="precompile it again with this version"
            )
        if facts.pop("checksum") != _checksum(source, cubin):
            raise KernelFileError(
                f"{folder} is damaged: its checksum does not fit", hint="precompile it again"
            )
        del facts["backward"]  # see `read_backward`
        arguments = tuple(Argument(**{**a, "source": Source(a["source"])}) for a in facts.pop("arguments"))
        resources = Resources(**facts.pop("resources"))
        captures = tuple(Capture(**{**c, "storage": Storage(c["storage"])}) for c in facts.pop("captures"))
        requires = tuple(Within(**w) for w in facts.pop("requires"))
        return Artifact(
            **facts,
            source=source,
            cubin=cubin,
            ptx=ptx,
            ttgir=ttgir,
            resources=resources,
            arguments=arguments,
            captures=captures,
            requires=requires,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, KernelFileError):
            raise
        raise _no_kernel(folder, error) from error


def _no_kernel(folder: Path, error: Exception) -> KernelFileError:
    return KernelFileError(f"{folder} holds no kernel: {error}", hint="pass a folder that Kernel.save wrote")
