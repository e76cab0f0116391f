"""The run-time arguments of the kernels of a backward, in order."""

from __future__ import annotations

from flexc.codegen.arguments import (
    MAP_ARGUMENTS,
    SHAPE_ARGUMENTS,
    Argument,
    Source,
    capture_arguments,
    dropout_arguments,
    stride_arguments,
)
from flexc.codegen.backward_form import backward_form, sum_type
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.bounds import range_roots
from flexc.codegen.hopper_backward_dims import is_apart
from flexc.codegen.scatter import Sum
from flexc.ir.expr import Expr
from flexc.ir.spec import AttentionSpec, Blocks
from flexc.ir.types import Storage


def backward_arguments(backward: BackwardSpec, entry: Entry, names: tuple[str, ...]) -> tuple[Argument, ...]:
    """All arguments of one kernel of a backward."""
    if entry is Entry.ROWS:
        return _rows(backward)
    if entry is Entry.PAIRS:
        return _pairs(backward)
    if entry is Entry.Q_SUMS:
        return _q_sums(backward, names)
    if entry is Entry.CAPTURED:
        return _captured(backward, names)
    return _kv(backward, entry, names) if entry.axes.by_keys else _q(backward, names)


def _rows(backward: BackwardSpec) -> tuple[Argument, ...]:
    spec = backward.forward
    tensors = [
        _tensor(spec, "out_ptr", spec.q_storage, Source.OUT),
        _tensor(spec, "dout_ptr", spec.q_storage, Source.GRAD_OUT),
        Argument("lse_ptr", "*fp32", Source.LSE),
    ]
    if backward.has_grad_lse:
        tensors.append(_DLSE)
    tensors += [
        Argument("delta_ptr", "*fp32", Source.DELTA, divisible=True),
        Argument("shift_ptr", "*fp32", Source.SHIFT, divisible=True),
    ]
    if spec.has_sinks:
        tensors.append(Argument("sinks_ptr", "*fp32", Source.SINKS))
        tensors.append(Argument("dsinks_parts_ptr", "*fp32", Source.GRAD_SINKS_PARTS))
    if backward.clears_sums:
        if not is_apart(backward) and not backward.stores_first:
            tensors.append(Argument("dq_sum_ptr", "*fp32", Source.GRAD_Q_SUM, divisible=True))
        if spec.mask is not None:
            tensors.append(Argument("lost_ptr", "*i32", Source.LOST))
    return (
        *tensors,
        *stride_arguments(("out", "dout"), divisible=spec.aligned),
        Argument("q_heads", "i32", Source.Q_HEADS),
        Argument("q_len", "i32", Source.Q_LEN),
    )


def _operands(spec: AttentionSpec) -> list[Argument]:
    """What the matrix products are of, as the call has it."""
    return [
        _tensor(spec, "q_ptr", spec.q_storage, Source.Q),
        _tensor(spec, "k_ptr", spec.k_storage, Source.K),
        _tensor(spec, "v_ptr", spec.v_storage, Source.V),
        _tensor(spec, "dout_ptr", spec.q_storage, Source.GRAD_OUT),
    ]


def _pairs(backward: BackwardSpec) -> tuple[Argument, ...]:
    spec = backward.forward
    return (
        *_operands(spec),
        Argument("shift_ptr", "*fp32", Source.SHIFT, divisible=True),
        *PAIRS_ARGUMENTS,
        *stride_arguments(_OPERANDS, divisible=spec.aligned),
        Argument("batch", "i32", Source.BATCH),
        *SHAPE_ARGUMENTS[:-1],
    )


def _inputs(backward: BackwardSpec) -> list[Argument]:
    return [
        *(PAIRS_ARGUMENTS if backward.pairs else _operands(backward.forward)),
        Argument("delta_ptr", "*fp32", Source.DELTA, divisible=True),
        Argument("shift_ptr", "*fp32", Source.SHIFT, divisible=True),
        *([Argument("lost_ptr", "*i32", Source.LOST)] if backward.repairs else []),
    ]


def _kv(backward: BackwardSpec, entry: Entry, names: tuple[str, ...]) -> tuple[Argument, ...]:
    spec = backward.forward
    return (
        *_inputs(backward),
        *([_DQ_SUM] if entry is Entry.FUSED else []),
        _tensor(spec, "dk_ptr", spec.k_storage, Source.GRAD_K),
        _tensor(spec, "dv_ptr", spec.v_storage, Source.GRAD_V),
        Argument("dk_parts_ptr", "*fp32", Source.GRAD_K_PARTS, divisible=spec.aligned),
        Argument("dv_parts_ptr", "*fp32", Source.GRAD_V_PARTS, divisible=spec.aligned),
        *capture_arguments(spec, names, mod_roots(backward, entry)),
        *capture_gradients(backward, names),
        *_block_map(backward, entry),
        *stride_arguments((*_strided_inputs(backward), "dk", "dv"), divisible=spec.aligned),
        *SHAPE_ARGUMENTS,
        Argument("heads_per_program", "i32", Source.HEADS_PER_PROGRAM),
        *_batch(backward),
        *dropout_arguments(spec),
    )


def _q(backward: BackwardSpec, names: tuple[str, ...]) -> tuple[Argument, ...]:
    spec = backward.forward
    return (
        *_inputs(backward),
        _tensor(spec, "dq_ptr", spec.q_storage, Source.GRAD_Q),
        *([_DLSE] if backward.finds_delta and backward.has_grad_lse else []),
        *capture_arguments(spec, names, mod_roots(backward, Entry.Q)),
        *_block_map(backward, Entry.Q),
        *stride_arguments((*_strided_inputs(backward), "dq"), divisible=spec.aligned),
        *SHAPE_ARGUMENTS,
        *_batch(backward),
        *dropout_arguments(spec),
    )


def _batch(backward: BackwardSpec) -> list[Argument]:
    """What a kernel that repairs counts the tiles by: it has fewer programs."""
    return [Argument("batch", "i32", Source.BATCH)] if backward.repairs else []


def _q_sums(backward: BackwardSpec, names: tuple[str, ...]) -> tuple[Argument, ...]:
    spec = backward.forward
    factor = backward_form(backward, scatters=False).factor
    return (
        _DQ_SUM,
        Argument("shift_ptr", "*fp32", Source.SHIFT, divisible=True),
        _tensor(spec, "dq_ptr", spec.q_storage, Source.GRAD_Q),
        *capture_arguments(spec, names, [] if factor is None else [factor]),
        *stride_arguments(("dq",), divisible=spec.aligned),
        *SHAPE_ARGUMENTS,
    )


def _strided_inputs(backward: BackwardSpec) -> tuple[str, ...]:
    """Pairs lie close together."""
    return () if backward.pairs else _OPERANDS


_OPERANDS = ("q", "k", "v", "dout")
PAIRS_ARGUMENTS = (
    Argument("q_pairs_ptr", "*fp16", Source.Q_PAIRS, divisible=True),
    Argument("k_pairs_ptr", "*fp16", Source.K_PAIRS, divisible=True),
    Argument("v_pairs_ptr", "*fp16", Source.V_PAIRS, divisible=True),
    Argument("dout_pairs_ptr", "*fp16", Source.GRAD_OUT_PAIRS, divisible=True),
    Argument("q_unit_ptr", "*fp32", Source.Q_UNIT, divisible=True),
    Argument("k_unit_ptr", "*fp32", Source.K_UNIT, divisible=True),
    Argument("v_unit_ptr", "*fp32", Source.V_UNIT, divisible=True),
    Argument("dout_unit_ptr", "*fp32", Source.GRAD_OUT_UNIT, divisible=True),
)
_DLSE = Argument("dlse_ptr", "*fp32", Source.GRAD_LSE)
_DQ_SUM = Argument("dq_sum_ptr", "*fp32", Source.GRAD_Q_SUM, divisible=True)


def _tensor(spec: AttentionSpec, name: str, storage: Storage, source: Source) -> Argument:
    return Argument(name, f"*{storage.value}", source, divisible=spec.aligned)


def _block_map(backward: BackwardSpec, entry: Entry) -> tuple[Argument, ...]:
    """Of the map that the kernel walks: by rows of queries, or of keys."""
    return MAP_ARGUMENTS if backward.blocks(entry) is Blocks.MAP else ()


def _captured(backward: BackwardSpec, names: tuple[str, ...]) -> tuple[Argument, ...]:
    placed = [s for s in backward_form(backward, scatters=True).scatters if s.sum.has_places]
    return (
        *_gradients(backward, names, placed=True),
        *_placed_sums(backward),
        *capture_arguments(backward.forward, names, [root for s in placed for root in (s.at, s.inside)]),
        Argument("q_heads", "i32", Source.Q_HEADS),
        Argument("q_len", "i32", Source.Q_LEN),
        Argument("kv_len", "i32", Source.KV_LEN),
    )


def capture_gradients(backward: BackwardSpec, names: tuple[str, ...]) -> list[Argument]:
    """Where programs add up what goes to gradients of captured tensors."""
    return [*_gradients(backward, names, placed=False), *_placed_sums(backward)]


def row_sums(backward: BackwardSpec) -> list[Argument]:
    """Sums by row from which gradients of heads are corrected: of the scores' gradients, and of weights."""
    scatters = backward_form(backward, scatters=True).scatters
    heads = [n for n, s in enumerate(scatters) if s.sum is Sum.HEAD]
    weights = [Argument(f"weights_{n}_ptr", "*fp32", Source.ROW_SUMS, n) for n in heads]
    return [Argument("row_sums_ptr", "*fp32", Source.ROW_SUMS, -1), *weights] if heads else []


def _gradients(backward: BackwardSpec, names: tuple[str, ...], *, placed: bool) -> list[Argument]:
    """These gradients, in row-major order of their elements."""
    form = backward_form(backward, scatters=True)
    slots = {scatter.slot for scatter in form.scatters if scatter.sum.has_places is placed}
    return [
        Argument(f"{names[slot]}_grad_ptr", sum_type(backward, form, slot), Source.GRAD_CAPTURE, slot)
        for slot in sorted(slots)
    ]


def _placed_sums(backward: BackwardSpec) -> list[Argument]:
    """Sums by row or by distance, numbered as the scatters are."""
    form = backward_form(backward, scatters=True)
    return [
        Argument(f"sums_{n}_ptr", sum_type(backward, form, s.slot), Source.PLACED_SUMS, n)
        for n, s in enumerate(form.scatters)
        if s.sum.has_places
    ]


def mod_roots(backward: BackwardSpec, entry: Entry) -> list[Expr]:
    """The graphs that a kernel computes: the mods, and its loop bounds."""
    spec, ranges = backward.forward, backward.ranges(entry)
    bounds = [] if ranges is None else range_roots(ranges, entry.axes)
    return [root for root in (spec.score, spec.mask, *bounds) if root is not None]
