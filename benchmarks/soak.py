"""Mixed load from several agent sessions for a long time: no error, no leak, a balanced page pool at the end.

Each session is a growing chat (a tool-using agent's shape: long prompts, short answers) that starts over when it
nears the context's end. Some requests stream, some do not, some are cut off by the client, some sample, some are
greedy, and now and then one is invalid on purpose and must be answered with a 400.

    python benchmarks/soak.py --minutes 30 [--sessions 8] [--json]

Exit code 0 only if every check holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field

import aiohttp
import psutil

WORDS = (
    "read the file run tests fix this bug list tool result error in line function class return value path pytest"
).split()


@dataclass
class Tally:
    requests: int = 0
    completed: int = 0
    cut_off: int = 0
    refused_on_purpose: int = 0
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Summary:
    minutes: float
    sessions: int
    requests: int
    completed: int
    cut_off: int
    refused_on_purpose: int
    errors: list[str]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    rss_settled_mb: float | None
    """Resident memory of all server processes when the page pool had been filled once."""
    rss_end_mb: float
    rss_growth: float | None
    pages_used_at_end: float
    leak_faults: float
    failures: list[str]


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def session(url: str, seed: int, deadline: float, tally: Tally) -> None:
    rng = random.Random(seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        while time.monotonic() < deadline:
            messages = [{"role": "system", "content": f"You are coding agent {seed}. " + text(rng, 150)}]
            used = 0
            while used < 5500 and time.monotonic() < deadline:
                messages.append({"role": "user", "content": text(rng, rng.randint(10, 400))})
                body = {
                    "messages": messages,
                    "max_tokens": rng.randint(8, 96),
                    "temperature": rng.choice([0, 0, 0.7]),
                    "session_id": f"soak-{seed}",
                    "stream": rng.random() < 0.6,
                    "stream_options": {"include_usage": True},
                }
                if not body["stream"]:
                    del body["stream_options"]
                tally.requests += 1
                try:
                    if rng.random() < 0.03:
                        await refuse(http, url, tally)
                    answer, used = await turn(http, url, body, rng, tally)
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    tally.errors.append(f"session {seed}: {type(error).__name__}: {error}")
                    break
                if answer is None:
                    messages.pop()
                    continue
                messages.append({"role": "assistant", "content": answer})
                await asyncio.sleep(rng.expovariate(2.0))


async def refuse(http: aiohttp.ClientSession, url: str, tally: Tally) -> None:
    bad = {"messages": [{"role": "user", "content": "hi"}], "temperature": 9}
    async with http.post(f"{url}/v1/chat/completions", json=bad) as response:
        if response.status != 400:
            raise ValueError(f"temperature 9 was answered with {response.status}")
        tally.refused_on_purpose += 1


async def turn(
    http: aiohttp.ClientSession, url: str, body: dict, rng: random.Random, tally: Tally
) -> tuple[str | None, int]:
    """One request; (answer, tokens used), or (None, 0) if the client cut it off."""
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
        if not body["stream"]:
            reply = await response.json()
            return count(tally, reply["usage"], reply["choices"][0]["message"]["content"])
        cut = rng.random() < 0.15
        pieces: list[str] = []
        usage = None
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            usage = chunk.get("usage") or usage
            pieces += [c["delta"].get("content") or "" for c in chunk["choices"]]
            if cut and len(pieces) > 3:
                response.close()
                tally.cut_off += 1
                return None, 0
        if usage is None:
            raise ValueError("a stream ended without usage")
        return count(tally, usage, "".join(pieces))


def count(tally: Tally, usage: dict, answer: str) -> tuple[str, int]:
    tally.completed += 1
    tally.prompt_tokens += usage["prompt_tokens"]
    tally.completion_tokens += usage["completion_tokens"]
    tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    return answer, usage["total_tokens"]


def resident_mb(pid: int) -> float:
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]) / 1e6


async def watch(url: str, pid: int, deadline: float, samples: list[tuple[float, float, bool]]) -> None:
    """Every five seconds: seconds since the start, resident megabytes, whether the page pool has been filled once."""
    begin = time.monotonic()
    while time.monotonic() < deadline:
        full = await metric(url, "longturn_evictions_total") > 0
        samples.append((time.monotonic() - begin, resident_mb(pid), full))
        if sys.stderr.isatty() or len(samples) % 12 == 1:
            print(f"{samples[-1][0]:7.0f} s   resident {samples[-1][1]:7.0f} MB", file=sys.stderr)
        await asyncio.sleep(5)


async def metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        body = await response.text()
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", body, re.M)
    if found is None:
        raise SystemExit(f"the server's /metrics has no {name}")
    return float(found[1])


async def soak(url: str, pid: int, minutes: float, sessions: int) -> Summary:
    tally = Tally()
    deadline = time.monotonic() + 60 * minutes
    samples: list[tuple[float, float, bool]] = []
    await asyncio.gather(
        watch(url, pid, deadline, samples), *(session(url, seed, deadline, tally) for seed in range(sessions))
    )
    await asyncio.sleep(2)
    # Memory is taken as pages are written for the first time: growth counts from when all of them have been.
    settled = next((mb for _, mb, full in samples if full), None)
    end = resident_mb(pid)
    used = await metric(url, "longturn_pages_used")
    leaks = await metric(url, "longturn_leak_faults_total")
    growth = end / settled - 1 if settled is not None else None
    failures = list(tally.errors[:5])
    if growth is None:
        failures.append("the load did not fill the page pool: run it longer")
    elif growth > 0.05:
        failures.append(f"resident memory grew by {growth:.1%}")
    if used:
        failures.append(f"{used:.0f} pages are still in use")
    if leaks:
        failures.append(f"{leaks:.0f} failed invariant checks")
    if not tally.completed or not tally.cut_off:
        failures.append("the load did not exercise both completion and cut-off")
    return Summary(
        minutes=minutes,
        sessions=sessions,
        **asdict(tally),
        rss_settled_mb=settled,
        rss_end_mb=end,
        rss_growth=growth,
        pages_used_at_end=used,
        leak_faults=leaks,
        failures=failures,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--cache-memory", help="size of the page pool, such as 128MiB (default: the server's)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    command = [sys.executable, "-m", "longturn.cli.main", "serve", "--port", "0", "--json"]
    if args.cache_memory:
        command += ["--kv-cache-memory-bytes", args.cache_memory]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = (json.loads(line) for line in server.stdout)
        url = next((line["ready"] for line in lines if "ready" in line), None)
        if url is None:
            raise SystemExit("the server did not start")
        summary = asyncio.run(soak(url, server.pid, args.minutes, args.sessions))
    finally:
        server.terminate()
        server.wait(20)
    if args.json:
        print(json.dumps(asdict(summary)))
    else:
        for key, value in asdict(summary).items():
            print(f"{key:22} {value if not isinstance(value, float) else round(value, 4)}")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
