"""A right kernel whose warps have roles, and little else: what racecheck reports of it is no race.

One warp leaves a number and arrives, the others wait and read it. Reported are the number, unless every
thread arrives by itself (`--every-thread-arrives`), and how Triton tells the warps what to run: see races.py.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tests.ptx_arrivals import of_every_thread


@gluon.jit
def leave(number, there, x_ptr):
    number.store(gl.full([1], 7, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(there.index(0), count=1)


@gluon.jit
def find(number, there, x_ptr):
    mbarrier.wait(there.index(0), 0)
    gl.store(x_ptr, gl.max(number.load(gl.BlockedLayout([1], [32], [4], [0])), 0))


@gluon.jit
def ten_lines(x_ptr):
    number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    there = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(there.index(0), count=1)
    gl.warp_specialize([(find, (number, there, x_ptr)), (leave, (number, there, x_ptr))], [1], [24])


def _made_by_every_thread() -> Any:
    """Kernels in which every thread arrives that another one would arrive for."""
    usual = CUDABackend.make_cubin

    def make_cubin(backend: CUDABackend, ptx: str, *rest: Any) -> bytes:
        made: bytes = usual(backend, of_every_thread(ptx), *rest)
        return made

    return patch.object(CUDABackend, "make_cubin", make_cubin)


def main() -> None:
    """Run it, and say which of its lines hand roles over."""
    each = "--every-thread-arrives" in sys.argv
    x = torch.zeros(1, dtype=torch.int32).cuda()
    knobs.compilation.always_compile = True  # not what the cache has
    with _made_by_every_thread() if each else nullcontext():
        ten_lines[(8,)](x)
    assert int(x) == 7
    lines, first = inspect.getsourcelines(ten_lines.fn)
    of_call = next(n for n, line in enumerate(lines) if "gl.warp_specialize(" in line)
    of_start = next(n for n, line in enumerate(lines) if line.startswith("def "))
    print(f"    hands over: ten_lines {first + of_start} {first + of_call}\nall ran")


if __name__ == "__main__":
    main()
