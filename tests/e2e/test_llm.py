"""`longturn.LLM` on the embedded model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longturn import LLM
from longturn.config import CacheConfig, EngineConfig
from longturn.engine.records import FinishReason
from longturn.errors import ModelError, RequestError


@pytest.fixture(scope="module")
def llm(embedded_model: None) -> Iterator[LLM]:
    with LLM(config=EngineConfig(cache=CacheConfig(memory_bytes=64 << 20))) as model:
        yield model


def test_texts_and_token_ids_are_computed_together(llm: LLM) -> None:
    together = llm.generate(["The sun is", "Water boils at"], temperature=0.0, max_tokens=8)
    alone = [llm.generate(p, temperature=0.0, max_tokens=8)[0] for p in ("The sun is", "Water boils at")]
    assert [c.text for c in together] == [c.text for c in alone]
    assert together[0].finish is FinishReason.LENGTH and len(together[0].token_ids) == 8
    again = llm.generate([[504, 3575, 314]], temperature=0.0, max_tokens=3)
    assert again[0].usage.prompt_tokens == 3


def test_a_chat_streams_what_it_says_and_reuses_its_past(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Count: " + " ".join(str(n) for n in range(150))}]
    whole = llm.chat(messages, temperature=0.0, max_tokens=40)
    assert "".join(c.text for c in llm.stream_chat(messages, temperature=0.0, max_tokens=40)) == whole.text
    messages += [{"role": "assistant", "content": whole.text}, {"role": "user", "content": "Go on."}]
    assert llm.chat(messages, temperature=0.0, max_tokens=4).usage.cached_tokens >= 256


def test_closing_a_stream_ends_the_request(llm: LLM) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "Tell a very long story."}], max_tokens=1000)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.chat([{"role": "user", "content": "hi"}], max_tokens=2)
    assert llm.stats().running == 0 and llm.stats().pages_used == 0


def test_errors_are_one_line(llm: LLM) -> None:
    with pytest.raises(RequestError, match="temperature"):
        llm.chat([{"role": "user", "content": "hi"}], temperature=7.0)
    with pytest.raises(ModelError, match="/no/such/model"):
        LLM("/no/such/model")
