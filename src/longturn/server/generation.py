"""Runs the choices of one API request, and ends them when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from longturn.frontend.records import TextChunk, TextRequest
from longturn.server.errors import TimedOutError

T = TypeVar("T")
Indexed = tuple[int, TextChunk]
"""Index of a choice, and a piece of it."""
Generate = Callable[[TextRequest], AsyncGenerator[TextChunk, None]]


async def run_choices(generate: Generate, prompts: Sequence[Sequence[TextRequest]]) -> AsyncGenerator[Indexed, None]:
    """Chunks of all choices as they come; `prompts` holds the requests of each prompt, indices count through.

    The first choice of a prompt runs ahead of the others until it yields a token: its prompt is then in the prefix
    cache, and the others take it from there instead of computing it again. Closing the generator aborts every choice.
    """
    if len(prompts) == 1 and len(prompts[0]) == 1:
        async with contextlib.aclosing(generate(prompts[0][0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    # Unbounded, but a choice cannot put more than its `max_tokens` in it.
    queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue()

    async def read(index: int, request: TextRequest, leader: bool, prompt_computed: asyncio.Event) -> None:
        try:
            if not leader:
                await prompt_computed.wait()
            async with contextlib.aclosing(generate(request)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
                    if chunk.token_ids or chunk.finish is not None:
                        prompt_computed.set()
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            prompt_computed.set()

    tasks: list[asyncio.Task[None]] = []
    for requests in prompts:
        prompt_computed = asyncio.Event()
        for i, request in enumerate(requests):
            tasks.append(asyncio.create_task(read(len(tasks), request, i == 0, prompt_computed)))
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(events: AsyncGenerator[Indexed, None], choices: int) -> list[list[TextChunk]]:
    """All chunks of each choice."""
    chunks: list[list[TextChunk]] = [[] for _ in range(choices)]
    async with contextlib.aclosing(events):
        async for index, chunk in events:
            chunks[index].append(chunk)
    return chunks


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client went away first; `work` is then cancelled and has ended."""
    worker = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({worker, gone}, return_when=asyncio.FIRST_COMPLETED)
        return worker.result() if worker.done() else None
    finally:
        gone.cancel()
        worker.cancel()
        await asyncio.gather(worker, gone, return_exceptions=True)


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Raises TimedOutError in the body after `seconds`; 0 is no limit."""
    try:
        async with asyncio.timeout(seconds or None) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimedOutError(f"the request took longer than {seconds:g} s (server.request_timeout_s)") from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
