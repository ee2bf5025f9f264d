"""The stream that steps run on, as a step sees it: its words go in, graphs run, with an event at either end. (Kernels
write results to the host's memory themselves.)

On a GPU each of these is one call of the driver with numbers that were worked out before. Through tensors the same
takes several times as long on the host: entering a stream, slicing both sides of a copy, PyTorch's own way to the
driver, and its record of pinned memory in use, which a slot of the ring does not need.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_WORD_BYTES = 4
SLOTS = 4
"""Steps whose buffers may be in use: two in flight, one being packed, one to spare."""


@dataclass(slots=True)
class Slot:
    """Host memory of one step in flight, and the events around it (None on a CPU)."""

    pairs: Tensor
    """Pinned int32: what the step changes. The second word of the header is the slot's own number."""
    pairs_array: npt.NDArray[np.int32]
    """The same memory."""
    results_array: npt.NDArray[np.int32]
    """Where the step's kernels leave what they sampled."""
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None
    pairs_at: ctypes.c_uint64
    begin_handle: ctypes.c_void_p
    """The driver's, of the events; null on a CPU."""
    end_handle: ctypes.c_void_p
    in_flight: bool = False


class SlotRing:
    """Slots in turn. One is taken again only when its step is over, since the copy engine reads and writes it."""

    def __init__(self, pairs_words: int, results: Tensor, stream: torch.cuda.Stream | None) -> None:
        """
        Args:
            pairs_words: of each slot.
            results: int32 [slots, words] of the host.
            stream: the one that steps run on.
        """
        self._slots = [_slot(number, pairs_words, words, stream) for number, words in enumerate(results)]
        self._next = 0

    def take(self) -> Slot:
        """The next slot, after waiting for the step that used it last."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.in_flight and slot.end is not None:
            slot.end.synchronize()
        slot.in_flight = False
        return slot


def _slot(number: int, pairs_words: int, results: Tensor, stream: torch.cuda.Stream | None) -> Slot:
    pairs = torch.zeros(pairs_words, dtype=torch.int32, pin_memory=stream is not None)
    pairs[1] = number
    begin, end = None, None
    begin_handle, end_handle = ctypes.c_void_p(), ctypes.c_void_p()
    if stream is not None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for event, handle in ((begin, begin_handle), (end, end_handle)):
            event.record(stream)  # the driver's event is made now
            handle.value = event.cuda_event
    at = ctypes.c_uint64(pairs.data_ptr())
    return Slot(pairs, pairs.numpy(), results.numpy(), begin, end, at, begin_handle, end_handle)


class StepQueue(Protocol):
    """What a step enqueues, in the order of these methods; nothing waits."""

    def begin(self, slot: Slot) -> None:
        """The step starts."""
        ...

    def send(self, slot: Slot, words: int) -> None:
        """Copy the slot's first `words` pairs words to the device."""
        ...

    def replay(self, graph: ctypes.c_void_p) -> None:
        """Run a captured piece of a step, given the driver's handle of its graph."""
        ...

    def end(self, slot: Slot) -> None:
        """The step is over."""
        ...


class HostQueue:
    """Where there is no GPU: copies are made before a call returns."""

    def __init__(self, staging: Tensor) -> None:
        """As `DriverQueue`."""
        self._staging = staging

    def begin(self, slot: Slot) -> None:
        """There is no time to take."""

    def send(self, slot: Slot, words: int) -> None:
        self._staging[:words].copy_(slot.pairs[:words])

    def replay(self, graph: ctypes.c_void_p) -> None:
        raise RuntimeError("there are no graphs without a GPU")

    def end(self, slot: Slot) -> None:
        """There is nothing to wait for."""


class DriverQueue:
    """A CUDA stream by way of the driver. Any thread may use it, one at a time.

    Arguments are made once: turning a number into what C takes costs more than the rest of ctypes' part in a call.
    """

    def __init__(self, stream: torch.cuda.Stream, staging: Tensor) -> None:
        """`staging` is int32 on the device: where a step's pairs arrive."""
        # None of these calls waits, so they keep the interpreter's lock: giving it away and taking it back would cost
        # as much as the call, or a whole switch interval where another thread is at work.
        library = ctypes.PyDLL("libcuda.so.1")
        address, size, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._copy = _call(library, "cuMemcpyAsync", address, address, size, handle)
        self._launch = _call(library, "cuGraphLaunch", handle, handle)
        self._record = _call(library, "cuEventRecord", handle, handle)
        self._enter = _call(library, "cuCtxSetCurrent", handle)
        self._error_name = _call(library, "cuGetErrorName", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        self._stream, self._context = handle(stream.cuda_stream), handle()
        context_of = _call(library, "cuStreamGetCtx", handle, ctypes.POINTER(handle))
        if status := context_of(self._stream, ctypes.byref(self._context)):
            self._fail("cuStreamGetCtx", status)
        self._staging = address(staging.data_ptr())

    def begin(self, slot: Slot) -> None:
        # Another thread than the last may call, one that has not used the device yet.
        if status := self._enter(self._context):
            self._fail("cuCtxSetCurrent", status)
        if status := self._record(slot.begin_handle, self._stream):
            self._fail("cuEventRecord", status)

    def send(self, slot: Slot, words: int) -> None:
        if status := self._copy(self._staging, slot.pairs_at, words * _WORD_BYTES, self._stream):
            self._fail("cuMemcpyAsync", status)

    def replay(self, graph: ctypes.c_void_p) -> None:
        # PyTorch's own replay also sets up its random numbers, which no step draws.
        if status := self._launch(graph, self._stream):
            self._fail("cuGraphLaunch", status)

    def end(self, slot: Slot) -> None:
        if status := self._record(slot.end_handle, self._stream):
            self._fail("cuEventRecord", status)

    def _fail(self, call: str, status: int) -> NoReturn:
        """Raise what a call of the driver failed with."""
        name = ctypes.c_char_p()
        self._error_name(status, ctypes.byref(name))
        raise RuntimeError(f"{call}: {(name.value or b'error %d' % status).decode()}")


def _call(library: ctypes.PyDLL, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = arguments
    return function
