"""`flexc inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from flexc.cli.options import Batch, BlockSize, Dtype, DtypeOption, Head, HeadDim, KvLen, Mod, QLen, Target
from flexc.cli.show import show_code
from flexc.compiling import compile as compile_kernel
from flexc.errors import ModFileError
from flexc.explain import draw_tiles
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.printer import to_text
from flexc.kernel import Kernel
from flexc.modfile import NamedMods, load_one
from flexc.plane import plane
from flexc.resolve import resolve


class Stage(StrEnum):
    """What a mod is on its way to a kernel, in order."""

    TRACE = "trace"
    IR = "ir"
    BLOCKS = "blocks"
    PLAN = "plan"
    SOURCE = "source"
    BACKWARD = "backward"
    TTGIR = "ttgir"
    PTX = "ptx"
    SASS = "sass"


_LANGUAGE = {Stage.SOURCE: "python", Stage.BACKWARD: "python", Stage.PTX: "ptx", Stage.TTGIR: "llvm"}


def inspect(
    mod: Mod,
    stage: Annotated[Stage, typer.Option(help="What to print.")] = Stage.SOURCE,
    target: Target = "sm90",
    head_dim: HeadDim = 128,
    dtype: DtypeOption = Dtype.BF16,
    q_len: QLen = 4096,
    kv_len: KvLen = 4096,
    b: Batch = 0,
    h: Head = 0,
    block_size: BlockSize = 128,
) -> None:
    """Print one stage of a mod on its way to a kernel.

    trace: the graph as traced. ir: simplified, split into score and mask. blocks: the tiles, drawn.
    plan: every decision. source, backward: the generated files. ttgir, ptx, sass: what was made of them.
    """
    named = load_one(mod)
    if stage is Stage.TRACE:
        text = _traced(named)
    elif stage is Stage.IR:
        text = _simplified(named)
    elif stage is Stage.BLOCKS:
        if named.mask is None:
            raise ModFileError(f"{mod} is a score function, which has no blocks", hint="name a mask")
        block_map = plane(named.mask, q_len, kv_len, b=b, h=h).block_map(block_size, block_size)
        text = draw_tiles(block_map)
    else:
        text = _compiled(named, stage, target, head_dim, dtype)
    show_code(text, _LANGUAGE.get(stage, "text"))


def _traced(named: NamedMods) -> str:
    parts = []
    for mod in (named.score, named.mask):
        if mod is not None:
            graph = mod.trace().graph
            parts.append(_graph(graph.kind.value, graph.root, graph.captures))
    return "\n\n".join(parts)


def _simplified(named: NamedMods) -> str:
    mods, _, _ = resolve(named.score, named.mask)
    parts = [
        _graph(name, root, mods.captures)
        for name, root in (("score", mods.score), ("mask", mods.mask))
        if root is not None
    ]
    return "\n\n".join(parts) or "plain attention: the score unchanged, and no mask"


def _graph(title: str, root: Expr, captures: Sequence[Capture]) -> str:
    slots = [
        f"# slot {slot}: {capture.name}, {capture.storage.value}"
        + ("" if capture.rank is None else f" tensor of rank {capture.rank}")
        for slot, capture in enumerate(captures)
    ]
    return "\n".join([f"# {title}", *slots, to_text(root)])


def _compiled(named: NamedMods, stage: Stage, target: str, head_dim: int, dtype: Dtype) -> str:
    kernel = compile_kernel(
        mask_mod=named.mask,
        score_mod=named.score,
        head_dim=head_dim,
        dtype=dtype.torch,
        target=target,
        backward=stage is Stage.BACKWARD,
    )
    return _stage_of(kernel, stage)


def _stage_of(kernel: Kernel, stage: Stage) -> str:
    if stage is Stage.PLAN:
        return kernel.explain()
    if stage is Stage.SOURCE:
        return kernel.source
    if stage is Stage.BACKWARD:
        return kernel.backward_source
    by_entry = {Stage.TTGIR: "ttgir", Stage.PTX: "ptx", Stage.SASS: "sass"}
    texts: dict[str, str] = getattr(kernel, by_entry[stage])
    return "\n".join(texts.values())
