"""Host memory beside a GPU's page pool: pinned slots, and streams for the copies.

One stream takes pages out and one brings them back, since a GPU copies in both directions at once; events between them
and the stream of steps are the only order. The host never waits, unless the engine has nothing else to do.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from typing import Any

import torch
from torch import Tensor

from longturn.errors import ConfigError
from longturn.executor.copy_lanes import Lane, Mark
from longturn.executor.offload import Offload

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 30
"""Pinned at a time. A copy must not cross from one registered range into another."""
_BURST_BYTES = 1 << 30
"""Loads on their way at once: 20 ms of a PCIe 5 link, longer than most steps that look after them."""
_MOST_BURST_PAGES = 128
_GROUP_BYTES = 64 << 20
"""Copied before an event: about a millisecond."""
_GB = 1e9


class StreamLane:
    """A CUDA stream as a lane. It copies between addresses: a copy of tensors takes ten times the host's time, 50 us
    a page (entering a stream, slicing both sides, PyTorch's own way to the driver)."""

    def __init__(self, stream: torch.cuda.Stream, page_bytes: int) -> None:
        self._stream = stream
        self._handle = ctypes.c_void_p(stream.cuda_stream)
        self._size = ctypes.c_size_t(page_bytes)
        self._memcpy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
        self._memcpy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def copy(self, target: int, source: int) -> None:
        status = self._memcpy(target, source, self._size, self._handle)
        if status:
            raise RuntimeError(f"cuMemcpyAsync: error {status}")

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _EventMark(event)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _EventMark), "a stream waits for streams"
        self._stream.wait_event(mark.event)


class _EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class TensorLane:
    """Copies tensors before it returns: what stands for a stream where there is no GPU."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return _Now()

    def wait(self, mark: Mark) -> None:
        """Every mark is reached."""


class _Now:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """It is there already."""


class PinnedSlots:
    """Host memory for pages, pinned so that copies run beside everything else.

    PyTorch's own pinned allocator rounds sizes up to a power of two, nearly twice what was asked for at worst; so the
    memory is mapped here and registered with CUDA.
    """

    def __init__(self, slots: int, page_bytes: int, *, pinned: bool) -> None:
        """Raises ConfigError if the memory cannot be had or pinned."""
        self._per_chunk = max(1, _CHUNK_BYTES // page_bytes)
        self._page_bytes = page_bytes
        self._chunks: list[Tensor] = []
        self._registered: list[int] = []
        self._slots = slots
        try:
            for first in range(0, slots, self._per_chunk):
                self._add_chunk(min(self._per_chunk, slots - first) * page_bytes, pinned)
        except (OSError, RuntimeError) as error:
            self.close()
            raise ConfigError(
                f"cannot pin {slots * page_bytes / _GB:.1f} GB of host memory ({error}); lower cache.host_memory_bytes"
            ) from error

    def __len__(self) -> int:
        return self._slots

    def __getitem__(self, slot: int) -> Tensor:
        """uint8 [page_bytes] of a slot."""
        if not 0 <= slot < self._slots:
            raise IndexError(f"no host slot {slot} of {self._slots}")
        chunk, place = divmod(slot, self._per_chunk)
        return self._chunks[chunk][place * self._page_bytes : (place + 1) * self._page_bytes]

    def addresses(self) -> list[int]:
        """Where each slot is."""
        return [self[slot].data_ptr() for slot in range(self._slots)]

    def _add_chunk(self, size: int, pinned: bool) -> None:
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to pin
        chunk = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned:
            chunk.zero_()  # taken by all threads, while registering would take it by one
            status = int(_cudart().cudaHostRegister(chunk.data_ptr(), size, 0))
            if status:
                raise RuntimeError(f"cudaHostRegister: error {status}")
            self._registered.append(chunk.data_ptr())
        self._chunks.append(chunk)

    def close(self) -> None:
        """Give the memory back. No copy may be in flight."""
        for pointer in self._registered:
            _cudart().cudaHostUnregister(pointer)
        self._registered.clear()
        self._chunks.clear()
        self._slots = 0


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class GpuOffload(Offload):
    """The host tier of a `GpuExecutor`; see `Offload` for what is called when."""

    def __init__(self, pool: Tensor, slots: int, stream: torch.cuda.Stream | None) -> None:
        """
        Args:
            pool: uint8 [pages, page_bytes], contiguous: the pool's own memory.
            slots: pages that host memory is to hold.
            stream: the one that steps run on; None on a CPU, where copies are made at once.

        Raises:
            ConfigError: so much host memory cannot be had or pinned.
        """
        page_bytes = pool.shape[1]
        assert pool.is_contiguous(), "pages are copied by address"
        begin = time.perf_counter()
        self._memory = PinnedSlots(slots, page_bytes, pinned=stream is not None)
        steps: Lane
        saves: Lane
        loads: Lane
        pages: Any = pool
        places: Any = self._memory
        if stream is None:
            steps, saves, loads = TensorLane(), TensorLane(), TensorLane()
        else:
            pages = range(pool.data_ptr(), pool.data_ptr() + pool.shape[0] * page_bytes, page_bytes)
            places = self._memory.addresses()
            made = [torch.cuda.Stream(pool.device) for _ in range(2)]  # type: ignore[no-untyped-call]
            for side in made:
                side.wait_stream(stream)  # the pool was zeroed there
            steps, saves, loads = (StreamLane(one, page_bytes) for one in (stream, *made))
            spent = (slots * page_bytes / _GB, time.perf_counter() - begin)
            _log.info("%.1f GB of host memory pinned in %.1f s", *spent)
        super().__init__(
            pages,
            places,
            slots,
            steps=steps,
            saves=saves,
            loads=loads,
            burst_pages=max(2, min(_MOST_BURST_PAGES, _BURST_BYTES // page_bytes)),
            group_pages=max(1, min(16, _GROUP_BYTES // page_bytes)),
        )

    def close(self) -> None:
        """Wait for the copies and give the host memory back."""
        super().close()
        self._memory.close()
