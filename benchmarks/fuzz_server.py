"""Malformed and hostile requests against a server: nothing dies, nothing answers 5xx, no page leaks.

Half are valid requests with one or a few values replaced by hostile ones, the others are built to hurt: sizes, depths,
encodings, NaN, huge n, 10^6 stop strings, deep and recursive schemas, grammar bombs, bodies cut anywhere.

    python benchmarks/fuzz_server.py --requests 20000 [--seed 1] [--url http://127.0.0.1:8000] [--json]

Without --url it starts a server on the embedded model and stops it at the end. Exit code 0 only if every check holds.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import aiohttp

from fuzz_attacks import USER, Attack, attacks

TIMEOUT_S = 5.0
"""Of the server, for one request: a valid one that writes to the context's end is not what is looked for here."""


@dataclass(frozen=True)
class Summary:
    requests: int
    seconds: float
    by_status: dict[str, int]
    by_kind: dict[str, int]
    slowest_s: float
    slowest_kind: str
    failures: list[str]


async def send(http: aiohttp.ClientSession, url: str, attack: Attack) -> str:
    """The status, or what the client did."""
    headers = {"Content-Type": "application/json", **attack.headers}
    try:
        async with asyncio.timeout(attack.leave_after_s):
            async with http.request(attack.method, url + attack.path, data=attack.body, headers=headers) as reply:
                text = await reply.read()
                if reply.status >= 400 and b"Traceback" in text:
                    return "trace shown"
                if reply.status == 200 and b'"code":"internal_error"' in text:
                    return "500 in a stream"
                return str(reply.status)
    except TimeoutError:
        if attack.leave_after_s is None:
            return "no answer"
        return "left"
    except ValueError:
        return "unsendable"  # the client itself refuses such a header or path
    except aiohttp.ClientConnectionError:
        return "connection lost"
    except aiohttp.ClientError:
        return "not HTTP"


async def metric(http: aiohttp.ClientSession, url: str, name: str) -> float:
    async with http.get(f"{url}/metrics") as reply:
        found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", await reply.text(), re.M)
    if found is None:
        raise ValueError(f"/metrics has no {name}")
    return float(found[1])


async def run(url: str, seed: int, count: int, clients: int) -> Summary:
    statuses: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    slowest = (0.0, "")
    queue = collections.deque(enumerate(attacks(seed, count)))
    began_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def client() -> None:
            nonlocal slowest
            while queue:
                number, make = queue.popleft()
                attack = make()
                sent_s = time.monotonic()
                status = await send(http, url, attack)
                slowest = max(slowest, (time.monotonic() - sent_s, attack.kind))
                statuses[status] += 1
                kinds[attack.kind.partition(" ")[0]] += 1
                if number % 1000 == 999:
                    print(f"fuzz: {number + 1} of {count}, {len(failures)} failures", file=sys.stderr, flush=True)
                # 503 and 504 say that a valid request found no time; a 5xx beside them is a bug.
                if status in ("500", "501", "502", "503", "trace shown", "500 in a stream", "no answer", "not HTTP"):
                    failures.append(f"request {number} ({attack.kind}, {attack.path}): {status}")

        await asyncio.gather(*(client() for _ in range(clients)))
        await asyncio.sleep(1.0)
        for name in ("requests_running", "requests_waiting", "requests_open", "pages_used", "leak_faults_total",
                     "engine_restarts_total"):  # fmt: skip
            value = await metric(http, url, f"longturn_{name}")
            if value:
                failures.append(f"longturn_{name} is {value:g} a second after the last request")
        body = {"messages": [USER], "max_tokens": 2}
        async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
            if reply.status != 200:
                failures.append(f"afterwards a plain request is answered with {reply.status}")
    return Summary(
        count,
        round(time.monotonic() - began_s, 1),
        dict(statuses.most_common()),
        dict(kinds.most_common()),
        round(slowest[0], 2),
        slowest[1],
        failures,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=8, help="requests at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a running server; one is started if left out")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    args = parser.parse_args()
    if args.url is not None:
        summary = asyncio.run(run(args.url, args.seed, args.requests, args.clients))
    else:
        command = [sys.executable, "-m", "longturn.cli.main", "serve", "--port", "0", "--json"]
        command += ["--server-request-timeout-s", str(TIMEOUT_S)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            lines = (json.loads(line) for line in process.stdout)
            url = next((line["ready"] for line in lines if "ready" in line), None)
            if url is None:
                print("fuzz: the server did not start", file=sys.stderr)
                return 1
            summary = asyncio.run(run(url, args.seed, args.requests, args.clients))
        finally:
            process.terminate()
            process.wait(30)
        if process.returncode:
            summary.failures.append(f"the server ended with exit code {process.returncode}")
    if args.json:
        print(json.dumps(asdict(summary)))
    else:
        print(f"{summary.requests} requests in {summary.seconds} s; slowest {summary.slowest_s} s")
        print(f"slowest kind: {summary.slowest_kind}")
        print("answers: " + ", ".join(f"{status}: {count}" for status, count in summary.by_status.items()))
        print("kinds: " + ", ".join(f"{kind}: {count}" for kind, count in summary.by_kind.items()))
        print("\n".join(summary.failures[:50]) or "nothing died, no 5xx, no page leaked")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
