"""`flexc doctor`."""

from __future__ import annotations

from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from flexc.cli.options import Json
from flexc.cli.show import console, show_json
from flexc.doctor import Finding, State, diagnose

_STYLE = {State.YES: "green", State.NO: "yellow", State.INFO: "dim"}


def doctor(as_json: Json = False) -> None:
    """What flexc can do on this machine, and why not: versions, GPUs, backends, tools, cache."""
    found = diagnose()
    if as_json:
        show_json([{**asdict(finding), "state": finding.state.value} for finding in found])
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    section = ""
    for finding in found:
        if section and finding.section != section:
            table.add_section()
            table.add_row()
        title = f"[bold]{finding.section}[/]" if finding.section != section else ""
        section = finding.section
        table.add_row(title, escape(finding.name), _state(finding), _detail(finding))
    console.print(table, soft_wrap=not console.is_terminal)


def _state(finding: Finding) -> str:
    return f"[{_STYLE[finding.state]}]{finding.state.value}[/]"


def _detail(finding: Finding) -> str:
    hint = f" [dim]({escape(finding.hint)})[/]" if finding.hint else ""
    return escape(finding.detail) + hint
