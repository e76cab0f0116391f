"""`Kernel`: what `flexc.compile` returns and `flexc.load` reads: source, machine code, resources, launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flexc import artifact as files
from flexc.artifact import Artifact, Resources
from flexc.codegen.arguments import Source
from flexc.errors import KernelFileError, UnsupportedFeature
from flexc.frontend.value import Value
from flexc.toolchain import disassemble

if TYPE_CHECKING:
    import os

    import torch
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from flexc.block_mask import BlockMask
    from flexc.launcher import Launcher


class Kernel:
    """One compiled attention forward, and its backward if it was asked for. Only calling it needs a GPU."""

    def __init__(
        self,
        artifact: Artifact,
        values: Sequence[Value] | None = None,
        backward: Sequence[Artifact] = (),
    ) -> None:
        self._artifact = artifact
        self._backward = tuple(backward)
        self._values = None if values is None else tuple(values)

    def __repr__(self) -> str:
        return f"Kernel({self._artifact.description}, {self.target})"

    @property
    def target(self) -> str:
        """The GPU generation that it runs on, e.g. "sm90"."""
        return self._artifact.target

    @property
    def source(self) -> str:
        """The generated Python file: complete, and importable by itself."""
        return self._artifact.source

    @property
    def backward_source(self) -> str:
        """The generated backward: the files of its kernels, one after another, in the order of their launch.

        Raises:
            UnsupportedFeature: the kernel was made without its backward.
        """
        if not self._backward:
            raise UnsupportedFeature(
                "this kernel was made without its backward", hint="flexc.compile(..., backward=True)"
            )
        return "\n\n".join(f"# {a.entry}.py\n{a.source}" for a in self._backward)

    @property
    def ptx(self) -> dict[str, str]:
        """The PTX, by entry point."""
        return {a.entry: a.ptx for a in self._artifacts}

    @property
    def ttgir(self) -> dict[str, str]:
        """Triton's GPU dialect, by entry point."""
        return {a.entry: a.ttgir for a in self._artifacts}

    @cached_property
    def sass(self) -> dict[str, str]:
        """The machine code as text, by entry point.

        Raises:
            BackendUnavailable: nvdisasm, which Triton brings, is missing.
        """
        return {a.entry: disassemble(a.cubin) for a in self._artifacts}

    @property
    def resources(self) -> dict[str, Resources]:
        """Registers a thread, spilled bytes, and shared memory, by entry point."""
        return {a.entry: a.resources for a in self._artifacts}

    def explain(self) -> str:
        """Every decision with its reason, one a line."""
        return "\n\n".join(a.explanation for a in self._artifacts)

    @property
    def _artifacts(self) -> tuple[Artifact, ...]:
        return (self._artifact, *self._backward)

    @cached_property
    def returns_lse(self) -> bool:
        """Whether it also writes the log-sum-exp."""
        return any(a.source is Source.LSE for a in self._artifact.arguments)

    @property
    def artifact(self) -> Artifact:
        """The forward kernel as data."""
        return self._artifact

    @property
    def backward_artifacts(self) -> tuple[Artifact, ...]:
        """The kernels of the backward as data, in the order of their launch; none if it was not asked for."""
        return self._backward

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write source, machine code and metadata as files in the folder `path`, all or nothing."""
        files.write(self._artifact, Path(path), self._backward)

    @cached_property
    def launcher(self) -> Launcher:
        """Launches it on the current device."""
        from flexc.launcher import Launcher

        return Launcher(self._artifact)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        block_mask: BlockMask | TorchBlockMask | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        captures: Mapping[str, Value] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run this kernel on q (B, Hq, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) of its dtypes.

        A kernel that visits the blocks of a map, see `explain()`, needs `block_mask`. A loaded kernel needs
        what its mods captured, by name; one made with `dropout=True`, a `dropout_p` above 0.
        Autograd records nothing: to train, call `flexc.attention`, which takes this kernel and its backward.

        Returns:
            out (B, Hq, L, Dv), and lse (B, Hq, L) or None where the kernel was made without it.

        Raises:
            FlexcError: tensors, captures or a block mask that it can't serve.
        """
        from flexc.check import check_dropout, check_scale
        from flexc.direct import run_kernel

        values = self._bound(captures)
        block_map = None
        if block_mask is not None:
            from flexc.block_mask import as_block_mask

            block_map = as_block_mask(block_mask).block_map
        return run_kernel(
            self,
            q,
            k,
            v,
            values=values,
            block_map=block_map,
            scale=check_scale(scale, self._artifact.head_dim),
            sinks=sinks,
            dropout_p=check_dropout(dropout_p),
        )

    def _bound(self, captures: Mapping[str, Value] | None) -> tuple[Value, ...]:
        names = [c.name for c in self._artifact.captures]
        if captures is None and self._values is not None:
            return self._values
        given = dict(captures or {})
        missing, unknown = [n for n in names if n not in given], [n for n in given if n not in names]
        if missing or unknown:
            raise KernelFileError(
                f"the kernel's mods captured {names}; missing {missing}, unknown {unknown}",
                hint="pass captures={name: value} for each of them",
            )
        return tuple(given[n] for n in names)


def load(path: str | os.PathLike[str]) -> Kernel:
    """The kernel that `Kernel.save` or `flexc precompile` wrote into the folder `path`. Nothing is compiled.

    From then on `flexc.attention` uses it for calls that it fits, in this process.

    Raises:
        KernelFileError: the folder holds no kernel, or a damaged one.
    """
    from flexc.build import register

    kernel = Kernel(files.read(Path(path)), backward=files.read_backward(Path(path)))
    register(kernel)
    return kernel
