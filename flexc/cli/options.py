"""Arguments that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import torch
import typer

Mod = Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="A mask or score function, or MASK+SCORE.")]
QLen = Annotated[int, typer.Option("--q-len", min=0, help="Number of queries.")]
KvLen = Annotated[int, typer.Option("--kv-len", min=0, help="Number of keys.")]
Batch = Annotated[int, typer.Option("--b", min=0, help="The batch that is looked at.")]
Head = Annotated[int, typer.Option("--h", min=0, help="The query head that is looked at.")]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Side of a tile.")]
Target = Annotated[str, typer.Option("--target", help="sm80, sm86, sm89, sm90, sm100, sm103 or sm120.")]
HeadDim = Annotated[int, typer.Option("--head-dim", min=1, help="Head dimension of q, k and v.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class Dtype(StrEnum):
    """The element types that kernels are made for."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def torch(self) -> torch.dtype:
        """The dtype of the tensors."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.value]


DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Element type of q, k and v.")]


def split_list(text: str, option: str) -> list[str]:
    """The parts of `a,b,c`; a usage error when there are none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise typer.BadParameter("give one or more, separated by commas", param_hint=option)
    return parts


def split_numbers(text: str, option: str) -> list[int]:
    """The parts of `1,2,3` as numbers; a usage error for anything that is not a positive number."""
    parts = split_list(text, option)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of positive numbers", param_hint=option)
    return [int(part) for part in parts]


def split_dtypes(text: str, option: str) -> list[Dtype]:
    """The parts of `bf16,fp16` as element types; a usage error for one that does not exist."""
    known = {dtype.value: dtype for dtype in Dtype}
    parts = split_list(text, option)
    for part in parts:
        if part not in known:
            raise typer.BadParameter(f"{part!r} is none of {', '.join(known)}", param_hint=option)
    return [known[part] for part in parts]
