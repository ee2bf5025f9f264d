"""Cache events on the wire: byte for byte what vLLM's description makes of them, put together here by msgpack's own
specification, and read with types of the reader's own, as a router would."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import zmq

from longturn.engine.kv_events import CacheCleared, PagesRemoved, PagesStored
from longturn.engine.records import pack_tokens
from longturn.errors import ConfigError
from longturn.frontend.kv_publisher import KvPublisher, check_endpoints

HASHES = (bytes(range(16)), bytes(range(240, 256)))
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


def packed(value: Any) -> bytes:
    """msgpack by its specification, of what events hold; the shortest form of each value."""
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, int):
        assert value >= 0
        for most, form in ((0x7F, ">B"), (0xFF, ">BB"), (0xFFFF, ">BH"), (0xFFFFFFFF, ">BI"), ((1 << 64) - 1, ">BQ")):
            if value <= most:
                tag = {">BB": 0xCC, ">BH": 0xCD, ">BI": 0xCE, ">BQ": 0xCF}.get(form)
                return struct.pack(form, value) if tag is None else struct.pack(form, tag, value)
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xA0 | len(data)]) if len(data) < 32 else bytes([0xD9, len(data)])) + data
    if isinstance(value, dict):
        assert len(value) < 16
        return bytes([0x80 | len(value)]) + b"".join(packed(one) for pair in value.items() for one in pair)
    head = bytes([0x90 | len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))
    return head + b"".join(map(packed, value))


STORED = {
    "type": "BlockStored", "block_hashes": NUMBERS, "parent_block_hash": None, "token_ids": TOKENS, "block_size": 128,
    "lora_id": None, "medium": "GPU", "lora_name": None,
}  # fmt: skip
"""Fields of `vllm/distributed/kv_events.py` in the order of their declaration; those with a default are left out, and
the three before them have none. The class's name comes first, as "type" in a map."""
FOLLOWING = {**STORED, "block_hashes": [NUMBERS[1]], "parent_block_hash": NUMBERS[0], "token_ids": TOKENS[:128]}
REMOVED = {"type": "BlockRemoved", "block_hashes": [NUMBERS[0]], "medium": "GPU"}
CLEARED = {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("form", ["maps", "arrays"])
def test_messages_are_those_of_vllm_to_the_byte(
    form: Literal["maps", "arrays"], context: zmq.Context[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    monkeypatch.setattr(time, "time", lambda: 1_789_095_808.5)
    publisher = KvPublisher(endpoint, topic="kv@me", rank=3, events_format=form)
    reader = subscriber(context, endpoint, b"kv@")
    time.sleep(0.2)  # a subscription has to arrive; nothing tells when it has
    publisher.tell((PagesRemoved((HASHES[0],)), PagesStored(HASHES, None, pack_tokens(TOKENS))))
    publisher.tell((PagesStored((HASHES[1],), HASHES[0], pack_tokens(TOKENS[:128])), CacheCleared()))
    messages = [reader.recv_multipart() for _ in range(2)]
    publisher.close()
    reader.close()
    for number, (message, events) in enumerate(
        zip(messages, ([REMOVED, STORED], [FOLLOWING, CLEARED]), strict=True), 1
    ):
        wanted: list[Any] = [list(one.values()) for one in events] if form == "arrays" else events
        payload = packed([1_789_095_808.5, wanted, 3])
        assert message == [b"kv@me", b"\0\0\0\0\0\0\0" + bytes([number]), payload]
    assert NUMBERS[1] > 1 << 60, "hashes that need all 64 bits"


class _Base(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A reader that declares its types, as vLLM's example does since events are maps."""


class BlockStored(_Base):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(_Base):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Base):
    """Nothing more."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def test_a_typed_reader_takes_them(context: zmq.Context[Any], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = KvPublisher(endpoint)
    reader = subscriber(context, endpoint)
    time.sleep(0.2)
    begin = time.time()
    publisher.tell((PagesStored(HASHES, None, pack_tokens(TOKENS)), PagesRemoved((HASHES[0],)), CacheCleared()))
    found = msgspec.msgpack.decode(reader.recv_multipart()[2], type=Batch)
    publisher.close()
    reader.close()
    assert begin <= found.ts <= time.time() and found.data_parallel_rank == 0
    assert found.events == [
        BlockStored(list(NUMBERS), None, TOKENS, 128, None, "GPU", None),
        BlockRemoved([NUMBERS[0]], "GPU"),
        AllBlocksCleared(),
    ]


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
    assert everything[0][1] == [CLEARED], "what an earlier engine had is gone"
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


@pytest.mark.parametrize("port", ["65536", "99999", "0", "-1", "+80", "80a", "٣", "", "1" * 5000])
@pytest.mark.parametrize("host", ["*", "127.0.0.1", "router", "[::1]"])
def test_a_port_that_is_none_is_refused_by_name(host: str, port: str) -> None:
    """ZeroMQ alone would listen on 34463 for 99999."""
    address = f"tcp://{host}:{port}"
    message = f"'{address}': the port must be a number from 1 to 65535"
    with pytest.raises(ConfigError) as refused:
        KvPublisher(address)
    assert str(refused.value) == f"cache.events_endpoint {message}"
    with pytest.raises(ConfigError) as refused:
        KvPublisher("tcp://127.0.0.1:*", address)
    assert str(refused.value) == f"cache.events_replay_endpoint {message}"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:65535", "tcp://router:1", "tcp://*:*", "ipc:///tmp/a:99999"])
def test_other_addresses_are_not_judged_by_a_port(address: str) -> None:
    check_endpoints(address, address)
