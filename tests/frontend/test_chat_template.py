"""Chat rendering against transformers' own renderer."""

from __future__ import annotations

from typing import Any

import pytest

from longturn.errors import ModelError, RequestError
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.records import ChatPrompt
from longturn.frontend.tokenizer import Tokenizer

QWEN_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}{{- message.content or '' }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_LIKE = """\
{{ bos_token }}
{%- if documents %}{% for document in documents %}
    {{- '[' ~ document.title ~ ': ' ~ document.text | trim ~ ']' }}
{%- endfor %}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' ~ message['content'] | trim ~ eos_token }}
{%- endfor %}
"""
JSON_OPTIONS = (
    "{{ messages | tojson(indent=2) }}|{{ dict(a='<é>') | tojson(ensure_ascii=True, separators=(',', ':')) }}"
    "|{{ tools is none }}|{{ dict.fromkeys(['k'], 1) | tojson }}"
)
TOOLS = (
    {
        "type": "function",
        "function": {"name": "ls", "description": "lists <files> & é", "parameters": {"type": "object"}},
    },
    {"type": "function", "function": {"name": "cat", "parameters": {"b": 1, "a": [True, None, 1.5]}}},
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": {"path": "/tmp"}}}
AGENT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "List <it> \U0001f600"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "old thoughts"},
    {"role": "tool", "content": "a.py", "tool_call_id": "c1"},
    {"role": "tool", "content": "b.py", "tool_call_id": "c2"},
    {"role": "assistant", "content": "Two files.", "reasoning_content": "\nnew thoughts\n"},
]
PLAIN = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes\n"}]


def transformers_render(template: str, messages: list[dict[str, Any]], tools: Any, generate: bool, **extra: Any) -> str:
    """What `apply_chat_template` renders with these special tokens, but for one thing: null content is empty."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    chat = utils._normalize_chat_messages([{**m, "content": m["content"] or ""} for m in messages])
    (text,), _ = utils.render_jinja_template(
        [chat], tools, chat_template=template, add_generation_prompt=generate, **{**SPECIAL, **extra}
    )
    return str(text)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "tools", "extra"),
    [
        (QWEN_LIKE, AGENT, TOOLS, {}),
        (QWEN_LIKE, AGENT[1:], (), {"enable_thinking": False}),
        (QWEN_LIKE, [*AGENT, {"role": "user", "content": "more"}], TOOLS, {}),
        (LLAMA_LIKE, PLAIN, (), {}),
        (LLAMA_LIKE, PLAIN, (), {"documents": [{"title": "t", "text": " x "}]}),
        (LLAMA_LIKE, PLAIN, (), {"bos_token": "<other>"}),
        (JSON_OPTIONS, AGENT, (), {}),
    ],
)
def test_renders_as_transformers(
    template: str, messages: list[dict[str, Any]], tools: Any, extra: dict[str, Any], generate: bool
) -> None:
    ours = ChatTemplates({"default": template}, SPECIAL).render(ChatPrompt(tuple(messages), tools, extra, generate))
    assert ours == transformers_render(template, messages, list(tools) or None, generate, **extra)
    assert ours.strip()


def test_embedded_template(smollm: Tokenizer) -> None:
    source = smollm.settings.chat_templates["default"]
    for messages in (AGENT[:2], AGENT[1:2], [*AGENT[:2], AGENT[5], AGENT[1]]):
        ours = ChatTemplates.of(smollm).render(ChatPrompt(tuple(messages)))
        special = smollm.settings.special_tokens
        assert ours == transformers_render(source, messages, None, True, **special)


def test_a_template_that_knows_no_developer_gets_a_system_message(smollm: Tokenizer) -> None:
    """Qwen's leaves messages of unknown roles out, SmolLM2's adds its own system prompt."""
    developer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    system = [{**developer[0], "role": "system"}, developer[1]]
    for templates in (ChatTemplates({"default": QWEN_LIKE}, {}), ChatTemplates.of(smollm)):
        text = templates.render(ChatPrompt(tuple(developer)))
        assert text == templates.render(ChatPrompt(tuple(system))) and text.startswith("<|im_start|>system\nBe brief.")
    knows = ChatTemplates({"default": "{% for m in messages %}{{ 'developer' == m.role }}|{% endfor %}"}, {})
    assert knows.render(ChatPrompt(tuple(developer))) == "True|False|"


def test_tool_arguments_as_a_string_are_rendered_as_an_object() -> None:
    as_string = {**CALL, "function": {"name": "ls", "arguments": '{"path": "/tmp"}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    for call in (CALL, as_string):
        message = {"role": "assistant", "tool_calls": [call]}
        assert ChatTemplates({"default": template}, {}).render(ChatPrompt((message,))) == '{"path": "/tmp"}'
    assert as_string["function"]["arguments"] == '{"path": "/tmp"}'  # the client's message is not touched


def test_the_templates_own_refusal_is_one_line() -> None:
    templates = ChatTemplates({"default": LLAMA_LIKE}, SPECIAL)
    with pytest.raises(RequestError, match="Roles must alternate") as caught:
        templates.render(ChatPrompt(({"role": "assistant", "content": "x"},)))
    assert "\n" not in str(caught.value) and caught.value.param == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        ({"role": "user"},),
        ({"role": "user", "content": 5},),
        ({"role": "system", "content": ["x"]},),
        ({"content": "x"},),
    ],
)
def test_messages_that_do_not_fit_are_the_requests_fault(smollm: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplates.of(smollm).render(ChatPrompt(messages))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        ChatTemplates({"default": template}, {}).render(ChatPrompt(({"role": "user", "content": "x"},)))


def test_choice_of_template() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    message = ({"role": "user", "content": "x"},)
    assert templates.render(ChatPrompt(message)) == "plain"
    assert templates.render(ChatPrompt(message, tools=TOOLS)) == "tools"
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplates({}, {}).render(ChatPrompt(message))
    with pytest.raises(RequestError, match="must not set 'messages'"):
        templates.render(ChatPrompt(message, template_kwargs={"messages": []}))


def test_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match=r"chat template 'default' line 2"):
        ChatTemplates({"default": "\n{% for %}"}, {})
