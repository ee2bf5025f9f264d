"""Loops of tool calls on templates of several families: every turn's prompt begins with the ids of the one before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longturn.engine.records import SamplingParams
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.frontend import Frontend
from longturn.frontend.parsers.base import join_calls
from longturn.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, output_format
from longturn.frontend.records import ChatPrompt, TextChunk, TextRequest, ToolChoice
from tests.frontend import qwen3_coder
from tests.frontend.fakes import IM_END, fake_frontend, outputs_of, tiny_tokenizer

PROPERTIES = {"deep": {"type": "boolean", "default": False}, "wait": {"anyOf": [{"type": "number"}]}}
SCHEMA = {"type": "object", "properties": PROPERTIES}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
USER = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "and now?"}

# As Qwen3's: tools before everything, reasoning of the answers behind the last question, results in a user turn.
QWEN = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<tool_call></tool_call><|im_end|>\n' }}{% endif %}
{%- set asked = namespace(at=0) %}
{%- for m in messages if m.role == 'user' %}{% set asked.at = messages.index(m) %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' ~ m.role ~ '\n' }}
    {%- if m.reasoning_content and loop.index0 > asked.at %}
      {{- '<think>\n' ~ m.reasoning_content.strip('\n') ~ '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
      {{- '\n' if m.content or not loop.first }}
      {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
      {{- call.function.arguments | tojson ~ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# As Llama 3's: one call, which is all of the answer.
LLAMA = """
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if tools is not none %}{{ '<|im_start|>system\nWrite {"name": ..., "parameters": ...}.' ~ tools | tojson }}
{{- '<|im_end|>' }}{% endif %}
{%- for m in messages %}
  {{- '<|im_start|>' ~ m.role ~ '\n\n' }}
  {%- if m.tool_calls is defined %}
    {%- set call = m.tool_calls[0].function %}
    {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}' }}
  {%- elif m.role == 'tool' %}{{ {'output': m.content} | tojson }}
  {%- else %}{{ m.content | trim }}{% endif %}
  {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"""

# As Qwen3-Coder's.
CODER = """
{%- if tools %}{{ '<|im_start|>system\n' ~ tools | tojson ~ '\n<tool_call>\n<function=name>\n<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response>\n<|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content | trim }}
    {%- for call in m.tool_calls or [] %}
      {{- ('\n\n' if m.content else '') if loop.first else '\n' }}
      {{- '<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
      {%- for name, value in call.function.arguments.items() %}
        {{- '<parameter=' ~ name ~ '>\n' }}
        {{- value if value is string else value | tojson }}
        {{- '\n</parameter>\n' }}
      {%- endfor %}
      {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Knows no tools.
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def hermes(*calls: str) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "look", "arguments": {call}}}\n</tool_call>' for call in calls)


def llama(call: str) -> str:
    return f'{{"name": "look", "parameters": {call}}}'


# Numbers, escapes and white space that no template would write, and texts for what the schema says is none.
SPELLINGS = [
    '{"a":1.50}', '{"b": "\\u00e9\\/"}', '{ "c" : [1e3, "é"] }', '{"wait": "5000.0", "deep": "false", "text": "5000"}'
]  # fmt: skip
LOOPS: dict[str, tuple[str, str, str | None, list[str]]] = {
    "qwen": (
        QWEN,
        "hermes",
        "think",
        [
            f"<think>\nI é must.\n</think>\n\n{hermes(SPELLINGS[0])}",
            f"<think>\n\nmore\n\n</think>\n\nText.\n{hermes(SPELLINGS[1], '{}')}",
            hermes(SPELLINGS[2]),
            hermes(SPELLINGS[3]),
            "<think>\nenough\n</think>\n\nIt is done.\n",
        ],
    ),
    "llama": (LLAMA, "llama_json", None, [*map(llama, SPELLINGS), "It is done."]),
    "coder": (
        CODER,
        "qwen3_coder",
        None,
        [
            f"I must.\n\n{qwen3_coder.block(qwen3_coder.call('look', {'path': 'a b'}))}",
            "\n".join(qwen3_coder.block(qwen3_coder.call("look", {"a": value})) for value in ("é\n</b>", "\n x")),
            qwen3_coder.block(qwen3_coder.call("look", {})),
            "It is done.",
        ],
    ),
    "plain": (PLAIN, "hermes", None, [f"One moment. {hermes(*SPELLINGS[:2])}", hermes(*SPELLINGS[2:]), " Done."]),
}


def frontend_of(template: str, texts: list[str]) -> Frontend:
    tokenizer, waiting = tiny_tokenizer(template), list(texts)
    templates = ChatTemplates.of(tokenizer)
    fake, _ = fake_frontend(
        lambda request: outputs_of(request, tokenizer.encode(waiting.pop(0)), stop_token_id=IM_END),
        tokenizer=tokenizer,
    )
    form = output_format("LlamaForCausalLM", templates.text, templates.shows_tools)
    return Frontend(tokenizer, templates, fake.engine, fake.limits, output=form)


async def turn(frontend: Frontend, messages: list[Any], **options: Any) -> list[TextChunk]:
    prompt = ChatPrompt(tuple(messages), (TOOL,))
    request = TextRequest("r", prompt, SamplingParams(max_tokens=0), split_reasoning=True, parse_tools=True, **options)
    return [chunk async for chunk in frontend.generate(request)]


def decoded(text: str) -> str:
    """As agents send arguments back that they have read by the tool's schema: in its order, with its defaults, of its
    types, and with numbers as JavaScript writes them."""
    values = {"deep": False, **dict(reversed(json.loads(text, parse_float=javascript).items()))}
    return json.dumps({k: json.loads(v, parse_float=javascript) if k in PROPERTIES and isinstance(v, str) else v
                       for k, v in values.items()})  # fmt: skip


def javascript(number: str) -> int | float:
    return int(float(number)) if float(number).is_integer() else float(number)


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize("again", [str, json.loads, lambda text: json.dumps(json.loads(text), indent=1), decoded])
async def test_every_turn_extends_the_tokens_of_the_one_before(loop: str, again: Any) -> None:
    template, tools, reasoning, texts = LOOPS[loop]
    frontend = frontend_of(template, texts)
    assert frontend._output.tools is TOOL_FORMATS[tools]
    assert frontend._output.reasoning is (REASONING_FORMATS[reasoning] if reasoning else None)
    messages: list[Any] = [USER]
    before: list[int] = []
    for number in range(len(texts)):
        # Forcing a call or not is no part of the prompt.
        choice = ToolChoice("auto" if number % 2 else "required")
        chunks = await turn(frontend, messages, tool_choice=choice)
        ids = list(chunks[0].prompt_token_ids or ())
        assert ids[: len(before)] == before and frontend.memory.hits == number
        usage = chunks[-1].usage
        assert usage is not None and usage.diverged_at is None
        before = [*ids, *(token for chunk in chunks for token in chunk.token_ids), IM_END]
        calls = join_calls(delta for chunk in chunks for delta in chunk.tool_calls)
        assert bool(calls) is (number < len(texts) - 1)
        # What clients send back: reasoning left out, arguments in their own spelling.
        entries = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": again(call.arguments)}}
            for call in calls
        ]
        content = "".join(chunk.text for chunk in chunks)
        messages.append({"role": "assistant", "content": content or None, **({"tool_calls": entries} if calls else {})})
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "a file"} for call in calls]


@pytest.mark.parametrize("opens", ["<think>\n\n</think>\n\n", "<think>\n", ""])
async def test_empty_reasoning_that_the_template_leaves_out_of_the_history_qwen_131(opens: str) -> None:
    """Qwen3's template with thinking switched off, and models that have nothing to think of."""
    template = QWEN.replace("assistant\n' }}{% endif", f"assistant\n{opens}' }}}}{{% endif")
    assert template != QWEN or not opens
    closes = {"<think>\n": "\n</think>\n\n", "": "<think>\n\n</think>\n\n"}.get(opens, "")
    frontend = frontend_of(template, [f"{closes}{hermes('{}')}", f"{closes}One.", f"{closes}Two."])
    messages: list[Any] = [USER]
    before: list[int] = []
    for number in range(3):
        chunks = await turn(frontend, messages)
        ids = list(chunks[0].prompt_token_ids or ())
        assert ids[: len(before)] == before and frontend.memory.hits == number
        before = [*ids, *(token for chunk in chunks for token in chunk.token_ids), IM_END]
        if number == 0:
            called = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [called]}, {"role": "tool", "content": "x"}]
        else:
            messages += [{"role": "assistant", "content": "".join(chunk.text for chunk in chunks)}, AGAIN]


async def test_old_reasoning_goes_where_the_template_drops_it_qwen_112() -> None:
    template, _, _, texts = LOOPS["qwen"]
    frontend = frontend_of(template, [texts[-1], "hm"])
    await turn(frontend, [USER])
    chunks = await turn(frontend, [USER, {"role": "assistant", "content": "It is done."}, AGAIN])
    prompt = frontend.detokenize(chunks[0].prompt_token_ids or ())
    assert "enough" not in prompt and "It is done." in prompt
    usage = chunks[-1].usage
    assert usage is not None and usage.diverged_at is not None
