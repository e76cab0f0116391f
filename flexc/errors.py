"""Every exception that flexc raises on purpose.

FlexcError                     the user can act on it; each class is one kind of mistake
├── TraceError                 a mod could not be traced; has the user's line and columns
└── ...
InternalError                  a fault of ours; names the stage and the generated file and line

Each FlexcError also derives from the builtin that fits, so `except ValueError` works.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A range of columns (0-based, end exclusive) on a line (1-based) of a user's file."""

    file: str
    line: int
    column: int
    end_column: int
    function: str

    def render(self) -> str:
        """The line with carets under the columns, as compilers show it."""
        text = linecache.getline(self.file, self.line).rstrip("\n")
        gutter = len(str(self.line))
        head = f"{' ' * gutter}--> {self.file}:{self.line}:{self.column + 1} in {self.function}"
        if not text:
            return head
        carets = " " * self.column + "^" * max(1, min(self.end_column, len(text)) - self.column)
        bar = " " * gutter + " |"
        return f"{head}\n{bar}\n{self.line} | {text}\n{bar} {carets}"


class FlexcError(Exception):
    """Base of all errors that the user can act on.

    `span` is where in the user's code, if that is known; `hint` is what to write instead.
    """

    def __init__(self, message: str, *, hint: str | None = None, span: Span | None = None) -> None:
        super().__init__(message, hint, span)
        self.message = message
        self.hint = hint
        self.span = span

    def __str__(self) -> str:
        parts = [self.message]
        if self.span is not None:
            parts.append(self.span.render())
        if self.hint is not None:
            parts.append(f"  = help: {self.hint}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.message, self.hint, self.span)


def _restore(cls: type[FlexcError], message: str, hint: str | None, span: Span | None) -> FlexcError:
    return cls(message, hint=hint, span=span)


class InternalError(Exception):
    """A fault of flexc itself: please report it with this text."""


class ShapeMismatch(FlexcError, ValueError):
    """Shapes of tensors that do not fit each other."""


class DeviceMismatch(FlexcError, ValueError):
    """Tensors on different devices."""


class UnsupportedDtype(FlexcError, TypeError):
    """An element type that the call can't use, or a mix of them."""


class UnsupportedHeadDim(FlexcError, ValueError):
    """A head dimension outside 1 to 512."""


class UnsupportedFeature(FlexcError, NotImplementedError):
    """Something that a backend, or this version, does not do."""


class UnknownOption(FlexcError, ValueError):
    """An option or the name of a backend that does not exist, or a value it can't have."""


class BlockMaskMismatch(FlexcError, ValueError):
    """A block mask made for other lengths, batches or heads than the tensors have."""


class OutsideClosedForm(FlexcError, ValueError):
    """A compiled kernel's loop bounds do not hold for these captured numbers or lengths."""


class LayoutMismatch(FlexcError, ValueError):
    """A compiled kernel can't read tensors that lie in memory like this."""


class NotDifferentiable(FlexcError, NotImplementedError):
    """A gradient was asked for where this version has none."""


class UnsupportedTarget(FlexcError, ValueError):
    """A GPU generation that flexc has no kernels for."""


class NoFeasiblePlan(FlexcError, ValueError):
    """No tile sizes fit the target; the message lists what was tried."""


class BackendUnavailable(FlexcError, RuntimeError):
    """A backend that can't run here: no GPU, no driver, or a package is missing."""


class KernelFileError(FlexcError, ValueError):
    """A saved kernel that can't be read, or a place where none can be saved."""


class ModFileError(FlexcError, ValueError):
    """`FILE.py:NAME` names no file, no object in it, or something that is no mask or score function."""


class MissingPackage(FlexcError, ImportError):
    """An optional package that this function needs is not installed."""


class TraceError(FlexcError):
    """A mod could not be traced. Base class; `span` is the user's line and columns."""


class BranchOnTracedValue(TraceError, TypeError):
    """Python control flow (`if`, `and`, `not`, `in`, `min`, `while`) asked a traced value for its truth."""


class ConvertTracedValue(TraceError, TypeError):
    """A traced value was turned into a Python number or array: `int(q_idx)`, `.item()`, `range(q_idx)`."""


class DataDependentValue(TraceError, TypeError):
    """A captured tensor's contents were turned into a Python value during tracing: `.item()`, `if flag:`."""


class UnsupportedOperation(TraceError, NotImplementedError):
    """An operation, or a form of it, that mods cannot hold."""


class DivisionByZero(TraceError, ZeroDivisionError):
    """An integer is divided by a literal 0, or its remainder of it is asked for."""


class NoSuchAttribute(TraceError, AttributeError):
    """A traced value was asked for something that no tensor has, by a slip of the pen most likely."""


class WrongArity(TraceError, TypeError):
    """A function does not take the arguments that a mod of its kind is called with."""


class WrongReturnType(TraceError, TypeError):
    """A mask_mod did not return one boolean, or a score_mod one number."""


class IndexRankMismatch(TraceError, IndexError):
    """A captured tensor was indexed with more indices than it has dimensions, or a constant out of range."""


class WrongIndexType(TraceError, TypeError):
    """A captured tensor was indexed by something else than integers."""


class ShapesDoNotBroadcast(TraceError, ValueError):
    """Two tensors in a mod have shapes that do not go together."""


class ReductionTooLong(TraceError, ValueError):
    """A sum, any, all, ... over more elements than are unrolled."""


class MutationInMod(TraceError, TypeError):
    """A mod changes something that outlives the call: a captured tensor, list or object, a global name."""


class UnsupportedCapture(TraceError, TypeError):
    """A mod reads what has no form in a kernel: a complex or sparse tensor, an integer of over 64 bits."""


class MaskTruthValue(FlexcError, TypeError):
    """`bool(mask)`: `and`, `or`, `not` were used on masks in place of `&`, `|`, `~`."""


class NotAMod(FlexcError, TypeError):
    """Something that is no function, or a mod of the other kind, was given as a mask_mod or score_mod."""


class InvalidMask(FlexcError, ValueError):
    """A number or list that a ready-made mask can't be made of: an even window, a tile that does not fit."""


class InvalidBlockMask(FlexcError, ValueError):
    """Lists of blocks, lengths or block sizes that no block mask can have."""


class BlockIndexOutOfRange(FlexcError, IndexError):
    """An index outside the batches, heads or query blocks of a block mask."""


class MaskTooOpen(FlexcError, ValueError):
    """A block map would take more pairs, one by one, than its budget allows; the message says how many."""


class SlicedBlockMask(FlexcError, RuntimeError):
    """The mask_mod of a sliced block mask, which does not know by how much its indices have moved."""
