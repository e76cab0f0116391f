"""Check the invariants of a traced mod; passes run it on both sides of themselves."""

from __future__ import annotations

from flexc.errors import InternalError
from flexc.ir.expr import Expr, topological
from flexc.ir.graph import Capture, ModGraph, ModKind
from flexc.ir.ops import COMPARISONS, FLOAT_INPUTS, INFO, Input, Op
from flexc.ir.printer import to_text
from flexc.ir.types import DType

_ROOT = {ModKind.SCORE: DType.F32, ModKind.MASK: DType.BOOL}
_CONST_TYPE = {DType.BOOL: bool, DType.I32: int, DType.I64: int, DType.F32: float}


def verify(graph: ModGraph) -> None:
    """Raise InternalError that lists every violation: arity, types, slots, ranks, the root's type."""
    problems = [
        f"{problem}: {to_text(node)}"
        for node in topological(graph.root)
        for problem in _node_problems(node, graph)
    ]
    if graph.root.dtype is not _ROOT[graph.kind]:
        problems.append(
            f"a {graph.kind.value} returns {_ROOT[graph.kind].value}, not {graph.root.dtype.value}"
        )
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise InternalError(f"verify: the graph of {graph.source.name} is malformed\n{listed}")


def _node_problems(node: Expr, graph: ModGraph) -> list[str]:
    info = INFO[node.op]
    if info.arity is not None and len(node.args) != info.arity:
        return [f"{node.op.value} takes {info.arity} operands, not {len(node.args)}"]
    if info.takes == "leaf":
        return _leaf_problems(node, graph)
    problems = [] if _may_carry(node) else [f"{node.op.value} carries {node.attr!r}"]
    return problems + _operand_problems(node) + _result_problems(node)


def _may_carry(node: Expr) -> bool:
    if node.op in (Op.MIN, Op.MAX) and node.dtype is DType.F32 and type(node.attr) is int:
        return node.attr > 0
    return node.attr is None


def _operand_problems(node: Expr) -> list[str]:
    takes = INFO[node.op].takes
    given = [arg.dtype for arg in node.args]
    if node.op is Op.WHERE:
        first, *given = given
        if first is not DType.BOOL:
            return [f"the condition of where must be bool, not {first.value}"]
    problems = []
    if len(set(given)) > 1:
        problems.append(f"{node.op.value} of mixed types {', '.join(d.value for d in given)}")
    allowed = {
        "number": (DType.I32, DType.I64, DType.F32),
        "integer": (DType.I32, DType.I64),
        "float": (DType.F32,),
        "bool": (DType.BOOL,),
        "any": tuple(DType),
    }[takes]
    problems += [f"{node.op.value} takes {takes}, not {d.value}" for d in given if d not in allowed]
    return problems


def _result_problems(node: Expr) -> list[str]:
    if node.op is Op.CAST:
        to, source = node.dtype, node.args[0].dtype
        return [f"cast from {source.value} to {to.value}"] if to in (DType.BOOL, source) else []
    expected = node.args[-1].dtype
    if node.op in COMPARISONS:
        expected = DType.BOOL
    if node.dtype is expected:
        return []
    return [f"the result of {node.op.value} must be {expected.value}, not {node.dtype.value}"]


def _leaf_problems(node: Expr, graph: ModGraph) -> list[str]:
    if node.op is Op.CONST:
        good = type(node.attr) is _CONST_TYPE[node.dtype]
        return [] if good else [f"a {node.dtype.value} literal holds {node.attr!r}"]
    if node.op is Op.INPUT:
        return _input_problems(node, graph.kind)
    slot = node.attr[0] if isinstance(node.attr, tuple) else node.attr
    if type(slot) is not int or not 0 <= slot < len(graph.captures):
        return [f"{node.op.value} of slot {slot!r}, with {len(graph.captures)} captures"]
    return _capture_problems(node, graph.captures[slot])


def _input_problems(node: Expr, kind: ModKind) -> list[str]:
    if not isinstance(node.attr, Input):
        return [f"input holds {node.attr!r}"]
    problems = []
    if node.attr is Input.SCORE and kind is ModKind.MASK:
        problems.append("a mask_mod reads the score")
    if node.attr is Input.GRAD:
        problems.append("only an adjoint reads the gradient")
    if node.dtype is not (DType.F32 if node.attr in FLOAT_INPUTS else DType.I32):
        problems.append(f"the input {node.attr.value} has type {node.dtype.value}")
    return problems


def _capture_problems(node: Expr, capture: Capture) -> list[str]:
    if node.op is Op.SCALAR:
        if capture.rank is not None:
            return [f"{capture.name} is a tensor, read as a number"]
        return _dtype_problem(node, capture)
    if capture.rank is None:
        return [f"{capture.name} is a number, read as a tensor"]
    if node.op is Op.SIZE:
        dimension = node.attr[1] if isinstance(node.attr, tuple) else -1
        good = 0 <= dimension < capture.rank and node.dtype is DType.I32
        return [] if good else [f"size {dimension} of {capture.name}, which has {capture.rank} dimensions"]
    problems = _dtype_problem(node, capture)
    if len(node.args) != capture.rank:
        problems.append(f"{len(node.args)} indices into {capture.name}, which has {capture.rank} dimensions")
    problems += [f"an index of type {arg.dtype.value}" for arg in node.args if not arg.dtype.is_integer]
    return problems


def _dtype_problem(node: Expr, capture: Capture) -> list[str]:
    if node.dtype is capture.dtype:
        return []
    return [f"{capture.name} is {capture.dtype.value}, read as {node.dtype.value}"]
