"""What the host-memory tier does is on /metrics, each figure under its own name."""

from __future__ import annotations

from typing import Any

from longturn.engine.records import EngineStats
from longturn.server.metrics import ServerMetrics


class Monitor:
    """An engine of which only its figures are asked."""

    alive = True
    restarts = 0

    def stats(self) -> EngineStats:
        return EngineStats(
            host_pages_total=11, host_pages_cached=7, offloaded_pages=5, loaded_pages=3, host_hit_tokens=2
        )

    def health(self) -> str:
        return "ok"


def test_every_figure_of_the_host_tier() -> None:
    monitor: Any = Monitor()
    text = ServerMetrics(monitor, "m").exposition().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("longturn_"))

    def value(name: str) -> float:
        return float(lines[f'{name}{{model_name="m"}}'])

    assert value("longturn_host_pages_total") == 11
    assert value("longturn_host_pages_cached") == 7
    assert value("longturn_offloaded_pages_total") == 5
    assert value("longturn_loaded_pages_total") == 3
    assert value("longturn_host_hit_tokens_total") == 2
