"""Gathers what the small files of a backward say, whose programs read rows and walk nothing."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.arguments import Argument
from flexc.codegen.backward_form import backward_form
from flexc.codegen.backward_header import PADDED_TO, header
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.hoisting import Hoisting
from flexc.codegen.hopper_backward_dims import dims, is_apart, is_in_parts
from flexc.codegen.plan import KernelPlan
from flexc.codegen.preamble import LOG2E, Constant, Preamble


@dataclass(frozen=True, slots=True)
class RowsView(Preamble):
    """Everything that the template of the rows' kernel reads."""

    arguments: tuple[str, ...]
    out_mask: str
    has_grad_lse: bool
    sinks: bool
    clears_sums: bool
    clears_in_parts: bool
    """In blocks of columns that are powers of two."""
    clears_lost: bool


@dataclass(frozen=True, slots=True)
class PairsView(Preamble):
    """Everything that the template of the kernel reads that makes pairs of fp16 numbers."""

    arguments: tuple[str, ...]
    pairs: bool = True


@dataclass(frozen=True, slots=True)
class SumsView(Preamble):
    """Everything that the template of the kernel reads that finishes dQ."""

    arguments: tuple[str, ...]
    head_lines: tuple[str, ...]
    scale: str | None
    dim: str
    q_mask: str


def rows_view(backward: BackwardSpec, plan: KernelPlan, arguments: tuple[Argument, ...]) -> RowsView:
    """What the file says of the kernel that finds delta and shift."""
    spec = backward.forward
    padded = plan.padded_dim_v != spec.head_dim_v
    constants = [
        Constant("BLOCK_Q", plan.tiles.block_q, "query rows of a program"),
        Constant("PADDED_DIM_V", plan.padded_dim_v, "head dimension of v, to a power of two"),
    ]
    if padded:
        constants.append(Constant("HEAD_DIM_V", spec.head_dim_v, "of which these exist"))
    clears = backward.clears_sums and not is_apart(backward) and not backward.stores_first
    if clears:
        constants.append(Constant("WIDTH", dims(backward)[0], "dimensions of a row of the sums that dQ is"))
    constants += [PADDED_TO, LOG2E]
    return RowsView(
        header=header(backward, Entry.ROWS, plan, ()),
        constants=tuple(constants),
        helpers=(),
        fast_tanh=False,
        functions=(),
        arguments=tuple(a.name for a in arguments),
        out_mask="in_rows[:, None]" + (" & (dims_v < HEAD_DIM_V)[None, :]" if padded else ""),
        has_grad_lse=backward.has_grad_lse,
        sinks=spec.has_sinks,
        clears_sums=clears,
        clears_in_parts=clears and is_in_parts(backward),
        clears_lost=backward.clears_sums and spec.mask is not None,
        starts_early=backward.clears_sums and plan.target.has_early_starts,
    )


def pairs_view(backward: BackwardSpec, plan: KernelPlan, arguments: tuple[Argument, ...]) -> PairsView:
    """What the file says of the kernel that makes pairs of fp16 numbers."""
    spec = backward.forward
    return PairsView(
        header=header(backward, Entry.PAIRS, plan, ()),
        constants=(
            Constant("BLOCK_Q", plan.tiles.block_q, "rows of a program"),
            Constant("PADDED_DIM", plan.padded_dim, "head dimension of q and k, to a power of two"),
            Constant("PADDED_DIM_V", plan.padded_dim_v, "head dimension of v, to a power of two"),
            Constant("HEAD_DIM", spec.head_dim, "of which these exist"),
            Constant("HEAD_DIM_V", spec.head_dim_v, "of which these exist"),
            PADDED_TO,
        ),
        helpers=(),
        fast_tanh=False,
        functions=(),
        arguments=tuple(a.name for a in arguments),
    )


def sums_view(
    backward: BackwardSpec, plan: KernelPlan, names: tuple[str, ...], arguments: tuple[Argument, ...]
) -> SumsView:
    """What the file says of the kernel that finishes dQ."""
    spec = backward.forward
    form = backward_form(backward, scatters=False)
    factor = form.factor if form.factor_is_global else None
    hoisting = Hoisting(spec, names, [] if factor is None else [factor], {a.name for a in arguments})
    scale: str | None = "scale"
    if form.factor is not None:
        scale = hoisting.scale(factor) if factor is not None else None
    padded = plan.padded_dim != spec.head_dim
    constants = [
        Constant("BLOCK_Q", plan.tiles.block_q, "query rows of a program"),
        Constant("PADDED_DIM", plan.padded_dim, "head dimension of q, to a power of two"),
    ]
    if padded:
        constants.append(Constant("HEAD_DIM", spec.head_dim, "of which these exist"))
    return SumsView(
        header=header(backward, Entry.Q_SUMS, plan, ()),
        constants=(*constants, PADDED_TO),
        helpers=tuple(sorted(hoisting.helpers)),
        fast_tanh=plan.fast_tanh,
        functions=(),
        arguments=tuple(a.name for a in arguments),
        head_lines=hoisting.head,
        scale=scale,
        dim="HEAD_DIM" if padded else "PADDED_DIM",
        q_mask="in_rows[:, None]" + (" & (dims < HEAD_DIM)[None, :]" if padded else ""),
    )
