"""Names of captures in generated files, and the list of run-time arguments."""

from __future__ import annotations

import keyword

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexc import masks, scores
from flexc.codegen.arguments import Source, capture_arguments, capture_names, forward_arguments
from flexc.codegen.module import GeneratedKernel
from flexc.ir.build import binary, cast, const, input_, load, scalar, size
from flexc.ir.graph import Capture
from flexc.ir.ops import Input, Op
from flexc.ir.spec import Blocks
from flexc.ir.types import DType, Storage
from tests.codegen.generate import generate, names_in, spec_for, spec_for_graphs

AWKWARD = (
    "slopes", "self.bias", "table[0]", "scale", "class", "2x", "", "cfg['w']", "self_bias", "größe", "q", "_",
    "float", "a.b.c", "score", "x²", "mask", "index", "value", "None", "q_ptr", "kv",
)  # fmt: skip


def _scalars(*names: str) -> tuple[Capture, ...]:
    return tuple(Capture(name, Storage.I32) for name in names)


def test_a_users_name_is_kept_where_it_can_be() -> None:
    names = capture_names(_scalars("slopes", "self.window", "bias[3]", "lambda", "2x", "scale", ""))
    assert names == ("slopes", "self_window", "bias_3", "user_lambda", "user_2x", "user_scale", "captured")


@given(st.lists(st.sampled_from(AWKWARD) | st.text(max_size=6), max_size=6), st.booleans())
def test_names_are_distinct_identifiers(texts: list[str], tensors: bool) -> None:
    captures = tuple(Capture(text, Storage.FP32, 2 if tensors else None) for text in texts)
    names = capture_names(captures)
    assert len(set(names)) == len(names) == len(texts)
    for name in names:
        assert name.isidentifier()
        assert name.isascii()
        assert not keyword.iskeyword(name)


def _full_featured() -> list[GeneratedKernel]:
    """Files that between them use every piece of the template."""
    score = scores.softcap(3.0)

    def helped(score, b, h, q_idx, kv_idx):
        sign = torch.sign(score) + torch.tanh(score) ** 3.5
        return sign + (q_idx - kv_idx) // (b + 3) + (q_idx - kv_idx) % (h + 3) - (kv_idx - q_idx) // (b - 7)

    return [
        generate(masks.causal, score, has_sinks=True, return_lse=True, head_dim=80),
        generate(masks.causal, helped, storage=Storage.FP32),
        generate(None, None, head_dim=72),
    ]


def test_no_capture_takes_a_name_of_the_generated_file() -> None:
    taken = set().union(*(names_in(kernel.source) for kernel in _full_featured()))
    # Not the capture of softcap, nor names of hoisted values, which are chosen around the captures.
    taken = {name for name in taken if name != "c" and "_value" not in name}
    assert not taken & set(capture_names(_scalars(*sorted(taken))))


def test_names_derived_from_captures_are_distinct() -> None:
    captures = (
        Capture("x", Storage.FP32, 2),
        Capture("x_ptr", Storage.I32),
        Capture("x_stride_0", Storage.I32),
        Capture("x_size_1", Storage.FP32, 1),
        Capture("x_size_1", Storage.I32),
        Capture("out_ptr", Storage.FP32),
        Capture("k_stride_s", Storage.I32),
        Capture("map_runs_ptr", Storage.I32),
        Capture("kv", Storage.FP32, 1),
    )
    h, kv = input_(Input.H), input_(Input.KV_IDX)
    total = load(0, (h, kv), DType.F32)
    for slot in (1, 2, 4, 5, 6, 7):
        total = binary(Op.ADD, total, scalar(slot, captures[slot].dtype))
    total = binary(Op.ADD, total, load(3, (kv,), DType.F32))
    total = binary(Op.ADD, total, load(8, (h,), DType.F32))
    spec = spec_for_graphs(score=total, captures=captures, blocks=Blocks.MAP)
    arguments = [a.name for a in forward_arguments(spec, capture_names(captures))]
    assert len(set(arguments)) == len(arguments), arguments


def test_only_what_the_graphs_read_is_passed() -> None:
    captures = (
        Capture("n", Storage.I32),
        Capture("flag", Storage.BOOL),
        Capture("t", Storage.BF16, 2),
        Capture("unused", Storage.FP32, 3),
        Capture("flags", Storage.BOOL, 1),
        Capture("rate", Storage.FP32),
        Capture("big", Storage.I64),
    )
    q, kv = input_(Input.Q_IDX), input_(Input.KV_IDX)
    total = binary(Op.ADD, load(2, (q, kv), DType.F32), scalar(5, DType.F32))
    for part in (
        scalar(0, DType.I32),
        cast(scalar(1, DType.BOOL), DType.I32),
        size(3, 1),
        scalar(6, DType.I64),
    ):
        total = binary(Op.ADD, total, cast(part, DType.F32))
    total = binary(Op.ADD, total, cast(load(4, (kv,), DType.BOOL), DType.F32))
    spec = spec_for_graphs(score=total, captures=captures, unit_stride=frozenset({2}))
    arguments = capture_arguments(spec, capture_names(captures), [total])
    assert [(a.name, a.type) for a in arguments] == [
        ("n", "i32"),
        ("flag", "i32"),
        ("t_ptr", "*bf16"),
        ("t_stride_0", "i64"),
        ("t_size_0", "i32"),
        ("t_size_1", "i32"),
        ("unused_size_1", "i32"),
        ("flags_ptr", "*i8"),
        ("flags_stride_0", "i64"),
        ("flags_size_0", "i32"),
        ("rate", "fp32"),
        ("big", "i64"),
    ]


@pytest.mark.parametrize("aligned", [True, False])
def test_divisibility_is_promised_for_aligned_tensors_only(aligned: bool) -> None:
    spec = spec_for(masks.causal, aligned=aligned)
    for argument in forward_arguments(spec, ()):
        of_tensors = argument.source.value.removesuffix("_stride") in ("q", "k", "v", "out")
        of_map = argument.source in (Source.MAP_BLOCK_Q, Source.MAP_BLOCK_KV)
        assert argument.divisible == ((aligned and of_tensors) or of_map), argument


def test_arguments_are_the_parameters_of_the_kernel() -> None:
    kernel = generate(masks.document(torch.zeros(9, dtype=torch.int32)), scores.softcap(2.0), has_sinks=True)
    signature = kernel.source.partition("def attention_forward(")[2].partition("):")[0]
    assert [name.strip() for name in signature.split(",") if name.strip()] == [
        a.name for a in kernel.arguments
    ]


def test_a_literal_needs_no_argument() -> None:
    score = binary(Op.ADD, input_(Input.SCORE), const(1.0))
    assert capture_arguments(spec_for_graphs(score=score), (), [score]) == []
