"""Specs and generated kernels of mods, without compiling them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexc.callspec import unit_strides
from flexc.choice import backward_parts
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import backward_spec
from flexc.codegen.blocks import choose_blocks
from flexc.codegen.design import Design
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.pipeline import lower
from flexc.codegen.target import TARGETS
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.types import Storage
from flexc.resolve import resolve

Mod = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def spec_for_graphs(
    score: Expr | None = None,
    mask: Expr | None = None,
    captures: tuple[Capture, ...] = (),
    *,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    storage: Storage = Storage.BF16,
    **facts: Any,
) -> AttentionSpec:
    """A spec whose q, k and v have one element type."""
    return AttentionSpec(
        score=score,
        mask=mask,
        captures=captures,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        q_storage=storage,
        k_storage=storage,
        v_storage=storage,
        **{"blocks": Blocks.ALL if mask is None else Blocks.MAP, **facts},
    )


def spec_for(mask: Mod | None = None, score: Mod | None = None, **facts: Any) -> AttentionSpec:
    """The spec of mods as `flexc.compile` makes it."""
    mods, values, _ = resolve(score, mask)
    own = {
        "unit_stride": unit_strides(values),
        "blocks": choose_blocks(mods.mask, values, given=False, lengths=None),
    }
    return spec_for_graphs(mods.score, mods.mask, mods.captures, **{**own, **facts})


def generate(
    mask: Mod | None = None,
    score: Mod | None = None,
    target: str = "sm90",
    options: dict[str, object] | None = None,
    design: Design = Design.PORTABLE,
    **facts: Any,
) -> GeneratedKernel:
    """The generated kernel of mods for a target."""
    sources = resolve(score, mask)[0].sources
    spec = spec_for(mask, score, **facts)
    return lower(spec, TARGETS[target], options=options, sources=sources, design=design)


def generate_backward(
    mask: Mod | None = None,
    score: Mod | None = None,
    target: str = "sm90",
    *,
    deterministic: bool = False,
    options: dict[str, object] | None = None,
    hopper: bool = False,
    learned: bool = True,
    **facts: Any,
) -> list[str]:
    """The generated files of a backward; floating captured tensors have gradients if they are `learned`."""
    spec = spec_for(mask, score, **facts)
    slots = tuple(n for n, c in enumerate(spec.captures) if c.is_tensor and c.dtype.is_float and learned)
    values = resolve(score, mask)[1]
    backward = backward_spec(spec, values, None, has_grad_lse=True, slots=slots, deterministic=deterministic)
    sources = resolve(score, mask)[0].sources
    parts = backward_parts(backward, target, tuple((options or {}).items()), hopper=hopper)
    return [
        lower_backward(of, e, TARGETS[target], options=options, sources=sources).source for of, e in parts
    ]


def independent_of_the_machine(source: str) -> str:
    """`source` without this checkout's path and the line numbers of mods in it."""
    source = source.replace(f"{ROOT}/", "")
    return re.sub(r"(?m)^(\w+, \S+\.py):\d+$", r"\1:LINE", source)


def names_in(source: str) -> set[str]:
    """Every name that a generated file binds or reads at its top and in its kernel."""
    tree = ast.parse(source)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for part in tree.body:
        if isinstance(part, ast.FunctionDef) and part.name != "attention_forward":
            continue
        names |= {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        names |= {node.arg for node in ast.walk(part) if isinstance(node, ast.arg)}
    return names
