"""Request body of OpenAI's Responses API, decoded and type-checked by msgspec.

As in the chat API unknown fields are ignored, and those that would change the answer if they were honoured, and are
not, are declared so that `responses_requests` can refuse them by name. The extensions of the chat API (seed, top_k,
session_id, structured_outputs and their like) are taken too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from longturn.server.openai_types import Count, SamplingFields


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    """Accepted and not followed: there are no summaries, reasoning is given as it is."""


class TextConfig(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None
    """Accepted and not followed."""


class ResponsesRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    max_output_tokens: Count | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    safety_identifier: str | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Refused unless they ask for nothing.
    multi_agent: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    context_management: list[Any] | None = None
    top_logprobs: Count | None = None
    moderation: Any = None
