"""`flexc plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexc.cli.options import Batch, BlockSize, Head, KvLen, Mod, QLen
from flexc.cli.show import console
from flexc.errors import ModFileError
from flexc.modfile import load_one
from flexc.plot import plot_mask


def plot(
    mod: Mod,
    q_len: QLen = 512,
    kv_len: KvLen = 512,
    output: Annotated[Path, typer.Option("-o", "--output", help="PNG, SVG or PDF, by its ending.")] = Path(
        "mask.png"
    ),
    blocks: Annotated[bool, typer.Option("--blocks", help="Draw empty, partial and full tiles.")] = False,
    b: Batch = 0,
    h: Head = 0,
    block_size: BlockSize = 128,
) -> None:
    """Draw a mask, or with --blocks its tiles. A long mask is drawn by its tiles."""
    named = load_one(mod)
    if named.mask is None:
        raise ModFileError(f"{mod} is a score function; a picture shows a mask", hint="name a mask")
    figure = plot_mask(named.mask, q_len, kv_len, b=b, h=h, block=blocks, block_size=block_size)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="-o") from error
    console.print(f"wrote {output}", markup=False, highlight=False, soft_wrap=True)
