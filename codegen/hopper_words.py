"""The words of a Hopper kernel: names that its template uses, and Triton's lines in Gluon's words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flexc.codegen.arguments import RESERVED
from flexc.codegen.gluon_names import NAMES

ALL_NAMES = RESERVED | frozenset({
    "CONSUMERS", "FIRST_TURN", "FEW_DIMS", "FEW_KEYS", "K_BYTES", "L2_KEYS", "OPERAND", "PARTS", "Q_BYTES",
    "Q_TILES", "ROWS", "SKIP_FIRST", "SKIP_LAST", "STAGES", "TAIL_DIM", "TAIL_DIM_V", "THREADS", "TILES",
    "TOLD", "V_BYTES", "_", "acc_layout", "acc_row_layout", "acc_tail", "acc_tail_layout",
    "acc_tail_row_layout", "add_weights", "again_end", "again_first", "again_head", "again_start",
    "alive", "alpha", "async_copy", "attend", "attend_again", "await_turn", "back",
    "batch", "before", "begun", "blind",
    "blind_now", "bounds", "column_layout", "counter_ptr", "dim", "dim_v", "done", "done_b",
    "done_end", "done_first", "done_h", "done_rows", "done_start", "entry",
    "fence_async_shared", "fetch", "first", "first_column", "first_row", "following", "fresh",
    "HEAD_ROWS", "fetch_rows", "first_head", "getattr", "gl", "gluon", "has_nan", "head", "heads", "highest",
    "i", "inside", "is_last", "keep",
    "kv_from", "kv_last", "kv_near", "kv_on", "lane", "lanes", "largest", "layout", "left", "left_layout",
    "lift", "LIFT", "link", "load_tiles", "log_weights", "lost", "lost_smem", "lowest", "masked", "mbarrier",
    "mma_v2", "new_max",
    "next_b", "next_end", "next_first", "next_h", "next_head", "next_start", "no_weights", "note",
    "note_smem", "number", "of_keys", "other", "out_tail", "out_tail_tile", "own_start", "p_layout",
    "p_tail", "p_tail_layout", "part", "pass_turn", "place", "place_of", "q_near",
    "q_tail", "rest",
    "right_layout", "row_layout", "row_of_out", "score_layout", "seen", "seen_end", "seen_first",
    "share", "shift", "short", "sigmoid", "size", "slot", "step", "stretches", "sum_parts",
    "sums", "sums_of_threads", "sums_smem", "taken", "tell",
    "there", "ticket", "tile", "tile_first", "tile_free", "tile_last", "tile_ready", "tile_smem",
    "tile_start", "tiles", "tma", "together", "told", "total", "unseen", "v_turn", "wanted",
    "warpgroup_mma", "warpgroup_mma_wait", "weights", "where_smem", "which", "zero",
    *(f"{tensor}_{part}" for tensor in ("q", "k", "v", "out") for part in ("desc", "smem", "ready", "free")),
    *(f"{tensor}_tail_{part}" for tensor in ("q", "k", "v", "out") for part in ("desc", "smem")),
    "distances", "from_lane", "found", "of_window", "over_tile", "pairs", "parts", "source", "thread",
    "MOST_SHIFT", "first_weights", "grown", "have_grown", "has_no_number", "powers_of_two",
    "choose_shift", "of_columns", "of_first", "shiftless", "slope", "slope_log2",
    "MARGIN", "TOO_LARGE", "TOO_SMALL",
    "threads", "values", "when_there", "window", "windows", "numbers", "_others",
    *NAMES,
})  # fmt: skip
"""Every name that the template uses."""
SIGMOID = "tl.sigmoid("


def gluon(lines: Sequence[str]) -> tuple[str, ...]:
    """Statements that were emitted for Triton, in Gluon: the same words in another module.

    Gluon has no sigmoid: the file has one of its own.
    """
    return tuple(re.sub(r"\btl\.", "gl.", line.replace(SIGMOID, "sigmoid(")) for line in lines)


def target_of(line: str) -> str:
    """The name that a line assigns to."""
    return line.partition(" = ")[0]


def mentions(name: str, texts: Sequence[str]) -> bool:
    """Whether any of `texts` has the name, as more than the keyword of an argument (`mask=`)."""
    return any(re.search(rf"\b{re.escape(name)}\b(?!=[^=])", text) for text in texts)


def needed(lines: Sequence[str], users: Sequence[str]) -> tuple[str, ...]:
    """Those of `lines`, each an assignment, whose names `users` mention, or a later one that is needed."""
    kept: list[str] = []
    for line in reversed(lines):
        if mentions(target_of(line), (*kept, *users)):
            kept.append(line)
    return tuple(reversed(kept))


def others(lines: Sequence[str], names: frozenset[str]) -> tuple[str, ...]:
    """The assignments to other than `names`."""
    return tuple(line for line in lines if target_of(line) not in names)


def nearer(lines: Sequence[str], names: frozenset[str], index: str, near: str) -> tuple[str, ...]:
    """The assignments to `names`, an index replaced by a nearer one."""
    chosen = (line for line in lines if target_of(line) in names)
    return tuple(re.sub(rf"\b{index}\b", near, line) for line in chosen)


def depending(names: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Those of `lines`, each an assignment, that read one of `names` or a result of another that does."""
    tainted, found = set(names), []
    for line in lines:
        name, _, value = line.partition(" = ")
        if tainted & set(re.findall(r"\w+", value)):
            tainted.add(name)
            found.append(line)
    return found
