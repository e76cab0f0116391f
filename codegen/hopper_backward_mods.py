"""How the Hopper kernels of a backward call the mods of its user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flexc.codegen.backward_form import Form
from flexc.codegen.hoisting import Element, Hoisting
from flexc.codegen.hopper_words import SIGMOID, gluon
from flexc.codegen.preamble import Preamble
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ops import Input
from flexc.ir.place import Placement, place
from flexc.ir.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class ModCalls(Preamble):
    """What a template reads of the mods. Strings are pieces of Python."""

    score_scaled: bool
    score_call: str | None
    score_result: str
    score_scale: str | None
    grad_call: str | None
    mask_call: str | None
    to_log2: str


@dataclass(frozen=True, slots=True)
class CalledMods:
    """The mods of a backward as functions of a tile, and the scale that its scores have, if they have one."""

    form: Form
    score: Element | None
    grad: Element | None
    mask: Element | None
    scale: str | None

    @property
    def elements(self) -> list[Element]:
        """Those that there are."""
        return [e for e in (self.score, self.grad, self.mask) if e is not None]

    @property
    def gradient_reads_score(self) -> bool:
        """Whether the gradient of a score is a function of the score before the mod."""
        return self.form.grad is not None and Input.SCORE in inputs_of(self.form.grad)

    @property
    def score_call(self) -> str | None:
        """What gives the score of a pair."""
        if self.score is None or self.form.score is None:
            return None
        score = "score" if self.gradient_reads_score else "score * score_scale"
        return _as_tile(self.form.score, self.score.call(score=score))

    @property
    def needs_scale(self) -> bool:
        """Whether the kernel has to have the scale by itself."""
        is_read = "score_scale" in (self.score_call or "") or self.gradient_reads_score
        return self.scale is not None and (is_read or self.form.factor is not None)

    def fields(self, **of_mask: str) -> dict[str, Any]:
        """Those of `ModCalls` that are its own; `of_mask` are other names of what the mask reads."""
        return {
            "score_scaled": self.gradient_reads_score,
            "score_call": self.score_call,
            "score_result": "modified" if self.gradient_reads_score else "score",
            "score_scale": gluon([self.scale])[0] if self.scale is not None and self.needs_scale else None,
            "grad_call": None if self.grad is None else self.grad.call(),
            "mask_call": None if self.mask is None else self.mask.call(**of_mask),
            "to_log2": "scale * LOG2E" if self.form.score is None else "LOG2E",
        }


def called_mods(spec: AttentionSpec, form: Form, hoisting: Hoisting) -> CalledMods:
    """The mods of a backward, emitted."""
    score = (
        None if form.score is None else hoisting.element("score_mod", form.score, spec.score or form.score)
    )
    grad = None if form.grad is None else hoisting.element("score_mod_grad", form.grad, form.grad)
    mask = None if form.mask is None else hoisting.element("mask_mod", form.mask, spec.mask or form.mask)
    scale = None
    if form.score is not None:
        scale = "scale" if form.factor is None else hoisting.scale(form.factor)
    return CalledMods(form, score, grad, mask, scale)


def helpers_of(elements: Iterable[Element], lines: Iterable[str], hoisting: Hoisting) -> tuple[str, ...]:
    """The functions that a file has to have for these elements and lines of its own."""
    found, emitted = set(hoisting.helpers), list(lines)
    for element in elements:
        found |= element.helpers
        emitted += [*element.function.statements, element.function.result]
    if any(SIGMOID in line for line in emitted):
        found.add("sigmoid")
    return tuple(sorted(found))


def _as_tile(score: Expr, call: str) -> str:
    """A score that does not read both row and column, or the score itself, is spread over the tile."""
    return call if place(score)[score] is Placement.ELEMENT else f"{call} + zero"
