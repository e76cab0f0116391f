"""Tracing: call the user's function once with traced values, and keep what it read for later calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flexc.errors import FlexcError, UnsupportedOperation
from flexc.frontend import factories, indexing, reductions, shapes, torch_choices, torch_ops
from flexc.frontend.captures import Captures
from flexc.frontend.dispatch import TracingMode
from flexc.frontend.host import Program
from flexc.frontend.owners import root_of
from flexc.frontend.proxy import Traced
from flexc.frontend.relocate import Outline, Pattern, pattern_of, stand_in
from flexc.frontend.signature import ARGUMENTS, check_arity, check_result
from flexc.frontend.source import source_of
from flexc.frontend.span import span_of_traceback
from flexc.frontend.tracer import Slot, Tracer
from flexc.frontend.value import Value, number_storage, told_apart
from flexc.frontend.watch import Checks, Watch
from flexc.ir import build
from flexc.ir.graph import Capture, ModGraph, ModKind
from flexc.ir.ops import Input
from flexc.ir.verify import verify

# Importing these fills the table of operations.
_OPERATIONS = (factories, indexing, reductions, shapes, torch_choices, torch_ops)


_TORCH_REFUSES = re.compile(r"^\w+\(\):? (argument |received an invalid combination of arguments)")


@dataclass(slots=True, eq=False)
class Reads:
    """How to make the values of a trace again: what was read, and the program of captured numbers."""

    watch: Watch
    leaves: tuple[Any, ...]
    program: Program
    guards: tuple[tuple[int, Any], ...]
    slots: tuple[Slot, ...]
    tensors: tuple[tuple[torch.Tensor, torch.dtype, int], ...]
    shapes: tuple[tuple[torch.Tensor, tuple[int, ...]], ...]
    _checks: Checks | None = None
    """Of the watch; made when they are asked for first."""

    @property
    def checks(self) -> Checks:
        """The quick check of what was read."""
        if self._checks is None:
            self._checks = self.watch.compile(self.tensors, self.shapes)
        return self._checks


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced mod: the graph, and the values of its captures by slot at the time of the trace."""

    graph: ModGraph
    values: tuple[Value, ...]
    reads: Reads | None = field(repr=False)
    numbers: tuple[int | float | str, ...] = field(init=False, repr=False)
    """The numbers among the values, equal for equal bits: see `flexc.frontend.value.told_apart`."""

    def __post_init__(self) -> None:
        numbers = tuple([told_apart(x) for x in self.values if not isinstance(x, torch.Tensor)])
        object.__setattr__(self, "numbers", numbers)

    def refreshed(self) -> Trace | None:
        """The trace with the captures' present values: itself if nothing changed, None if it no longer holds.

        It no longer holds when a captured function or object is another one, a tensor has another dtype or
        rank, a number that Python itself needed has another value, or something was read that cannot be
        watched.
        """
        reads = self.reads
        if reads is None:
            return None
        checks = reads._checks or reads.checks  # a property costs a call
        return self if checks.unchanged() else _reread(self, reads)

    def current(self) -> tuple[Value, ...] | None:
        """The values as they are now; None when the mod must be traced again."""
        trace = self.refreshed()
        return None if trace is None else trace.values


def trace(function: Callable[..., Any], kind: ModKind) -> Trace:
    """Traces a mask_mod (`b, h, q_idx, kv_idx` to a boolean) or score_mod (`score, b, h, ...` to a number).

    Raises a TraceError that shows the user's line, or whatever the function itself raises.
    """
    check_arity(function, kind)
    tracer = Tracer()
    captures = Captures(tracer, root_of(function))
    traceable = captures.wrap(function, getattr(function, "__name__", "mod"))[0]
    result = _run(tracer, traceable, kind)
    root = check_result(tracer, result, kind, function)
    graph = ModGraph(kind, root, tuple(tracer.captures), source_of(function), tuple(tracer.reads))
    verify(graph)
    made = _finish(graph.shared(), tracer, captures.watch)
    tracer.forget()
    captures.forget()
    return made


def _run(tracer: Tracer, function: Callable[..., Any], kind: ModKind) -> Any:
    """The result on traced values; what torch's own argument checks refuse is located."""
    try:
        with torch.enable_grad(), TracingMode(tracer):
            return function(*(_argument(tracer, name) for name in ARGUMENTS[kind]))
    except TypeError as error:
        if "__array_ufunc__" in str(error):
            raise UnsupportedOperation(
                "mods cannot use functions of numpy on traced values",
                hint="use torch: the function of the same name, as torch.abs(x) for np.abs(x)",
                span=span_of_traceback(error.__traceback__),
            ) from error
        if isinstance(error, FlexcError) or not _TORCH_REFUSES.search(str(error)):
            raise
        raise UnsupportedOperation(
            str(error).partition("\n")[0].replace("Traced", "Tensor"),
            hint="give torch functions the arguments that they take for tensors",
            span=span_of_traceback(error.__traceback__),
        ) from error


def _argument(tracer: Tracer, name: str) -> Traced:
    which = Input(name)
    dtype = torch.float32 if which is Input.SCORE else torch.int32
    return Traced(tracer, dtype, build.input_(which))


def _finish(graph: ModGraph, tracer: Tracer, watch: Watch) -> Trace:
    leaves = tuple(tracer.leaves)
    done = tracer.program.run(leaves)
    values = _values(tracer.slots, leaves, done)
    if tracer.volatile:
        return Trace(graph, values, None)
    guards = tuple(tracer.guards.items())
    return Trace(graph, values, _reads(watch, leaves, tracer.program, guards, tuple(tracer.slots)))


def _reads(
    watch: Watch,
    leaves: tuple[Any, ...],
    program: Program,
    guards: tuple[tuple[int, Any], ...],
    slots: tuple[Slot, ...],
) -> Reads:
    tensors = tuple([(leaf, leaf.dtype, leaf.ndim) for leaf in leaves if isinstance(leaf, torch.Tensor)])
    shapes_ = tuple([(leaves[leaf], tuple(leaves[leaf].shape)) for leaf in program.sized_leaves])
    return Reads(watch, leaves, program, guards, slots, tensors, shapes_)


def _values(
    slots: list[Slot] | tuple[Slot, ...], leaves: tuple[Any, ...], done: list[Any]
) -> tuple[Value, ...]:
    return tuple([leaves[s.leaf] if s.leaf is not None else done[s.step or 0] for s in slots])


def _reread(old: Trace, reads: Reads) -> Trace | None:
    """The trace with what is in its places now; None where it does not hold."""
    if not (reads.checks.tensors_hold() and reads.checks.contents_hold()):
        return None
    leaves = list(reads.leaves)
    watch = reads.watch.reread(leaves)
    return None if watch is None else _with_leaves(old, reads, watch, tuple(leaves))


def _with_leaves(old: Trace, reads: Reads, watch: Watch, leaves: tuple[Any, ...]) -> Trace | None:
    try:
        done = reads.program.run(leaves)
    except Exception:  # the user's own arithmetic: tracing again raises it at the user's line
        return None
    for step, value in reads.guards:
        if type(done[step]) is not type(value) or done[step] != value:
            return None
    values = _values(reads.slots, leaves, done)
    for capture, value in zip(old.graph.captures, values, strict=True):
        if not _fits(capture, value):
            return None
    return Trace(old.graph, values, _reads(watch, leaves, reads.program, reads.guards, reads.slots))


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A trace without what its function held, for other functions of the same outline."""

    trace: Trace
    pattern: Pattern

    @classmethod
    def of(cls, trace: Trace, outline: Outline) -> Template | None:
        """The template of a trace; None for one that must be made anew each time."""
        reads = trace.reads
        pattern = None if reads is None else pattern_of(reads.watch, outline)
        if reads is None or pattern is None:
            return None
        placed = {place.leaf for place in reads.watch.places()}
        leaves = tuple(stand_in(x) if leaf in placed else x for leaf, x in enumerate(reads.leaves))
        bare = Reads(Watch(), leaves, reads.program, reads.guards, reads.slots, (), ())
        return cls(Trace(trace.graph, (), bare), pattern)

    def relocated(self, outline: Outline) -> Trace | None:
        """The trace of the function of that outline, which has the key of the template's own.

        None where it does not hold for the function.
        """
        reads = self.trace.reads
        assert reads is not None
        leaves = list(reads.leaves)
        watch = self.pattern.read(outline.owners, leaves)
        return None if watch is None else _with_leaves(self.trace, reads, watch, tuple(leaves))


def _fits(capture: Capture, value: Value) -> bool:
    if isinstance(value, torch.Tensor):
        return capture.rank == value.ndim
    storage = number_storage(value)
    return storage is capture.storage
