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

    def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool, tenant: str | None = None, cache_salt: str | None = None
    ) -> Awaitable[Sequence[int]]:
        """Token ids of a prompt; `add_special_tokens` is about plain texts, templates write their own. Tenant and salt
        say whose it is, as in `TextRequest`."""
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

    def abort(self, request_id: str) -> bool:
        """End a request, whose reader then gets an output that says so. False if the engine has none of that id."""
        ...

    def reset_prefix_cache(self) -> Awaitable[int]:
        """Forget every cached page; the number of pages that were known. Running requests keep what they hold."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What /v1/models shows."""

    name: str
    max_context_tokens: int
    created_s: int = 0
    """Unix time at which the server started."""
    root: str = ""
    """Where the model came from."""
    quantisation: str = "unknown"
    """The weights' format as served, as the engine tells it; so are the next three."""
    weights: str = "unknown"
    kv_cache: str = "unknown"
    device: str = "unknown"
    aliases: tuple[str, ...] = ()
    """Other names that requests may call it (see `server.model_aliases`)."""
