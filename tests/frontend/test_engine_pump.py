"""Requests that the executor is not ready for are held back, and nobody else is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from longturn.engine.records import EngineRequest, EngineStats, SamplingParams, StepOutputs, pack_tokens
from longturn.errors import RequestError
from longturn.frontend.engine_pump import HELD_WAIT_S, IDLE_WAIT_S, Abort, Command, Rejection, Stop, pump


class Engine:
    """Takes a request only once its grammar is among `prepared`; a step ends everything."""

    def __init__(self) -> None:
        self.prepared: set[str] = set()
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.busy = 0

    def ready(self, sampling: SamplingParams) -> bool:
        return sampling.grammar is None or sampling.grammar in self.prepared

    def add(self, request: EngineRequest) -> None:
        if request.sampling.grammar == "refused":
            raise RequestError("no")
        self.added.append(request.request_id)
        self.busy = 3

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def step(self) -> StepOutputs | None:
        self.busy = max(0, self.busy - 1)
        return None

    def has_work(self) -> bool:
        return self.busy > 0

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None: ...


class Transport:
    """Plays a script: commands to give, or what to do to the engine before there are none."""

    def __init__(self, script: Sequence[Command | tuple[str, str]], engine: Engine) -> None:
        self.script = deque(script)
        self.engine = engine
        self.waits: list[float] = []
        self.rejected: list[str] = []
        self.told: list[int] = []
        """After which call of `receive` each state of the engine was sent."""

    def receive(self, wait_s: float) -> Sequence[Command]:
        self.waits.append(wait_s)
        item = self.script.popleft() if self.script else Stop()
        if isinstance(item, tuple):
            what, grammar = item
            if what == "prepared":
                self.engine.prepared.add(grammar)
            else:
                assert self.engine.added == grammar.split()
            return []
        return [item]

    def send_outputs(self, outputs: StepOutputs) -> None:
        self.told.append(len(self.waits))

    def send_rejection(self, rejection: Rejection) -> None:
        self.rejected.append(rejection.request_id)


def request(name: str, grammar: str | None = None) -> EngineRequest:
    return EngineRequest(name, pack_tokens([1]), (), SamplingParams(1, grammar=grammar))


def played(*script: Command | tuple[str, str]) -> tuple[Engine, Transport]:
    engine = Engine()
    transport = Transport(script, engine)
    pump(engine, transport)
    return engine, transport


def test_a_held_request_lets_others_pass_and_comes_when_it_can() -> None:
    engine, transport = played(
        request("slow", "g"),
        ("added", ""),
        request("free"),
        request("other", "h"),
        ("added", "free"),
        ("prepared", "h"),
        ("added", "free other"),
        ("prepared", "g"),
        ("added", "free other slow"),
    )
    assert engine.added == ["free", "other", "slow"]
    # While one is held an idle engine looks often, otherwise it sleeps until something comes.
    assert transport.waits[:2] == [IDLE_WAIT_S, HELD_WAIT_S]


def test_the_state_is_told_after_work_and_while_nothing_is_held() -> None:
    # A request takes three steps, the first of them at once; then the engine is idle.
    _, transport = played(request("free"), *[("added", "free")] * 4)
    assert transport.told == [3, 4, 5]
    _, transport = played(request("slow", "g"), *[("added", "")] * 4)
    assert transport.told == []


def test_an_abort_reaches_a_held_request() -> None:
    engine, _ = played(request("slow", "g"), Abort("slow"), ("prepared", "g"), ("added", ""), request("next", "g"))
    assert engine.added == ["next"] and engine.aborted == ["slow"]


def test_a_refusal_of_a_held_request_is_told() -> None:
    engine, transport = played(request("slow", "refused"), ("prepared", "refused"), ("added", ""))
    assert engine.added == [] and transport.rejected == ["slow"]
