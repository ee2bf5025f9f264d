"""Chat messages to prompt text through a checkpoint's Jinja template, as Hugging Face renders it.

Templates come from strangers and messages from clients, so the environment is sandboxed and a template sees plain JSON
values only. What a template may rely on is set by `transformers.utils.chat_template_utils`; the tests compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from longturn.errors import ModelError, RequestError
from longturn.frontend.conversation_ids import Turn
from longturn.frontend.records import ChatPrompt
from longturn.frontend.tokenizer import DEFAULT_TEMPLATE, Tokenizer
from longturn.frontend.tool_prompt import CallSyntax, with_system_tools, with_written_calls

_TOOL_TEMPLATE = "tool_use"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_DEVELOPER = "developer"
"""OpenAI's newer word for the system's role. Templates that don't know it write it as it is, or leave the message out
(Qwen3's), so that instructions are lost."""
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
_THINKING = "enable_thinking"
_THINKING_NAMES: Mapping[str, tuple[Any, Any]] = {"thinking": (True, False), "thinking_mode": ("enabled", "disabled")}
"""Other names of `enable_thinking`, and what stands for true and false (DeepSeek's and MiniMax-M3's templates)."""


class ChatTemplates:
    """A checkpoint's compiled templates."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            sources: Jinja source by name, `default` among them if the model can chat at all.
            special_tokens: template variables such as `bos_token`.

        Raises:
            ModelError: a template does not compile.
        """
        environment = _environment()
        self._special = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, frozenset[str]] = {}
        self.text = "\n".join(sources.values())
        """The source of all of them: tells which markers the model was trained with."""
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                names = environment.parse(source).find_all(jinja2.nodes.Name)
                self._variables[name] = frozenset(found.name for found in names if found.ctx == "load")
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(f"chat template '{name}' line {error.lineno}: {_line(error)}") from error

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplates:
        return cls(tokenizer.settings.chat_templates, tokenizer.settings.special_tokens)

    @property
    def shows_tools(self) -> bool:
        """A template writes the tools into the prompt."""
        return any("tools" in variables for variables in self._variables.values())

    @property
    def shows_calls(self) -> bool:
        """A template writes tool calls into the prompt."""
        return "tool_calls" in self.text

    def render(self, prompt: ChatPrompt, syntax: CallSyntax | None = None) -> str:
        """Prompt text of a conversation, special tokens written out.

        Args:
            prompt: the conversation.
            syntax: how the model writes tool calls, where the template does not show tools or calls; None leaves out
                what it does not show.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        name = _TOOL_TEMPLATE if prompt.tools and _TOOL_TEMPLATE in self._templates else DEFAULT_TEMPLATE
        template = self._templates.get(name)
        if template is None:
            raise RequestError("this model has no chat template; use text completions instead", code="no_chat_template")
        taken = sorted(_OWN_VARIABLES.intersection(prompt.template_kwargs))
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not set '{taken[0]}', which the request has a field for",
                param="chat_template_kwargs",
            )
        messages = [_message(message) for message in prompt.messages]
        if _DEVELOPER not in self.text:
            messages = [m | {"role": "system"} if m.get("role") == _DEVELOPER else m for m in messages]
        if syntax is not None and not self.shows_calls:
            messages = with_written_calls(messages, syntax, _tojson)
        if syntax is not None and prompt.tools and not self.shows_tools:
            messages = with_system_tools(messages, _plain(list(prompt.tools)), syntax)
        kwargs = _translated(_plain(prompt.template_kwargs), self._variables[name])
        try:
            return template.render(
                {**self._special, "documents": None, **kwargs},
                messages=messages,
                tools=_plain(list(prompt.tools)) if prompt.tools else None,
                add_generation_prompt=prompt.add_generation_prompt,
            )
        except RecursionError as error:
            raise RequestError("the messages are nested too deeply for the chat template", param="messages") from error
        except Exception as error:
            # A template computes with what the client sent, so any Python error may come of it; it is the request
            # that does not fit the template, whatever the type.
            raise RequestError(f"the chat template refuses these messages: {_line(error)}", param="messages") from error


def _translated(kwargs: dict[str, Any], variables: frozenset[str]) -> dict[str, Any]:
    """Template arguments with `enable_thinking` under the name that the template has for it."""
    if not isinstance(thinks := kwargs.get(_THINKING), bool) or _THINKING in variables:
        return kwargs
    known = {name: values[not thinks] for name, values in _THINKING_NAMES.items() if name in variables}
    return {**known, **kwargs}


def as_written(prompt: ChatPrompt, turns: Mapping[int, Turn]) -> ChatPrompt:
    """A conversation with the model's answers as the model has written them, as far as messages can say it.

    Few clients send reasoning back, though templates of reasoning models want it in a loop of tool calls; where a
    client sends the field, also an empty one, that is what counts. Arguments of tool calls get the model's own
    spelling, whatever spelling of the same values the client sends: rendered in another one they would not be the
    tokens that are cached.

    Args:
        prompt: the conversation.
        turns: those that wrote its answers, by the index of their message.
    """
    messages = list(prompt.messages)
    for index, turn in turns.items():
        message = dict(messages[index])
        if turn.reasoning and all(message.get(name) is None for name in REASONING_FIELDS):
            message["reasoning_content"] = turn.reasoning
        calls = message.get("tool_calls")
        if calls and len(calls) == len(turn.arguments):
            message["tool_calls"] = [_spelled(*pair) for pair in zip(calls, turn.arguments, strict=True)]
        messages[index] = message
    return dataclasses.replace(prompt, messages=tuple(messages)) if turns else prompt


def check_values(prompt: ChatPrompt) -> None:
    """Raises RequestError unless all that a client has put into a prompt are JSON values."""
    _plain([*prompt.messages, *prompt.callable_tools, prompt.template_kwargs])


class _Spelled(str):
    """Arguments of a tool call as JSON text that a template must not spell in another way."""

    __slots__ = ()


class _Arguments(dict[str, Any]):
    """What templates see of arguments that have a spelling."""

    __slots__ = ("spelling",)

    def __init__(self, values: Mapping[str, Any], spelling: str) -> None:
        super().__init__(values)
        self.spelling = spelling


def _spelled(call: Any, spelling: str) -> Any:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": _Spelled(spelling)}}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it.

    No nulls (templates print them), a content also where a message only calls tools (simple templates read it all the
    same), reasoning under each of its usual names, and the arguments of tool calls as the objects that OpenAI's dialect
    writes as strings (templates turn them to JSON, which would quote them twice).
    """
    given: dict[str, Any] = _plain(message)
    if given.get("tool_calls") and given.get("content") is None:
        given["content"] = ""
    plain = {key: value for key, value in given.items() if value is not None}
    reasoning = next((plain[key] for key in REASONING_FIELDS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    calls = plain.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
            with contextlib.suppress(ValueError):  # what is no JSON stays as it is
                values = json.loads(text)
                function["arguments"] = _Arguments(values, str(text)) if isinstance(text, _Spelled) else values
    return plain


def _plain(value: Any) -> Any:
    """A copy made of exact JSON types: other objects may have methods that the sandbox does not know are dangerous."""
    if value is None or type(value) in (str, int, float, bool, _Spelled):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    raise RequestError(f"messages hold a {type(value).__name__}, which is no JSON value", param="messages")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- the environment -------------------------------------------------------------------------------------------------


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _Dict()
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block and not a plain scope: assignments in the body must stay inside, as they do in Hugging Face's.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore names, which reach into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` must stay usable as a key
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, without the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Sequence[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, _Arguments) and indent is None and not sort_keys:
        return value.spelling
    # Jinja's own filter escapes HTML characters; models were trained without.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    # Templates want the local date, as in transformers. (The wall clock: engine time has no dates.)
    return datetime.datetime.now().strftime(form)
