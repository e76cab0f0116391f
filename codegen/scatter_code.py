"""A gradient of a captured tensor as functions of a generated file."""

from __future__ import annotations

from typing import NamedTuple

from flexc.codegen.hoisting import Element, Hoisting
from flexc.codegen.scatter import ScatterForm, Sum


class ScatterCode(NamedTuple):
    """A gradient, and the functions of it. `at` says where it goes; None if that is decided in the end."""

    form: ScatterForm
    value: Element
    at: Element | None


def scatter_code(hoisting: Hoisting, scatter: ScatterForm) -> ScatterCode:
    """The functions of a gradient, under names that nothing has yet."""
    name = hoisting.names[scatter.slot]
    value = hoisting.element(hoisting.fresh(f"{name}_grad"), scatter.value, scatter.value)
    return ScatterCode(scatter, value, None if scatter.sum.has_places else where_to(hoisting, scatter))


def where_to(hoisting: Hoisting, scatter: ScatterForm) -> Element:
    """A function of pairs: the element that their gradients go to, and whether there is one."""
    name = hoisting.names[scatter.slot]
    doc = f"Where the gradient of {name} goes, and whether it is there."
    return hoisting.anywhere(hoisting.fresh(f"{name}_at"), [scatter.at, scatter.inside], doc)


def first_place(scatter: ScatterForm) -> str:
    """Where the sums of a head begin: those of rows, or those of distances, from 0 on."""
    if scatter.sum is Sum.ROW:
        return f"{head_of_sums(scatter)} * q_len"
    return f"{head_of_sums(scatter)} * (q_len + kv_len - 1) + kv_len - 1"


def head_of_sums(scatter: ScatterForm) -> str:
    """Which row of sums is a head's."""
    return "(b * q_heads + h).to(tl.int64)" if scatter.by_batch else "h.to(tl.int64)"
