"""Gathers what the file says that adds sums by row or distance to the gradients of captured tensors."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.arguments import Argument
from flexc.codegen.backward_form import adds_exactly, backward_form
from flexc.codegen.backward_header import header
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.hoisting import Hoisting
from flexc.codegen.plan import KernelPlan
from flexc.codegen.preamble import Constant, Preamble
from flexc.codegen.scatter import Sum
from flexc.codegen.scatter_code import head_of_sums, where_to


@dataclass(frozen=True, slots=True)
class _Place:
    """Sums of a scatter, in pieces of Python."""

    sums: str
    pointer: str
    exactly: bool
    by_row: bool
    by_batch: bool
    count: str
    """Rows or distances of a head."""
    head: str
    """Which row of sums is a head's."""
    at: str


@dataclass(frozen=True, slots=True)
class CapturedView(Preamble):
    """Everything that the template reads."""

    arguments: tuple[str, ...]
    head_lines: tuple[str, ...]
    places: tuple[_Place, ...]


def captured_view(
    backward: BackwardSpec, plan: KernelPlan, names: tuple[str, ...], arguments: tuple[Argument, ...]
) -> CapturedView:
    """What the file says of the kernel that takes sums of rows and distances to their elements."""
    form = backward_form(backward, scatters=True)
    placed = [(n, s) for n, s in enumerate(form.scatters) if s.sum.has_places]
    roots = [root for _, s in placed for root in (s.at, s.inside)]
    hoisting = Hoisting(backward.forward, names, roots, {a.name for a in arguments})
    functions = [where_to(hoisting, s) for _, s in placed]
    return CapturedView(
        header=header(backward, Entry.CAPTURED, plan, ()),
        constants=(Constant("BLOCK", plan.tiles.block_q, "rows or distances of a program"),),
        helpers=tuple(sorted(hoisting.helpers.union(*(f.helpers for f in functions)))),
        fast_tanh=plan.fast_tanh,
        functions=tuple(f.function for f in functions),
        arguments=tuple(a.name for a in arguments),
        head_lines=hoisting.head,
        places=tuple(
            _Place(
                sums=f"sums_{n}_ptr",
                pointer=f"{names[s.slot]}_grad_ptr",
                exactly=adds_exactly(backward, form, s.slot),
                by_row=s.sum is Sum.ROW,
                by_batch=s.by_batch,
                count="q_len" if s.sum is Sum.ROW else "(q_len + kv_len - 1)",
                head=head_of_sums(s),
                at=f.call(),
            )
            for (n, s), f in zip(placed, functions, strict=True)
        ),
    )
