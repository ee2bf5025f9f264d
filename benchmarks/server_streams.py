"""What streaming costs the server process: many streams at a steady pace, an engine process that only counts.

    python benchmarks/server_streams.py [--streams 64] [--rate 100] [--seconds 10] [--json]

Prints the share of one core that the server process used, and how evenly its clients were served. The text side is the
real one, with the embedded model's tokenizer; the client runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from longturn.config import EngineConfig, ModelConfig, ServerConfig
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import EngineRequest, EngineStats, FinishReason, RequestOutput, StepOutputs
from longturn.frontend.frontend import Frontend
from longturn.frontend.remote_engine import RemoteEngine
from longturn.server.ports import ServedModel
from longturn.server.run import serve
from longturn.source import resolve_source


class MetronomeEngine:
    """Makes one token for every request at each tick."""

    def __init__(self, rate: float) -> None:
        self.executor = SimpleNamespace(info=ExecutorInfo(256, 1, 1, 8192, 49152, "metronome"))
        self._period_s = 1 / rate
        self._next_s = time.monotonic()
        self._left: dict[str, int] = {}

    def add(self, request: EngineRequest) -> None:
        self._left[request.request_id] = request.sampling.max_tokens

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._left)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._left))

    def step(self) -> StepOutputs | None:
        if not self._left:
            return None
        now_s = time.monotonic()
        self._next_s = max(self._next_s + self._period_s, now_s)
        time.sleep(self._next_s - now_s)
        outputs = []
        for request_id, left in list(self._left.items()):
            token = 1000 + left * 7919 % 40_000
            outputs.append(RequestOutput(request_id, (token,), finish=FinishReason.LENGTH if left == 1 else None))
            self._left[request_id] -= 1
            if left == 1:
                del self._left[request_id]
        return StepOutputs(tuple(outputs), self.stats())

    def close(self) -> None:
        pass


def build(config: EngineConfig) -> MetronomeEngine:
    """Factory for the engine process; the model's name is the rate."""
    return MetronomeEngine(float(config.model.served_name or 100))


async def read_stream(session: aiohttp.ClientSession, url: str, tokens: int, n: int) -> tuple[list[float], int]:
    """Times between chunks, and bytes."""
    body = {
        "messages": [{"role": "user", "content": f"stream {n}"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    gaps: list[float] = []
    size, last_s = 0, 0.0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for data in response.content.iter_any():
            now_s = time.monotonic()
            if last_s:
                gaps.append(now_s - last_s)
            last_s = now_s
            size += len(data)
    return gaps, size


def client(url: str, streams: int, tokens: int, results: Any) -> None:
    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            replies = await asyncio.gather(*(read_stream(session, url, tokens, n) for n in range(streams)))
        gaps = sorted(gap for reply, _ in replies for gap in reply)
        results.put((statistics.median(gaps), gaps[int(len(gaps) * 0.99)], sum(size for _, size in replies)))

    asyncio.run(run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tokens = int(args.rate * args.seconds)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    found: dict[str, float] = {}

    def measure(url: str) -> None:
        import os
        import signal

        cpu_s, wall_s = time.process_time(), time.monotonic()
        process = context.Process(target=client, args=(url, args.streams, tokens, results))
        process.start()
        median_s, p99_s, size = results.get()
        process.join()
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        events = args.streams * tokens
        found.update(
            streams=args.streams,
            rate_per_stream=args.rate,
            server_core_share=cpu_s / wall_s,
            cpu_us_per_token=cpu_s / events * 1e6,
            tokens_per_second=events / wall_s,
            chunk_gap_median_ms=median_s * 1e3,
            chunk_gap_p99_ms=p99_s * 1e3,
            bytes_per_token=size / events,
        )
        os.kill(os.getpid(), signal.SIGTERM)

    def text_side(config: EngineConfig, engine: RemoteEngine) -> tuple[Frontend, ServedModel]:
        return Frontend.of(resolve_source(ModelConfig()), engine), ServedModel("metronome", 8192)

    serve(
        EngineConfig(model=ModelConfig(served_name=str(args.rate)), server=ServerConfig(port=0)),
        build_service=text_side,
        engine_factory="server_streams:build",
        on_ready=lambda url: threading.Thread(target=measure, args=(url,), daemon=True).start(),
    )
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>24} {value:.4g}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
