"""From an OpenAI request body to the frontend's records; everything that is refused is refused here, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from longturn.engine.records import SamplingParams
from longturn.errors import NotFoundError, RequestError
from longturn.frontend.records import ChatPrompt, Prompt, TextPrompt, TokenPrompt, ToolChoice
from longturn.frontend.validate import MAX_LOGPROBS
from longturn.server.fields import invalid, not_supported
from longturn.server.openai_types import ChatRequest, CompletionRequest, SamplingFields, TokenizeRequest
from longturn.server.refused import check_refused
from longturn.server.tool_choice import tool_choice

MAX_CHOICES = 128
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for text completions; chat goes on to the context's end."""

_LIKELIEST = 1e-6
"""`top_p` that keeps one token. OpenAI and Anthropic mean that by 0, of which no token would be left."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PATH = re.compile(r" - at (?:`key` in )?`\$?\.?([^`]*)`$")
T = TypeVar("T")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The typed request in `body`.

    Raises:
        RequestError: the body is no JSON, or a value has the wrong type; the message names its path.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        path = found.group(1) if found else ""
        what = text[: found.start()] if found else text
        if what.startswith("Object missing required field"):
            name = what.split("`")[1]
            path = f"{path}.{name}" if path else name
            raise RequestError(f"'{path}' is missing", param=path, code="missing_required_parameter") from None
        where = f"'{path}': " if path else "request body: "
        raise RequestError(f"{where}{what[0].lower()}{what[1:]}", param=path or None, code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply", code="invalid_json") from None


def check_model(asked: str | None, served: str, aliases: Sequence[str] = ()) -> None:
    """Raises NotFoundError unless `asked` is the served model, an alias of it (which may end in `*`), or nothing."""
    if not asked or asked == served:
        return
    if any(asked == alias or (alias[-1] == "*" and asked.startswith(alias[:-1])) for alias in aliases):
        return
    raise NotFoundError(
        f"the model '{asked}' does not exist; this server serves '{served}' (it takes other names for it with "
        "--model-alias NAME, where NAME may end in *)",
        param="model",
        code="model_not_found",
    )


def choices_of(request: SamplingFields) -> int:
    """`n`, checked."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_CHOICES:
        raise invalid("n", f"must be between 1 and {MAX_CHOICES}, not {n}")
    return n


def candidates_of(request: CompletionRequest) -> int:
    """Choices to make for each prompt, of which `n` are the answer: `best_of`, checked."""
    n = choices_of(request)
    if request.best_of is None:
        return n
    if not n <= request.best_of <= MAX_CHOICES:
        raise invalid("best_of", f"must be between 'n' ({n}) and {MAX_CHOICES}, not {request.best_of}")
    if request.stream and request.best_of > n:
        raise invalid("best_of", "must equal 'n' when 'stream' is true: the best are known at the end only")
    return request.best_of


def check_common(request: SamplingFields) -> None:
    """Raises RequestError for parameters whose value Longturn cannot honour."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "is only allowed when 'stream' is true")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "is only allowed when 'stream' is not true")
    check_refused(request)


def prompt_logprobs_of(request: SamplingFields) -> int | None:
    """Alternatives to report with each token of the prompt, or None for no log-probabilities of it."""
    asked = request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        return request.logprobs if asked is None else max(asked, request.logprobs)
    return asked


def allowed_ids(request: SamplingFields) -> tuple[int, ...] | None:
    """`allowed_token_ids` as a tuple."""
    return None if request.allowed_token_ids is None else tuple(request.allowed_token_ids)


def chat_prompt(request: ChatRequest) -> ChatPrompt:
    """The prompt of a chat request.

    Raises:
        RequestError: a message is malformed, or the request needs what this server does not do.
    """
    if request.functions is not None or request.function_call is not None:
        name = "functions" if request.functions is not None else "function_call"
        raise not_supported(name, "it is deprecated; use 'tools'")
    if request.echo:
        raise not_supported("echo", "only text completions repeat their prompt")
    if request.include_reasoning is False:
        raise not_supported("include_reasoning", "reasoning is always shown, apart from the content")
    if request.audio is not None:
        raise not_supported("audio", "only 'text' is supported")
    if any(kind != "text" for kind in request.modalities or ()):
        raise not_supported("modalities", "only 'text' is supported")
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return build_chat_prompt(request.messages, request.tools, kwargs, request.add_generation_prompt)


def chat_tool_choice(request: ChatRequest) -> ToolChoice:
    """What the answer may call; `none` where there are no tools: what looks like a call is text then.

    Raises:
        RequestError: a tool or the choice is malformed.
    """
    return tool_choice(request.tool_choice, request.tools, request.parallel_tool_calls)


def build_chat_prompt(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
) -> ChatPrompt:
    """Messages with flattened contents as the frontend takes them."""
    if not messages:
        raise invalid("messages", "must hold at least one message")
    return ChatPrompt(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        tools=tuple(tools or ()),
        template_kwargs=template_kwargs or {},
        add_generation_prompt=add_generation_prompt is not False,
    )


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request: one text, one list of token ids, or a list of either."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [TokenPrompt(tuple(prompt))]  # type: ignore[arg-type]
    if not prompt or len(kinds) > 1:
        raise invalid(
            "prompt", "must be a text, a list of token ids, or a non-empty list of only texts or only id lists"
        )
    if len(prompt) * candidates_of(request) > MAX_CHOICES:
        name = "n" if request.best_of is None else "best_of"
        raise invalid("prompt", f"times '{name}' makes more than {MAX_CHOICES} choices")
    return [TextPrompt(item) if isinstance(item, str) else TokenPrompt(tuple(item)) for item in prompt]  # type: ignore[arg-type]


def tokenize_prompt(request: TokenizeRequest) -> Prompt:
    """What POST /tokenize asks to be tokenised."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either 'prompt' or 'messages'", param="prompt")
    if request.prompt is not None:
        return TextPrompt(request.prompt)
    assert request.messages is not None
    return build_chat_prompt(
        request.messages, request.tools, request.chat_template_kwargs, request.add_generation_prompt
    )


def stop_strings(request: SamplingFields) -> tuple[str, ...]:
    """`stop` as a tuple."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def chat_logprobs(request: ChatRequest) -> int | None:
    """Alternatives to report with each token, or None for no log-probabilities."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs 'logprobs': true")
    if (request.top_logprobs or 0) > MAX_LOGPROBS:
        raise invalid("top_logprobs", f"must be at most {MAX_LOGPROBS}, not {request.top_logprobs}")
    return (request.top_logprobs or 0) if request.logprobs else None


def chat_max_tokens(request: ChatRequest) -> int:
    """Most tokens to generate; 0 is up to the context's end."""
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    value = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    return _max_tokens(name, value, default=0)


def completion_max_tokens(request: CompletionRequest) -> int:
    """Most tokens to generate; 0 is none, where the prompt alone is wanted."""
    if request.echo and request.max_tokens == 0:
        return 0
    return _max_tokens("max_tokens", request.max_tokens, default=COMPLETION_MAX_TOKENS)


def sampling_params(request: SamplingFields, *, max_tokens: int, logprobs: int | None, seed: int) -> SamplingParams:
    """Sampling as asked; ranges are checked by the frontend, which knows the vocabulary."""
    default = SamplingParams(max_tokens=max_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_or(request.min_tokens, default.min_tokens),
        temperature=_or(request.temperature, default.temperature),
        # -1 is vLLM's word for "keep all".
        top_k=0 if request.top_k == -1 else _or(request.top_k, default.top_k),
        top_p=_or(request.top_p, default.top_p) or _LIKELIEST,
        min_p=_or(request.min_p, default.min_p),
        seed=seed,
        frequency_penalty=_or(request.frequency_penalty, default.frequency_penalty),
        presence_penalty=_or(request.presence_penalty, default.presence_penalty),
        repetition_penalty=_or(request.repetition_penalty, default.repetition_penalty),
        logit_bias=tuple((request.logit_bias or {}).items()),
        logprobs=logprobs,
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _max_tokens(name: str, value: int | None, *, default: int) -> int:
    if value is None:
        return default
    if value < 1:
        raise invalid(name, f"must be at least 1, not {value}")
    return value


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role", "must be a text")
    if role == "function":
        raise not_supported(f"{where}.role", "'function' is deprecated; use 'tool'")
    if role not in _ROLES:
        # Templates write an unknown role into the prompt as it is, or leave the message out.
        raise invalid(f"{where}.role", f"must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, not {role!r}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise invalid(f"{where}.tool_calls", "must be a list of objects")
    if message.get("function_call") is not None:
        raise not_supported(f"{where}.function_call", "it is deprecated; use 'tool_calls'")
    content = message.get("content")
    if isinstance(content, str) or content is None:
        if content is None and role != "assistant":
            raise invalid(f"{where}.content", "must be a text or a list of text parts")
        # An answer that says nothing and calls nothing comes back as nothing; templates want a text.
        return {**message, "content": ""} if content is None and not calls else message
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "must be a text or a list of text parts")
    return {**message, "content": "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))}


def _part(part: Any, where: str) -> str:
    """The text of a content part. Parts are joined by line ends, as vLLM does for templates that take plain text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(where, "must be an object")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text"):
        raise not_supported(f"{where}.type", f"content of type '{kind}' is not supported, only text")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", "must be a text")
    return text
