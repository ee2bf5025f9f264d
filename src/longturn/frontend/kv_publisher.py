"""Publishes what becomes of cached pages, in the ZeroMQ format of vLLM's KV events, for routers that know that one.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0), and a msgpack array
`[unix time, [event, ...], data parallel rank]`. An event is a map, as vLLM writes it since June 2026 (0.24; its pull
request 42892; 0.26 was seen to send just these):

    {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], "block_size": 128,
     "lora_id": nil, "medium": "GPU", "lora_name": nil}
    {"type": "BlockRemoved", "block_hashes": [...], "medium": "GPU"}
    {"type": "AllBlocksCleared"}

or an array of the same values in the same order, the type first, as it wrote it until then. Later versions append
optional fields, which readers take as absent. Mooncake's conductor reads maps alone, Dynamo and llm-d (since its 0.9)
read both, older routers arrays alone.

Hashes are 64-bit numbers: the end of the page's hash. A subscriber that sees a gap asks the replay socket with the
first number that it misses; it is sent `(empty, number, payload)` for each message kept since then, and the number -1
at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, Literal

import msgspec
import zmq

from longturn.config import PAGE_TOKENS
from longturn.engine.kv_events import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from longturn.engine.records import unpack_tokens
from longturn.errors import ConfigError

log = logging.getLogger(__name__)

REPLAY_MESSAGES = 10_000
"""Messages that are kept for subscribers that missed some."""
SEND_HWM = 100_000
"""Messages that wait for one slow subscriber before it loses some; it sees the gap."""
END_NUMBER = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"
"""Routers' word for the tier that steps read from, on every device: vLLM says so on a CPU, too."""


def block_hash(page_hash: bytes) -> int:
    """The number that stands for a page's hash."""
    return int.from_bytes(page_hash[-8:], "big")


def check_endpoints(endpoint: str | None, replay_endpoint: str | None) -> None:
    """Raises ConfigError, naming the setting, if the port of a TCP address is none: ZeroMQ takes the number's lowest 16
    bits instead."""
    for setting, address in (("events_endpoint", endpoint), ("events_replay_endpoint", replay_endpoint)):
        if address is None or not address.startswith("tcp://"):
            continue
        _, colon, port = address.rpartition(":")
        if port == "*" or not colon or "/" in port:
            continue  # any free port, or no port at all, which ZeroMQ refuses itself
        if not (port.isascii() and port.isdigit()) or len(port) > 5 or not 1 <= int(port) <= 65535:
            raise ConfigError(f"cache.{setting} '{address}': the port must be a number from 1 to 65535")


class KvPublisher:
    """A `CacheListener` that publishes. `tell` and `close` belong to the engine's thread."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int = 0,
        events_format: Literal["maps", "arrays"] = "maps",
    ) -> None:
        """
        Args:
            endpoint: where to publish: bound if it is a wildcard or a local socket (tcp://*:5557, ipc://...), else
                connected to, as vLLM does, for a router that listens itself.
            replay_endpoint: where to answer subscribers that missed messages; always bound.
            topic: first frame of every message.
            rank: data parallel rank of this engine.
            events_format: what an event is.

        Raises:
            ConfigError: an address is malformed or in use.
        """
        check_endpoints(endpoint, replay_endpoint)
        self._topic = topic.encode()
        self._rank = rank
        self._arrays = events_format == "arrays"
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_MESSAGES)
        self._lock = threading.Lock()
        """Guards `_kept`: the replay thread reads what the engine's thread appends."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._replay: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        try:
            self._socket = self._open(zmq.PUB, endpoint, "cache.events_endpoint", bind=_is_local(endpoint))
            if replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, replay_endpoint, "cache.events_replay_endpoint", bind=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        if self._replay is not None:
            arguments = (self._replay,)
            self._thread = threading.Thread(target=self._serve_replay, args=arguments, name="kv-replay", daemon=True)
            self._thread.start()
        # A subscriber may have known a former engine at this address.
        self.tell((CacheCleared(),))

    def tell(self, events: tuple[CacheEvent, ...]) -> None:
        """See `CacheListener.tell`."""
        published = [_published(event) for event in events]
        batch = (time.time(), [list(one.values()) for one in published] if self._arrays else published, self._rank)
        payload = self._encoder.encode(batch)
        with self._lock:
            number = self._number
            self._number += 1
            self._kept.append((number, payload))
        # A PUB socket never waits: it drops what a slow subscriber does not take.
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def close(self) -> None:
        """See `CacheListener.close`."""
        self._socket.close(linger=200)
        if self._thread is None:
            self._context.term()
            return
        # Ends the replay thread's wait; it closes its socket, which lets this return.
        self._context.term()
        self._thread.join()

    def _open(self, kind: int, endpoint: str, setting: str, *, bind: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(SEND_HWM)
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"{setting} '{endpoint}': {error.strerror}") from None
        return socket

    def _serve_replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer until the context ends."""
        try:
            while True:
                frames = socket.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    log.warning("a replay request of KV events has another form than (empty, 8 bytes)")
                    continue
                client, empty, asked = frames
                first = int.from_bytes(asked, "big")
                with self._lock:
                    messages = [message for message in self._kept if message[0] >= first]
                for number, payload in messages:
                    socket.send_multipart((client, empty, number.to_bytes(8, "big"), payload))
                socket.send_multipart((client, empty, END_NUMBER, b""))
        except zmq.ContextTerminated:
            return
        finally:
            socket.close(linger=0)


def _is_local(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _published(event: CacheEvent) -> dict[str, Any]:
    """An event's fields, in the order in which arrays have their values."""
    if isinstance(event, PagesStored):
        return {
            "type": "BlockStored",
            "block_hashes": [block_hash(page_hash) for page_hash in event.hashes],
            "parent_block_hash": None if event.parent is None else block_hash(event.parent),
            "token_ids": unpack_tokens(event.tokens),
            "block_size": PAGE_TOKENS,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
    if isinstance(event, PagesRemoved):
        hashes = [block_hash(page_hash) for page_hash in event.hashes]
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM}
    return {"type": "AllBlocksCleared"}
