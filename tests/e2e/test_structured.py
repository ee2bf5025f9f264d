"""Constrained output of the embedded model: through the server as clients ask for it, and in the engine."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import jsonschema
import openai
import pytest

from longturn import LLM
from longturn.config import ModelConfig
from longturn.engine.loop import Engine
from longturn.engine.records import FinishReason, RequestOutput, SamplingParams
from longturn.errors import RequestError
from longturn.frontend import grammar
from longturn.frontend.grammar import library_text
from longturn.frontend.tokenizer import Tokenizer, load_tokenizer
from longturn.source import resolve_source
from tests.e2e.conftest import Server
from tests.e2e.test_agreement import engine, prompts, request
from tests.grammars import random_document

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["tall", "short", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
BOMB: dict[str, Any] = {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(4)]}
for _ in range(12):
    BOMB = {"allOf": [BOMB, BOMB]}


async def ask(client: openai.AsyncOpenAI, text: str, *, stream: bool, **options: Any) -> tuple[str, str]:
    """The answer and why it ended."""
    made = await client.chat.completions.create(
        model="", messages=[{"role": "user", "content": text}], stream=stream, max_tokens=160, **options
    )
    if not stream:
        return made.choices[0].message.content or "", made.choices[0].finish_reason
    parts, finish = [], ""
    async for event in made:
        for choice in event.choices:
            parts.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    return "".join(parts), finish


async def both(server: Server, text: str, **options: Any) -> tuple[str, str]:
    """Streamed and not, which must not differ."""
    async with server.async_client() as client:
        plain, streamed = [await ask(client, text, stream=stream, **options) for stream in (False, True)]
    assert plain == streamed
    return plain


async def test_json_by_random_schemas_is_valid(server: Server) -> None:
    schemas = [random_document(random.Random(1000 + seed)) for seed in range(8)]

    async def one(seed: int, schema: dict[str, Any]) -> bool:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        text = f"Give me JSON like {json.dumps(schema)}"
        answer, finish = await both(server, text, response_format=form, seed=seed, temperature=1.0)
        if finish == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
        return finish == "stop"

    ended = await asyncio.gather(*(one(seed, schema) for seed, schema in enumerate(schemas)))
    assert sum(ended) > len(schemas) / 2


async def test_every_kind_of_constraint(server: Server) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": r"[A-Z][a-z]{2,8}, \d{3}"}, r"[A-Z][a-z]{2,8}, \d{3}"),
        ({"structured_outputs": {"choice": ["red", "green", "light green"]}}, r"red|green|light green"),
        ({"guided_grammar": 'root ::= "x" [0-9] [0-9]? "y"'}, r"x\d\d?y"),
    ]
    for extra, pattern in cases:
        for seed in range(2):
            answer, finish = await both(server, "Say something.", extra_body=extra, seed=seed)
            assert finish == "stop" and re.fullmatch(pattern, answer), answer
    answer, finish = await both(server, "An object, please.", response_format={"type": "json_object"}, temperature=0.0)
    assert finish == "length" or isinstance(json.loads(answer), dict)


async def test_with_logprobs_stop_choices_and_ignored_end(server: Server) -> None:
    async with server.async_client() as client:
        made = await client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "Yes or no?"}],
            n=3,
            logprobs=True,
            top_logprobs=2,
            max_tokens=20,
            extra_body={"guided_choice": ["yes", "no"], "ignore_eos": True, "min_tokens": 15},
        )
    for choice in made.choices:
        assert choice.message.content in ("yes", "no") and choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content
        assert all(item.logprob <= 0 and len(item.top_logprobs) == 2 for item in choice.logprobs.content)


async def test_a_schema_that_cannot_be_compiled_is_that_requests_alone(server: Server) -> None:
    async with server.async_client() as client:
        stream = await client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "Count."}], stream=True, max_tokens=60,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        await anext(stream)
        bad: list[tuple[dict[str, Any], str]] = [
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMB, "strict": True}}},
             "response_format.json_schema.schema"),
            ({"guided_json": {"type": "objct"}}, "guided_json"),
            ({"guided_regex": "(a"}, "guided_regex"),
            ({"guided_regex": "a{1000000000}"}, "guided_regex"),
            ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ]  # fmt: skip
        for extra, param in bad:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, "x", stream=True, extra_body=extra)
            assert caught.value.param == param
        rest = [event async for event in stream]
        assert rest[-1].choices[0].finish_reason == "length"
        assert (await ask(client, "x", stream=False, extra_body={"guided_choice": ["fine"]})) == ("fine", "stop")


def test_from_python(embedded_model: None) -> None:
    with LLM() as llm:
        question = [{"role": "user", "content": "A colour?"}]
        assert llm.chat(question, grammar=grammar.choice(["red", "green"])).text in ("red", "green")
        for made in llm.generate(["One", "Two"], grammar=grammar.regex(r"[a-f]{3}\d"), seed=2):
            assert re.fullmatch(r"[a-f]{3}\d", made.text)
        with pytest.raises(RequestError, match="not among its sampling"):
            llm.chat(question, SamplingParams(9, grammar=library_text(grammar.choice(["x"]))))


# --- in the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(embedded_model: None) -> Tokenizer:
    return load_tokenizer(resolve_source(ModelConfig()))


def run(target: Engine, requests: list[Any]) -> tuple[dict[str, list[int]], dict[str, RequestOutput], int]:
    """Token ids and last output of each request, and the number of preemptions."""
    tokens: dict[str, list[int]] = {item.request_id: [] for item in requests}
    last: dict[str, RequestOutput] = {}
    before = target.stats().preemptions
    for item in requests:
        target.add(item)
    while target.has_work():
        step = target.step()
        for output in step.outputs if step else ():
            tokens[output.request_id] += output.token_ids
            if output.finish is not None:
                last[output.request_id] = output
    return tokens, last, target.stats().preemptions - before


def constrained(tokenizer: Tokenizer, tag: str, count: int, max_tokens: int, length: int) -> list[Any]:
    specs = [
        grammar.json_schema(PERSON),
        grammar.regex(r"([a-z]{1,9} ){60,90}"),
        grammar.json_schema({"type": "array", "items": PERSON, "minItems": 4}),
        grammar.ebnf('root ::= ([a-c] | [0-9])+ "."'),
        None,
    ]
    ends = resolve_source(ModelConfig()).eos_token_ids
    return [
        request(
            f"{tag}{i}", text, max_tokens, temperature=1.0, seed=i, stop_token_ids=ends,
            grammar=None if (spec := specs[i % len(specs)]) is None else library_text(spec),
        )
        for i, text in enumerate(prompts(count, length, seed=4))
    ]  # fmt: skip


@pytest.mark.timeout(600)
def test_alone_batched_and_preempted_give_the_same_tokens(tokenizer: Tokenizer) -> None:
    # Prompts of two pages that end on four each, more than admission expects; seven pages are to be had.
    requests = constrained(tokenizer, "r", 5, 150, 250)
    tight = engine("packed", pages=8, step_tokens=256, expected_output_tokens=1)
    together, last, preemptions = run(tight, requests)
    assert preemptions > 0, "the pool was meant to be too small"
    assert all(output.error is None for output in last.values())
    for item in requests:
        alone, _, again = run(tight, [item])
        assert again == 0 and alone[item.request_id] == together[item.request_id]
    tight.close()
    assert any(last[name].preemptions for name in ("r0", "r1", "r2", "r3")), (
        "one with a grammar was meant to be preempted"
    )
    texts = {name: tokenizer.decode(tokens) for name, tokens in together.items()}
    if last["r0"].finish is FinishReason.STOP:
        jsonschema.validate(json.loads(texts["r0"]), PERSON)
    assert re.fullmatch(r"([a-z]{1,9} )*[a-z]*", texts["r1"])
    assert texts["r2"].startswith("[") and re.fullmatch(r"[a-c0-9]+\.?", texts["r3"])


def test_a_grammar_that_fails_in_the_engine_ends_its_request_alone(tokenizer: Tokenizer) -> None:
    target = engine("packed")
    ends = resolve_source(ModelConfig()).eos_token_ids
    (prompt,) = prompts(1, 10, seed=2)
    good = library_text(grammar.choice(["fine"]))
    requests = [
        request("bad", prompt, 9, stop_token_ids=ends, grammar="no grammar at all"),
        request("good", prompt, 9, stop_token_ids=ends, grammar=good),
        request("free", prompt, 9),
    ]
    tokens, last, _ = run(target, requests)
    assert last["bad"].finish is FinishReason.ERROR and "grammar" in (last["bad"].error or "")
    assert last["good"].finish is FinishReason.STOP and tokenizer.decode(tokens["good"]) == "fine"
    assert last["free"].finish is FinishReason.LENGTH and len(tokens["free"]) == 9
    target.check_invariants()
    target.close()
