"""Evaluate a graph on arrays: numpy or torch, scalars to whole grids, with the same tables.

Operands broadcast, so a graph over `q_idx[:, None]` and `kv_idx[None, :]` keeps row-only nodes row-sized.
Nothing here warns or faults: divisions by zero and indices out of range give some value (see `ops.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flexc.errors import InternalError
from flexc.ir.arrays import Array, Namespace, bool_type, convert
from flexc.ir.expr import Expr, topological
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType


@dataclass(frozen=True, slots=True, eq=False)
class Env:
    """What a graph is evaluated with.

    `inputs` are broadcastable arrays or numbers; `values` are the captures by slot; `xp` is numpy or torch;
    `float_dtype` is what F32 nodes are computed in: `xp.float32`, or `xp.float64` for a golden reference.
    """

    inputs: Mapping[Input, Array]
    values: Sequence[Array]
    xp: Namespace
    float_dtype: Any


def evaluate(root: Expr, env: Env) -> Array:
    """The value of `root`: an array of the inputs' broadcast shape, or smaller where it reads less.

    Integer nodes have the dtype of the inputs that they read (int32 wraps as kernels do, int64 does not).
    Raises InternalError when `env.inputs` lacks an input that the graph reads.
    """
    return evaluate_all((root,), env)[0]


def evaluate_all(roots: tuple[Expr, ...], env: Env) -> tuple[Array, ...]:
    """The values of several graphs; what they share is computed once. Raises as `evaluate` does."""
    with np.errstate(all="ignore"):
        held: list[Array] = []
        steps, results = _schedule(roots)
        for node, operands, dead in steps:
            held.append(TABLE[node.op](env, node, *(held[i] for i in operands)))
            for i in dead:
                held[i] = None
        return tuple(held[i] for i in results)


_Step = tuple[Expr, tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=512)
def _schedule(roots: tuple[Expr, ...]) -> tuple[tuple[_Step, ...], tuple[int, ...]]:
    """Each node with the positions of its operands and of the values not read after it; then the roots'."""
    order = topological(*roots)
    position = {node: i for i, node in enumerate(order)}
    results = tuple(position[root] for root in roots)
    last_use = {position[arg]: i for i, node in enumerate(order) for arg in node.args}
    dead: list[list[int]] = [[] for _ in order]
    for value, user in last_use.items():
        if value not in results:
            dead[user].append(value)
    steps = (
        (node, tuple(position[arg] for arg in node.args), tuple(dead[i])) for i, node in enumerate(order)
    )
    return tuple(steps), results


def dtype_of(env: Env, dtype: DType) -> Any:
    """The array library's type for a node type."""
    if dtype is DType.F32:
        return env.float_dtype
    if dtype is DType.BOOL:
        return bool_type(env.xp)
    return env.xp.int32 if dtype is DType.I32 else env.xp.int64


def _is_numpy(env: Env) -> bool:
    return env.xp is np


def _number(env: Env, value: Any, dtype: DType) -> Array:
    """A 0-dim array, on torch where the inputs are."""
    target = dtype_of(env, dtype)
    if dtype.is_integer:
        bits = 32 if dtype is DType.I32 else 64
        value = (int(value) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    if _is_numpy(env):
        return target(value)
    return env.xp.full((), value, dtype=target, device=_device(env))


def _device(env: Env) -> Any:
    """Where the first tensor among the inputs lies; the CPU where there is none."""
    return next((x.device for x in env.inputs.values() if hasattr(x, "device")), "cpu")


def _const(env: Env, node: Expr) -> Array:
    return _number(env, node.attr, node.dtype)


def _input(env: Env, node: Expr) -> Array:
    assert isinstance(node.attr, Input)
    try:
        value = env.inputs[node.attr]
    except KeyError:
        raise InternalError(f"evaluate: no value for the input {node.attr.value}") from None
    return _number(env, value, node.dtype) if isinstance(value, bool | int | float) else value


def _scalar(env: Env, node: Expr) -> Array:
    assert isinstance(node.attr, int)
    value = env.values[node.attr]
    if isinstance(value, bool | int | float):
        return _number(env, value, node.dtype)
    return convert(env.xp, value, dtype_of(env, node.dtype))


def _size(env: Env, node: Expr) -> Array:
    assert isinstance(node.attr, tuple)
    slot, dimension = node.attr
    return _number(env, int(env.values[slot].shape[dimension]), node.dtype)


def _load(env: Env, node: Expr, *indices: Array) -> Array:
    assert isinstance(node.attr, int)
    source, target = env.values[node.attr], dtype_of(env, node.dtype)
    if not indices:
        return convert(env.xp, source, target)
    if 0 in source.shape:
        shape = np.broadcast_shapes(*(tuple(i.shape) for i in indices))
        return _zeros(env, shape, target, source)
    wrapped = tuple(_wrap(env, i, n) for i, n in zip(indices, source.shape, strict=True))
    if _is_numpy(env):
        return np.asarray(source)[wrapped].astype(target, copy=False)
    if source.dtype.itemsize == 1 and source.dtype.is_floating_point:  # torch cannot gather 8-bit floats
        return source.view(env.xp.uint8)[wrapped].view(source.dtype).to(target)
    return source[wrapped].to(target)


def _zeros(env: Env, shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    return np.zeros(shape, dtype) if _is_numpy(env) else env.xp.zeros(shape, dtype=dtype, device=like.device)


def _wrap(env: Env, index: Array, length: int) -> Array:
    """A valid position: negative indices count from the end, what is still outside is clamped."""
    index = convert(env.xp, index, env.xp.int64)
    index = env.xp.where(index < 0, index + length, index)
    return index.clip(0, length - 1)


def _cast(env: Env, node: Expr, x: Array) -> Array:
    return convert(env.xp, x, dtype_of(env, node.dtype))


def _safe_divisor(env: Env, divisor: Array) -> Array:
    """1 in place of the divisors that may fault: 0, and -1 (the least integer by it overflows)."""
    return env.xp.where((divisor == 0) | (divisor == -1), env.xp.ones_like(divisor), divisor)


def _floordiv(env: Env, node: Expr, a: Array, b: Array) -> Array:
    divisor = node.args[1]
    if divisor.op is Op.CONST and divisor.attr not in (0, -1):
        return a // b
    return env.xp.where(b == -1, -a, a // _safe_divisor(env, b))


def _mod(env: Env, node: Expr, a: Array, b: Array) -> Array:
    divisor = node.args[1]
    if divisor.op is not Op.CONST or divisor.attr in (0, -1):
        b = _safe_divisor(env, b)
    if _is_numpy(env) and np.ndim(b) == 0:
        return a - a // b * b  # numpy divides by a scalar several times faster than it takes remainders
    return a % b


def _where(env: Env, node: Expr, condition: Array, x: Array, y: Array) -> Array:
    if not _is_numpy(env) and condition.ndim == 0 and condition.device.type == "cpu":
        return x if condition else y  # a condition on the CPU does not mix with operands on a GPU
    return env.xp.where(condition, x, y)


def _rsqrt(env: Env, node: Expr, x: Array) -> Array:
    return _number(env, 1.0, DType.F32) / np.sqrt(x) if _is_numpy(env) else env.xp.rsqrt(x)


def _sigmoid(env: Env, node: Expr, x: Array) -> Array:
    return 1 / (1 + np.exp(-x)) if _is_numpy(env) else env.xp.sigmoid(x)


_numpy_erf = np.frompyfunc(math.erf, 1, 1)


def _erf(env: Env, node: Expr, x: Array) -> Array:
    if _is_numpy(env):  # numpy has none; exact and slow
        return np.asarray(_numpy_erf(x)).astype(env.float_dtype)
    return env.xp.special.erf(x)


def _namesake(name: str) -> Callable[..., Array]:
    """The function that numpy and torch both call `name`."""

    def apply(env: Env, node: Expr, *args: Array) -> Array:
        return getattr(env.xp, name)(*args)

    return apply


def _extreme(of_two: str, of_all: str) -> Callable[..., Array]:
    """A step of a reduction that autograd watches is the extreme of all items below: equal ones share."""

    def apply(env: Env, node: Expr, *args: Array) -> Array:
        if node.attr is None or not any(getattr(x, "requires_grad", False) for x in args):
            return getattr(env.xp, of_two)(*args)
        items: list[Array] = []
        for operand, value in zip(node.args, args, strict=True):
            is_step = (operand.op, operand.attr) == (node.op, node.attr)
            items += getattr(value, _ITEMS, [value]) if is_step else [value]
        found = getattr(env.xp.stack(env.xp.broadcast_tensors(*items)), of_all)(0)
        setattr(found, _ITEMS, items)
        return found

    return apply


_ITEMS = "__flexc_items__"


def _detach(env: Env, node: Expr, x: Array) -> Array:
    return x.detach() if hasattr(x, "detach") else x


TABLE: dict[Op, Callable[..., Array]] = {
    Op.CONST: _const,
    Op.INPUT: _input,
    Op.SCALAR: _scalar,
    Op.SIZE: _size,
    Op.LOAD: _load,
    Op.ADD: lambda env, node, a, b: a + b,
    Op.SUB: lambda env, node, a, b: a - b,
    Op.MUL: lambda env, node, a, b: a * b,
    Op.NEG: lambda env, node, x: -x,
    Op.ABS: _namesake("abs"),
    Op.MIN: _extreme("minimum", "amin"),
    Op.MAX: _extreme("maximum", "amax"),
    Op.SIGN: _namesake("sign"),
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.BIT_AND: lambda env, node, a, b: a & b,
    Op.BIT_OR: lambda env, node, a, b: a | b,
    Op.BIT_XOR: lambda env, node, a, b: a ^ b,
    Op.BIT_NOT: lambda env, node, x: ~x,
    Op.SHL: lambda env, node, a, b: a << b,
    Op.SHR: lambda env, node, a, b: a >> b,
    Op.DIV: lambda env, node, a, b: a / b,
    Op.POW: lambda env, node, a, b: a**b,
    Op.EXP: _namesake("exp"),
    Op.EXP2: _namesake("exp2"),
    Op.LOG: _namesake("log"),
    Op.LOG2: _namesake("log2"),
    Op.SQRT: _namesake("sqrt"),
    Op.RSQRT: _rsqrt,
    Op.TANH: _namesake("tanh"),
    Op.SIGMOID: _sigmoid,
    Op.SIN: _namesake("sin"),
    Op.COS: _namesake("cos"),
    Op.ATAN: _namesake("arctan"),
    Op.ERF: _erf,
    Op.FLOOR: _namesake("floor"),
    Op.DETACH: _detach,
    Op.LT: lambda env, node, a, b: a < b,
    Op.LE: lambda env, node, a, b: a <= b,
    Op.EQ: lambda env, node, a, b: a == b,
    Op.NE: lambda env, node, a, b: a != b,
    Op.AND: _namesake("logical_and"),
    Op.OR: _namesake("logical_or"),
    Op.NOT: _namesake("logical_not"),
    Op.WHERE: _where,
    Op.CAST: _cast,
}
