"""What a step enqueues, with a driver that writes down its calls, and the slots that steps take in turn."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest
import torch

from longturn.executor.gpu import queue
from longturn.executor.gpu.queue import DriverQueue, HostQueue, SlotRing

CONTEXT, STREAM, GRAPH, BEGIN, END = 11, 22, 33, 44, 55


class Driver:
    """Calls in order, by name, with their numbers. `failing` is the name of one that fails."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, *tuple[int, ...]]] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == "cuStreamGetCtx":
                args[1]._obj.value = CONTEXT if args[0].value == STREAM else 0
            elif name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"
            else:
                self.calls.append((name, *(getattr(arg, "value", arg) for arg in args)))
            return 700 if name == self.failing else 0

        return call


class Stream:
    cuda_stream = STREAM


class Event:
    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def driver_queue(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> tuple[DriverQueue, torch.Tensor]:
    monkeypatch.setattr(queue.ctypes, "PyDLL", lambda name: driver)
    staging = torch.zeros(64, dtype=torch.int32)
    return DriverQueue(cast(Any, Stream()), staging), staging


def ring(slots: int, words: int) -> SlotRing:
    return SlotRing(words, torch.zeros(slots, 8, dtype=torch.int32), None)


def test_a_step_is_five_calls_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    made, staging = driver_queue(monkeypatch, driver)
    slot = ring(1, 64).take()
    slot.begin_handle.value, slot.end_handle.value = BEGIN, END
    made.begin(slot)
    made.send(slot, 50)
    made.replay(ctypes.c_void_p(GRAPH))
    made.end(slot)
    assert driver.calls == [
        ("cuCtxSetCurrent", CONTEXT),
        ("cuEventRecord", BEGIN, STREAM),
        ("cuMemcpyAsync", staging.data_ptr(), slot.pairs.data_ptr(), 200, STREAM),
        ("cuGraphLaunch", GRAPH, STREAM),
        ("cuEventRecord", END, STREAM),
    ]


@pytest.mark.parametrize("name", ["cuCtxSetCurrent", "cuEventRecord", "cuMemcpyAsync", "cuGraphLaunch"])
def test_a_call_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made, _ = driver_queue(monkeypatch, Driver(name))
    slot = ring(1, 64).take()
    with pytest.raises(RuntimeError, match=f"^{name}: CUDA_ERROR_ILLEGAL_ADDRESS$"):
        made.begin(slot)
        made.send(slot, 50)
        made.replay(ctypes.c_void_p(GRAPH))


def test_the_end_of_a_step_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    made, _ = driver_queue(monkeypatch, driver)
    slot = ring(1, 64).take()
    made.begin(slot)
    driver.failing = "cuEventRecord"
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        made.end(slot)


def test_without_a_gpu_words_are_copied_at_once_and_no_more_than_asked_for() -> None:
    staging = torch.zeros(6, dtype=torch.int32)
    made, slot = HostQueue(staging), ring(1, 6).take()
    slot.pairs_array[:] = 9
    made.begin(slot)
    made.send(slot, 4)
    made.end(slot)
    assert staging.tolist() == [9, 9, 9, 9, 0, 0]


def test_slots_know_their_numbers_and_share_their_results_with_the_kernels() -> None:
    results = torch.zeros(3, 8, dtype=torch.int32)
    slots = [made.take() for made in [SlotRing(6, results, None)] for _ in range(3)]
    results[:, 0] = torch.tensor([5, 6, 7])
    assert [slot.pairs_array[1] for slot in slots] == [0, 1, 2]
    assert [slot.results_array[0] for slot in slots] == [5, 6, 7]


def test_a_slot_is_taken_again_only_when_its_step_is_over() -> None:
    made = ring(2, 4)
    first, second = made.take(), made.take()
    assert first is not second
    events = Event(), Event()
    first.end, second.end = cast(Any, events)
    first.in_flight = True
    assert made.take() is first and not first.in_flight
    assert made.take() is second
    assert [event.waits for event in events] == [1, 0]
