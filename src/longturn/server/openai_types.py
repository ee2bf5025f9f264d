"""Request bodies of the OpenAI API and its usual extensions, decoded and type-checked by msgspec.

Unknown fields are ignored, as every OpenAI-compatible server does. Fields that would change the answer if they were
honoured, and are not, are declared here so that `openai_requests` can refuse them by name.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

TokenIds = list[int]
Count = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
"""A number that must fit the engine's fields; what range makes sense is checked by whoever knows."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every event, as vLLM and SGLang have it: tells how many tokens an event bundles."""


class SamplingFields(msgspec.Struct):
    """What chat and text completions share. None is the same as absent, as OpenAI's own server has it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None

    # Extensions that vLLM and SGLang also have.
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Count | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Count | None = None
    prompt_cache_key: str | None = None
    """OpenAI's name for what `session_id` is (see `sessions`)."""

    # Constrained output (see `structured`): OpenAI's form, vLLM's, and what vLLM had before.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # Refused unless they ask for nothing (see `refused`).
    use_beam_search: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    kv_transfer_params: Any = None
    return_tokens_as_token_ids: Any = None


class ChatRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    # Refused unless they ask for nothing.
    web_search_options: Any = None
    moderation: Any = None
    echo: Any = None
    include_reasoning: Any = None
    documents: Any = None
    add_special_tokens: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | TokenIds]
    logprobs: Count | None = None
    echo: bool | None = None
    """The text of a choice begins with its prompt."""
    best_of: Count | None = None
    """Choices that are made for each prompt, of which the `n` with the likeliest tokens are the answer."""

    # Refused unless they ask for nothing.
    suffix: Any = None
    prompt_embeds: Any = None


class TokenizeRequest(msgspec.Struct):
    """Body of POST /tokenize: a `prompt`, or chat `messages`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class AbortRequest(msgspec.Struct):
    """Body of POST /abort_requests."""

    request_ids: list[str] | None = None
    """Ids of answers, of single choices or of HTTP requests (X-Request-Id)."""
    abort_all: bool | None = None
