"""Gradients of captured tensors that a Hopper backward adds up, and which it leaves.

A Hopper backward takes delta, which it subtracts from the gradients of a row, from the rounded output. So
these do not add up to zero, and a gradient that a whole row shares adds up what they are off by. That of
single keys or distances does not. Of what is one for a head, the error is found and taken out in the end; a
bias that all distant keys share is left to the portable kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.codegen.backward_form import Form, adds_exactly, backward_form
from flexc.codegen.backward_spec import BackwardSpec
from flexc.codegen.scatter import ScatterForm, Sum
from flexc.codegen.scatter_code import ScatterCode, first_place
from flexc.ir.affine import affine_forms
from flexc.ir.build import input_
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ops import Input


@dataclass(frozen=True, slots=True)
class HopperScatter:
    """A gradient of a captured tensor, in pieces of Python. `sum` is a `Sum`."""

    name: str
    pointer: str
    sum: str
    keeps_sum: bool
    exactly: bool
    """Whether it is added up in whole numbers: see `adds_exactly`."""
    is_own: bool
    """Whether it is that of the modified score itself."""
    value: str
    weight: str
    """Its derivative by the score, times a weight; and where sums of these by row go, of one for a head."""
    weights: str
    at: str
    """A call that gives the element of a key and whether it exists; or, of sums by distance, where 0 is."""


def hopper_scatters(
    backward: BackwardSpec,
    form: Form,
    codes: Sequence[ScatterCode],
    names: Sequence[str],
    fresh: Sequence[str],
) -> tuple[HopperScatter, ...]:
    """What the template says of each; `fresh` are the names of their sums."""
    return tuple(
        HopperScatter(
            name=name,
            pointer=f"sums_{n}_ptr" if code.at is None else f"{names[code.form.slot]}_grad_ptr",
            sum=code.form.sum.value,
            keeps_sum=code.form.sum in (Sum.COLUMN, Sum.HEAD),
            exactly=adds_exactly(backward, form, code.form.slot),
            is_own=code.form.value is input_(Input.GRAD),
            value=code.value.call(q_idx="q_there"),
            weight=code.value.call(q_idx="q_there", grad="p"),
            weights=f"weights_{n}_ptr",
            at=first_place(code.form).replace("tl.", "gl.")
            if code.at is None
            else code.at.call(kv_idx="key"),
        )
        for n, (code, name) in enumerate(zip(codes, fresh, strict=True))
    )


def why_no_gradients(backward: BackwardSpec) -> str | None:
    """Why a Hopper kernel can't add up the gradients of the captured tensors; None if it can."""
    if not backward.slots:
        return None
    form = backward_form(backward, scatters=True)
    if not form.scatters:
        return None
    if form.grad is not None or form.factor is not None:
        return "gradients of captured tensors are wanted, and the score is not added to only"
    if backward.deterministic and any(s.sum is Sum.HEAD for s in form.scatters):
        return "captured tensors want gradients of heads, and deterministic ones"
    return next((why for why in (_why_not(s) for s in form.scatters) if why is not None), None)


def _why_not(scatter: ScatterForm) -> str | None:
    if Input.SCORE in inputs_of(scatter.value):
        return "the gradient of a captured tensor depends on the score"
    if scatter.sum is Sum.DIAGONAL:
        return None
    if scatter.sum is Sum.HEAD and not scatter.reads_values:
        return None
    if scatter.sum is Sum.COLUMN and any(_is_one_a_key(index) for index in scatter.indices):
        return None
    return "the gradient of a captured tensor is not one of heads, single keys or distances"


def _is_one_a_key(index: Expr) -> bool:
    """Whether no two keys have the same `index`."""
    key = input_(Input.KV_IDX)
    terms = dict(affine_forms(index)[index].terms)
    return key in terms and not any(Input.KV_IDX in inputs_of(atom) for atom in terms if atom is not key)
