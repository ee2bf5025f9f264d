"""The server's queue and cache from its metrics, and their absence."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from longturn.bench.client import ChatClient
from longturn.bench.server_samples import ServerHistory, ServerState, ServerWatch, interval_s, reader, state_of
from longturn.errors import LongturnError
from tests.bench.fake_server import FakeServer, running


def exposition(values: dict[str, list[float]]) -> bytes:
    """Metrics as a real server writes them, with labels that hold spaces and braces, among others that look alike."""
    registry = CollectorRegistry()
    Histogram("vllm:time_to_first_token_seconds", "x", registry=registry).observe(1)
    for name, found in values.items():
        gauge = Gauge(name, "Text that holds vllm:num_requests_running 9", ["model_name", "engine"], registry=registry)
        for number, value in enumerate(found):
            gauge.labels('a {b} "c', str(number)).set(value)
        Gauge(name + "_more", "Another name that starts alike.", registry=registry).set(77)
    return generate_latest(registry)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {
                "longturn_requests_running": [3],
                "longturn_requests_waiting": [2],
                "longturn_pages_total": [40],
                "longturn_pages_used": [10],
                "vllm:num_requests_running": [9],
                "vllm:kv_cache_usage_perc": [0.9],
            },
            (3, 2, 0.25),
        ),
        (
            {
                "vllm:num_requests_running": [4, 5],
                "vllm:num_requests_waiting": [0, 1],
                "vllm:kv_cache_usage_perc": [0.5, 0.7],
            },
            (9, 1, 0.6),
        ),
        ({"vllm:gpu_cache_usage_perc": [1e-3]}, (None, None, 0.001)),
        ({"sglang:num_running_reqs": [7], "sglang:num_queue_reqs": [8], "sglang:token_usage": [0.1]}, (7, 8, 0.1)),
        ({"longturn_pages_total": [0], "longturn_pages_used": [0]}, (None, None, None)),
        ({"other:gauge": [1]}, (None, None, None)),
        ({"vllm:num_requests_running": [float("nan")], "vllm:kv_cache_usage_perc": [1.7]}, (None, None, 1.0)),
    ],
)
def test_states_of_known_servers(values: dict[str, list[float]], expected: tuple[object, ...]) -> None:
    text = exposition(values)
    state = state_of(text, 5)
    assert (state.at_ns, state.running, state.waiting) == (5, *expected[:2])
    assert state.cache_used == (None if expected[2] is None else pytest.approx(expected[2]))
    assert state.empty == (expected == (None, None, None))
    # The full parser finds the same values in the text.
    found = {family.name: [s.value for s in family.samples] for family in text_string_to_metric_families(text.decode())}
    for name, wanted in values.items():
        assert found[name] == pytest.approx(wanted, nan_ok=True)


def test_lines_with_timestamps_odd_ends_and_no_labels() -> None:
    assert state_of(b"vllm:num_requests_running 4 1700000000000", 0).running == 4
    assert state_of(b'vllm:num_requests_running{a="}"} 4e0 17\r\n', 0).running == 4
    assert state_of(b"vllm:num_requests_running\t4", 0).running == 4
    assert state_of(b"vllm:num_requests_running2 9\nvllm:num_requests_running 4", 0).running == 4
    for text in (b"", b"\xff\xfe", b"vllm:num_requests_running{", b"vllm:num_requests_running x", b"<html>"):
        assert state_of(text, 0).empty


async def test_what_a_watch_collects() -> None:
    script: list[ServerState | Exception] = [
        ServerState(1, running=1),
        LongturnError("busy"),
        ServerState(2),
        ServerState(3, cache_used=0.5),
        LongturnError("gone"),
        LongturnError("gone"),
        LongturnError("gone"),
    ]

    async def read() -> ServerState:
        found = script.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    watch = ServerWatch(read, 0.0)
    await asyncio.wait_for(watch.run(), 10)
    assert script == [], "three failures in a row end it"
    assert [state.at_ns for state in watch.history.states] == [1, 3]
    assert watch.history.summary == "2 samples, 0 s apart, 5 failed: gone"
    assert ServerHistory(reason="no /metrics").summary == "none: no /metrics"
    assert replace(watch.history, reason=None).summary == "2 samples, 0 s apart"


async def test_a_bug_in_reading_costs_no_measurement_and_is_told() -> None:
    async def read() -> ServerState:
        raise KeyError("gone")

    async with ServerWatch(read, 1.0) as watch:
        await asyncio.sleep(0.01)
    assert watch.history.summary == "none: KeyError: 'gone'"


async def test_a_server_without_metrics_is_told() -> None:
    with running(FakeServer()) as url:
        async with ChatClient(url) as client:
            with pytest.raises(LongturnError, match="/metrics answered 404"):
                await reader(client)()
            async with ServerWatch(reader(client), 1.0) as watch:
                while not watch.history.failed:
                    await asyncio.sleep(0.01)
            assert watch.history.states == () and watch.history.summary.startswith(f"none: {url}/metrics answered 404")


def test_a_long_measurement_is_sampled_at_longer_intervals() -> None:
    assert (interval_s(60.0), interval_s(600.0), interval_s(3600.0)) == (1.0, 1.0, 6.0)
