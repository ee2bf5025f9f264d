"""The embedded model through HTTP with the official SDK: what an agent's author would do first."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request

import openai
import pytest

from longturn.config import PAGE_TOKENS

from .conftest import Server

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "List three colours, separated by commas."}]


def ask(client: openai.OpenAI, **options: object) -> openai.types.chat.ChatCompletion:
    values: dict[str, object] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    return client.chat.completions.create(**{**values, **options})  # type: ignore[call-overload]


def test_plain_and_streaming_agree(server: Server) -> None:
    client = server.client()
    plain = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content and text.strip()
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == plain.choices[0].finish_reason
    assert chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert plain.usage.prompt_tokens_details is not None
    assert plain.usage.prompt_tokens_details.cached_tokens == 0


def test_the_model_answers_sensibly(server: Server) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in (ask(server.client(), messages=messages).choices[0].message.content or "")


def test_stop_strings(server: Server) -> None:
    client = server.client()
    whole = ask(client).choices[0].message.content or ""
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    cut = ask(client, stop=[stop, "never-in-there"])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, stop=stop, stream=True) if c.choices)
    assert streamed == whole[: whole.index(stop)]


def test_seeds(server: Server) -> None:
    client = server.client()

    def text(seed: int) -> str | None:
        return ask(client, temperature=1.0, seed=seed, max_tokens=40).choices[0].message.content

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(5)}) > 1


def test_logprobs(server: Server) -> None:
    reply = ask(server.client(), logprobs=True, top_logprobs=3, max_tokens=8)
    content = reply.choices[0].logprobs
    assert content is not None and content.content is not None
    assert "".join(t.token for t in content.content) == reply.choices[0].message.content
    for token in content.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(max(t.logprob for t in token.top_logprobs))  # greedy takes the best
        assert bytes(token.bytes or []).decode(errors="replace") == token.token


def test_completions_with_token_ids(server: Server) -> None:
    client = server.client()
    ids = post(server, "/tokenize", {"prompt": "The quick brown fox"})["tokens"]
    by_text = client.completions.create(model=MODEL, prompt="The quick brown fox", max_tokens=12, temperature=0)
    by_ids = client.completions.create(
        model=MODEL,
        prompt=ids,
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert by_ids.usage is not None and by_ids.usage.completion_tokens == 12
    assert by_ids.choices[0].text.startswith(by_text.choices[0].text)
    out_ids = by_ids.choices[0].model_dump()["token_ids"]
    assert len(out_ids) == 12
    assert post(server, "/detokenize", {"tokens": out_ids})["prompt"] == by_ids.choices[0].text


def test_a_second_turn_is_cached_to_the_page(server: Server) -> None:
    client = server.client()
    text = "Remember these numbers: " + ", ".join(str(n * 7919 % 10007) for n in range(250))
    messages: list[dict[str, str]] = [{"role": "user", "content": text}]
    first = ask(client, messages=messages, max_tokens=150, extra_body={"ignore_eos": True})
    assert first.usage is not None
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "Now the next one."},
    ]
    second = ask(client, messages=messages)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    # The last sampled token was never computed, so it is not in the cache.
    computed = first.usage.total_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == computed // PAGE_TOKENS * PAGE_TOKENS


def test_a_long_prompt(server: Server) -> None:
    words = " ".join(f"item{n}" for n in range(500))
    while (count := post(server, "/tokenize", {"prompt": words})["count"]) < 3000:
        words += " and" * (3000 - count)
    reply = ask(server.client(timeout=120), messages=[{"role": "user", "content": words}], max_tokens=4)
    assert reply.usage is not None and reply.usage.prompt_tokens >= 3000 and reply.choices[0].message.content


async def test_sixteen_clients_at_once(server: Server) -> None:
    client = server.async_client()

    async def one(n: int) -> str:
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Say the number {n} and a word."}],
            max_tokens=16,
            temperature=0,
        )
        return reply.choices[0].message.content or ""

    together = await asyncio.gather(*(one(n) for n in range(16)))
    assert all(together)
    assert [await one(n) for n in (0, 7, 15)] == [together[n] for n in (0, 7, 15)]
    await client.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_pages(server: Server, stream: bool) -> None:
    client = server.async_client()
    request = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "word " * 600}],
        max_tokens=4000,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    if stream:
        response = await request
        async for _ in response:
            break
        assert server.metric("longturn_pages_used") > 0
        await response.close()
    else:
        task = asyncio.ensure_future(request)
        while server.metric("longturn_pages_used") == 0:
            await asyncio.sleep(0.05)
        task.cancel()
    await client.close()
    begin = time.monotonic()
    while server.metric("longturn_pages_used") > 0:
        assert time.monotonic() - begin < 1.0, "pages are not back within a second"
        await asyncio.sleep(0.02)


def post(server: Server, path: str, body: object) -> dict:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


BAD = [
    (b"{not json", 400, "JSON"),
    ({"model": MODEL}, 400, "messages"),
    ({"model": MODEL, "messages": "hello"}, 400, "messages"),
    ({"model": MODEL, "messages": QUESTION, "temperature": 3}, 400, "temperature"),
    ({"model": MODEL, "messages": QUESTION, "temperature": "hot"}, 400, "temperature"),
    ({"model": MODEL, "messages": QUESTION, "top_p": -0.1}, 400, "top_p"),
    ({"model": MODEL, "messages": QUESTION, "max_tokens": 0}, 400, "max_tokens"),
    ({"model": MODEL, "messages": [{"role": "user", "content": "x " * 9000}]}, 400, "8192"),
    ({"model": "no-such-model", "messages": QUESTION}, 404, "no-such-model"),
]


@pytest.mark.parametrize(("body", "status", "names"), BAD)
def test_bad_input_is_one_clear_line_and_the_server_goes_on(
    server: Server, body: object, status: int, names: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v1/chat/completions", body)
    assert caught.value.code == status
    message = json.load(caught.value)["error"]["message"]
    assert names in message and "\n" not in message and "Traceback" not in message
    with urllib.request.urlopen(f"{server.url}/health", timeout=5) as response:
        assert response.status == 200


def test_top_p_0_takes_the_likeliest_token(server: Server) -> None:
    body = {"messages": QUESTION, "max_tokens": 12}
    hot, greedy = (
        post(server, "/v1/chat/completions", {**body, **sampling})["choices"][0]["message"]["content"]
        for sampling in ({"temperature": 1.9, "top_p": 0, "seed": 5}, {"temperature": 0})
    )
    assert hot == greedy


def test_the_second_request_of_a_tool_loop(server: Server) -> None:
    """A message that only calls tools has no content; templates that read it must not break the loop."""
    call = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "README.md"},
    ]
    assert ask(server.client(), messages=messages).choices[0].message.content
