"""`longturn serve`: bind, start the engine process, build the frontend beside it, serve, and end in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import importlib.util
import logging
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
from longturn.frontend.kv_publisher import check_endpoints
from longturn.frontend.remote_engine import DEFAULT_FACTORY, RemoteEngine
from longturn.server.app import create_app
from longturn.server.drain import Drain
from longturn.server.keys import accepted_keys
from longturn.server.logs import configure_logs
from longturn.server.ports import ServedModel, TextService
from longturn.server.tls import check_certificate

log = logging.getLogger(__name__)

LAST_WORDS_S = 2
"""Time for the errors of requests that outlast the drain to leave, before uvicorn cancels what is left."""
CUT_OFF = "the server is shutting down and did not finish this request; it can be sent again"
"""What requests that outlast the drain are told."""
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


def url_of(sock: socket.socket, *, secure: bool = False) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve(
    config: EngineConfig,
    *,
    build_service: BuildService | None = None,
    engine_factory: str = DEFAULT_FACTORY,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; returns after SIGTERM.

    After a signal new requests are answered with 503, also at /health, and those in progress have `server.drain_s`
    to finish. A second signal ends them at once.

    `on_ready` is called with the server's URL once it answers; without it a line is printed.

    Raises:
        LongturnError: the server could not start.
        KeyboardInterrupt: after SIGINT, when everything has been ended.
    """
    config = check_config(config)
    configure_logs(config.server)
    accepted_keys(config.server)
    check_certificate(config.server)
    check_endpoints(config.cache.events_endpoint, config.cache.events_replay_endpoint)
    build = build_service or _default_build()
    sock = bind(config.server)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            received = runner.run(_serve(config, sock, build, engine_factory, on_ready or _announce))
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
) -> int | None:
    """Returns the signal that ended it, if one did."""
    received: list[int] = []
    server: _Server | None = None
    drain = Drain()
    closing: list[asyncio.Task[None]] = []
    task = asyncio.current_task()
    assert task is not None

    def on_signal(number: int) -> None:
        received.append(number)
        if server is None:
            if len(received) == 1:  # a second one would cut short what ends the engine
                task.cancel()
        elif drain.draining:
            # The second time means now.
            server.should_exit = server.force_exit = True
        else:
            # uvicorn goes on listening meanwhile, so that whoever asks is told why it is refused.
            drain.begin()
            closing.append(loop.create_task(finish(server)))

    async def finish(server: _Server) -> None:
        if not await drain.wait(config.server.drain_s):
            # Readers of a closed engine get an error that says so; uvicorn alone would cut their connections.
            await engine.close(CUT_OFF)
            await drain.wait(LAST_WORDS_S)
        server.should_exit = True

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
        model = dataclasses.replace(
            model,
            max_context_tokens=context,
            quantisation=info.quantisation,
            weights=info.weights,
            kv_cache=info.kv_cache,
            device=info.device,
        )
        app = create_app(service, config, engine=engine, model=model, drain=drain)
        server = _Server(_uvicorn_config(app, config.server))
        secure = config.server.ssl_certfile is not None
        await _listen(server, sock, lambda: on_ready(url_of(sock, secure=secure)))
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        for ending in closing:
            ending.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        await engine.close(CUT_OFF)
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


def _uvicorn_config(app: ASGIApp, server: ServerConfig) -> uvicorn.Config:
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
        timeout_graceful_shutdown=LAST_WORDS_S,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
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
