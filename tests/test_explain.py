"""`explain`: what is said of masks and score functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc.cli import main
from flexc.errors import InternalError, NoFeasiblePlan
from flexc.explain import draw_tiles, explain_score
from flexc.ir.schedule import PARTIAL_COST
from flexc.plane import plane

WINDOW = 1024


@flexc.mask_mod
def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


@pytest.mark.parametrize("mistake", [NoFeasiblePlan, InternalError])
def test_the_rest_is_explained_where_a_kernel_fails(
    mistake: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**given: Any) -> Any:
        raise mistake(f"no tiles for head dimension {given['head_dim']}")

    monkeypatch.setattr("flexc.cli.explain.compile_kernel", fails)
    monkeypatch.setattr("sys.argv", ["flexc", "explain", f"{__file__}:window", "--target", "sm80"])
    with pytest.raises((SystemExit, InternalError)) as caught:
        main()
    out, err = capsys.readouterr()
    assert "q_idx >= kv_idx and q_idx - kv_idx < WINDOW" in out
    assert f"no kernel: forward for sm80, head dimension 128, bf16 failed: {mistake.__name__}" in out
    assert "no tiles for head dimension 128" in err + str(caught.value)


def test_mask() -> None:
    text = window.explain(4096, 4096)
    assert text.startswith("window  (")
    assert "q_idx >= kv_idx and q_idx - kv_idx < WINDOW" in text
    assert "WINDOW = 1024" in text
    assert "the same for every batch and head" in text
    assert "1,024 of 128 x 128 over 4,096 x 4,096" in text
    empty, partial, full = plane(window, 4096, 4096).block_map(128, 128).counts()
    for count, meaning in ((empty, "empty: skipped"), (partial, "partial:"), (full, "full:")):
        assert any(f"{count:,} " in line and meaning in line for line in text.splitlines())
    assert "max(q_idx - WINDOW + 1, 0) <= kv_idx <= q_idx" in text
    assert "by closed form; as a map: " in text
    assert "by interval analysis" in text
    work = full + PARTIAL_COST * partial
    assert f"{work:,.0f} full tiles" in text
    assert "132 processors would be busy" in text


def mask_of(function: Any) -> str:
    """The lines on keys of a mask over 64 x 64."""
    lines = flexc.mask_mod(function).explain(64, 64).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  keys "))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" " * 16))
    return "\n".join(line[16:] for line in lines[start:end])


def test_keys_of_a_row() -> None:
    lengths, period = torch.tensor([30, 40]), 40
    assert mask_of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx) == "kv_idx <= q_idx\nexact: no map is needed"
    conditional = mask_of(lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) & (q_idx < lengths[b]))
    assert conditional.startswith("kv_idx < lengths[b] if q_idx < lengths[b]\n")
    assert mask_of(lambda b, h, q_idx, kv_idx: q_idx < 0).startswith("no key at all\n")
    after = mask_of(lambda b, h, q_idx, kv_idx: (kv_idx > q_idx) | (q_idx == 3))
    assert set(after.splitlines()[:2]) == {"q_idx + 1 <= kv_idx", "every kv_idx if q_idx == 3"}
    halves = mask_of(lambda b, h, q_idx, kv_idx: (kv_idx % period <= q_idx) & (kv_idx >= period))
    assert "exact: no map is needed" in halves


def test_why_there_is_no_closed_form() -> None:
    assert mask_of(lambda b, h, q_idx, kv_idx: kv_idx ^ 5 < q_idx) == (
        "no closed form: `kv_idx ^ 5` is not affine in kv_idx"
    )
    rough = mask_of(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < 8) | (kv_idx % 7 == 0)))
    assert rough.splitlines() == [
        "at most kv_idx <= q_idx",
        "all of kv_idx < min(q_idx + 1, 8)",
        "no closed form: `kv_idx % 7` is periodic in kv_idx",
    ]
    stride = -3
    negative = mask_of(lambda b, h, q_idx, kv_idx: kv_idx // stride == q_idx // stride)
    assert "not here: this holds where 1 <= stride" in negative
    period = 20
    many = mask_of(lambda b, h, q_idx, kv_idx: (kv_idx % period <= q_idx) & (kv_idx >= period))
    assert "kv_len <= 2 * period" in many


def test_keys_of_equal_ids() -> None:
    def text(doc: torch.Tensor) -> list[str]:
        packed = mask_of(lambda b, h, q_idx, kv_idx: (doc[q_idx] == doc[kv_idx]) & (q_idx >= kv_idx))
        return packed.splitlines()

    assert text(torch.arange(64) // 10)[:2] == [
        "doc.run_first[q_idx] <= kv_idx <= q_idx",
        "run: the keys with the id of q_idx; equal ids lie side by side here",
    ]
    assert text(torch.arange(64) // 10 % 3)[:2] == [
        "at most doc.hull_first[q_idx] <= kv_idx <= q_idx",
        "all of doc.run_first[q_idx] <= kv_idx <= q_idx",
    ]


def test_mask_that_reads_everything() -> None:
    table = torch.ones(2, 3, 64, dtype=torch.bool)

    def data(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[b, h, kv_idx]

    text = flexc.mask_mod(data).explain(64, 64)
    assert "table: bool tensor (2, 3, 64)" in text
    assert "table[b, h, kv_idx]" in text
    assert "once a column" in text
    assert "the same for every" not in text


def test_mask_that_allows_all() -> None:
    text = flexc.mask_mod(flexc.noop_mask).explain(100, 100)
    assert "nothing: the same everywhere" in text


def test_score() -> None:
    slopes = torch.ones(8)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        biased = score + slopes[h] * (kv_idx - q_idx)
        return torch.where(q_idx >= kv_idx, biased, float("-inf"))

    text = explain_score(alibi)
    assert "slopes: float32 tensor (8,)" in text
    assert "mask" in text
    assert "q_idx >= kv_idx" in text
    assert "once a head   slopes[h]" in text


def test_tiles_as_text() -> None:
    drawn = draw_tiles(plane(flexc.masks.causal, 64, 64).block_map(16, 16)).splitlines()
    assert drawn[:4] == ["▒···", "█▒··", "██▒·", "███▒"]
    assert drawn[4].startswith("one character: 16 x 16 pairs")


def test_many_tiles_as_text_stay_on_one_screen() -> None:
    drawn = draw_tiles(plane(flexc.masks.causal, 8192, 8192).block_map(64, 64), columns=32).splitlines()
    assert len(drawn) == 33
    assert drawn[0] == "▒" + "·" * 31
