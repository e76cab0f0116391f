"""Names that captured tensors and helpers of mods do not get in a Hopper backward."""

from __future__ import annotations

from flexc.codegen.arguments import RESERVED
from flexc.codegen.gluon_names import NAMES

NAMES_OF_BACKWARD = RESERVED | frozenset({
    "gluon", "gl", "tma", "mbarrier", "fence_async_shared", "warpgroup_mma", "warpgroup_mma_init",
    "warpgroup_mma_wait", "getattr", "KEYS", "Q_STAGES", "DQ_COLUMNS", "Q_BYTES", "KV_BYTES", "WALK",
    "OPERAND", "L2_ROWS", "sigmoid", "place_of", "take_turn", "give_turn", "score_gradient",
    "query_gradient", "complete", "less_delta", "early", "late", "of_pairs", "stage", "load_tiles",
    "accumulate", "attention_backward", "batch", "never", "keep",
    "taken", "places", "head_of_keys", "TOLD", "of_threads", "ds_free", "dv_place",
    "counts", "tile", "tiles", "lane", "of_tile", "second", "counter_ptr", "k_free", "v_free", "ticket",
    "less", "nought", "rows", "q_on", "q_from", "k_here", "k_rows", "v_rows",
    "lost", "lost_ptr", "heads", "together", "first", "size", "rest", "which", "x", "order", "numbers",
    "table", "starts", "row_numbers", "row", "count", "counted", "plain", "start", "step", "steps", "slot",
    "after", "half", "ahead", "wanted", "some", "t", "i", "one_layout", "score_layout", "acc_layout",
    "dq_layout", "weight_layout", "row_layout", "column_layout", "ds_layout", "first_key", "zero",
    "dq_zero", "keys_left", "q_here", "tell", "told", "next_tile", "count_steps", "last_head", "none",
    "fresh", "end", "k_mine", "v_mine", "ds_mine", "dq_row", "masked", "dout_h", "dout_start", "firsts",
    "ends", "acc_zero", "dp", "ds", "share", "k_ready", "v_ready", "q_ready", "dout_ready", "done",
    "dq_sum_desc", "dq_sum_ptr", "full_first", "full_end", "q_end", "found",
    "from_lane", "of_thread", "fold", "diagonal_sums", "grad", "q_there", "sums", "apart", "place",
    "element", "inside", "key", "threads", "sum_of_thread", "unrounded_gradient", "unpacked",
    "add_head", "zeros", "add_rows", "row_sums_ptr", "distances", "over_tile", "window", "windows",
    "of_window", "values", "parts", "pairs", "distance", "source", "q_idx_of", "kv_idx_of",
    "RESIDENT", "turns_ptr", "turn_ptr", "turns", "own_turn", "await_turn", "pass_turn", "turn_before",
    "rows_of", "add_in_order", "first_row", "staged", "fetched", "nearest", "following", "before_first",
    "before_end", "row_map_offsets_ptr", "row_map_stretches_ptr", "row_map_stride_b",
    "row_map_stride_h", "number", "let_next_begin", "await_kernel_before", "leave_rows", "lanes",
    "FIRST_DIM", "TAIL_DIM", "K_BYTES", "V_BYTES", "DOUT_BYTES", "accumulate_values", "accumulate_keys",
    "k_tail_smem", "q_tail_smem", "dk_tail_smem", "q_tail_desc", "k_tail_desc", "dk_tail_desc", "share_smem",
    "k_tail_mine", "dk_tail", "tail_layout", "tail_zero", "ds_before", "k_columns", "ds_tile", "old", "same",
    "final_scale", "freed", "shared", "share_layout", "operand_layout", "pid",
    "units_of", "split", "start_scores", "start_sums", "coarse", "fine", "unit", "right_coarse",
    "right_fine", "per_unit", "exponent", "row_of_keys", "kv_at", "kv_row", "q_row", "dout_row",
    "acc_column_layout", "acc_row_layout", "columns", "dims", "HEAD_DIM", "HEAD_DIM_V", "head_count",
    *(f"{tensor}_unit_{part}" for tensor in ("q", "k", "v", "dout") for part in ("smem", "desc")),
    *(f"{tensor}_desc" for tensor in ("q", "k", "v", "dout", "dk", "dv", "shift", "delta")),
    *(f"{tensor}_smem" for tensor in ("q", "k", "v", "dout", "ds", "dq", "dk", "shift", "delta")),
    *NAMES,
})  # fmt: skip
"""Every name that the template of the large kernel uses."""
