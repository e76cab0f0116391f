"""Where the tensors of a Hopper forward lie: only the repair of few rows needs to know, TMA loads the others.

Roles on warps of their own would hold it in registers all the time: they read it from shared memory when a
row is lost. A program without roles has its arguments at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.codegen.arguments import Argument
from flexc.codegen.hopper_constants import ELEMENT
from flexc.codegen.hopper_plan import HopperPlan
from flexc.ir.spec import AttentionSpec

_TENSORS = ("q", "k", "v", "out")
_NAMES = (
    *(f"{tensor}_ptr" for tensor in _TENSORS),
    *(f"{tensor}_stride_{axis}" for tensor in _TENSORS for axis in "bhs"),
)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """`held`: what is read from shared memory, and how. `out_at`: what says where the output lies.

    `arguments` are the names of those that are passed on to the repair.
    """

    held: tuple[tuple[str, str], ...]
    out_at: str
    arguments: tuple[str, ...]


def whereabouts_of(spec: AttentionSpec, plan: HopperPlan, arguments: Sequence[Argument]) -> Whereabouts:
    """Those of a plan."""
    names = tuple(a.name for a in arguments)
    if plan.walks:
        return Whereabouts((), "out_ptr, out_stride_b, out_stride_h, out_stride_s", names)
    pointer = f".to(gl.pointer_type({ELEMENT[spec.q_storage]}))"
    held = tuple(
        (name, f"told(where_smem.index({n}))" + (pointer if name.endswith("_ptr") else ""))
        for n, name in enumerate(_NAMES)
    )
    return Whereabouts(held, "where_smem", tuple(name for name in names if name not in _NAMES))
