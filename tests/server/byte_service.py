"""A text side without a model: token ids are bytes, a chat is its contents joined, and nothing else is clever."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from longturn.engine.records import EngineRequest, FinishReason, pack_tokens, unpack_tokens
from longturn.errors import LongturnError, RequestError
from longturn.frontend.records import ChatPrompt, Prompt, TextChunk, TextPrompt, TextRequest, TokenLogprob, Usage

CONTEXT = 2000


def render(prompt: Prompt) -> list[int]:
    if isinstance(prompt, ChatPrompt):
        return list("".join(str(message["content"]) for message in prompt.messages).encode())
    return list(prompt.text.encode()) if isinstance(prompt, TextPrompt) else list(prompt.token_ids)


class ByteService:
    """Keeps the requests that it was given, for tests to look at."""

    def __init__(self, engine: Any, cached_tokens: int = 0) -> None:
        self.engine = engine
        self.cached_tokens = cached_tokens
        self.requests: list[TextRequest] = []
        self.closed: list[str] = []

    async def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        self.requests.append(request)
        ids = render(request.prompt)
        if len(ids) > CONTEXT:
            raise RequestError(f"{len(ids)} tokens are too many", param="messages", code="context_length_exceeded")
        if bytes(ids) == b"@crash":
            raise ZeroDivisionError("a secret of the inside")
        sampling = request.sampling
        if not sampling.max_tokens:
            sampling = type(sampling)(max_tokens=50, seed=sampling.seed)
        engine_request = EngineRequest(request.request_id, pack_tokens(ids), (), sampling)
        first, text, count = True, "", 0
        try:
            async with aclosing(self.engine.generate(engine_request)) as outputs:
                async for output in outputs:
                    if output.finish is FinishReason.ERROR:
                        raise LongturnError("failed")
                    new = bytes(output.token_ids).decode()
                    count += len(output.token_ids)
                    finish, stop = output.finish, None
                    for candidate in request.stop:
                        if (at := (text + new).find(candidate)) >= 0:
                            new, finish, stop = (text + new)[len(text) : at], FinishReason.STOP, candidate
                    text += new
                    yield TextChunk(
                        text=new,
                        token_ids=output.token_ids,
                        logprobs=tuple(
                            TokenLogprob(
                                token,
                                chr(token),
                                bytes([token]),
                                entry.token,
                                tuple(
                                    (i, chr(i), bytes([i]), p) for i, p in zip(entry.top_ids, entry.top, strict=True)
                                ),
                            )
                            for token, entry in zip(output.token_ids, output.logprobs, strict=False)
                        ),
                        prompt_token_ids=tuple(ids) if first else None,
                        finish=finish,
                        stop_text=stop,
                        usage=Usage(len(ids), count, self.cached_tokens) if finish else None,
                        times=output.times,
                    )
                    first = False
                    if finish:
                        return
        finally:
            self.closed.append(request.request_id)

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool, **scope: Any) -> list[int]:
        return [0] * (add_special_tokens and isinstance(prompt, TextPrompt)) + render(prompt)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()


def engine_request(request_id: str, prompt: str, sampling: Any) -> EngineRequest:
    """For tests that speak to an engine client directly."""
    return EngineRequest(request_id, pack_tokens(list(prompt.encode())), (), sampling)


def text(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode()


__all__ = ["CONTEXT", "ByteService", "engine_request", "text", "unpack_tokens"]
