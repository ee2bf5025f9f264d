"""The target without HTTP: its records beside those of the HTTP client, from one text service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from longturn.bench.failures import too_long
from longturn.bench.metrics import itl_s, ttft_s
from longturn.bench.synth_words import find_words, measure_costs
from longturn.cli.inproc_target import InprocTarget
from longturn.cli.main import main
from longturn.config import ModelConfig
from longturn.engine.records import FinishReason
from longturn.errors import EngineDeadError, ModelError, RequestError
from longturn.frontend.records import ChatPrompt, Prompt, TextChunk, TextPrompt, TextRequest, TokenPrompt, Usage
from longturn.report.point import load_point
from longturn.source import resolve_source

CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
TOKENS = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


class WordService:
    """One word is one token; answers count from 0, two tokens in the first chunk."""

    def __init__(self, error: Exception | None = None, wait_s: float = 0.0) -> None:
        self.requests: list[TextRequest] = []
        self.closed = 0
        self._error = error
        self._wait_s = wait_s
        self._vocabulary: dict[str, int] = {}

    async def tokenize(self, prompt: Prompt | str, *, add_special_tokens: bool = True) -> Sequence[int]:
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        if isinstance(prompt, ChatPrompt):
            words = [word for item in prompt.messages for word in (item["role"], *item["content"].split(), "end")]
        else:
            words = (prompt.text if isinstance(prompt, TextPrompt) else prompt).split()
            words = [*(["bos"] if add_special_tokens else []), *words]
        return [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words]

    async def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        self.requests.append(request)
        try:
            if self._error is not None:
                raise self._error
            prompt = await self.tokenize(request.prompt)
            await asyncio.sleep(self._wait_s)
            left = list(range(request.sampling.max_tokens))
            while left:
                width = 2 if len(left) == request.sampling.max_tokens else 1
                ids, left = tuple(left[:width]), left[width:]
                usage = None if left else Usage(len(prompt), request.sampling.max_tokens, 1)
                finish = None if left else FinishReason.LENGTH
                yield TextChunk(text="".join(f"{n} " for n in ids), token_ids=ids, finish=finish, usage=usage)
        finally:
            self.closed += 1


async def test_an_answer_has_the_engines_counts_and_times() -> None:
    service = WordService()
    answer = await InprocTarget(service, seed=3).send(CHAT, intended_ns=1, session_id="tree")
    assert answer.ok and answer.finish == "length" and answer.text == "0 1 2 3 "
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (4, 1, 4)
    assert [chunk.tokens for chunk in answer.chunks] == [2, 1, 1]
    assert answer.intended_ns == 1 < answer.sent_ns <= answer.chunks[0].at_ns <= answer.end_ns
    assert ttft_s(answer) is not None and itl_s(answer) is not None
    assert answer.token_ids is None, "nobody asked for them"
    (request,) = service.requests
    assert isinstance(request.prompt, ChatPrompt) and request.prompt.messages == tuple(CHAT["messages"])  # type: ignore[arg-type]
    assert request.ignore_eos and request.session_id == "tree" and request.split_reasoning
    assert (request.sampling.max_tokens, request.sampling.temperature) == (4, 0.0)


async def test_token_ids_go_in_and_come_out() -> None:
    service = WordService()
    answer = await InprocTarget(service).send(TOKENS)
    assert answer.token_ids == (0, 1, 2, 3) and answer.prompt_tokens == 3
    assert service.requests[0].prompt == TokenPrompt((5, 6, 7)) and not service.requests[0].split_reasoning


@pytest.mark.parametrize(
    ("error", "line", "long"),
    [
        (RequestError("the prompt has 9 tokens, but the context holds 8"), "refused: the prompt has 9 tokens", True),
        (RequestError("too many requests wait"), "refused: too many requests wait", False),
        (EngineDeadError("the engine died: x"), "the engine died: x", False),
    ],
)
async def test_what_goes_wrong_is_in_the_answer(error: Exception, line: str, long: bool) -> None:
    answer = await InprocTarget(WordService(error)).send(CHAT)
    assert answer.error is not None and answer.error.startswith(line)
    assert too_long(answer.error) is long


async def test_a_late_answer_ends_its_request() -> None:
    service = WordService(wait_s=30.0)
    answer = await InprocTarget(service, timeout_s=0.01).send(CHAT)
    assert answer.error == "timed out" and answer.chunks == () and service.closed == 1
    task = asyncio.create_task(InprocTarget(service).send(CHAT))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.closed == 2


async def test_its_tokenizer_serves_exact_prompts() -> None:
    target = InprocTarget(WordService())
    words = await find_words(target.tokenize)
    costs = await measure_costs(target.tokenize, words)
    assert words.opener_tokens == 1
    assert (costs.front, costs.user_to_assistant, costs.end) == (2, 3, 1), "a role and the opener; end; end of all"


def test_bad_choices_of_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        ([], "name a server with --url, or give --inproc"),
        (["--inproc", "--url", "http://x"], "leave --url out"),
        (["--url", "http://x", "--set", "executor.threads=1"], "--set is for --inproc"),
        (["--url", "http://x", "--config", "c.yaml"], "--config is for --inproc"),
        (["--inproc", "--set", "executor.thread=1"], "unknown setting 'executor.thread'"),
        (["--inproc", "--model", str(tmp_path / "none")], "none: no such model file or directory"),
    ):
        assert main(["bench", "agentx", *argv, "--out", str(tmp_path / "o")]) != 0, argv
        assert message in capsys.readouterr().err.splitlines()[-1], argv


def test_the_embedded_model_without_http(tmp_path: Path) -> None:
    try:
        resolve_source(ModelConfig())
    except ModelError as error:
        pytest.skip(str(error))
    out = tmp_path / "o"
    load = ["--traces", "workshop.json", "--scale-context", "0.2", "--duration", "3", "--carry-over", "live"]
    assert main(["bench", "agentx", "--inproc", *load, "--set", "executor.threads=1", "--out", str(out)]) == 0
    point = load_point(out / "agentx-0001.json")
    assert (point.flags["target"], point.flags["carry_over"]) == ("inproc", "live")
    assert point.engine.name == "longturn" and point.model.quantisation not in ("", "unknown")
    assert point.metrics.errors == 0 and point.metrics.requests > 0 and point.metrics.cached_tokens is not None
    assert point.command.startswith("longturn bench agentx --inproc --set executor.threads=1 --traces workshop.json")
    assert any(reason.startswith("live_carry_over:") for reason in point.validity.reasons)
    assert not any("mismatch" in reason for reason in point.validity.reasons)
    assert point.server and all(sample.cache_used is not None for sample in point.server)
