from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.metrics import distribution
from longturn.bench.traces.load import load_shipped
from longturn.bench.traces.stat import trace_stat
from longturn.bench.traces.timeline import alive_over_time, arrivals, binned, levels
from tests.bench.make_traces import row, tree


def test_counts_of_a_small_session() -> None:
    stat = trace_stat(
        [tree([row(0, [1, 2], out=5, api=2.0, tail=3), row(6, [1, 2, 3], out=7), row(8, [1, 4], out=9, api=None)])]
    )
    (one,) = stat.sessions
    assert (one.turns, one.requests, one.agents) == (3, 3, {"root": 1})
    assert (one.input_tokens, one.output_tokens, one.max_context_tokens) == (11 + 12 + 8, 21, 19)
    assert (one.hit.hit_blocks, one.hit.blocks, one.hit.cached_tokens) == (0 + 2 + 1, 2 + 3 + 2, 12)
    assert (stat.without_duration, stat.block_tokens, one.span_s) == (1, (4,), 8.0)
    assert stat.gap_s is not None and (stat.gap_s.min, stat.gap_s.max, stat.gap_s.count) == (1.0, 4.0, 2)
    assert [(level.count, level.seconds) for level in stat.requests_alive] == [(0, 4.0), (1, 3.0)]
    assert [(level.count, level.seconds) for level in stat.agents_alive] == [(1, 8.0)]


def test_agents_and_requests_at_once() -> None:
    (found,) = load_shipped("workshop.json")
    (one,) = trace_stat([found]).sessions
    assert (one.turns, one.requests, one.agents) == (4, 6, {"root": 1, "subagent": 1})
    assert (one.most_agents, one.most_requests) == (2, 1)
    # Blocks hit in order of time: 0/4, subagent 0/3 and 3/8, then 4/8, 8/17, 2/6.
    assert (one.hit.hit_blocks, one.hit.blocks) == (0 + 0 + 3 + 4 + 8 + 2, 4 + 3 + 8 + 8 + 17 + 6)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_distribution_agrees_with_numpy(values: list[float]) -> None:
    found = distribution(values)
    expected = np.percentile(values, [0, 50, 75, 90, 95, 99, 100])
    got = [found.min, found.p50, found.p75, found.p90, found.p95, found.p99, found.max]
    assert got == pytest.approx(expected.tolist())
    assert found.mean == pytest.approx(np.mean(values)) and found.count == len(values)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12), st.integers(1, 9))
def test_concurrency_agrees_with_counting_every_second(pairs: list[tuple[int, int]], bins: int) -> None:
    spans = [(float(start), float(start + length)) for start, length in pairs]
    steps = alive_over_time(spans)
    seconds = range(45)
    alive = [sum(start <= second < end for start, end in spans) for second in seconds]
    for second in seconds:
        known = [count for at, count in steps if at <= second]
        assert (known[-1] if known else 0) == alive[second]
    found = levels(steps)
    for count in range(1, 13):
        assert found.get(count, 0.0) == alive.count(count)
    if len(steps) > 1:
        width = (steps[-1][0] - steps[0][0]) / bins
        assert sum(binned(steps, bins)) * width == pytest.approx(sum(alive))


def test_arrivals_are_counted_in_equal_parts() -> None:
    # Requests at 0, 0.25, 1, 5, 6.5 and 6 s.
    assert arrivals(load_shipped("arrivals.jsonl"), 2) == [3, 3]
    assert arrivals(load_shipped("arrivals.jsonl")[:1], 3) == [1, 0, 0]
