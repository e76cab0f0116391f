"""Work for other processes that goes wrong in every way; a module of its own, so that they start quickly."""

from __future__ import annotations

import os
import time


def work(job: str) -> str | None:
    """Does what its name says."""
    if job == "raises":
        raise ValueError("a fault\nwith more")
    if job == "ends":
        os._exit(3)
    if job == "hangs":
        time.sleep(600)
    return "no such thing" if job == "refuses" else None
