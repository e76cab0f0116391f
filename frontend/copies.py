"""Deep copies of functions: over copies of what they captured.

To Python a function is its own copy. A mod of a copied model would go on to read the tensors of the original,
and to give them its gradients.
"""

from __future__ import annotations

import copy
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

Memo = dict[int, Any]
_NAMES = ("__qualname__", "__module__", "__doc__", "__annotations__", "__type_params__")


def copied(x: Any, memo: Memo) -> Any:
    """A deep copy of `x`; of a function too, unless it holds nothing: no closure and no defaults.

    What it finds by its globals is shared, as are modules of Python. `memo` is that of `copy.deepcopy`.
    Raises what that raises where something captured can't be copied.
    """
    if isinstance(x, ModuleType):
        return x
    if isinstance(x, partial):
        made = type(x)(copied(x.func, memo), *copied(x.args, memo), **copied(x.keywords, memo))
        made.__dict__.update(copied(x.__dict__, memo))
        return made
    if not isinstance(x, FunctionType) or not (x.__closure__ or x.__defaults__ or x.__kwdefaults__):
        return copy.deepcopy(x, memo)
    return memo[id(x)] if id(x) in memo else _copied(x, memo)


def _copied(function: FunctionType, memo: Memo) -> FunctionType:
    owns = function.__closure__ or ()
    cells = tuple(_empty_cell(own, memo) for own in owns)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    memo[id(function)] = made  # before what it holds, which may hold it
    for name in _NAMES:
        if hasattr(function, name):
            setattr(made, name, getattr(function, name))
    for own, cell in zip(owns, cells, strict=True):
        _fill(own, cell, memo)
    made.__defaults__ = copied(function.__defaults__, memo)
    made.__kwdefaults__ = copied(function.__kwdefaults__, memo)
    made.__dict__.update(copied(function.__dict__, memo))
    return made


def _empty_cell(own: CellType, memo: Memo) -> CellType:
    """The copy of a cell, which functions may share; empty if it is new."""
    cell: CellType = memo.setdefault(id(own), CellType())
    return cell


def _fill(own: CellType, cell: CellType, memo: Memo) -> None:
    if _has_value(own) and not _has_value(cell):  # else another function that shares it has filled it
        cell.cell_contents = copied(own.cell_contents, memo)


def _has_value(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
