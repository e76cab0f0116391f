"""The decorators, and the objects that they make."""

from __future__ import annotations

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flexc.errors import MaskTruthValue, NotAMod
from flexc.frontend.compose import Both, Either, Negation, Traceable, name_of
from flexc.frontend.copies import Memo, copied
from flexc.frontend.signature import ARGUMENTS, check_arity
from flexc.frontend.trace import Trace
from flexc.ir.graph import ModKind
from flexc.ir.ledger import DEFAULT_BUDGET
from flexc.traces import relocated, trace_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flexc.block_mask import BlockMask

Function = Callable[..., Any]
Maker = TypeVar("Maker", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound="Mod")
_tracing = threading.RLock()
"""Held while a function is traced: by one thread at a time."""


class _Kept:
    """The trace of a function, which all mods of that function share."""

    __slots__ = ("trace",)

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace

    def refreshed(self) -> Trace | None:
        """The trace with the present values of what was captured; None where there is none that holds."""
        known = self.trace
        if known is None:
            return None
        fresh = known.refreshed()
        if fresh is not None and fresh is not known:
            self.trace = fresh
        return fresh


class Mod(Traceable):
    """A function that flexc traces. Base of `MaskMod` and `ScoreMod`; calling it calls the function.

    Called with PyTorch's tensors it computes what the function does, so it serves as a mod of PyTorch's own.
    """

    kind: ModKind
    __name__: str

    def __init__(self, function: Function) -> None:
        self.function = function
        self.recipe: tuple[Any, ...] | None = None
        """What made the mod, and from what: how a copy or a pickle of it is made."""
        self._kept = _Kept()
        if torch.compiler.is_dynamo_compiling():
            return  # a composition, made where it is used; nobody asks for its name
        check_arity(function, self.kind)
        functools.update_wrapper(self, function, updated=())

    def trace(self) -> Trace:
        """The traced function with the present values of what it captured.

        Kept: as long as only values change, nothing is traced again. Safe to call from several threads.
            Raises a TraceError that shows the user's line.
        """
        fresh = self._kept.refreshed()
        if fresh is not None:
            return fresh
        with _tracing:
            self._kept.trace = made = trace_of(self.function, self.kind)
            return made

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = getattr(self, "__qualname__", "")
        if _named(getattr(self, "__module__", None), name) is self:
            return str(name)  # a decorated function is pickled as a function is: by its name
        if self.recipe is not None:
            return _made_again, self.recipe
        return type(self), (self.function,)

    def __deepcopy__(self, memo: Memo) -> Mod:
        reduced = self.__reduce__()
        if isinstance(reduced, str):
            return self
        if self.recipe is not None:
            mod: Mod = _made_again(*copy.deepcopy(self.recipe, memo))
            return mod
        return type(self)(copied(self.function, memo))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.function)})"


class MaskMod(Mod):
    """A mask: `(b, h, q_idx, kv_idx) -> bool`, True where the query may attend to the key.

    Masks compose by `&`, `|` and `~`, also with plain functions on the other side.
    """

    kind = ModKind.MASK

    def __and__(self, other: Function) -> MaskMod:
        return _combine(Both, self, other)

    def __rand__(self, other: Function) -> MaskMod:
        return _combine(Both, other, self)

    def __or__(self, other: Function) -> MaskMod:
        return _combine(Either, self, other)

    def __ror__(self, other: Function) -> MaskMod:
        return _combine(Either, other, self)

    def __invert__(self) -> MaskMod:
        return MaskMod(Negation(self))

    def __bool__(self) -> bool:
        raise MaskTruthValue(
            f"the mask {name_of(self)} has no truth value",
            hint="combine masks with `&`, `|` and `~` in place of `and`, `or` and `not`; "
            "to test for its presence write `mask is not None`",
        )

    def block_mask(
        self,
        B: int | None,
        H: int | None,
        Q_LEN: int,
        KV_LEN: int,
        device: torch.device | str | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        *,
        budget: float = DEFAULT_BUDGET,
    ) -> BlockMask:
        """Which tiles of the score matrix are empty, partial or full. None for B or H: the same for all.

        `budget` is the most pairs at which the mask is evaluated, see `create_block_mask`.

        Raises:
            MaskTooOpen: the budget does not suffice.
        """
        from flexc.block_mask import create_block_mask

        return create_block_mask(
            self, B, H, Q_LEN, KV_LEN, device=device, BLOCK_SIZE=BLOCK_SIZE, budget=budget
        )

    def plot(
        self,
        Q_LEN: int,
        KV_LEN: int,
        *,
        b: int = 0,
        h: int = 0,
        block: bool = False,
        block_size: int = 128,
        ax: Axes | None = None,
    ) -> Figure:
        """A matplotlib figure of the mask; `block=True` draws empty, partial and full tiles."""
        from flexc.plot import plot_mask

        return plot_mask(self, Q_LEN, KV_LEN, b=b, h=h, block=block, block_size=block_size, ax=ax)

    def explain(self, Q_LEN: int, KV_LEN: int) -> str:
        """The traced formula, the keys of a row, the tile counts, and which analysis decided them."""
        from flexc.explain import explain_mask

        return explain_mask(self, Q_LEN, KV_LEN)


class ScoreMod(Mod):
    """A score function.

    `(score, b, h, q_idx, kv_idx) -> score`, with `score = q . k * scale` in 32-bit floats.
    """

    kind = ModKind.SCORE


def _named(module: str | None, name: str) -> object:
    """What `module.name` is; None where there is no such thing."""
    found: object = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _combine(how: type[Both] | type[Either], left: Function, right: Function) -> MaskMod:
    for operand in (left, right):
        if isinstance(operand, ScoreMod) or not callable(operand):
            return NotImplemented  # type: ignore[no-any-return]
    return MaskMod(how(left, right))


def mask_mod(function: Function) -> MaskMod:
    """Decorates a mask function `(b, h, q_idx, kv_idx) -> bool`.

    Raises:
        NotAMod: `function` is no function, or a ScoreMod.
        WrongArity: it does not take these four arguments.
    """
    return _make(MaskMod, function)


def score_mod(function: Function) -> ScoreMod:
    """Decorates a score function `(score, b, h, q_idx, kv_idx) -> number`.

    Raises:
        NotAMod: `function` is no function, or a MaskMod.
        WrongArity: it does not take these five arguments.
    """
    return _make(ScoreMod, function)


def made_again(maker: Maker) -> Maker:
    """Decorates a function that makes mods: copies and pickles of them are made by calling it again.

    A copied model then has masks and biases over its own tensors, not over those of the original.
    """

    @functools.wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        mod = maker(*args, **kwargs)
        mod.recipe = (make, args, kwargs)
        return mod

    return make  # type: ignore[return-value]


def _made_again(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return make(*args, **kwargs)


class _Memo:
    """What is kept of the mods of one function, with the function.

    It lives as long as the function does, holds no reference to it, and is never pickled: a function that is
    used once is gone, with all that it captured, when nobody holds it, without a garbage collection.
    """

    def __init__(self, owner: object = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self.mods: dict[Any, tuple[Callable[[], Mod | None], _Kept]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Memo, ()


_ATTRIBUTE = "__flexc_mods__"


def trace_as(kind: type[Mod], function: Function) -> Trace:
    """The trace of a function as a mod of that kind, as `Mod.trace` gives it. Raises what that raises."""
    if isinstance(function, kind):
        return function.trace()
    memo, key = _memo_of(kind, function)
    kept = None if memo is None else memo.mods.get(key)
    fresh = None if kept is None else kept[1].refreshed()
    if fresh is None and kept is None and memo is not None:
        fresh = relocated(function, kind.kind)
        if fresh is not None:
            memo.mods[key] = (_nobody, _Kept(fresh))
    return _remembered(kind, function).trace() if fresh is None else fresh


def _nobody() -> None:
    """Stands where no mod was asked for, only its trace."""


def as_mask_mod(function: Function) -> MaskMod:
    """`function` as a MaskMod: itself, or the one made for it before. Raises as `mask_mod` does."""
    return function if isinstance(function, MaskMod) else _remembered(MaskMod, function)


def as_score_mod(function: Function) -> ScoreMod:
    """`function` as a ScoreMod: itself, or the one made for it before. Raises as `score_mod` does."""
    return function if isinstance(function, ScoreMod) else _remembered(ScoreMod, function)


def _make(kind: type[Kind], function: object) -> Kind:
    if isinstance(function, kind):
        return function
    if isinstance(function, Mod):
        raise NotAMod(
            f"{function!r} is given where a {kind.kind.value} is needed",
            hint=f"pass it as {function.kind.value}=",
        )
    if not callable(function):
        hint = f"write a function ({', '.join(ARGUMENTS[kind.kind])})"
        if hasattr(function, "mask_mod"):
            hint = "pass a block mask as block_mask="
        raise NotAMod(
            f"a {kind.kind.value} is a function, and this is of type {type(function).__name__}", hint=hint
        )
    return kind(function)


def _remembered(kind: type[Kind], function: Function) -> Kind:
    """The mod of a function, while somebody holds it, else another one that knows the same trace."""
    memo, key = _memo_of(kind, function)
    if memo is None:
        return _make(kind, function)
    kept = memo.mods.get(key)
    mod = None if kept is None else kept[0]()
    if mod is None:
        mod = _make(kind, function)
        if kept is not None:
            mod._kept = kept[1]
        memo.mods[key] = (weakref.ref(mod), mod._kept)
    return mod  # type: ignore[return-value]


def _memo_of(kind: type[Mod], function: Function) -> tuple[_Memo | None, tuple[object, ...]]:
    """What is kept with a function, or for a bound method with its object, and under which key."""
    owner: object = function
    key: tuple[object, ...] = (kind,)
    if isinstance(function, MethodType):
        owner, key = function.__self__, (kind, function.__func__)
    attributes = getattr(owner, "__dict__", None)
    if isinstance(function, Mod) or not isinstance(attributes, dict) or not type(owner).__weakrefoffset__:
        return None, key
    memo = attributes.get(_ATTRIBUTE)
    # functools.wraps copies the attribute to another function.
    if not isinstance(memo, _Memo) or memo.owner is None or memo.owner() is not owner:
        memo = attributes[_ATTRIBUTE] = _Memo(owner)
    return memo, key


__all__ = [
    "MaskMod",
    "Mod",
    "ScoreMod",
    "as_mask_mod",
    "as_score_mod",
    "made_again",
    "mask_mod",
    "score_mod",
    "trace_as",
]
