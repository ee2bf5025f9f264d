"""Compile the kernels of many steps side by side, before any of them runs.

Triton compiles a kernel when it is first launched, one after the other, a second or more each: a minute for all shapes
of a step. Here a pass over the same launches only notes what would be compiled; forked processes compile it into
Triton's cache on disk, where the launches then find it. Threads would share one interpreter lock, and most of the work
is Python.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

_MOST_PROCESSES = 32
"""The slowest kernel alone takes as long as a thirtieth of all of them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel and what it is specialised for: the arguments of Triton's `ASTSource` and `compile`."""

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: Any
    options: dict[str, Any]
    target: Any


@contextmanager
def noting_kernels() -> Iterator[list[Kernel]]:
    """Inside, Triton launches run nothing; the list fills with the kernels that they would have run.

    Buffers that kernels would have written hold garbage, so nothing that was computed inside may be used.
    """
    from triton import knobs
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    noted: list[Kernel] = []
    seen: set[tuple[str, str, str]] = set()
    launch = JITFunction.run

    def only_note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # The first half of `JITFunction.run` (Triton 3.6), up to where it would compile.
        options["debug"] = options.get("debug", self.debug) or knobs.runtime.debug
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        _, _, target, backend, binder = self.device_caches[driver.active.get_current_device()]
        bound, specialisation, rest = binder(*args, **options)
        key = (self.fn.__qualname__, str(specialisation), str(rest))
        if key in seen:
            return
        seen.add(key)
        made, signature, constants, attributes = self._pack_args(backend, options, bound, specialisation, rest)
        name = self.fn.__qualname__
        noted.append(Kernel(self.fn.__module__, name, signature, constants, attributes, dict(made.__dict__), target))

    # There is no other way to reach every launch below: launch functions know nothing of it. A kernel that is compiled
    # already must not run either, since its inputs may come from one that was only noted.
    JITFunction.run = only_note
    try:
        yield noted
    finally:
        JITFunction.run = launch


def compile_all(kernels: list[Kernel]) -> None:
    """Compile into Triton's disk cache, in as many processes as there are processors to use.

    A kernel that fails is left for its launch to fail on, with the launch's own stack trace.
    """
    processes = min(len(kernels), len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    if processes < 2:
        return
    # Forked, so that nothing is imported again. The children touch no CUDA: a kernel is compiled for a named target.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for kernel, failure in zip(kernels, pool.map(_compile, kernels), strict=True):
            if failure is not None:
                _log.warning("%s.%s did not compile: %s", kernel.module, kernel.name, failure)


def _compile(kernel: Kernel) -> str | None:
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    try:
        function = getattr(importlib.import_module(kernel.module), kernel.name)
        source = ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
        compile_source(source, target=kernel.target, options=kernel.options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
