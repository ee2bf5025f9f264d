"""Constrained output of the embedded model: whether it is valid, what it costs, and whom it keeps waiting.

    python -m benchmarks.structured_output [--schemas 300] [--at-once 8] [--only valid|cost|pace]

valid: random schemas at temperature 1, each answer that ended is checked with `jsonschema`. cost: time a token with and
without a grammar, in a batch of one. pace: the gaps between the tokens of a free stream, alone and while schemas that
compile slowly or not at all arrive one after the other. Engine and text side share one process here, and so one
interpreter lock: a server has two.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import jsonschema
from tests.grammars import random_document

from longturn.assemble import build_engine, build_frontend
from longturn.config import EngineConfig, SchedulerConfig
from longturn.engine.records import FinishReason, SamplingParams
from longturn.errors import RequestError
from longturn.frontend import grammar
from longturn.frontend.frontend import Frontend
from longturn.frontend.grammar import GrammarSpec
from longturn.frontend.inprocess_engine import InProcessEngine
from longturn.frontend.records import ChatPrompt, TextChunk, TextRequest

_numbers = itertools.count()


def chat(
    text: str, spec: GrammarSpec | None, *, max_tokens: int = 200, ignore_eos: bool = False, **sampling: Any
) -> TextRequest:
    prompt = ChatPrompt(({"role": "user", "content": text},))
    params = SamplingParams(max_tokens, **sampling)
    return TextRequest(f"b{next(_numbers)}", prompt, params, grammar=spec, ignore_eos=ignore_eos)


async def answer(frontend: Frontend, request: TextRequest) -> tuple[str, TextChunk, list[float]]:
    """The text, the last chunk, and when each chunk came."""
    parts, times = [], []
    chunk = TextChunk()
    async for chunk in frontend.generate(request):
        parts.append(chunk.text)
        times.append(time.perf_counter())
    return "".join(parts), chunk, times


async def valid(frontend: Frontend, schemas: int, at_once: int) -> None:
    """Random schemas, answered by the model."""
    gate = asyncio.Semaphore(at_once)
    counts = {"ended": 0, "cut by max_tokens": 0, "invalid": 0, "tokens": 0}

    async def one(seed: int) -> None:
        schema = random_document(random.Random(seed))
        spec = grammar.json_schema(schema, compact=seed % 4 == 0)
        async with gate:
            text, last, _ = await answer(frontend, chat(f"Give me JSON like {json.dumps(schema)}", spec, seed=seed))
        counts["tokens"] += last.usage.completion_tokens if last.usage else 0
        if last.finish is not FinishReason.STOP:
            counts["cut by max_tokens"] += 1
            return
        counts["ended"] += 1
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        except (jsonschema.ValidationError, ValueError) as error:
            counts["invalid"] += 1
            print(f"INVALID seed {seed}: {text!r} ({error})")

    begin = time.perf_counter()
    await asyncio.gather(*(one(seed) for seed in range(schemas)))
    print(f"valid: {schemas} schemas, {counts}, {time.perf_counter() - begin:.0f} s")


async def cost(frontend: Frontend) -> None:
    """Milliseconds a token, sampled at temperature 1 with and without a grammar."""
    specs = {"free": None, "json object": grammar.json_object(), "regex": grammar.regex(r"(?s:.*)")}
    for name, spec in {**specs, "free again": None}.items():
        await answer(frontend, chat("Write a long story.", spec, max_tokens=4))
        gaps: list[float] = []
        for seed in range(3):
            _, _, times = await answer(frontend, chat("Write a long story.", spec, seed=seed, ignore_eos=True))
            gaps += [b - a for a, b in itertools.pairwise(times)]
        print(f"cost: {name}: median {statistics.median(gaps) * 1e3:.2f} ms a token over {len(gaps)} tokens")


def hostile() -> list[GrammarSpec]:
    """Schemas that take long, or are refused late."""
    found = []
    for i in range(8):
        wide = {"type": "object", "properties": {f"p{i}-{j}": {"type": "string"} for j in range(900 + i)}}
        found.append(grammar.json_schema(wide))
        ors: dict[str, Any] = {"anyOf": [{"type": "object", "properties": {f"q{i}-{j}": {}}} for j in range(4)]}
        for _ in range(12):
            ors = {"allOf": [ors, ors]}
        found.append(GrammarSpec("json_schema", json.dumps(ors)))
        found.append(grammar.regex(f"a{{{10**9 + i}}}"))
        found.append(grammar.json_schema({"enum": [f"value-{i}-{j}" for j in range(8000)]}))
    return found


async def pace(frontend: Frontend) -> None:
    """Gaps of a free stream, alone and beside hostile schemas."""
    story = chat("Count to a thousand.", None, ignore_eos=True, temperature=0.0, max_tokens=400)
    await answer(frontend, chat("x", grammar.json_object(), max_tokens=2))

    async def attack() -> tuple[int, int, float]:
        refused, answered, slowest = 0, 0, 0.0
        for spec in hostile():
            begin = time.perf_counter()
            try:
                await answer(frontend, chat("x", spec, max_tokens=1))
                answered += 1
            except RequestError:
                refused += 1
            slowest = max(slowest, time.perf_counter() - begin)
        return refused, answered, slowest

    for name, work in (("alone", None), ("beside hostile schemas", attack)):
        attacker = None if work is None else asyncio.create_task(work())
        _, _, times = await answer(frontend, replace(story, request_id=name))
        gaps = sorted(b - a for a, b in itertools.pairwise(times))
        at = [statistics.median(gaps), gaps[int(len(gaps) * 0.99)], gaps[-1]]
        print("pace: {}: median {:.1f}, p99 {:.1f}, most {:.1f} ms".format(name, *(gap * 1e3 for gap in at)))
        if attacker is not None:
            refused, answered, slowest = await attacker
            print(f"pace: {refused} hostile ones refused, {answered} answered, the slowest after {slowest:.2f} s")


async def main() -> None:
    """Everything, or what `--only` names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--only", choices=("valid", "cost", "pace"))
    options = parser.parse_args()
    config = EngineConfig(scheduler=SchedulerConfig(max_running=16))
    engine = InProcessEngine(build_engine(config))
    frontend = build_frontend(config, engine)
    try:
        if options.only in (None, "cost"):
            await cost(frontend)
        if options.only in (None, "pace"):
            await pace(frontend)
        if options.only in (None, "valid"):
            await valid(frontend, options.schemas, options.at_once)
    finally:
        engine.close()


if __name__ == "__main__":
    asyncio.run(main())
