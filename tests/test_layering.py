"""Who may import whom, and where each heavy library lives, read from the source of every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# errors <- ir <- {frontend, codegen} <- flexc; templates are data that only codegen reads.
MAY_IMPORT = {
    "ir": {"flexc.errors", "flexc.ir"},
    "frontend": {"flexc.errors", "flexc.ir", "flexc.frontend"},
    "codegen": {"flexc._version", "flexc.errors", "flexc.ir", "flexc.codegen", "flexc.templates"},
    "templates": set[str](),
}

# The only files that may import a heavy library. A trailing slash allows a whole folder.
HOME = {
    "jinja2": ("codegen/render.py",),
    "matplotlib": ("flexc/plot.py",),
    "networkx": ("ir/place.py",),
    "numpy": ("ir/", "frontend/", "flexc/"),
    "rich": ("flexc/cli/",),
    "sympy": ("ir/symbolic.py",),
    "torch": ("frontend/", "flexc/"),
    "triton": ("flexc/compiler.py",),
    "typer": ("flexc/cli/",),
}

FILES = sorted(
    path
    for folder in ("flexc", "frontend", "ir", "codegen", "templates")
    for path in (ROOT / folder).rglob("*.py")
)


def _nodes(root: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """Every node below `root`; without `types`, not those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(root):
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _nodes(node, types=types)


def _imports(path: Path, *, types: bool = True) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, also inside functions."""
    for node in _nodes(ast.parse(path.read_text()), types=types):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                is_package = node.module == "flexc" and alias.name != "__version__"
                yield node.lineno, f"flexc.{alias.name}" if is_package else node.module


def _is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    if layer == "flexc":
        if path.name == "errors.py":
            assert not [name for _, name in _imports(path) if _is_under(name, "flexc")]
        return
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in _imports(path)
        if _is_under(name, "flexc") and not any(_is_under(name, allowed) for allowed in MAY_IMPORT[layer])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", HOME)
def test_a_heavy_library_has_one_home(library: str) -> None:
    wrong = []
    for path in FILES:
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(HOME[library]):
            continue
        wrong += [
            f"{relative}:{line}" for line, name in _imports(path, types=False) if _is_under(name, library)
        ]
    assert not wrong, f"{library} may be imported only in {HOME[library] or 'no file'}: {wrong}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400, "split the file by idea"


def test_the_root_holds_only_what_was_agreed() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    made = {"build", "dist", "demo-output", "flexc.egg-info"}
    assert folders - made == {"flexc", "frontend", "ir", "codegen", "templates", "tests", "examples"}


def test_no_bag_of_helpers() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "common", "helpers", "misc"}]
