"""The compiled CPU kernels in every form that this machine can run."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from longturn.kernels.cpu import build as cpu_build
from longturn.kernels.cpu.native import NativeLibrary


def _runs_here(flags: set[str]) -> bool:
    info = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and info.exists() and flags <= set(info.read_text().split())


FORMS = {
    "native": (None, (), set()),
    "avx2": (("-march=x86-64-v3",), (), {"avx2", "fma", "f16c"}),
    "generic": (None, ("LONGTURN_GENERIC",), set()),
}


@pytest.fixture(scope="session")
def cpu_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NativeLibrary]:
    """Each form that runs on this machine. The machine's own is the one that servers use, and mostly compiled already;
    the others are compiled beside each other, as that takes ten seconds for each."""
    if cpu_build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    where = tmp_path_factory.mktemp("cpu-kernels")

    def built(form: tuple[tuple[str, ...] | None, tuple[str, ...]]) -> NativeLibrary:
        arch, defines = form
        return NativeLibrary(cpu_build.build(where if arch or defines else None, arch=arch, defines=defines))

    forms = {name: form[:2] for name, form in FORMS.items() if not form[2] or _runs_here(form[2])}
    with ThreadPoolExecutor() as pool:
        return dict(zip(forms, pool.map(built, forms.values()), strict=True))


@pytest.fixture(params=list(FORMS))
def library(request: pytest.FixtureRequest, cpu_libraries: dict[str, NativeLibrary]) -> NativeLibrary:
    if request.param not in cpu_libraries:
        pytest.skip(f"this machine does not run the {request.param} form")
    return cpu_libraries[request.param]
