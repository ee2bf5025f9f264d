"""What the server needs of the parts it is given: text generation, the engine's health, the model's name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from longturn.engine.records import EngineStats
from longturn.frontend.records import Prompt, TextChunk, TextRequest


class TextService(Protocol):
    """Text in, text out; `frontend.Frontend` is one."""

    def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        """Chunks until one has `finish` set; closing the iterator early aborts the request."""
        ...

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool) -> Awaitable[Sequence[int]]:
        """Token ids of a prompt; `add_special_tokens` is about plain texts, templates write their own."""
        ...

    def detokenize(self, token_ids: Sequence[int]) -> str: ...


class EngineMonitor(Protocol):
    """Whether there is an engine, and what it counts; both engine clients are one."""

    @property
    def alive(self) -> bool: ...

    @property
    def restarts(self) -> int: ...

    def health(self) -> str:
        """`ok`, or one line that says why there is no engine."""
        ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What /v1/models shows."""

    name: str
    max_context_tokens: int
    created_s: int = 0
    """Unix time at which the server started."""
    root: str = ""
    """Where the model came from."""
