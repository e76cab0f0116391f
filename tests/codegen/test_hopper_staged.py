"""What the loading warp of a Hopper backward leaves of each row: the generated code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from flexc.choice import backward_parts
from flexc.codegen.backward_plan import lower_backward
from flexc.codegen.backward_spec import Entry, backward_spec
from flexc.codegen.hopper_staged import staged_nodes
from flexc.codegen.module import GeneratedKernel
from flexc.codegen.target import TARGETS
from flexc.resolve import resolve
from tests.codegen.generate import Mod, spec_for

IDS = torch.arange(400, dtype=torch.int32) // 60
ALIVE = torch.arange(400) % 7 != 0
BIAS = torch.linspace(-1.0, 1.0, 400)


def _documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (IDS[q_idx] == IDS[kv_idx])


def _alive(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ALIVE[q_idx] & (q_idx >= kv_idx)


def _biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * (1.0 + BIAS[q_idx])


def _main(
    mask: Mod | None, score: Mod | None = None, *, head_dim: int = 128, dropout: bool = False, **facts: Any
) -> GeneratedKernel:
    spec = spec_for(mask, score, head_dim=head_dim, dropout=dropout)
    backward = backward_spec(spec, resolve(score, mask)[1], None, **facts)
    parts = backward_parts(backward, "sm90", (), hopper=True)
    (found,) = (of for of, entry in parts if entry is Entry.HOPPER)
    return lower_backward(found, Entry.HOPPER, TARGETS["sm90"])


def _function(source: str, name: str) -> str:
    found = re.search(rf"^def {name}\(.*?(?=^@gluon|\Z)", source, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[0]


@pytest.mark.parametrize(
    ("mask", "score", "name"),
    [(_documents, None, "IDS_q"), (_alive, None, "ALIVE_q"), (None, _biased, "row_value")],
)
def test_the_loading_warp_reads_what_steps_need_of_rows(
    mask: Mod | None, score: Mod | None, name: str
) -> None:
    source = _main(mask, score).source
    leaves, accumulates = _function(source, "leave_rows"), _function(source, "accumulate")
    assert leaves.count("gl.load(") == leaves.count("_smem.index(slot).store(") == 1
    # Keys stay: what is read of them is read once, before the steps.
    loads = re.findall(r"gl\.load\((.*)\)", accumulates)
    assert len(loads) == (1 if name == "IDS_q" else 0)
    assert not any("q_idx" in load or "q_here" in load for load in loads)
    # In the first step and in the others.
    assert accumulates.count(f"{name}_smem.index(slot).load(row_layout)[None, :]") == 2
    assert "mbarrier.init(q_ready.index(i), count=2)" in source


def test_nothing_is_left_where_nothing_comes_from_memory() -> None:
    source = _main(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).source
    assert "leave_rows" not in source
    assert "mbarrier.init(q_ready.index(i), count=1)" in source


def test_gradients_of_scores_read_rows_themselves() -> None:
    table = BIAS.clone().requires_grad_()

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[kv_idx] * BIAS[q_idx]

    spec = spec_for(_documents, biased, head_dim=64)
    values = resolve(biased, _documents)[1]
    without = backward_spec(spec, values, None)
    learned = backward_spec(spec, values, None, slots=(0,))
    assert len(staged_nodes(without)) == 2
    assert len(staged_nodes(learned)) == 1


def test_the_plan_makes_room() -> None:
    # With dropout a program has one tile of keys, and loads further ahead where there is room.
    assert _main(_alive, dropout=True).plan.tiles.num_stages == 3
    assert _main(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, dropout=True).plan.tiles.num_stages == 4
