"""What text completions have beside chat: echo, best_of, and aborts among them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.engine_mock import MockEngine, text_of
from tests.server.served import Start

TEXT = "/v1/completions"


async def post(served: Any, **body: Any) -> Any:
    async with served.http() as http:
        reply = await http.post(TEXT, json=body)
    assert reply.status_code == 200, reply.text
    return reply


def streamed(text: str, choices: int) -> list[str]:
    """The text of each choice."""
    texts = [""] * choices
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    return texts


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_echo_puts_the_prompt_before_the_text(start: Start, prompt: Any) -> None:
    served = await start()
    body = {"prompt": prompt, "max_tokens": 5, "echo": True, "seed": 3}
    whole = (await post(served, **body)).json()
    assert whole["choices"][0]["text"] == "ab" + text_of("ab", 5, 3)
    assert whole["usage"]["completion_tokens"] == 5, "what is echoed was not generated"
    assert streamed((await post(served, **body, stream=True)).text, 1) == [whole["choices"][0]["text"]]


async def test_echo_with_several_prompts_and_choices(start: Start) -> None:
    served = await start()
    body = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 3, "echo": True, "seed": 1}
    texts = [choice["text"] for choice in (await post(served, **body)).json()["choices"]]
    expected = [prompt + text_of(prompt, 3, 1 + j) for prompt in ("ab", "xyz") for j in range(2)]
    assert texts == expected
    assert streamed((await post(served, **body, stream=True)).text, 4) == expected


async def test_the_best_are_those_with_the_likeliest_tokens(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start()
    # The mock's tokens are all equally likely; here the seed says how likely.
    likely = {10: -0.9, 11: -0.1, 12: -0.5, 13: -0.3}
    step = MockEngine.step

    def step_with_likelihood(engine: MockEngine) -> Any:
        seeds = {name: run.request.sampling.seed for name, run in engine.running.items()}
        made = step(engine)
        for output in made.outputs if made else ():
            for entry in output.logprobs:
                object.__setattr__(entry, "token", likely[seeds[output.request_id]])
        return made

    monkeypatch.setattr(MockEngine, "step", step_with_likelihood)
    reply = (await post(served, prompt="ab", n=2, best_of=4, max_tokens=3, seed=10)).json()
    assert [choice["text"] for choice in reply["choices"]] == [text_of("ab", 3, 11), text_of("ab", 3, 13)]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in reply["choices"]), "they were not asked for"
    assert reply["usage"]["completion_tokens"] == 12, "all four were made"
    assert reply["usage"]["prompt_tokens"] == 2


async def test_best_of_n_alone_changes_nothing(start: Start) -> None:
    served = await start()
    body = {"prompt": "ab", "n": 2, "max_tokens": 3, "seed": 1}
    plain = (await post(served, **body)).json()
    best = (await post(served, **body, best_of=2)).json()
    assert best["choices"] == plain["choices"]
