"""From a spec to a compiled kernel: in this process's table, in the cache on disk, or made now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from flexc._version import __version__
from flexc.artifact import Artifact, Resources
from flexc.codegen.arguments import Argument
from flexc.codegen.design import Design
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.target import MatrixUnit, Target, target_named
from flexc.codegen.tiles import Tiles
from flexc.errors import InternalError, NoFeasiblePlan
from flexc.ir.graph import Capture, ModSource
from flexc.ir.printer import digest, to_text
from flexc.ir.ranges import Within
from flexc.ir.spec import AttentionSpec
from flexc.kernel import Kernel
from flexc.spills import Spares, spills_that_count

if TYPE_CHECKING:
    from flexc.compiler import MachineCode

Options = tuple[tuple[str, object], ...]
Make = Callable[[Mapping[Tiles, str]], GeneratedKernel]
"""Generates a kernel of other tiles than those that proved bad, which it is given with how."""

_built: dict[tuple[AttentionSpec, str, Options, Design], Kernel] = {}
_loaded: dict[str, Kernel] = {}
_lock = Lock()
_STORES = ("st.global", "cp.async.bulk", "red.", "atom.")
"""One of these is in every kernel that writes something."""
_TRIES = 8
"""How many tiles are compiled, at most, in search of some that spill no registers."""
compilations = 0
"""How many kernels this process has compiled; tests count with it."""


def kernel_for(
    spec: AttentionSpec,
    target: str,
    options: Options = (),
    sources: tuple[ModSource, ...] = (),
    design: Design = Design.PORTABLE,
) -> Kernel:
    """The kernel that computes `spec` on `target`; compiled at most once.

    Raises:
        UnknownOption, NoFeasiblePlan, UnsupportedTarget: nothing can be planned.
        InternalError: the generated code did not compile.
    """
    key = (spec, target, options, design)
    found = _built.get(key)
    if found is None:
        with _lock:
            found = _built.get(key)
            if found is None:
                found = _built[key] = _find_or_build(
                    spec, target_named(target), dict(options), sources, design
                )
    return found


def _find_or_build(
    spec: AttentionSpec,
    target: Target,
    options: Mapping[str, object],
    sources: tuple[ModSource, ...],
    design: Design = Design.PORTABLE,
) -> Kernel:
    from flexc.codegen.blocks import ranges_of
    from flexc.codegen.pipeline import lower, plan_key

    ranges = ranges_of(spec)
    same = kernel_digest(spec, plan_key(spec, target, options, design))
    return find_or_build(
        same,
        lambda scratch: build_kernel(
            lambda skip: lower(spec, target, options=options, sources=sources, skip=skip, design=design),
            target,
            spec.describe(),
            spec.captures,
            same,
            scratch,
            requires=() if ranges is None else ranges.requires,
            head_dims=(spec.head_dim, spec.head_dim_v),
            spares=_spares(spec, target, options, design),
        ),
    )


def _spares(spec: AttentionSpec, target: Target, options: Mapping[str, object], design: Design) -> Spares:
    """What may spill: wgmma's tiles of pairs were timed with what they spill; smaller ones are slower."""
    from flexc.codegen.plan import takes_pairs

    if design is not Design.PORTABLE:
        return Spares.OUTSIDE_LOOPS
    if not takes_pairs(spec, target, options.get("precision")):
        return Spares.NONE
    return Spares.ALL if target.matrix_unit is MatrixUnit.WGMMA else Spares.FEW


def find_or_build(key: str, build: Callable[[Path], Artifact]) -> Kernel:
    """The kernel with `key`: loaded, in the cache on disk, or made by `build(scratch folder)`."""
    if key in _loaded:
        return _loaded[key]
    from flexc import cache
    from flexc.compiler import triton_version

    return Kernel(cache.get_or_build(digest(key, generator(), triton_version()), build))


@lru_cache(maxsize=1)
def generator() -> str:
    """Equal for equal generators: a kernel of another version, or of edited templates, is not used again."""
    import flexc.codegen
    import flexc.templates

    texts = [__version__]
    for package in (flexc.codegen, flexc.templates):
        for folder in package.__path__:
            files = sorted(f for f in Path(folder).iterdir() if f.suffix in (".py", ".jinja"))
            texts += [f.name + f.read_text() for f in files]
    return digest(*texts)


def kernel_digest(spec: AttentionSpec, plan_key: str) -> str:
    """Equal for kernels that compute the same in the same way, whatever versions made them."""
    graphs = [to_text(root) if root is not None else "" for root in (spec.score, spec.mask)]
    slots = [f"{c.storage.value}/{c.rank}" for c in spec.captures]
    facts = [
        f"{name}={getattr(spec, name)}"
        for name in AttentionSpec.__dataclass_fields__
        if name not in ("score", "mask", "captures", "unit_stride")
    ]
    return digest(*graphs, *slots, *facts, f"unit_stride={sorted(spec.unit_stride)}", plan_key)


def is_loaded(
    spec: AttentionSpec, target: str, options: Options = (), design: Design = Design.PORTABLE
) -> bool:
    """Whether `flexc.load` brought the kernel that `kernel_for` would give."""
    from flexc.codegen.pipeline import plan_key

    if not _loaded:
        return False
    return kernel_digest(spec, plan_key(spec, target_named(target), dict(options), design)) in _loaded


def register(kernel: Kernel) -> None:
    """Let `kernel_for` use a loaded kernel."""
    with _lock:
        _loaded[kernel.artifact.key] = kernel
        for part in kernel.backward_artifacts:
            _loaded[part.key] = Kernel(part)
        for key in [k for k, v in _built.items() if v.artifact.key == kernel.artifact.key]:
            del _built[key]


def build_kernel(
    make: Make,
    target: Target,
    description: str,
    captures: tuple[Capture, ...],
    key: str,
    scratch: Path,
    *,
    requires: tuple[Within, ...] = (),
    head_dims: tuple[int, int] = (0, 0),
    spares: Spares = Spares.NONE,
) -> Artifact:
    """Compile what `make` generates, and gather all that a launch needs.

    `requires` is what the kernel takes for granted; `head_dims` are those of a forward. Tiles are tried until
    no spilled registers count.
    """
    from flexc.compiler import parameter_count

    resources, generated, code = _best(make, target, scratch, spares)
    return Artifact(
        key=key,
        description=description,
        target=target.name,
        entry=code.name,
        source=generated.source,
        cubin=code.cubin,
        ptx=code.ptx,
        ttgir=code.ttgir,
        shared=code.shared,
        num_warps=code.num_warps,
        block_q=generated.plan.head_rows,
        block_kv=generated.plan.tiles.block_kv,
        parameters=parameter_count(code.ptx, code.name),
        resources=resources,
        arguments=generated.arguments,
        captures=captures,
        requires=requires,
        explanation=_explanation(generated, description),
        flexc_version=__version__,
        triton_version=code.triton_version,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        packed_heads=generated.plan.packed_heads,
        shares_heads=generated.plan.shares_heads,
    )


def _best(
    make: Make, target: Target, scratch: Path, spares: Spares
) -> tuple[Resources, GeneratedKernel, MachineCode]:
    """The first planned kernel that spills nothing where it counts, or the one of a few that spills least."""
    global compilations
    from flexc.compiler import compile_file
    from flexc.toolchain import resources_of

    skip: dict[Tiles, str] = {}
    best: tuple[Resources, GeneratedKernel, MachineCode] | None = None
    least = tries = 0
    while best is None or (least and tries < _TRIES):
        try:
            generated = make(skip)
        except NoFeasiblePlan:
            if best is None:
                raise
            break
        if generated.plan.tiles in skip and best is not None:
            break
        path = scratch / f"{generated.entry}_{len(skip)}.py"
        path.write_text(generated.source)
        compilations += 1
        code = compile_file(path, generated)
        if not any(store in code.ptx for store in _STORES):
            raise InternalError(f"build: the compiler made an empty kernel of {path} for {target.name}")
        problem = _too_large(code, target)
        if problem is None:
            tries += 1
            resources = resources_of(code.cubin, shared=code.shared, warps=code.num_warps)
            spills, problem = spills_that_count(spares, resources, code.cubin)
            if best is None or spills < least:
                least, best = spills, (resources, generated, code)
        skip[generated.plan.tiles] = problem
    return best


def _too_large(code: MachineCode, target: Target) -> str | None:
    if code.shared > target.shared_memory:
        return f"{code.shared} bytes of shared memory"
    if code.tensor_memory > target.tensor_memory:
        return f"{code.tensor_memory} columns of tensor memory"
    return None


def _explanation(generated: GeneratedKernel, description: str) -> str:
    by_value = [a.name for a in generated.arguments if _is_value(a)]
    lines = [description, generated.plan.explain()]
    lines += generated.placement
    lines.append("run-time arguments of the mods: " + (", ".join(by_value) or "none"))
    return "\n".join(lines)


def _is_value(argument: Argument) -> bool:
    from flexc.codegen.arguments import Source

    return argument.source in (Source.CAPTURE, Source.SCALAR)
