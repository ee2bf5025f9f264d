"""`longturn.LLM` on the embedded model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from longturn import LLM
from longturn.config import CacheConfig, EngineConfig, SchedulerConfig
from longturn.engine.records import FinishReason
from longturn.errors import ConfigError, EngineDeadError, ModelError, RequestError


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
    with pytest.raises(RequestError, match="max_tokens: expected `int`, got `float`") as caught:
        llm.generate("a", max_tokens=2.5)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ConfigError, match=r"'scheduler\.max_running' must be"):
        LLM(config=EngineConfig(scheduler=SchedulerConfig(max_running=0)))


def test_several_threads_share_one_engine(llm: LLM) -> None:
    prompts = [f"Item {number}:" for number in range(6)]
    alone = [llm.generate(prompt, temperature=0.0, max_tokens=6)[0].text for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = pool.map(lambda prompt: llm.generate(prompt, temperature=0.0, max_tokens=6)[0].text, prompts)
        assert list(found) == alone


def test_closing_ends_what_is_in_flight_and_all_that_follows(embedded_model: None) -> None:
    threads = threading.active_count()
    llm = LLM(config=EngineConfig(cache=CacheConfig(memory_bytes=64 << 20)))
    llm.generate("a", max_tokens=1)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(llm.generate, "a", max_tokens=2000, ignore_eos=True) for _ in range(2)]
        while llm.stats().running < 2:
            time.sleep(0.01)
        llm.close()
        for future in futures:
            with pytest.raises(EngineDeadError):
                future.result(10)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a", max_tokens=1)
    with pytest.raises(EngineDeadError, match="closed"):
        next(llm.stream_chat([{"role": "user", "content": "hi"}]))
    assert threading.active_count() == threads
