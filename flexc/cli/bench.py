"""`flexc bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from flexc.bench.cases import CASES, Case, Problem, make_case
from flexc.bench.peers import PEERS, Peer
from flexc.bench.run import Cell, Entry, choose_peers, environment, problems, run_cell, to_json
from flexc.cli.options import Dtype, DtypeOption, Json, split_list, split_numbers
from flexc.cli.show import console, errors, show_json, show_text
from flexc.modfile import NamedMods, load_one

_BASELINE = "torch-flex"
_TITLE = {False: "forward, TFLOP/s (ms)", True: "backward, TFLOP/s (ms)"}


def bench(
    mod: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:NAME]", help="Your own mods instead of --cases.")
    ] = None,
    cases: Annotated[str, typer.Option(help=f"Any of {','.join(CASES)}.")] = ",".join(CASES),
    lengths: Annotated[str | None, typer.Option(help="[default: 4096,16384; on a CPU 1024]")] = None,
    head_dims: Annotated[str, typer.Option(help="Head dimensions.")] = "64,128",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Batch x length. [default: the longest length]")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Heads x head dim. [default: 2048; on a CPU 256]")
    ] = None,
    dtype: DtypeOption = Dtype.BF16,
    peers: Annotated[
        str, typer.Option(help=f"Any of {','.join(p.name for p in PEERS)}. [default: all]")
    ] = "",
    backward: Annotated[bool, typer.Option("--backward", help="Time the backward alone.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="Timed calls of each peer, in turns.")] = 30,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
) -> None:
    """Time flexc beside every peer that is installed, in one run, after checking each result against fp64.

    TFLOP/s count only the pairs that may attend. A wrong result gets no speed: the output, or with
    --backward the gradient of q.
    """
    on_gpu = torch.cuda.is_available()
    sizes = split_numbers(lengths or ("4096,16384" if on_gpu else "1024"), "--lengths")
    grid = problems(
        lengths=sizes,
        head_dims=split_numbers(head_dims, "--head-dims"),
        tokens=tokens or max(sizes),
        hidden=hidden or (2048 if on_gpu else 256),
        dtype=dtype.torch,
    )
    chosen = choose_peers(split_list(peers, "--peers") if peers else [])
    own = None if mod is None else load_one(mod)
    names = split_list(cases, "--cases")
    cells = []
    for cell in _run(grid, names, own, chosen, rounds, backward):
        cells.append(cell)
        errors.print(f"[dim]{escape(_title(cell))}[/]", highlight=False)
    if as_json:
        show_json(to_json(cells, {"rounds": rounds, "backward": backward, "cases": [mod] if mod else names}))
        return
    where = ", ".join(f"{name} {value}" for name, value in environment().items())
    rows = _rows(cells, chosen)
    if markdown:
        show_text(f"{where}; {_TITLE[backward]}\n\n{_markdown(rows)}")
        return
    console.print(where, style="dim")
    console.print(_table(rows, _TITLE[backward]))
    _print_notes(cells)


def _run(
    grid: Iterator[Problem],
    names: Sequence[str],
    own: NamedMods | None,
    peers: Sequence[Peer],
    rounds: int,
    backward: bool,
) -> Iterator[Cell]:
    for problem in grid:
        cases = [make_case(name, problem) for name in names] if own is None else [_own_case(own)]
        for case in cases:
            yield run_cell(case, problem, peers=peers, rounds=rounds, backward=backward)


def _own_case(own: NamedMods) -> Case:
    return Case(own.name, mask=own.mask, score=own.score, per_batch=True, per_head=True)


def _title(cell: Cell) -> str:
    return f"{cell.case}, D={cell.head_dim}, S={cell.length}, B={cell.batch}, H={cell.heads}, {cell.dtype}"


def _rows(cells: Sequence[Cell], peers: Sequence[Peer]) -> list[list[str]]:
    """Headings, then a row a cell; peers that have no speed in any cell are left out."""
    names = [peer.name for peer in peers if any(_has_speed(cell, peer.name) for cell in cells)]
    compared = [_BASELINE] if _BASELINE in names else []
    ratios = [f"flexc / {name}" for name in compared]
    rows = [["case", "D", "S", "share", *names, *ratios, "host µs"]]
    for cell in cells:
        own = cell.entry("flexc")
        rows.append(
            [
                cell.case,
                str(cell.head_dim),
                str(cell.length),
                f"{cell.share:.3f}",
                *(_speed(cell.entry(name)) for name in names),
                *(_ratio(cell, name) for name in compared),
                "" if own is None or own.timing is None else f"{own.timing.host_us:.0f}",
            ]
        )
    return rows


def _ratio(cell: Cell, peer: str) -> str:
    ratio = cell.ratio(peer)
    return "" if ratio is None else f"{ratio:.2f} x"


def _has_speed(cell: Cell, peer: str) -> bool:
    entry = cell.entry(peer)
    return entry is not None and entry.timing is not None


def _table(rows: Sequence[Sequence[str]], title: str) -> Table:
    headings, *cells = rows
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in cells:
        table.add_row(*map(escape, row))
    return table


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    headings, *cells = rows
    rule = [":--", *["--:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *cells))


def _speed(entry: Entry | None) -> str:
    if entry is None or entry.timing is None or entry.tflops is None:
        return "-"
    return f"{entry.tflops:.3g} ({entry.timing.median_ms:.3g})"


def _print_notes(cells: Sequence[Cell]) -> None:
    notes: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for entry in cell.entries:
            if entry.note is not None:
                notes.setdefault((entry.peer, entry.note), []).append(cell.case)
    for (peer, note), where in notes.items():
        console.print(f"{peer}: {note} [{', '.join(dict.fromkeys(where))}]", markup=False, style="dim")
