"""The text of graphs: injective, stable, and readable as a formula."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.errors import InternalError
from flexc.ir.build import binary, cast, compare, const, input_, load, logic, scalar, size, unary, where
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.ops import Input, Op
from flexc.ir.printer import digest, to_formula, to_text
from flexc.ir.types import DType, Storage
from tests.ir.expressions import booleans, floats, integers

Q, KV, B, H, SCORE = (input_(i) for i in (Input.Q_IDX, Input.KV_IDX, Input.B, Input.H, Input.SCORE))
DISTANCE = binary(Op.SUB, Q, KV)


def parse(text: str) -> list[Expr]:
    """The expressions that `to_text` printed: that this can be written shows that the text says all."""
    shared: dict[str, Expr] = {}
    roots = []
    for line in text.splitlines():
        name, equals, body = line.partition(" = ")
        node, rest = _parse_node(body if equals else line, shared)
        assert rest == ""
        if equals:
            shared[name] = node
        else:
            roots.append(node)
    return roots


def _parse_node(text: str, shared: dict[str, Expr]) -> tuple[Expr, str]:
    match = re.match(r"%\d+|[-\w.+]+", text)
    assert match is not None
    word, rest = match.group(), text[match.end() :]
    if word in shared:
        return shared[word], rest
    args: list[Expr] = []
    opened = rest.startswith("(")
    while opened:
        node, rest = _parse_node(rest[1:].lstrip(), shared)
        args.append(node)
        opened = rest.startswith(",")
    rest = rest[1:] if args else rest
    suffix = re.match(r":(\w+)", rest)
    if suffix is not None:
        rest = rest[suffix.end() :]
    return _node(word, tuple(args), DType(suffix.group(1)) if suffix else None), rest


def _node(word: str, args: tuple[Expr, ...], dtype: DType | None) -> Expr:
    leaf = re.fullmatch(r"(scalar|load|size)(\d+)(?:\.(\d+))?", word)
    if leaf is not None and leaf.group(1) == "size":
        return size(int(leaf.group(2)), int(leaf.group(3)))
    if leaf is not None:
        assert dtype is not None
        op = Op(leaf.group(1))
        return Expr(op, args, int(leaf.group(2)), dtype)
    if word in {i.value for i in Input}:
        return input_(Input(word))
    if word in {op.value for op in Op} and args:
        op = Op(word)
        implied = {"lt", "le", "eq", "ne", "and", "or", "not"}
        result = dtype or (DType.BOOL if word in implied else args[-1].dtype)
        return Expr(op, args, None, result)
    if word in ("True", "False"):
        return const(word == "True")
    return const(float(word) if re.search(r"[.einf]", word) else int(word), dtype)


@settings(max_examples=300, deadline=None)
@given(roots=st.lists(st.one_of(booleans(3), integers(3), floats(3, score=True)), min_size=1, max_size=3))
def test_text_can_be_read_back(roots: list[Expr]) -> None:
    assert parse(to_text(*roots)) == roots


def test_text_keeps_apart_what_python_calls_equal() -> None:
    literals = [
        const(1), const(True), const(1.0), const(1, DType.I64), const(0.0), const(-0.0), const(0),
        const(False), const(math.inf), const(-math.inf), const(math.nan), const(0.1), const(0.1 + 2**-54),
    ]  # fmt: skip
    assert len({to_text(literal) for literal in literals}) == len(literals)
    assert to_text(scalar(0, DType.I32)) != to_text(scalar(0, DType.I64))
    assert to_text(load(0, (), DType.F32)) != to_text(scalar(0, DType.F32))
    assert to_text(Q, KV) != to_text(KV, Q)


def test_shared_nodes_are_named_once() -> None:
    squared = binary(Op.MUL, DISTANCE, DISTANCE)
    assert to_text(compare(Op.LT, squared, const(9))) == "%0 = sub(q_idx, kv_idx)\nlt(mul(%0, %0), 9)"
    deep = Q
    for _ in range(200):
        deep = binary(Op.ADD, deep, deep)
    assert len(to_text(deep)) < 200 * 30


def test_repr_is_the_text() -> None:
    assert repr(DISTANCE) == "Expr(sub(q_idx, kv_idx))"


CAUSAL = compare(Op.LE, KV, Q)
NEAR = compare(Op.LT, DISTANCE, scalar(0, DType.I32))


@pytest.mark.parametrize(
    ("root", "formula"),
    [
        (logic(Op.AND, CAUSAL, NEAR), "q_idx >= kv_idx and q_idx - kv_idx < window"),
        (compare(Op.LE, const(3), DISTANCE), "q_idx - kv_idx >= 3"),
        (unary(Op.NOT, logic(Op.OR, CAUSAL, NEAR)), "not (q_idx >= kv_idx or q_idx - kv_idx < window)"),
        (
            binary(Op.ADD, SCORE, binary(Op.MUL, load(1, (H,), DType.F32), DISTANCE)),
            "score + slopes[h] * (q_idx - kv_idx)",
        ),
        (binary(Op.SUB, Q, binary(Op.SUB, KV, const(-1))), "q_idx - (kv_idx - -1)"),
        (binary(Op.MOD, binary(Op.FLOORDIV, Q, const(4)), const(3)), "q_idx // 4 % 3"),
        (binary(Op.FLOORDIV, Q, binary(Op.MUL, KV, const(3))), "q_idx // (kv_idx * 3)"),
        (binary(Op.POW, SCORE, const(2.0)), "score ** 2.0"),
        (binary(Op.POW, unary(Op.NEG, SCORE), const(-2.0)), "(-score) ** (-2.0)"),
        (where(CAUSAL, SCORE, const(-math.inf)), "where(q_idx >= kv_idx, score, -inf)"),
        (binary(Op.MUL, unary(Op.TANH, SCORE), const(20.0)), "tanh(score) * 20.0"),
        (cast(CAUSAL, DType.I32), "int(q_idx >= kv_idx)"),
        (cast(SCORE, DType.I32), "int(score)"),
        (compare(Op.LT, Q, size(1, 0)), "q_idx < slopes.shape[0]"),
        (binary(Op.MIN, Q, KV), "min(q_idx, kv_idx)"),
        (binary(Op.BIT_AND, binary(Op.SHR, Q, const(2)), const(1)), "q_idx >> 2 & 1"),
        (
            compare(Op.EQ, load(1, (Q,), DType.I32), load(1, (KV,), DType.I32)),
            "slopes[q_idx] == slopes[kv_idx]",
        ),
    ],
)
def test_formula(root: Expr, formula: str) -> None:
    assert to_formula(root, ["window", "slopes"]) == formula


@dataclass(frozen=True)
class Record:
    name: str
    storage: Storage


def test_digest_is_stable_and_keeps_parts_apart() -> None:
    parts = [
        1, True, 1.0, "1", b"1", None, (1,), [1], (1, 2), ((1,), 2), {"a": 1}, {"a": True}, frozenset({1}),
        DType.I32, Storage.I32, Record("x", Storage.BF16), Record("x", Storage.FP16),
        Capture("x", Storage.I32), Q, KV, DISTANCE, "Expr('q_idx')",
    ]  # fmt: skip
    assert len({digest(part) for part in parts}) == len(parts)
    assert digest(1, 2) != digest((1, 2))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    with pytest.raises(InternalError, match="object has no stable text"):
        digest(object())


def test_digest_is_the_same_in_another_process() -> None:
    root = Path(__file__).parents[2]
    code = (
        "from flexc.ir.build import *; from flexc.ir.ops import *; from flexc.ir.printer import digest;"
        "print(digest(binary(Op.SUB, input_(Input.Q_IDX), input_(Input.KV_IDX)), {'b', 'a', 'c'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == digest(DISTANCE, {"a", "b", "c"})
