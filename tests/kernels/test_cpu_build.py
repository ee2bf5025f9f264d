"""Compilation: once, atomically, and with an error that names the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longturn.errors import ConfigError
from longturn.kernels.cpu import build as cpu_build
from longturn.kernels.cpu.build import KernelBuildError
from longturn.kernels.cpu.library import load, unavailable_reason


def test_second_build_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    quick = tuple(flag for flag in cpu_build.FLAGS if flag != "-O3")
    monkeypatch.setattr(cpu_build, "FLAGS", quick)
    first = cpu_build.build(tmp_path)
    made = first.stat().st_mtime_ns

    def forbidden(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cpu_build, "_compile", forbidden)
    assert cpu_build.build(tmp_path) == first
    assert first.stat().st_mtime_ns == made
    assert list(first.parent.iterdir()) == [first], "scratch files were left"
    with pytest.raises(AssertionError):  # other flags are another library
        cpu_build.build(tmp_path, defines=("LONGTURN_GENERIC",))


def test_missing_compiler_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "find_compiler", lambda: None)
    reason = unavailable_reason(tmp_path)
    assert reason is not None and "install g++ or clang++" in reason and "\n" not in reason


def test_failed_compilation_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    if cpu_build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    with pytest.raises(KernelBuildError, match=r"could not compile the CPU kernels: .*error") as caught:
        cpu_build.build(tmp_path, arch=("-march=no-such-processor",))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "kernels").iterdir()) == []


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    if cpu_build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(KernelBuildError, match=r"cannot write compiled CPU kernels to .*file"):
        cpu_build.build(blocker)


def test_package_imports_neither_torch_nor_the_web() -> None:
    code = (
        "import sys, longturn.kernels.cpu.native;"
        "bad = {'torch', 'msgspec', 'zmq', 'starlette', 'pydantic', 'gguf'} & set(sys.modules);"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nobodys_home_is_one_line_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.setattr(cpu_build, "find_compiler", lambda: (sys.executable,))
    with pytest.raises(ConfigError, match="name a directory with 'cache_dir'"):
        cpu_build.build()


def test_a_damaged_library_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(cpu_build, "FLAGS", tuple(flag for flag in cpu_build.FLAGS if flag != "-O3"))
    path = cpu_build.build(tmp_path)
    path.write_bytes(b"")
    assert load(tmp_path).path == path
    assert path.stat().st_size > 0
