"""A server without a model: it streams prepared events at a fixed rate, to measure what a load client itself costs.

It speaks just enough HTTP/1.1 for the OpenAI API (`POST` with a `Content-Length`, answered by a chunked event stream)
and looks into a body for `max_tokens` alone. So it is much cheaper than any client, and what a client measures against
it, beyond the asked TTFT and rate, is the client's own. When it wrote each answer's first and last event is kept for
`GET /null/log`, so that lateness of this server is not taken for the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

from longturn.bench.null_protocol import NullConnection, NullOptions, NullService
from longturn.errors import LongturnError

_START_S = 30.0


async def _serve(options: NullOptions, port: int, ready: Connection | None) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    server = NullService(options)
    listening = await loop.create_server(lambda: NullConnection(server), "127.0.0.1", port)
    at = listening.sockets[0].getsockname()[1]
    if ready is None:
        print(f"http://127.0.0.1:{at}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, stop.set)
    else:
        ready.send(at)
        loop.add_reader(ready.fileno(), stop.set)  # the parent has closed its end, or is gone
    # Collections would be lateness, and nothing here makes cycles that matter.
    gc.disable()
    async with listening:
        await stop.wait()


def _child(options: NullOptions, ready: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    asyncio.run(_serve(options, 0, ready))


@contextmanager
def null_server(options: NullOptions) -> Iterator[str]:
    """Run it in a process of its own; yields its URL.

    Raises:
        LongturnError: the process did not start.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(options, theirs), daemon=True)
    # Before it ignores Ctrl-C it would print a trace of its own: the child begins with what is blocked here. (What else
    # `start` would begin unblocks it.)
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    try:
        try:
            if not ours.poll(_START_S):
                raise LongturnError("the null server did not start in time")
            port = ours.recv()
        except EOFError:
            raise LongturnError("the null server ended before it listened") from None
        yield f"http://127.0.0.1:{port}"
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join(5)


def main() -> None:
    """Serve until Ctrl-C; the first line of output is the URL."""
    default = NullOptions()
    parser = argparse.ArgumentParser(description="An OpenAI server without a model: events at a fixed rate.")
    parser.add_argument("--port", type=int, default=0, help="0: any free one [0]")
    parser.add_argument("--ttft", type=float, default=default.ttft_s, metavar="S")
    parser.add_argument("--rate", type=float, default=default.rate, metavar="TOK/S", help="of each stream")
    parser.add_argument("--bundle", type=int, default=default.bundle, metavar="N", help="tokens in one event")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="what usage tells")
    parser.add_argument("--model", default=default.model, metavar="NAME")
    args = parser.parse_args()
    options = NullOptions(args.ttft, args.rate, args.bundle, args.prompt_tokens, args.model)
    asyncio.run(_serve(options, args.port, None))


if __name__ == "__main__":
    main()
