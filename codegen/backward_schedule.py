"""Which kernels make up a backward, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flexc.codegen.backward_form import has_places
from flexc.codegen.backward_spec import BackwardSpec, Entry
from flexc.codegen.plan import holds_pairs
from flexc.codegen.target import MatrixUnit, Target
from flexc.ir.types import Storage

FUSED_OPTION = "backward_fused"


class Schedule(NamedTuple):
    """Kernels in order of their launch, and the reason for these. `pairs`: see `BackwardSpec`."""

    entries: tuple[Entry, ...]
    why: str
    pairs: bool


def schedule(
    backward: BackwardSpec,
    target: Target,
    options: Mapping[str, object],
    *,
    wants_q: bool = True,
    wants_kv: bool = True,
) -> Schedule:
    """The kernels of `backward`.

    Args:
        backward: what is computed.
        target: decides what is faster.
        options: "backward_fused" True or False decides instead, but where the order matters: for
            deterministic gradients, and for those of captured tensors that read 16-bit inputs.
        wants_q: whether the gradient of q is wanted.
        wants_kv: whether any of k, v or a captured tensor is.
    """
    finds_delta = wants_kv and backward.finds_delta
    pairs = (wants_q or wants_kv) and holds_pairs(backward.forward, target, options.get("precision"))
    first = (Entry.ROWS, Entry.PAIRS) if pairs else (Entry.ROWS,)
    if finds_delta:
        why = "captured tensors need the delta that the kernel of dQ finds"
    elif not (wants_q and wants_kv):
        why = "not all gradients are wanted"
    else:
        fused, why = _fused(backward, target, options)
        if fused:
            return Schedule((*first, Entry.FUSED, Entry.Q_SUMS, *_captured(backward)), why, pairs)
    found = [*first]
    if wants_q or finds_delta:
        found.append(Entry.Q)
    if wants_kv:
        found += (Entry.KV, *_captured(backward))
    return Schedule(tuple(found), why, pairs)


def _captured(backward: BackwardSpec) -> tuple[Entry, ...]:
    return (Entry.CAPTURED,) if has_places(backward) else ()


def _fused(backward: BackwardSpec, target: Target, options: Mapping[str, object]) -> tuple[bool, str]:
    """Whether one kernel finds all gradients.

    Fused takes five matrix products where two kernels take seven, but adds every tile of dQ to memory.
    """
    if backward.deterministic:
        return False, "dQ is a sum in one order"
    wanted = options.get(FUSED_OPTION)
    if wanted is not None:
        return bool(wanted), "asked for"
    is_split = backward.forward.q_storage is Storage.FP32 and not holds_pairs(
        backward.forward, target, options.get("precision")
    )
    if target.matrix_unit is MatrixUnit.WGMMA and not is_split:
        return False, "timed on an H200: adding dQ up in memory takes longer than two more products"
    return True, "five matrix products in place of seven"
