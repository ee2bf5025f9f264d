"""An engine with work of its own does it between requests, and never while it has any."""

from __future__ import annotations

from collections.abc import Sequence

from longturn.engine.records import EngineRequest, EngineStats, SamplingParams, StepOutputs
from longturn.frontend.engine_pump import IDLE_WAIT_S, QUIET_WAIT_S, CacheReset, Command, Rejection, Stop, pump

REQUEST = EngineRequest("r", b"\0\0\0\0", (), SamplingParams(1))


class Engine:
    """Each request takes two steps; there are three pieces of work of its own."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._left = 0
        self._own = 3

    def add(self, request: EngineRequest) -> None:
        self._left += 2

    def abort(self, request_id: str) -> None: ...

    def step(self) -> StepOutputs | None:
        if self._left:
            self._log.append("step")
            self._left -= 1
        return None

    def has_work(self) -> bool:
        return self._left > 0

    def stats(self) -> EngineStats:
        return EngineStats()

    def idle(self) -> bool:
        assert not self._left
        self._log.append("idle")
        self._own -= 1
        return self._own > 0

    def close(self) -> None: ...


class Transport:
    """Commands by the number of the call that receives them."""

    def __init__(self, log: list[str], commands: dict[int, Command]) -> None:
        self._log, self._commands, self._calls = log, commands, 0

    def receive(self, wait_s: float) -> Sequence[Command]:
        self._calls += 1
        self._log.append({0.0: "look", QUIET_WAIT_S: "quiet", IDLE_WAIT_S: "wait"}[wait_s])
        command = self._commands.get(self._calls)
        return [] if command is None else [command]

    def send_outputs(self, outputs: StepOutputs) -> None: ...
    def send_rejection(self, rejection: Rejection) -> None: ...
    def send_reset(self, reset: CacheReset) -> None: ...


def test_pieces_of_work_come_after_quiet_waits_alone() -> None:
    log: list[str] = []
    pump(Engine(log), Transport(log, {2: REQUEST, 7: Stop()}))
    assert log == [
        "quiet", "idle",  # nothing came
        "quiet", "step", "look", "step",  # a request came, and was computed first
        "quiet", "idle", "quiet", "idle",  # the last of three
        "wait", "wait",
    ][: len(log)]  # fmt: skip
    assert log.count("idle") == 3 and log[-1] == "wait"
