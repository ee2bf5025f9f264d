"""Tools for templates that know none, and the thinking switch under its several names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from longturn.engine.records import SamplingParams
from longturn.errors import ConfigError
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.frontend import Frontend
from longturn.frontend.parsers.base import join_calls
from longturn.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, OutputFormat, output_format
from longturn.frontend.records import ChatPrompt, TextChunk, TextRequest, Usage
from longturn.frontend.tool_prompt import CallSyntax
from tests.frontend.fakes import IM_END, fake_frontend, outputs_of, tiny_tokenizer

PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HERMES = TOOL_FORMATS["hermes"].syntax
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hello"}


def called(arguments: Any, content: str | None = None) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def render(messages: Sequence[Any], tools: Sequence[Any] = (), syntax: CallSyntax | None = HERMES) -> str:
    return ChatTemplates({"default": PLAIN}, {}).render(ChatPrompt(tuple(messages), tuple(tools)), syntax)


def test_tools_stand_behind_the_system_message() -> None:
    text = render([{"role": "system", "content": "Be brief."}, USER], [TOOL])
    system, user = text.split("<|im_end|>\n")[:2]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(TOOL["function"]) in system and "<tool_call>" in system
    assert user == "<|im_start|>user\nhello"
    alone = render([USER], [TOOL])
    assert alone.startswith("<|im_start|>system\n") and alone.split("<|im_end|>")[0].endswith(system[-40:])
    assert render([USER]) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_calls_and_results_are_written_out() -> None:
    results = [{"role": "tool", "tool_call_id": "call_1", "content": text} for text in ("one", "two")]
    text = render([USER, called('{"path": "é"}', "One moment."), *results, USER])
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n"
        '<|im_start|>assistant\nOne moment.\n<tool_call>\n{"name": "look", "arguments": {"path": "é"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert '{"name": "look", "arguments": {}}' in render([USER, called({})])
    assert "look" not in render([USER, called("{}")], syntax=None)


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    assert '"arguments": {half' in render([USER, called("{half")])


def test_a_longer_conversation_begins_with_the_same_text() -> None:
    messages = [USER, called('{"a": 1}'), {"role": "tool", "content": "one"}, called('{"a": 2}', "More.")]
    messages += [{"role": "tool", "content": "two"}, {"role": "assistant", "content": "done"}, USER]
    texts = [render(messages[:count], [TOOL]) for count in range(1, len(messages) + 1)]
    opening = "<|im_start|>assistant\n"
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter.removesuffix(opening))


def test_a_template_that_shows_tools_is_left_alone() -> None:
    template = (
        PLAIN + "{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    )
    templates = ChatTemplates({"default": template}, {})
    assert templates.shows_tools and templates.shows_calls
    text = templates.render(ChatPrompt((USER, called("{}"), {"role": "tool", "content": "x"}), (TOOL,)), HERMES)
    assert "<tool_call>" not in text and "<|im_start|>tool\nx" in text
    assert not ChatTemplates({"default": PLAIN + "{# tools #}"}, {}).shows_tools


# --- a loop through the frontend -------------------------------------------------------------------------------------

TOKENIZER = tiny_tokenizer(PLAIN)


def looping(*texts: str) -> Frontend:
    waiting = list(texts)
    frontend, _ = fake_frontend(
        lambda request: outputs_of(request, TOKENIZER.encode(waiting.pop(0)), stop_token_id=IM_END),
        tokenizer=TOKENIZER,
    )
    return Frontend(
        TOKENIZER, ChatTemplates.of(TOKENIZER), frontend.engine, frontend.limits, output=output_format("X", PLAIN)
    )


async def turn(frontend: Frontend, messages: Sequence[Any]) -> tuple[list[TextChunk], Usage]:
    prompt = ChatPrompt(tuple(messages), (TOOL,))
    request = TextRequest("r", prompt, SamplingParams(max_tokens=0), parse_tools=True, split_reasoning=True)
    chunks = [chunk async for chunk in frontend.generate(request)]
    usage = chunks[-1].usage
    assert usage is not None
    return chunks, usage


# What a template makes of the same values, and what it does not: other numbers, escapes, spaces, order stays.
@pytest.mark.parametrize("arguments", ['{"a": 1, "b": "é"}', '{"a":1.50,"b":"\\u00e9\\/"}', '{ "a" : 1e3 }', "{}"])
@pytest.mark.parametrize("again", [str, json.loads, lambda text: json.dumps(json.loads(text), indent=1)])
async def test_a_tool_loop_extends_its_own_tokens(arguments: str, again: Any) -> None:
    """The model's spelling of a call is what its next prompt says, whatever the client makes of it."""
    wrote = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    frontend = looping(f"I look.\n{wrote}", "done")
    chunks, _ = await turn(frontend, [USER])
    ids = [*(chunks[0].prompt_token_ids or ()), *(token for chunk in chunks for token in chunk.token_ids), IM_END]
    (call,) = join_calls(call for chunk in chunks for call in chunk.tool_calls)
    assert call.arguments == arguments and "".join(chunk.text for chunk in chunks) == "I look."
    answer = called(again(call.arguments), "I look.")
    chunks, usage = await turn(frontend, [USER, answer, {"role": "tool", "content": "x"}])
    assert list(chunks[0].prompt_token_ids or ())[: len(ids)] == ids
    assert frontend.memory.hits == 1 and usage.diverged_at is None


async def test_other_arguments_are_another_conversation() -> None:
    wrote = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    frontend = looping(wrote, "done")
    await turn(frontend, [USER])
    _, usage = await turn(frontend, [USER, called('{"a": 2}'), {"role": "tool", "content": "x"}])
    assert frontend.memory.hits == 0 and usage.diverged_at is not None


# --- thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "kwargs", "shown"),
    [
        ("{{ enable_thinking }}", {"enable_thinking": False}, "False"),
        ("{{ thinking }}", {"enable_thinking": True}, "True"),
        ("{{ thinking_mode }}", {"enable_thinking": True}, "enabled"),
        ("{{ thinking_mode }}", {"enable_thinking": False}, "disabled"),
        ("{{ thinking_mode }}", {"enable_thinking": False, "thinking_mode": "adaptive"}, "adaptive"),
        ("{{ thinking_mode }}", {}, ""),
        ("x", {"enable_thinking": False}, "x"),
    ],
)
def test_thinking_has_several_names(template: str, kwargs: dict[str, Any], shown: str) -> None:
    assert ChatTemplates({"default": template}, {}).render(ChatPrompt((USER,), (), kwargs)) == shown


# --- which model writes how ------------------------------------------------------------------------------------------

QWEN3 = "{% if tools %}<tool_call>{% endif %}{{ '</think>' }}"
LLAMA = """{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}{{ '<|python_tag|>' }}"""


@pytest.mark.parametrize(
    ("template", "shows", "reasoning", "tools"),
    [
        (QWEN3, True, "think", "hermes"),
        (QWEN3.replace("</think>", ""), True, None, "hermes"),
        (LLAMA, True, None, "llama_json"),
        ("{{ tools }}", True, None, "json"),
        # Another syntax between the same markers.
        ("{{ tools }}<tool_call><function=f>", True, None, "qwen3_coder"),
        ("{{ tools }}<function=f>", True, None, "json"),
        (PLAIN, False, None, "hermes"),
        ("", False, None, None),
    ],
)
def test_formats_follow_the_template(template: str, shows: bool, reasoning: str | None, tools: str | None) -> None:
    form = output_format("LlamaForCausalLM", template, shows)
    assert form.reasoning is (REASONING_FORMATS[reasoning] if reasoning else None)
    assert form.tools is (TOOL_FORMATS[tools] if tools else None)


def test_a_format_that_only_a_template_can_teach() -> None:
    with pytest.raises(ConfigError, match="minimax_m3"):
        output_format("LlamaForCausalLM", PLAIN, False, tools="minimax_m3")
    assert output_format("LlamaForCausalLM", PLAIN, False, tools="none") == OutputFormat()
    assert (
        output_format("LlamaForCausalLM", "{{ tools }}", True, tools="minimax_m3").tools is TOOL_FORMATS["minimax_m3"]
    )
