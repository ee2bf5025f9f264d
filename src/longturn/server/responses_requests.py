"""From a body of the Responses API to the frontend's records; everything that is refused is refused here, by name.

Items become the messages of the chat API, in which conversations are remembered: what one answer consisted of
(reasoning, a message, function calls) is one message of the assistant, as it was when the model wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longturn.errors import RequestError
from longturn.frontend.grammar import GrammarSpec
from longturn.server.fields import invalid, not_supported, text_in
from longturn.server.openai_requests import choices_of
from longturn.server.refused import check_refused
from longturn.server.responses_tools import custom_arguments, function_name
from longturn.server.responses_types import ResponsesRequest
from longturn.server.structured import grammar_of, response_format_grammar

Message = dict[str, Any]

MAX_METADATA = 16
"""Pairs in `metadata`, as in OpenAI's API; they are kept with the response."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_TOOLS_ITEM = "additional_tools"
"""An item of `input` that holds tools, as Codex sends them for some names of models."""
_LOGPROBS = "message.output_text.logprobs"


def check_supported(request: ResponsesRequest) -> None:
    """Raises RequestError for what Longturn does not do."""
    if request.background and request.stream:
        raise not_supported("background", "a response in the background is not streamed; ask for it by its id")
    if request.conversation is not None:
        raise not_supported("conversation", "conversations are not supported; use 'previous_response_id'")
    if (request.multi_agent or {}).get("enabled", False) is not False:
        raise not_supported("multi_agent", "agents do not run on the server")
    if request.prompt is not None:
        raise not_supported("prompt", "prompt templates are not supported; use 'instructions' and 'input'")
    if request.truncation not in (None, "disabled"):
        raise not_supported("truncation", "only 'disabled' is supported: input that is too long is refused")
    if request.context_management:
        raise not_supported("context_management", "compaction is not supported")
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        name = "top_logprobs" if request.top_logprobs else "include"
        raise not_supported(name, "log-probabilities are not supported here; use /v1/chat/completions")
    if request.prompt_logprobs is not None:
        raise not_supported("prompt_logprobs", "it is not supported here; use /v1/chat/completions")
    check_refused(request)
    if choices_of(request) != 1:
        raise not_supported("n", "a response is one answer")
    if request.metadata is not None and len(request.metadata) > MAX_METADATA:
        raise invalid("metadata", f"may have at most {MAX_METADATA} pairs, not {len(request.metadata)}")


def max_tokens(request: ResponsesRequest) -> int:
    """Most tokens to generate; 0 is up to the context's end."""
    for name in ("max_output_tokens", "max_tokens"):
        value: int | None = getattr(request, name)
        if value is None:
            continue
        if value < 1:
            raise invalid(name, f"must be at least 1, not {value}")
        return value
    return 0


def template_kwargs(request: ResponsesRequest) -> dict[str, Any]:
    """What the template is told about reasoning."""
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning is not None and (effort := request.reasoning.effort) is not None:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs


def answer_grammar(request: ResponsesRequest) -> GrammarSpec | None:
    """What the answer must be, from `text.format` or one of the extensions that say the same."""
    form = None if request.text is None else request.text.format
    spec, other = response_format_grammar(form, "text.format"), grammar_of(request)
    if spec is not None and other is not None:
        raise invalid(other.param, "cannot be given together with 'text.format'")
    return spec or other


def all_tools(request: ResponsesRequest) -> list[Mapping[str, Any]]:
    """The tools of a request, those that stand in its input behind the others.

    Raises:
        RequestError: an item with tools has no list of them.
    """
    tools: list[Mapping[str, Any]] = [*(request.tools or ())]
    for number, item in enumerate(request.input if isinstance(request.input, list) else ()):
        if item.get("type") == _TOOLS_ITEM:
            given = item.get("tools")
            if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
                raise invalid(f"input[{number}].tools", "must be a list of tools")
            tools += given
    return tools


# --- items -----------------------------------------------------------------------------------------------------------


def input_messages(request: ResponsesRequest) -> list[Message]:
    """The messages of `input`, without instructions and without what came before.

    Raises:
        RequestError: there is no input, an item is malformed, or of a type that is not supported.
    """
    given = request.input
    if given is None:
        raise RequestError("'input' is missing", param="input", code="missing_required_parameter")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    reader = _Items()
    for number, item in enumerate(given):
        reader.read(item, f"input[{number}]")
    if not reader.messages:
        raise invalid("input", "must hold at least one item")
    for message in reader.messages:
        message.setdefault("content", "")
    return reader.messages


def with_instructions(instructions: str | None, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages behind the instructions.

    System messages at the beginning join them: most templates take one, and only there.
    """
    texts = [instructions] if instructions else []
    rest = list(messages)
    while rest and rest[0]["role"] == "system":
        texts.append(rest.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest


class _Items:
    """Items to messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._answer: Message | None = None
        """The assistant's message that the next item may still belong to."""

    def read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, text_in(item, "arguments", where), where)
        elif kind == "custom_tool_call":
            self._call(item, custom_arguments(text_in(item, "input", where)), where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output"), f"{where}.output", "\n")
            self._append({"role": "tool", "tool_call_id": text_in(item, "call_id", where), "content": content})
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == _TOOLS_ITEM:
            return  # see `all_tools`
        elif kind is None:
            raise invalid(f"{where}.type", "is missing")
        else:
            raise not_supported(f"{where}.type", f"items of type {kind!r} are not supported")

    def _call(self, item: Mapping[str, Any], arguments: str, where: str) -> None:
        namespace = None if item.get("namespace") is None else text_in(item, "namespace", where)
        function = {"name": function_name(text_in(item, "name", where), namespace), "arguments": arguments}
        call = {"id": text_in(item, "call_id", where), "type": "function", "function": function}
        self._answering().setdefault("tool_calls", []).append(call)

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role == "assistant":
            content = _content(item.get("content"), f"{where}.content", "")
            if self._answer is not None and "tool_calls" in self._answer:
                # Behind calls that have no results yet: the model has gone on writing, see `blocks`.
                self._answer["content"] = self._answer.get("content", "") + content
            else:
                self._next_answer()["content"] = content
        elif role in ("user", "system", "developer"):
            content = _content(item.get("content"), f"{where}.content", "\n")
            # OpenAI's newer word; few templates know it.
            self._append({"role": "system" if role == "developer" else role, "content": content})
        else:
            raise invalid(f"{where}.role", f"must be user, assistant, system or developer, not {role!r}")

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        # A client that sends back none of its text has not said that there was none.
        answer = self._next_answer()
        parts = item.get("content")
        if parts is None or parts == []:
            return
        if not isinstance(parts, list) or not all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
        ):
            raise invalid(f"{where}.content", "must be a list of parts with a 'text'")
        answer["reasoning_content"] = answer.get("reasoning_content", "") + "".join(part["text"] for part in parts)

    def _next_answer(self) -> Message:
        """The answer that reasoning or a message belongs to: another one than what already has a message or calls."""
        if self._answer is not None and ("content" in self._answer or "tool_calls" in self._answer):
            self._answer = None
        return self._answering()

    def _answering(self) -> Message:
        if self._answer is None:
            self._answer = {"role": "assistant"}
            self.messages.append(self._answer)
        return self._answer

    def _append(self, message: Message) -> None:
        self._answer = None
        self.messages.append(message)


def _content(content: Any, where: str, joint: str) -> str:
    """The text of a content: a text, or parts with one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "must be a text or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        here = f"{where}[{number}]"
        if not isinstance(part, Mapping):
            raise invalid(here, "must be an object")
        kind = part.get("type")
        if kind == "refusal":
            texts.append(text_in(part, "refusal", here))
        elif kind in _TEXT_PARTS:
            texts.append(text_in(part, "text", here))
        else:
            raise not_supported(f"{here}.type", f"content of type {kind!r} is not supported, only text")
    return joint.join(texts)
