"""Hopper backwards of mods of every kind: the machine code holds what their design promises.

Of each, only the kernel with the products is compiled: what comes before and after it is one of a few kinds.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

import flexc
from flexc import masks
from flexc.artifact import Artifact
from flexc.build_backward import backward_kernel_for
from flexc.choice import backward_parts
from flexc.codegen.backward_spec import Entry, backward_spec
from flexc.codegen.hopper_backward_plan import suited
from flexc.compiler import triton_version
from flexc.ir.types import Storage
from flexc.resolve import resolve
from flexc.toolchain import disassemble
from tests.codegen.generate import spec_for
from tests.compile.machine_code import Promise, check
from tests.compile.test_hopper import FORMS, MODS

# Loads a pair, whose addresses occupy the registers: they compile, and keep more of them in memory.
LOADING = ("natten2d", "tree")
# The derivative of erf: more numbers a pair than registers at 128.
HEAVY = ("gym_activation_gelu",)

# Where K and V lie is found anew in each step: with it in registers all along, 14 numbers were spilled. One
# makes room for the first row of a thread, where the mask applies.
LEAN = ("plain", "causal", "window", "alibi_causal")


def _compile(
    name: str, head_dim: int, *, learned: bool = False, deterministic: bool = False, **facts: Any
) -> Artifact:
    return _compile_mods(*MODS[name], head_dim, learned=learned, deterministic=deterministic, **facts)


def _compile_mods(
    mask: Any, score: Any, head_dim: int, *, learned: bool = False, deterministic: bool = False, **facts: Any
) -> Artifact:
    values = resolve(score, mask)[1]
    spec = spec_for(mask, score, head_dim=head_dim, return_lse=True, **facts)
    slots = tuple(n for n, c in enumerate(spec.captures) if learned and c.is_tensor and c.dtype.is_float)
    backward = suited(backward_spec(spec, values, None, slots=slots, deterministic=deterministic))
    return backward_kernel_for(backward, Entry.HOPPER, "sm90").artifact


def _check(main: Artifact, spills: int) -> None:
    sass = disassemble(main.cubin)
    consumers = main.num_warps // 4 - 1
    check(
        sass,
        main.ptx,
        main.resources,
        Promise(consumers, (240 if consumers == 2 else 232, 24), spills=spills),
    )
    assert "UTMAREDG" in sass


@pytest.mark.parametrize(("name", "head_dim"), FORMS)
def test_machine_code(name: str, head_dim: int) -> None:
    most = 2 if name in LEAN and head_dim == 128 else 16
    if head_dim == 64 and not triton_version().startswith("3.6."):
        most = 32  # whose programs take one tile after another
    spills = 400 if name in LOADING else 700 if name in HEAVY else most
    _check(_compile(name, head_dim), spills)


@pytest.mark.parametrize(
    ("name", "head_dim", "sides"), [("causal", 64, 1), ("causal", 128, 1), ("far_window", 64, 2)]
)
def test_a_mask_takes_two_instructions_a_pair(name: str, head_dim: int, sides: int) -> None:
    """A comparison with a number that the code holds, and a selection."""
    mask = masks.sliding_window(1000) & masks.causal if name == "far_window" else masks.causal
    sass = disassemble(_compile_mods(mask, None, head_dim).cubin)
    pairs = 64 * (128 if head_dim == 64 else 64) // 128
    # In the first step and in the loop of two warpgroups; and where keys hang over the end.
    # Newer compilers join branches.
    assert 4 * pairs < sass.count("FSEL") + 1 <= 4 * pairs * (sides + 1) + 1
    assert sass.count(" ISETP") < 4 * pairs * sides + 150


@pytest.mark.parametrize(("head_dim", "deterministic"), [(40, False), (64, False), (64, True)])
@pytest.mark.parametrize("name", ["window", "document_by_batch"])
def test_short_programs_leave_room_for_another(name: str, head_dim: int, deterministic: bool) -> None:
    main = _compile(name, head_dim, deterministic=deterministic)
    _check(main, 0)
    threads, kept_by_the_system = 32 * main.num_warps, 1024
    assert 2 * threads * main.resources.registers <= 65536
    assert 2 * (main.shared + kept_by_the_system) <= 228 * 1024


# With wide heads there are no registers for weights in fp32, or for what adds up rows: some wait in memory.
@pytest.mark.parametrize(
    ("name", "head_dim", "spills"),
    [
        ("relative_bias", 64, 0),
        ("relative_bias", 128, 32),
        ("alibi_causal", 64, 0),
        ("alibi_causal", 128, 136),  # 54 with the ptxas of Triton 3.6, 135 with that of 3.9
    ],
)
def test_learned(name: str, head_dim: int, spills: int) -> None:
    main = _compile(name, head_dim, learned=True)
    _check(main, spills)
    sass = disassemble(main.cubin)
    assert sass.count("SHFL") >= 2 * 34, "sums are passed on between threads, in two warpgroups of two steps"
    assert 12 <= sass.count("REDG.E.ADD") <= 24, "and few of them are added to memory"


@pytest.mark.parametrize(("head_dim", "spills"), [(64, 0), (128, 16)])
def test_learned_and_deterministic(head_dim: int, spills: int) -> None:
    main = _compile("relative_bias", head_dim, learned=True, deterministic=True)
    _check(main, spills)
    # Three sums of four words in two warpgroups of two steps.
    assert disassemble(main.cubin).count("REDG.E.ADD.64") == 4 * 3 * 4


@pytest.mark.parametrize(
    ("name", "head_dim", "spills"),
    [("relative_bias", 64, 0), ("alibi_causal", 64, 8), ("relative_bias", 128, 80)],
)
def test_learned_with_dropout(name: str, head_dim: int, spills: int) -> None:
    _check(_compile(name, head_dim, learned=True, dropout=True), spills)


@pytest.mark.parametrize(("head_dim", "storage"), [(96, Storage.FP16), (40, Storage.BF16)])
def test_other_head_dims(head_dim: int, storage: Storage) -> None:
    _check(_compile("softcap_causal", head_dim, storage=storage), 16)


# dK and dV leave room for one tile of scores; what gradients are multiplied by is half of another.
@pytest.mark.parametrize(
    ("name", "spills"), [("plain", 0), ("causal", 0), ("alibi_causal", 0), ("softcap_causal", 112)]
)
def test_heads_in_parts(name: str, spills: int) -> None:
    main = _compile(name, 192, head_dim_v=128)
    _check(main, spills)
    # In each warpgroup three S of 12 products, two dP of 8, dV of 4, dK of 8; in both three parts of two dQ.
    assert disassemble(main.cubin).count("HGMMA") == 2 * (3 * 12 + 2 * (8 + 4 + 8)) + 3 * 2 * 8


@pytest.mark.parametrize(("name", "spills"), [("plain", 16), ("causal", 16), ("softcap_causal", 48)])
def test_dq_apart(name: str, spills: int) -> None:
    mask, score = MODS[name]
    spec = spec_for(mask, score, head_dim=256, return_lse=True)
    backward = backward_spec(spec, resolve(score, mask)[1], None, deterministic=True)
    parts = backward_parts(backward, "sm90", (), hopper=True)
    kernels = [
        backward_kernel_for(of, e, "sm90").artifact for of, e in parts if e in (Entry.HOPPER, Entry.HOPPER_Q)
    ]
    for kernel in kernels:
        sass = disassemble(kernel.cubin)
        check(sass, kernel.ptx, kernel.resources, Promise(2, (240, 24), spills=spills))
        assert "UTMAREDG" not in sass


@pytest.mark.parametrize(
    ("name", "spills"), [("plain", 0), ("causal", 0), ("softcap_causal", 0), ("document_by_batch", 0)]
)
def test_single_precision(name: str, spills: int) -> None:
    mask, score = MODS[name]
    spec = spec_for(mask, score, head_dim=128, return_lse=True, storage=Storage.FP32)
    parts = backward_parts(backward_spec(spec, resolve(score, mask)[1], None), "sm90", (), hopper=True)
    kernels = {e: backward_kernel_for(of, e, "sm90").artifact for of, e in parts if e in _OF_PAIRS}
    for entry, products in _OF_PAIRS.items():
        kernel = kernels[entry]
        sass = disassemble(kernel.cubin)
        check(sass, kernel.ptx, kernel.resources, Promise(2, (240, 24), stores=None, spills=spills))
        assert sass.count("HGMMA") == products


# Three products take the place of one. By keys a warpgroup has one of 8 wgmmas before the loop and in it,
# and one of 4 in it; by queries scores before the loop and in it, dP, and dQ.
_OF_PAIRS = {Entry.HOPPER: 2 * 3 * (2 * 8 + 4), Entry.HOPPER_Q: 2 * 3 * (2 * 8 + 8 + 4)}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap_causal", "document_by_batch"])
def test_deterministic(name: str, head_dim: int) -> None:
    mask, score = MODS[name]
    spec = spec_for(mask, score, head_dim=head_dim)
    backward = backward_spec(spec, resolve(score, mask)[1], None, deterministic=True)
    parts = backward_parts(backward, "sm90", (), hopper=True)
    (main,) = (
        backward_kernel_for(of, entry, "sm90").artifact for of, entry in parts if entry is Entry.HOPPER
    )
    _check(main, 16)
    sass = disassemble(main.cubin)
    # Between what TMA adds of a tile and the next one's turn: all is written, and ordered for the GPU.
    for added in re.finditer("UTMAREDG", sass):
        then = _from(sass, added.end())
        wrote, passed = then.index("MEMBAR.ALL.GPU"), then.index("REDG.E.MAX.S32.STRONG.GPU")
        assert then.index("DEPBAR.LE SB0, 0x0") < wrote < passed
    # And between the turn and what TMA does.
    for awaited in re.finditer("LDG.E.STRONG.GPU", sass):
        then = _from(sass, awaited.end())
        assert then.index("FENCE.VIEW.ASYNC.G") < then.index("UTMAREDG")
    groups = main.num_warps // 4 - 1
    assert sass.count("UTMAREDG") == 2 * groups, "two warps add what each warpgroup computed"


def _from(sass: str, at: int) -> str:
    """The instructions from a place on, in the order in which they run where no conditional jump is taken."""
    found: list[str] = []
    while len(found) < 200:
        end = sass.find("\n", at)
        line = sass[at:end]
        found.append(line)
        jump = re.match(r"\s*/\*\w+\*/\s+BRA `\((\.L_\w+)\)", line)
        at = sass.index(f"{jump[1]}:") if jump else end + 1
    return "\n".join(found)


# With a factor on the gradient at 128 the random words are more numbers than registers; most with Triton 3.9.
@pytest.mark.parametrize(
    ("name", "head_dim", "spills"),
    [
        ("plain", 64, 0),
        ("plain", 128, 8),
        ("causal", 128, 16),
        ("softcap_causal", 64, 0),
        ("softcap_causal", 128, 80),
    ],
)
def test_dropout(name: str, head_dim: int, spills: int) -> None:
    _check(_compile(name, head_dim, dropout=True), spills)


# With a mask, portable kernels repair what became NaN.
@pytest.mark.parametrize(
    ("name", "head_dim"), [("plain", 64), ("causal", 64), ("softcap_causal", 128), ("relative_bias", 64)]
)
def test_kernels_of_a_backward(name: str, head_dim: int) -> None:
    mask, score = MODS[name]
    kernel = flexc.compile(mask_mod=mask, score_mod=score, head_dim=head_dim, backward=True, backend="hopper")
    rows, main, *others = kernel.backward_artifacts
    repairs = [] if mask is None else ["attention_backward_kv", "attention_backward_q"]
    assert rows.entry == "attention_backward_rows"
    assert [a.entry for a in others] == ["attention_backward_finish", *repairs]
    assert main.key == _compile(name, head_dim).key  # what the tests above look at is what users get
