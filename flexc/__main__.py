"""`python -m flexc`: the command line."""

from __future__ import annotations

from flexc.cli import main

if __name__ == "__main__":
    main()
