"""Graphs as JSON and back: a text that another process can compute from.

The same graphs have the same text. What a text says is all that it means: no identities, no addresses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flexc.errors import InternalError
from flexc.ir.expr import Attr, Expr, topological
from flexc.ir.graph import Capture
from flexc.ir.ops import Input, Op
from flexc.ir.types import DType, Storage

VERSION = 1


def to_wire(roots: Sequence[Expr | None], captures: Sequence[Capture], facts: object) -> str:
    """The text of expressions (None for one that is not there), their captures, and `facts`, plain JSON."""
    nodes = topological(*(root for root in roots if root is not None))
    place = {node: index for index, node in enumerate(nodes)}
    return json.dumps(
        {
            "version": VERSION,
            "nodes": [_node(node, place) for node in nodes],
            "roots": [None if root is None else place[root] for root in roots],
            "captures": [[c.name, c.storage.name, c.rank] for c in captures],
            "facts": facts,
        },
        separators=(",", ":"),
        sort_keys=True,
    )


def from_wire(text: str) -> tuple[tuple[Expr | None, ...], tuple[Capture, ...], Any]:
    """What `to_wire` was given.

    Raises:
        InternalError: the text is of another version of flexc, or no such text.
    """
    try:
        whole = json.loads(text)
        if whole["version"] != VERSION:
            raise InternalError(
                f"graphs in version {whole['version']} of the text; this flexc reads {VERSION}"
            )
        nodes: list[Expr] = []
        for op, args, attr, dtype in whole["nodes"]:
            operands = tuple(nodes[index] for index in args)
            nodes.append(Expr(Op[op], operands, _attr_from(attr), DType[dtype]))
        roots = tuple(None if index is None else nodes[index] for index in whole["roots"])
        captures = tuple(Capture(name, Storage[storage], rank) for name, storage, rank in whole["captures"])
    except (ValueError, LookupError, TypeError) as error:
        raise InternalError(f"no text of graphs: {text[:80]!r}") from error
    return roots, captures, whole["facts"]


def _node(node: Expr, place: dict[Expr, int]) -> list[object]:
    return [node.op.name, [place[arg] for arg in node.args], _attr(node.attr), node.dtype.name]


def _attr(attr: Attr) -> object:
    """JSON keeps bool, int and None apart; floats are written in hexadecimal, exactly."""
    if isinstance(attr, Input):
        return {"input": attr.name}
    if isinstance(attr, float):
        return {"float": attr.hex()}
    return list(attr) if isinstance(attr, tuple) else attr


def _attr_from(attr: Any) -> Attr:
    if isinstance(attr, dict):
        return Input[attr["input"]] if "input" in attr else float.fromhex(attr["float"])
    return (int(attr[0]), int(attr[1])) if isinstance(attr, list) else attr
