"""`longturn serve`: bind, start the engine process, build the frontend beside it, serve, and end in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import importlib.util
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from longturn.config import EngineConfig, ServerConfig, check_config
from longturn.errors import LongturnError
from longturn.frontend.remote_engine import DEFAULT_FACTORY, RemoteEngine
from longturn.server.app import create_app
from longturn.server.ports import ServedModel, TextService

log = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Time that requests in flight have to finish when the server is told to stop; then they are answered with an error."""
LAST_WORDS_S = 2
"""Time for those errors to leave, before uvicorn cancels what is left."""
KEEP_ALIVE_S = 75
"""An idle connection lives this long: agents pause between turns, and a reused connection that the server is just
closing fails a request."""
BACKLOG = 2048

BuildService = Callable[[EngineConfig, RemoteEngine], tuple[TextService, ServedModel]]
"""Builds the text side. It runs in a thread while the engine starts, so it must not need the engine to be ready."""


class ListenError(LongturnError):
    """The address cannot be listened on."""

    exit_code = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would re-raise SIGTERM before the engine is stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(server: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        ListenError: the address is unknown, in use or not allowed; one line that names it.
    """
    where = f"{server.host}:{server.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ListenError(f"cannot listen on {where}: {reason}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise _listen_error(where, error) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    config: EngineConfig,
    *,
    build_service: BuildService | None = None,
    engine_factory: str = DEFAULT_FACTORY,
    on_ready: Callable[[str], None] | None = None,
    drain_s: float = DRAIN_S,
) -> None:
    """Serve until SIGINT or SIGTERM; returns after SIGTERM.

    `on_ready` is called with the server's URL once it answers; without it a line is printed.

    Raises:
        LongturnError: the server could not start.
        KeyboardInterrupt: after SIGINT, when everything has been ended.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    config = check_config(config)
    build = build_service or _default_build()
    sock = bind(config.server)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            received = runner.run(_serve(config, sock, build, engine_factory, on_ready or _announce, drain_s))
    finally:
        sock.close()
    if received == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(
    config: EngineConfig,
    sock: socket.socket,
    build_service: BuildService,
    engine_factory: str,
    on_ready: Callable[[str], None],
    drain_s: float,
) -> int | None:
    """Returns the signal that ended it, if one did."""
    received: list[int] = []
    server: _Server | None = None
    closing: list[asyncio.Task[None]] = []
    task = asyncio.current_task()
    assert task is not None

    def on_signal(number: int) -> None:
        received.append(number)
        if server is None:
            task.cancel()
        elif server.should_exit:
            # The second time means now.
            server.force_exit = True
        else:
            server.should_exit = True
            # Readers of a closed engine get an error that says so; uvicorn alone would cut their connections.
            loop.call_later(drain_s, lambda: closing.append(loop.create_task(engine.close())))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    engine = RemoteEngine(config, factory=engine_factory)
    try:
        building = asyncio.create_task(asyncio.to_thread(build_service, config, engine))
        starting = asyncio.create_task(engine.start())
        try:
            # Whichever fails first says why; the other need not be waited for.
            (service, model), info = await asyncio.gather(building, starting)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        # The page pool may hold less than the model's own context.
        context = min(model.max_context_tokens, info.max_context_tokens)
        model = dataclasses.replace(model, max_context_tokens=context)
        app = create_app(service, config, engine=engine, model=model)
        server = _Server(_uvicorn_config(app, drain_s))
        await _listen(server, sock, lambda: on_ready(url_of(sock)))
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        await asyncio.gather(*closing)
        await engine.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return received[0] if received else None


async def _listen(server: _Server, sock: socket.socket, on_ready: Callable[[], None]) -> None:
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_ready()
        await serving
    except OSError as error:
        raise _listen_error(url_of(sock), error) from None


def _uvicorn_config(app: ASGIApp, drain_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(drain_s) + LAST_WORDS_S,
    )


def _default_build() -> BuildService:
    from longturn import assemble

    def build(config: EngineConfig, engine: RemoteEngine) -> tuple[TextService, ServedModel]:
        frontend = assemble.build_frontend(config, engine)
        name, root, max_context_tokens = assemble.served_model(config)
        return frontend, ServedModel(name, max_context_tokens, int(time.time()), root)

    return build


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _announce(url: str) -> None:
    print(f"Longturn serves on {url}", file=sys.stdout, flush=True)


def _listen_error(where: str, error: Exception) -> ListenError:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return ListenError(f"cannot listen on {where}: the port is in use (choose another with --port)")
    return ListenError(f"cannot listen on {where}: {os.strerror(code) if code else error}")
