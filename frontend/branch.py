"""Which piece of Python control flow is asking for a truth value, and what to write in its place."""

from __future__ import annotations

import dis

from flexc.frontend.span import user_frame

_GENERAL = "combine conditions with `&`, `|`, `~`, and choose values with torch.where(condition, a, b)"
_BRANCH = "write torch.where(condition, a, b) in place of `if`; combine conditions with `&`, `|`, `~`"
_HINTS = {
    "JUMP_IF_FALSE_OR_POP": "write `(a) & (b)` in place of `a and b` or `x < y < z`",
    "JUMP_IF_TRUE_OR_POP": "write `(a) | (b)` in place of `a or b`",
    "UNARY_NOT": "write `~(a)` in place of `not a`",
    "CONTAINS_OP": "write `(x == a) | (x == b)` in place of `x in (a, b)`",
    "CALL": "use torch: torch.minimum, torch.maximum, torch.clamp, torch.where, `.any()`, `.all()`",
    "PRECALL": "use torch: torch.minimum, torch.maximum, torch.clamp, torch.where, `.any()`, `.all()`",
    "COPY": "write `(a) & (b)` in place of `a and b`, `(a) | (b)` in place of `a or b`",
    "TO_BOOL": _GENERAL,
}


def branch_hint() -> str:
    """What to write in place of the control flow that is running in the user's frame."""
    frame = user_frame()
    if frame is None:
        return _GENERAL
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return _HINTS.get(instruction.opname, _BRANCH)
    return _GENERAL
