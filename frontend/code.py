"""What a code object reads and writes outside of itself."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from types import CodeType
from weakref import WeakKeyDictionary


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """Global names read; the first assignment to a name of an outer scope, with its offset; any import."""

    globals: tuple[str, ...]
    assignment: tuple[str, int] | None
    imports: bool


_known: WeakKeyDictionary[CodeType, CodeFacts] = WeakKeyDictionary()


def facts_of(code: CodeType) -> CodeFacts:
    """The facts of `code` and of the functions defined in it."""
    facts = _known.get(code)
    if facts is None:
        facts = _known[code] = _scan(code)
    return facts


def _scan(code: CodeType) -> CodeFacts:
    names: dict[str, None] = {}
    assignment = None
    imports = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[str(instruction.argval)] = None
        elif instruction.opname == "IMPORT_NAME":
            imports = True
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars
        ):
            assignment = assignment or (str(instruction.argval), instruction.offset)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            nested = facts_of(constant)
            names |= dict.fromkeys(nested.globals)
            imports = imports or nested.imports
    return CodeFacts(tuple(names), assignment, imports)
