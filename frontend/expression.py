"""Which columns of a line an operation stands in, where only its line is known: read from the source."""

from __future__ import annotations

import ast
import linecache

from flexc.frontend.span import in_characters

_NAMES = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv",
    ast.Mod: "mod", ast.Pow: "pow", ast.LShift: "lshift", ast.RShift: "rshift", ast.BitOr: "or_",
    ast.BitAnd: "and_", ast.BitXor: "xor", ast.MatMult: "matmul", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt",
    ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne", ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert",
}  # fmt: skip


def columns_of(file: str, line: int, name: str) -> tuple[int, int] | None:
    """First column and end, in characters, of the expression on a line that calls `name`, e.g. "exp", "add".

    None where it is not on that line once: it may be written otherwise, or twice.
    """
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # not Python: a cell of a notebook with commands in it
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and node.lineno == line and name in _names(node)
    ]
    if len(found) != 1:
        return None
    text = lines[line - 1].rstrip("\n")
    node = found[0]
    end = len(text) if node.end_lineno != line else in_characters(text, node.end_col_offset or 0)
    return in_characters(text, node.col_offset), end


def _names(node: ast.expr) -> set[str]:
    """The operations that an expression is, less those that its parts are."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return {name}
        case ast.BinOp(op=op) | ast.UnaryOp(op=op):
            return {_NAMES.get(type(op), "")}
        case ast.Compare(ops=ops):
            return {_NAMES.get(type(op), "") for op in ops}
        case ast.Subscript():
            return {"getitem"}
    return set()
