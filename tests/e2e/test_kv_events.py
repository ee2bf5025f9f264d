"""A router's view of a real server: cached pages arrive over ZeroMQ, and asking again gives them all."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from tests.e2e.conftest import SERVE


def replayed(context: zmq.Context[Any], endpoint: str) -> list[Any]:
    """Events of all messages kept."""
    asking = context.socket(zmq.DEALER)
    asking.rcvtimeo = 10_000
    asking.connect(endpoint)
    asking.send_multipart((b"", (0).to_bytes(8, "big")))
    events: list[Any] = []
    while (frames := asking.recv_multipart())[1] != b"\xff" * 8:
        events += msgspec.msgpack.decode(frames[2])[1]
    asking.close()
    return events


def test_cached_pages_are_published(embedded_model: None, tmp_path: Path) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    command = [*SERVE, "--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    context: zmq.Context[Any] = zmq.Context()
    try:
        assert process.stdout is not None
        url = next((line["ready"] for line in map(json.loads, process.stdout) if "ready" in line), None)
        assert url is not None, "the server did not start"
        reader = context.socket(zmq.SUB)
        reader.rcvtimeo = 10_000
        reader.subscribe(b"")
        reader.connect(events)
        time.sleep(0.3)  # a subscription has to arrive; nothing tells when it has
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            prompt = list(range(1000, 1300))
            assert replayed(context, replay) == [{"type": "AllBlocksCleared"}]
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()
            stored = [event for event in replayed(context, replay) if event["type"] == "BlockStored"]
            assert [token for event in stored for token in event["token_ids"]] == prompt[:256]
            assert stored[0]["parent_block_hash"] is None and sum(len(event["block_hashes"]) for event in stored) == 2
            assert http.post("/reset_prefix_cache").json() == {"pages": 2}
        seen: list[str] = []
        while "AllBlocksCleared" not in seen:
            seen += [event["type"] for event in msgspec.msgpack.decode(reader.recv_multipart()[2])[1]]
        assert seen == ["BlockStored"] * len(stored) + ["AllBlocksCleared"]
    finally:
        process.terminate()
        context.destroy(linger=0)
        assert process.wait(20) == 0
