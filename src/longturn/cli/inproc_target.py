"""A target without HTTP: the served engine in its own process, and the text side in this one.

What a replay measures against it and against `longturn serve` differs by the server alone: routes, JSON, event streams
and sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from longturn.assemble import build_frontend, served_model
from longturn.bench.records import Answer, Chunk
from longturn.bench.server_samples import ServerState
from longturn.bench.target import TargetModel
from longturn.cli.version import longturn_version
from longturn.config import EngineConfig
from longturn.engine.records import SamplingParams
from longturn.errors import LongturnError, RequestError
from longturn.frontend.records import ChatPrompt, Prompt, TextChunk, TextPrompt, TextRequest, TokenPrompt, Usage
from longturn.frontend.remote_engine import RemoteEngine


class TextService(Protocol):
    """Text in, text out; `frontend.Frontend` is one."""

    def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]: ...

    async def tokenize(self, prompt: Prompt | str, *, add_special_tokens: bool = True) -> Sequence[int]: ...


class InprocTarget:
    """Implements `bench.target.Target`, and `bench.synth_words.Tokenize` by `tokenize`."""

    def __init__(self, service: TextService, *, seed: int = 0, timeout_s: float = 600.0) -> None:
        """
        Args:
            service: of one model.
            seed: of sampling.
            timeout_s: longest time for one whole answer.
        """
        self._service = service
        self._seed = seed
        self._timeout_s = timeout_s
        self._numbers = itertools.count()

    async def send(
        self,
        body: Mapping[str, Any],
        *,
        intended_ns: int | None = None,
        session_id: str | None = None,
        path: str = "/v1/chat/completions",
    ) -> Answer:
        """See `bench.target.Target`. `body` is one of the replay's own, with nothing encoded yet."""
        request = self._request(body, session_id)
        sent_ns = time.perf_counter_ns()
        chunks: list[Chunk] = []
        text: list[str] = []
        ids: list[int] = []
        usage: Usage | None = None
        finish = error = None
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                contextlib.aclosing(self._service.generate(request)) as outputs,  # type: ignore[type-var]
            ):
                async for chunk in outputs:
                    # As over HTTP: a chunk without output is no event of the answer.
                    if chunk.token_ids or chunk.text or chunk.reasoning:
                        chunks.append(Chunk(time.perf_counter_ns(), len(chunk.token_ids)))
                    text.append(chunk.text)
                    ids += chunk.token_ids
                    usage = chunk.usage or usage
                    finish = chunk.finish.value if chunk.finish is not None else finish
        except TimeoutError:
            error = "timed out"
        except RequestError as refusal:
            error = f"refused: {refusal}"
        except LongturnError as failure:
            error = str(failure)
        return Answer(
            intended_ns=sent_ns if intended_ns is None else intended_ns,
            sent_ns=sent_ns,
            end_ns=time.perf_counter_ns(),
            chunks=tuple(chunks),
            text="".join(text),
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            output_tokens=usage.completion_tokens if usage is not None else None,
            token_ids=tuple(ids) if body.get("return_token_ids") else None,
            finish=finish,
            error=error,
        )

    async def tokenize(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Token ids of `prompt` or `messages`."""
        if "messages" in body:
            return await self._service.tokenize(ChatPrompt(tuple(body["messages"])))
        prompt = TextPrompt(body["prompt"])
        return await self._service.tokenize(prompt, add_special_tokens=body.get("add_special_tokens", True))

    def _request(self, body: Mapping[str, Any], session_id: str | None) -> TextRequest:
        number = next(self._numbers)
        prompt: Prompt
        if "messages" in body:
            prompt = ChatPrompt(tuple(body["messages"]))
        else:
            prompt = TokenPrompt(tuple(body["prompt"]))
        return TextRequest(
            request_id=f"bench-{number}",
            prompt=prompt,
            sampling=SamplingParams(
                max_tokens=body["max_tokens"], temperature=body["temperature"], seed=self._seed + number
            ),
            ignore_eos=body["ignore_eos"],
            session_id=session_id,
            split_reasoning=isinstance(prompt, ChatPrompt),
        )


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine of one's own."""

    target: InprocTarget
    model: TargetModel
    engine: RemoteEngine

    async def read_state(self) -> ServerState:
        """Its queue and cache, as it last told."""
        stats = self.engine.stats()
        return ServerState(
            at_ns=time.perf_counter_ns(),
            running=stats.running,
            waiting=stats.waiting,
            cache_used=stats.pages_used / stats.pages_total if stats.pages_total else None,
        )


@asynccontextmanager
async def inproc_target(config: EngineConfig, *, timeout_s: float) -> AsyncIterator[StartedEngine]:
    """Start the engine that `longturn serve` would start with `config`, and end it afterwards.

    Raises:
        LongturnError: the engine or the text side could not be built.
    """
    engine = RemoteEngine(config)
    building = asyncio.create_task(asyncio.to_thread(build_frontend, config, engine))
    try:
        info = await engine.start()
        name, _, context_tokens = served_model(config)
        model = TargetModel(
            name=name,
            context_tokens=min(context_tokens, info.max_context_tokens),
            engine="longturn",
            version=longturn_version(),
            quantisation=info.quantisation,
            weights=info.weights,
            kv_cache=info.kv_cache,
        )
        yield StartedEngine(InprocTarget(await building, seed=config.seed, timeout_s=timeout_s), model, engine)
    finally:
        await engine.close()
        # What keeps the engine from starting mostly fails the text side too; unread it would be printed at exit.
        await asyncio.gather(building, return_exceptions=True)
