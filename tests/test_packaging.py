"""The wheel holds everything, and the package imports from a checkout, installed or not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import flexc

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = ("flexc", "frontend", "ir", "codegen", "templates")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    tree = tmp_path_factory.mktemp("tree")
    for name in (*SHIPPED, "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tree / "dist", tree], check=True)
    (path,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    expected = {"flexc/py.typed"}
    for folder in SHIPPED:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".jinja", ".md"}:
                relative = path.relative_to(ROOT).as_posix()
                expected.add(relative if folder == "flexc" else f"flexc/{relative}")
    assert expected <= set(wheel.namelist())


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {
        "flexc",
        f"flexc-{flexc.__version__}.dist-info",
    }


def test_every_package_is_listed() -> None:
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    found = {
        ".".join((() if folder == "flexc" else ("flexc",)) + path.parent.relative_to(ROOT).parts)
        for folder in SHIPPED
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == found


def test_imports_from_an_uninstalled_checkout() -> None:
    code = "import flexc.ir.ops, flexc.codegen, flexc.frontend, flexc.templates; print(flexc.ir.ops.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "ir" / "ops.py"


def test_development_versions_are_pinned() -> None:
    dev = PYPROJECT["project"]["optional-dependencies"]["dev"]
    assert [requirement for requirement in dev if "==" not in requirement] == []
