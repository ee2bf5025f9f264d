"""MiniMax-M3's output through the whole frontend: chunks, usage, conversation memory, and which models have parsers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.engine.records import EngineRequest, FinishReason, RequestOutput, SamplingParams
from longturn.errors import ConfigError
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.frontend import Frontend
from longturn.frontend.parsers.base import join_calls
from longturn.frontend.parsers.registry import OutputFormat, output_format
from longturn.frontend.records import ChatPrompt, TextChunk, TextPrompt, TextRequest, ToolCall, Usage
from longturn.frontend.tokenizer import Tokenizer, TokenizerSettings
from longturn.frontend.validate import ModelLimits
from longturn.models.small_tokenizer import CHAT_TEMPLATE, small_tokenizer, special_ids
from tests.frontend.fakes import FakeEngine, outputs_of
from tests.frontend.m3 import NS, Written, block, invoke, outputs, tag, tool

VOCAB = 2048
EOS = special_ids(VOCAB)["eos_token_id"]
TOKENIZER = Tokenizer(
    small_tokenizer(VOCAB), TokenizerSettings({"bos_token": "]~!b[", "eos_token": "[e~["}, {"default": CHAT_TEMPLATE})
)
M3 = output_format("MiniMaxM3SparseForConditionalGeneration")
TOOLS = (tool("look", {"path": "x", "lines": 3}), tool("run", {"argv": ["x"]}))
USER = {"role": "user", "content": "what is in main.py?"}
CALLS = block(
    invoke("look", tag("path", "src/main.py") + tag("lines", "20")),
    invoke("run", tag("argv", tag("item", "ls") + tag("item", "-l é😀"))),
)


class Writer:
    """The script of an engine that writes texts, one after the other, as the tokenizer cuts them."""

    def __init__(self, *texts: str, finish: FinishReason = FinishReason.STOP, at_once: int = 1) -> None:
        self.texts = list(texts)
        self.finish = finish
        self.at_once = at_once

    def __call__(self, request: EngineRequest) -> list[RequestOutput]:
        ids = TOKENIZER.encode(self.texts.pop(0))
        stop = EOS if self.finish is FinishReason.STOP else None
        return outputs_of(request, ids, self.finish, stop_token_id=stop, at_once=self.at_once)


def m3_frontend(
    script: Callable[[EngineRequest], Sequence[RequestOutput]],
    output: OutputFormat = M3,
    tokenizer: Tokenizer = TOKENIZER,
) -> Frontend:
    limits = ModelLimits(max_context_tokens=100_000, vocab_size=VOCAB, eos_token_ids=(EOS,))
    return Frontend(tokenizer, ChatTemplates.of(tokenizer), FakeEngine(script), limits, output=output)


def chat(messages: Sequence[Any] = (USER,), **options: Any) -> TextRequest:
    kwargs, tools = options.pop("kwargs", {}), options.pop("tools", TOOLS)
    values = {"split_reasoning": True, "parse_tools": True, **options}
    return TextRequest("r1", ChatPrompt(tuple(messages), tuple(tools), kwargs), SamplingParams(max_tokens=0), **values)


@dataclasses.dataclass
class Read:
    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    usage: Usage
    chunks: list[TextChunk]

    @property
    def message(self) -> dict[str, Any]:
        """As the OpenAI SDK's users send it back: most drop the reasoning."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.text or None, **({"tool_calls": calls} if calls else {})}


async def read(frontend: Frontend, request: TextRequest) -> Read:
    chunks = [chunk async for chunk in frontend.generate(request)]
    usage = chunks[-1].usage
    assert usage is not None
    return Read(
        "".join(chunk.text for chunk in chunks),
        "".join(chunk.reasoning for chunk in chunks),
        join_calls(delta for chunk in chunks for delta in chunk.tool_calls),
        usage,
        chunks,
    )


@pytest.mark.parametrize("at_once", [1, 3, 1000])
async def test_reasoning_text_and_calls_are_given_apart(at_once: int) -> None:
    frontend = m3_frontend(Writer(f"<mm:think>I must look.</mm:think>One moment.\n{CALLS}", at_once=at_once))
    made = await read(frontend, chat())
    assert (made.text, made.reasoning) == ("One moment.", "I must look.")
    assert [(call.name, json.loads(call.arguments)) for call in made.calls] == [
        ("look", {"path": "src/main.py", "lines": 20}),
        ("run", {"argv": ["ls", "-l é😀"]}),
    ]
    assert len({call.id for call in made.calls}) == 2 and all(call.id.startswith("call_") for call in made.calls)
    assert made.usage.reasoning_tokens == len(TOKENIZER.encode("I must look."))
    assert made.chunks[-1].finish is FinishReason.STOP


async def test_thinking_that_the_prompt_opened() -> None:
    frontend = m3_frontend(Writer("I think é😀</mm:think>yes", "I think"))
    made = await read(frontend, chat(kwargs={"thinking_mode": "enabled"}))
    assert (made.text, made.reasoning) == ("yes", "I think é😀")
    assert made.usage.reasoning_tokens == len(TOKENIZER.encode("I think é😀"))
    made = await read(frontend, chat(kwargs={"thinking_mode": "disabled"}))
    assert (made.text, made.reasoning, made.usage.reasoning_tokens) == ("I think", "", 0)


async def test_reasoning_that_is_cut_off() -> None:
    frontend = m3_frontend(Writer("<mm:think>I think é😀", finish=FinishReason.LENGTH))
    made = await read(frontend, chat())
    assert (made.text, made.reasoning) == ("", "I think é😀")
    assert made.usage.reasoning_tokens == made.usage.completion_tokens - 1


async def test_a_call_that_is_cut_off_is_the_beginning_of_one() -> None:
    cut = CALLS[: CALLS.index("main.py")]
    made = await read(m3_frontend(Writer(f"ok {cut}", finish=FinishReason.LENGTH)), chat())
    (call,) = made.calls
    assert (made.text, made.chunks[-1].finish) == ("ok", FinishReason.LENGTH)
    assert (call.name, call.arguments) == ("look", '{"path":"src/')


async def test_only_what_a_request_asks_for_is_parsed() -> None:
    text = f"<mm:think>a</mm:think>b{CALLS}"

    async def made(**options: Any) -> tuple[str, str, int]:
        one = await read(m3_frontend(Writer(text)), dataclasses.replace(chat(), **options))
        return one.text, one.reasoning, len(one.calls)

    assert await made() == ("b", "a", 2)
    assert await made(parse_tools=False) == (f"b{CALLS}", "a", 0)
    assert await made(split_reasoning=False) == ("<mm:think>a</mm:think>b", "", 2)
    assert await made(split_reasoning=False, parse_tools=False) == (text, "", 0)
    assert await made(prompt=TextPrompt("x")) == (text, "", 0)
    one = await read(m3_frontend(Writer(text), OutputFormat()), chat())
    assert (one.text, one.usage.reasoning_tokens) == (text, 0)


async def test_markers_that_are_control_tokens_reach_the_parsers() -> None:
    backend = small_tokenizer(VOCAB)
    for token in ("<mm:think>", "</mm:think>", NS):
        backend.add_special_tokens([token])
    tokenizer = Tokenizer(backend, TOKENIZER.settings)
    assert tokenizer.token_id(NS) in tokenizer.special_ids
    made = await read(m3_frontend(Writer(f"<mm:think>a</mm:think>b{CALLS}"), tokenizer=tokenizer), chat())
    assert (made.text, made.reasoning, len(made.calls)) == ("b", "a", 2)


async def test_stop_strings_are_found_in_what_the_model_writes() -> None:
    frontend = m3_frontend(Writer("<mm:think>one END two</mm:think>x"))
    made = await read(frontend, chat(stop=("END",)))
    assert (made.text, made.reasoning) == ("", "one ")
    assert made.chunks[-1].stop_text == "END" and made.usage.reasoning_tokens < made.usage.completion_tokens


@settings(max_examples=50, deadline=None)
@given(outputs(), st.integers(1, 40))
async def test_any_output_at_any_pace(made: Written, at_once: int) -> None:
    frontend = m3_frontend(Writer(f"<mm:think>hm</mm:think>{made.text}", at_once=at_once))
    one = await read(frontend, chat(tools=made.tools))
    assert (one.text, one.reasoning) == (made.content, "hm")
    assert [(call.name, json.loads(call.arguments)) for call in one.calls] == made.calls


# --- the next turn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sends", "extends"),
    [
        ({"reasoning": "I must look."}, True),
        ({"reasoning_content": "I must look.", "reasoning": None}, True),
        # Left out: it is put back, since the template wants it and the model wrote it.
        ({}, True),
        ({"reasoning_content": None}, True),
        # Taken out or changed: that is another conversation, and reported.
        ({"reasoning_content": ""}, False),
        ({"reasoning": "I must not look."}, False),
    ],
)
async def test_a_tool_loop_extends_its_own_tokens(sends: dict[str, Any], extends: bool) -> None:
    """The message that comes back is the parsed one; the prompt that it makes begins with the ids of the last turn."""
    wrote = f"<mm:think>I must look.</mm:think>One moment.{CALLS}"
    frontend = m3_frontend(Writer(wrote, "done"))
    first = await read(frontend, chat())
    kept = [*(first.chunks[0].prompt_token_ids or ()), *TOKENIZER.encode(wrote), EOS]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "a file"} for call in first.calls]
    second = await read(frontend, chat([USER, first.message | sends, *results]))
    ids = list(second.chunks[0].prompt_token_ids or ())
    assert (ids[: len(kept)] == kept) is extends
    assert (second.usage.diverged_at is None) is extends
    assert frontend.memory.hits == extends


async def test_reasoning_is_put_back_in_every_turn_of_a_loop_and_in_no_other_conversation() -> None:
    turns = [f"<mm:think>thought {n}</mm:think>{block(invoke('look', tag('lines', str(n))))}" for n in range(4)]
    frontend = m3_frontend(Writer(*turns, "hm"))
    messages: list[Any] = [USER]
    for number in range(4):
        made = await read(frontend, chat(messages))
        assert made.usage.diverged_at is None and frontend.memory.hits == number
        messages += [made.message, {"role": "tool", "content": f"line {number}"}]
    prompt = TOKENIZER.decode(made.chunks[0].prompt_token_ids or (), skip_special_tokens=False)
    assert [f"<mm:think>thought {n}</mm:think>" in prompt for n in range(4)] == [True, True, True, False]
    other = await read(frontend, chat(messages, tenant="another"))
    prompt = TOKENIZER.decode(other.chunks[0].prompt_token_ids or (), skip_special_tokens=False)
    assert "thought" not in prompt


async def test_arguments_that_come_back_in_another_spelling_are_the_same_turn() -> None:
    frontend = m3_frontend(Writer(f"\n\n{CALLS}", "done"))
    first = await read(frontend, chat())
    message = first.message
    for call in message["tool_calls"]:
        call["id"] = "another"
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    second = await read(frontend, chat([USER, message, {"role": "tool", "content": "a file"}]))
    assert frontend.memory.hits == 1 and second.usage.diverged_at is None


# --- which model has which -------------------------------------------------------------------------------------------


def test_parsers_follow_the_architecture_and_can_be_named() -> None:
    assert M3.reasoning is not None and M3.tools is not None
    assert output_format("LlamaForCausalLM") == output_format("Qwen3ForCausalLM") == OutputFormat()
    named = output_format("LlamaForCausalLM", tools="minimax_m3")
    assert named.tools == M3.tools and named.reasoning is None
    assert output_format("MiniMaxM3SparseForCausalLM", reasoning="none") == OutputFormat(None, M3.tools)
    with pytest.raises(ConfigError, match=r"unknown tool parser 'm4' .*minimax_m3"):
        output_format("LlamaForCausalLM", tools="m4")
    with pytest.raises(ConfigError, match="unknown reasoning parser"):
        output_format("LlamaForCausalLM", reasoning="m4")
