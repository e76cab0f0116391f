"""flexc under torch.compile: one operator in its graph, whatever the mods are made of.

torch.compile traces the mods into a graph of their own (as it does for PyTorch's flex_attention): what they
captured, inside or outside of the compiled function, becomes an input of that graph, with guards on shapes
and dtypes only. When the whole is compiled, `_Capture` turns the small graph into flexc's and leaves one call
of `flexc::attention` in its place.

Imported only while torch.compile traces: it loads the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._C import _functorch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from flexc import operators
from flexc.backends import choose
from flexc.block_mask import BlockMask
from flexc.call import Mods
from flexc.check import (
    check_block_map,
    check_captures,
    check_dropout,
    check_gradients_exist,
    check_options,
    check_reads,
    check_scale,
    check_sinks,
    check_tensors,
)
from flexc.device_map import DeviceMap
from flexc.errors import InternalError
from flexc.execute import is_transformed, new_seed
from flexc.frontend.compose import undecorated
from flexc.frontend.subgraph import Calls, trace_subgraph
from flexc.map_tensors import arrays_of
from flexc.resolve import combine
from flexc.statement import MapShape, Statement, split_values, text_of

Function = TypeVar("Function", bound=Callable[..., Any])


def _in_graph(function: Function) -> Function:
    """torch.compile puts a call of the function into its graph, and does not look inside."""
    kept: Function = torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    return kept


class _Indexing(TorchFunctionMode):
    """While torch.compile computes the shapes in a mod: an index without dimensions is not made a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`x[q_idx]` has the shape of `x[0]`; everything else is PyTorch's own."""
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_number(i) for i in index):
                return torch.empty_like(args[0][tuple(0 if _is_number(i) else i for i in index)])
        return func(*args, **(kwargs or {}))

    def open(self) -> None:
        """From now on, to the end of this attempt to trace at most."""
        if self not in _stack():
            self.__enter__()  # type: ignore[no-untyped-call]
            InstructionTranslator.current_tx().output.add_cleanup_hook(self.close)

    def close(self) -> None:
        """From now on no longer."""
        if self in _stack()[-1:]:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _stack() -> list[TorchFunctionMode]:
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def _is_number(index: object) -> bool:
    if not isinstance(index, torch.Tensor) or index.dim() > 0:
        return False
    return index.dtype not in (torch.bool, torch.uint8)


_indexing = _Indexing()


@_in_graph
def _argument(q: torch.Tensor, name: str) -> torch.Tensor:
    """An input of a mod: here, a tensor of its type for torch.compile to compute shapes with."""
    _check_only_shapes(q)
    _indexing.open()
    return q.new_empty((), dtype=torch.float32 if name == "score" else torch.int32)


@_in_graph
def _finish(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of attention: here, tensors of their shapes."""
    _check_only_shapes(q)
    _indexing.close()
    check_tensors(q, k, v)
    _scale(given["scale"], q)
    check_options(dict(given["options"]))
    check_dropout(_plain(given["dropout_p"]))
    choose(given["backend"], q.device)
    if given["sinks"] is not None:
        check_sinks(given["sinks"], q)
    if given["mask_shape"]:
        q_len, kv_len, batch, heads = given["mask_shape"]
        check_block_map(q_len, kv_len, batch, heads, q, k)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=operators.lse_dtype(q))


def _plain(number: Any) -> Any:
    """A float that torch.compile made symbolic as the number that it is; it watches that it stays so."""
    return float(number) if isinstance(number, torch.SymFloat) else number


def _scale(given: Any, q: torch.Tensor) -> Any:
    """The scale of a call; what torch.compile has in place of a float stays that."""
    return given if _is_computed(given) else check_scale(given, q.shape[3])


def _is_computed(number: Any) -> bool:
    """Whether it stands for a float that may be another at each call."""
    if isinstance(number, torch.Tensor):
        return number.numel() == 1 and number.device.type == "cpu" and not number.requires_grad
    return isinstance(number, torch.SymFloat)


def _as_tensor(numbers: Sequence[Any]) -> torch.Tensor:
    """The numbers in fp64 on the CPU, so that the compiler computes them as tensors.

    An operator that takes a symbolic float itself is compiled for each value.
    """
    one = torch.ones((), dtype=torch.float64)
    return torch.stack([(one * number).reshape(()) for number in numbers])


def _check_only_shapes(x: torch.Tensor) -> None:
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    if not isinstance(x, FakeTensor):
        raise InternalError("compile: the body of attention runs as it is, in place of the operator")


class _Capture(HigherOrderOperator):
    """`capture(body, q)`: what `body` computes, with flexc's operator in place of `_finish`."""

    def __init__(self) -> None:
        super().__init__("flexc_capture")  # type: ignore[no-untyped-call]
        # torch.compile knows operators that take functions by their names; this is the one of the plainest
        # kind: trace the function, pass what it reads.
        self.__name__ = "wrap"
        self.__module__ = __name__  # printed code refers to this object, not to an operator of PyTorch

    def __call__(self, subgraph: Any, *operands: Any) -> Any:
        """The output and lse; `subgraph` is the body's graph, `operands` what it reads."""
        if not isinstance(subgraph, torch.fx.GraphModule):
            return torch.compiler.disable(subgraph)(*operands)  # type: ignore[no-untyped-call]
        traces = trace_subgraph(subgraph, operands, Calls(_argument, _finish))
        given = traces.arguments
        q, k, v = given["tensors"]
        score, mask = combine(traces.score, traces.masks)
        check_captures(tuple(c.name for c in traces.captures), traces.values, q.device)
        mods = Mods(score, mask, traces.captures)
        check_reads(mods, traces.values, q)
        tensors, integers, floats = split_values(traces.captures, traces.values)
        sinks, seed, blocks = given["sinks"], given["seed"], given["blocks"]
        differentiates = _needs_gradient(q, k, v, sinks, *tensors)
        if differentiates:
            check_gradients_exist(mods, traces.values)
        statement = Statement(
            score=score,
            mask=mask,
            captures=traces.captures,
            backend=given["backend"],
            returns_lse=given["returns_lse"] or differentiates or is_transformed(),
            options=check_options(dict(given["options"])),
            dropout_p=_plain(given["dropout_p"]),
            deterministic=given["deterministic"],
            blocks=MapShape(*given["map_shape"]) if blocks else None,
        )
        scale = _scale(given["scale"], q)
        if any(map(_is_computed, (scale, *floats))):
            tensors, floats, scale = [*tensors, _as_tensor((scale, *floats))], [], 0.0
        return operators.attention(
            q, k, v, sinks, seed, tensors, integers, floats, blocks, scale, text_of(statement)
        )


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


_capture = _Capture()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's call in the graph that torch.compile makes; the output and lse.

    `given` are the keywords of `flexc.attention`, without `out` and the scales of fp8. Without `return_lse`
    the lse is nothing that can be used.
    """
    score_mod, mask_mod, block_mask = given["score_mod"], given["mask_mod"], given["block_mask"]
    seed = new_seed(q.device) if given["dropout_p"] else None
    blocks, map_shape = _blocks_of(block_mask)
    masks = [] if mask_mod is None else [mask_mod]
    if block_mask is not None and block_mask.mask_mod is not mask_mod:
        masks.append(block_mask.mask_mod)

    def body(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_dynamo_compiling():  # torch.compile gave up on the mods
            from flexc import api

            whole: tuple[torch.Tensor, torch.Tensor]
            whole = api.attention(q, k, v, **{**given, "return_lse": True})
            return whole
        score, b, h, q_idx, kv_idx = [_argument(q, name) for name in ("score", "b", "h", "q_idx", "kv_idx")]
        allowed = [undecorated(mask)(b, h, q_idx, kv_idx) for mask in masks]
        scored = None if score_mod is None else undecorated(score_mod)(score, b, h, q_idx, kv_idx)
        return _finish(
            q,
            k,
            v,
            score=scored,
            masks=allowed,
            sinks=given["sinks"],
            seed=seed,
            blocks=blocks,
            map_shape=map_shape,
            mask_shape=() if block_mask is None else (*block_mask.seq_lengths, *block_mask.shape[:2]),
            scale=given["scale"],
            backend=given["backend"],
            returns_lse=given["return_lse"],
            options=[] if given["options"] is None else list(given["options"].items()),
            dropout_p=given["dropout_p"],
            deterministic=given["deterministic"],
        )

    results: tuple[torch.Tensor, torch.Tensor] = _capture(body, q)
    return results


def _blocks_of(block_mask: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """The tensors of a block mask of flexc or PyTorch, and the fields of its MapShape."""
    if block_mask is None:
        return [], ()
    if isinstance(block_mask, BlockMask):
        block_map = block_mask.block_map
        if block_map is None:
            return [], ()
        form = "stretches" if isinstance(block_map, DeviceMap) else "runs"
        shape = (block_map.block_q, block_map.block_kv, block_map.batch > 1, block_map.heads > 1, form)
        return arrays_of(block_map), shape
    lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
    if block_mask.full_kv_num_blocks is not None:
        lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    return lists, (*block_mask.BLOCK_SIZE, False, False, "lists")
