"""Compiling within limits: what is refused, what is kept, and that nobody else waits for it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from longturn.errors import OverloadedError, RequestError
from longturn.frontend import grammar
from longturn.frontend.grammar import GrammarSpec
from longturn.frontend.grammar_compiler import MAX_UNFINISHED, PROCESSES, GrammarCompiler, GrammarLimits
from longturn.frontend.grammar_reasoning import ReasoningMarks
from tests.grammars import vocabulary

JSON = grammar.json_object()


class Held(GrammarCompiler):
    """Compilations wait for `gate`, and are counted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(vocabulary, **options)
        self.gate = threading.Event()
        self.started: list[str] = []

    def _checked(self, spec: GrammarSpec, marks: ReasoningMarks | None) -> Any:
        self.started.append(spec.text)
        assert self.gate.wait(20)
        return super()._checked(spec, marks)


@pytest.fixture
def held() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(**options: Any) -> Held:
        made.append(Held(**options))
        return made[-1]

    yield make
    for compiler in made:
        compiler.gate.set()


async def test_equal_grammars_are_compiled_once(held: Callable[..., Held]) -> None:
    compiler = held()
    waiting = [
        asyncio.ensure_future(compiler.compile(grammar.choice(["a", "b"], param=param)))
        for param in ("one", "two", "one")
    ]
    while not compiler.started:
        await asyncio.sleep(0)
    compiler.gate.set()
    texts = set(await asyncio.gather(*waiting))
    assert texts == {compiler.compile_now(grammar.choice(["a", "b"]))} and len(compiler.started) == 1
    await compiler.compile(grammar.choice(["a", "c"]))
    assert len(compiler.started) == 2


async def test_one_that_takes_too_long_is_refused_and_its_process_ended() -> None:
    compiler = GrammarCompiler(vocabulary, GrammarLimits(timeout_s=0.3))
    slow = grammar.json_schema(
        {"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(500)]}, param="tool"
    )
    for _ in range(2):
        with pytest.raises(RequestError, match=r"'tool' .* longer than 0\.3 s \(server\.grammar_timeout_s\)") as caught:
            await compiler.compile(slow)
        assert caught.value.http_status == 400 and caught.value.code == "grammar_too_complex"
    assert await compiler.compile(JSON)


def referring(levels: int) -> dict[str, Any]:
    """Objects in each other without nesting in the text."""
    inner = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(levels)
    }
    return {"$defs": {**inner, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "spec",
    [
        grammar.json_schema(referring(2000)),
        grammar.ebnf("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9000)) + 'r9000: "a"'),
        grammar.ebnf("start: R0\n" + "".join(f'R{i}: "x" R{i + 1}\n' for i in range(9000)) + 'R9000: "a"'),
    ],
    ids=["references", "rules", "terminals"],
)
async def test_one_that_overflows_the_librarys_stack_breaks_nothing_else(spec: GrammarSpec) -> None:
    """Each of these ends the process that compiles it by a segmentation fault."""
    compiler = GrammarCompiler(vocabulary, GrammarLimits(timeout_s=30))
    before = await compiler.compile(JSON)
    for _ in range(2):
        with pytest.raises(RequestError, match="too deep or too large") as caught:
            await compiler.compile(spec)
        assert caught.value.http_status == 400
    assert await compiler.compile(grammar.json_object(param="again")) == before


async def test_a_process_that_was_killed_is_replaced() -> None:
    compiler = GrammarCompiler(vocabulary)
    await compiler.compile(JSON)
    (checker,) = compiler._idle
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert await compiler.compile(grammar.regex("a+"))


def test_the_processes_end_with_their_compiler() -> None:
    compiler = GrammarCompiler(vocabulary)
    compiler.compile_now(JSON)
    (process,) = (checker._process for checker in compiler._idle)
    assert process is not None and process.poll() is None
    del compiler
    gc.collect()
    assert process.poll() is not None


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    made = dataclasses.replace(vocabulary(), end_ids=())
    with pytest.raises(RequestError, match="no token that ends an answer"):
        GrammarCompiler(lambda: made).compile_now(JSON)


def test_what_would_be_too_slow_to_follow_is_refused() -> None:
    with pytest.raises(RequestError, match="following it takes"):
        GrammarCompiler(vocabulary, GrammarLimits(timeout_s=60)).compile_now(grammar.regex("a" * 200_000))


async def test_a_slow_grammar_keeps_no_thread_of_the_event_loop(held: Callable[..., Held]) -> None:
    compiler = held()
    task = asyncio.ensure_future(compiler.compile(JSON))
    while not compiler.started:
        await asyncio.sleep(0)
    # The compilation is under way and cannot end before this coroutine says so: the loop runs beside it.
    assert not task.done()
    compiler.gate.set()
    assert await task


async def test_who_waits_only_for_others_may_try_again(held: Callable[..., Held]) -> None:
    compiler = held(limits=GrammarLimits(timeout_s=0.05))
    slow = [asyncio.ensure_future(compiler.compile(grammar.regex("x" * (i + 1)))) for i in range(PROCESSES)]
    while len(compiler.started) < PROCESSES:
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await compiler.compile(JSON)
    compiler._limits = GrammarLimits()  # the time that is short is that of waiting
    compiler.gate.set()
    assert all(await asyncio.gather(*slow))
    assert await compiler.compile(JSON)


async def test_the_queue_is_bounded(held: Callable[..., Held]) -> None:
    compiler = held()
    tasks = [asyncio.ensure_future(compiler.compile(grammar.regex(f"x{i}"))) for i in range(MAX_UNFINISHED)]
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError):
        await compiler.compile(JSON)
    # One that is being compiled already costs nothing more.
    again = asyncio.ensure_future(compiler.compile(grammar.regex("x0")))
    compiler.gate.set()
    await asyncio.gather(*tasks, again)


async def test_a_client_that_goes_away_leaves_the_others_their_grammar(held: Callable[..., Held]) -> None:
    compiler = held()
    tasks = [asyncio.ensure_future(compiler.compile(JSON)) for _ in range(2)]
    while not compiler.started:
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    compiler.gate.set()
    assert await tasks[1]


async def test_only_so_many_outcomes_are_kept(held: Callable[..., Held]) -> None:
    compiler = held(kept=2)
    compiler.gate.set()
    for text in ("a", "b", "a", "c", "a", "b"):
        await compiler.compile(grammar.regex(text))
    assert compiler.started == ["a", "b", "c", "b"]


@pytest.mark.parametrize("compile_now", [False, True])
async def test_size(compile_now: bool) -> None:
    compiler = GrammarCompiler(vocabulary, GrammarLimits(max_bytes=10))
    for text in ("a" * 11, "é" * 6):
        with pytest.raises(RequestError, match=r"'regex' has more than 10 bytes \(server\.grammar_max_bytes\)"):
            if compile_now:
                compiler.compile_now(grammar.regex(text))
            else:
                await compiler.compile(grammar.regex(text))
    assert compiler.compile_now(grammar.regex("é" * 5))


def optional_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def doubled(levels: int, key: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
    for _ in range(levels):
        schema = {key: [schema, schema]}
    return schema


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


REFUSED = [
    (lambda: grammar.json_schema({"type": "objct"}), "objct"),
    (lambda: grammar.json_schema({"type": "object", "not": {}}), "not"),
    (lambda: grammar.json_schema({"$ref": "#/$defs/none"}), "none"),
    (lambda: grammar.json_schema({"type": "string", "pattern": "a(b"}), "cannot be compiled"),
    (lambda: grammar.json_schema({"oneOf": [{"minimum": 1}, {"maximum": 5}]}), "oneOf"),
    (lambda: grammar.json_schema(optional_properties(1000)), "items"),
    (lambda: grammar.json_schema(doubled(14, "anyOf")), "too large|cannot be compiled|more than"),
    (lambda: grammar.json_schema({"$ref": "https://example.org/other.json"}), "cannot be compiled"),
    (lambda: grammar.regex("(?=a)b"), "look-around"),
    (lambda: grammar.regex(r"(a)\1"), "backreference"),
    (lambda: grammar.regex("(" * 5000 + "a" + ")" * 5000), "cannot be compiled"),
    (lambda: grammar.regex("a{1000000000}"), "too many"),
    (lambda: grammar.ebnf("root ::= nothing"), "cannot be compiled"),
    (lambda: grammar.ebnf("root ::= root"), "cannot be compiled"),
    (lambda: grammar.lark('start: "a" @other'), "cannot be compiled"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
async def test_what_cannot_be_compiled_is_that_requests_error(make: Callable[[], GrammarSpec], message: str) -> None:
    compiler = GrammarCompiler(vocabulary, GrammarLimits(timeout_s=30, max_bytes=1 << 20))
    for _ in range(2):  # the second answer is the remembered one
        with pytest.raises(RequestError, match=message) as caught:
            await compiler.compile(make())
        assert caught.value.http_status == 400 and caught.value.param and "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert await compiler.compile(JSON)


@pytest.mark.parametrize(
    "spec",
    [
        grammar.json_schema(optional_properties(400)),
        grammar.json_schema(doubled(10, "allOf")),
        grammar.json_schema(nested(55)),
        grammar.json_schema({"enum": [f"value {i}" for i in range(5000)]}),
        grammar.json_schema({"type": "string", "pattern": "(.*a){40}b(.|c){200}"}),
        grammar.json_schema({"type": "array", "items": {"type": "string"}, "maxItems": 100_000}),
        grammar.regex("((a{1,100}){1,100}){1,100}"),
        grammar.regex("(a|b)*a(a|b){25}"),
    ],
    ids=lambda spec: spec.text[:30],
)
async def test_large_grammars_that_are_well_within_reason(spec: GrammarSpec) -> None:
    assert await GrammarCompiler(vocabulary, GrammarLimits(timeout_s=30)).compile(spec)
