"""Request body of Anthropic's Messages API, decoded and type-checked by msgspec.

Unknown fields are ignored, and those that would change the answer if they were honoured, and are not, are declared so
that `messages_requests` can refuse them by name. The extensions of the OpenAI dialects (seed, min_p, session_id,
structured_outputs and their like) are taken too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from longturn.server.openai_types import Count, SamplingFields

INVALID_INPUT = "INVALID_JSON"
"""The one member of a call's `input` whose arguments are no JSON object; it holds what the model wrote."""


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: Count | None = None
    """Accepted and not enforced: how long a model thinks is its own affair, within `max_tokens`."""


class Metadata(msgspec.Struct):
    user_id: str | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/messages, and of POST /v1/messages/count_tokens, which needs no `max_tokens`."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """Older place of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] | None = None

    # Refused unless they ask for nothing.
    mcp_servers: list[Any] | None = None
    container: Any = None
    thread: Any = None
    compaction: Any = None
