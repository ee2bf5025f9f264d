"""A tiny byte-level tokenizer and a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from longturn.engine.records import (
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestOutput,
    RequestTimes,
    TokenLogprobs,
)
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.conversation import ConversationMemory
from longturn.frontend.frontend import Frontend
from longturn.frontend.tokenizer import Tokenizer, TokenizerSettings
from longturn.frontend.validate import ModelLimits

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | default('') }}"
    "{% for call in message.tool_calls or [] %}{{ '\\n<call>' + (call.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IM_START, IM_END, END_OF_TEXT = 300, 301, 302
TIMES = RequestTimes(1, 2, 3, 4)


def tiny_backend(*, rstrip_end: bool = False) -> tokenizers.Tokenizer:
    """Ids 0..255 are the bytes, 256.. some merges, 300.. three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = dict(zip(alphabet, range(256), strict=True))
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "w"), ("o", "r"), ("\u0120w", "or")]
    merges += [("a", "b"), ("ab", "c"), ("\u00c3", "\u00a9"), ("\u0120", "\u0120"), ("\u010a", "\u010a")]
    vocab = dict(by_byte)
    for left, right in merges:
        vocab[left + right] = len(vocab)
    while len(vocab) < 300:
        vocab[f"<unused{len(vocab)}>"] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken("<|im_start|>", normalized=False, special=True),
            AddedToken("<|im_end|>", normalized=False, special=True, rstrip=rstrip_end),
            AddedToken("<|endoftext|>", normalized=False, special=True),
        ]
    )
    return backend


def tiny_tokenizer(template: str | None = CHATML, *, rstrip_end: bool = False) -> Tokenizer:
    settings = TokenizerSettings(
        {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}, {} if template is None else {"default": template}
    )
    return Tokenizer(tiny_backend(rstrip_end=rstrip_end), settings)


def sentencepiece_metadata() -> dict[str, object]:
    """GGUF metadata of a SentencePiece vocabulary small enough to work out by hand."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *([6] * 256)]
    pieces = {
        "\u2581": -9.0,
        "a": -8.0,
        "b": -7.5,
        "c": -7.0,
        "ab": -1.0,
        "bc": -2.0,
        "\u2581a": -3.0,
        "\u2581ab": -4.0,
    }
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + list(pieces),
        "tokenizer.ggml.token_type": types + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * len(tokens) + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


Script = Callable[[EngineRequest], Sequence[RequestOutput]]


class FakeEngine:
    """Plays a script for each request and notes what happens to it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[EngineRequest] = []
        self.finished: list[str] = []
        """Requests whose script was read to its end."""
        self.closed: list[str] = []
        """Requests whose iterator is over, in whatever way."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        try:
            for output in self.script(request):
                yield output
            self.finished.append(request.request_id)
        finally:
            self.closed.append(request.request_id)

    def stats(self) -> EngineStats:
        return EngineStats()

    @property
    def alive(self) -> bool:
        return True


def outputs_of(
    request: EngineRequest,
    token_ids: Sequence[int],
    finish: FinishReason = FinishReason.STOP,
    *,
    stop_token_id: int | None = None,
    at_once: int = 1,
    logprobs: Mapping[int, TokenLogprobs] | None = None,
    cached_tokens: int = 0,
) -> list[RequestOutput]:
    """Engine outputs for a scripted answer, `at_once` tokens in each, the last one with `finish`."""
    pieces = [tuple(token_ids[i : i + at_once]) for i in range(0, len(token_ids), at_once)]
    made = [
        RequestOutput(
            request.request_id,
            token_ids=piece,
            logprobs=tuple(logprobs[token] for token in piece) if logprobs is not None else (),
            cached_tokens=cached_tokens,
        )
        for piece in pieces
    ]
    last = RequestOutput(
        request.request_id, finish=finish, stop_token_id=stop_token_id, cached_tokens=cached_tokens, times=TIMES
    )
    return [*made, last]


def fake_frontend(
    script: Script,
    *,
    tokenizer: Tokenizer | None = None,
    memory: ConversationMemory | None = None,
    context: int = 4096,
) -> tuple[Frontend, FakeEngine]:
    tokenizer = tokenizer or tiny_tokenizer()
    engine = FakeEngine(script)
    limits = ModelLimits(max_context_tokens=context, vocab_size=303, eos_token_ids=(IM_END, END_OF_TEXT))
    return Frontend(tokenizer, ChatTemplates.of(tokenizer), engine, limits, memory), engine
