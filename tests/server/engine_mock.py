"""A scripted engine: token k of a request depends on its prompt and k alone, and some prompts make it misbehave."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from longturn.config import EngineConfig
from longturn.engine.clock import SystemClock
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import (
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestOutput,
    RequestTimes,
    RowResult,
    StepOutputs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    unpack_tokens,
)
from longturn.errors import ModelError, RequestError

# Text in a prompt that makes the engine misbehave; the byte service's token ids are the bytes.
REFUSE, BUG, RAISE, KILL = (list(text.encode()) for text in ("@refuse", "@bug", "@raise", "@kill"))
INFO = ExecutorInfo(rows=64, pages=100, page_bytes=1, max_context_tokens=4096, vocab_size=256, device="mock")


def token_at(prompt: list[int], seed: int, k: int) -> int:
    """The k-th token: a lower-case letter."""
    return 97 + (sum(prompt) + 7 * seed + 3 * k + k * k) % 26


def text_of(prompt: str, tokens: int, seed: int = 0) -> str:
    """What the byte service answers to `prompt`."""
    return "".join(chr(token_at(list(prompt.encode()), seed, k)) for k in range(tokens))


@dataclass
class Running:
    request: EngineRequest
    prompt: list[int]
    made: int = 0


@dataclass
class FakeExecutor:
    info: ExecutorInfo = INFO


class MockEngine:
    """Makes one token for each running request a step."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.executor: Any = FakeExecutor()
        self.step_s = step_s
        self.running: dict[str, Running] = {}
        self.ended: list[RequestOutput] = []
        self.seen: list[EngineRequest] = []
        self.count = EngineStats(pages_total=99)
        self.closed = False

    def add(self, request: EngineRequest) -> None:
        prompt = unpack_tokens(request.prompt)
        if _has(prompt, REFUSE):
            error = RequestError("too many requests wait", code="too_many_requests")
            error.http_status = 429
            raise error
        if _has(prompt, BUG):
            raise ZeroDivisionError("a bug")
        self.seen.append(request)
        self.running[request.request_id] = Running(request, prompt)
        self._count(prompt_tokens=len(prompt))

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.ended.append(RequestOutput(request_id, finish=FinishReason.ABORT))
            self._count(aborts=1)

    def has_work(self) -> bool:
        return bool(self.running or self.ended)

    def stats(self) -> EngineStats:
        return self.count._replace(running=len(self.running), pages_used=len(self.running))

    def step(self) -> StepOutputs | None:
        if not self.has_work():
            return None
        if self.running and self.step_s:
            time.sleep(self.step_s)
        outputs, self.ended = self.ended, []
        for request_id, run in list(self.running.items()):
            if _has(run.prompt, RAISE) and run.made == 2:
                raise RuntimeError("the executor failed twice")
            if _has(run.prompt, KILL) and run.made == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            sampling = run.request.sampling
            token = token_at(run.prompt, sampling.seed, run.made)
            run.made += 1
            logprobs: tuple[TokenLogprobs, ...] = ()
            if sampling.logprobs is not None:
                top = tuple(range(65, 65 + sampling.logprobs))
                logprobs = (TokenLogprobs(-0.5, top, tuple(-1.0 - i for i in range(len(top)))),)
            done = run.made >= sampling.max_tokens
            outputs.append(
                RequestOutput(
                    request_id,
                    (token,),
                    logprobs,
                    FinishReason.LENGTH if done else None,
                    times=RequestTimes(0, 1_000_000, 3_000_000, 9_000_000) if done else None,
                )
            )
            if done:
                del self.running[request_id]
        self._count(steps=1, generated_tokens=sum(len(o.token_ids) for o in outputs))
        return StepOutputs(tuple(outputs), self.stats())

    def close(self) -> None:
        self.closed = True

    def _count(self, **more: int) -> None:
        self.count = self.count._replace(**{k: getattr(self.count, k) + v for k, v in more.items()})


def _has(prompt: list[int], word: list[int]) -> bool:
    return bytes(word) in bytes(prompt)


def build(config: EngineConfig) -> MockEngine:
    """Factory for the engine process; the model path is the time of a step."""
    assert config.server.api_keys == (), "keys must not reach the engine process"
    print("a library prints to standard output")
    return MockEngine(float(config.model.path or 0.002))


def build_no_model(config: EngineConfig) -> MockEngine:
    raise ModelError("there is no model at /nowhere")


def build_exits(config: EngineConfig) -> MockEngine:
    print("the last words", flush=True)
    os._exit(7)


def build_slowly(config: EngineConfig) -> MockEngine:
    time.sleep(60)
    return MockEngine()


def build_and_end_slowly(config: EngineConfig) -> MockEngine:
    def end(number: int, frame: object) -> None:
        print("ending", flush=True)
        time.sleep(0.5)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    print("building", flush=True)
    return build_slowly(config)


class LetterExecutor:
    """The real engine's executor, without a model: samples a letter from the position."""

    info = dataclasses.replace(INFO, rows=16)

    def launch(self, plan: StepPlan) -> DoneStep:
        time.sleep(0.002)
        return DoneStep(
            StepResult(
                plan.step_id,
                tuple(RowResult(w.row, (97 + (w.start + w.count) % 26,)) for w in plan.work if w.samples),
            )
        )

    def close(self) -> None:
        pass


@dataclass
class DoneStep:
    finished: StepResult

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.finished


class ShownEngine(Engine):
    """The real engine."""

    @property
    def executor(self) -> LetterExecutor:
        return LetterExecutor()


def build_real(config: EngineConfig) -> Engine:
    """Factory for the real engine over `LetterExecutor`."""
    return ShownEngine(LetterExecutor(), config.scheduler, config.cache, SystemClock())
