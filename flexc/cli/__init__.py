"""The command line: one file a command, which does no more than read arguments and show results."""

from __future__ import annotations

from flexc.cli.app import main

__all__ = ["main"]
