"""`flexc.compile`, what a kernel shows of itself, and kernels that are saved and loaded."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flexc
from flexc import artifact, build, build_backward, compiler, masks
from flexc.build import is_loaded
from flexc.build_backward import backward_kernel_for
from flexc.call import AttentionCall
from flexc.callspec import spec_of
from flexc.check import check_closed_form
from flexc.choice import backward_parts, why_portable_backward
from flexc.codegen.backward_spec import backward_spec
from flexc.errors import (
    DeviceMismatch,
    KernelFileError,
    NoFeasiblePlan,
    OutsideClosedForm,
    UnknownOption,
    UnsupportedDtype,
    UnsupportedFeature,
    UnsupportedHeadDim,
    UnsupportedTarget,
)
from flexc.kernel import Kernel
from flexc.resolve import resolve

SLOPES = torch.tensor([0.5, 0.25])
OPTIONS = {"block_q": 64, "block_kv": 32, "num_warps": 4, "num_stages": 2}


def _compile(**arguments: Any) -> Kernel:
    return flexc.compile(
        mask_mod=masks.causal,
        score_mod=flexc.scores.alibi(SLOPES),
        head_dim=64,
        return_lse=True,
        options=OPTIONS,
        **arguments,
    )


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """One kernel for all tests that only look at it."""
    return _compile()


@pytest.fixture
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has built and loaded nothing."""
    monkeypatch.setattr(build, "_built", {})
    monkeypatch.setattr(build, "_loaded", {})


def test_the_source_is_the_generated_file(kernel: Kernel) -> None:
    names = [node.name for node in ast.parse(kernel.source).body if isinstance(node, ast.FunctionDef)]
    assert names == ["score_mod", "mask_mod", "online_softmax", "attention_forward"]
    assert "slopes" in kernel.source


def test_every_stage_of_machine_code(kernel: Kernel) -> None:
    assert kernel.target == "sm90"
    assert ".target sm_90a" in kernel.ptx["attention_forward"]
    assert "wgmma" in kernel.ptx["attention_forward"]
    assert "HGMMA" in kernel.sass["attention_forward"]
    assert "ttg." in kernel.ttgir["attention_forward"]


def test_resources(kernel: Kernel) -> None:
    (resources,) = kernel.resources.values()
    assert 0 < resources.registers <= 255
    assert resources.spills == 0
    assert resources.warps == 4
    assert resources.shared_memory >= 64 * 64 * 2


def test_explain_names_every_decision(kernel: Kernel) -> None:
    text = kernel.explain()
    for said in ("score_mod and mask_mod, D=64, bf16", "target sm90", "block_q = 64: asked for", "slopes"):
        assert said in text
    assert repr(kernel) == "Kernel(score_mod and mask_mod, D=64, bf16, sm90)"
    assert kernel.returns_lse


@pytest.mark.usefixtures("_forgotten")
def test_a_saved_kernel_is_loaded_without_a_compiler(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(compiler, "compile_file", refuse)
    with pytest.raises(AssertionError, match="compiled"):
        _compile()
    kernel.save(tmp_path / "saved")
    before = build.compilations
    loaded = flexc.load(tmp_path / "saved")
    assert loaded.artifact == kernel.artifact
    assert loaded.sass == kernel.sass
    assert _compile().artifact == kernel.artifact  # the loaded one serves what it fits
    assert build.compilations == before
    with pytest.raises(AssertionError, match="compiled"):
        _compile(dtype=torch.float16)


def test_saving_replaces_what_was_there(kernel: Kernel, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "saved"
    for _ in range(2):
        kernel.save(folder)
        assert artifact.read(folder) == kernel.artifact
    assert [f.name for f in folder.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.py", "kernel.ptx", "metadata.json"])
def test_a_damaged_folder(kernel: Kernel, tmp_path: Path, name: str) -> None:
    kernel.save(tmp_path / "saved")
    (tmp_path / "saved" / name).unlink()
    with pytest.raises(KernelFileError, match="holds no kernel") as caught:
        flexc.load(tmp_path / "saved")
    assert "Kernel.save" in (caught.value.hint or "")


def test_changed_machine_code(kernel: Kernel, tmp_path: Path) -> None:
    kernel.save(tmp_path / "saved")
    cubin = tmp_path / "saved" / "kernel.cubin"
    cubin.write_bytes(cubin.read_bytes()[:-1])
    with pytest.raises(KernelFileError, match="damaged: its checksum does not fit"):
        flexc.load(tmp_path / "saved")


def test_another_format(kernel: Kernel, tmp_path: Path) -> None:
    kernel.save(tmp_path / "saved")
    metadata = tmp_path / "saved" / "metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "format": 99}))
    with pytest.raises(KernelFileError, match="another format") as caught:
        flexc.load(tmp_path / "saved")
    assert "precompile it again" in (caught.value.hint or "")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KernelFileError, match="holds no kernel"):
        flexc.load(tmp_path / "nowhere")


def test_calling_it_needs_a_gpu_and_what_its_mods_captured(kernel: Kernel) -> None:
    x = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(DeviceMismatch, match="q is on cpu"):
        kernel(x, x, x)
    loaded = Kernel(kernel.artifact)
    with pytest.raises(
        KernelFileError, match=r"captured \['slopes'\]; missing \['slopes'\], unknown \['bias'\]"
    ):
        loaded(x, x, x, captures={"bias": SLOPES})


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"dtype": torch.float64}, UnsupportedDtype, "dtype is torch.float64"),
        ({"target": "sm70"}, UnsupportedTarget, "there is no target 'sm70'"),
    ],
)
def test_what_cannot_be_compiled(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        _compile(**arguments)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"head_dim": 0}, UnsupportedHeadDim, "head_dim is 0"),
        ({"head_dim": 64, "head_dim_v": 513}, UnsupportedHeadDim, "head_dim_v is 513"),
        ({"head_dim": 64, "options": {"warps": 4}}, UnknownOption, "unknown option 'warps'"),
        (
            {"head_dim": 512, "options": {"block_q": 256, "block_kv": 256}},
            NoFeasiblePlan,
            "no tiles fit sm90",
        ),
    ],
)
def test_shapes_and_options_that_have_no_kernel(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        flexc.compile(**arguments)


def test_the_source_of_a_backward_is_there_if_it_was_asked_for(kernel: Kernel) -> None:
    with pytest.raises(UnsupportedFeature, match="made without its backward") as caught:
        _ = kernel.backward_source
    assert "backward=True" in str(caught.value)


def test_a_backward_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = torch.ones(4, requires_grad=True)
    made = flexc.compile(
        mask_mod=flexc.masks.causal, score_mod=flexc.scores.alibi(slopes), head_dim=32, backward=True
    )
    entries = [
        "attention_forward",
        "attention_backward_rows",
        "attention_backward",
        "attention_backward_finish",
        "attention_backward_q",
        "attention_backward_kv",
    ]
    assert list(made.resources) == list(made.ptx) == entries
    assert "slopes_grad_ptr" in made.backward_source
    for entry in entries[1:]:
        assert f"def {entry}(" in made.backward_source
        assert entry in made.sass[entry]
    made.save(tmp_path / "kernel")
    loaded = flexc.load(tmp_path / "kernel")
    assert loaded.backward_source == made.backward_source
    assert loaded.resources == made.resources

    monkeypatch.setattr(build_backward, "_built", {})
    before = build.compilations
    again = flexc.compile(
        mask_mod=flexc.masks.causal, score_mod=flexc.scores.alibi(slopes), head_dim=32, backward=True
    )
    assert build.compilations == before
    assert again.backward_source == made.backward_source


def test_a_backward_that_launches_a_kernel_twice_is_saved_once(tmp_path: Path) -> None:
    """Sums by distance go to the table after the kernels, and again after those that repair."""
    table = torch.zeros(4, 199, requires_grad=True)
    bias = flexc.scores.relative_bias(table)
    made = flexc.compile(mask_mod=masks.causal, score_mod=bias, head_dim=64, target="sm90", backward=True)
    entries = [artifact.entry for artifact in made.backward_artifacts]
    assert entries.count("attention_backward_captured") == 1
    made.save(tmp_path / "kernel")
    assert [a.entry for a in flexc.load(tmp_path / "kernel").backward_artifacts] == entries


@pytest.mark.usefixtures("_forgotten")
def test_kernels_with_dropout_serve_calls_with_dropout(tmp_path: Path) -> None:
    """Saved and loaded, they are those that `flexc.attention` takes, forward and backward."""
    made = flexc.compile(mask_mod=masks.causal, head_dim=32, target="sm80", dropout=True, backward=True)
    assert "seed_ptr" in made.source
    assert "seed_ptr" in made.backward_source
    made.save(tmp_path / "kernel")
    flexc.load(tmp_path / "kernel")
    mods, values, _ = resolve(None, masks.causal)
    x = torch.zeros(1, 2, 100, 32, dtype=torch.bfloat16)
    call = AttentionCall(x, x, x, mods, values, None, 0.1, None, return_lse=True, out=None, allow_tf32=False)
    assert is_loaded(spec_of(replace(call, dropout_p=0.2)), "sm80")
    assert not is_loaded(spec_of(call), "sm80")


@pytest.mark.usefixtures("_forgotten")
def test_deterministic_kernels_serve_deterministic_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved and loaded, they are those that a deterministic backward takes; none is compiled for it."""
    made = flexc.compile(mask_mod=masks.causal, head_dim=32, target="sm90", backward=True, deterministic=True)
    made.save(tmp_path / "kernel")
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(build, "_built", {})
    monkeypatch.setattr(build_backward, "_built", {})
    flexc.load(tmp_path / "kernel")
    mods, values, _ = resolve(None, masks.causal)
    x = torch.zeros(1, 2, 100, 32, dtype=torch.bfloat16)
    call = AttentionCall(x, x, x, mods, values, None, 0.1, None, return_lse=True, out=None, allow_tf32=False)
    wanted = backward_spec(spec_of(call), values, (100, 100), deterministic=True)
    parts = backward_parts(wanted, "sm90", (), hopper=why_portable_backward(wanted, "sm90", ()) is None)
    before = build.compilations
    found = [backward_kernel_for(of, entry, "sm90").artifact.entry for of, entry in parts]
    assert build.compilations == before
    assert found == list(made.resources)[1:]


def test_loop_bounds_of_a_kernel_hold_for_some_numbers_and_lengths_only(tmp_path: Path) -> None:
    made = flexc.compile(mask_mod=masks.chunked(64), head_dim=64, options=OPTIONS)
    assert "blocks = ranges" in made.explain()
    made.save(tmp_path / "kernel")
    requires = artifact.read(tmp_path / "kernel").requires
    check_closed_form(requires, (7,), 1000, 1000)
    with pytest.raises(OutsideClosedForm, match="and is called with 0") as caught:
        check_closed_form(requires, (0,), 1000, 1000)
    assert '{"blocks": "map"}' in str(caught.value)
    with pytest.raises(OutsideClosedForm, match="lengths up to"):
        check_closed_form(requires, (7,), 2**30 - 1, 1000)


def test_a_map_can_be_asked_for() -> None:
    made = flexc.compile(mask_mod=masks.causal, head_dim=64, options={**OPTIONS, "blocks": "map"})
    assert "blocks = map: asked for" in made.explain()
    assert "map_stretches_ptr" in made.source
    assert "map_" not in flexc.compile(mask_mod=masks.causal, head_dim=64, options=OPTIONS).source
    with pytest.raises(UnknownOption, match="option blocks is 'ranges'"):
        flexc.compile(mask_mod=masks.causal, head_dim=64, options={"blocks": "ranges"})
