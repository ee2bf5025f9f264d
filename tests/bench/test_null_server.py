"""The server without a model does what it says, whatever the client is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from longturn.bench.client import ChatClient
from longturn.bench.null_protocol import NullOptions, NullStream
from longturn.bench.null_server import null_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with null_server(NullOptions(ttft_s=0.02, rate=500.0, bundle=3, prompt_tokens=11, model="m")) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b"}]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
    ],
)
async def test_an_answer_has_the_asked_tokens_at_the_asked_times(
    url: str, path: str, prompt: dict[str, object]
) -> None:
    async with ChatClient(url) as client:
        assert await client.choose_model(None) == "m"
        await client.get_json("/null/log", list[NullStream])
        answers = [await client.send({**prompt, "max_tokens": 8}, session_id="s", path=path) for _ in range(2)]
        log = await client.get_json("/null/log", list[NullStream])
        assert await client.get_json("/null/log", list[NullStream]) == [], "what was taken is gone"
    for answer in answers:
        assert answer.error is None and answer.finish == "length"
        assert (answer.prompt_tokens, answer.output_tokens, len(answer.chunks)) == (11, 8, 3)
        assert answer.text == " word" * 8
    for answer, stream in zip(answers, log, strict=True):
        assert (stream.session, stream.tokens, stream.events) == ("s", 8, 3)
        assert answer.sent_ns < stream.received_ns < stream.first_ns < stream.last_ns
        assert stream.first_ns - stream.received_ns >= 20_000_000
        # Three events, 3 / 500 s apart; each is written at its time or later.
        assert stream.last_ns - stream.received_ns >= 20_000_000 + 2 * 6_000_000
        assert stream.first_ns <= answer.chunks[0].at_ns and stream.late_ns >= 0


async def test_a_large_body_in_pieces_and_other_clients(url: str) -> None:
    async def pieces() -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        reader.feed_data(b"{}")
        reader.feed_eof()
        return reader

    body = b'{"prompt": "' + b"x" * 3_000_000 + b'", "stream": true, "max_completion_tokens" : 2}'
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", data=body) as response:
            text = await response.text()
        assert text.count("data: {") == 3 and text.endswith("data: [DONE]\n\n") and '"completion_tokens":2' in text
        async with session.post(f"{url}/v1/completions", data=await pieces()) as response:
            assert response.status == 411
        async with session.get(f"{url}/nowhere") as response:
            assert response.status == 404
        async with session.post(f"{url}/tokenize", json={"prompt": "one two one"}) as response:
            tokens = (await response.json())["tokens"]
    assert len(tokens) == 3 and tokens[0] == tokens[2] != tokens[1]


async def test_a_client_that_goes_away_is_forgotten(url: str) -> None:
    async with ChatClient(url) as client:
        await client.get_json("/null/log", list[NullStream])
        task = asyncio.create_task(client.send({"prompt": "x", "max_tokens": 100_000}, path="/v1/completions"))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        answer = await client.send({"prompt": "x", "max_tokens": 1}, path="/v1/completions")
        assert answer.ok
        assert [item.tokens for item in await client.get_json("/null/log", list[NullStream])] == [1]


def test_it_runs_from_the_command_line_until_it_is_ended() -> None:
    command = [sys.executable, "-m", "longturn.bench.null_server", "--rate", "1000", "--ttft", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()

        async def ask() -> str:
            async with ChatClient(address) as client:
                return (await client.send({"prompt": "x", "max_tokens": 2}, path="/v1/completions")).text

        assert asyncio.run(ask()) == " word word"
        process.terminate()
        assert process.wait(10) == 0


INTERRUPTS = """
import multiprocessing, pathlib, signal
from longturn.bench.null_protocol import NullOptions
from longturn.bench.null_server import null_server

if __name__ == "__main__":
    with null_server(NullOptions()):
        (child,) = multiprocessing.active_children()
        status = pathlib.Path(f"/proc/{child.pid}/status").read_text().splitlines()
        blocked = int(next(line for line in status if line.startswith("SigBlk")).split()[1], 16)
        print(blocked >> (signal.SIGINT - 1) & 1, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_ctrl_c_never_reaches_the_server_of_another_process(tmp_path: Path) -> None:
    """Not while it imports either, long before it can ignore it; the process that starts it hears it again."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTS)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("1 False\n", "")
