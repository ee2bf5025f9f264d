"""Clients that go away at random moments, on bare sockets, so that nothing tidies up behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from typing import Any
from urllib.parse import urlsplit


async def vanish(url: str, seed: int, longest_s: float) -> str:
    """Send one request, or a part of it, and go away at a random moment. Returns what it did."""
    rng = random.Random(seed)
    stream = rng.random() < 0.5
    path = rng.choice(["/v1/chat/completions", "/v1/completions"])
    text = "word " * rng.choice([1, 30, 200])
    body: dict[str, Any] = {"max_tokens": rng.choice([3, 400]), "stream": stream, "n": rng.choice([1, 1, 1, 3])}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    whole = head + payload
    moment = rng.choice(["in the head", "in the body", "at once", "while it waits", "after some bytes"])
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    cut = {"in the head": rng.randrange(1, len(head)), "in the body": rng.randrange(len(head), len(whole))}
    writer.write(whole[: cut.get(moment, len(whole))])
    await writer.drain()
    if moment == "while it waits":
        await asyncio.sleep(rng.uniform(0, longest_s))
    elif moment == "after some bytes":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await reader.read(rng.randrange(1, 2000))
    if rng.random() < 0.3:
        # A reset instead of an orderly end, as a killed process on another machine would leave.
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return f"{'stream' if stream else 'plain'} {moment}"


async def many_vanish(url: str, clients: int, *, seed: int, longest_s: float = 1.0) -> set[str]:
    """`clients` of them, spread over `longest_s`; what they did, each kind once."""
    rng = random.Random(seed)

    async def one(number: int) -> str:
        await asyncio.sleep(rng.uniform(0, longest_s))
        return await vanish(url, seed * 100_000 + number, longest_s)

    return set(await asyncio.gather(*(one(number) for number in range(clients))))
