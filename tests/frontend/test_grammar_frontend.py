"""A request with a grammar through the frontend, with a scripted engine."""

from __future__ import annotations

import dataclasses

import pytest

from longturn.engine.records import FinishReason, SamplingParams
from longturn.errors import RequestError
from longturn.frontend import grammar
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.frontend import Frontend
from longturn.frontend.grammar import GrammarSpec, library_text
from longturn.frontend.grammar_reasoning import ReasoningMarks, behind_reasoning
from longturn.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from longturn.frontend.records import ChatPrompt, TextPrompt, TextRequest
from longturn.frontend.validate import ModelLimits
from tests.frontend.fakes import END_OF_TEXT, IM_END, FakeEngine, outputs_of, tiny_tokenizer

JSON = grammar.json_object()
CHAT = ChatPrompt(({"role": "user", "content": "hello"},))


def frontend_of(output: OutputFormat | None = None, ends: tuple[int, ...] = (IM_END, END_OF_TEXT)) -> Frontend:
    tokenizer = tiny_tokenizer()
    engine = FakeEngine(lambda request: outputs_of(request, tokenizer.encode("{}"), FinishReason.STOP))
    limits = ModelLimits(4096, 303, ends)
    return Frontend(tokenizer, ChatTemplates.of(tokenizer), engine, limits, output=output)


def asking(spec: GrammarSpec | None, prompt: ChatPrompt | TextPrompt = CHAT, **options: object) -> TextRequest:
    return TextRequest("r1", prompt, SamplingParams(50), grammar=spec, **options)  # type: ignore[arg-type]


async def sent(frontend: Frontend, request: TextRequest) -> SamplingParams:
    """What the engine was given; preparing the same request must make the same of it."""
    async for _ in frontend.generate(request):
        pass
    engine = frontend.engine
    assert isinstance(engine, FakeEngine)
    sampling = engine.requests[-1].sampling
    assert frontend.prepare(dataclasses.replace(request, request_id="r2")).engine_request.sampling == sampling
    return sampling


async def test_the_engine_gets_the_librarys_text_and_the_models_ends() -> None:
    frontend = frontend_of()
    assert (await sent(frontend, asking(JSON))).grammar == library_text(JSON)
    assert (await sent(frontend, asking(None))).grammar is None
    # The end of a grammar ends the answer, whatever else the request says of ends.
    assert (await sent(frontend, asking(JSON, ignore_eos=True))).stop_token_ids == (IM_END, END_OF_TEXT)
    assert (await sent(frontend, asking(None, ignore_eos=True))).stop_token_ids == ()


async def test_a_reasoning_model_reasons_first_in_chats_alone() -> None:
    form = REASONING_FORMATS["think"]
    frontend = frontend_of(OutputFormat(reasoning=form))
    marks = ReasoningMarks(*form.markers[:2])
    assert (await sent(frontend, asking(JSON))).grammar == behind_reasoning(
        library_text(JSON), marks, may_open_line=True
    )
    word = grammar.choice(["a"])
    expected = behind_reasoning(library_text(word), marks, may_open_line=False)
    assert (await sent(frontend, asking(word))).grammar == expected
    assert (await sent(frontend, asking(JSON, TextPrompt("x")))).grammar == library_text(JSON)


async def test_a_refused_grammar_never_reaches_the_engine() -> None:
    frontend = frontend_of()
    for spec, message in (
        (grammar.regex("(a"), "'regex' cannot be compiled"),
        (grammar.json_schema({"not": {}}), "not"),
    ):
        for act in (lambda spec=spec: frontend.prepare(asking(spec)), None):
            with pytest.raises(RequestError, match=message) as caught:
                if act is None:
                    async for _ in frontend.generate(asking(spec)):
                        pass
                else:
                    act()
            assert caught.value.param == spec.param
    engine = frontend.engine
    assert isinstance(engine, FakeEngine) and engine.requests == []


@pytest.mark.parametrize("form", ["minimax_m3", "qwen3_coder"])
async def test_a_strict_tool_that_is_not_kept_never_reaches_the_engine(form: str) -> None:
    frontend = frontend_of(OutputFormat(tools=TOOL_FORMATS[form]))
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": "iri"}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    prompt = dataclasses.replace(CHAT, tools=({"type": "function", "function": function},))
    with pytest.raises(RequestError, match="the tool 'f' is strict, and its 'format' cannot be kept") as caught:
        async for _ in frontend.generate(asking(None, prompt, parse_tools=True)):
            pass
    assert (caught.value.http_status, caught.value.param) == (400, "tools")
    engine = frontend.engine
    assert isinstance(engine, FakeEngine) and engine.requests == []


async def test_what_a_grammar_needs_is_said() -> None:
    with pytest.raises(RequestError, match="needs a model with an end token"):
        frontend_of(ends=()).prepare(asking(JSON))
    with pytest.raises(RequestError, match="not among its sampling"):
        frontend_of().prepare(TextRequest("r1", CHAT, SamplingParams(9, grammar=library_text(JSON))))
