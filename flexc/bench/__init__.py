"""Times flexc beside its peers: in one process, in turns, the error of each result beside its speed."""

from __future__ import annotations
