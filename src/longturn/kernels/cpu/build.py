"""Compile the C++ kernels once for this machine and keep the library in the cache directory.

The file name carries a hash of the sources, the compiler, the flags and the processor's features, so a changed
machine or source compiles anew and an unchanged one costs a few file reads.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from longturn.errors import LongturnError
from longturn.prepared import cache_directory

SOURCE_DIR = Path(__file__).parent
UNIT = "kernels.cpp"
INCLUDED = ("decoder.cpp", "api.cpp", "decoder.h", "api.h", "attention.h", "gemm.h", "amx.h", "pool.h", "simd.h")
# Contraction is off so that only the fused multiply-adds written in the source are fused: results must not depend on
# what the optimiser fuses. The other two change no value, only errno and traps.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
COMPILE_TIMEOUT_S = 300


class KernelBuildError(LongturnError):
    """The CPU kernels could not be compiled or loaded; the message says what to install or change."""


def find_compiler() -> tuple[str, ...] | None:
    """Command of a C++17 compiler: `c++`, `g++`, `clang++`, else the PyPI package `ziglang`; None if there is none."""
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def build(cache_dir: Path | None = None, *, arch: Sequence[str] | None = None, defines: Sequence[str] = ()) -> Path:
    """Path of the compiled library, compiling it if this machine has not done so yet.

    Args:
        cache_dir: directory for prepared files; the user's cache directory if None.
        arch: flags that choose the instruction set; this machine's own if None.
        defines: further `-D` names (`LONGTURN_GENERIC` forces the plain C++ path).

    Raises:
        KernelBuildError: no compiler, a failed compilation, or a directory that cannot be written.
        ConfigError: no directory is given, and there is no home directory.
    """
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError(
            "no C++ compiler found for the CPU kernels: install g++ or clang++, or run `pip install ziglang`"
        )
    version = _compiler_version(compiler)
    flags = [*FLAGS, *(_native_flags() if arch is None else arch), *(f"-D{name}" for name in defines)]
    digest = hashlib.sha256("\0".join([*compiler, version, *flags, _processor()]).encode())
    for name in (UNIT, *INCLUDED):
        digest.update((SOURCE_DIR / name).read_bytes())
    target = cache_directory(cache_dir) / "kernels" / f"cpu-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        _compile([*compiler, *flags, str(SOURCE_DIR / UNIT)], target)
    return target


def _compile(command: list[str], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
            # Written apart and renamed: another process must never load half a library.
            made = Path(scratch) / target.name
            done = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                detail = lines[0].strip() if lines else f"exit code {done.returncode}"
                raise KernelBuildError(f"{command[0]} could not compile the CPU kernels: {detail}")
            made.replace(target)
    except OSError as error:
        raise KernelBuildError(f"cannot write compiled CPU kernels to {target.parent}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} took over {COMPILE_TIMEOUT_S} s for the CPU kernels") from error


@functools.cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the C++ compiler {compiler[0]} does not run: {error}") from error
    return done.stdout


def _native_flags() -> tuple[str, ...]:
    # clang before 17 knows no -march=native on Arm; -mcpu=native means the same there to both compilers.
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)


def _processor() -> str:
    """The features that -march=native looks at: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    seen = dict.fromkeys(line for line in lines if line.startswith(wanted))
    return "\n".join([platform.machine(), *seen])
