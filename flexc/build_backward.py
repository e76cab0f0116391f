"""From the spec of a backward to its compiled kernels: as `build` does for a forward."""

from __future__ import annotations

from threading import Lock

from flexc.build import Options, build_kernel, find_or_build, kernel_digest
from flexc.codegen.backward_plan import lower_backward, make_backward_plan
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.backward_tiles import is_timed_single
from flexc.codegen.target import Target, target_named
from flexc.ir.graph import ModSource
from flexc.ir.printer import digest
from flexc.kernel import Kernel
from flexc.spills import Spares

_built: dict[tuple[BackwardSpec, Entry, str, Options], Kernel] = {}
_lock = Lock()


def backward_kernel_for(
    backward: BackwardSpec,
    entry: Entry,
    target: str,
    options: Options = (),
    sources: tuple[ModSource, ...] = (),
) -> Kernel:
    """One kernel of a backward on `target`; compiled at most once.

    Raises:
        UnknownOption, NoFeasiblePlan, UnsupportedTarget: nothing can be planned.
        InternalError: the generated code did not compile.
    """
    key = (backward, entry, target, options)
    found = _built.get(key)
    if found is None:
        with _lock:
            found = _built.get(key)
            if found is None:
                found = _built[key] = _find_or_build(backward, entry, target_named(target), options, sources)
    return found


def _find_or_build(
    backward: BackwardSpec, entry: Entry, target: Target, options: Options, sources: tuple[ModSource, ...]
) -> Kernel:
    chosen, ranges = dict(options), backward.ranges(entry)
    same = backward_digest(backward, entry, make_backward_plan(backward, entry, target, chosen).key())
    return find_or_build(
        same,
        lambda scratch: build_kernel(
            lambda skip: lower_backward(backward, entry, target, options=chosen, sources=sources, skip=skip),
            target,
            backward.describe(),
            backward.forward.captures,
            same,
            scratch,
            requires=() if ranges is None else ranges.requires,
            spares=_spares(backward, entry, target),
        ),
    )


def _spares(backward: BackwardSpec, entry: Entry, target: Target) -> Spares:
    if entry in (Entry.HOPPER, Entry.HOPPER_Q):
        return Spares.SCALARS
    return Spares.ALL if is_timed_single(backward, target) else Spares.FEW


def backward_digest(backward: BackwardSpec, entry: Entry, plan_key: str) -> str:
    """Equal for kernels that compute the same in the same way, whatever versions made them."""
    facts = [
        f"{name}={getattr(backward, name)}" for name in BackwardSpec.__dataclass_fields__ if name != "forward"
    ]
    return digest(kernel_digest(backward.forward, plan_key), entry.value, *facts)
