"""Cache events on the wire, read with types of the reader's own, as a router would."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from longturn.engine.kv_events import CacheCleared, PagesRemoved, PagesStored
from longturn.engine.records import pack_tokens
from longturn.errors import ConfigError
from longturn.frontend.kv_publisher import KvPublisher

HASHES = (bytes(range(16)), bytes(range(16, 32)))
NUMBERS = [int.from_bytes(page_hash[8:], "big") for page_hash in HASHES]
TOKENS = list(range(256))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscriber(context: zmq.Context[Any], endpoint: str, topic: bytes = b"") -> zmq.Socket[Any]:
    socket = context.socket(zmq.SUB)
    socket.rcvtimeo = 5000
    socket.subscribe(topic)
    socket.connect(endpoint)
    return socket


def test_events_are_arrays_as_vllm_writes_them(context: zmq.Context[Any], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = KvPublisher(endpoint, topic="kv@me")
    reader = subscriber(context, endpoint, b"kv@")
    time.sleep(0.2)  # a subscription has to arrive; nothing tells when it has
    begin = time.time()
    publisher.tell((PagesRemoved((HASHES[0],)), PagesStored(HASHES, None, pack_tokens(TOKENS))))
    publisher.tell((PagesStored((HASHES[1],), HASHES[0], pack_tokens(TOKENS[:128])), CacheCleared()))
    first, second = reader.recv_multipart(), reader.recv_multipart()
    publisher.close()
    assert [first[0], first[1], second[1]] == [b"kv@me", (1).to_bytes(8, "big"), (2).to_bytes(8, "big")]
    moment, events, rank = msgspec.msgpack.decode(first[2])
    assert begin <= moment <= time.time() and rank == 0
    assert events == [
        ["BlockRemoved", [NUMBERS[0]], "GPU"],
        ["BlockStored", NUMBERS, None, TOKENS, 128, None, "GPU", None],
    ]
    assert msgspec.msgpack.decode(second[2])[1] == [
        ["BlockStored", [NUMBERS[1]], NUMBERS[0], TOKENS[:128], 128, None, "GPU", None],
        ["AllBlocksCleared"],
    ]
    reader.close()


def test_who_missed_messages_asks_for_them_again(context: zmq.Context[Any], tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = KvPublisher(endpoint, replay)
    for page_hash in HASHES * 3:
        publisher.tell((PagesRemoved((page_hash,)),))
    asking = context.socket(zmq.REQ)
    asking.rcvtimeo = 5000
    asking.connect(replay)

    def ask(first: int) -> list[tuple[int, Any]]:
        # A REQ socket reads one message; whoever wants them all uses DEALER, as vLLM's example does.
        dealer = context.socket(zmq.DEALER)
        dealer.rcvtimeo = 5000
        dealer.connect(replay)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            _, number, payload = dealer.recv_multipart()
            if number == b"\xff" * 8:
                dealer.close()
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1]))

    everything = ask(0)
    assert [number for number, _ in everything] == list(range(7))
    assert everything[0][1] == [["AllBlocksCleared"]], "what an earlier engine had is gone"
    assert ask(5) == everything[5:] and ask(99) == []
    # Nonsense is dropped and kills nothing.
    junk = context.socket(zmq.DEALER)
    junk.connect(replay)
    junk.send_multipart((b"junk",))
    junk.send_multipart((b"", b"short"))
    assert ask(6) == everything[6:]
    asking.close()
    junk.close()
    publisher.close()


def test_a_slow_or_absent_reader_holds_nobody_up(tmp_path: Path) -> None:
    publisher = KvPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    for _ in range(20_000):
        publisher.tell((CacheCleared(),))
    assert len(publisher._kept) == 10_000 and publisher._kept[-1][0] == 20_000
    publisher.close()


def test_an_address_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        endpoint = f"tcp://*:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cache\.events_endpoint 'tcp://\*:\d+': Address already in use"):
            KvPublisher(endpoint)
        with pytest.raises(ConfigError, match=r"cache\.events_replay_endpoint"):
            KvPublisher("tcp://*:*", endpoint)
    with pytest.raises(ConfigError, match=r"cache\.events_endpoint 'nonsense'"):
        KvPublisher("nonsense")
