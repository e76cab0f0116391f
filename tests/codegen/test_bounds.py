"""Loop bounds from closed forms: what the generated statements visit, against the dense mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexc import masks
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import BackwardSpec, backward_spec
from flexc.codegen.backward_spec import Entry as Part
from flexc.codegen.blocks import exact_ranges
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.pipeline import lower
from flexc.codegen.target import TARGETS
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.graph import Capture
from flexc.ir.ops import Input
from flexc.ir.simplify import simplify
from flexc.ir.spec import Blocks
from flexc.ir.substitute import transposed
from flexc.ir.types import Storage
from flexc.resolve import resolve
from tests.codegen.generate import generate, spec_for_graphs
from tests.codegen.walk import Visit, visits
from tests.ir import test_closed_form as family
from tests.mods import Entry, corpus

BATCH, HEADS = 2, 3
TILES = {"block_q": 16, "block_kv": 16, "num_warps": 4, "num_stages": 1}
Lengths = tuple[int, int]


def _kernel(mask: Expr, captures: tuple[Capture, ...], options: dict[str, Any] = TILES) -> GeneratedKernel:
    spec = spec_for_graphs(
        mask=simplify(mask), captures=captures, head_dim=16, storage=Storage.FP16, blocks=Blocks.RANGES
    )
    return lower(spec, TARGETS["sm80"], options=options)


def _kernel_by_keys(mask: Expr, captures: tuple[Capture, ...]) -> GeneratedKernel:
    """The backward's kernel that keeps keys."""
    spec = spec_for_graphs(
        mask=simplify(mask), captures=captures, head_dim=16, storage=Storage.FP16, blocks=Blocks.MAP
    )
    options = {f"backward_{name}": value for name, value in TILES.items()}
    return lower_backward(BackwardSpec(spec, Blocks.RANGES), Part.KV, TARGETS["sm80"], options=options)


def _dense(mask: Expr, values: Sequence[Any], lengths: Lengths, heads: int = HEADS) -> np.ndarray:
    axes = {Input.B: BATCH, Input.H: heads, Input.Q_IDX: lengths[0], Input.KV_IDX: lengths[1]}
    inputs: dict[Input, Any] = {
        which: np.arange(size, dtype=np.int32).reshape([-1 if n == axis else 1 for n in range(4)])
        for axis, (which, size) in enumerate(axes.items())
    }
    inputs |= {Input.Q_LEN: np.int32(lengths[0]), Input.KV_LEN: np.int32(lengths[1])}
    plain = [v.numpy() if isinstance(v, torch.Tensor) else v for v in values]
    allowed = evaluate(mask, Env(inputs, plain, np, np.float64))
    return np.broadcast_to(allowed, (BATCH, heads, *lengths))


def _check(
    mask: Expr,
    kernel: GeneratedKernel,
    values: Sequence[Any],
    lengths: Lengths,
    heads: int = HEADS,
    *,
    by_keys: bool = False,
) -> tuple[int, int, int]:
    """Every visible key is visited once, in order, and no unmasked tile hides a key.

    Returns the numbers of tiles visited that no row sees (though the rows see others), of full tiles to which
    the mask is applied, and of all that were visited. With `by_keys`, rows and keys are exchanged.
    """
    kept, block = kernel.plan.tiles.block_q, kernel.plan.tiles.block_kv
    dense = _dense(mask, values, lengths, heads)
    if by_keys:
        kept, block, dense = block, kept, dense.swapaxes(2, 3)
    idle = needless = total = 0
    found = visits(
        kernel, values, q_len=lengths[0], kv_len=lengths[1], batch=BATCH, heads=heads, by_keys=by_keys
    )
    assert found
    for (b, h, first), steps in found.items():
        rows = dense[b, h, first : first + kept]
        starts = [step.start for step in steps]
        assert starts == sorted(set(starts))
        seen = np.zeros(rows.shape[1], bool)
        for step in steps:
            assert step.start % block == 0
            tile = rows[:, step.start : step.start + block]
            full = (by_keys or tile.shape[1] == block) and tile.all()
            assert step.masked or full
            idle += not tile.any() and bool(rows.any())
            needless += bool(step.masked and full)
            seen[step.start : step.start + block] = True
        assert not rows[:, ~seen].any(), (b, h, first, starts)
        total += len(steps)
    return idle, needless, total


def _of(mask: Callable[..., Any]) -> tuple[Expr, tuple[Capture, ...], tuple[Any, ...]]:
    mods, values, _ = resolve(None, mask)
    assert mods.mask is not None
    return mods.mask, mods.captures, values


FAMILY = tuple(
    Capture(name, storage, rank)
    for name, storage, rank in (
        ("c", Storage.I32, None), ("w", Storage.I32, None), ("starts", Storage.I32, 1),
        ("ends", Storage.I64, 1), ("of_head", Storage.I32, 1), ("of_batch", Storage.I32, 1),
    )
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    mask=family._family(),
    seed=st.integers(0, 5),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 70)),
)
def test_any_closed_form(mask: Expr, seed: int, lengths: Lengths) -> None:
    mask = simplify(mask)
    values = family.family_values(seed)
    ranges = exact_ranges(mask)
    assume(ranges is not None and ranges.holds(values, *lengths))
    tensors = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]
    _check(mask, _kernel(mask, FAMILY), tensors, lengths)


@settings(max_examples=100, deadline=None)
@given(
    mask=family._family(),
    seed=st.integers(0, 5),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 70)),
)
def test_any_closed_form_by_keys(mask: Expr, seed: int, lengths: Lengths) -> None:
    mask = simplify(mask)
    values = family.family_values(seed)
    ranges = exact_ranges(mask)
    assume(ranges is not None and ranges.holds(values, *lengths))
    tensors = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]
    of_keys = simplify(transposed(mask))
    assume(exact_ranges(transposed(of_keys)) is not None)
    kernel = _kernel_by_keys(of_keys, FAMILY)
    _check(of_keys, kernel, tensors, (lengths[1], lengths[0]), by_keys=True)


MASKED = [
    pytest.param(e, id=name) for name, e in corpus().items() if e.kind != "score" and name != "torch_noop"
]


@pytest.mark.parametrize("entry", MASKED)
def test_the_corpus(entry: Entry) -> None:
    case = entry.make()
    assert case.mask is not None
    mask, captures, values = _of(case.mask)
    ranges = exact_ranges(mask)
    if ranges is None or not ranges.holds(values, case.q_len, case.kv_len):
        assert (
            lower(
                spec_for_graphs(mask=mask, captures=captures, blocks=Blocks.MAP), TARGETS["sm90"]
            ).plan.blocks
            == "map"
        )
        return
    _check(mask, _kernel(mask, captures), values, (case.q_len, case.kv_len), case.heads)


OFFSETS = torch.tensor([0, 3, 40, 41, 41, 90, 107])


def _first(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 20


def _anti_diagonal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= 100 - q_idx) & (kv_idx < 110 - q_idx)


def _shifted(by: int) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx + by) & (kv_idx < q_idx + by + 20)


TIGHT: dict[str, Callable[..., Any]] = {
    "causal": masks.causal,
    "window": masks.sliding_window(40),
    "not_causal": ~masks.causal,
    "prefix": masks.prefix_lm(29),
    "prefix_by_batch": masks.prefix_lm(torch.tensor([29, 3])),
    "chunked": masks.chunked(23),
    "documents": masks.document_from_cu_seqlens(OFFSETS),
    "causal_documents": masks.causal & masks.document_from_cu_seqlens(OFFSETS),
    "global_and_window": masks.causal & (masks.sliding_window(19) | _first),
    "outside_a_window": ~masks.sliding_window(37),
    "falling": _anti_diagonal,
    "behind": _shifted(-50),
    "ahead": _shifted(50),
    "crossing": masks.sliding_window(9) | _anti_diagonal,
}  # fmt: skip


@pytest.mark.parametrize("lengths", [(107, 107), (50, 107), (107, 50), (1, 107), (96, 96)])
@pytest.mark.parametrize("name", list(TIGHT))
def test_no_tile_is_visited_in_vain(name: str, lengths: Lengths) -> None:
    mask, captures, values = _of(TIGHT[name])
    idle, needless, total = _check(mask, _kernel(mask, captures), values, lengths)
    # A range that is empty in all rows of a tile may cost one step, where it begins behind the keys.
    assert idle == 0 or lengths[0] > lengths[1]
    # Where two ranges make up a tile between them, or one follows the other inside a tile, neither knows.
    assert needless == 0 or "_" in name or name == "crossing", (needless, total)


BY_KEYS_TOO = [name for name in TIGHT if "documents" not in name]


@pytest.mark.parametrize("lengths", [(107, 107), (50, 107), (107, 50), (1, 107), (96, 96)])
@pytest.mark.parametrize("name", BY_KEYS_TOO)
def test_the_rows_that_see_a_key(name: str, lengths: Lengths) -> None:
    mask, captures, values = _of(TIGHT[name])
    _check(mask, _kernel_by_keys(mask, captures), values, lengths, by_keys=True)


def test_each_kernel_of_a_backward_finds_its_tiles_by_itself() -> None:
    for name, by_keys in (("causal", Blocks.RANGES), ("documents", Blocks.MAP), ("chunked", Blocks.RANGES)):
        mask, captures, values = _of(TIGHT[name])
        spec = spec_for_graphs(mask=mask, captures=captures, blocks=Blocks.RANGES)
        backward = backward_spec(spec, values, (107, 107))
        assert (backward.blocks(Part.Q), backward.blocks(Part.KV)) == (Blocks.RANGES, by_keys), name
        assert backward_spec(spec, values, (107, 107), given=True).blocks(Part.KV) is Blocks.MAP
        assert backward_spec(spec, values, (107, 107), wanted="map").blocks(Part.KV) is Blocks.MAP


def test_other_tiles() -> None:
    mask, captures, values = _of(TIGHT["causal_documents"])
    for block_q, block_kv in ((16, 64), (64, 16), (128, 32)):
        kernel = _kernel(mask, captures, {**TILES, "block_q": block_q, "block_kv": block_kv})
        _check(mask, kernel, values, (107, 107))


def test_one_range_needs_no_stretches_and_monotone_bounds_no_vectors() -> None:
    source = generate(masks.sliding_window(128)).source
    assert "stretch" not in source
    assert "tl.min(" not in source
    assert "map_" not in source
    assert generate(masks.causal).source.count("for kv_start in") == 2  # the second one repairs NaN


def test_a_walk_is_recorded_as_it_is() -> None:
    kernel = _kernel(*_of(masks.causal)[:2])
    found = visits(kernel, (), q_len=40, kv_len=40, batch=1, heads=1)
    assert found[0, 0, 0] == [Visit(0, True)]
    assert found[0, 0, 32] == [Visit(0, False), Visit(16, False), Visit(32, True)]


def test_the_plan_says_where_the_bounds_come_from() -> None:
    reasons = dict(generate(masks.sliding_window(128)).plan.reasons)
    assert reasons["blocks"] == (
        "loop bounds from the tile's coordinates: a row sees max(q_idx - W + 1, 0) <= kv_idx < q_idx + 1"
    )
    reasons = dict(generate(masks.dilated(5, 3)).plan.reasons)
    assert "(q_idx - kv_idx) % d" in reasons["blocks"]


def test_rows_with_the_most_keys_come_first() -> None:
    first = "q_start = pid % q_tiles * BLOCK_Q"
    assert first in generate(~masks.causal).source
    assert first not in generate(masks.causal).source
    assert first not in generate(masks.sliding_window(128)).source
