"""Log-probabilities of prompts on the embedded model: the same as transformers', cold and cached, in every API form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from longturn import LLM
from longturn.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from longturn.source import resolve_source
from tests.e2e.conftest import Server

TEXT = "The sun is a star. Water boils at a hundred degrees, and ice melts at zero. " * 12


@pytest.fixture(scope="module")
def llm(embedded_model: None) -> Iterator[LLM]:
    config = EngineConfig(
        model=ModelConfig(weights="fp32"),
        cache=CacheConfig(memory_bytes=128 << 20),
        scheduler=SchedulerConfig(step_tokens=200),
    )
    with LLM(config=config) as model:
        yield model


def oracle_logprobs(ids: list[int]) -> Any:
    """[tokens - 1, vocab] log-probabilities of what follows each token, by transformers."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from longturn.models.checkpoint.gguf import GGUFCheckpoint

    source = resolve_source(ModelConfig())
    checkpoint = GGUFCheckpoint(source)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**source.config))
    model.load_state_dict({name: checkpoint.load(name) for name in checkpoint.names()}, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, dim=-1).numpy()


def test_they_are_those_of_transformers(llm: LLM) -> None:
    (first,) = llm.generate(TEXT, temperature=0.0, max_tokens=1)
    (scored,) = llm.generate(TEXT, temperature=0.0, max_tokens=1, prompt_logprobs=3)
    assert scored.token_ids == first.token_ids and scored.usage.cached_tokens == 0
    found = scored.prompt_logprobs
    assert found is not None
    ids = [found.first_id, *(token.token_id for token in found.tokens)]
    assert len(ids) == scored.usage.prompt_tokens > 200, "more than one step of the prompt"
    expected = oracle_logprobs(ids)
    for position, token in enumerate(found.tokens):
        row = expected[position]
        assert token.logprob == pytest.approx(row[token.token_id], abs=2e-3)
        assert [value for _, _, _, value in token.top] == pytest.approx(sorted(row)[:-4:-1], abs=2e-3)
        rank = int((row > row[token.token_id]).sum()) + 1
        assert token.rank == rank or abs(token.rank - rank) <= max(2, rank // 20)  # where others are as likely
    (again,) = llm.generate(TEXT, temperature=0.0, max_tokens=1)
    assert again.usage.cached_tokens >= 128, "what was computed for them is cached"


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_echo_with_logprobs(server: Server) -> None:
    body = {"prompt": [TEXT, "Ice is"], "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2, "n": 2}
    plain = post(server, "/v1/completions", body)
    assert len(plain["choices"]) == 4
    for choice in plain["choices"]:
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert all(value <= 0 for value in found["token_logprobs"][1:])
        offsets = found["text_offset"]
        assert all(choice["text"][at:].startswith(token) for at, token in zip(offsets, found["tokens"], strict=True))
    streamed: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for part in json.loads(line.removeprefix("data: "))["choices"]:
                    whole = streamed.setdefault(part["index"], {"text": "", "tokens": [], "text_offset": []})
                    whole["text"] += part["text"]
                    for name in ("tokens", "text_offset"):
                        whole[name] += (part["logprobs"] or {}).get(name, [])
    for choice in plain["choices"]:
        logprobs = choice["logprobs"]
        assert streamed[choice["index"]] == {
            "text": choice["text"], "tokens": logprobs["tokens"], "text_offset": logprobs["text_offset"],
        }  # fmt: skip


def test_a_prompt_can_be_scored_alone(server: Server) -> None:
    """As evaluation harnesses ask."""
    body = {"prompt": "Ice melts at zero.", "echo": True, "logprobs": 1, "temperature": 0}
    one = post(server, "/v1/completions", {**body, "max_tokens": 1})
    none = post(server, "/v1/completions", {**body, "max_tokens": 0})
    assert none["choices"][0]["text"] == "Ice melts at zero." and none["usage"]["completion_tokens"] == 0
    count = none["usage"]["prompt_tokens"]
    assert none["choices"][0]["logprobs"]["token_logprobs"] == one["choices"][0]["logprobs"]["token_logprobs"][:count]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_vllms_field(server: Server, path: str) -> None:
    chat = "chat" in path
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "Ice melts"}
    body = {**asked, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}
    made = post(server, path, body)
    found = made["prompt_logprobs"] if chat else made["choices"][0]["prompt_logprobs"]
    assert len(found) == made["usage"]["prompt_tokens"] and found[0] is None
    for entry in found[1:]:
        ranks = [value["rank"] for value in entry.values()]
        assert 1 in ranks and len(entry) == len(set(ranks)) <= 2
        assert all(set(value) == {"logprob", "rank", "decoded_token"} for value in entry.values())
    refused = httpx.post(f"{server.url}{path}", json={**body, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_allowed_tokens_are_the_only_ones(server: Server) -> None:
    ids = post(server, "/tokenize", {"prompt": "yes no"})["tokens"]
    body = {"prompt": "Is ice cold?", "max_tokens": 12, "temperature": 1.5, "seed": 1, "return_token_ids": True}
    made = post(server, "/v1/completions", {**body, "allowed_token_ids": ids})
    choice = made["choices"][0]
    assert set(choice["token_ids"]) <= set(ids) and len(choice["token_ids"]) == 12
    assert choice["finish_reason"] == "length", "no end token is allowed"
    wrong = httpx.post(f"{server.url}/v1/completions", json={**body, "allowed_token_ids": [10**6]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "allowed_token_ids")
