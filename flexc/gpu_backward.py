"""The backward of kernels: those of a schedule, one after another, and the tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flexc.backward_runner import runner_on
from flexc.backward_script import Recorded, Runnable, Script, Tensors
from flexc.call import AttentionCall, Gradients
from flexc.callspec import is_aligned, spec_of
from flexc.captured_sums import CapturedSums
from flexc.choice import backward_parts, takes_hopper_backward
from flexc.codegen.arguments import Source
from flexc.codegen.backward_spec import ROWS_PADDED_TO, BackwardSpec, Entry, backward_spec
from flexc.codegen.hopper_backward_dims import dims, is_apart, parts_of_dq
from flexc.codegen.hopper_backward_plan import KEYS
from flexc.ir.spec import Blocks
from flexc.pack import as_pointed_to, dropout_numbers, seed_on
from flexc.pack_backward import Operands, map_operands
from flexc.pairs import add_pairs
from flexc.sinks_gradient import from_delta, from_parts


def backward(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wanted: Collection[str | int],
    backend: str = "triton",
) -> Gradients:
    """Gradients of a call from those of its results, on its GPU or by Triton's interpreter.

    Args:
        call: what was computed.
        out: (B, Hq, L, Dv), its result.
        lse: (B, Hq, L) fp32, natural logarithm, of the scores before any dropout.
        grad_out: the gradient of `out`, of its shape.
        grad_lse: the gradient of `lse`, or None for zeros.
        wanted: "q", "k", "v", "sinks", and slots of captured tensors.
        backend: "triton" for the portable kernels, "auto" or "hopper" for those of the GPU, where they can.
    """
    grad_out, grad_lse = as_kernels_read(call.q, grad_out, grad_lse)
    return _Backward(call, out, lse.contiguous(), grad_out, grad_lse, wanted).run(backend)


def record(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wanted: Sequence[str | int],
    backend: str = "triton",
) -> tuple[list[torch.Tensor], Recorded]:
    """The gradients that are wanted, in their order, and how to compute them for other tensors.

    The script takes q, k, v, out, lse, the two gradients, the sinks, the seed of dropout, and captured
    tensors on the device of q, of layouts equal to these. The sinks and lse are contiguous and in fp32, the
    gradients as `as_kernels_read` makes them.
    """
    made = _Backward(call, out, lse, grad_out, grad_lse, wanted)
    found = made.run(backend)
    results: list[Any] = [getattr(found, n) if isinstance(n, str) else found.values[n] for n in wanted]
    return results, made.script.recorded(results)


def as_kernels_read(
    q: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of a result, copied where kernels could not read them in place."""
    grad_out = grad_out.to(q.dtype)
    if grad_out.stride(3) != 1 or not is_aligned(grad_out):
        grad_out = grad_out.contiguous()
    return grad_out, None if grad_lse is None else grad_lse.float().contiguous()


class _Backward:
    """The tensors of one backward. Each kernel has a stage of its own: see `_STAGES`."""

    def __init__(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        wanted: Collection[str | int],
    ) -> None:
        q, k, v, out, lse, grad_out = (x.detach() for x in (call.q, call.k, call.v, out, lse, grad_out))
        self.wanted = wanted
        self.slots = tuple(sorted(name for name in wanted if isinstance(name, int)))
        self.call = call
        self.runner = runner_on(q.device)
        sinks = None if call.sinks is None else call.sinks.detach().float().contiguous()
        seed = seed_on(call.dropout_seed, q.device) if call.dropout_p else None
        self.values = tuple(as_pointed_to(x, q.device) for x in call.values)
        captured = [x for x in self.values if isinstance(x, torch.Tensor)]
        # A script knows tensors by identity: one that comes twice must be two.
        grad_lse = None if grad_lse is None else grad_lse.detach()
        script = self.script = Script((q, k, v, out, lse, grad_out, grad_lse, sinks, seed, *captured))
        self.captured_sums = CapturedSums(call, script)
        padded = -(-q.shape[2] // ROWS_PADDED_TO) * ROWS_PADDED_TO
        rows = (*q.shape[:2], padded)
        self._sinks_last = sinks is not None and "sinks" in wanted and bool(self.slots)
        kept = self._made if self._sinks_last else self._scratch
        self.tensors: dict[Source, torch.Tensor] = {
            Source.Q: q,
            Source.K: k,
            Source.V: v,
            Source.OUT: out,
            Source.LSE: lse,
            Source.GRAD_OUT: grad_out,
            Source.DELTA: kept(rows),
            Source.SHIFT: kept(rows),
            Source.GRAD_Q: script.make(_like(0)),
            Source.GRAD_K: script.make(_like(1)),
            Source.GRAD_V: script.make(_like(2)),
        }
        if grad_lse is not None:
            self.tensors[Source.GRAD_LSE] = grad_lse
        if sinks is not None:
            self.tensors[Source.SINKS] = sinks
        if seed is not None:
            self.tensors[Source.DROPOUT_SEED] = seed
        self.spec = self._found_spec(has_grad_lse=grad_lse is not None)
        self.numbers = _numbers(call)

    def _found_spec(self, *, has_grad_lse: bool) -> BackwardSpec:
        """The spec of the call, with its tensors as they lie."""
        call = self.call
        spec = spec_of(call)
        strided = [x for source, x in self.tensors.items() if source in _STRIDED]
        aligned = spec.aligned and all(is_aligned(x) for x in strided)
        return backward_spec(
            replace(spec, aligned=aligned),
            call.values,
            (call.q.shape[2], call.k.shape[2]),
            given=call.block_map is not None,
            wanted=dict(call.options).get("blocks"),
            has_grad_lse=has_grad_lse,
            slots=self.slots,
            deterministic=call.deterministic,
        )

    def run(self, backend: str) -> Gradients:
        """Run the kernels that give what is wanted."""
        wanted = self.wanted
        found = backward_parts(
            self.spec,
            self.runner.target.name,
            self.call.options,
            hopper=bool(set(wanted) - {"sinks"}) and self._takes_hopper(backend),
            wants_q="q" in wanted,
            wants_kv=bool(self.slots) or "k" in wanted or "v" in wanted,
        )
        for self.spec, entry in found:
            _STAGES[entry](self, entry, self.runner.kernel(self.spec, entry, self.call))
        sinks, given = None, self.call.sinks
        if given is not None and "sinks" in wanted:
            sinks = self._of_sinks(given)
        return Gradients(
            q=self.tensors[Source.GRAD_Q] if "q" in wanted else None,
            k=self.tensors[Source.GRAD_K] if "k" in wanted else None,
            v=self.tensors[Source.GRAD_V] if "v" in wanted else None,
            sinks=sinks,
            values=tuple(
                self.captured_sums.gradient(slot) if slot in self.slots else None
                for slot in range(len(self.values))
            ),
        )

    def _of_sinks(self, given: torch.Tensor) -> torch.Tensor:
        """The gradient of the sinks, from the last delta there is: one that a kernel found anew is exact."""
        if self._sinks_last:
            read = (self.tensors[source] for source in (Source.DELTA, Source.SHIFT, Source.SINKS))
            return self.script.then(from_delta(given.dtype), *read)
        return self.script.then(from_parts(given.dtype), self.tensors[Source.GRAD_SINKS_PARTS])

    def _takes_hopper(self, backend: str) -> bool:
        if self.call.q.device.type != "cuda":
            return False
        grad_out = self.tensors[Source.GRAD_OUT]
        return takes_hopper_backward(self.call, self.spec, grad_out, self.runner.target.name, backend)

    def rows(self, entry: Entry, kernel: Runnable) -> None:
        """Delta and shift, which every other kernel needs, and the parts of the gradient of the sinks.

        Before a Hopper kernel also zeros where it says that something became NaN, and where it adds up in any
        order.
        """
        batch, heads, padded = self.tensors[Source.DELTA].shape
        tiles = padded // kernel.block_q
        if self.call.sinks is not None:
            self.tensors[Source.GRAD_SINKS_PARTS] = self._made((batch, heads, tiles))
        if self.spec.clears_sums:
            if not is_apart(self.spec):
                shape = (batch, heads, padded, dims(self.spec)[0])
                self.tensors[Source.GRAD_Q_SUM] = self._scratch(shape)
            if self.spec.forward.mask is not None:
                made = self._made if self.slots else self._scratch
                self.tensors[Source.LOST] = made((1,), torch.int32)
        self._launch(kernel, tiles * heads * batch, {}, {})

    def pairs(self, entry: Entry, kernel: Runnable) -> None:
        """The operands as pairs of fp16 numbers, and the unit of each row."""
        rows = add_pairs(self.tensors, self.script)
        self._launch(kernel, rows // kernel.block_q, {}, {Source.BATCH: self.call.q.shape[0]})

    def fused(self, entry: Entry, kernel: Runnable) -> None:
        """All gradients, that of q as sums in fp32."""
        rows = self.tensors[Source.DELTA].shape
        self.tensors[Source.GRAD_Q_SUM] = self._zeros((*rows, self.call.q.shape[3]), torch.float32)
        self.keys_and_values(entry, kernel)

    def on_hopper(self, entry: Entry, kernel: Runnable) -> None:
        """All gradients, that of q as sums in fp32; if there is a mask, also whether any became NaN."""
        batch, heads, rows = self.tensors[Source.DELTA].shape
        numbers: dict[Source, int | float] = {Source.NEVER: 0}
        tensors: dict[Source, torch.Tensor] = {}
        self.captured_sums.make_for(kernel, self.spec, self.values)
        self._walk(entry, kernel, tensors, numbers)
        if self.spec.deterministic and not is_apart(self.spec):
            turns = self._zeros((1 + batch * heads * (rows // kernel.block_q),), torch.int32)
            self.tensors[Source.TURNS] = turns
            self._walk(entry, kernel, tensors, numbers, beside=True)
        _, kv_heads, kv_len, _ = self.call.k.shape
        self._launch(kernel, -(-kv_len // kernel.block_kv) * kv_heads * batch, tensors, numbers)
        self.captured_sums.correct_heads(self.spec, self.values)

    def finish(self, entry: Entry, kernel: Runnable) -> None:
        """The gradient of q from the sums of Hopper kernels: a program for each part of a tile."""
        batch, heads, q_len, _ = self.call.q.shape
        parts = parts_of_dq(self.spec, kernel.block_kv // KEYS)
        self._launch(kernel, parts * -(-q_len // kernel.block_q) * heads * batch, {}, {})

    def keys_and_values(self, entry: Entry, kernel: Runnable) -> None:
        """The gradients of k, v and captured tensors."""
        k, v = self.call.k, self.call.v
        batch, kv_heads, kv_len, _ = k.shape
        tiles = -(-kv_len // kernel.block_kv)
        parts = _parts(tiles * kv_heads * batch, int(self.numbers[Source.GROUP]), kernel.processors)
        if self.spec.repairs:
            parts = 1  # in place, if at all
            self.captured_sums.start_over(self.tensors[Source.LOST])
        tensors = {Source.GRAD_K_PARTS: self.tensors[Source.GRAD_K]}  # not touched when there is one part
        tensors[Source.GRAD_V_PARTS] = self.tensors[Source.GRAD_V]
        if parts > 1:
            for source, x in ((Source.GRAD_K_PARTS, k), (Source.GRAD_V_PARTS, v)):
                tensors[source] = self._made((batch, kv_heads, parts, kv_len, x.shape[3]))
        numbers: dict[Source, int | float] = {
            Source.HEADS_PER_PROGRAM: int(self.numbers[Source.GROUP]) // parts
        }
        self.captured_sums.make_for(kernel, self.spec, self.values)
        self._walk(entry, kernel, tensors, numbers)
        programs = tiles * kv_heads * batch * parts * self.spec.slices
        self._launch(kernel, programs, tensors, numbers)
        if parts > 1:
            for whole, piece in ((Source.GRAD_K, Source.GRAD_K_PARTS), (Source.GRAD_V, Source.GRAD_V_PARTS)):
                self.script.then(_sum_parts, self.tensors[whole], tensors[piece])

    def captured(self, entry: Entry, kernel: Runnable) -> None:
        """What was added up by row or distance goes to the gradients of captured tensors."""
        sums = self.captured_sums
        sums.make_for(kernel, self.spec, self.values)
        tiles = -(-sums.distances // kernel.block_q)
        self._launch(kernel, tiles * self.call.q.shape[1] * sums.batches, {}, {})

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        device = self.call.q.device
        return self.script.make(lambda _: torch.empty(shape, dtype=dtype, device=device))

    def _scratch(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What only kernels use."""
        return self.script.scratch(shape, dtype, self.call.q.device)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What only kernels add up in."""
        return self.script.scratch(shape, dtype, self.call.q.device, zeroed=True)

    def queries(self, entry: Entry, kernel: Runnable) -> None:
        """The gradient of q, by walking the keys or from its sums."""
        batch, heads, q_len, _ = self.call.q.shape
        tensors: dict[Source, torch.Tensor] = {}
        numbers: dict[Source, int | float] = {}
        programs = -(-q_len // kernel.block_q) * heads * batch
        if entry is Entry.Q:
            self._walk(entry, kernel, tensors, numbers)
            programs *= self.spec.slices
        self._launch(kernel, programs, tensors, numbers)

    def hopper_queries(self, entry: Entry, kernel: Runnable) -> None:
        """The gradient of q by a Hopper kernel of its own; with a mask, also whether any became NaN."""
        batch, heads, q_len, _ = self.call.q.shape
        tensors: dict[Source, torch.Tensor] = {}
        numbers: dict[Source, int | float] = {Source.NEVER: 0}
        self._walk(entry, kernel, tensors, numbers)
        self._launch(kernel, -(-q_len // kernel.block_q) * heads * batch, tensors, numbers)

    def _walk(
        self,
        entry: Entry,
        kernel: Runnable,
        tensors: dict[Source, torch.Tensor],
        numbers: dict[Source, int | float],
        *,
        beside: bool = False,
    ) -> None:
        """Add the block map that the kernel walks, if it does, or what it reads of it `beside`."""
        if self.spec.blocks(entry) is not Blocks.MAP:
            return
        map_tensors, map_numbers, block_map = map_operands(
            self.call, kernel.block_q, kernel.block_kv, by_keys=entry.axes.by_keys, beside=beside
        )
        self.script.read_map(block_map)
        tensors.update(map_tensors)
        numbers.update(map_numbers)

    def _launch(
        self,
        kernel: Runnable,
        programs: int,
        tensors: Mapping[Source, torch.Tensor],
        numbers: Mapping[Source, int | float],
    ) -> None:
        if self.spec.repairs:
            programs = min(programs, 2 * kernel.processors)  # they share the tiles; mostly there are none
        elif kernel.shares_tiles:
            # With tiles of few keys two programs fit beside each other.
            programs = min(programs, kernel.processors * (2 if kernel.block_kv == KEYS else 1))
        if programs:
            sums = self.captured_sums
            operands = Operands(
                {**self.tensors, **tensors},
                {**self.numbers, **numbers},
                self.values,
                sums.sums,
                sums.in_memory,
            )
            self.script.launch(kernel, programs, operands)


_STAGES: dict[Entry, Callable[[_Backward, Entry, Runnable], None]] = {
    Entry.ROWS: _Backward.rows,
    Entry.KV: _Backward.keys_and_values,
    Entry.PAIRS: _Backward.pairs,
    Entry.Q: _Backward.queries,
    Entry.FUSED: _Backward.fused,
    Entry.Q_SUMS: _Backward.queries,
    Entry.CAPTURED: _Backward.captured,
    Entry.HOPPER: _Backward.on_hopper,
    Entry.FINISH: _Backward.finish,
    Entry.HOPPER_Q: _Backward.hopper_queries,
}
"""How each kernel is launched, and what it needs."""


def _like(number: int) -> Callable[[Tensors], torch.Tensor]:
    def make(given: Tensors) -> torch.Tensor:
        x = given[number]
        assert x is not None
        return torch.empty_like(x)

    return make


def _sum_parts(whole: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    return whole.copy_(parts.sum(2))


_STRIDED = frozenset({Source.OUT, Source.GRAD_OUT, Source.GRAD_Q, Source.GRAD_K, Source.GRAD_V})


def _parts(programs: int, group: int, processors: int) -> int:
    """How many programs share the query heads of a key head: as few as fill the device twice."""
    fitting = (n for n in range(1, group + 1) if group % n == 0)
    return next((n for n in fitting if programs * n >= 2 * processors), group)


def _numbers(call: AttentionCall) -> dict[Source, int | float]:
    """The arguments of kernels that are numbers, by what they are."""
    batch, heads, q_len, _ = call.q.shape
    _, kv_heads, kv_len, _ = call.k.shape
    found: dict[Source, int | float] = {
        Source.Q_HEADS: heads,
        Source.GROUP: heads // max(1, kv_heads),
        Source.Q_LEN: q_len,
        Source.KV_LEN: kv_len,
        Source.BATCH: batch,
        Source.SCALE: call.scale,
    }
    if call.dropout_p:
        below, weight = dropout_numbers(call.dropout_p)
        found |= {Source.DROPPED_BELOW: below, Source.SURVIVORS_WEIGHT: weight}
    return found
