"""Compile the kernels of many steps side by side, before any of them runs.

Triton compiles a kernel when it is first launched, one after the other: half a second for the kernel, and as much again
for the C function that launches it, which a C compiler makes for each list of argument types. Here a pass over the same
launches only notes what would be compiled; forked processes compile it into Triton's cache on disk, where the launches
then find it. Threads would share one interpreter lock, and most of the work is Python.

Tensors on torch's `meta` device, which have shapes and no memory, are enough to note launches, so that compiling can
begin before the weights are there.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

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

    @property
    def key(self) -> str:
        """Equal for kernels that are compiled to the same code."""
        parts = (sorted(map(str, d.items())) for d in (self.signature, self.constants, self.attributes, self.options))
        return f"{self.module}.{self.name} {list(parts)} {self.target}"


class _NamedDevice:
    """What Triton asks of a driver to specialise a launch, without one."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return -1  # no device's number: Triton keeps things by it

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def noting_kernels(capability: tuple[int, int] | None = None) -> Iterator[list[Kernel]]:
    """Inside, Triton launches run nothing; the list fills with the kernels that they would have run on a GPU.

    Buffers that kernels would have written hold garbage, so nothing that was computed inside may be used.

    Args:
        capability: of the GPU. That of the current device if None.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    noted: list[Kernel] = []
    seen: set[tuple[str, str, str]] = set()
    launch = JITFunction.run
    device: Any = None
    if capability is not None:
        device = _NamedDevice(GPUTarget("cuda", capability[0] * 10 + capability[1], 32))

    def only_note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # The first half of `JITFunction.run` (Triton 3.6), up to where it would compile.
        options["debug"] = options.get("debug", self.debug) or knobs.runtime.debug
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        _, _, target, backend, binder = self.device_caches[(device or driver.active).get_current_device()]
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
    # Launches choose by what a tensor is on, and `meta` stands for the GPU.
    torch.Tensor.is_cuda = property(lambda self: self.device.type in ("cuda", "meta"))  # type: ignore[assignment]
    # Products of the vendor's library are left out too. On `meta` some would load half of PyTorch's compiler.
    torch.Tensor.addmm_ = lambda self, *args, **options: self  # type: ignore[method-assign]
    before, capability_of, mm = driver._active, torch.cuda.get_device_capability, torch.mm
    torch.mm = lambda *args, out=None: out
    if device is not None and capability is not None:
        driver.set_active(device)
        torch.cuda.get_device_capability = lambda device=None: capability
    try:
        yield noted
    finally:
        driver._active, torch.cuda.get_device_capability, torch.mm = before, capability_of, mm
        JITFunction.run = launch
        del torch.Tensor.is_cuda, torch.Tensor.addmm_


class Compilation:
    """Kernels on their way into Triton's disk cache, in as many processes as there are processors to use.

    A kernel that fails is left for its launch to fail on, with the launch's own stack trace.
    """

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        """Starts at once; the first kernels should be those that are wanted first, or take longest."""
        wanted = {kernel.key: kernel for kernel in kernels}
        self._running: dict[str, Future[str | None]] = {}
        self._done: set[str] = set()
        self._pool: ProcessPoolExecutor | None = None
        processes = min(len(wanted), len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        if processes < 2:
            return
        _hash(wanted.values())
        # Forked, so that nothing is imported again. Children touch no CUDA: kernels are compiled for a named target.
        fork = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(processes, fork, initializer=_end_with_parent)
        launchers: set[str] = set()
        for key, kernel in wanted.items():
            types = str(tuple(kernel.signature.values()))
            self._running[key] = self._pool.submit(_compile, kernel, types not in launchers)
            launchers.add(types)

    def wait_for(self, kernels: Iterable[Kernel]) -> int:
        """Until these are compiled, and those of them that were not foreseen too; how many were not."""
        missing = []
        for kernel in kernels:
            key = kernel.key
            if key in self._running:
                self._wait(key)
            elif key not in self._done:
                missing.append(kernel)
        if missing:
            Compilation(missing).wait()
            self._done.update(kernel.key for kernel in missing)
        return len(missing)

    def wait(self) -> None:
        """Until all are done."""
        for key in list(self._running):
            self._wait(key)
        self.close()

    def close(self) -> None:
        """End the processes, when they are done with what they are at."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _wait(self, key: str) -> None:
        try:
            failure = self._running.pop(key).result()
        except (BrokenProcessPool, CancelledError) as error:
            failure = str(error) or type(error).__name__
        if failure is not None:
            _log.warning("%s... did not compile: %s", key[:100], failure)
        self._done.add(key)


def _hash(kernels: Iterable[Kernel]) -> None:
    """Let Triton work out here, once, what its cache keys are made of.

    A function's hash depends on which functions were hashed before it (Triton 3.6: whether the constants that a called
    function uses are part of the caller's hash), so that processes which each hash some of them would look for files
    under other names than they were written by. Triton's own hash takes a second, in every process that needs it.
    """
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    triton_key()
    for kernel in kernels:
        assert _function(kernel).cache_key
        backend = make_backend(kernel.target)
        assert backend.hash() and backend.parse_options(dict(kernel.options)).hash()


def _function(kernel: Kernel) -> Any:
    return getattr(importlib.import_module(kernel.module), kernel.name)


def _source(kernel: Kernel) -> Any:
    """The kernel as Triton compiles it; Gluon's have a front end of their own."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = _function(kernel)
    make = GluonASTSource if function.is_gluon() else ASTSource
    return make(function, kernel.signature, kernel.constants, kernel.attributes)


def _end_with_parent() -> None:
    """A process that waits for work would outlive a parent that was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _compile(kernel: Kernel, launcher: bool) -> str | None:
    """`launcher`: make the C function that launches it too; kernels of the same argument types share one."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import compile as compile_source

    try:
        source = _source(kernel)
        compiled = compile_source(source, target=kernel.target, options=kernel.options)
        if launcher:
            CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
