"""The one internal form of a request for text, and what comes back. Every API dialect becomes these records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longturn.engine.records import FinishReason, RequestTimes, SamplingParams


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the OpenAI chat API has them, content parts already flattened to text."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One generation request, whatever API it came through."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    """Without the model's own end tokens: the frontend adds them unless `ignore_eos`. `max_tokens` 0 means up to the
    context's end."""
    stop: tuple[str, ...] = ()
    """Stop strings; the output ends before the first of them."""
    ignore_eos: bool = False
    include_stop_text: bool = False
    skip_special_tokens: bool = True
    split_reasoning: bool = False
    """Of a chat: give reasoning apart from the text, if the model has a parser for it."""
    parse_tools: bool = False
    """Of a chat: give tool calls apart from the text, if the model has a parser for them."""
    session_id: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    """What separates conversation memory and cache beside the salt: the API key."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token with its text and its log-probabilities."""

    token_id: int
    text: str
    token_bytes: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()
    """(token id, text, bytes, log-probability), most likely first."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. Those with one index make one call: their fields, each joined in order."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    """Of the whole call: a JSON object."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole tool call."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    diverged_at: int | None = None
    """First prompt token that differs from what the conversation's earlier turns left in the cache, where the history
    was edited; None where this turn extends the last one or the conversation is new."""
    reasoning_tokens: int = 0
    """Of `completion_tokens`, those of the reasoning."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of the answer. The texts of all chunks add up to the whole; the last one has `finish` and `usage`."""

    text: str = ""
    """All that the model wrote, or what is left for the reader where reasoning and tool calls are given apart."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    """On the first chunk only."""
    finish: FinishReason | None = None
    stop_text: str | None = None
    """The stop string that ended the output, if one did."""
    usage: Usage | None = None
    times: RequestTimes | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
