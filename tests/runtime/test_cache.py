"""The kernel cache: damaged entries are made again, many processes make one, and what the key depends on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flexc.templates
from flexc import artifact, build, cache
from flexc.artifact import Artifact, Resources
from flexc.codegen.arguments import Argument, Source
from flexc.ir.graph import Capture
from flexc.ir.ranges import Within
from flexc.ir.types import Storage
from flexc.kernel import Kernel

KEY = "ab" + "0" * 62
MADE = Artifact(
    key="k",
    description="mask_mod, D=64, bf16",
    target="sm90",
    entry="attention_forward",
    source="# a kernel\n",
    cubin=b"\x7fELF\0\1",
    ptx=".entry attention_forward()",
    ttgir="module {}",
    shared=1024,
    num_warps=4,
    block_q=64,
    block_kv=32,
    parameters=1,
    resources=Resources(32, 0, 1024, 4),
    arguments=(Argument("q_ptr", "*bf16", Source.Q, divisible=True),),
    captures=(Capture("slopes", Storage.FP32, 1), Capture("n", Storage.I32)),
    requires=(Within(1, 0, 7),),
    explanation="because",
    flexc_version="0",
    triton_version="0",
)


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "cache"))


def _never(scratch: Path) -> Artifact:
    raise AssertionError("built again")


def _counting(counts: list[Path]) -> Callable[[Path], Artifact]:
    def make(scratch: Path) -> Artifact:
        assert scratch.is_dir()
        counts.append(scratch)
        return MADE

    return make


def _entry() -> Path:
    (entry,) = cache.entries()
    return entry.folder


def test_a_kernel_is_built_once_and_read_whole() -> None:
    built: list[Path] = []
    assert cache.get_or_build(KEY, _counting(built)) == MADE
    assert cache.get_or_build(KEY, _never) == MADE
    assert len(built) == 1
    assert not built[0].exists()


@pytest.mark.parametrize("name", [artifact.CUBIN, artifact.SOURCE, artifact.METADATA])
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe{"])
def test_damaged_entries_are_built_again(name: str, content: bytes | None) -> None:
    cache.get_or_build(KEY, lambda scratch: MADE)
    file = _entry() / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    built: list[Path] = []
    assert cache.get_or_build(KEY, _counting(built)) == MADE
    assert len(built) == 1
    assert artifact.read(_entry()) == MADE


@pytest.mark.parametrize("text", ["[]", "null", "3", '{"format": 0}', "{}"])
def test_metadata_of_another_form_is_built_again(text: str) -> None:
    cache.get_or_build(KEY, lambda scratch: MADE)
    (_entry() / artifact.METADATA).write_text(text)
    built: list[Path] = []
    cache.get_or_build(KEY, _counting(built))
    assert len(built) == 1


def test_an_empty_folder_in_its_place_is_replaced() -> None:
    folder = cache.path() / "kernels" / KEY[:2] / KEY
    folder.mkdir(parents=True)
    assert cache.get_or_build(KEY, lambda scratch: MADE) == MADE
    assert cache.get_or_build(KEY, _never) == MADE


def test_a_failed_build_leaves_no_entry_but_its_files() -> None:
    def fail(scratch: Path) -> Artifact:
        (scratch / "kernel.py").write_text("# wrong")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_build(KEY, fail)
    assert list(cache.entries()) == []
    assert [f.name for f in (cache.path() / "build").glob("*/*")] == ["kernel.py"]
    assert cache.get_or_build(KEY, lambda scratch: MADE) == MADE


def test_a_cache_that_cannot_be_written_is_read_and_does_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file stands in its place: unlike missing rights, that stops the superuser too."""
    place = tmp_path / "file"
    place.touch()
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(place))
    counts: list[Path] = []
    with pytest.warns(RuntimeWarning, match="FLEXC_CACHE_DIR"):
        made = cache.get_or_build(KEY, _counting(counts))
    assert cache.get_or_build(KEY, _never) == made
    assert len(counts) == 1
    assert place.read_bytes() == b""


def test_listing_and_clearing() -> None:
    assert list(cache.entries()) == []
    assert cache.clear() == 0
    for n in range(3):
        cache.get_or_build(f"{n}{KEY}", lambda scratch, n=n: replace(MADE, target=f"sm{n}"))  # type: ignore[misc]
    found = list(cache.entries())
    assert [entry.target for entry in found] == ["sm0", "sm1", "sm2"]
    assert [entry.key for entry in found] == [f"{n}{KEY}" for n in range(3)]
    assert all(entry.bytes == sum(f.stat().st_size for f in entry.folder.iterdir()) for entry in found)
    assert cache.clear() == 3
    assert list(cache.entries()) == []
    assert cache.get_or_build(KEY, lambda scratch: MADE) == MADE


def test_a_damaged_entry_is_not_listed() -> None:
    cache.get_or_build(KEY, lambda scratch: MADE)
    (_entry() / artifact.CUBIN).write_bytes(b"")
    assert list(cache.entries()) == []


def test_the_folder_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.path() == tmp_path / "cache"
    monkeypatch.delenv("FLEXC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.path() == tmp_path / "flexc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.path() == tmp_path / "home" / ".cache" / "flexc"


_PROGRAM = """
import flexc
from flexc import build, masks
options = {"block_q": 16, "block_kv": 16}
kernel = flexc.compile(mask_mod=masks.causal, head_dim=16, target="sm80", options=options)
print(build.compilations, len(kernel.artifact.cubin))
"""


def test_two_processes_at_once_compile_once() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(count for count, _ in said) == ["0", "1"]
    assert said[0][1] == said[1][1]


def _key(monkeypatch: pytest.MonkeyPatch) -> str:
    """The key under which the cache is asked for one kernel."""
    keys = []

    def ask(key: str, make: Any) -> Artifact:
        keys.append(key)
        return MADE

    from flexc.codegen.target import TARGETS
    from tests.codegen.generate import spec_for

    with monkeypatch.context() as patch:
        patch.setattr(cache, "get_or_build", ask)
        build.generator.cache_clear()
        kernel = build._find_or_build(spec_for(flexc.masks.causal), TARGETS["sm90"], {}, ())
    assert isinstance(kernel, Kernel)
    return keys[0]


def test_edited_templates_have_other_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = _key(monkeypatch)
    assert _key(monkeypatch) == before
    edited = tmp_path / "templates"
    shutil.copytree(flexc.templates.__path__[0], edited)
    with monkeypatch.context() as patch:
        patch.setattr(flexc.templates, "__path__", [str(edited)])
        assert _key(monkeypatch) == before
        template = edited / "forward.py.jinja"
        template.write_text(template.read_text().replace("exp2", "exp2 "))
        assert _key(monkeypatch) != before
    assert _key(monkeypatch) == before


def test_another_triton_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key(monkeypatch)
    monkeypatch.setattr("flexc.compiler.triton_version", lambda: "99.0")
    assert _key(monkeypatch) != before
