"""What an equation lets the conditions beside it say more simply.

In `doc[q] == doc[k] and q - start[doc[q]] >= k - start[doc[k]]`, the second `doc[k]` may be read as `doc[q]`;
in `q // c == k // c and q % c >= k % c`, `k % c` is `k - (q - q % c)`. Both then have a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flexc.ir.build import binary
from flexc.ir.expr import Expr, rebuild, topological, with_args
from flexc.ir.ops import Op
from flexc.ir.simplify import simplify


def replacements(a: Expr, b: Expr, reads_kv: Callable[[Expr], bool]) -> dict[Expr, Expr]:
    """Terms of the key, and terms of the row that are the same number where `a == b`."""
    while a.op is b.op is Op.CAST and a.args[0].dtype is b.args[0].dtype and a.dtype.is_integer:
        a, b = a.args[0], b.args[0]
    if reads_kv(a) is reads_kv(b) or not a.dtype.is_integer:
        return {}
    of_key, of_row = (a, b) if reads_kv(a) else (b, a)
    found = {of_key: of_row} if of_key.args else {}
    if of_key.op is of_row.op is Op.FLOORDIV and of_key.args[1] is of_row.args[1]:
        (x, divisor), y = of_key.args, of_row.args[0]
        start = binary(Op.SUB, y, binary(Op.MOD, y, divisor))
        found[binary(Op.MOD, x, divisor)] = binary(Op.SUB, x, start)
    return found


def replaced(root: Expr, table: Mapping[Expr, Expr]) -> Expr:
    """`root` with the terms of `table` replaced, simplified; `root` itself where it has none of them."""
    if table.keys().isdisjoint(topological(root)):
        return root

    def replace(node: Expr, args: tuple[Expr, ...]) -> Expr:
        return table[node] if node in table else with_args(node, args)

    return simplify(rebuild(root, replace))
