"""From a body of Anthropic's Messages API to the frontend's records; what is refused is refused here, by name.

Content blocks become the messages of the chat API, in which conversations are remembered: tool results become messages
of the role `tool`, thinking becomes an answer's reasoning. `cache_control` is accepted everywhere and says nothing new,
since every prompt is cached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longturn.errors import RequestError
from longturn.frontend.grammar import GrammarSpec
from longturn.frontend.records import ChatPrompt, ToolChoice
from longturn.server.fields import invalid, new_tool_name, not_supported, text_in
from longturn.server.messages_errors import NO_THREADS
from longturn.server.messages_types import INVALID_INPUT, MessagesRequest
from longturn.server.openai_requests import choices_of
from longturn.server.refused import check_refused
from longturn.server.responses_tools import Unsupported
from longturn.server.structured import grammar_of, response_format_grammar
from longturn.server.tool_choice import tool_choice

Message = dict[str, Any]

_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_HIGHEST_EFFORT = {"xhigh": "high", "max": "high"}
"""Templates know low, medium and high."""


def check_supported(request: MessagesRequest) -> None:
    """Raises RequestError for what Longturn does not do."""
    if request.mcp_servers:
        raise not_supported("mcp_servers", "the server calls no other servers; give their tools as 'tools'")
    if request.container is not None:
        raise not_supported("container", "code is not executed on the server")
    if request.thread is not None:
        raise RequestError(
            "'thread': conversations are not held by the server; send all messages", param="thread", code=NO_THREADS
        )
    if request.compaction is not None:
        raise not_supported("compaction", "the server summarizes no conversations")
    if request.prompt_logprobs is not None:
        raise not_supported("prompt_logprobs", "it is not supported here; use /v1/chat/completions")
    check_refused(request)
    if choices_of(request) != 1:
        raise not_supported("n", "a message is one answer")


def max_tokens(request: MessagesRequest) -> int:
    """Most tokens to generate; the API has no default."""
    if request.max_tokens is None:
        raise RequestError("'max_tokens' is missing", param="max_tokens", code="missing_required_parameter")
    if request.max_tokens < 1:
        raise invalid("max_tokens", f"must be at least 1, not {request.max_tokens}")
    return request.max_tokens


def thinks(request: MessagesRequest) -> bool:
    """Whether the client wants to see thinking; by default it does not, as in Anthropic's API."""
    if request.thinking is None:
        return False
    if (wanted := _THINKS.get(request.thinking.type)) is None:
        raise invalid("thinking.type", f"must be one of {', '.join(_THINKS)}, not {request.thinking.type!r}")
    return wanted


def answer_grammar(request: MessagesRequest) -> GrammarSpec | None:
    """What the answer must be, from `output_config.format` or one of the extensions that say the same."""
    form, param = request.output_format, "output_format"
    if request.output_config is not None and request.output_config.format is not None:
        form, param = request.output_config.format, "output_config.format"
    spec = response_format_grammar(None if form is None else {"strict": True, **form}, param)
    other = grammar_of(request)
    if spec is not None and other is not None:
        raise invalid(other.param, f"cannot be given together with '{param}'")
    return spec or other


def chat_prompt(request: MessagesRequest, unsupported: Unsupported = "refuse") -> ChatPrompt:
    """The conversation.

    Args:
        request: the body.
        unsupported: what to do with tools that the client does not run itself.

    Raises:
        RequestError: a message or a tool is malformed, or needs what this server does not do.
    """
    if not request.messages:
        raise invalid("messages", "must hold at least one message")
    kwargs = dict(request.chat_template_kwargs or {})
    kwargs.setdefault("enable_thinking", thinks(request))
    if request.output_config is not None and (effort := request.output_config.effort) is not None:
        kwargs.setdefault("reasoning_effort", _HIGHEST_EFFORT.get(effort, effort))
    tools = chat_tools(request.tools, unsupported)
    later = deferred(request.tools)
    return ChatPrompt(
        messages=tuple(_messages(request, {tool["function"]["name"]: tool["function"] for tool in tools})),
        tools=tuple(tool for tool in tools if tool["function"]["name"] not in later),
        template_kwargs=kwargs,
        deferred_tools=tuple(tool for tool in tools if tool["function"]["name"] in later),
    )


# --- tools -----------------------------------------------------------------------------------------------------------


def chat_tools(tools: Sequence[Mapping[str, Any]] | None, unsupported: Unsupported) -> list[dict[str, Any]]:
    """The client's tools as the chat API has them."""
    made = []
    names: set[str] = set()
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        if (kind := tool.get("type")) not in (None, "custom"):
            if unsupported == "drop":
                continue
            raise not_supported(
                f"{where}.type",
                f"tools of type {kind!r} are not supported, only the client's own "
                "(--server-unsupported-tools drop leaves such tools out)",
            )
        names.add(name := new_tool_name(tool.get("name"), f"{where}.name", names))
        function: dict[str, Any] = {"name": name}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise invalid(f"{where}.input_schema", "must be a JSON schema: an object")
        function["parameters"] = schema
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        made.append({"type": "function", "function": function})
    return made


def deferred(tools: Sequence[Mapping[str, Any]] | None) -> set[str]:
    """Names of the tools that the model is to learn of when a search of the client's has found them.

    They stay out of the prompt's tools, whose cached pages every new one would cost; a result that refers to one
    describes it.
    """
    return {str(tool.get("name")) for tool in tools or () if tool.get("defer_loading") is True}


def choice_of(request: MessagesRequest, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """What the answer may call; `tools` as `chat_tools` made them."""
    choice = request.tool_choice
    if choice is None:
        return tool_choice(None, tools, None)
    parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.get("type")
    if kind == "tool":
        return tool_choice({"type": "function", "name": text_in(choice, "name", "tool_choice")}, tools, parallel)
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid("tool_choice.type", f"must be one of {', '.join((*_CHOICES, 'tool'))}, not {kind!r}")
    if kind == "any" and not tools:
        raise invalid("tool_choice", "is 'any', but there are no tools")
    return tool_choice(_CHOICES[kind], tools, parallel) if tools else tool_choice(None, tools, parallel)


# --- messages --------------------------------------------------------------------------------------------------------


def _messages(request: MessagesRequest, functions: Mapping[str, Any]) -> list[Message]:
    system = _joined(request.system, "system") if request.system else ""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(request.messages):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role == "user":
            for new in _user(content, f"{where}.content", functions):
                _append_user(messages, new)
        elif role == "assistant":
            messages.append(_assistant(content, f"{where}.content"))
        elif role == "system":
            messages.append({"role": "system", "content": _joined(content, f"{where}.content")})
        else:
            raise invalid(f"{where}.role", f"must be user, assistant or system, not {role!r}")
    if messages[-1]["role"] == "assistant":
        raise not_supported(
            f"messages[{len(request.messages) - 1}]",
            "continuing an answer that was begun is not supported; the last message must be the user's",
        )
    return messages


def _append_user(messages: list[Message], new: Message) -> None:
    # Successive user messages are one, as in Anthropic's API; many templates take no others.
    if new["role"] == "user" and messages and messages[-1]["role"] == "user":
        messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n{new['content']}"}
    else:
        messages.append(new)


def _user(content: Any, where: str, functions: Mapping[str, Any]) -> list[Message]:
    """A user's message: the results of tools, then what the user says; results may refer to `functions` by name."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Message] = []
    texts: list[str] = []
    for here, kind, block in _blocks(content, where):
        if kind == "tool_result":
            result = "" if block.get("content") is None else _joined(block["content"], f"{here}.content", functions)
            messages.append({"role": "tool", "tool_call_id": text_in(block, "tool_use_id", here), "content": result})
        elif kind == "text":
            texts.append(text_in(block, "text", here))
        else:
            raise _other_block(here, kind)
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _assistant(content: Any, where: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    if isinstance(content, str):
        return message | {"content": content}
    calls = []
    for here, kind, block in _blocks(content, where):
        if kind == "text":
            message["content"] += text_in(block, "text", here)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + text_in(block, "thinking", here)
        elif kind == "tool_use":
            given = block.get("input", {})
            if not isinstance(given, Mapping):
                raise invalid(f"{here}.input", "must be an object")
            function = {"name": text_in(block, "name", here), "arguments": _arguments(given)}
            calls.append({"id": text_in(block, "id", here), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _other_block(here, kind)
    return message | {"tool_calls": calls} if calls else message


def _arguments(given: Mapping[str, Any]) -> str:
    """A call's arguments as the model wrote them, or JSON of the same values."""
    if len(given) == 1:
        # What was no JSON, as the answer had it, and as Claude Code sends it back.
        broken = given.get(INVALID_INPUT)
        if isinstance(unparsed := given.get("__unparsedToolInput"), Mapping):
            broken = unparsed.get("raw")
        if isinstance(broken, str):
            return broken
    return json.dumps(given, ensure_ascii=False)


def _joined(content: Any, where: str, functions: Mapping[str, Any] | None = None) -> str:
    """The text of a content that may hold nothing else: a text, text blocks, and references to `functions`."""
    if isinstance(content, str):
        return content
    texts = []
    for here, kind, block in _blocks(content, where):
        if kind == "tool_reference" and functions is not None:
            name = text_in(block, "tool_name", here)
            if name not in functions:
                raise invalid(f"{here}.tool_name", f"is '{name}', which is none of the tools")
            texts.append(json.dumps(functions[name], ensure_ascii=False))
            continue
        if kind != "text":
            raise _other_block(here, kind)
        texts.append(text_in(block, "text", here))
    return "\n".join(texts)


def _blocks(content: Any, where: str) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Place, type and fields of each block."""
    if not isinstance(content, list):
        raise invalid(where, "must be a text or a list of content blocks")
    made = []
    for number, block in enumerate(content):
        here = f"{where}[{number}]"
        if not isinstance(block, Mapping):
            raise invalid(here, "must be an object")
        made.append((here, block.get("type"), block))
    return made


def _other_block(where: str, kind: Any) -> RequestError:
    # Claude Code looks for these words: it then takes the images out of its conversation and goes on.
    media = {"image": "could not process image: ", "document": "could not process pdf: "}.get(str(kind), "")
    return not_supported(f"{where}.type", f"{media}content of type {kind!r} is not supported here")
