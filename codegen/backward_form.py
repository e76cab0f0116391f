"""The mods of a backward as its kernels compute them: the score, what it does to gradients, and the mask."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.backward_spec import BackwardSpec
from flexc.codegen.hoisting import mask_form, score_form
from flexc.codegen.scatter import ScatterForm, scatter_form
from flexc.ir.adjoint import adjoint
from flexc.ir.build import input_
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op


@dataclass(frozen=True, slots=True)
class Form:
    """Graphs to emit. `score` reads the scaled score; `factor` joins the scale.

    `grad` maps the gradient of the modified score to that of the scaled one; None where it is the same.
    """

    score: Expr | None
    factor: Expr | None
    grad: Expr | None
    mask: Expr | None
    scatters: tuple[ScatterForm, ...] = ()

    @property
    def roots(self) -> list[Expr]:
        """Every graph there is of values that are computed for a pair."""
        graphs = (self.score, self.factor, self.grad, self.mask, *(s.value for s in self.scatters))
        return [graph for graph in graphs if graph is not None]

    @property
    def of_scores(self) -> list[Expr]:
        """Those of the score and its gradients: all but the mask."""
        return [graph for graph in self.roots if graph is not self.mask]

    @property
    def gradients(self) -> list[Expr]:
        """What is computed of gradients once the modified score is there: their values, and where they go."""
        scattered = (graph for s in self.scatters for graph in (s.value, s.at, s.inside))
        return [*scattered] if self.grad is None else [self.grad, *scattered]

    @property
    def factor_is_global(self) -> bool:
        """Whether all heads have one factor, which a literal or a captured number is."""
        return self.factor is None or self.factor.op in (Op.CONST, Op.SCALAR)


def backward_form(backward: BackwardSpec, *, scatters: bool) -> Form:
    """The graphs of a backward, with or without those of the gradients of captured tensors."""
    spec = backward.forward
    score, factor = score_form(spec)
    if factor is not None and _reads(factor, backward.slots):
        score, factor = score_form(spec, fold=False)  # its gradient has to be found
    if score is None:
        return Form(None, None, None, mask_form(spec))
    found = adjoint(score, backward.slots if scatters else ())
    grad = None if found.score_grad is input_(Input.GRAD) else found.score_grad
    forms = tuple(scatter_form(s) for s in found.scatters if s.value.op is not Op.CONST)
    return Form(score, factor, grad, mask_form(spec), forms)


def adds_exactly(backward: BackwardSpec, form: Form, slot: int) -> bool:
    """Whether a captured tensor's gradient is added up in whole numbers, so that no order is another.

    One or two terms an element give the same sum in fp32 in either order.
    """
    scatters = [s for s in form.scatters if s.slot == slot]
    few = len(scatters) <= 2 and all(s.meets_once for s in scatters)
    return backward.deterministic and not few


def sum_type(backward: BackwardSpec, form: Form, slot: int) -> str:
    """Triton's type of what a captured tensor's gradient is added up in: see `adds_exactly`."""
    return "*i64" if adds_exactly(backward, form, slot) else "*fp32"


def has_places(backward: BackwardSpec) -> bool:
    """Whether any gradient of a captured tensor is added up by row or distance first; see `Sum`."""
    return bool(backward.slots) and any(
        s.sum.has_places for s in backward_form(backward, scatters=True).scatters
    )


def _reads(root: Expr, slots: tuple[int, ...]) -> bool:
    return any(node.op is Op.LOAD and node.attr in slots for node in topological(root))
