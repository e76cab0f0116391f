"""A benchmark as tables: headings, then a row a cell; for the terminal and for Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from flexc.bench.facts import KernelFacts
from flexc.bench.results import Cell, Entry

Rows = list[list[str]]

_OWN = ("flexc", "flexc-deterministic")
_BASIS = "causal"
_HOW = """\
TFLOP/s of the pairs that may attend, of which "share" is the part: the forward has `4 * D` operations a
pair, the backward, timed alone, 2.5 times that. One process; the columns of a row alternate call by call
over three sets of random inputs; medians, by CUDA events, of the device's time alone; everything was
compiled before. Only results within twice plain PyTorch's error against fp64 have a speed. "ratio" is how
many times as fast flexc is, "of peak" the share of the GPU's matrix rate, "host µs" what a warm call in a
row of 20 costs the host. Registers a thread, bytes of spill stores/loads, matrix and TMA instructions in
the code, and shared memory are those of flexc's kernels, joined by + where a call launches several."""


def title(cell: Cell) -> str:
    """What a cell is, in a line."""
    direction = "backward" if cell.backward else "forward"
    sizes = f"D={cell.head_dim}, S={cell.length}, B={cell.batch}, H={cell.heads}, {cell.dtype}"
    return f"{cell.case}, {sizes}, {direction}"


def rows(cells: Sequence[Cell]) -> Rows:
    """Headings, then a row a cell; peers that have no speed in any cell are left out, and so are facts.

    Of flexc: TFLOP/s, their share of the GPU's matrix rate, ms, the host's time, and per kernel of a call,
    joined by +: registers a thread, bytes of spill stores/loads, instructions, KiB of shared memory. Of each
    peer: TFLOP/s and how many times as fast flexc is.
    """
    names = [name for name in _names(cells) if any(_timed(cell, name) is not None for cell in cells)]
    others = [name for name in names if name not in _OWN]
    heads = ["case", "D", "S", "share", *(n for n in names if n in _OWN), "of peak", "ms"]
    for name in others:
        heads += [name, "ratio"]
    heads += ["host µs", "registers", "spills B", "instructions", "shared KiB"]
    table = [heads, *(_row(cell, names, others) for cell in cells)]
    kept = [at for at in range(len(heads)) if any(row[at] for row in table[1:])]
    return [[row[at] for at in kept] for row in table]


def _names(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(entry.peer for cell in cells for entry in cell.entries))


def _timed(cell: Cell, name: str) -> Entry | None:
    entry = cell.entry(name)
    return None if entry is None or entry.timing is None else entry


def _row(cell: Cell, names: Sequence[str], others: Sequence[str]) -> list[str]:
    own = _timed(cell, "flexc")
    row = [cell.case, str(cell.head_dim), f"{cell.length:,}", f"{cell.share:.3f}"]
    row += [_speed(_timed(cell, name)) for name in names if name in _OWN]
    of_peak = None if own is None else own.of_peak
    row += [
        "" if of_peak is None else f"{100 * of_peak:.0f} %",
        "" if own is None or own.timing is None else f"{own.timing.median_ms:.3g}",
    ]
    for name in others:
        ratio = cell.ratio(name)
        row += [_speed(_timed(cell, name)), "" if ratio is None else f"{ratio:.2f}"]
    host_us = None if own is None or own.timing is None else own.timing.host_us
    row.append("" if host_us is None else f"{host_us:.0f}")
    kernels = () if own is None else own.kernels
    return row + [_joined(kernels, fact) for fact in (_registers, _spills, _instructions, _shared)]


def _speed(entry: Entry | None) -> str:
    return "" if entry is None or entry.tflops is None else f"{entry.tflops:.3g}"


def _joined(kernels: Sequence[KernelFacts], fact: Callable[[KernelFacts], str]) -> str:
    return " + ".join(map(fact, kernels))


def _registers(kernel: KernelFacts) -> str:
    return str(kernel.registers)


def _spills(kernel: KernelFacts) -> str:
    if kernel.instructions is None:
        return str(kernel.spills)
    stored, loaded = kernel.instructions.stored, kernel.instructions.loaded
    return f"{stored}/{loaded}" if stored or loaded else "0"


def _instructions(kernel: KernelFacts) -> str:
    if kernel.instructions is None:
        return "?"
    found = dict(kernel.instructions.matrix)
    tma = sum(count for name, count in kernel.instructions.copies.items() if name.startswith("UTMA"))
    if tma:
        found["UTMA"] = tma
    return " ".join(f"{count} {name}" for name, count in found.items()) or "-"


def _shared(kernel: KernelFacts) -> str:
    return f"{kernel.shared_memory / 1024:.0f}"


def notes(cells: Sequence[Cell]) -> list[str]:
    """Why peers have no speed in some cells, a line a reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for entry in cell.entries:
            if entry.note is not None:
                found.setdefault((entry.peer, entry.note), []).append(cell.case)
    return [f"{peer}: {note} [{', '.join(dict.fromkeys(where))}]" for (peer, note), where in found.items()]


def mod_costs(cells: Sequence[Cell]) -> Rows:
    """How fast flexc is with each mod, in percent of causal at the same size."""
    found = {(cell.case, *_size(cell)): entry.tflops for cell in cells if (entry := _timed(cell, "flexc"))}
    sizes = [size for size in dict.fromkeys(map(_size, cells)) if found.get((_BASIS, *size))]
    cases = [case for case in dict.fromkeys(cell.case for cell in cells) if case not in ("none", _BASIS)]
    table = [["", "D", "S", *cases]]
    for size in sizes:
        basis = found[_BASIS, *size] or 1.0
        speeds = [found.get((case, *size)) for case in cases]
        backward, head_dim, length = size
        row = ["backward" if backward else "forward", str(head_dim), f"{length:,}"]
        table.append(row + ["" if speed is None else f"{100 * speed / basis:.0f} %" for speed in speeds])
    return table


def _size(cell: Cell) -> tuple[bool, int, int]:
    return cell.backward, cell.head_dim, cell.length


def spread(cells: Sequence[Cell]) -> str:
    """How far the times of flexc's calls lie apart, in a sentence; empty when there are none."""
    timings = [entry.timing for cell in cells if (entry := _timed(cell, "flexc")) and entry.timing]
    if not timings:
        return ""
    found = sorted((t.high_ms - t.low_ms) / t.median_ms for t in timings)
    return (
        f"The 10th and 90th percentiles of flexc's calls lie {100 * statistics.median(found):.1f} % of the "
        f"median apart in the median cell, {100 * found[-1]:.0f} % in the widest."
    )


def markdown(cells: Sequence[Cell], environment: Mapping[str, str], command: str, date: str) -> str:
    """A section of PERFORMANCE.md: tables, how they were measured, and the command that makes them again."""
    where = ", ".join(f"{name} {value}" for name, value in environment.items())
    parts = [f"Written on {date} by\n\n```\n{command}\n```\n\non {where}.", _HOW]
    for backward in (False, True):
        chosen = [cell for cell in cells if cell.backward is backward]
        if chosen:
            parts.append(f"### {'Backward' if backward else 'Forward'}\n\n{as_markdown(rows(chosen))}")
    costs = mod_costs(cells)
    if len(costs) > 1:
        parts.append(f"### Speed with a mod, in percent of causal's\n\n{as_markdown(costs)}")
    parts.append("\n".join(f"- {line}" for line in [spread(cells), *notes(cells)] if line))
    return "\n\n".join(part for part in parts if part) + "\n"


def as_markdown(table: Rows) -> str:
    """Rows as a table in Markdown."""
    heads, *body = table
    rule = [":--", *["--:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *body))
