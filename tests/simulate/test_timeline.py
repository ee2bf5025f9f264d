"""What happens to simulated engines, in its order."""

from __future__ import annotations

from collections.abc import Sequence

from longturn.engine.records import EngineRequest, StepOutputs
from longturn.errors import RequestError
from longturn.simulate.replicas import make_replicas
from longturn.simulate.timeline import Timeline
from tests.engine.content import make_request
from tests.simulate.sessions import spec


class Recorder:
    """A client that writes down what it is told, and when."""

    def __init__(self) -> None:
        self.replicas = make_replicas(spec(pages=64))
        self.timeline = Timeline(self.replicas, self)
        self.told: list[tuple[int, str, int]] = []

    def _tell(self, request_id: str, tokens: int) -> None:
        self.told.append((self.timeline.now_ns, request_id, tokens))

    def answered(self, outputs: StepOutputs) -> None:
        for output in outputs.outputs:
            self._tell(output.request_id, len(output.token_ids))

    def gained(self, request_ids: Sequence[str], tokens: int) -> None:
        for request_id in request_ids:
            self._tell(request_id, tokens)

    def refused(self, request_id: str, error: RequestError) -> None:
        self._tell(request_id, -1)

    def next_send_ns(self) -> int | None:
        return None

    def run(self, *sent: tuple[EngineRequest, int]) -> list[tuple[int, str, int]]:
        """Send these at these times, and let all of it happen."""
        for request, at_ns in sent:
            self.timeline.send(self.replicas[0], request, at_ns)
        while self.timeline.next_ns is not None:
            self.timeline.happen()
        return self.told


def request(name: str, tokens: int, output: int) -> EngineRequest:
    return make_request(name, list(range(tokens)), output, stop=False)


def test_every_token_is_told_of_at_its_step_or_with_foreseen_turns() -> None:
    told = Recorder().run((request("a", 100, 40), 0))
    # The model: 1 ms a step, 10 us a row, 1 us a token of a chunk. The prompt's step, then 39 of one row.
    assert told[0] == (1_100_000, "a", 1)
    assert told[-1][0] == 1_100_000 + 39 * 1_010_000
    assert sum(tokens for _, _, tokens in told) == 40
    assert len(told) < 10, "most turns are foreseen"


def test_results_come_before_a_request_of_the_same_time() -> None:
    """A result at 1.1 ms, and a request that was put on the way to reach the engine then, before the result was."""
    at_ns = 1_100_000
    one = Recorder()
    for name, reach_ns in (("a", 0), ("b", at_ns)):
        one.timeline.send(one.replicas[0], request(name, 100, 3), reach_ns)
    one.timeline.happen()
    assert one.timeline.next_ns == at_ns and not one.told
    one.timeline.happen()
    assert one.told == [(at_ns, "a", 1)]


def test_a_request_that_comes_during_foreseen_turns_ends_them_at_the_next_step() -> None:
    late = Recorder().run((request("a", 100, 40), 0), (request("b", 50, 1), 20_000_000))
    alone = Recorder().run((request("a", 100, 40), 0))
    assert sum(tokens for _, name, tokens in late if name == "a") == 40
    ended = next(at for at, name, _ in late if name == "b")
    # In flight at 20 ms: a step, and the one that the turn before the request had launched behind it.
    assert 20_000_000 < ended < 20_000_000 + 3 * 1_010_000 + 50_000
    assert late[-1][0] == alone[-1][0] + 50_000, "one step had its row and b's prompt"


def test_a_request_that_no_engine_can_take_is_refused_when_it_comes() -> None:
    assert Recorder().run((request("a", 64 * 128 + 1, 4), 5)) == [(5, "a", -1)]
