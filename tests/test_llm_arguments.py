"""`longturn.LLM` names what it was given instead of a text, messages or a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from longturn import LLM
from longturn.errors import ConfigError, RequestError


@pytest.fixture
def llm() -> Any:
    """One without an engine: nothing of it may be needed to refuse."""
    return LLM.__new__(LLM)


@pytest.mark.parametrize("config", [3, {"cache": {}}, {}])
def test_a_configuration_that_is_none(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"config must be a longturn\.config\.EngineConfig, not (int|dict)"):
        LLM(config=config)


@pytest.mark.parametrize("prompts", [[1, 2, 3], None, 7, b"text", [b"text"]])
def test_prompts_that_are_none(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts must be a text, texts, or lists of token ids"):
        llm.generate(prompts)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda llm: llm.chat("hi"), "messages"),
        (lambda llm: llm.chat({"role": "user", "content": "hi"}), "messages"),
        (lambda llm: llm.chat(["hi"]), "messages"),
        (lambda llm: llm.chat([{"role": "user", "content": "hi"}], tools={"name": "f"}), "tools"),
        (lambda llm: next(llm.stream_chat("hi")), "messages"),
    ],
)
def test_conversations_that_are_none(llm: LLM, call: Callable[[LLM], Any], name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} must be a list of dictionaries") as caught:
        call(llm)
    assert caught.value.param == name


def test_a_sampling_option_that_is_none(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match=r"there is no sampling option 'max_token' \(known: .*max_tokens, "
    ) as caught:
        llm.generate("x", max_token=3)
    assert caught.value.param == "max_token"
