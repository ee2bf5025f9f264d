"""Requests through the whole frontend with a scripted engine."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.engine.hashing import page_hashes, salt_key
from longturn.engine.records import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    unpack_tokens,
)
from longturn.errors import EngineDeadError, LongturnError, RequestError
from longturn.frontend.frontend import Frontend
from longturn.frontend.records import ChatPrompt, Prompt, TextChunk, TextPrompt, TextRequest, TokenPrompt
from longturn.frontend.tokenizer import Tokenizer, TokenizerSettings
from longturn.source import ModelSource
from tests.frontend.fakes import END_OF_TEXT, IM_END, TIMES, fake_frontend, outputs_of, tiny_backend, tiny_tokenizer

ENCODE = tiny_tokenizer().encode
BYTE = {tiny_tokenizer().token_bytes(i): i for i in range(256)}


def text_request(prompt: str | Prompt = "x", **options: Any) -> TextRequest:
    sampling = {f.name for f in dataclasses.fields(SamplingParams)}
    chosen = {"max_tokens": 0} | {name: options.pop(name) for name in list(options) if name in sampling}
    record = TextPrompt(prompt) if isinstance(prompt, str) else prompt
    return TextRequest("r1", record, SamplingParams(**chosen), **options)


async def collect(frontend: Frontend, request: TextRequest) -> list[TextChunk]:
    return [chunk async for chunk in frontend.generate(request)]


def answering(ids: Sequence[int], finish: FinishReason = FinishReason.LENGTH, **options: Any) -> Any:
    return lambda request: outputs_of(request, ids, finish, **options)


def text_of(chunks: Sequence[TextChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


# --- what comes out --------------------------------------------------------------------------------------------------


async def test_chunks_tokens_usage_and_times() -> None:
    ids = ENCODE("hello world")
    frontend, engine = fake_frontend(answering(ids, FinishReason.STOP, stop_token_id=IM_END, cached_tokens=3))
    chunks = await collect(frontend, text_request("say hello"))
    assert text_of(chunks) == "hello world"
    assert [i for chunk in chunks for i in chunk.token_ids] == ids
    assert [chunk.finish for chunk in chunks] == [None] * len(ids) + [FinishReason.STOP]
    assert chunks[0].prompt_token_ids == tuple(ENCODE("say hello"))
    assert all(chunk.prompt_token_ids is None and chunk.usage is None for chunk in chunks[1:-1])
    usage = chunks[-1].usage
    assert usage is not None and chunks[-1].times == TIMES and chunks[-1].stop_text is None
    # The sampled stop token counts as output, though it is no text.
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (
        len(ENCODE("say hello")),
        len(ids) + 1,
        3,
    )
    assert engine.closed == ["r1"]


async def test_output_that_ends_inside_a_character() -> None:
    ids = [BYTE[b"a"], *(BYTE[bytes([b])] for b in "\U0001f600".encode()[:3])]
    frontend, _ = fake_frontend(answering(ids))
    chunks = await collect(frontend, text_request())
    assert text_of(chunks) == "a\ufffd" and text_of(chunks[:-1]) == "a"
    assert chunks[-1].finish is FinishReason.LENGTH


async def test_held_back_beginning_of_a_stop_string_comes_at_the_end() -> None:
    frontend, _ = fake_frontend(answering(ENCODE("abc E")))
    chunks = await collect(frontend, text_request(stop=("END",)))
    assert text_of(chunks) == "abc E" and text_of(chunks[:-1]) == "abc "


@pytest.mark.parametrize("at_once", [1, 2, 3, 50])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_ends_the_engines_request(at_once: int, include: bool) -> None:
    ids = [BYTE[bytes([b])] for b in b"one\n\ntwo\n\nthree"]
    frontend, engine = fake_frontend(answering(ids, at_once=at_once, cached_tokens=1))
    chunks = await collect(frontend, text_request(stop=("\n\nt", "zzz"), include_stop_text=include))
    assert text_of(chunks) == ("one\n\nt" if include else "one")
    last = chunks[-1]
    assert (last.finish, last.stop_text) == (FinishReason.STOP, "\n\nt")
    assert [i for chunk in chunks for i in chunk.token_ids] == ids[:6]  # up to the token that completed it
    assert last.usage is not None and (last.usage.completion_tokens, last.usage.cached_tokens) == (6, 1)
    assert engine.closed == ["r1"] and engine.finished == []


async def test_engine_is_free_before_the_last_chunk_is_read() -> None:
    frontend, engine = fake_frontend(answering(ENCODE("abcabc"), at_once=50))
    async for chunk in frontend.generate(text_request(stop=("c",))):
        assert chunk.finish is FinishReason.STOP
        assert engine.closed == ["r1"]


async def test_stop_strings_wait_for_min_tokens() -> None:
    ids = [BYTE[bytes([b])] for b in b"a.b.c."]
    frontend, _ = fake_frontend(answering(ids))
    chunks = await collect(frontend, text_request(stop=(".",), min_tokens=3))
    assert text_of(chunks) == "a.b"


TEXT = st.text(alphabet="ab\u00e9\U0001f600", max_size=12)


@given(TEXT, st.lists(TEXT.filter(bool), max_size=3), st.integers(1, 5), st.booleans())
async def test_any_answer_with_any_stops(text: str, stops: list[str], at_once: int, include: bool) -> None:
    ids = [BYTE[bytes([b])] for b in text.encode()]
    frontend, engine = fake_frontend(answering(ids, at_once=at_once))
    chunks = await collect(frontend, text_request(stop=tuple(stops), include_stop_text=include))
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    expected = text[: (min(ends)[0] if include else min(ends)[1])] if ends else text
    assert text_of(chunks) == expected
    assert chunks[-1].finish is (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert all(chunk.finish is None for chunk in chunks[:-1]) and engine.closed == ["r1"]


async def test_special_tokens_are_shown_only_if_asked_for() -> None:
    ids = [*ENCODE("abc"), 300, *ENCODE("abc")]
    for skip, expected in ((True, "abcabc"), (False, "abc<|im_start|>abc")):
        frontend, _ = fake_frontend(answering(ids))
        assert text_of(await collect(frontend, text_request(skip_special_tokens=skip))) == expected


async def test_logprobs_have_text_and_bytes() -> None:
    first, second = (BYTE[bytes([b])] for b in "\u00e9".encode())
    values = {
        first: TokenLogprobs(-0.5, (first, IM_END), (-0.5, -1.5)),
        second: TokenLogprobs(-0.25, (second,), (-0.25,)),
    }
    frontend, _ = fake_frontend(answering([first, second], at_once=2, logprobs=values))
    chunk, _ = await collect(frontend, text_request(logprobs=2))
    assert chunk.text == "\u00e9" and len(chunk.logprobs) == 2
    one, two = chunk.logprobs
    assert (one.token_id, one.text, one.token_bytes, one.logprob) == (first, "\ufffd", b"\xc3", -0.5)
    assert one.top == ((first, "\ufffd", b"\xc3", -0.5), (IM_END, "<|im_end|>", b"<|im_end|>", -1.5))
    assert two.top == ((second, "\ufffd", b"\xa9", -0.25),)


async def test_logprobs_end_with_the_stop_string() -> None:
    ids = [*ENCODE("abc"), BYTE[b"x"], BYTE[b"y"]]
    values = {i: TokenLogprobs(-1.0) for i in ids}
    frontend, _ = fake_frontend(answering(ids, at_once=9, logprobs=values))
    (chunk,) = await collect(frontend, text_request(logprobs=0, stop=("x",)))
    assert [entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids) == ids[:2]


async def test_client_that_goes_away_closes_the_engines_iterator() -> None:
    frontend, engine = fake_frontend(answering(ENCODE("hello world")))
    chunks = frontend.generate(text_request())
    await anext(chunks)
    await chunks.aclose()
    assert engine.closed == ["r1"] and engine.finished == []


async def test_failures_of_the_engine() -> None:
    def failing(request: EngineRequest) -> list[RequestOutput]:
        return [RequestOutput(request.request_id, finish=FinishReason.ERROR, error="NaN logits")]

    frontend, _ = fake_frontend(failing)
    with pytest.raises(LongturnError, match="request r1 failed: NaN logits"):
        await collect(frontend, text_request())
    frontend, _ = fake_frontend(lambda request: [])
    with pytest.raises(EngineDeadError):
        await collect(frontend, text_request())


# --- what goes in ----------------------------------------------------------------------------------------------------


def test_engine_request() -> None:
    frontend, _ = fake_frontend(answering([]))
    request = text_request("hello " * 300, cache_salt="s", tenant="t", session_id="me", priority=3, stop_token_ids=(7,))
    made = frontend.prepare(request).engine_request
    assert unpack_tokens(made.prompt) == ENCODE("hello " * 300)
    key = salt_key("s", "t")
    assert made.hash_key == key and made.page_hashes == page_hashes(made.prompt, key) and len(made.page_hashes) >= 2
    assert (made.session_id, made.priority, made.request_id) == ("me", 3, "r1")
    assert made.sampling.stop_token_ids == (7, IM_END, END_OF_TEXT)


def test_max_tokens_end_tokens_and_seed() -> None:
    frontend, _ = fake_frontend(answering([]), context=50)
    prompt = TokenPrompt(tuple(range(40)))

    def sampling(**options: Any) -> SamplingParams:
        return frontend.prepare(text_request(prompt, **options)).engine_request.sampling

    assert [sampling(max_tokens=n).max_tokens for n in (0, 5, 500)] == [10, 5, 10]
    assert sampling(ignore_eos=True).stop_token_ids == ()
    assert sampling(ignore_eos=True, stop_token_ids=(9,)).stop_token_ids == (9,)
    assert sampling(seed=12).seed == 12 and sampling(seed=-1).seed == (1 << 63) - 1


def test_chat_prompt_is_rendered_without_added_tokens() -> None:
    frontend, _ = fake_frontend(answering([]))
    made = frontend.prepare(text_request(ChatPrompt(({"role": "user", "content": "hello"},))))
    assert unpack_tokens(made.engine_request.prompt) == ENCODE(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_prompt_gets_the_tokenizers_own_beginning() -> None:
    processors = pytest.importorskip("tokenizers").processors
    backend = tiny_backend()
    backend.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", END_OF_TEXT)])
    frontend, _ = fake_frontend(answering([]), tokenizer=Tokenizer(backend, TokenizerSettings({}, {"default": "abc"})))
    assert unpack_tokens(frontend.prepare(text_request("abc")).engine_request.prompt) == [END_OF_TEXT, *ENCODE("abc")]
    chat = frontend.prepare(text_request(ChatPrompt(({"role": "user", "content": "x"},))))
    assert unpack_tokens(chat.engine_request.prompt) == ENCODE("abc")


def test_tokens_of_the_tokenizer_that_the_model_lacks_are_refused() -> None:
    """A tokenizer of another model, or one with tokens added: an executor would read behind its embeddings."""
    backend = tiny_backend()
    assert backend.add_tokens(["<extra>"]) == 1 and backend.token_to_id("<extra>") == 303
    frontend, _ = fake_frontend(answering([]), tokenizer=Tokenizer(backend, TokenizerSettings({}, {"default": "abc"})))
    with pytest.raises(RequestError, match=r"'<extra>' in prompt is token 303 .* tokens 0 to 302") as refused:
        frontend.prepare(text_request("abc <extra>"))
    assert refused.value.param == "prompt"
    assert unpack_tokens(frontend.prepare(text_request("abc")).engine_request.prompt) == ENCODE("abc")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"seed": 1 << 63}, "seed"),
        ({"logit_bias": ((303, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("x" * 1025,)}, "stop"),
        ({"prompt": TokenPrompt((1, 303))}, "prompt"),
        ({"prompt": TokenPrompt((1, -1))}, "prompt"),
        ({"prompt": TokenPrompt((1, 1 << 70))}, "prompt"),
        ({"prompt": TokenPrompt(())}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a\udc00"}, "prompt"),
        ({"prompt": ChatPrompt(())}, "messages"),
    ],
)
async def test_what_is_out_of_range_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    frontend, engine = fake_frontend(answering([]))
    request = text_request(**options)
    with pytest.raises(RequestError) as caught:
        frontend.prepare(request)
    assert caught.value.param == param and caught.value.http_status == 400
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    with pytest.raises(RequestError):
        await collect(frontend, request)
    assert engine.requests == []


def test_bounds_themselves_are_accepted() -> None:
    frontend, _ = fake_frontend(answering([]))
    low = {"temperature": 0.0, "top_p": 1e-6, "min_p": 0.0, "top_k": 0, "frequency_penalty": -2.0, "logprobs": 0}
    high = {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0, "top_k": 303, "presence_penalty": 2.0, "logprobs": 20}
    for options in (low, high, {"logit_bias": ((302, -100.0),)}, {"stop": ("x" * 1024,) * 16}):
        frontend.prepare(text_request(**options))


def test_prompt_over_the_context_names_both_numbers() -> None:
    frontend, _ = fake_frontend(answering([]), context=20)
    frontend.prepare(text_request(TokenPrompt((1,) * 19)))
    with pytest.raises(RequestError, match="20 tokens, but the context holds 20") as caught:
        frontend.prepare(text_request(TokenPrompt((1,) * 20)))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(RequestError) as caught:
        frontend.prepare(text_request(ChatPrompt(({"role": "user", "content": "x" * 50},))))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_long_text_is_tokenised_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, _ = fake_frontend(answering(ENCODE("abc")), context=1 << 20)
    threads: list[int] = []
    encode = Tokenizer.encode

    def noting(self: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    short, long = "hello world", "hello world " * 5000
    for text in (short, long):
        chunks = await collect(frontend, text_request(text))
        assert chunks[0].prompt_token_ids == tuple(ENCODE(text))
    assert await frontend.tokenize(long) == ENCODE(long)
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False, False]


# --- tokenize and detokenize -----------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize() -> None:
    frontend, _ = fake_frontend(answering([]))
    ids = ENCODE("hello<|im_end|>")
    assert await frontend.tokenize("hello<|im_end|>") == await frontend.tokenize(TextPrompt("hello<|im_end|>")) == ids
    assert await frontend.tokenize(TokenPrompt((1, 2))) == [1, 2]
    chat = ChatPrompt(({"role": "user", "content": "hello"},), add_generation_prompt=False)
    assert await frontend.tokenize(chat) == ENCODE("<|im_start|>user\nhello<|im_end|>\n")
    assert frontend.detokenize(ids) == "hello<|im_end|>"
    with pytest.raises(RequestError, match=r"tokens\[1\] is 999"):
        frontend.detokenize([1, 999])


def test_frontend_of_the_embedded_model(embedded_source: ModelSource) -> None:
    frontend = Frontend.of(embedded_source, fake_frontend(answering([]))[1])
    made = frontend.prepare(text_request(ChatPrompt(({"role": "user", "content": "hi"},))))
    assert made.engine_request.sampling.stop_token_ids == (2,)
    assert made.engine_request.sampling.max_tokens == embedded_source.max_context_tokens - made.prompt_tokens
    assert frontend.tokenizer.decode(unpack_tokens(made.engine_request.prompt), skip_special_tokens=False).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
