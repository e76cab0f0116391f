"""Which calls the Hopper kernels take, and what a launch of one passes besides the tensors."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexc
from flexc import choice, driver, masks
from flexc.call import PLAIN, AttentionCall
from flexc.callspec import spec_of
from flexc.codegen.arguments import Argument, Source, descriptor_type
from flexc.codegen.design import Design
from flexc.errors import NoFeasiblePlan, UnknownOption, UnsupportedFeature
from flexc.kernel import Kernel
from flexc.parameters import Block, Layout
from flexc.repeated import Repeated
from flexc.tensor_maps import SIZE, TensorMaps, is_descriptor


def _call(**changes: Any) -> AttentionCall:
    q, k = (torch.zeros(2, heads, 300, 128, dtype=torch.bfloat16) for heads in (4, 2))
    call = AttentionCall(
        q=q, k=k, v=k, mods=PLAIN, values=(), block_map=None, scale=0.1, sinks=None, return_lse=False,
        out=None, allow_tf32=False,
    )  # fmt: skip
    return replace(call, **changes)


def _why_not(target: str = "sm90", **changes: Any) -> str | None:
    call = _call(**changes)
    return choice.why_not_hopper(call, spec_of(call), target)


def test_a_fitting_call() -> None:
    assert _why_not() is None
    whole = torch.zeros(2, 300, 3, 4, 128, dtype=torch.float16)
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    assert _why_not(q=q, k=k, v=v) is None
    shared = torch.zeros(1, 1, 300, 128, dtype=torch.float16).expand(2, 4, 300, 128)
    assert _why_not(q=q, k=shared, v=shared) is None
    one = torch.zeros(300, 64, dtype=torch.bfloat16).expand(1, 1, 300, 64)
    assert _why_not(q=one, k=one, v=one) is None


def test_why_a_call_does_not_fit() -> None:
    x = torch.zeros(2, 4, 300, 128, dtype=torch.bfloat16)
    wide = torch.zeros(2, 4, 30, 264, dtype=torch.bfloat16)
    empty = x[:, :, :0]
    far = torch.empty(0, dtype=torch.bfloat16, device="meta").as_strided(
        (2, 4, 300, 128), (2**40, 128, 512, 1)
    )
    cases: list[tuple[str, dict[str, Any]]] = [
        ("sm100", {"target": "sm100"}),
        ("q is fp32", {"q": x.float(), "k": x.float(), "v": x.float()}),
        ("differ in element type", {"q": x, "k": x.half(), "v": x}),
        ("above 256", {"q": wide, "k": wide, "v": wide}),
        ("16 bytes", {"q": x[..., 1:65], "k": x[..., :64], "v": x}),
        ("empty", {"q": x, "k": empty, "v": empty}),
        ("below 2**40 bytes", {"q": x, "k": far, "v": x}),
    ]
    for said, changes in cases:
        why = _why_not(**changes)
        assert why is not None, said
        assert said in why


def test_a_named_backend_that_does_not_fit_is_an_error() -> None:
    call = _call()
    spec = spec_of(call)
    assert choice.design_for(call, spec, "sm90", "hopper")[0] is Design.HOPPER
    assert choice.design_for(call, spec, "sm90", "triton")[0] is Design.PORTABLE
    assert choice.design_for(call, spec, "sm80", "auto")[0] is Design.PORTABLE
    with pytest.raises(UnsupportedFeature, match="this is sm80"):
        choice.design_for(call, spec, "sm80", "hopper")
    with pytest.raises(NoFeasiblePlan, match="above 256"):
        flexc.compile(head_dim=300, backend="hopper")
    with pytest.raises(UnknownOption, match="'cpu'"):
        flexc.compile(head_dim=64, backend="cpu")


def test_a_closed_form_of_any_kind_needs_no_map() -> None:
    def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx % 3 != 1)

    first_keys = masks.sliding_window(9) | masks.prefix_lm(7)
    for mask in (masks.causal, masks.prefix_lm(7) & late, first_keys):
        kernel = flexc.compile(mask_mod=mask, head_dim=64, backend="hopper")
        assert Source.MAP_STRETCHES not in {a.source for a in kernel.artifact.arguments}


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """A kernel of a head dimension in two parts, of which the second is padded."""
    return flexc.compile(mask_mod=masks.causal, head_dim=88, return_lse=True, backend="hopper")


def test_parameters_lie_where_the_kernel_reads_them(kernel: Kernel) -> None:
    block = Block(Layout(kernel.artifact))
    values: list[Any] = []
    for n, argument in enumerate(kernel.artifact.arguments):
        number = 0.5 if argument.type == "fp32" else 1000 + n
        values.append(bytes([n]) * SIZE if is_descriptor(argument) else number)
    block.fill(values)
    at = 0
    for argument, value in zip(kernel.artifact.arguments, values, strict=True):
        address = block.pointers[at]
        assert isinstance(address, int)
        if is_descriptor(argument):
            assert address % 64 == 0
            assert ctypes.string_at(address, SIZE) == value
            at += 9  # with its lengths and strides, which are not read
            continue
        form = {"i32": "=i", "i64": "=q", "fp32": "=f"}.get(argument.type, "=Q")
        assert struct.unpack(form, ctypes.string_at(address, struct.calcsize(form))) == (value,)
        at += 1
    assert at <= kernel.artifact.parameters == len(block.pointers)


@pytest.mark.parametrize("described", [True, False])
def test_a_repeated_launch_has_the_parameters_of_any(
    kernel: Kernel, asked: list[Any], described: bool
) -> None:
    fired, streams = list[bytes](), list[int]()

    def contents(block: Block) -> bytes:
        return block.memory.raw[block.start : block.start + layout.size]

    artifact = kernel.artifact
    if not described:
        artifact = flexc.compile(mask_mod=masks.causal, head_dim=64, backend="triton").artifact
    arguments = [a for a in artifact.arguments if not is_descriptor(a) and a.source is not Source.COUNTER]
    values: list[Any] = [_value(a) for a in arguments]
    # Addresses in several places, as those of gradients of captured tensors.
    places = [n for n, a in enumerate(arguments) if a.source in (Source.Q, Source.K, Source.OUT)]
    counters = sum(a.source is Source.COUNTER for a in artifact.arguments)
    maps = TensorMaps(artifact.arguments) if described else None
    layout = Layout(artifact)
    block = Block(layout)
    trigger = SimpleNamespace(aim=streams.append, fire=lambda: fired.append(contents(block)))
    repeated = Repeated(
        layout, block, trigger, 0, [None if n in places else v for n, v in enumerate(values)], counters, maps
    )
    for addresses in ((0x1000, 0x2000, 0x3000), (0x7000, 0x2000, 0x3000), (0x1000, 0x2000, 0x3000)):
        repeated(addresses)
        for place, address in zip(places, addresses, strict=True):
            values[place] = address
        whole = Block(layout)
        whole.fill([*values, *[0x80] * counters, *(() if maps is None else maps.values(values, 0))])
        assert fired.pop() == contents(whole)
    assert streams == [0]


def test_a_repeated_launch_follows_streams_and_graphs(
    kernel: Kernel, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of one stream share their counters; each launch in a graph has its own."""
    stream, capturing, given = [1], [False], iter(range(0x100, 0x200))
    pairs: dict[int, int] = {}

    def address_of_pair(device: int, stream: int) -> int:
        return next(given) if capturing[0] else pairs.setdefault(stream, next(given))

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing[0], raising=False)
    monkeypatch.setattr("flexc.repeated.address_of_pair", address_of_pair)
    layout = Layout(kernel.artifact)
    block, aimed, used = Block(layout), list[int](), list[tuple[int, int]]()
    named = [a for a in kernel.artifact.arguments if not is_descriptor(a) and a.source is not Source.COUNTER]
    at = block.start + layout.of_values[len(named)]

    def fire() -> None:
        used.append((aimed[-1], struct.unpack_from("=Q", block.memory, at)[0]))

    values = [None if a.source is Source.Q else _value(a) for a in named]
    trigger = SimpleNamespace(aim=aimed.append, fire=fire)
    maps = TensorMaps(kernel.artifact.arguments)
    repeated = Repeated(layout, block, trigger, 0, values, 1, maps)
    for here, captures in ((1, 0), (1, 0), (2, 0), (2, 0), (2, 1), (2, 1), (2, 0), (1, 0)):
        stream[0], capturing[0] = here, bool(captures)
        repeated((0x1000,))
    streams, counters = zip(*used, strict=True)
    assert streams == (1, 1, 2, 2, 2, 2, 2, 1)
    assert counters[0] == counters[1] == counters[7]
    assert counters[2] == counters[3] == counters[6]
    assert len(set(counters)) == 4
    assert len(aimed) == 6  # not again where neither changed


class _Driver:
    """A driver that only notes what descriptors it was asked for."""

    def __init__(self) -> None:
        self.context = 1
        self.asked: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = []

    def cuTensorMapEncodeTiled(
        self, room: Any, kind: int, rank: int, address: Any, lengths: Any, strides: Any, box: Any,
        steps: Any, interleave: int, swizzle: int, *rest: Any,
    ) -> int:  # fmt: skip
        assert room.value % 64 == 0
        assert rank == len(lengths) == len(box)
        self.asked.append((address.value, tuple(lengths), tuple(strides), tuple(box), swizzle))
        ctypes.memset(room.value, len(self.asked), SIZE)
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.context
        return 0

    def cuTensorMapReplaceAddress(self, room: Any, address: Any) -> int:
        assert room.value % 64 == 0
        ctypes.memmove(room.value, struct.pack("=Q", address.value), 8)
        return 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The descriptors that were asked of the driver."""
    fake = _Driver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr("flexc.repeated.address_of_pair", lambda device, stream: 0x80)
    return fake.asked


_VALUE = {
    Source.Q: 0x1000, Source.K: 0x2000, Source.V: 0x3000, Source.OUT: 0x4000, Source.BATCH: 3,
    Source.Q_HEADS: 8, Source.GROUP: 4, Source.Q_LEN: 300, Source.KV_LEN: 700,
}  # fmt: skip


def _value(argument: Argument) -> int:
    strides = (Source.Q_STRIDE, Source.K_STRIDE, Source.V_STRIDE, Source.OUT_STRIDE)
    return (
        (4096, 512, 96)[argument.dimension] if argument.source in strides else _VALUE.get(argument.source, 0)
    )


def test_descriptors_say_where_a_tensor_lies(kernel: Kernel, asked: list[Any]) -> None:
    arguments = kernel.artifact.arguments
    values = [_value(a) for a in arguments if not is_descriptor(a)]
    maps = TensorMaps(arguments)
    first = maps.values(values, 0)
    assert [len(d) for d in first] == [SIZE] * 8
    assert len(set(first)) == 8
    keys = kernel.artifact.block_kv
    tensors = ((0x1000, 300, 8, 64), (0x2000, 700, 2, keys), (0x3000, 700, 2, keys), (0x4000, 300, 8, 64))
    assert asked == [
        (address, (88, length, heads, 3), (192, 1024, 8192), (columns, rows, 1, 1), swizzle)
        for address, length, heads, rows in tensors
        for columns, swizzle in ((64, 3), (32, 2))
    ]


def test_descriptors_of_pairs_have_the_rows_of_all_heads(asked: list[Any]) -> None:
    addresses = {Source.Q_PAIRS: 0x10, Source.K_PAIRS: 0x20, Source.GRAD_OUT_UNIT: 0x30, Source.V_UNIT: 0x40}
    arguments = [Argument(source.value, "*fp16", source) for source in addresses]
    arguments += [Argument(s.value, "i32", s) for s in _VALUE if s not in (Source.Q, Source.K)]
    arguments += [
        Argument("q", descriptor_type("fp16", (64, 256)), Source.Q_PAIRS_DESCRIPTOR, dimension=256),
        Argument("k", descriptor_type("fp16", (32, 256)), Source.K_PAIRS_DESCRIPTOR, dimension=256),
        Argument("dout_unit", descriptor_type("fp32", (64,)), Source.GRAD_OUT_UNIT_DESCRIPTOR),
        Argument("v_unit", descriptor_type("fp32", (32,)), Source.V_UNIT_DESCRIPTOR),
    ]
    values = [addresses.get(a.source, _value(a)) for a in arguments if not is_descriptor(a)]
    TensorMaps(arguments).values(values, 0)
    of_queries, of_keys = 3 * 8 * 512, 3 * 2 * 768
    assert asked == [
        (0x10, (256, of_queries), (512,), (64, 64), 3),
        (0x20, (256, of_keys), (512,), (64, 32), 3),
        (0x30, (of_queries,), (0,), (64,), 0),
        (0x40, (of_keys,), (0,), (32,), 0),
    ]


def test_descriptors_are_made_again_only_where_something_moved(kernel: Kernel, asked: list[Any]) -> None:
    arguments = [a for a in kernel.artifact.arguments if not is_descriptor(a)]
    values = [_value(a) for a in arguments]
    maps = TensorMaps(kernel.artifact.arguments)
    first = maps.values(values, 0)
    scale = next(i for i, a in enumerate(arguments) if a.source is Source.SCALE)
    values[scale] = 2
    assert maps.values(values, 0) == first
    assert len(asked) == 8
    out = next(i for i, a in enumerate(arguments) if a.source is Source.OUT)
    values[out] = 0x9000
    moved = maps.values(values, 0)
    assert moved[:6] == first[:6]
    assert moved[6:] == tuple(struct.pack("=Q", 0x9000) + part[8:] for part in first[6:])
    values[out] = 0x4000
    assert maps.values(values, 0) == first
    assert len(asked) == 8
    length = next(i for i, a in enumerate(arguments) if a.source is Source.KV_LEN)
    values[length] = 701
    maps.values(values, 0)
    assert len(asked) == 12


def test_a_thread_without_a_context_is_given_one(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, given = _Driver(), list[int]()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "make_current", given.append)
    values = [_value(a) for a in kernel.artifact.arguments if not is_descriptor(a)]
    maps = TensorMaps(kernel.artifact.arguments)
    fake.context = 0
    maps.values(values, 5)
    assert set(given) == {5}
    fake.context, values[0] = 1, 0x9000
    given.clear()
    maps.values(values, 5)
    assert not given


def test_a_dimension_of_length_1_may_have_any_stride(kernel: Kernel, asked: list[Any]) -> None:
    values = [
        {Source.BATCH: 1, Source.Q_HEADS: 1, Source.GROUP: 1}.get(
            a.source, 0 if a.dimension < 2 and "STRIDE" in a.source.name else _value(a)
        )
        for a in kernel.artifact.arguments
        if not is_descriptor(a)
    ]
    TensorMaps(kernel.artifact.arguments).values(values, 0)
    assert {strides for _, _, strides, _, _ in asked} == {(192, 16, 16)}
